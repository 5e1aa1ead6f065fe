"""A run over several machines, as far as one machine can show it: everything over TCP, with keys."""

import os
import stat
import subprocess
from pathlib import Path

import pytest
from runs import (
    COMMAND,
    assert_one_clear_error,
    curves,
    refused,
    run_cli,
    running,
    wait_until_gone,
    write_run,
)
from strangers import free_address

from agentgym.keys import make_keys


@pytest.mark.timeout(900)
def test_a_worker_of_another_machine_takes_part_in_an_encrypted_run(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        assert "copy keys/clients/far to its machine" in run_cli("keys", "keys", "far", cwd=tmp_path).stdout
        address = free_address()
        write_run(
            tmp_path, "odd_envs:Letters",
            run={"steps": 2},
            coordinator={"bind": address, "keys": "keys"},
            server={"bind": "tcp://127.0.0.1:*", "kv_cache_gib": 0.1, "max_num_seqs": 32},
            **{"env.kwargs": {"latency": 0.1}},
        )  # fmt: skip
        with running(tmp_path, "run.toml") as run:
            run.wait_for("started worker-0", log="coordinator")
            far = [*COMMAND, "worker", "--config", "runs/run/config.json", "--coordinator", address,
                   "--keys", "keys/clients/far", "--name", "far"]  # fmt: skip
            with (
                (tmp_path / "far.log").open("wb") as log,
                subprocess.Popen(far, cwd=tmp_path, stdout=log, stderr=log) as worker,
            ):
                run.wait_for(r"far \(pid \d+\) is there", log="coordinator")
                assert run.wait() == 0, run.report()
                assert worker.wait(60.0) == 0, (tmp_path / "far.log").read_text()
        assert wait_until_gone(tmp_path, 10.0) == {}
    finally:
        os.umask(before)
    numbers = {tag: points[-1][1] for tag, points in curves(tmp_path / "runs" / "run").items()}
    assert numbers["system/wire/connected"] == 4  # trainer, server, two workers
    assert numbers["system/wire/key_refused"] == numbers["system/wire/handshake_failed"] == 0
    assert numbers["system/server-0/wire/connected"] == 2
    assert stat.S_IMODE((tmp_path / "runs" / "run").stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["coordinator.bind=tcp://0.0.0.0:5555"],
            "'tcp://0.0.0.0:5555': without keys only ipc:// and loopback",
        ),
        (["server.bind=tcp://10.0.0.1:*"], "'tcp://10.0.0.1:*': without keys only ipc:// and loopback"),
        (["server.bind=tcp://10.0.0.1:7"], "server.bind: String should match pattern"),
        (
            ["coordinator.keys=nowhere"],
            "there is no folder of keys nowhere; `agentgym keys nowhere` makes one",
        ),
        (
            ["coordinator.keys=keys/clients/far"],
            "keys/clients/far has no server.key, which a process that binds",
        ),
    ],
)
def test_an_address_or_keys_that_will_not_do_are_one_message(
    tmp_path: Path, arguments: list[str], expected: str
) -> None:
    write_run(tmp_path, "odd_envs:Letters")
    make_keys(tmp_path / "keys", ["far"])
    assert_one_clear_error(refused("train", "run.toml", *arguments, cwd=tmp_path), "ConfigError", expected)
    assert not list(tmp_path.glob("runs/*/logs/*"))
