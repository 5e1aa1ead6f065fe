import pytest
from builders import ANSWER, PROMPT, episode_of, trajectory_of

from agentgym.episode import SCRIPTED
from agentgym.errors import DivergedError
from agentgym.prefix import Prefix, prefix_of, replayed

TWO = episode_of({"a": [0.0, 1.0, 2.0], "b": [0.0, 1.0]})


def prompt(answers: int) -> list[int]:
    """What an agent of `builders.trajectory_of` has read after so many answers."""
    return list(range(answers * (PROMPT + ANSWER) + PROMPT))


def said(answer: int) -> list[int]:
    return list(range(len(prompt(answer)), len(prompt(answer)) + ANSWER))


def test_the_first_answers_are_given_again_and_then_everybody_answers_alone() -> None:
    prefix = Prefix(prefix_of(TWO, 1))
    first = prefix.next({"a": prompt(0)})
    assert first is not None
    assert (first["a"]["tokens"], first["a"]["message"]["content"]) == (said(0), "answer 0")
    assert prefix.next({"b": prompt(0)}) is not None
    assert not prefix.over
    assert prefix.next({"a": prompt(1)}) is None
    assert prefix.over
    assert prefix.next({"b": [1, 2, 3]}) is None  # nobody compares any more


def test_agents_that_are_asked_together_all_answer_alone_where_one_of_them_does() -> None:
    prefix = Prefix(prefix_of(TWO, 2))
    for number in (0, 1):
        again = prefix.next({"a": prompt(number), "b": prompt(number)})
        assert again is not None
        assert {agent: recorded["tokens"] for agent, recorded in again.items()} == dict.fromkeys(
            "ab", said(number)
        )
    assert prefix.next({"a": prompt(2), "b": [0]}) is None  # the record has no third prompt of b


@pytest.mark.parametrize("answers", [0, 1])
def test_what_is_read_must_be_what_the_record_says_up_to_the_turn_itself(answers: int) -> None:
    prefix = Prefix(prefix_of(TWO, 1))
    for number in range(answers):
        assert prefix.next({"a": prompt(number)}) is not None
    with pytest.raises(DivergedError, match="agent 'a' read something else than in the record"):
        prefix.next({"a": [*prompt(answers)[:-1], 0]})


def test_without_answers_there_is_nothing_to_repeat() -> None:
    assert prefix_of(TWO, 0) == {}
    assert Prefix({}).over
    assert Prefix({}).next({"a": [1]}) is None


def test_scripted_players_are_left_out_and_where_only_they_are_asked_the_prefix_goes_on() -> None:
    record = episode_of(
        trajectories=[
            trajectory_of([0.0, 0.0], agent="a"),
            trajectory_of([0.0, 0.0], agent="b", trainable=False, finish=SCRIPTED),
        ]
    )
    answers = prefix_of(record, 1)
    assert list(answers) == ["a"]
    prefix = Prefix(answers)
    assert prefix.next({}) == {}
    assert not prefix.over


def test_answers_are_counted_over_the_branches_of_an_agent() -> None:
    branched = episode_of(trajectories=[trajectory_of([0.0]), trajectory_of([0.0, 0.0], branch=1)])
    prefix = Prefix(prefix_of(branched, 2))
    assert [prefix.next({"agent": prompt(0)}) is not None for _ in range(2)] == [True, True]
    assert prefix.next({"agent": prompt(1)}) is None


def test_replayed_answers_are_counted_per_agent() -> None:
    assert replayed(TWO) == 0
    fork = episode_of(
        trajectories=[
            trajectory_of([0.0] * 3, agent="a", replayed=2),
            trajectory_of([0.0] * 2, agent="b", replayed=1),
        ]
    )
    assert replayed(fork) == 2
