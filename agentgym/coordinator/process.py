"""The coordinator: hands out episodes, gathers them in groups, feeds the trainer, publishes its weights.

It owns the run: it starts the other processes, watches them, and ends with the first cause of a failure. Everything
happens on one event loop: `_receive` (a message came), `_pump` (what can be done now is done) and `_watch` (what is
overdue is dealt with).

A step's groups count against the capacity until its weights are published, so that a token is never further behind
than `rollout.max_staleness` when it is trained; `assemble` masks what is older all the same.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import zmq

from agentgym.config import Config
from agentgym.coordinator.assemble import Assembled, assemble, batch_of
from agentgym.coordinator.dispatcher import Dispatcher
from agentgym.coordinator.groups import Group
from agentgym.coordinator.launch import Places
from agentgym.coordinator.peers import Peers, ServerPeer, WorkerPeer
from agentgym.coordinator.report import Reporter
from agentgym.coordinator.schedule import Schedule, Step
from agentgym.coordinator.scoring import GroupScorer, Scored
from agentgym.coordinator.serving import Serving
from agentgym.coordinator.status import nobody_answered, run_numbers, waiting_for
from agentgym.coordinator.store import EpisodeStore, StoredGroup
from agentgym.coordinator.supervisor import Supervisor
from agentgym.episode_codec import decode_episode
from agentgym.errors import RunError, WireError
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
from agentgym.weights import remove_older
from agentgym.wire import Arrays, Channel, Packet, open_socket, refuse_public_bind

WATCH_SECONDS = 0.25

_logger = logging.getLogger(__name__)


class Coordinator:
    """One run, from its first lease to its last step."""

    def __init__(
        self,
        config: Config,
        places: Places,
        *,
        supervisor: Supervisor,
        reporter: Reporter,
        agents: Sequence[AgentId] = (),
        first_step: int = 1,
        state: dict[str, object] | None = None,
    ) -> None:
        """Prepare the run in an environment of these `agents`, empty where it does not name them.

        `first_step` and `state` come from a checkpoint when the run is resumed.
        """
        self._config = config
        self._places = places
        self._supervisor = supervisor
        self._reporter = reporter
        self._schedule = Schedule(config)
        self._store = EpisodeStore(places.run, failed=self._fail)
        self._dispatcher = Dispatcher(
            config, state, agents=agents, snapshots=places.snapshots, store=self._store
        )
        self._scorer = GroupScorer(config, done=self._scored)
        self._peers = Peers()
        self._serving = Serving(config, self._peers, self._send)
        self._done = first_step - 1
        self._last_step = self._schedule.last_step
        self._training: tuple[Step, Assembled] | None = None
        self._groups_held = 0
        """Groups in training, or trained while their weights are not yet published."""
        self._trainer_waits = False
        self._published: int | None = None
        self._progress = time.monotonic()
        self._next_heartbeat = 0.0
        self._garbage_count = 0
        self._failure: RunError | None = None

    def stop_soon(self) -> None:
        """End after one more step, with a checkpoint."""
        started = self._training[0].number if self._training else self._done
        self._last_step = min(self._last_step, started + 1)
        self._reporter.say(f"stopping after step {self._last_step}; once more to stop at once")

    async def run(self) -> None:
        """Run to the last step.

        Raises:
            RunError: the run cannot go on; the message names the first cause.
        """
        refuse_public_bind(self._places.coordinator)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = open_socket(context, zmq.ROUTER)
        socket.bind(self._places.coordinator)
        self._channel = Channel(socket, self._receive, self._garbage)
        # A handler that fails would be logged and forgotten; it must end the run.
        asyncio.get_running_loop().set_exception_handler(self._unexpected)
        try:
            while self._done < self._last_step:
                if self._failure is not None:
                    raise self._failure
                self._dispatcher.pools.check()
                self._watch()
                self._pump()
                await asyncio.sleep(WATCH_SECONDS)
            await self._dispatcher.pools.written()
        finally:
            for identity in self._peers.everyone:
                self._channel.send(Drain(), to=identity)
            self._channel.close()
            self._store.close()
            context.destroy()  # waits for the drains to leave, as long as the sockets linger

    def _unexpected(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        _logger.error("%s", context.get("message"), exc_info=error)
        self._fail(RunError(f"the coordinator failed: {error or context.get('message')}"))

    # ---------------------------------------------------------------- messages

    def _receive(self, packet: Packet) -> None:
        now = time.monotonic()
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
            self._pump()
        except WireError as error:
            self._garbage(packet.sender, error)
        except RunError as error:
            self._fail(error)

    def _known(self, name: str, packet: Packet, now: float) -> None:
        sender, header = packet.sender, packet.header
        match header:
            case Heartbeat():
                self._supervisor.heard(name, header.stats)
            case Ready() if sender in self._peers.workers:
                self._peers.workers[sender].credits += header.credits
            case Leaving() if sender in self._peers.workers:
                self._peers.workers[sender].credits = 0
                self._channel.send(Leaving(), to=sender)
            case EpisodeDone() if sender in self._peers.workers:
                self._episode(sender, header, packet, now)
            case Loaded() if sender in self._peers.servers:
                loaded = self._peers.servers[sender]
                loaded.version, loaded.loading = header.version, None
                self._reporter.loaded(header.seconds)
                self._update_servers()
            case BatchRequest() if sender == self._peers.trainer:
                if header.step != self._done + 1:
                    raise RunError(f"the trainer asks for step {header.step}; step {self._done + 1} is next")
                self._trainer_waits, self._progress = True, now
            case StepDone() if sender == self._peers.trainer:
                self._step_done(header, now)
            case Error():
                _logger.error("%s: %s", name, header.text)
                server = self._peers.servers.get(sender)
                if header.fatal or (server is not None and server.loading is not None):
                    raise RunError(f"{name}: {header.text}")
            case _:
                raise WireError(f"{packet.kind!r} from {name} is not a message for the coordinator")

    def _episode(self, sender: bytes, header: EpisodeDone, packet: Packet, now: float) -> None:
        try:
            episode = decode_episode(header.episode, packet.arrays)
        except WireError as error:
            self._dispatcher.unreadable(header.lease_id, sender, str(error))
            raise
        group = self._dispatcher.take_in(header.lease_id, sender, episode, now)
        acknowledge = partial(self._send, Ack(lease_id=header.lease_id), sender)
        if group is None:
            acknowledge()
        else:
            stored = StoredGroup(group.group_id, group.task_index, group.size)
            self._store.add(header.lease_id, stored, header.episode, packet.arrays, acknowledge)

    def _send(self, header: Header, to: bytes, arrays: Arrays | None = None) -> None:
        if not self._channel.closed:  # the disk may be slower than the end of the run
            self._channel.send(header, arrays, to=to)

    def _fail(self, error: RunError) -> None:
        self._failure = self._failure or error

    def _scored(self, group: Group, scored: Scored) -> None:
        try:
            self._dispatcher.scored(group, scored)
            self._pump()
        except RunError as error:
            self._fail(error)

    def _hello(self, sender: bytes, hello: Hello, now: float) -> None:
        if refusal := self._serving.refusal(hello):
            self._channel.send(Error(text=refusal, fatal=True), to=sender)
            raise WireError(refusal)
        name = hello.name
        if hello.role == "worker" and not self._supervisor.owns(name, hello.pid):
            name = self._peers.free_name(name, sender, reserved=self._supervisor.children)
        self._supervisor.heard(name)
        self._channel.send(Welcome(), to=sender)
        match hello.role:
            case "worker":
                self._peers.workers[sender] = WorkerPeer(name, sender, now)
                self._serving.tell([sender])
            case "server":
                self._lose(hello.name)
                self._peers.servers[sender] = ServerPeer(
                    hello.name, hello.policy, sender, now, hello.address, hello.max_model_len, hello.version
                )
            case "trainer":
                self._peers.trainer = sender
                self._offer(hello.version, hello.weights)
        _logger.info("%s (pid %d) is there, version %d", name, hello.pid, hello.version)
        self._update_servers()

    def _garbage(self, sender: bytes, error: WireError) -> None:
        self._garbage_count += 1
        _logger.warning("dropped a message from %s: %s", sender.hex(), error)
        self._channel.send(Error(text=str(error)), to=sender)

    # ---------------------------------------------------------------- weights

    def _offer(self, version: int, path: str) -> None:
        """Offer the trainer's weights to the servers, and take the snapshots of them that are due."""
        self._serving.offer(self._config.learner, version, path)
        if version >= self._schedule.warmup_steps:
            self._dispatcher.pools.take_due(version, path)

    def _update_servers(self) -> None:
        """Ask servers that are behind to load, note what is published, tell workers whom to ask."""
        pools = self._dispatcher.pools.by_name.values()
        for pool in pools:
            if pool.version is not None:
                self._serving.offer(pool.name, pool.version, str(pool.path(pool.version)))
        self._serving.update()
        for pool in pools:
            pool.loaded = self._peers.published(pool.name)
        published = self._serving.published.get(self._config.learner)
        if published is not None and published != self._published:
            self._published, self._progress = published, time.monotonic()
            remove_older(self._places.exchange, published)
            if self._training is None or self._training[0].number - 1 == published:
                self._groups_held = self._training[0].groups if self._training else 0

    # ---------------------------------------------------------------- what can be done now

    def _pump(self) -> None:
        now = time.monotonic()
        number = (self._training[0].number if self._training else self._done) + 1
        if number <= self._last_step:
            step = self._schedule.step(number)
            if step.warmup or self._serving.models_are_there:
                left = min(self._schedule.phase_end(number), self._last_step) - number + 1
                if step.warmup or self._schedule.warmup_steps < number - 1 or self._groups_held == 0:
                    self._dispatcher.top_up(step, steps_left=left, in_training=self._groups_held)
                    self._update_servers()  # pools may have gone on to another snapshot
                self._issue(now)
        self._store.drop(self._dispatcher.groups.take_dropped())
        for group in self._dispatcher.groups.to_score():
            self._scorer.start(group)
        if self._trainer_waits and self._training is None and self._done < self._last_step:
            self._send_batch(self._schedule.step(self._done + 1), now)

    def _issue(self, now: float) -> None:
        while (worker := self._peers.freest_worker()) is not None:
            lease = self._dispatcher.issue(worker.identity, now)
            if lease is None:
                return
            worker.credits -= 1
            self._channel.send(lease, to=worker.identity)

    def _send_batch(self, step: Step, now: float) -> None:
        groups = self._dispatcher.take(step)
        if groups is None:
            return
        config = self._config
        assembled = assemble(
            groups,
            algorithm=config.algorithm,
            warmup=step.warmup,
            version=self._done,
            max_staleness=config.rollout.max_staleness,
        )
        if not assembled.samples:
            self._store.drop([group.group_id for group in groups])
            self._nothing_to_learn(step, assembled)
            return
        header, arrays = batch_of(
            assembled,
            step,
            microbatch_tokens=config.trainer.tokens_per_microbatch,
            checkpoint=self._checkpoint_due(step),
            state=self._dispatcher.state(),
        )
        assert self._peers.trainer is not None
        send = partial(self._send, header, self._peers.trainer, arrays)
        self._store.consume(step.number, [group.group_id for group in groups], send)
        self._training, self._trainer_waits = (step, assembled), False
        self._groups_held += len(groups)
        self._progress = now
        self._reporter.batch_sent(step, assembled, self._dispatcher.ratings.tags(assembled.episodes))

    def _nothing_to_learn(self, step: Step, assembled: Assembled) -> None:
        """Let other groups be played in place of stale ones; end a run whose agents never say a word."""
        episodes = assembled.episodes
        if any(trajectory.trainable for episode in episodes for trajectory in episode.trajectories):
            self._reporter.say(
                f"all {len(episodes)} episodes of step {step.number} were too old; playing others"
            )
            return
        raise RunError(nobody_answered(step.number, episodes))

    def _checkpoint_due(self, step: Step) -> bool:
        learned = step.number - self._schedule.warmup_steps
        every = self._config.trainer.checkpoint_every
        # What a checkpoint covers can be removed from the disk.
        full = self._store.bytes_used > self._config.coordinator.max_store_gib * 2**30 / 2
        return full or step.number == self._last_step or (learned >= 0 and learned % every == 0)

    def _step_done(self, header: StepDone, now: float) -> None:
        if self._training is None or header.step != self._training[0].number:
            raise RunError(f"the trainer finished step {header.step}, which it was not given")
        step, assembled = self._training
        self._training, self._done, self._progress = None, step.number, now
        if header.checkpoint:
            self._store.forget(step.number, keep=self._config.coordinator.keep_episodes)
        if header.weights:
            self._offer(step.number, header.weights)
        else:
            self._groups_held = 0
        numbers = {
            "policy/version": float(self._published or 0),
            "system/messages_dropped": float(self._garbage_count),
            **run_numbers(self._dispatcher, self._supervisor),
        }
        self._reporter.step_done(step, assembled, header, numbers)
        self._update_servers()

    # ---------------------------------------------------------------- what is overdue

    def _watch(self) -> None:
        now = time.monotonic()
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
            for identity in self._peers.everyone:
                self._channel.send(Heartbeat(), to=identity)
        if now - self._progress > limits.step_timeout:
            training = self._training[0].number if self._training else None
            who = waiting_for(self._peers, self._dispatcher, self._supervisor, training=training)
            raise RunError(f"no progress for {limits.step_timeout:g} s: {who}")

    def _lose(self, name: str) -> int:
        """Forget a peer and queue its episodes again; return how many."""
        held = sum(self._dispatcher.worker_lost(identity) for identity in self._peers.forget(name))
        self._update_servers()
        return held
