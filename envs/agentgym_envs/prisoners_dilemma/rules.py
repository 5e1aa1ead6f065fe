"""The rules: reading a move and paying for two of them."""

import re
from typing import Literal

Move = Literal["cooperate", "defect"]
MOVES: tuple[Move, ...] = ("cooperate", "defect")

POINTS: dict[tuple[Move, Move], float] = {
    ("defect", "cooperate"): 5.0,
    ("cooperate", "cooperate"): 3.0,
    ("defect", "defect"): 1.0,
    ("cooperate", "defect"): 0.0,
}
"""What the first of two moves earns against the second: the numbers of Axelrod's tournaments (The Evolution of
Cooperation, 1984)."""


def parse_move(text: str) -> Move | None:
    """Return the move that a text names first; None where it names none."""
    found = re.search("cooperate|defect", text.lower())
    return next((move for move in MOVES if found and move == found[0]), None)
