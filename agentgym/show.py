"""`agentgym show`: the episodes of a file or of a run."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from zlib import crc32

from rich.console import Console

from agentgym.config_file import load_config
from agentgym.coordinator.schedule import task_seed
from agentgym.coordinator.store import FOLDER, count_episodes, stored_episodes, tasks_set_aside
from agentgym.episode_json import EpisodeRecord, read_episodes, record_of
from agentgym.episode_print import print_episode
from agentgym.errors import ConfigError
from agentgym.policy.template import ChatTokenizer

NEWEST = 3
"""Episodes of a run that are shown where none is picked."""


def show(path: Path, *, number: int | None, console: Console) -> None:
    """Print the episodes of a file, or the newest of a run; `number` picks one, counted from 1, or from -1 backwards.

    Raises:
        ConfigError: there is no such file or episode.
    """
    read: Callable[[slice], Sequence[EpisodeRecord]]
    if path.is_dir():
        if not (path / FOLDER).is_dir():
            raise ConfigError(f"{path} is not a run directory: it has no folder {FOLDER!r}")
        total, part, read = count_episodes(path), slice(-NEWEST, None), partial(_of_run, path)
    else:
        records = read_episodes(path).records
        total, part, read = len(records), slice(None), records.__getitem__
    if number is not None:
        part = numbered(path, total, number)
    for position, record in enumerate(read(part), start=part.indices(total)[0] + 1):
        print_episode(record, console, title=f"episode {position} of {total}")
    if path.is_dir() and number is None:
        _print_set_aside(path, console)


def numbered(path: Path, total: int, number: int) -> slice:
    """Return where episode `number` of the `total` episodes of a file or run is.

    Raises:
        ConfigError: there are not so many.
    """
    if not 1 <= abs(number) <= total:
        raise ConfigError(f"{path} has {total} episodes; there is no number {number}")
    first = number - 1 if number > 0 else total + number
    return slice(first, first + 1)


def _of_run(run: Path, part: slice) -> list[EpisodeRecord]:
    """Read episodes that a run keeps."""
    config = load_config(run / "config.json")
    decode = ChatTokenizer(config.model).decode
    return [
        record_of(stored.episode, decode, lease=stored.lease_id, **_trained(stored.step, config.warmup.steps))
        for stored in stored_episodes(run, part)
    ]


def _print_set_aside(run: Path, console: Console) -> None:
    """Print the tasks that nothing could be learned from, each with its seed, for `agentgym play --seed`."""
    config = load_config(run / "config.json")
    for task in tasks_set_aside(run):
        seed = task_seed(config.run.seed, crc32(config.env.id.encode()), task.task_index)
        console.print(
            f"task {task.task_index} (seed {seed}) was set aside, {task.given_up} of its {task.size} episodes failed: "
            f"{task.error}",
            style="yellow", markup=False, highlight=False,
        )  # fmt: skip


def _trained(step: int | None, warmup: int) -> dict[str, int]:
    return {} if step is None else {"step": step - warmup}
