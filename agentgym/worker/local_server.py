"""A policy server of one's own, for as long as one command needs it: `agentgym play` and `agentgym eval`."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import zmq

from agentgym.config import Config, EnvConfig, SamplingConfig, ServerConfig
from agentgym.config_file import save_config
from agentgym.errors import PolicyError
from agentgym.policy.client import PolicyClient
from agentgym.policy.template import ChatTokenizer
from agentgym.policy_config import PolicyConfig
from agentgym.scratch import scratch_folder
from agentgym.tiny_model import init_model
from agentgym.worker.seating import Served

START_SECONDS = 300.0
END_SECONDS = 10.0
"""For a server to end in order, before it is killed."""
_LOG_SHOWN = 2000
"""Characters of a dead server's last words."""


@dataclass(frozen=True, slots=True)
class LocalServer:
    """A server that runs."""

    served: Served
    process: subprocess.Popen[bytes]
    log: Path

    async def died(self) -> NoReturn:
        """Wait until the process has ended.

        Raises:
            PolicyError: always, with its last words.
        """
        while self.process.poll() is None:
            await asyncio.sleep(0.5)
        raise PolicyError(f"the policy server ended by itself:\n{_last_words(self.log)}")


@contextlib.asynccontextmanager
async def local_server(model: Path, config: ServerConfig) -> AsyncIterator[LocalServer]:
    """Serve a model folder until the context is left.

    Raises:
        PolicyError: the server did not start.
    """
    with scratch_folder("server") as scratch:
        address, log = f"ipc://{scratch}/server", scratch / "server.log"
        settings = Config(
            env=EnvConfig(id="none"),
            policies={"learner": PolicyConfig(model=str(model))},
            sampling=SamplingConfig(max_tokens=1),
            server=config,
        )
        save_config(settings, scratch / "config.json")
        command = [sys.executable, "-m", "agentgym", "serve", "--config", str(scratch / "config.json")]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, "--bind", address, "--parent-pid", str(os.getpid())], stdout=output, stderr=output
            )
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        client = PolicyClient([address], context=context)
        try:
            length = await _wait_for(client, address, process, log)
            yield LocalServer(Served(client, ChatTokenizer(model), length), process, log)
        finally:
            client.close()
            _end(process)
            context.destroy()


def tiny_tokenizer() -> ChatTokenizer:
    """Return the tiny model's tokenizer: scripted policies need no model, and a record of tokens all the same."""
    with scratch_folder("tokenizer") as scratch:
        init_model(scratch / "model")
        return ChatTokenizer(scratch / "model")


async def _wait_for(client: PolicyClient, address: str, process: subprocess.Popen[bytes], log: Path) -> int:
    """Return the context length of the server once it answers."""
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            return (await client.health(address, timeout=1.0)).max_model_len
        except PolicyError:
            await asyncio.sleep(0.2)
    raise PolicyError(f"the policy server did not start:\n{_last_words(log)}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last_words(log: Path) -> str:
    return log.read_text(errors="replace")[-_LOG_SHOWN:]
