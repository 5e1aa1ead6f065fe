"""Connect four: the board from the mover's side, a column as answer, and its scripted players."""

from functools import partial
from typing import Any

from agentgym.messages import AgentId, Message, ToolSchema, assistant
from agentgym.policy.scripted import RandomLegal, last_text
from agentgym_envs.sources.view import View, chosen, won

COLUMNS, ROWS = 7, 6
CHOICES = tuple("1234567")
PROMPT = "Connect four x; o is the other. Answer the column, 1-7."
_LINES = tuple(
    tuple((row + k * down, column + k * right) for k in range(4))
    for row in range(ROWS)
    for column in range(COLUMNS)
    for down, right in ((0, 1), (1, 0), (1, 1), (1, -1))
    if row + 3 * down < ROWS and 0 <= column + 3 * right < COLUMNS
)
"""All rows of four cells."""


def describe(env: Any, agent: AgentId, observation: Any) -> str:
    """Return the board, the top row first: "x" mine, "o" theirs, "." free."""
    planes = observation["observation"]
    marks = ((("x" if mine else "o" if theirs else ".") for mine, theirs in row) for row in planes)
    return "\n".join("".join(row) for row in marks)


def parse(env: Any, agent: AgentId, text: str) -> int | None:
    """Return the column, counted from 0, if it is not full."""
    column = chosen(text, CHOICES)
    return column if column is not None and env.unwrapped.board[column] == 0 else None


def success(env: Any, agent: AgentId, outcome: float) -> float:
    """Return 1 for a win, 0.5 for a draw."""
    return won(outcome)


def view(env: Any) -> View:
    """Return the view of the game."""
    return View(PROMPT, CHOICES, describe, parse, success)


def winning_columns(board: str, mark: str) -> list[int]:
    """Return the columns, counted from 0, that complete a line of four of this mark."""
    rows = board.split("\n")
    return [
        column
        for column in range(COLUMNS)
        if (row := _landing(rows, column)) >= 0
        and any(
            (row, column) in line and all(rows[r][c] == mark or (r, c) == (row, column) for r, c in line)
            for line in _LINES
        )
    ]


class LineSeer(RandomLegal):
    """Wins at once where it can, else prevents that the other does, else any column."""

    def __init__(self, seed: int, noise: float = 0.0) -> None:
        """Take the share of moves without a look at the board."""
        super().__init__(seed)
        self.noise = noise

    def act(self, messages: list[Message], tools: list[ToolSchema], info: dict[str, Any]) -> Message:
        """Return a column."""
        board = last_text(messages)
        if self.rng.random() >= self.noise:
            columns = winning_columns(board, "x") or winning_columns(board, "o")
            if columns:
                return assistant(CHOICES[columns[0]])
        return super().act(messages, tools, info)


noisy = partial(LineSeer, noise=0.5)


def _landing(rows: list[str], column: int) -> int:
    """Return the row that a stone falls to; -1 in a full column."""
    return sum(row[column] == "." for row in rows) - 1
