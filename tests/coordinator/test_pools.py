import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from builders import config_of, episode_of, trajectory_of, within

from agentgym.coordinator.pools import Pool, Pools
from agentgym.errors import RunError
from agentgym.ratings import Ratings

ROUND = 2


def pools_of(folder: Path, ratings: Ratings | None = None, state: Any = None, **settings: Any) -> Pools:
    config = config_of(
        policies={"past": {"pool": "learner", "every": 10, "keep": 3, **settings}},
        policy_mapping={"player_2": "past"},
        rollout={"tasks_per_step": ROUND},
    )
    return Pools(config, folder / "snapshots", ratings or Ratings(), state or {})


def take(pools: Pools, folder: Path, *versions: int) -> None:
    """Offer some versions, whose weights are their numbers."""

    async def scene() -> None:
        for version in versions:
            weights = folder / f"weights-{version}"
            weights.write_text(str(version))
            pools.take_due("learner", version, str(weights) if version else "")
            weights.unlink()
            await pools.written()

    within(10, scene())


def files(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (folder / "snapshots" / "past").glob("*")}


def open_round(pool: Pool, first: int = 0) -> list[str]:
    """Fill a round with groups; the servers load whatever is asked of them."""
    names = []
    for group in range(first, first + ROUND):
        if not pool.ready(lambda group: False):
            pool.loaded = pool.version
            assert pool.ready(lambda group: False)
        names.append(pool.join(group))
    return names


def beats(winner: str, loser: str) -> Any:
    return episode_of(
        trajectories=[
            trajectory_of([1.0], agent="a", policy=winner),
            trajectory_of([0.0], agent="b", policy=loser),
        ]
    )


def test_a_snapshot_is_taken_of_the_first_weights_and_then_every_so_many_versions(tmp_path: Path) -> None:
    pools = pools_of(tmp_path)
    take(pools, tmp_path, 5, 6, 14, 15, 16, 40, 41)
    assert pools.by_name["past"].snapshots == [5, 15, 40]
    assert files(tmp_path) == {f"version-{v}.safetensors": str(v) for v in (5, 15, 40)}


def test_the_model_folder_is_version_0(tmp_path: Path) -> None:
    pools = pools_of(tmp_path)
    take(pools, tmp_path, 0)
    pool = pools.by_name["past"]
    assert (pool.snapshots, pool.path(0)) == ([0], Path("model").absolute())
    assert files(tmp_path) == {}


def test_the_oldest_snapshots_are_removed_but_not_those_that_are_played(tmp_path: Path) -> None:
    pools = pools_of(tmp_path, sample="latest")
    pool = pools.by_name["past"]
    take(pools, tmp_path, 10)
    assert open_round(pool) == ["past@10"] * ROUND
    take(pools, tmp_path, 20, 30, 40)
    assert pool.snapshots == [20, 30, 40]
    assert len(files(tmp_path)) == 4, "servers that come back must find version 10"
    assert open_round(pool, ROUND) == ["past@40"] * ROUND
    assert files(tmp_path).keys() == {f"version-{v}.safetensors" for v in (20, 30, 40)}


def test_no_group_is_opened_before_there_is_a_snapshot_and_servers_have_it(tmp_path: Path) -> None:
    pools = pools_of(tmp_path)
    pool = pools.by_name["past"]
    assert not pool.ready(lambda group: False)
    take(pools, tmp_path, 10)
    assert (pool.ready(lambda group: False), pool.version) == (False, 10)
    pool.loaded = 10
    assert pool.ready(lambda group: False)


def test_another_snapshot_is_loaded_only_when_the_last_group_of_a_round_is_closed(tmp_path: Path) -> None:
    pools = pools_of(tmp_path, sample="latest")
    pool = pools.by_name["past"]
    take(pools, tmp_path, 10)
    open_round(pool)
    take(pools, tmp_path, 20)
    still_open = {0, 1}
    assert (pool.ready(still_open.__contains__), pool.version) == (False, 10)
    still_open.remove(0)
    assert (pool.ready(still_open.__contains__), pool.version) == (False, 10)
    still_open.remove(1)
    assert (pool.ready(still_open.__contains__), pool.version) == (False, 20)
    pool.loaded = 20
    assert pool.ready(still_open.__contains__)
    assert pool.join(2) == "past@20"


def test_the_same_snapshot_goes_on_without_a_pause(tmp_path: Path) -> None:
    pools = pools_of(tmp_path, sample="latest")
    pool = pools.by_name["past"]
    take(pools, tmp_path, 10)
    open_round(pool)
    assert pool.ready(lambda group: True)
    assert pool.join(2) == "past@10"


def test_groups_of_an_earlier_round_with_the_same_snapshot_are_waited_for_too(tmp_path: Path) -> None:
    pools = pools_of(tmp_path, sample="latest")
    pool = pools.by_name["past"]
    take(pools, tmp_path, 10)
    open_round(pool)
    assert pool.ready(lambda group: True)
    assert [pool.join(2), pool.join(3)] == ["past@10"] * 2
    take(pools, tmp_path, 20)
    assert not pool.ready({0}.__contains__)
    assert pool.version == 10


def test_uniform_draws_meet_all_snapshots_alike(tmp_path: Path) -> None:
    pools = pools_of(tmp_path)
    take(pools, tmp_path, 10, 20, 30)
    draws = Counter(open_round(pools.by_name["past"], ROUND * n)[0] for n in range(600))
    assert {name: pytest.approx(200, abs=50) for name in ("past@10", "past@20", "past@30")} == draws


def test_by_win_rate_those_are_met_more_often_that_the_trained_policy_loses_to(tmp_path: Path) -> None:
    ratings = Ratings()
    for opponent, won in (("past@10", 98), ("past@20", 49), ("past@30", 0)):
        for game in range(98):
            ratings.add(beats(*(("learner", opponent) if game < won else (opponent, "learner"))))
    pools = pools_of(tmp_path, ratings, sample="win_rate")
    take(pools, tmp_path, 10, 20, 30)
    draws = Counter(open_round(pools.by_name["past"], ROUND * n)[0] for n in range(1000))
    # Losing rates 1, 50 and 99 in 100: the weights are their squares.
    total = 0.01**2 + 0.5**2 + 0.99**2
    assert draws["past@30"] == pytest.approx(1000 * 0.99**2 / total, abs=60)
    assert draws["past@20"] == pytest.approx(1000 * 0.5**2 / total, abs=60)
    assert draws["past@10"] <= 5


def test_a_snapshot_that_was_never_met_counts_as_an_equal(tmp_path: Path) -> None:
    ratings = Ratings()
    for _ in range(1000):
        ratings.add(beats("learner", "past@10"))
    pools = pools_of(tmp_path, ratings, sample="win_rate")
    take(pools, tmp_path, 10, 20)
    draws = Counter(open_round(pools.by_name["past"], ROUND * n)[0] for n in range(100))
    assert draws == {"past@20": 100}


def test_draws_follow_from_the_seed_and_the_round(tmp_path: Path) -> None:
    draws = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        pools = pools_of(folder)
        take(pools, folder, 10, 20, 30)
        draws.append([open_round(pools.by_name["past"], ROUND * n)[0] for n in range(20)])
    assert draws[0] == draws[1]


def test_a_resumed_run_has_the_snapshots_until_its_checkpoint_and_no_later_ones(tmp_path: Path) -> None:
    pools = pools_of(tmp_path)
    take(pools, tmp_path, 0, 10)
    open_round(pools.by_name["past"])
    state = {"pools": pools.state(), "step": 25}
    take(pools, tmp_path, 20, 30)  # one more than `keep`: version 0 goes, which is only on the list
    resumed = pools_of(tmp_path, state=state)
    pool = resumed.by_name["past"]
    assert (pool.snapshots, pool.version) == ([0, 10, 20], None)
    assert files(tmp_path).keys() == {"version-10.safetensors", "version-20.safetensors"}
    assert pool.state()["rounds"] == 1
    take(resumed, tmp_path, 25, 30)
    assert pool.snapshots == [10, 20, 30]


def test_a_resumed_run_without_a_snapshot_takes_one_of_the_weights_it_resumes_with(tmp_path: Path) -> None:
    resumed = pools_of(tmp_path, state={"pools": {"past": {"rounds": 3, "snapshots": [8]}}, "step": 25})
    assert resumed.by_name["past"].snapshots == []
    take(resumed, tmp_path, 25)
    assert resumed.by_name["past"].snapshots == [25]


def test_a_snapshot_enters_the_ratings_where_the_trained_policy_stands(tmp_path: Path) -> None:
    ratings = Ratings()
    ratings.add(beats("learner", "foe"))
    take(pools_of(tmp_path, ratings), tmp_path, 10)
    assert ratings.elo["past@10"] == ratings.elo["learner"] > ratings.elo["foe"]


def test_a_group_against_two_pools_waits_for_both(tmp_path: Path) -> None:
    config = config_of(
        policies={"past": {"pool": "learner"}, "older": {"pool": "learner"}},
        policy_mapping={"player_2": "past", "player_3": "older"},
    )
    pools = Pools(config, tmp_path, Ratings(), {})
    take(pools, tmp_path, 0)
    met = {"learner", "past", "older"}
    assert pools.enter(0, met, lambda group: False) is None
    pools.by_name["past"].loaded = 0
    assert pools.enter(0, met, lambda group: False) is None
    pools.by_name["older"].loaded = 0
    assert pools.enter(0, met, lambda group: False) == {"past": "past@0", "older": "older@0"}
    assert pools.enter(1, {"learner"}, lambda group: False) == {}


def test_a_snapshot_that_cannot_be_written_ends_the_run(tmp_path: Path) -> None:
    pools = pools_of(tmp_path)
    (tmp_path / "snapshots").write_text("a file in the way")

    async def scene() -> None:
        weights = tmp_path / "weights"
        weights.touch()
        pools.take_due("learner", 10, str(weights))
        with pytest.raises(OSError, match="Not a directory"):
            await pools.written()
        await asyncio.sleep(0)
        with pytest.raises(RunError, match=r"a snapshot could not be written: .*Not a directory"):
            pools.check()

    within(10, scene())
