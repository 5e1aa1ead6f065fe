"""The environment `agentgym/TicTacToe-v0`: PettingZoo's tic-tac-toe behind a text view."""

from typing import Any

import pettingzoo

from agentgym.messages import AgentId
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
    return action if env.observe(agent)["action_mask"][action] else None


class TicTacToe(TextAECWrapper):
    """Two players by turns; the first to have three in a line wins."""

    metadata: dict[str, Any] = {  # noqa: RUF012  as in PettingZoo
        "name": "agentgym_tictactoe",
        "render_modes": ["ansi"],
        "is_parallelizable": False,
    }

    def __init__(
        self, *, illegal: Illegal = "forfeit", illegal_reward: float = -1.0, render_mode: str | None = None
    ) -> None:
        """Take the rule for illegal texts and what it pays."""
        self.render_mode = render_mode
        super().__init__(
            pettingzoo.make("aec", "classic/tictactoe-v3"),
            describe,
            parse,
            choices=prompts.CHOICES,
            prompt=prompts.SYSTEM,
            illegal=illegal,
            illegal_reward=illegal_reward,
            success=lambda env, agent, reward: min(max((reward + 1.0) / 2.0, 0.0), 1.0),
        )

    def render(self) -> str:
        """Return the board in three lines, player_1 as x."""
        first = self.possible_agents[0]
        board = describe(self.env, first, self.env.observe(first))
        return "\n".join(board[start : start + 3] for start in (0, 3, 6))
