from typing import Any

import pytest
from builders import lease_of, within
from http_server import Answering, Heard, completion, listening
from stage import FakePolicy, of

from agentgym.config import EnvConfig, SamplingConfig
from agentgym.episode import NOT_SAMPLED, EndReason, Episode
from agentgym.errors import ConfigError
from agentgym.messages import assistant
from agentgym.policy.template import ChatTokenizer
from agentgym.policy_config import PolicyConfig
from agentgym.protocol import Lease
from agentgym.registry import spec
from agentgym.worker.pool import EnvPool
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
    tokenizer: ChatTokenizer,
    *,
    env: EnvConfig | None = None,
    policies: dict[str, PolicyConfig] = POLICIES,
    served: dict[str, Served] | None = None,
) -> Seating:
    return Seating(
        env or EnvConfig(id=TICTACTOE),
        spec(TICTACTOE),
        policies,
        sampling=SamplingConfig(max_tokens=4),
        tokenizer=tokenizer,
        served=served,
        trained=["learner"],
    )


async def play_in(seating: Seating, lease: Lease) -> Episode:
    env = EnvConfig(id=TICTACTOE)
    pool = EnvPool(env, slots=1)
    host = await pool.take()
    try:
        return (await Rollout(lease, host, config=env, make_seat=seating.seat).play()).episode
    finally:
        pool.give_back(host, reusable=True)
        await pool.close()


def play(seating: Seating, lease: Lease) -> Episode:
    return within(20, play_in(seating, lease))


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


def test_a_snapshot_is_played_by_its_pools_servers_and_named_with_its_version(
    tokenizer: ChatTokenizer,
) -> None:
    past = FakePolicy(tokenizer, "1", version=40)
    seating = seating_of(
        tokenizer,
        policies={**POLICIES, "past": PolicyConfig(pool="learner")},
        served={"past": Served(past, tokenizer, 500)},
    )
    episode = play(seating, lease_of(policies={"player_1": "past@40", "player_2": "random"}))
    trajectory = of(episode, "player_1")
    assert (trajectory.policy, trajectory.trainable) == ("past@40", False)
    assert set(trajectory.versions[trajectory.loss_mask]) == {40}


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
    with pytest.raises(ConfigError, match="no scripted policy 'grandmaster'"):
        play(seating_of(tokenizer), lease_of(teacher="grandmaster"))


def test_an_endpoints_words_are_logged_in_our_tokens_and_never_trained(tokenizer: ChatTokenizer) -> None:
    heard = []

    async def answer(request: Heard) -> tuple[int, Any]:
        heard.append(request.body["messages"])
        return 200, completion("5", "stop")

    episode = against_an_endpoint(tokenizer, answer)
    trajectory = of(episode, "player_2")
    assert (trajectory.policy, trajectory.trainable) == ("judge", False)
    assert (trajectory.versions == NOT_SAMPLED).all()
    turn = trajectory.turns[0]
    assert tokenizer.decode(trajectory.tokens[turn.start : turn.end].tolist()) == "5<|end|>"
    assert (turn.message, turn.finish_reason) == (assistant("5"), "stop")
    assert turn.seconds > 0.0
    assert [message["role"] for message in heard[0]] == ["system", "user"]


def test_an_endpoint_that_refuses_fails_the_episode_and_is_named(tokenizer: ChatTokenizer) -> None:
    async def answer(_: Heard) -> tuple[int, Any]:
        return 401, "who are you?"

    episode = against_an_endpoint(tokenizer, answer)
    assert episode.end_reason is EndReason.POLICY_FAILED
    assert "policy 'judge': http://127.0.0.1:" in episode.error
    assert episode.error.endswith("/v1/chat/completions answered 401: who are you?")


def against_an_endpoint(tokenizer: ChatTokenizer, answer: Answering) -> Episode:
    """A scripted player moves first, an endpoint second."""

    async def scene() -> Episode:
        async with listening(answer) as url:
            policies = {**POLICIES, "judge": PolicyConfig(endpoint=url, model="m")}
            seating = seating_of(tokenizer, policies=policies)
            lease = lease_of(policies={"player_1": "expert", "player_2": "judge"})
            try:
                return await play_in(seating, lease)
            finally:
                await seating.close()

    return within(20, scene())
