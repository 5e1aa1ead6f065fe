"""A turn's reward is on the turn's tokens: from the environment, through a real worker, to the samples of a step.

The worker, the wire, the codec and the assembling code are the real ones; only the policy server is a stand-in that
answers from what it is asked.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import config_of, group_of, lease_of, within
from stage import of, rewards
from wire_peers import Office, open_context

from agentgym.algorithm_config import AlgorithmConfig
from agentgym.batch import Sample
from agentgym.coordinator.assemble import assemble
from agentgym.episode import Episode
from agentgym.episode_codec import decode_episode
from agentgym.metrics import episode_metrics
from agentgym.policy.template import ChatTokenizer
from agentgym.protocol import Completion, Drain, EpisodeDone, Generate, Servers
from agentgym.worker.process import Worker

Answer = Callable[[str], str]


def play(folder: Path, model: Path, env_id: str, games: Sequence[Answer], **sections: Any) -> list[Episode]:
    """Play an episode per game through a worker; each game answers the prompts of its episode."""
    tokenizer = ChatTokenizer(model)

    async def serve(server: Office, game: list[Answer]) -> None:
        while True:
            asked = await server.packet()
            wanted = asked.expect(Generate)
            prompt = asked.arrays["tokens"]
            text = game[0](tokenizer.decode(prompt.tolist()))
            tokens = np.array([*tokenizer.encode(text), tokenizer.stop_token_ids[0]], np.int32)
            arrays = {
                "tokens": tokens,
                "logprobs": np.full(len(tokens), -0.5, np.float32),
                "routes": np.ones((len(prompt) + len(tokens) - 1 - wanted.routes_start, 1, 1), np.uint8),
            }
            server.channel.send(
                Completion(finish_reason="stop", version_spans=[(0, 0)]),
                arrays,
                to=asked.sender,
                request_id=asked.request_id,
            )

    async def scene() -> list[Episode]:
        config = config_of(env_id, model=str(model), workers={"slots": 1}, **sections)
        with open_context() as context:
            office = Office(context, f"ipc://{folder}/coordinator")
            server, game = Office(context, f"ipc://{folder}/server"), [games[0]]
            worker = asyncio.create_task(Worker(config, name="worker", coordinator=office.address).run())
            serving = asyncio.create_task(serve(server, game))
            identity = await office.welcome(
                Servers(addresses={"learner": [server.address]}, max_model_len=512)
            )
            episodes = []
            for member, answer in enumerate(games):
                game[0] = answer
                office.channel.send(lease_of(member, member=member), to=identity)
                while not isinstance((packet := await office.packet()).header, EpisodeDone):
                    assert not worker.done()
                episodes.append(decode_episode(packet.header.episode, packet.arrays))
            office.channel.send(Drain(), to=identity)
            await worker
            serving.cancel()
            return episodes

    return within(60, scene())


def learned(episodes: Sequence[Episode], **algorithm: Any) -> list[tuple[str, list[float]]]:
    """Assemble a step from the group; return each sample's agent and the advantage of each of its turns."""
    settings = AlgorithmConfig.model_validate({"normalize_batch": False, **algorithm})
    # With an entropy bonus, plays without a preference stay in the batch.
    settings = settings.model_copy(update={"entropy_coefficient": 1e-9})
    found = assemble(
        [group_of(*episodes)],
        policies=["learner"],
        algorithm=settings,
        max_tokens=32,
        warmup=False,
        version=0,
        max_staleness=0,
    )["learner"]
    by_tokens = {t.tokens.tobytes(): t for episode in episodes for t in episode.trajectories}
    return [
        (by_tokens[sample.tokens.tobytes()].agent, turn_values(sample, by_tokens[sample.tokens.tobytes()]))
        for sample in found.samples
    ]


def turn_values(sample: Sample, trajectory: Any) -> list[float]:
    """The advantage of each turn: the same on all its tokens, and nothing between turns."""
    values, rest = [], sample.advantages.copy()
    for turn in trajectory.turns:
        (value,) = set(sample.advantages[turn.start : turn.end].tolist())
        values.append(round(value, 5))
        rest[turn.start : turn.end] = 0
    assert not rest.any()
    return values


def letters(wrong: str) -> Answer:
    """Repeat the letter that is shown, but say something else where it is one of `wrong`'s turns."""

    def answer(prompt: str) -> str:
        turn = prompt.count("<|assistant|>") - 1
        shown = prompt.rpartition("<|user|>")[2][0]
        return "?" if str(turn) in wrong else shown

    return answer


def test_the_reward_of_each_turn_is_on_its_tokens_and_not_only_the_last_one(
    tmp_path: Path, model: Path
) -> None:
    first, second = play(tmp_path, model, "odd_envs:Letters", [letters("1"), letters("02")])
    assert rewards(first.trajectories[0]) == [1.0, 0.0, 1.0]
    assert rewards(second.trajectories[0]) == [0.0, 1.0, 0.0]
    # Rewards alone: each turn against the same turn of the other play.
    assert learned([first, second], advantage="turn_group_mean", discount=0.0) == [
        ("agent", [0.5, -0.5, 0.5]),
        ("agent", [-0.5, 0.5, -0.5]),
    ]
    # Rewards-to-go at 0.5: [1.25, 0.5, 1] against [0.5, 1, 0].
    assert learned([first, second], advantage="turn_group_mean", discount=0.5) == [
        ("agent", [0.375, -0.25, 0.5]),
        ("agent", [-0.375, 0.25, -0.5]),
    ]


def moves(by_free_cells: str) -> Answer:
    """Play tictactoe by the number of free cells: the first digit on an empty board, and so on."""

    def answer(prompt: str) -> str:
        board = prompt.rpartition("<|user|>")[2]
        return by_free_cells[9 - board.count(".")]

    return answer


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory, model: Path) -> list[Episode]:
    """Two games of tictactoe: player_1 wins with its third move, player_2 wins with its third move."""
    folder = tmp_path_factory.mktemp("games")
    return play(folder, model, "agentgym/TicTacToe-v0", [moves("14253"), moves("142596")])


def test_the_end_of_a_game_is_the_reward_of_both_players_last_answers(games: list[Episode]) -> None:
    assert [episode.agents for episode in games] == [["player_1", "player_2"]] * 2
    assert [rewards(of(games[0], agent)) for agent in games[0].agents] == [[0, 0, 1], [0, -1]]
    assert [rewards(of(games[1], agent)) for agent in games[1].agents] == [[0, 0, -1], [0, 0, 1]]
    assert [games[0].agent_metrics[agent]["success"] for agent in games[0].agents] == [1.0, 0.0]


def test_each_player_learns_from_its_own_reward_and_never_from_the_others(games: list[Episode]) -> None:
    assert sorted(learned(games, advantage="group_mean")) == [
        ("player_1", [-1.0] * 3),
        ("player_1", [1.0] * 3),
        ("player_2", [-1.0] * 2),
        ("player_2", [1.0] * 3),
    ]
    # Turn by turn without discounting: only the answers at the end of a game can be told apart.
    assert sorted(learned(games, advantage="turn_group_mean", discount=0.0)) == [
        ("player_1", [0.0, 0.0, -1.0]),
        ("player_1", [0.0, 0.0, 1.0]),
        ("player_2", [0.0, -0.5]),
        ("player_2", [0.0, 0.5, 0.0]),
    ]


def test_what_an_agent_accumulates_while_it_waits_is_earned_by_its_previous_answer(
    tmp_path: Path, model: Path
) -> None:
    (episode,) = play(tmp_path, model, "toy_envs:Relay", [lambda prompt: "x"])
    assert rewards(of(episode, "a")) == [1.0, 1.0]
    assert rewards(of(episode, "b")) == [1.0, 0.0]
    # The first answer of a paid b, who had not answered yet: no token earned it, but it is shown.
    assert episode.agent_metrics["b"]["unattributed_reward"] == 1.0
    assert episode_metrics([episode])["agent/toy_envs.Relay/b/unattributed_reward"] == 1.0


def test_weights_and_reward_functions_reach_the_batch(tmp_path: Path, model: Path) -> None:
    answers: list[Answer] = [lambda prompt: "a b c", lambda prompt: "a"]
    sections = {"env": {"rewards": ["toy_rewards:words"], "reward_weights": {"words": 0.25}}}
    long, short = play(tmp_path, model, "toy_rewards:Debate", answers, **sections)
    # The class gives "heard" the weight 0, "own_words" counts fully, "words" a quarter: two answers of 3 words each.
    assert rewards(of(long, "a")) == [0.0, 6.0 + 0.25 * 6.0]
    assert of(long, "a").turns[-1].rewards == {"heard": 1.0, "own_words": 6.0, "words": 6.0}
    assert rewards(of(short, "a")) == [0.0, 2.0 + 0.25 * 2.0]
    assert sorted(learned([long, short], advantage="group_mean"))[:2] == [
        ("a", [-2.5, -2.5]),
        ("a", [2.5, 2.5]),
    ]
    shown = episode_metrics([long])
    assert shown["agent/toy_rewards.Debate/a/reward"] == 7.5
    assert shown["agent/toy_rewards.Debate/a/reward/own_words"] == 6.0
    assert shown["agent/toy_rewards.Debate/a/reward/heard"] == 2.0
