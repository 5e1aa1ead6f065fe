import asyncio
import io
import shutil
import time
from pathlib import Path

import pytest
from builders import config_of, within
from live_run import play, small_run
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wire_peers import play_well

from agentgym.config import Config
from agentgym.coordinator.evaluations import Evaluation, Evaluations
from agentgym.coordinator.report import Reporter
from agentgym.coordinator.schedule import Schedule
from agentgym.tensorboard import TensorBoard
from agentgym.tiny_model import init_model

EXPERTS = {"player_1": "learner", "player_2": "expert"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    init_model(folder)
    return folder


def settings(model: Path, **sections: object) -> Config:
    """A run in which nobody needs a policy server: every seat that an evaluation fills is scripted."""
    return config_of(
        "agentgym/TicTacToe-v0",
        policies={"learner": {"model": str(model)}, "expert": {"scripted": "expert"}},
        evaluation={"every": 5, "episodes": 4, "policy_mapping": EXPERTS},
        **sections,
    )


def test_checkpoints_are_due_from_the_end_of_the_warm_up_on() -> None:
    def due(every: int) -> list[int]:
        evaluation = config_of(evaluation={"every": every}).evaluation
        return [step for step in range(-10, 13) if evaluation.due(step)]

    assert due(5) == [0, 5, 10]
    assert due(0) == []


def test_what_goes_wrong_is_said_and_the_next_one_is_played(tmp_path: Path, model: Path) -> None:
    broken, told = tmp_path / "broken", []
    shutil.copytree(model, broken)
    (broken / "tokenizer.json").unlink()

    async def scene() -> None:
        evaluations = Evaluations(settings(model), tmp_path, done=pytest.fail, failed=told.append)
        evaluations.start(0, {"learner": tmp_path / "nowhere"})
        await evaluations.close(60.0, time.monotonic)
        evaluations.start(5, {"learner": broken})
        await evaluations.close(60.0, time.monotonic)

    within(120, scene())
    assert "evaluation of step 0 failed" in told[0]
    assert (
        told[1] == f"the evaluation of step 5 ended with status 1; see {tmp_path}/evaluations/step-000005.log"
    )
    assert "has no tokenizer.json" in (tmp_path / "evaluations/step-000005.log").read_text()
    assert [path.name for path in (tmp_path / "evaluations").iterdir() if path.is_dir()] == []


def test_what_falls_due_meanwhile_waits_and_only_the_newest_of_it_is_played(
    tmp_path: Path, model: Path
) -> None:
    told: list[str] = []

    async def scene() -> None:
        evaluations = Evaluations(settings(model), tmp_path, done=pytest.fail, failed=told.append)
        for step in (0, 5, 10):
            evaluations.start(step, {"learner": tmp_path / f"nowhere-{step}"})
        await evaluations.close(60.0, time.monotonic)

    within(60, scene())
    assert [text.split()[4] for text in told] == ["10"]  # nothing had begun before the third


def test_one_that_is_given_up_leaves_no_process(tmp_path: Path, model: Path) -> None:
    told: list[str] = []
    read: list[float] = []

    def clock() -> float:
        read.append(time.monotonic())
        return read[-1]

    async def scene() -> None:
        evaluations = Evaluations(settings(model), tmp_path, done=pytest.fail, failed=told.append)
        evaluations.start(0, {"learner": model})
        while not (tmp_path / "evaluations/step-000000.log").exists():
            await asyncio.sleep(0.01)
        await evaluations.close(1.2, clock)

    within(60, scene())
    assert told == ["the last evaluation did not end within 1.2 s and is given up"]
    assert len(read) >= 4, "a clock that nobody reads says that the process stood still"
    mine = [
        entry
        for entry in Path("/proc").iterdir()
        if entry.name.isdecimal() and str(tmp_path) in command(entry)
    ]
    assert mine == []


def command(entry: Path) -> str:
    try:
        return (entry / "cmdline").read_text()
    except OSError:
        return ""


def test_they_are_in_the_curves_and_on_the_terminal(tmp_path: Path) -> None:
    terminal, board = io.StringIO(), TensorBoard(tmp_path)
    config = config_of()
    reporter = Reporter(
        Schedule(config), board, config.tensorboard, console=Console(file=terminal, width=200), decode=str
    )
    metrics = {
        "evaluation/success": 0.75, "evaluation/success_low": 0.5, "evaluation/success_high": 0.9,
        "evaluation/reward": 1.5,
    }  # fmt: skip
    reporter.evaluated(Evaluation(5, metrics, best=True))
    reporter.evaluated(Evaluation(10, {"evaluation/reward": -1.0}, best=False))
    board.close()
    assert terminal.getvalue().splitlines() == [
        "evaluation of step 5: success 0.750 (0.500 to 0.900), reward 1.500; the best so far",
        "evaluation of step 10: reward -1.000",
    ]
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("evaluation/reward")] == [(5, 1.5), (10, -1.0)]


def test_a_run_writes_the_checkpoints_that_are_to_be_played(tmp_path: Path) -> None:
    async def scene() -> list[tuple[int, bool]]:
        config = small_run(run={"steps": 4}, evaluation={"every": 2}, trainer={"checkpoint_every": 100})
        async with play(config, tmp_path) as cast:
            worker, server, trainer = cast.worker(), cast.server(), cast.trainer()
            cast.start(
                worker.work(play=lambda lease: play_well(lease, server.version)),
                server.serve(),
                trainer.train(cast.run.places.exchange),
            )
            await cast.everyone_is_done()
            assert "evaluation of step 2 failed" in cast.run.terminal.getvalue()  # the trainer is a stand-in
            return [(batch.step, batch.checkpoint) for batch in trainer.batches]

    assert within(60, scene()) == [(1, False), (2, True), (3, False), (4, True)]


def test_what_a_killed_coordinator_kept_of_a_checkpoint_is_removed_by_the_next_one(tmp_path: Path) -> None:
    folder = tmp_path / "evaluations"
    (folder / "step-000005/learner").mkdir(parents=True)
    (folder / "step-000005/learner/model.safetensors").write_text("weights")
    (folder / "step-000005.jsonl").write_text("episodes")
    Evaluations(config_of(), tmp_path, done=pytest.fail, failed=pytest.fail)
    assert [path.name for path in folder.iterdir()] == ["step-000005.jsonl"]
