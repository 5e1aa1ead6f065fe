"""agentgym eval, with policies that need no server."""

import io
from pathlib import Path
from typing import Any

import pytest
from builders import config_of
from rich.console import Console

from agentgym.config import Config
from agentgym.config_file import save_config
from agentgym.episode import EndReason, Episode, Status
from agentgym.episode_json import EpisodeRecord, EpisodeWriter, read_episodes
from agentgym.errors import ConfigError
from agentgym.evaluation.plan import Plan, with_policies
from agentgym.evaluation.run import evaluate
from agentgym.policy_config import PolicyConfig

GUESS = "agentgym/GuessNumber-v0"
DUEL: dict[str, Any] = {
    "policies": {"learner": {"model": "model"}, "foe": {"scripted": "random"}},
    "policy_mapping": {"player_2": "foe"},
}


def scripted(env_id: str = GUESS, policy: str = "noisy", **sections: Any) -> Config:
    """A configuration whose learner is played by a scripted policy."""
    return with_policies(config_of(env_id, **sections), [f"learner={policy}"], None)


def run(plan: Plan, out: Path | None = None) -> str:
    """Evaluate and return what is printed."""
    terminal = io.StringIO()
    evaluate(plan, out=out, console=Console(file=terminal, width=160))
    return terminal.getvalue()


def test_the_table_says_how_a_policy_did(tmp_path: Path) -> None:
    text = run(Plan(scripted(policy="expert"), 20, 1), tmp_path / "e.jsonl")
    header, row = (line for line in text.splitlines() if line.startswith(("policy", "learner")))
    assert "95 % interval" in header
    assert row.split()[:6] == ["learner", "agent", "20", "1.000", "0.839", "to"]
    assert "ended by  terminated 20" in text
    assert len(read_episodes(tmp_path / "e.jsonl").records) == 20


def test_the_same_evaluation_plays_the_same_episodes(tmp_path: Path) -> None:
    plan = Plan(scripted(workers={"slots": 3}), 12, 4)
    first, second = (run(plan, tmp_path / name) for name in ("a", "b"))
    assert first.replace("/a", "") == second.replace("/b", "")
    by_key = []
    for name in ("a", "b"):
        episodes = [r.episode for r in read_episodes(tmp_path / name).records]
        by_key.append({(e.task_index, e.member): (e.seed, e.checksums) for e in episodes})
    assert by_key[0] == by_key[1]
    assert by_key[0].keys() == {(task, member) for task in range(3) for member in range(4)}
    assert len({seed for seed, _ in by_key[0].values()}) == 3
    assert len(set(by_key[0].values())) > 3  # the members of a group differ


def test_pass_at_k_is_printed_for_groups() -> None:
    text = run(Plan(scripted(), 24, 4))
    (line,) = (line for line in text.splitlines() if line.startswith("pass@k of learner as agent"))
    shares = [float(part.split(": ")[1]) for part in line.split("agent  ")[1].split(", ")]
    assert [part.split(":")[0] for part in line.split("agent  ")[1].split(", ")] == ["1", "2", "4"]
    assert 0.0 < shares[0] < shares[1] < shares[2] <= 1.0


def test_two_policies_have_win_rates_and_ratings() -> None:
    config = with_policies(config_of("agentgym/TicTacToe-v0", **DUEL), ["learner=expert"], None)
    text = run(Plan(config, 20, 1))
    # One row of each for its seat, one for its win rates.
    (seat, matrix) = (line.split() for line in text.splitlines() if line.startswith("learner"))
    assert seat[1] == "player_1"
    assert any(line.split() == ["took", "from", "foe", "learner", "Elo"] for line in text.splitlines())
    assert float(matrix[1]) > 0.8
    assert matrix[2] == "-"
    assert float(matrix[3]) > 1050


def test_each_seat_has_its_games_won_drawn_and_lost() -> None:
    config = with_policies(
        config_of("agentgym/TicTacToe-v0", seat_rotation=True, **DUEL), ["learner=expert"], None
    )
    text = run(Plan(config, 60, 1))
    shares = {}
    for line in text.splitlines():
        policy, seat, *cells = line.split() or ("", "")
        if seat in ("player_1", "player_2"):
            won, _, drawn, _, lost = cells[-7:-2]
            shares[policy, seat] = tuple(map(float, (won, drawn, lost)))
    assert len(shares) == 4
    for seat, other in (("player_1", "player_2"), ("player_2", "player_1")):
        assert shares["learner", seat] == shares["foe", other][::-1]
        assert shares["learner", seat][2] == 0.0 < shares["learner", seat][1]
        assert sum(shares["learner", seat]) == pytest.approx(1.0, abs=0.002)


def test_where_nobody_meets_another_nothing_is_won() -> None:
    assert "drawn" not in run(Plan(scripted("agentgym/TicTacToe-v0", "random"), 4, 1))


def test_what_is_missing_is_played_and_nothing_twice(tmp_path: Path) -> None:
    out, config = tmp_path / "e.jsonl", scripted()
    run(Plan(config, 6, 2), out)
    before = out.read_bytes()
    whole = run(Plan(config, 6, 2), out)
    assert out.read_bytes() == before
    assert "6 episodes are there, 0 are missing" in whole
    out.write_bytes(before[: before[:-1].rfind(b"\n") + 20])  # killed while it wrote the last one
    assert "5 episodes are there, 1 are missing" in run(Plan(config, 6, 2), out)
    keys = [(r.episode.task_index, r.episode.member) for r in read_episodes(out).records]
    assert sorted(keys) == [(task, member) for task in range(3) for member in range(2)]
    assert "6 episodes are there, 4 are missing" in run(Plan(config, 10, 2), out)
    assert len(read_episodes(out).records) == 10


def test_episodes_that_no_policy_answered_are_played_again(tmp_path: Path) -> None:
    out, plan = tmp_path / "e.jsonl", Plan(scripted(), 1, 1)
    run(plan, out)
    (record,) = read_episodes(out).records
    lost = {
        name: getattr(record.episode, name) for name in ("env_id", "task_index", "seed", "group_id", "member")
    }
    out.unlink()
    writer = EpisodeWriter(out, **plan.header)
    writer.write(
        EpisodeRecord(Episode(**lost, end_reason=EndReason.POLICY_FAILED, trajectories=(), error="gone"), ())
    )
    writer.close()
    run(plan, out)
    assert [r.episode.status for r in read_episodes(out).records] == [Status.FAILED, Status.OK]


def test_a_file_of_another_evaluation_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "e.jsonl"
    run(Plan(scripted(), 2, 1), out)
    with pytest.raises(
        ConfigError, match=r"e\.jsonl holds an evaluation with other settings \(group differ\)"
    ):
        run(Plan(scripted(), 2, 2), out)
    with pytest.raises(ConfigError, match=r"\(config, policies differ\)"):
        run(Plan(scripted(policy="expert"), 2, 1), out)


def test_an_episode_that_fails_is_counted_and_listed_and_stops_nothing(tmp_path: Path) -> None:
    text = run(Plan(scripted("odd_envs:BreaksSometimes", "odd_envs:Parrot"), 12, 1), tmp_path / "e.jsonl")
    episodes = [r.episode for r in read_episodes(tmp_path / "e.jsonl").records]
    failed = [e for e in episodes if e.status is Status.FAILED]
    assert 0 < len(failed) < 12 == len(episodes)
    assert f"env_failed {len(failed)}" in text
    assert text.count("failed: task") == min(5, len(failed))


def test_who_plays_can_be_named_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    config = with_policies(config_of("agentgym/TicTacToe-v0", **DUEL), [f"foe={tmp_path / 'model'}"], None)
    assert config.policies["foe"] == PolicyConfig(model=str(tmp_path / "model"))
    assert config.policies["learner"] == PolicyConfig(model="model")


def test_seats_rotate_and_opponents_are_drawn_as_in_a_training(tmp_path: Path) -> None:
    duel = {**DUEL, "seat_rotation": True}
    run(Plan(scripted("agentgym/TicTacToe-v0", "expert", **duel), 6, 1), tmp_path / "e.jsonl")
    for record in read_episodes(tmp_path / "e.jsonl").records:
        first = {t.agent: t.policy for t in record.episode.trajectories}["player_1"]
        assert first == ("learner", "foe")[record.episode.task_index % 2]


def test_a_pool_has_nobody_to_play_outside_of_its_run() -> None:
    config = scripted(
        policies={"past": {"pool": "learner"}}, policy_mapping={"agent": "learner", "*": "past"}
    )
    with pytest.raises(
        ConfigError, match=r"policies\.past is a pool, .* say who plays with --policy past=WHO"
    ):
        evaluate(Plan(config, 1, 1), out=None, console=Console(file=io.StringIO()))


def with_checkpoints(run_dir: Path, config: Config, **steps: int) -> Path:
    """Give a run directory checkpoints by policy, the last one of each as named."""
    save_config(config, run_dir / "config.json")
    for policy, last in steps.items():
        folder = config.place_of(policy, run_dir / "checkpoints")
        for step in (last - 1, last):
            (folder / f"step-{step:06d}").mkdir(parents=True)
        (folder / "latest").write_text(f"step-{last:06d}\n")
    return run_dir


def test_the_last_checkpoint_of_a_run_can_play_under_another_name(tmp_path: Path) -> None:
    run_dir = with_checkpoints(tmp_path, config_of(), learner=4)
    other = config_of(policies={"pupil": {"model": "m"}}, policies_to_train=["pupil"])
    for config, name in ((config_of(), "learner"), (other, "pupil")):
        found = with_policies(config, [], run_dir).policies[name].model
        assert found == str(tmp_path / "checkpoints/step-000004/model")


def test_checkpoints_of_several_policies_are_those_of_the_newest_step_that_all_have(tmp_path: Path) -> None:
    policies = {"red": {"model": "a"}, "blue": {"model": "b"}}
    mapping = {"player_1": "red", "player_2": "blue"}
    config = config_of(policies=policies, policies_to_train=["red", "blue"], policy_mapping=mapping)
    run_dir = with_checkpoints(tmp_path, config, red=4, blue=3)  # killed between the two
    found = with_policies(config, [], run_dir).policies
    for policy in policies:
        assert found[policy].model == str(tmp_path / f"checkpoints/{policy}/step-000003/model")
    with pytest.raises(ConfigError, match="has trained a policy 'red', which the configuration has not"):
        with_policies(config_of(), [], run_dir)


@pytest.mark.parametrize(
    ("players", "checkpoint", "message"),
    [
        (["expert"], None, "--policy 'expert' is not of the form NAME=WHO, as in learner=expert"),
        (["boss=expert"], None, "there is no policy 'boss'; known: learner"),
        ([], Path("nowhere"), "nowhere is no run directory"),
        ([], Path("new"), "new has no checkpoint yet"),
        (["learner=expert"], Path("run"), "--checkpoint and --policy both say who plays as 'learner'"),
    ],
)
def test_players_that_make_no_sense_are_refused(
    tmp_path: Path, players: list[str], checkpoint: Path | None, message: str
) -> None:
    for name, steps in (("new", {}), ("run", {"learner": 4})):
        (tmp_path / name).mkdir()
        with_checkpoints(tmp_path / name, config_of(), **steps)
    with pytest.raises(ConfigError, match=message):
        with_policies(config_of(), players, tmp_path / checkpoint if checkpoint else None)
