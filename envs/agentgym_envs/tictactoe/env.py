"""The environment `agentgym/TicTacToe-v0`: PettingZoo's tic-tac-toe behind a text view."""

from typing import Any, Literal

import pettingzoo

from agentgym.errors import ConfigError
from agentgym.messages import Action, AgentId
from agentgym.wrappers.aec import TextAECWrapper
from agentgym.wrappers.referee import Illegal
from agentgym_envs.tictactoe import prompts
from agentgym_envs.tictactoe.rules import EMPTY, MINE, THEIRS


def to_pettingzoo(cell: int) -> int:
    """Return PettingZoo's number of a cell: it counts column by column, we row by row (and back)."""
    return cell % 3 * 3 + cell // 3


def describe(env: Any, agent: AgentId, observation: Any) -> str:
    """Return the board from an agent's side."""
    planes = observation["observation"]
    marks = []
    for cell in range(9):
        mine, theirs = planes[cell % 3, cell // 3]
        marks.append(MINE if mine else THEIRS if theirs else EMPTY)
    return "".join(marks)


def parse(env: Any, agent: AgentId, text: str) -> int | None:
    """Return PettingZoo's action for a digit that names a free cell."""
    answer = text.strip()
    if answer not in prompts.CHOICES:
        return None
    action = to_pettingzoo(prompts.CHOICES.index(answer))
    # What a mover may play is asked for all nine cells in every turn; its observation would be built each time.
    return action if agent == env.agent_selection and action in env.unwrapped.board.legal_moves() else None


class TicTacToe(TextAECWrapper):
    """Two players by turns; the first to have three in a line wins."""

    metadata: dict[str, Any] = {  # noqa: RUF012  as in PettingZoo
        "name": "agentgym_tictactoe",
        "render_modes": ["ansi"],
        "is_parallelizable": False,
    }

    def __init__(
        self,
        *,
        shown: Literal["board", "moves"] = "board",
        illegal: Illegal = "forfeit",
        illegal_reward: float = -1.0,
        render_mode: str | None = None,
    ) -> None:
        """Take what the mover reads, the rule for illegal texts and what it pays."""
        if shown not in prompts.SYSTEM:
            raise ConfigError(f"shown = {shown!r}; use one of {', '.join(prompts.SYSTEM)}")
        self.render_mode = render_mode
        super().__init__(
            pettingzoo.make("aec", "classic/tictactoe-v3"),
            describe if shown == "board" else lambda env, agent, observation: self._last_move,
            parse,
            choices=prompts.CHOICES,
            prompt=prompts.SYSTEM[shown],
            illegal=illegal,
            illegal_reward=illegal_reward,
            success=lambda env, agent, reward: min(max((reward + 1.0) / 2.0, 0.0), 1.0),
        )

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Start a game."""
        self._last_move = prompts.NO_MOVE
        super().reset(seed=seed, options=options)

    def step(self, action: Action | None) -> None:
        """Play a text."""
        before = self._board()
        super().step(action)
        for cell, (was, now) in enumerate(zip(before, self._board(), strict=True)):
            if was != now:
                self._last_move = prompts.CHOICES[cell]

    def render(self) -> str:
        """Return the board in three lines, player_1 as x."""
        board = self._board()
        return "\n".join(board[start : start + 3] for start in (0, 3, 6))

    def _board(self) -> str:
        first = self.possible_agents[0]
        return describe(self.env, first, self.env.observe(first))
