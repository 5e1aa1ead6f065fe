"""A scripted walker that reads the view: it looks for the thing that its mission names and goes there."""

import re
from typing import Any

from agentgym.messages import Message, ToolSchema, assistant
from agentgym.policy.scripted import SeededPolicy, last_text


class Seeker(SeededPolicy):
    """Knows missions like "go to the red ball" and "get to the green goal square", without doors in between."""

    def act(self, messages: list[Message], tools: list[ToolSchema], info: dict[str, Any]) -> Message:
        """Return the next word."""
        mission = next(m["content"] for m in messages if m["role"] == "user").split("\n")[0]
        wanted = re.search(r"(?:(\w+) )?(ball|key|box|door|goal)", mission)
        return assistant(self._word(last_text(messages), wanted))

    def _word(self, view: str, wanted: re.Match[str] | None) -> str:
        free = int(re.search(r"free: (\d+)", view)[1])  # type: ignore[index]  # each view has it
        for line in view.split("\n"):
            if wanted is None or not re.search(rf"{wanted[1]} {wanted[2]}:", line):
                continue
            ahead = int((re.search(r"(\d+) ahead", line) or "00")[1])
            side = re.search(r"\d+ (left|right)", line)
            if ahead > (side is None and wanted[2] != "goal") and free:
                return "forward"
            if side is not None:
                return side[1]
            return "done" if ahead == 1 else self._wander(free)
        return self._wander(free)

    def _wander(self, free: int) -> str:
        """Return a word that changes what is in view."""
        if free and self.rng.random() < 0.5:
            return "forward"
        return "left" if self.rng.random() < 0.5 else "right"
