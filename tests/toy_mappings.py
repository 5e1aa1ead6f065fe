"""Functions for `policy_mapping_fn`, as users write them and as they go wrong."""

NO_FUNCTION = ["player_1"]


def by_first_seat(agent: str, episode: dict[str, int]) -> str:
    """The learner moves first in even groups."""
    return "learner" if (agent == "player_1") == (episode["group_id"] % 2 == 0) else "expert"


def tells_what_it_hears(agent: str, episode: dict[str, int]) -> str:
    assert episode == {"group_id": 3, "task_index": 103, "seed": 203}
    return "learner"


def in_doubt(agent: str, episode: dict[str, int]) -> str:
    return "nobody"


def at_a_loss(agent: str, episode: dict[str, int]) -> str:
    raise KeyError("who")


def passive(agent: str, episode: dict[str, int]) -> str:
    return "foe"
