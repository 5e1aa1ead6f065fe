"""The process that answers for a policy: vLLM behind a ROUTER socket (`agentgym serve`).

    worker      -> generate, abort, health           <- completion, healthy, error
    coordinator -> welcome, load_weights, drain      <- hello, heartbeat, loaded, error

Every request is answered exactly once: with a completion (an aborted one has finish_reason "abort"), or with
an error that says why. A message that cannot be read is answered with an error and counted; it never ends the
server. The server ends when it is drained, on SIGTERM, when its parent process dies, when vLLM's process dies, and
when that or the coordinator has been silent for `silence_timeout` seconds. Requests that vLLM's death leaves in hand
are not answered: their clients see the connection go and ask again, this server's successor or another one.
"""

import asyncio
import contextlib
import logging
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from agentgym.busy import BusyShare, large_imports
from agentgym.config import ServerConfig
from agentgym.door import Door
from agentgym.errors import AgentGymError, ModelError, PolicyError, RunError, WireError
from agentgym.keys import Keys
from agentgym.lifeline import die_with_parent
from agentgym.log import worth_saying
from agentgym.policy.client import Sampling
from agentgym.policy.link import CoordinatorLink
from agentgym.protocol import (
    Abort,
    Completion,
    Drain,
    Error,
    Generate,
    Health,
    Healthy,
    Heartbeat,
    Hello,
    Loaded,
    LoadWeights,
)
from agentgym.wire import PROTOCOL_VERSION, Arrays, Packet, open_context, refuse_public_bind

if TYPE_CHECKING:
    from agentgym.policy.engine import Engine

logger = logging.getLogger(__name__)

Key = tuple[bytes, bytes]
"""A request: the asker's identity and the request id."""


def prepare_environment(config: ServerConfig) -> None:
    """Set what vLLM and torch read from the environment when they are imported; call it before that."""
    os.environ["OMP_NUM_THREADS"] = str(config.threads)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # One function of the sampler would be compiled at the first request, for half a minute.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    for name in ("HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"):
        os.environ.setdefault(name, "1")


def run_server(
    *,
    model: Path,
    config: ServerConfig,
    bind: str,
    policy: str = "",
    coordinator: str | None = None,
    name: str = "server",
    parent_pid: int | None = None,
    keys: Keys | None = None,
    heartbeat_interval: float = 1.0,
    silence_timeout: float = 600.0,
) -> None:
    """Be the policy server process until it is told to end: the body of `agentgym serve`; see `serve`.

    Args:
        model: a Hugging Face folder.
        config: the `server` section.
        bind: where workers reach it, as in `agentgym.door.Door`.
        policy: the policy that it answers for.
        coordinator: the coordinator's address; None serves workers only.
        name: who it is in logs.
        parent_pid: end when this process is no longer the parent; None for servers started by hand.
        keys: of the run, if it has some.
        heartbeat_interval: seconds.
        silence_timeout: seconds without a sign of the coordinator, or of vLLM's own process, after which the server
            ends.
    """
    if parent_pid is not None:
        die_with_parent(parent_pid)
    prepare_environment(config)
    import uvloop

    try:
        uvloop.run(
            serve(
                model=model,
                config=config,
                bind=bind,
                policy=policy,
                coordinator=coordinator,
                name=name,
                keys=keys,
                heartbeat_interval=heartbeat_interval,
                silence_timeout=silence_timeout,
            )
        )
    except asyncio.CancelledError:  # by SIGTERM; whoever sent it reads that in the exit status
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)


async def serve(
    *,
    model: Path,
    config: ServerConfig,
    bind: str,
    policy: str = "",
    coordinator: str | None = None,
    name: str = "server",
    keys: Keys | None = None,
    heartbeat_interval: float = 1.0,
    silence_timeout: float = 600.0,
) -> None:
    """Start vLLM, answer requests, return when the server is drained.

    Raises:
        ConfigError: `bind` cannot be bound, or other machines reach it and there are no keys.
        ModelError: the model folder cannot be served.
        RunError: vLLM's process died, or it or the coordinator fell silent.
    """
    refuse_public_bind(bind, keyed=keys is not None)
    context = open_context(keys)
    link = None if coordinator is None else CoordinatorLink(coordinator, context)
    try:
        with large_imports():
            from agentgym.policy.engine import Engine
        engine = await Engine.start(model, config)
    except AgentGymError as error:
        if link is not None:
            link.tell(Error(text=str(error), fatal=True))
            link.close()
        context.destroy()  # after what was sent has left
        raise
    # From now on its memory is free again when this process has ended: the next server may need it.
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    server = PolicyServer(engine, bind, keys)
    logger.info("%s serves %s at %s", name, model, server.address)
    try:
        await _until_drained(server, link, name, policy, heartbeat_interval, silence_timeout)
    finally:
        server.close()
        if link is not None:
            link.close()
        engine.close()
        context.destroy()


class PolicyServer:
    """The ROUTER socket in front of an engine."""

    def __init__(self, engine: "Engine", bind: str, keys: Keys | None = None) -> None:
        """Bind and answer from now on."""
        self._engine = engine
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self.busy = BusyShare()
        self.generated = 0
        """Tokens since the start."""
        self.answered = 0
        """Requests answered with a completion since the start."""
        self.garbage = 0
        """Messages that could not be read."""
        self._kv_usage = 0.0
        self._measuring: asyncio.Task[None] | None = None
        self._channel = Door([bind], self._on_packet, self._on_garbage, keys=keys)
        (self.address,) = self._channel.addresses
        """Where workers reach it."""

    @property
    def engine(self) -> "Engine":
        """The engine behind the socket."""
        return self._engine

    @property
    def stats(self) -> dict[str, float]:
        """Numbers for the heartbeat; `busy` is the share of the time since the last call."""
        return {
            "busy": self.busy.read(),
            "running": float(len(self._tasks)),
            "kv_usage": self._kv_usage,
            "tokens": float(self.generated),
            "requests": float(self.answered),
            "garbage": float(self.garbage),
            **{f"wire/{name}": float(count) for name, count in self._channel.counts.items()},
            "version": float(self._engine.version),
        }

    def measure(self) -> bool:
        """Ask vLLM how full it is, for the next `stats`; return whether it has answered when it was asked before.

        It answers between two engine steps.
        """
        if self._measuring is not None and not self._measuring.done():
            return False
        self._measuring = asyncio.get_running_loop().create_task(self._measure())
        return True

    async def _measure(self) -> None:
        with contextlib.suppress(PolicyError):  # its death is noticed elsewhere
            self._kv_usage = await self._engine.kv_usage()

    async def drain(self) -> None:
        """Return when nothing is in hand any more."""
        while self._tasks:
            await asyncio.wait(list(self._tasks.values()))

    def close(self) -> None:
        """Stop all generations and close the socket."""
        for task in [*self._tasks.values(), *([self._measuring] if self._measuring else [])]:
            task.cancel()
        self._channel.close()

    def _on_packet(self, packet: Packet) -> None:
        key = (packet.sender, packet.request_id)
        match packet.header:
            case Generate() as header if key in self._tasks:
                self._answer(
                    key, Error(text=f"request id {packet.request_id!r} is in use: {header.kind} ignored")
                )
            case Generate() as header:
                if not self._tasks:
                    self.busy.start()
                task = asyncio.get_running_loop().create_task(self._generate(key, header, packet))
                self._tasks[key] = task
            case Abort():
                # A request that has just been answered, or was never made, has nothing to abort.
                if key in self._tasks:
                    # Not at once: a task that is cancelled before its first step would never answer.
                    asyncio.get_running_loop().call_soon(self._tasks[key].cancel)
            case Health():
                self._answer(
                    key,
                    Healthy(
                        version=self._engine.version,
                        running=len(self._tasks),
                        max_model_len=self._engine.max_model_len,
                    ),
                )
            case other:
                self.garbage += 1
                self._answer(key, Error(text=f"a policy server does not understand {other.kind!r} messages"))

    def _on_garbage(self, sender: bytes, error: WireError) -> None:
        self.garbage += 1
        if worth_saying(self.garbage):
            logger.warning("unreadable message %d: %s", self.garbage, error)
        self._answer((sender, b""), Error(text=str(error)))

    async def _generate(self, key: Key, header: Generate, packet: Packet) -> None:
        try:
            tokens = packet.arrays.get("tokens")
            if tokens is None or tokens.dtype != "int32" or tokens.ndim != 1:
                raise PolicyError("a generate request needs the prompt as one array `tokens`, int32 [length]")
            answer = await self._engine.generate(tokens, _sampling(header), header.routes_start)
        except asyncio.CancelledError:
            self._answer(key, Completion(finish_reason="abort", version_spans=[]))
            return
        except PolicyError as error:
            if not self._engine.dead:  # else the server ends, see above
                self._answer(key, Error(text=str(error)))
            return
        finally:
            del self._tasks[key]
            if not self._tasks:
                self.busy.stop()
        self.generated += len(answer.tokens)
        self.answered += 1
        self._answer(
            key,
            Completion(
                finish_reason=answer.finish_reason,
                version_spans=answer.version_spans,
                seconds=answer.seconds,
            ),
            {"tokens": answer.tokens, "logprobs": answer.logprobs, "routes": answer.routes},
        )

    def _answer(self, key: Key, header: Completion | Error | Healthy, arrays: Arrays | None = None) -> None:
        sender, request_id = key
        try:
            self._channel.send(header, arrays, to=sender, request_id=request_id)
        except (WireError, zmq.ZMQError) as error:  # its asker is gone; nobody waits for it
            logger.warning("an answer was dropped: %s", error)


async def _until_drained(
    server: PolicyServer,
    link: CoordinatorLink | None,
    name: str,
    policy: str,
    interval: float,
    silence_timeout: float,
) -> None:
    """Report to the coordinator and do what it orders; return after it ordered to drain."""
    loads: set[asyncio.Task[None]] = set()
    unanswered = 0
    while not server.engine.dead:
        # A weight update may take longer. By turns, not by the clock: one that was stopped itself blames nobody.
        unanswered = 0 if server.measure() or loads else unanswered + 1
        for load in [task for task in loads if task.done()]:
            loads.remove(load)
            load.result()
        if unanswered * interval > silence_timeout:
            raise RunError(
                f"vLLM's own process has not answered for {unanswered * interval:.0f} s; {name} ends"
            )
        if link is None:
            await asyncio.sleep(interval)
            continue
        if link.refusal:
            raise RunError(f"the coordinator refused {name}: {link.refusal}")
        if link.silence > silence_timeout:
            raise RunError(f"the coordinator was silent for {link.silence:.0f} s; {name} ends")
        link.tell(Heartbeat(stats=server.stats) if link.welcomed else _hello(server, name, policy))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(interval):
                order = await link.orders.get()
                if isinstance(order, Drain):
                    break
                loads.add(asyncio.create_task(_load(server.engine, link, order)))
    if server.engine.dead:
        raise RunError("vLLM's own process ended; its last lines in this log say why")
    await server.drain()


async def _load(engine: "Engine", link: CoordinatorLink, order: LoadWeights) -> None:
    start = time.monotonic()
    try:
        await engine.load_weights(order.version, Path(order.path))
    except ModelError as error:
        logger.error("weights of version %d were refused: %s", order.version, error)
        link.tell(Error(text=str(error)))
    else:
        link.tell(Loaded(version=order.version, seconds=time.monotonic() - start))


def _hello(server: PolicyServer, name: str, policy: str) -> Hello:
    return Hello(
        role="server",
        name=name,
        protocol=PROTOCOL_VERSION,
        pid=os.getpid(),
        address=server.address,
        policy=policy,
        version=server.engine.version,
        max_model_len=server.engine.max_model_len,
    )


def _sampling(header: Generate) -> Sampling:
    return Sampling(
        max_tokens=header.max_tokens,
        temperature=header.temperature,
        top_p=header.top_p,
        top_k=header.top_k,
        stop_token_ids=tuple(header.stop_token_ids),
    )
