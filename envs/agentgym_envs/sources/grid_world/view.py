"""What an agent of Minigrid sees, in words: things by how far they are ahead and to the side."""

from typing import Any

from minigrid.core.constants import IDX_TO_COLOR, IDX_TO_OBJECT, STATE_TO_IDX

from agentgym_envs.sources.view import View, chosen

CHOICES = ("left", "right", "forward", "pickup", "drop", "toggle", "done")
"""In the order of Minigrid's actions."""
PROMPT = (
    "You walk a grid. left and right turn you, forward goes one step, pickup and drop move the thing ahead, "
    "toggle opens it. Answer left, right, forward, pickup, drop, toggle or done."
)
_NAMELESS = ("unseen", "empty", "wall", "floor", "agent")
_DOOR_STATES = {index: state for state, index in STATE_TO_IDX.items()}


def describe(env: Any, observation: Any) -> str:
    """Return the mission (in the first turn), the free way, and what is in view, the nearest first."""
    base = env.unwrapped
    image = observation["image"]
    middle, front = image.shape[0] // 2, image.shape[1] - 1
    seen = [
        (front - row + abs(column - middle), column - middle, front - row, _named(*image[column, row]))
        for column in range(image.shape[0])
        for row in range(image.shape[1])
        if IDX_TO_OBJECT[int(image[column, row, 0])] not in _NAMELESS and (column, row) != (middle, front)
    ]
    lines = [observation["mission"]] if base.step_count == 0 else []
    lines += [f"free: {_free_way(image, middle, front)}"]
    lines += [f"{name}: {_place(ahead, aside)}" for _, aside, ahead, name in sorted(seen)]
    if base.carrying is not None:
        lines.append(f"you carry: {base.carrying.color} {base.carrying.type}")
    return "\n".join(lines)


def parse(env: Any, text: str) -> int | None:
    """Return the action; all seven are legal anywhere, some without effect."""
    return chosen(text, CHOICES)


def success(env: Any, outcome: float) -> float:
    """Return 1 for a mission that is done."""
    return float(outcome > 0)


def view(env: Any) -> View:
    """Return the view of a Minigrid or BabyAI environment."""
    return View(PROMPT, CHOICES, describe, parse, success)


def _named(kind: Any, color: Any, state: Any) -> str:
    name = f"{IDX_TO_COLOR[int(color)]} {IDX_TO_OBJECT[int(kind)]}"
    return f"{_DOOR_STATES[int(state)]} {name}" if name.endswith("door") else name


def _place(ahead: int, aside: int) -> str:
    where = [f"{ahead} ahead"] if ahead else []
    if aside:
        where.append(f"{abs(aside)} {'right' if aside > 0 else 'left'}")
    return " ".join(where)


def _free_way(image: Any, middle: int, front: int) -> int:
    """Return how many steps forward nothing is in the way."""
    steps = 0
    while steps < front and IDX_TO_OBJECT[int(image[middle, front - steps - 1, 0])] in (
        "empty",
        "floor",
        "goal",
    ):
        steps += 1
    return steps
