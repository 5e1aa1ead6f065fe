import pytest
from builders import lease_of, within
from stage import FakePolicy, of

from agentgym.config import EnvConfig, PolicyConfig, SamplingConfig
from agentgym.episode import EndReason, Episode
from agentgym.errors import ConfigError
from agentgym.policy.template import ChatTokenizer
from agentgym.protocol import Lease
from agentgym.registry import make, spec
from agentgym.worker.calls import EnvCalls
from agentgym.worker.driver import DRIVERS
from agentgym.worker.rollout import Rollout
from agentgym.worker.seating import Seating, Served

TICTACTOE = "agentgym/TicTacToe-v0"
POLICIES = {
    "learner": PolicyConfig(model="a"),
    "frozen": PolicyConfig(model="b"),
    "expert": PolicyConfig(scripted="expert"),
    "random": PolicyConfig(scripted="random"),
}
SEATS = ("player_1", "player_2")


def seating_of(
    tokenizer: ChatTokenizer, *, env: EnvConfig | None = None, served: dict[str, Served] | None = None
) -> Seating:
    return Seating(
        env or EnvConfig(id=TICTACTOE),
        spec(TICTACTOE),
        POLICIES,
        sampling=SamplingConfig(max_tokens=4),
        tokenizer=tokenizer,
        served=served,
        trained=["learner"],
    )


def play(seating: Seating, lease: Lease) -> Episode:
    driver = DRIVERS["aec"](make(TICTACTOE))
    rollout = Rollout(
        lease, driver, config=EnvConfig(id=TICTACTOE), calls=EnvCalls(1), make_seat=seating.seat
    )
    return within(20, rollout.play()).episode


@pytest.mark.parametrize("seat", SEATS)
def test_an_expert_gets_its_own_reward_from_either_seat(tokenizer: ChatTokenizer, seat: str) -> None:
    (other,) = set(SEATS) - {seat}
    won = 0.0
    for seed in range(12):
        lease = lease_of(seed=seed, sampling_seed=seed, policies={seat: "expert", other: "random"})
        episode = play(seating_of(tokenizer), lease)
        assert (of(episode, seat).policy, of(episode, other).policy) == ("expert", "random")
        assert episode.reward(seat) == -episode.reward(other)
        assert episode.reward(seat) >= 0.0, "perfect play never loses"
        won += episode.reward(seat)
    assert won >= 6.0


def test_agents_that_are_not_named_play_the_policy_for_everybody_else(tokenizer: ChatTokenizer) -> None:
    episode = play(seating_of(tokenizer), lease_of(policies={"player_2": "expert", "*": "random"}))
    assert [of(episode, seat).policy for seat in SEATS] == ["random", "expert"]


def test_only_policies_in_training_are_trainable(tokenizer: ChatTokenizer) -> None:
    learner, frozen = FakePolicy(tokenizer, "1", version=5), FakePolicy(tokenizer, "2", version=0)
    seating = seating_of(
        tokenizer,
        served={"learner": Served(learner, tokenizer, 500), "frozen": Served(frozen, tokenizer, 500)},
    )
    episode = play(seating, lease_of(policies={"player_1": "learner", "player_2": "frozen"}))
    first, second = (of(episode, seat) for seat in SEATS)
    assert (first.trainable, second.trainable) == (True, False)
    assert set(first.versions[first.loss_mask]) == {5}
    assert set(second.versions[second.loss_mask]) == {0}
    assert learner.prompts
    assert frozen.prompts


def test_in_a_warm_up_the_teacher_plays_for_models_and_scripted_opponents_stay(
    tokenizer: ChatTokenizer,
) -> None:
    lease = lease_of(policies={"player_1": "learner", "player_2": "random"}, teacher="expert")
    episode = play(seating_of(tokenizer), lease)
    first, second = (of(episode, seat) for seat in SEATS)
    assert (first.policy, first.trainable, first.turns[0].finish_reason) == ("learner", True, "scripted")
    assert (second.policy, second.trainable) == ("random", False)
    assert first.reward >= 0.0


@pytest.mark.parametrize(
    ("budget", "context", "reason"),
    [
        (None, 10, EndReason.CONTEXT),
        (10, 500, EndReason.MAX_TOKENS),
        (500, 10, EndReason.CONTEXT),
    ],
)
def test_a_seat_ends_at_the_smaller_of_the_context_and_the_budget(
    tokenizer: ChatTokenizer, budget: int | None, context: int, reason: EndReason
) -> None:
    served = {"learner": Served(FakePolicy(tokenizer, "1"), tokenizer, context)}
    seating = seating_of(tokenizer, env=EnvConfig(id=TICTACTOE, max_tokens=budget), served=served)
    assert play(seating, lease_of()).end_reason is reason


def test_a_scripted_policy_that_does_not_exist_is_named(tokenizer: ChatTokenizer) -> None:
    driver = DRIVERS["aec"](make(TICTACTOE))
    driver.reset(1)
    with pytest.raises(ConfigError, match="no scripted policy 'grandmaster'"):
        seating_of(tokenizer).seat("player_1", driver, lease_of(teacher="grandmaster"))
