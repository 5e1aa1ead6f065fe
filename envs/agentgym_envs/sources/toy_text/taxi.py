"""Taxi: where the taxi, the passenger and the destination are, and which ways are open."""

from collections import deque
from typing import Any

from agentgym_envs.sources.view import View, chosen

CHOICES = ("south", "north", "east", "west", "pickup", "dropoff")
"""In the order of gymnasium's actions."""
PROMPT = (
    "You drive a taxi. Fetch the passenger, bring them to the destination. Places are row,column from the north-west. "
    "Answer south, north, east, west, pickup or dropoff."
)
STANDS = ((0, 0), (0, 4), (4, 0), (4, 3))
"""Where passengers wait and want to go."""
ON_BOARD = 4
"""The passenger's place in gymnasium's state when it is in the taxi."""
STEPS = {"south": (1, 0), "north": (-1, 0), "east": (0, 1), "west": (0, -1)}
WALLS_EAST_OF = {(0, 1), (1, 1), (3, 0), (4, 0), (3, 2), (4, 2)}
"""Cells with a wall on their east side."""

Place = tuple[int, int]


def open_ways(place: Place) -> list[str]:
    """Return the directions in which no wall stands."""
    row, column = place
    ways = {
        "south": row < 4,
        "north": row > 0,
        "east": column < 4 and place not in WALLS_EAST_OF,
        "west": column > 0 and (row, column - 1) not in WALLS_EAST_OF,
    }
    return [word for word, is_open in ways.items() if is_open]


def first_step(place: Place, goal: Place) -> str:
    """Return the first word of a shortest way between two different places."""
    words: dict[Place, str] = {}
    queue = deque([place])
    while goal not in words:
        at = queue.popleft()
        for word in open_ways(at):
            to = (at[0] + STEPS[word][0], at[1] + STEPS[word][1])
            if to not in words and to != place:
                words[to] = words.get(at, word)
                queue.append(to)
    return words[goal]


def describe(env: Any, observation: Any) -> str:
    """Return the state, for example "taxi 3,1 passenger 0,4 destination 0,0 open south north"."""
    row, column, passenger, destination = (int(part) for part in env.unwrapped.decode(int(observation)))
    where = "in taxi" if passenger == ON_BOARD else _named(STANDS[passenger])
    return (
        f"taxi {_named((row, column))} passenger {where} destination {_named(STANDS[destination])} "
        f"open {' '.join(open_ways((row, column)))}"
    )


def parse(env: Any, text: str) -> int | None:
    """Return the action. All six are legal anywhere; gymnasium punishes a wrong pickup or dropoff."""
    return chosen(text, CHOICES)


def success(env: Any, outcome: float) -> float:
    """Return 1 when the passenger is at the destination."""
    _, _, passenger, destination = env.unwrapped.decode(int(env.unwrapped.s))
    return float(passenger == destination)


def view(env: Any) -> View:
    """Return the view of a Taxi."""
    return View(PROMPT, CHOICES, describe, parse, success)


def _named(place: Place) -> str:
    return f"{place[0]},{place[1]}"
