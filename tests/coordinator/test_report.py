import io
from pathlib import Path

from builders import config_of, episode_of, group_of
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from agentgym.coordinator.assemble import assemble
from agentgym.coordinator.report import Reporter
from agentgym.coordinator.schedule import Schedule
from agentgym.protocol import StepDone
from agentgym.tensorboard import TensorBoard


def test_tensorboard_has_one_clock_whose_step_0_ends_the_warm_up(tmp_path: Path) -> None:
    config = config_of(warmup={"steps": 2, "episodes": 1}, run={"steps": 2}, tensorboard={"samples_every": 2})
    schedule, board, terminal = Schedule(config), TensorBoard(tmp_path), io.StringIO()
    reporter = Reporter(
        schedule,
        board,
        config.tensorboard,
        console=Console(file=terminal, width=200),
        decode=str,
    )
    for number in range(1, 5):
        step = schedule.step(number)
        plays = group_of(episode_of([1.0], versions=number - 1), episode_of([0.0], versions=number - 1))
        assembled = assemble(
            [plays],
            policies=["learner"],
            algorithm=config.algorithm,
            max_tokens=8,
            warmup=step.warmup,
            version=number - 1,
            max_staleness=1,
        )["learner"]
        reporter.batch_sent(step, {"learner": assembled}, {"rating/elo/learner": 1010.0})
        done = StepDone(step=number, metrics={"loss": float(number), "seconds": 0.1})
        reporter.step_done(step, {"learner": assembled}, {"learner": done}, {"policy/version": float(number)})
    board.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    curves = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert curves["warmup/loss"] == [(-1, 1.0), (0, 2.0)]
    assert curves["warmup/episode/reward"] == [(-1, 0.5), (0, 0.5)]
    assert curves["train/loss"] == [(1, 3.0), (2, 4.0)]
    assert curves["episode/reward"] == [(1, 0.5), (2, 0.5)]
    assert curves["policy/age_mean"] == [(1, 0.0), (2, 0.0)]
    assert [step for step, _ in curves["rating/elo/learner"]] == [1, 2]
    assert [event.step for event in events.Tensors("samples/episodes")] == [1]
    warm, learning = terminal.getvalue().split("reinforcement learning")
    assert "2/2" in warm
    assert "1/2" in learning
    assert "2/2" in learning


def test_brackets_in_a_message_are_no_markup(tmp_path: Path) -> None:
    config, board, terminal = config_of(), TensorBoard(tmp_path), io.StringIO()
    reporter = Reporter(
        Schedule(config),
        board,
        config.tensorboard,
        console=Console(file=terminal, width=200),
        decode=str,
    )
    reporter.say("worker-0 said [Errno 2] and [/nothing]")
    board.close()
    assert "worker-0 said [Errno 2] and [/nothing]" in terminal.getvalue()
