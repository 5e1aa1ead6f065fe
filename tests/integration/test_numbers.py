"""The numbers that prove it: policy server, trainer and transformers agree on every token of whole episodes.

One real vLLM in float32 plays four environments: several turns, tools, agents by turns, agents at once. Everything
that an episode records is then computed a second time from its ids. `--log-cli-level=INFO` shows the numbers.
"""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import within
from lab import (
    Choosy,
    Coached,
    Lab,
    Table,
    batch_message,
    delivered,
    megatron_groups,
    sampled,
    trainer_logprobs,
)
from numpy.typing import NDArray
from plays import play_aec, play_parallel, play_single
from policy_builders import perturbed, reference_logprobs, reference_routes
from trainer_builders import config_of

from agentgym.batch import split
from agentgym.episode import EndReason, Episode, Trajectory, no_route
from agentgym.errors import IntegrityError
from agentgym.messages import Message
from agentgym.policy.client import Policy
from agentgym.policy.template import ChatTokenizer
from agentgym.protocol import Lease
from agentgym.registry import make
from agentgym.tiny_model import init_model
from agentgym_envs.calculator.policies import call
from agentgym_envs.tictactoe.prompts import CHOICES
from agentgym_envs.tictactoe.rules import free_cells
from agentgym_trainers.losses.kl import kl_to_rollout
from agentgym_trainers.megatron.trainer import Trainer


def legal(client: Policy, tokenizer: ChatTokenizer, _lease: Lease) -> Policy:
    """A player that keeps to the rules of tic-tac-toe; its one-token answers are still the model's."""

    def accept(prompt: Sequence[int], answer: Sequence[int]) -> bool:
        board = tokenizer.decode(prompt).rpartition("<|user|>")[2][:9]
        return tokenizer.decode(answer) in [CHOICES[cell] for cell in free_cells(board)]

    return Choosy(client, accept)


def with_calls(client: Policy, tokenizer: ChatTokenizer, lease: Lease) -> Policy:
    """A player whose first and third answer are calls, so that results of tools stand before what it samples."""
    first, third = (call("calculate", expression=f"{17 + lease.member} * {n}") for n in (3, 4))
    return Coached(client, tokenizer, [first, None, third])


GUESSING = Table(
    "agentgym/GuessNumber-v0", 3, 4, max_tokens=lambda lease: 24, kwargs={"consistency_reward": 0.25}
)
_logger = logging.getLogger(__name__)

TABLES = (
    GUESSING,
    Table("agentgym/Calculator-v0", 1, 3, max_tokens=lambda lease: 32, player=with_calls),
    Table("agentgym/TicTacToe-v0", 1, 3, max_tokens=lambda lease: 1, player=legal),
    Table("agentgym/SplitCoins-v0", 1, 2, max_tokens=lambda lease: 24),
)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    running = Lab(tmp_path_factory.mktemp("lab"))
    yield running
    running.stop()


@pytest.fixture(scope="module")
def episodes(lab: Lab) -> list[Episode]:
    """Of all environments, played with the weights of version 0."""
    assert lab.version == 0
    return [episode for table in TABLES for episode in within(120, lab.play(table))]


@pytest.fixture(scope="module", autouse=True)
def process_groups() -> Iterator[None]:
    with megatron_groups():
        yield


def trajectories_of(episodes: Sequence[Episode]) -> list[Trajectory]:
    return [trajectory for episode in episodes for trajectory in episode.trajectories]


def reference(model: Path, trajectory: Trajectory) -> NDArray[np.float32]:
    """The log-probabilities [K] of all tokens by transformers; the first one has none."""
    tokens = trajectory.tokens.tolist()
    logprobs = reference_logprobs(model, tokens[:1], tokens[1:], recorded=trajectory.routes)
    return np.concatenate([[np.nan], logprobs])


def test_the_episodes_are_worth_measuring(episodes: list[Episode]):
    by_env = {table.env_id: [e for e in episodes if e.env_id == table.env_id] for table in TABLES}
    guess, calculator, board, coins = by_env.values()
    assert {e.end_reason for e in [*guess, *board, *coins]} == {EndReason.TERMINATED}
    assert {e.end_reason for e in calculator} == {EndReason.MAX_TURNS}
    assert all(len(t.turns) == 5 or t.reward >= 1 for t in trajectories_of(guess))
    assert all(len(t.turns) == 4 and not sampled(t)[t.turns[2].start] for t in trajectories_of(calculator))
    assert all(len(e.agents) == 2 for e in [*board, *coins])
    assert all(len(t.turns) >= 2 for t in trajectories_of([*board, *coins]))
    reasons = {turn.finish_reason for t in trajectories_of(guess) for turn in t.turns}
    assert reasons == {"stop", "length"}
    assert sum(sampled(t).sum() for t in trajectories_of(episodes)) > 1000


def test_records_are_whole_and_turns_hold_what_the_environment_paid(episodes: list[Episode]):
    for episode in map(delivered, episodes):
        for trajectory in episode.trajectories:
            trajectory.check()
        rewards = {
            agent: [turn.reward for t in episode.trajectories if t.agent == agent for turn in t.turns]
            for agent in episode.agents
        }
        assert rewards == {agent: pytest.approx(paid) for agent, paid in referee(episode).items()}
    assert sum(turn.reward != 0 for t in trajectories_of(episodes) for turn in t.turns) > 5


class Repeats:
    """Says again what an agent said."""

    def __init__(self, episode: Episode, agent: str) -> None:
        self.messages = [turn.message for t in episode.trajectories if t.agent == agent for turn in t.turns]

    def reset(self, agent: str, seed: int) -> None:
        self.left = list(self.messages)

    def act(self, messages: list[Message], tools: list[object], info: dict[str, object]) -> Message:
        return self.left.pop(0)


def referee(episode: Episode) -> dict[str, list[float]]:
    """What a fresh environment pays each agent for the same answers."""
    kwargs = next(table.kwargs for table in TABLES if table.env_id == episode.env_id)
    env = make(episode.env_id, **kwargs)
    players = {agent: Repeats(episode, agent) for agent in episode.agents}
    match episode.env_id:
        case "agentgym/TicTacToe-v0":
            seats = play_aec(env, players, episode.seed)
        case "agentgym/SplitCoins-v0":
            seats = play_parallel(env, players, episode.seed)
        case _:
            turns = len(players["agent"].messages)
            seats = {"agent": play_single(env, players["agent"], episode.seed, max_turns=turns)}
    return {agent: seat.rewards for agent, seat in seats.items()}


def test_every_sampled_token_has_the_logprob_of_transformers(lab: Lab, episodes: list[Episode]):
    differences = [
        np.abs(trajectory.logprobs - reference(lab.models[0], trajectory))[sampled(trajectory)]
        for trajectory in trajectories_of(episodes)
    ]
    largest = np.concatenate(differences).max()
    _logger.info("%d tokens, largest difference %.2e", sum(map(len, differences)), largest)
    assert largest <= 1e-5


def test_every_token_has_the_routes_of_transformers_but_the_last_which_has_none(
    lab: Lab, episodes: list[Episode]
):
    for trajectory in trajectories_of(episodes):
        assert trajectory.routes is not None
        missing = trajectory.routes == no_route(trajectory.routes.dtype)
        assert missing[-1].all()
        assert not missing[:-1].any()
        expected = reference_routes(lab.models[0], trajectory.tokens.tolist(), trajectory.routes)
        assert np.array_equal(np.sort(trajectory.routes[:-1], axis=-1), expected[:-1])


def test_the_trainer_gives_the_sampled_tokens_the_probability_that_they_were_sampled_with(
    lab: Lab, episodes: list[Episode]
):
    header, arrays = batch_message(episodes, version=0)
    ours, rollout = trainer_logprobs(lab.models[0], header, arrays, dtype=torch.float32, replayed=True)
    assert len(ours) == sum(sampled(trajectory).sum() for trajectory in trajectories_of(episodes))
    largest = (ours - rollout).abs().max()
    _logger.info("%d tokens, largest difference %.2e", len(ours), largest)
    assert largest <= 1e-4


@pytest.mark.usefixtures("episodes")  # they are of version 0, so they come first
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_replayed_routes_bring_a_bfloat16_trainer_closer_to_the_rollout(lab: Lab, tmp_path: Path, seed: int):
    """Rounding sends some tokens to other experts; with the rollout's choice replayed only rounding is left.

    The weights are those of `init_model`, nothing about them is chosen. Over seeds 1 to 12 replay divides the
    divergence by 4 to 20; where it did nothing, by 1.
    """
    init_model(tmp_path / "model", seed=seed)
    lab.load(tmp_path / "model")
    header, arrays = batch_message(within(120, lab.play(GUESSING)), lab.version)
    kl = {}
    for replayed in (True, False):
        pair = trainer_logprobs(lab.model, header, arrays, dtype=torch.bfloat16, replayed=replayed)
        kl[replayed] = kl_to_rollout(*pair)["kl_rollout"].mean().item()
    _logger.info("mean k3 over %d tokens: %.2e with replay, %.2e without", len(pair[0]), kl[True], kl[False])
    assert kl[True] < kl[False] / 2


@pytest.mark.usefixtures("episodes")
def test_tokens_are_of_the_version_that_is_recorded_while_weights_change_under_the_episodes(
    lab: Lab, tmp_path: Path
):
    first = lab.version
    updates = [perturbed(lab.model, tmp_path / f"update-{seed}", seed=seed) for seed in (1, 2, 3)]
    # Answers of different lengths: whenever one is done, the others are in the middle.
    table = Table(
        "agentgym/GuessNumber-v0", 1, 6, max_tokens=lambda lease: 40 + 7 * lease.member, kwargs={"turns": 8}
    )
    trajectories = trajectories_of(within(120, lab.play(table, updates)))
    everyone = {int(version) for t in trajectories for version in t.versions[sampled(t)]}
    assert everyone == set(range(first, first + 4))
    assert any(len(set(t.versions[turn.start : turn.end])) > 1 for t in trajectories for turn in t.turns)
    largest, same = 0.0, []
    for version in sorted(everyone):
        for trajectory in trajectories:
            own = trajectory.versions == version
            difference = np.abs(trajectory.logprobs - reference(lab.models[version], trajectory))
            largest = max(largest, difference[own].max(initial=0.0))
            same.append(difference[sampled(trajectory) & ~own] <= 1e-4)
            # A token's row comes from the computation that the next token was sampled from.
            behind = own[1:]
            assert trajectory.routes is not None
            expected = reference_routes(lab.models[version], trajectory.tokens.tolist(), trajectory.routes)
            assert np.array_equal(np.sort(trajectory.routes[:-1], axis=-1)[behind], expected[:-1][behind])
    share = np.concatenate(same).mean()
    _logger.info("largest difference %.2e; under other weights %.2g are as near as 1e-4", largest, share)
    assert largest <= 1e-5
    assert share < 0.01


@pytest.mark.usefixtures("episodes")
def test_what_a_trainer_of_adapters_sends_is_what_it_trains(
    lab: Lab, episodes: list[Episode], tmp_path: Path
):
    """Over two steps, each played with what the step before sent, and nothing but adapters was sent."""
    settings = {"lora_rank": 8, "max_grad_norm": 1e9}
    trainer = Trainer(
        config_of(lab.models[0], trainer=settings), policy="learner", exchange=tmp_path, checkpoints=tmp_path
    )
    header, arrays = batch_message(episodes, version=0)
    asked = {"learning_rate": 0.05, "updates": 3, "publish": True, "checkpoint": True}
    for _ in range(2):
        done = trainer.train(header.model_copy(update=asked), arrays)
        sent, whole = Path(done.weights), Path(done.checkpoint) / "model/model.safetensors"
        _logger.info("%d bytes instead of %d", sent.stat().st_size, whole.stat().st_size)
        lab.load(Path(done.checkpoint) / "model", adapters=sent)
        trainer.step = lab.version  # the lab loaded other weights before
        played = within(120, lab.play(GUESSING))
        header, arrays = batch_message(played, lab.version)
        differences = [
            np.abs(trajectory.logprobs - reference(lab.model, trajectory))[sampled(trajectory)]
            for trajectory in trajectories_of(played)
        ]
        assert all((difference <= 1e-5).all() for difference in differences)
        ours, rollout = trainer_logprobs(lab.model, header, arrays, dtype=torch.float32, replayed=True)
        assert (ours - rollout).abs().max() <= 1e-4
    metrics = trainer.train(header, arrays).metrics
    _logger.info("largest difference to the trainer's own model %.2e", metrics["mismatch_max"])
    assert metrics["mismatch_max"] <= 1e-4
    assert metrics["route_coverage"] == 1


def test_a_batch_is_trained_as_its_workers_recorded_it_or_not_at_all(
    lab: Lab, episodes: list[Episode], tmp_path: Path
):
    header, arrays = batch_message(episodes, version=0)
    made = [checksum for episode in episodes for checksum in episode.checksums]
    assert sorted(header.checksums) == sorted(made)
    trainer = Trainer(config_of(lab.models[0]), policy="learner", exchange=tmp_path, checkpoints=tmp_path)
    first = header.lengths[0]
    for name in ("tokens", "sampled", "logprobs", "versions", "routes"):
        damaged = arrays[name].copy()
        damaged[first:].reshape(-1).view(np.uint8)[0] ^= 1  # the first token of the second sample
        with pytest.raises(
            IntegrityError, match=r"sample 1 of step 1: a trajectory of .* was changed on the way"
        ):
            trainer.train(header, {**arrays, name: damaged})
    assert trainer.step == 0
    for sample in split(arrays, header.lengths, header.checksums):
        sample.verify()
    done = trainer.train(header, arrays)
    assert done.metrics["mismatch_max"] <= 1e-4
    assert done.metrics["route_coverage"] == 1
