"""Scripted players that know the gold actions; each class plays either seat.

A gold list is cut into rounds: actions of the agent, then actions of the user. In a round each does its part and then
hands over with a text; in the last one the agent says the demanded facts, and the user ends the conversation.
"""

import json
from typing import Any

from agentgym.messages import Message, ToolSchema, assistant, tool_call
from agentgym.policy.scripted import SeededPolicy

GO_ON = "Please go on."
MORE = "Is there anything else?"
DONE = "Done."
YES = "Yes, please."
STOP = "###STOP###"

Action = dict[str, Any]
"""A gold action: "agent", "name", "arguments"."""


class Replay(SeededPolicy):
    """Plays the gold actions, leaving each out with probability `p`; the user says yes `patience` times."""

    def __init__(self, seed: int, p: float = 0.0, patience: int = 0) -> None:
        """Take the share of actions that are left out, and the user's patience."""
        super().__init__(seed)
        self.p = p
        self.patience = patience

    def reset(self, agent: str, seed: int) -> None:
        """Start an episode in one of the two seats."""
        super().reset(agent, seed)
        self._rounds: list[list[Action]] = []
        self._round = -1 if agent == "agent" else -2  # the user speaks before the first round
        self._begin, self._say = "", [""]

    def act(self, messages: list[Message], tools: list[ToolSchema], info: dict[str, Any]) -> Message:
        """Return the next gold call, or the text that hands over."""
        if gold := info.get("gold"):
            self._rounds = [part[self.agent] for part in rounds(gold["actions"])]
            self._begin, self._say = gold["begin"], gold["say"]
        if messages[-1]["role"] == "user":
            self._round += 1
        left = self._rounds[self._round] if 0 <= self._round < len(self._rounds) else []
        while left:
            action = left.pop(0)
            if self.rng.random() >= self.p:
                return assistant("", [tool_call(action["name"], json.dumps(action["arguments"]), "call_0")])
        return assistant(self._agent_text() if self.agent == "agent" else self._user_text())

    def _agent_text(self) -> str:
        last = len(self._rounds) - 1
        if self._round < last:
            return GO_ON
        return ". ".join([*self._say, MORE]) if self._round == last else MORE

    def _user_text(self) -> str:
        last = len(self._rounds) - 1
        if self._round < 0:
            return self._begin
        if self._round < last:
            return DONE
        return YES if self._round < last + self.patience else STOP


class Noisy(Replay):
    """Leaves out three of ten gold actions."""

    def __init__(self, seed: int, p: float = 0.3, patience: int = 0) -> None:
        """Take the share of actions that are left out, and the user's patience."""
        super().__init__(seed, p, patience)


class Customer(Replay):
    """A user for agents that are models: begins with the whole wish, says yes once, then ends."""

    def __init__(self, seed: int, p: float = 0.0, patience: int = 1) -> None:
        """Take the share of actions that are left out, and the user's patience."""
        super().__init__(seed, p, patience)


def rounds(actions: list[Action]) -> list[dict[str, list[Action]]]:
    """Return the actions in rounds, at least one: those of "agent", then those of "user"."""
    found: list[dict[str, list[Action]]] = [{"agent": [], "user": []}]
    for action in actions:
        if action["agent"] == "agent" and found[-1]["user"]:
            found.append({"agent": [], "user": []})
        found[-1][action["agent"]].append(action)
    return found
