"""The trainer's process against a coordinator that the test plays on a ROUTER socket."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from safetensors import safe_open
from trainer_builders import batch_of, config_of, samples_of, write_hf_model

from agentgym.config_file import save_config
from agentgym.protocol import BatchRequest, Drain, Error, Header, Heartbeat, Hello, StepDone, Welcome
from agentgym.wire import Packet, open_socket, pack, unpack

DEADLINE = 240.0
"""Seconds for anything to happen; many times what an idle machine needs."""


class Coordinator:
    """A ROUTER socket, and the process that a test talks to over it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"ipc://{folder}/coordinator"
        self.exchange, self.checkpoints = folder / "exchange", folder / "checkpoints"
        self.exchange.mkdir(exist_ok=True)
        self.context: zmq.Context[Any] = zmq.Context()
        self.socket = open_socket(self.context, zmq.ROUTER)
        self.socket.bind(self.address)
        self.heartbeats: list[Heartbeat] = []
        self.peer = b""

    def command(self, *more: str) -> list[str]:
        return [
            *(sys.executable, "-W", "ignore", "-m", "agentgym_trainers.megatron.main"),
            *("--config", str(self.folder / "config.json"), "--coordinator", self.address),
            *(
                "--policy",
                "learner",
                "--exchange",
                str(self.exchange),
                "--checkpoints",
                str(self.checkpoints),
                *more,
            ),
        ]

    def receive(self) -> Packet:
        """The next message that is not a heartbeat."""
        end = time.monotonic() + DEADLINE
        while self.socket.poll(max(0, int((end - time.monotonic()) * 1000))):
            self.peer, *frames = self.socket.recv_multipart()
            packet = unpack(frames)
            if not isinstance(packet.header, Heartbeat):
                return packet
            self.heartbeats.append(packet.header)
            self.send(Heartbeat())
        raise AssertionError(f"the trainer sent nothing for {DEADLINE} s")

    def send(self, header: Header, arrays: dict[str, Any] | None = None) -> None:
        self.socket.send_multipart([self.peer, *pack(header, arrays)])

    def close(self) -> None:
        self.socket.close()
        self.context.term()


@contextmanager
def coordinator_with_trainer(
    folder: Path, *more: str
) -> Iterator[tuple[Coordinator, subprocess.Popen[bytes]]]:
    coordinator = Coordinator(folder)
    process = subprocess.Popen(coordinator.command("--parent-pid", str(os.getpid()), *more))
    try:
        yield coordinator, process
    finally:
        process.kill()
        process.wait()
        coordinator.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folder_of(tmp_path)


def folder_of(path: Path, **trainer: Any) -> Path:
    """A run's folder, with its model and its settings."""
    model = write_hf_model(path / "model", "Qwen3Moe")
    config = config_of(
        model, coordinator={"heartbeat_interval": 0.2}, trainer={"keep_checkpoints": 1, **trainer}
    )
    save_config(config, path / "config.json")
    return path


def test_a_run_learns_publishes_checkpoints_drains_and_resumes(folder: Path):
    samples = samples_of((12, 9, 15))
    with coordinator_with_trainer(folder) as (coordinator, process):
        hello = coordinator.receive().expect(Hello)
        assert (hello.role, hello.version, hello.weights, hello.pid) == ("trainer", 0, "", process.pid)
        coordinator.send(Welcome())
        losses = []
        for step in (1, 2, 3):
            assert coordinator.receive().expect(BatchRequest).step == step
            last = step == 3
            header, arrays = batch_of(
                samples,
                step=step,
                loss="sft",
                learning_rate=1e-2,
                publish=last,
                checkpoint=last,
                state={"consumed": [step]},
            )
            coordinator.send(header, arrays)
            done = coordinator.receive().expect(StepDone)
            losses.append(done.metrics["loss"])
        assert losses == sorted(losses, reverse=True)
        assert done.weights == str(coordinator.exchange / "weights-3.safetensors")
        assert Path(done.weights).stat().st_mode & 0o777 == 0o600
        assert Path(done.checkpoint, "coordinator.json").read_text() == '{"consumed": [3]}\n'
        assert coordinator.receive().expect(BatchRequest).step == 4
        coordinator.send(Drain())
        assert process.wait(DEADLINE) == 0
        assert all(0 <= heartbeat.stats["busy"] <= 1 for heartbeat in coordinator.heartbeats)

    published = Path(done.weights).read_bytes()
    Path(done.weights).unlink()
    with coordinator_with_trainer(folder, "--resume", done.checkpoint) as (coordinator, _):
        hello = coordinator.receive().expect(Hello)
        assert (hello.version, hello.weights) == (3, done.weights)
        assert Path(hello.weights).read_bytes() == published
        assert coordinator.receive().expect(BatchRequest).step == 4
        with safe_open(hello.weights, "pt") as opened:
            assert "model.layers.0.mlp.experts.7.down_proj.weight" in opened.keys()  # noqa: SIM118


def test_a_changed_sample_ends_the_trainer_with_its_name(folder: Path):
    with coordinator_with_trainer(folder) as (coordinator, process):
        coordinator.receive().expect(Hello)
        coordinator.receive().expect(BatchRequest)
        header, arrays = batch_of(samples_of((12, 9)))
        changed = arrays["logprobs"].copy()
        changed[-1] += 1e-3
        coordinator.send(header, {**arrays, "logprobs": changed})
        error = coordinator.receive().expect(Error)
        assert not error.fatal  # the run goes on from its last checkpoint
        assert "sample 1 of step 1" in error.text
        assert process.wait(DEADLINE) == 1


def test_the_trainer_ends_when_its_parent_is_killed(folder: Path):
    coordinator = Coordinator(folder)
    command = coordinator.command("--parent-pid")
    starter = f"import os, subprocess; subprocess.Popen({command!r} + [str(os.getpid())]).wait()"
    parent = subprocess.Popen([sys.executable, "-c", starter])
    try:
        pid = coordinator.receive().expect(Hello).pid
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        watched = os.pidfd_open(pid)
        poller = zmq.Poller()
        poller.register(watched, zmq.POLLIN)
        assert poller.poll(int(DEADLINE * 1000)), f"process {pid} outlived its parent"
        os.close(watched)
    finally:
        parent.kill()
        coordinator.close()


def test_a_trainer_of_two_ranks_learns_drains_and_goes_on_as_one_rank(tmp_path: Path):
    samples = samples_of((12, 9, 15))
    folder = folder_of(tmp_path, nproc=2, ep=2)
    with coordinator_with_trainer(folder) as (coordinator, process):
        hello = coordinator.receive().expect(Hello)
        assert hello.pid == process.pid  # the process that was started, although rank 0 is another one
        for step in (1, 2):
            assert coordinator.receive().expect(BatchRequest).step == step
            coordinator.send(*batch_of(samples, step=step, publish=True, checkpoint=True))
            done = coordinator.receive().expect(StepDone)
        assert done.metrics["tokens"] == sum(len(sample.tokens) for sample in samples)
        coordinator.receive().expect(BatchRequest)
        coordinator.send(Drain())
        assert process.wait(DEADLINE) == 0
    published = Path(done.weights).read_bytes()
    Path(done.weights).unlink()
    folder_of(tmp_path)  # with the settings of one rank
    with coordinator_with_trainer(folder, "--resume", done.checkpoint) as (coordinator, _):
        hello = coordinator.receive().expect(Hello)
        assert hello.version == 2
        assert Path(hello.weights).read_bytes() == published


def test_when_one_rank_is_killed_in_a_step_the_trainer_ends_and_the_run_may_go_on(tmp_path: Path):
    with coordinator_with_trainer(folder_of(tmp_path, nproc=2)) as (coordinator, process):
        coordinator.receive().expect(Hello)
        coordinator.receive().expect(BatchRequest)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        other = int(children[-1])
        os.kill(other, signal.SIGSTOP)
        coordinator.send(*batch_of(samples_of((12, 9, 15))))
        os.kill(other, signal.SIGKILL)
        assert process.wait(DEADLINE) == 1
        # A fatal error would end the run; without one it goes on from its last checkpoint.
        while coordinator.socket.poll(0):
            unpack(coordinator.socket.recv_multipart()[1:]).expect(Heartbeat)


def test_the_trainer_is_imported_without_torchs_compiler_where_there_is_no_gpu():
    code = (
        "import sys, torch\n"
        "from agentgym_trainers.megatron import launch\n"
        "compiler = torch.compile\n"
        "with launch.without_compiler():\n"
        "    import agentgym_trainers.megatron.trainer\n"
        "assert torch.compile is compiler\n"
        "assert ('torch._inductor' in sys.modules) == torch.cuda.is_available()"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], stderr=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
