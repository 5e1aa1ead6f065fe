"""What the text wrappers share: the menu of answers, the rule for illegal ones, and who earned what."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, get_args

from agentgym.errors import ConfigError
from agentgym.messages import AgentId

Illegal = Literal["retry", "penalty", "forfeit"]
"""What follows an illegal answer; see `agentgym.wrappers`."""

Choices = Sequence[str] | Callable[..., Sequence[str]]
"""All answers that can ever be legal, or a function of (env,) or (env, agent) to those that are legal now."""

OTHERS_ILLEGAL = "Another answer was illegal. Answer again."
"""What an agent with a legal answer reads where agents act at once and the step is not played."""


class Referee:
    """Judges the answers of one environment, episode by episode."""

    def __init__(self, choices: Choices, illegal: Illegal, illegal_reward: float, max_retries: int) -> None:
        """Take the menu and the rule. Raises ConfigError for a rule that there is not."""
        if illegal not in get_args(Illegal):
            raise ConfigError(f"illegal = {illegal!r}; use one of {', '.join(get_args(Illegal))}")
        if max_retries < 0:
            raise ConfigError(f"max_retries = {max_retries}; use 0 or more")
        self.choices = () if callable(choices) else tuple(choices)
        self._legal_now = choices if callable(choices) else None
        self._illegal = illegal
        self._illegal_reward = illegal_reward
        self._max_retries = max_retries
        self.reset()

    def reset(self) -> None:
        """Begin an episode."""
        self._forfeits: set[AgentId] = set()
        self._retries: dict[AgentId, int] = {}
        self._outcomes: dict[AgentId, float] = {}

    @property
    def forfeited(self) -> bool:
        """Whether an illegal answer has ended the episode."""
        return bool(self._forfeits)

    def legal(self, *seat: Any, parse: Callable[..., Any]) -> list[str]:
        """Return the answers that are legal now for a seat: (env,) or (env, agent); none where no menu is known."""
        if self._legal_now is not None:
            return list(self._legal_now(*seat))
        return [text for text in self.choices if parse(*seat, text) is not None]

    def accept(self, agents: Iterable[AgentId]) -> None:
        """Begin a new turn of the agents, whose answers were legal and are played."""
        for agent in agents:
            self._retries.pop(agent, None)

    def refuse(self, agent: AgentId, info: dict[str, Any]) -> float:
        """Count an illegal answer and return what it earns; `forfeited` says whether it ends the episode."""
        info["metrics"] = {"illegal": 1.0}
        tries = self._retries[agent] = self._retries.get(agent, 0) + 1
        if self._illegal == "forfeit" or (self._illegal == "retry" and tries > self._max_retries):
            self._forfeits.add(agent)
        return self._illegal_reward if agent in self._forfeits or self._illegal == "penalty" else 0.0

    def notice(self, legal: Sequence[str]) -> str:
        """Return what an agent reads whose answer was illegal."""
        return f"Illegal answer. Legal: {', '.join(legal)}." if legal else "Illegal answer. Answer again."

    def pay(self, agent: AgentId, reward: float, part: str, info: dict[str, Any]) -> None:
        """Book a reward under a name, here and in the agent's info."""
        if part == "outcome":
            self._outcomes[agent] = self._outcomes.get(agent, 0.0) + reward
        if reward:
            parts = info.setdefault("rewards", {})
            parts[part] = parts.get(part, 0.0) + reward

    def success(self, agent: AgentId, judge: Callable[[float], float]) -> float:
        """Return the success of an agent so far; one that forfeited the episode has none."""
        return 0.0 if agent in self._forfeits else float(judge(self._outcomes.get(agent, 0.0)))
