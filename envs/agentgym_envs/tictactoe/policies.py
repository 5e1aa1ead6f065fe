"""Scripted players: at random, one that sometimes sees a line, and perfect play."""

from collections.abc import Sequence
from typing import Any

from agentgym.messages import Message, ToolSchema, assistant
from agentgym.policy.scripted import SeededPolicy, last_text
from agentgym_envs.tictactoe import prompts
from agentgym_envs.tictactoe.rules import EMPTY, MINE, THEIRS, best_cells, completing_cells, free_cells, place


def board_of(messages: Sequence[Message]) -> str:
    """Return the board of a conversation: the last message itself, or what its moves come to."""
    shown = last_text(messages)
    if len(shown) > 1:
        return shown
    board = EMPTY * 9
    for message in messages:
        if message["content"] in prompts.CHOICES:
            mark = MINE if message["role"] == "assistant" else THEIRS
            board = place(board, prompts.CHOICES.index(message["content"]), mark)
    return board


class RandomMove(SeededPolicy):
    """Any free cell, each as likely."""

    def act(self, messages: list[Message], tools: list[ToolSchema], info: dict[str, Any]) -> Message:
        """Return a move."""
        cells = self.candidates(board_of(messages))
        return assistant(prompts.CHOICES[cells[int(self.rng.integers(len(cells)))]])

    def candidates(self, board: str) -> Sequence[int]:
        """Return the cells to choose from."""
        return free_cells(board)


class NoisyMove(RandomMove):
    """With probability `p` completes or blocks a line where it can, else any free cell."""

    def __init__(self, seed: int, p: float = 0.3) -> None:
        """Take the share of moves with thought."""
        super().__init__(seed)
        self.p = p

    def candidates(self, board: str) -> Sequence[int]:
        """Return the cells to choose from."""
        if self.rng.random() < self.p:
            cells = completing_cells(board, MINE) or completing_cells(board, THEIRS)
            if cells:
                return cells
        return free_cells(board)


class Minimax(RandomMove):
    """Perfect play; among equally good moves each is as likely."""

    def candidates(self, board: str) -> Sequence[int]:
        """Return the cells to choose from."""
        return best_cells(board)
