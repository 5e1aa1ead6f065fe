"""The environment worker: leases in, episodes out, many at once.

Every lease that arrives comes back exactly once as an episode, a failed one if need be, unless it is cancelled or
the worker dies. The coordinator acknowledges each; how many it has not yet is in the heartbeat.
"""

import asyncio
import logging
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from numpy.typing import NDArray

from agentgym.busy import CpuShare, forget_startup
from agentgym.config import Config
from agentgym.episode import turns_of
from agentgym.episode_codec import encode_episode
from agentgym.errors import AgentGymError, EnvError, RunError, WireError
from agentgym.keys import Keys, load_keys
from agentgym.lifeline import die_with_parent
from agentgym.log import setup_logging
from agentgym.memory import memory_gib
from agentgym.policy.client import PolicyClient
from agentgym.policy.template import ChatTokenizer
from agentgym.protocol import (
    EXIT_REPLACE,
    Ack,
    Cancel,
    Drain,
    EpisodeDone,
    Error,
    Heartbeat,
    Hello,
    Lease,
    Leaving,
    Ready,
    RoutesApart,
    Servers,
    Welcome,
)
from agentgym.registry import EnvSpec, spec
from agentgym.rewards import Rewards
from agentgym.routes import APART_BYTES, write_routes
from agentgym.wire import PROTOCOL_VERSION, Channel, Packet, open_context, open_socket
from agentgym.worker.pool import EnvPool, Host
from agentgym.worker.rollout import Rollout, unplayed
from agentgym.worker.seating import Seating, Served

_logger = logging.getLogger(__name__)


class Worker:
    """Plays the leases it is given, `workers.slots` at once."""

    def __init__(self, config: Config, *, name: str, coordinator: str, keys: Keys | None = None) -> None:
        """Prepare the worker; nothing is connected yet."""
        self._config = config
        self._name = name
        self._address = coordinator
        self._keys = keys
        self._spec: EnvSpec = spec(config.env.id)
        self._rewards = Rewards.of(config.env, self._spec)
        tokenizers = {model: ChatTokenizer(model) for model in {config.model, *config.served.values()}}
        self._tokenizers = {policy: tokenizers[model] for policy, model in config.served.items()}
        self._seating = Seating(
            config.env,
            self._spec,
            {name: config.policies[name] for name in {*config.mapped, *config.policies_to_train}},
            sampling=config.sampling,
            tokenizer=tokenizers[config.model],
            trained=config.policies_to_train,
        )
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._unacknowledged: set[int] = set()
        self._clients: dict[str, PolicyClient] = {}
        """By policy that is served."""
        self._channel: Channel | None = None
        self._episodes: Path | None = None
        """Where routes may be left."""
        self._welcomed = asyncio.Event()
        self._leaving = self._left = False
        """It wants to be replaced; the coordinator knows, and sends no more leases."""
        self._ended = asyncio.Event()
        self._refusal = ""
        self._heard = time.monotonic()
        self._played = self._turns = 0
        self._cpu = CpuShare()

    async def run(self) -> bool:
        """Work until the coordinator says drain, or until it is time to be replaced; return whether it is.

        Raises:
            RunError: the coordinator refuses this worker, or has fallen silent.
        """
        context = open_context(self._keys)
        # A lease has an episode, a `ready` and its share of the heartbeats.
        socket = open_socket(context, zmq.DEALER, queue=1000 + 4 * self._config.workers.slots)
        socket.connect(self._address)
        self._clients = {policy: PolicyClient(context=context) for policy in self._config.served}
        self._seating.served = {
            policy: Served(client, self._tokenizers[policy], self._config.server.max_model_len)
            for policy, client in self._clients.items()
        }
        self._pool = EnvPool(self._config.env, slots=self._config.workers.slots)
        self._channel = Channel(socket, self._receive, self._garbage)
        limits = self._config.coordinator
        try:
            await self._say_hello(self._channel)
            forget_startup()
            self._channel.send(Ready(credits=self._config.workers.slots))
            while not self._ended.is_set():
                self._channel.send(Heartbeat(stats=self._stats()))
                silence = time.monotonic() - self._heard
                if silence > limits.abandoned_after:
                    raise RunError(f"nothing heard from the coordinator for {silence:.0f} s")
                if self._pool.exhausted:
                    raise RunError(
                        "too many environment calls never returned; this worker has no thread left"
                    )
                if not self._leaving and (why := await self._worn_out()):
                    _logger.info("asking to be replaced: %s", why)
                    self._leaving = True
                    self._channel.send(Leaving())
                if self._left and not self._tasks and not self._unacknowledged:
                    return True
                try:
                    async with asyncio.timeout(limits.heartbeat_interval):
                        await self._ended.wait()
                except TimeoutError:
                    pass
            if self._refusal:
                raise RunError(f"the coordinator at {self._address} says: {self._refusal}")
            return False
        finally:
            await self._end()
            context.destroy()

    async def _say_hello(self, channel: Channel) -> None:
        """Wait for the coordinator's answer.

        Raises:
            RunError: there is none in time, or the coordinator has already hung up, as it does for want of a key.
        """
        limit = self._config.coordinator.start_timeout
        try:
            channel.send(Hello(role="worker", name=self._name, protocol=PROTOCOL_VERSION, pid=os.getpid()))
            async with asyncio.timeout(limit):
                await self._welcomed.wait()
        except (TimeoutError, WireError) as error:
            what = "hung up" if isinstance(error, WireError) else f"did not answer within {limit:g} s"
            hint = "is the key on its list?" if self._keys else "if it has keys, give --keys"
            raise RunError(f"the coordinator at {self._address} {what}; {hint}") from None

    async def _worn_out(self) -> str:
        """Return why this worker should be replaced, or nothing."""
        limits = self._config.workers
        if limits.max_episodes is not None and self._played >= limits.max_episodes:
            return f"it has played {self._played} episodes"
        if limits.max_memory_gib is not None:
            used = await asyncio.to_thread(memory_gib, os.getpid())
            if used > limits.max_memory_gib:
                return f"it and its environments use {used:.2f} GiB"
        return ""

    def _stats(self) -> dict[str, float]:
        return {
            "busy": self._cpu.read(),
            "episodes": float(len(self._tasks)),
            "unacknowledged": float(len(self._unacknowledged)),
            "turns": float(self._turns),
        }

    async def _end(self) -> None:
        """Stop the plays, which nobody wants any more, and close what is open."""
        assert self._channel is not None
        plays = list(self._tasks.values())
        for play in plays:
            play.cancel()
        await asyncio.gather(*plays, return_exceptions=True)
        await self._pool.close()
        self._channel.close()
        for client in self._clients.values():
            client.close()
        await self._seating.close()

    def _receive(self, packet: Packet) -> None:
        self._heard = time.monotonic()
        header = packet.header
        match header:
            case Welcome():
                # An ipc address is one of the coordinator's machine, whose folders are here, too.
                self._episodes = Path(header.episodes) if self._address.startswith("ipc://") else None
                self._welcomed.set()
            case Servers():
                for policy, client in self._clients.items():
                    client.set_servers(header.addresses.get(policy, []))
                    served = self._seating.served[policy]
                    served.max_model_len = header.max_model_len or served.max_model_len
            case Lease():
                self._tasks[header.lease_id] = asyncio.create_task(self._play(header))
            case Ack():
                self._unacknowledged.discard(header.lease_id)
            case Cancel():
                self._unacknowledged.discard(header.lease_id)
                if (task := self._tasks.get(header.lease_id)) is not None:
                    task.cancel()
            case Leaving():
                self._left = True
            case Drain():
                self._ended.set()
            case Heartbeat():
                pass
            case Error():
                _logger.error("the coordinator answered: %s", header.text)
                if header.fatal:
                    self._refusal = header.text
                    self._welcomed.set()  # nobody waits for what will not come
                    self._ended.set()
            case _:
                _logger.warning("unexpected %r message from the coordinator", packet.kind)

    def _garbage(self, _sender: bytes, error: WireError) -> None:
        _logger.warning("dropped a message: %s", error)

    async def _play(self, lease: Lease) -> None:
        assert self._channel is not None
        host: Host | None = None
        reusable = sent = False
        try:
            try:
                host = await self._pool.take()
            except EnvError as failure:
                episode = unplayed(lease, self._config.env.id, failure)
            else:
                rollout = Rollout(
                    lease,
                    host,
                    config=self._config.env,
                    make_seat=self._seating.seat,
                    rewards=self._rewards,
                )
                play = await rollout.play()
                episode, reusable = play.episode, play.reusable
            self._played += 1
            self._turns += turns_of(episode.trajectories)
            header, arrays = encode_episode(episode)
            apart = await self._leave_routes(lease.lease_id, arrays)
            self._unacknowledged.add(lease.lease_id)
            self._channel.send(EpisodeDone(lease_id=lease.lease_id, episode=header, apart=apart), arrays)
            sent = True
        except Exception as error:  # a lease must never be lost in silence, whatever is wrong here
            _logger.exception("lease %d could not be played", lease.lease_id)
            self._channel.send(Error(text=f"{type(error).__name__}: {error}", fatal=True))
        finally:
            self._tasks.pop(lease.lease_id, None)
            if host is not None:
                self._pool.give_back(host, reusable=reusable)
            if not sent and not self._leaving:
                self._channel.send(Ready(credits=1))

    async def _leave_routes(
        self, lease_id: int, arrays: dict[str, NDArray[Any] | None]
    ) -> RoutesApart | None:
        """Move large routes from the arrays to a file among the run's episodes, if it can be."""
        routes = arrays.get("routes")
        if self._episodes is None or routes is None or routes.nbytes < APART_BYTES:
            return None
        try:
            apart = await asyncio.to_thread(write_routes, self._episodes, lease_id, routes)
        except OSError as error:
            _logger.warning("the routes of lease %d are sent along: %s", lease_id, error)
            return None
        arrays["routes"] = None
        return apart


def main(
    config: Config, *, name: str, coordinator: str, parent_pid: int | None, keys: Path | None = None
) -> None:
    """Run a worker until it is told to end; the body of `agentgym worker`.

    `keys` is a folder of keys; by default the configuration's.
    """
    setup_logging(name)
    if parent_pid is not None:
        die_with_parent(parent_pid)
    # Environments that draw from the process-global generators at least start from a known state.
    random.seed(config.run.seed)
    np.random.seed(config.run.seed)
    try:
        known = load_keys(keys or config.coordinator.keys)
        replace = asyncio.run(Worker(config, name=name, coordinator=coordinator, keys=known).run())
        status = EXIT_REPLACE if replace else 0
    except AgentGymError as error:
        _logger.error("%s: %s", type(error).__name__, error)
        status = 1
    logging.shutdown()
    os._exit(status)  # threads that never returned must not keep the process
