"""The coordinator: hands out episodes, gathers them in groups, feeds the trainer, publishes its weights.

It owns the run: it starts the other processes, watches them, and ends with the first cause of a failure. Everything
happens on one event loop: `_receive` (a message came), `_pump` (what can be done now is done) and `_watch` (what is
overdue is dealt with). Its time, its wire and its disk are its surroundings, which a simulation replaces.
"""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from agentgym.config import Config
from agentgym.coordinator.dispatcher import Dispatcher
from agentgym.coordinator.evaluations import Evaluations
from agentgym.coordinator.groups import Group
from agentgym.coordinator.launch import Places
from agentgym.coordinator.peers import Peers, ServerPeer, TrainerPeer, WorkerPeer
from agentgym.coordinator.scoring import GroupScorer, Scored
from agentgym.coordinator.serving import Serving
from agentgym.coordinator.status import run_numbers, waiting_for
from agentgym.coordinator.store import StoredGroup
from agentgym.coordinator.supervisor import Supervisor, TrainerLost
from agentgym.coordinator.surroundings import OF_A_RUN, Report, Surroundings
from agentgym.coordinator.training import Training
from agentgym.errors import IntegrityError, RunError, WireError
from agentgym.log import worth_saying
from agentgym.messages import AgentId
from agentgym.protocol import (
    Ack,
    BatchRequest,
    Cancel,
    Drain,
    EpisodeDone,
    Error,
    Header,
    Heartbeat,
    Hello,
    Leaving,
    Loaded,
    Ready,
    StepDone,
    Welcome,
)
from agentgym.routes import decode_without_routes
from agentgym.weights import remove_older
from agentgym.wire import Arrays, Packet

_logger = logging.getLogger(__name__)


class Coordinator:
    """One run, from its first lease to its last step."""

    def __init__(
        self,
        config: Config,
        places: Places,
        *,
        supervisor: Supervisor,
        reporter: Report,
        agents: Sequence[AgentId] = (),
        first_step: int = 1,
        state: dict[str, object] | None = None,
        surroundings: Surroundings = OF_A_RUN,
    ) -> None:
        """Prepare the run in an environment of these `agents`, empty where it does not name them.

        `first_step` and `state` come from a checkpoint when the run is resumed.
        """
        self._config = config
        self._places = places
        self._supervisor = supervisor
        self._reporter = reporter
        self._clock = surroundings.clock
        self._bind = surroundings.bind
        self._watch_seconds = surroundings.watch_seconds
        self._store = surroundings.open_store(places.run, self._fail)
        self._dispatcher = Dispatcher(
            config, state, agents=agents, snapshots=places.snapshots, store=self._store
        )
        self._evaluations = Evaluations(config, places.run, done=reporter.evaluated, failed=reporter.say)
        self._scorer = GroupScorer(config, done=self._scored)
        self._peers = Peers()
        self._serving = Serving(config, self._peers, self._send)
        self._training = Training(
            config,
            dispatcher=self._dispatcher,
            store=self._store,
            reporter=reporter,
            send=self._send,
            done=first_step - 1,
            state=state,
        )
        self._published: int | None = None
        self._progress = self._clock()
        self._noticed = -1.0
        """The moment of progress since which it was said that the run waits."""
        self._hurried = self._pump_due = False
        self._next_heartbeat = 0.0
        self._failure: RunError | None = None

    def stop_soon(self) -> None:
        """End after one more step, with a checkpoint."""
        self._hurried = True
        self._reporter.say(f"stopping after step {self._training.stop_soon()}; once more to stop at once")

    async def run(self) -> None:
        """Run to the last step.

        Raises:
            RunError: the run cannot go on; the message names the first cause.
        """
        self._channel = self._bind(self._config, self._places.coordinator, self._receive, self._garbage)
        self._channel.counts.update(dropped=0, repeated=0, damaged=0, inflated=0)
        # A handler that fails would be logged and forgotten; it must end the run.
        asyncio.get_running_loop().set_exception_handler(self._unexpected)
        patience = 0.0  # with evaluations, once the last step is done
        try:
            while not self._training.over:
                if self._failure is not None:
                    raise self._failure
                self._dispatcher.pools.check()
                try:
                    self._watch()
                except TrainerLost:
                    await asyncio.sleep(self._watch_seconds)  # what it said at last may be on its way
                    if self._failure is not None:
                        raise self._failure from None
                    raise
                self._pump()
                await asyncio.sleep(self._watch_seconds)
            await self._dispatcher.pools.written()
            patience = 0.0 if self._hurried else self._config.coordinator.step_timeout
        finally:
            for identity in self._peers.everyone:
                self._channel.send(Drain(), to=identity)
            self._channel.close()
            self._store.close()
            await self._evaluations.close(patience, self._clock)

    def _unexpected(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        _logger.error("%s", context.get("message"), exc_info=error)
        self._fail(RunError(f"the coordinator failed: {error or context.get('message')}"))

    # ---------------------------------------------------------------- messages

    def _receive(self, packet: Packet) -> None:
        now = self._clock()
        name = self._peers.heard(packet.sender, now)
        try:
            if isinstance(packet.header, Hello):
                self._hello(packet.sender, packet.header, now)
            elif name is None and isinstance(packet.header, Heartbeat):
                # It loads its model, and must hear that the coordinator lives.
                self._channel.send(Heartbeat(), to=packet.sender)
            elif name is None:
                raise WireError(f"{packet.kind!r} before hello")
            else:
                self._supervisor.heard(name)
                self._known(name, packet, now)
            if not isinstance(packet.header, Heartbeat):  # signs of life are many, and change nothing
                self._pump_soon()
        except WireError as error:
            self._garbage(packet.sender, error)
        except RunError as error:
            self._fail(error)

    def _known(self, name: str, packet: Packet, now: float) -> None:
        sender, header = packet.sender, packet.header
        match header:
            case EpisodeDone() if sender in self._peers.workers:
                try:
                    self._episode(sender, header, packet, now)
                finally:
                    self._credit(sender, 1)
            case Heartbeat():
                self._supervisor.heard(name, header.stats)
                self._peers.note(sender, header.stats)
            case Ready() if sender in self._peers.workers:
                self._credit(sender, header.credits)
            case Leaving() if sender in self._peers.workers:
                self._peers.workers[sender].leave()
                self._channel.send(Leaving(), to=sender)
            case Loaded() if sender in self._peers.servers:
                self._peers.servers[sender].has_loaded(header.version)
                self._reporter.loaded(header.seconds)
                self._update_servers()
            case BatchRequest() if (trainer := self._peers.trainer(sender)) is not None:
                self._training.asked(trainer.policy, header.step)
                self._progress = now
            case StepDone() if (trainer := self._peers.trainer(sender)) is not None:
                self._step_done(trainer.policy, header, now)
            case Error():
                _logger.error("%s: %s", name, header.text)
                server = self._peers.servers.get(sender)
                if header.fatal or (server is not None and server.loading is not None):
                    raise RunError(f"{name}: {header.text}")
            case _:
                raise WireError(f"{packet.kind!r} from {name} is not a message for the coordinator")

    def _credit(self, sender: bytes, credits: int) -> None:
        held = self._dispatcher.leases.held(sender)
        self._channel.counts["inflated"] += not self._peers.workers[sender].credit(credits, held)

    def _episode(self, sender: bytes, header: EpisodeDone, packet: Packet, now: float) -> None:
        acknowledge = partial(self._send, Ack(lease_id=header.lease_id), sender)
        if self._dispatcher.leases.late(header.lease_id, sender):
            acknowledge()
            return
        try:
            episode = decode_without_routes(header, packet.arrays, self._store.folder)
            episode.verify(routes=False)  # those are checked where they are used
        except (WireError, IntegrityError) as error:
            self._channel.counts["damaged"] += 1
            self._channel.send(Cancel(lease_id=header.lease_id), to=sender)
            self._dispatcher.unreadable(header.lease_id, sender, str(error))
            raise WireError(str(error)) from error
        group = self._dispatcher.take_in(header.lease_id, sender, episode, now)
        if group is None:
            acknowledge()
        else:
            self._store.add(StoredGroup(group.group_id, group.task_index, group.size), packet, acknowledge)

    def _send(self, header: Header, to: bytes, arrays: Arrays | None = None) -> None:
        if not self._channel.closed:  # the disk may be slower than the end of the run
            self._channel.send(header, arrays, to=to)

    def _fail(self, error: RunError) -> None:
        self._failure = self._failure or error

    def _scored(self, group: Group, scored: Scored) -> None:
        try:
            self._dispatcher.scored(group, scored)
            self._pump_soon()
        except RunError as error:
            self._fail(error)

    def _hello(self, sender: bytes, hello: Hello, now: float) -> None:
        if self._peers.heard(sender, now) is not None:
            self._channel.counts["repeated"] += 1  # nothing changes; it may have missed the answer
            self._channel.send(Welcome(episodes=str(self._store.folder)), to=sender)
            return
        refusal, name = self._serving.refusal(hello), hello.name
        mine = self._supervisor.owns(name, hello.pid)
        if hello.role != "worker" and name in self._supervisor.children and not mine:
            refusal = f"another process of this run is called {name}; choose another --name"
        if refusal:
            self._channel.send(Error(text=refusal, fatal=True), to=sender)
            raise WireError(refusal)
        if hello.role == "worker" and not mine:
            name = self._peers.free_name(name, sender, reserved=self._supervisor.children)
        self._supervisor.heard(name)
        self._channel.send(Welcome(episodes=str(self._store.folder)), to=sender)
        match hello.role:
            case "worker":
                self._peers.workers[sender] = WorkerPeer(name, sender, now, slots=self._config.workers.slots)
                self._serving.tell([sender])
            case "server":
                self._lose(hello.name)
                self._peers.servers[sender] = ServerPeer(
                    hello.name, hello.policy, sender, now, hello.address, hello.max_model_len, hello.version
                )
            case "trainer":
                self._peers.trainers[hello.policy] = TrainerPeer(name, hello.policy, sender)
                self._offer(hello.policy, hello.version, hello.weights)
        _logger.info("%s (pid %d) is there, version %d", name, hello.pid, hello.version)
        self._update_servers()

    def _garbage(self, sender: bytes, error: WireError) -> None:
        self._channel.counts["dropped"] += 1
        if worth_saying(count := self._channel.counts["dropped"]):
            _logger.warning("dropped a message from %s, the %d. of the run: %s", sender.hex(), count, error)
        self._channel.send(Error(text=str(error)), to=sender)

    # ---------------------------------------------------------------- weights

    def _offer(self, policy: str, version: int, path: str) -> None:
        """Offer a trainer's weights to the servers, and take the snapshots of them that are due."""
        self._serving.offer(policy, version, path)
        if version >= self._config.warmup.steps:
            self._dispatcher.pools.take_due(policy, version, path)

    def _update_servers(self) -> None:
        """Ask servers that are behind to load, note what is published, tell workers whom to ask."""
        pools = self._dispatcher.pools.by_name.values()
        for pool in pools:
            if pool.version is not None:
                self._serving.offer(pool.name, pool.version, str(pool.path(pool.version)))
        self._serving.update()
        for pool in pools:
            pool.loaded = self._peers.published(pool.name)
        versions = [self._serving.published.get(policy, -1) for policy in self._config.policies_to_train]
        published = min(versions)
        if published >= 0 and published != self._published:
            self._published, self._progress = published, self._clock()
            for policy in self._config.policies_to_train:
                remove_older(self._config.place_of(policy, self._places.exchange), published)
            self._training.published(published)

    # ---------------------------------------------------------------- what can be done now

    def _pump_soon(self) -> None:
        """Pump once for all the messages that have come."""
        if not self._pump_due:
            self._pump_due = True
            asyncio.get_running_loop().call_soon(self._pump_now)

    def _pump_now(self) -> None:
        self._pump_due = False
        try:
            self._pump()
        except RunError as error:
            self._fail(error)

    def _pump(self) -> None:
        now = self._clock()
        step = self._training.next
        if step is not None and (step.warmup or self._serving.models_are_there):
            self._training.open_groups(step)
            if self._dispatcher.pools.by_name:
                self._update_servers()  # one may have gone on to another snapshot
            self._issue(now)
        self._store.set_aside(self._dispatcher.take_dropped())
        for group in self._dispatcher.groups.to_score():
            self._scorer.start(group)
        if self._training.feed(self._peers.trainers):
            self._progress = now

    def _issue(self, now: float) -> None:
        while self._dispatcher.may_issue and (worker := self._peers.freest_worker()) is not None:
            lease = self._dispatcher.issue(worker.identity, now)
            assert lease is not None
            worker.credits -= 1
            self._channel.send(lease, to=worker.identity)

    def _step_done(self, policy: str, header: StepDone, now: float) -> None:
        work = self._training.finished(policy, header)
        self._progress = now
        if header.weights:
            self._offer(policy, header.step, header.weights)
        if work is None:  # another trainer is still at it
            self._update_servers()
            return
        if header.checkpoint:
            self._supervisor.progress()
            learned = work.step.number - self._config.warmup.steps
            if self._config.evaluation.due(learned):
                models = {name: Path(result.checkpoint) / "model" for name, result in work.results.items()}
                self._evaluations.start(learned, models)
        numbers = {
            **({} if self._published is None else {"policy/version": float(self._published)}),
            **{f"system/wire/{name}": float(count) for name, count in self._channel.counts.items()},
            **run_numbers(self._dispatcher, self._supervisor),
        }
        self._reporter.step_done(work.step, work.parts, work.results, numbers)
        self._update_servers()

    # ---------------------------------------------------------------- what is overdue

    def _watch(self) -> None:
        now = self._clock()
        limits = self._config.coordinator
        for child, described in self._supervisor.restart_dead():
            held = self._lose(child.name)
            again = f"; its {held} episodes are played again" if held else ""
            self._reporter.say(f"{described}; restarted as pid {child.pid}{again}")
        for name in self._peers.silent(now - limits.heartbeat_timeout):
            if name not in self._supervisor.children:
                held, silence = self._lose(name), f"{limits.heartbeat_timeout:g} s"
                self._reporter.say(f"{name} was silent for {silence}; its {held} episodes are played again")
        for lease_id, identity in self._dispatcher.watch(now):
            _logger.warning("lease %d at %s is overdue or no longer wanted", lease_id, identity.hex())
            self._channel.send(Cancel(lease_id=lease_id), to=identity)
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + limits.heartbeat_interval
            self._dispatcher.adapt(self._peers.servers.values())
            for identity in self._peers.everyone:
                self._channel.send(Heartbeat(), to=identity)
        waited = now - self._progress
        if waited > limits.notice_after and self._noticed != self._progress:
            self._noticed = self._progress
            self._reporter.say(f"waiting for {waited:.0f} s: {self._waiting_for()}")
        if waited > limits.step_timeout:
            error = RunError(f"no progress for {limits.step_timeout:g} s: {self._waiting_for()}")
            error.add_note(self._supervisor.last_words("trainer"))
            raise error

    def _waiting_for(self) -> str:
        step, policies = self._training.number, self._training.waiting_for
        return waiting_for(self._peers, self._dispatcher, self._supervisor, step=step, policies=policies)

    def _lose(self, name: str) -> int:
        """Forget a peer and queue its episodes again; return how many."""
        held = sum(self._dispatcher.worker_lost(identity) for identity in self._peers.forget(name))
        self._update_servers()
        return held
