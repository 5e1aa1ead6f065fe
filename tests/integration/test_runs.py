"""A whole run survives what may happen to its processes."""

import json
import re
from pathlib import Path

import pytest
from runs import (
    Curves,
    ask,
    curves,
    processes_in,
    running,
    sampled,
    wait_until_gone,
    write_run,
)

from agentgym.coordinator.store import stored_episodes

WARMUP, STEPS, TASKS, GROUP, WARMUP_TASKS = 3, 8, 4, 4, 8


@pytest.mark.timeout(1500)
def test_a_run_goes_on_after_the_death_of_any_process_and_counts_each_episode_once(tmp_path: Path) -> None:
    # The environment is a user's own, found in the working directory. A step of the run is as long as its plays:
    # 16 of three turns at 0.4 s, so that a kill after a step hits plays under way.
    write_run(
        tmp_path, "odd_envs:Letters",
        run={"name": "deaths", "steps": STEPS},
        warmup={"steps": WARMUP, "episodes": WARMUP_TASKS},
        rollout={"tasks_per_step": TASKS, "group_size": GROUP, "group_timeout": 600.0},
        trainer={"checkpoint_every": 2, "keep_checkpoints": 9},
        tensorboard={"samples_every": 1, "samples": TASKS * GROUP},
        **{"env.kwargs": {"latency": 0.4}},
    )  # fmt: skip
    run_dir = tmp_path / "runs" / "deaths"
    with running(tmp_path, "run.toml") as run:
        run.wait_for(rf" 1/{STEPS} ")
        assert "at least 3 frames" in ask(run.argument("server-0", "--bind"), [b"\x00\xff"]).text
        killed = run.pid("worker-0")
        run.kill(killed)
        said = run.wait_for(
            rf"worker-0 \(pid {killed}\) was killed by SIGKILL; restarted as pid (\d+); its (\d+) ep"
        )
        assert int(said[1]) == run.pid("worker-0") != killed
        assert int(said[2]) > 0
        run.wait_for(rf" 3/{STEPS} ")
        killed = run.pid("server-0")
        run.kill(killed)
        run.wait_for(rf"server-0 \(pid {killed}\) was killed by SIGKILL; restarted as pid ")
        run.wait_for(rf" 5/{STEPS} ")
        exchange = Path(run.argument("trainer", "--exchange"))
        assert len(processes_in(tmp_path)) >= 5  # coordinator, trainer, worker, server, engine
        run.kill(run.process.pid)
        assert wait_until_gone(tmp_path, 10.0) == {}
    first = curves(run_dir)
    check_ledger(first, consumed_before=WARMUP * WARMUP_TASKS, finished_before=0)
    assert value_at(first, "system/server-0/garbage", 3) == 1
    assert value_at(first, "system/restarts", 5) == 2
    assert value_at(first, "system/leases/taken_back", 5) == int(said[2])
    had = {stored.lease_id for stored in stored_episodes(run_dir)}

    with running(tmp_path, "run.toml", "--resume") as run:
        resumed = int(run.wait_for(r"resumed after step (\d+) from .*/step-0000\d\d")[1]) - WARMUP
        assert resumed in (4, 6)
        assert not exchange.exists()  # the memory that the killed run could not give back
        run.wait_for(rf" 6/{STEPS} ")
        killed = run.pid("server-0")
        run.kill(run.engine_pid())
        run.wait_for(rf"server-0 \(pid {killed}\) ended with status 1; restarted as pid ")
        assert run.wait() == 0, run.report()
        assert "vLLM's own process ended" in run.log("server-0")
        assert run.lines[-5].startswith("done: reward ")
    assert wait_until_gone(tmp_path, 10.0) == {}
    check_whole(run_dir, first, resumed)
    check_episodes(run_dir, had)


def check_whole(run_dir: Path, first: Curves, resumed: int) -> None:
    """Check the curves of a run that was killed and went on after step `resumed`, as one run's."""
    shown = curves(run_dir)
    learned, warm = list(range(1, STEPS + 1)), list(range(1 - WARMUP, 1))
    for tag in ("train/loss", "episode/reward", "policy/age_mean"):
        assert [step for step, _ in shown[tag]] == learned, tag
    assert [step for step, _ in shown["system/episodes/ok"]] == [*warm, *learned]
    # While the warm-up goes on, no server may be there yet.
    assert [step for step, _ in shown["policy/version"] if step > 0] == learned
    assert [step for step, _ in shown["warmup/loss"]] == warm
    for tag, points in first.items():
        kept = [point for point in points if point[0] <= resumed]
        assert shown[tag][: len(kept)] == kept, tag
    versions = [value for _, value in shown["policy/version"]]
    assert versions == sorted(versions)
    assert versions[-1] >= WARMUP + STEPS - 2
    later = {tag: [point for point in points if point[0] > resumed] for tag, points in shown.items()}
    state = json.loads(
        (run_dir / "checkpoints" / f"step-{WARMUP + resumed:06d}" / "coordinator.json").read_text()
    )
    check_ledger(later, consumed_before=-TASKS * resumed, finished_before=state["counts"]["ok"])
    # Each task is trained on exactly once, with all its members, and none was left out.
    tasks: list[int] = []
    for step, text in sampled(run_dir).items():
        plays = re.findall(r"task (\d+), group \d+, member (\d+): terminated", text)
        members = [(int(task), int(member)) for task, member in plays]
        of_step = sorted({task for task, _ in members})
        assert sorted(members) == [(task, member) for task in of_step for member in range(GROUP)], step
        assert len(of_step) == TASKS
        tasks += of_step
    assert sorted(tasks) == list(range(WARMUP * WARMUP_TASKS, WARMUP * WARMUP_TASKS + STEPS * TASKS))


def check_episodes(run_dir: Path, had: set[int]) -> None:
    """Check that each step consumed whole groups of its own, and that what was there before a crash was used."""
    stored = list(stored_episodes(run_dir))
    assert had <= {episode.lease_id for episode in stored}
    steps: dict[int, list[tuple[int, int]]] = {}
    for found in stored:
        assert found.step is not None, "the last step needs every episode that was played"
        steps.setdefault(found.step, []).append((found.episode.task_index, found.episode.member))
    assert sorted(steps) == list(range(1, WARMUP + STEPS + 1))
    played = sorted(play for plays in steps.values() for play in plays)
    warm = WARMUP * WARMUP_TASKS
    tasks = [(task, 0) for task in range(warm)]
    tasks += [(warm + task, member) for task in range(STEPS * TASKS) for member in range(GROUP)]
    assert played == tasks


def check_ledger(shown: Curves, *, consumed_before: int, finished_before: int) -> None:
    """Check, after each step, that every lease and every group that began is accounted for once."""
    for step, _ in shown["train/loss"]:

        def now(tag: str, step: int = step) -> int:
            return int(value_at(shown, f"system/{tag}", step))

        out = now("leases/finished") + now("leases/taken_back") + now("leases/withdrawn")
        assert now("leases/issued") == out + now("queue/playing"), step
        assert now("leases/late") == now("leases/given_up") == now("episodes/failed") == 0, step
        assert now("groups/opened") == now("groups/ready") + now("queue/open_groups"), step
        assert now("groups/ready") - now("queue/ready_groups") == consumed_before + TASKS * step, step
        assert now("episodes/ok") == now("leases/finished") + finished_before, step
        episodes = value_at(shown, "system/episodes_per_second", step) * value_at(
            shown, "system/step_seconds", step
        )
        assert round(episodes) == TASKS * GROUP, step


def value_at(shown: Curves, tag: str, step: int) -> float:
    """Return the value of a curve at a step; a counter that never counted is not written, and 0."""
    return dict(shown.get(tag, [])).get(step, 0.0)
