"""Tasks that fail every time: set aside with their error, in nobody's way."""

import io
from pathlib import Path

import pytest
from builders import config_of, episode_of, within
from live_run import play, small_run
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wire_peers import play_well

from agentgym.config_file import save_config
from agentgym.coordinator.dispatcher import FAILING_TASKS, Dispatcher
from agentgym.coordinator.schedule import Schedule, task_seed
from agentgym.coordinator.store import tasks_set_aside
from agentgym.episode import EndReason, Episode
from agentgym.errors import RunError
from agentgym.protocol import Lease
from agentgym.show import show
from agentgym.tiny_model import init_model

WORKER = b"worker"
ERROR = "test/Env-v0: step raised KeyError: 'moves'"


def failed(lease: Lease, end: EndReason = EndReason.ENV_FAILED) -> Episode:
    return episode_of(
        group=lease.group_id, member=lease.member, task_index=lease.task_index, end=end, error=ERROR
    )


class Scene:
    """A dispatcher for one step after the other, and what is played for it."""

    def __init__(self, *, tasks: int, members: int, retries: int = 2) -> None:
        config = config_of(
            rollout={"tasks_per_step": tasks, "group_size": members, "max_staleness": 0},
            coordinator={"max_retries": retries},
        )
        self.dispatcher, self.step = Dispatcher(config), Schedule(config).step(1)

    def next(self) -> Lease:
        self.dispatcher.top_up(self.step, steps_left=100, in_training=0)
        lease = self.dispatcher.issue(WORKER, 0.0)
        assert lease is not None
        return lease

    def answer(self, lease: Lease, episode: Episode) -> None:
        self.dispatcher.take_in(lease.lease_id, WORKER, episode, 0.0)


def test_a_task_whose_every_episode_fails_is_set_aside_and_another_one_is_played() -> None:
    scene = Scene(tasks=1, members=3)
    for _ in range(3):
        lease = scene.next()
        assert lease.task_index == 0
        scene.answer(lease, failed(lease))
    (task,) = scene.dispatcher.take_dropped()
    assert (task.task_index, task.given_up, task.size, task.error) == (0, 3, 3, ERROR)
    assert scene.dispatcher.take_dropped() == []
    assert scene.next().task_index == 1


def test_a_task_that_the_policy_fails_is_tried_again_before_it_is_set_aside() -> None:
    scene = Scene(tasks=1, members=2, retries=2)
    for _ in range(2 * 3):
        lease = scene.next()
        assert lease.task_index == 0
        scene.answer(lease, failed(lease, EndReason.POLICY_FAILED))
    (task,) = scene.dispatcher.take_dropped()
    assert (task.given_up, task.error) == (2, f"tried 3 times: {ERROR}")


def test_a_task_that_kills_its_worker_every_time_is_set_aside() -> None:
    scene = Scene(tasks=1, members=2, retries=1)
    for _ in range(2 * 2):
        assert scene.next().task_index == 0
        scene.dispatcher.worker_lost(WORKER)
    (task,) = scene.dispatcher.take_dropped()
    assert task.error == "tried 2 times: its worker was lost"
    assert scene.next().task_index == 1


def test_a_few_failing_tasks_in_a_row_do_not_end_a_run_however_many_episodes_they_have() -> None:
    scene = Scene(tasks=1, members=16)
    for _ in range((FAILING_TASKS - 1) * 16):
        lease = scene.next()
        scene.answer(lease, failed(lease))
    lease = scene.next()
    with pytest.raises(RunError, match=f"{(FAILING_TASKS - 1) * 16 + 1} episodes failed one after another"):
        scene.answer(lease, failed(lease))


def test_a_run_in_which_one_task_in_ten_always_fails_trains_to_its_end(tmp_path: Path) -> None:
    async def scene() -> None:
        init_model(tmp_path / "model")
        config = small_run(
            run={"steps": 12},
            coordinator={"heartbeat_timeout": 60.0},
            policies={"learner": {"model": str(tmp_path / "model")}},
        )
        async with play(config, tmp_path) as cast:
            worker, server, trainer = cast.worker(), cast.server(), cast.trainer()

            def one_in_ten(lease: Lease) -> Episode:
                return failed(lease) if lease.task_index % 10 == 3 else play_well(lease, server.version)

            cast.start(worker.work(play=one_in_ten), server.serve(), trainer.train(cast.run.places.exchange))
            await cast.everyone_is_done()
            assert [batch.step for batch in trainer.batches] == list(range(1, 13))
            played = {lease.task_index for lease in worker.played}
            poison = sorted(task for task in played if task % 10 == 3)
            assert len(poison) >= 2
            run = cast.run.places.run
            found = tasks_set_aside(run)
            assert [task.task_index for task in found] == poison
            assert {(task.given_up, task.size, task.error) for task in found} == {(2, 2, ERROR)}
            events = EventAccumulator(str(cast.run.places.tensorboard))
            events.Reload()
            assert events.Scalars("system/groups/set_aside")[-1].value >= len(poison) - 1
            save_config(config, run / "config.json")
            out = io.StringIO()
            show(run, number=None, console=Console(file=out, width=400))
            seed = task_seed(config.run.seed, Dispatcher(config)._env_key, 3)
            assert (
                f"task 3 (seed {seed}) was set aside, 2 of its 2 episodes failed: {ERROR}" in out.getvalue()
            )

    within(60, scene())
