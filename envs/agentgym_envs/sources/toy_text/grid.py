"""Grids as lines of letters, and the shortest way through them."""

from collections import deque
from collections.abc import Sequence

AGENT = "A"
STEPS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
"""(row, column) that a word moves by."""


def drawn(rows: Sequence[str], width: int, position: int) -> str:
    """Return the rows with the agent on the cell that is `position` in reading order."""
    row, column = divmod(position, width)
    lines = [*rows]
    lines[row] = lines[row][:column] + AGENT + lines[row][column + 1 :]
    return "\n".join(lines)


def way(grid: str, goal: str, forbidden: str) -> list[str]:
    """Return a shortest way of the agent to a cell `goal` around the forbidden ones; empty where there is none."""
    rows = grid.split("\n")
    start = next((r, row.index(AGENT)) for r, row in enumerate(rows) if AGENT in row)
    ways: dict[tuple[int, int], list[str]] = {start: []}
    queue = deque([start])
    while queue:
        at = queue.popleft()
        if rows[at[0]][at[1]] == goal:
            return ways[at]
        for word, (down, right) in STEPS.items():
            to = (at[0] + down, at[1] + right)
            inside = 0 <= to[0] < len(rows) and 0 <= to[1] < len(rows[0])
            if inside and to not in ways and rows[to[0]][to[1]] not in forbidden:
                ways[to] = [*ways[at], word]
                queue.append(to)
    return []
