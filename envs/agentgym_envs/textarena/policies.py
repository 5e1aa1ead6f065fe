"""A scripted player for all games that say which actions there are."""

import re
from typing import Any

from agentgym.messages import Message, ToolSchema, assistant
from agentgym.policy.scripted import SeededPolicy

_SPEAKER = re.compile(r"^\[(?:GAME|[^\]]+)\] ", re.MULTILINE)
_ACTION = re.compile(r"\[[^\[\]\n]{1,40}\]")


class FromMenu(SeededPolicy):
    """Any of the bracketed actions in the latest line that names some, each as likely."""

    def act(self, messages: list[Message], tools: list[ToolSchema], info: dict[str, Any]) -> Message:
        """Return one of the actions; "[0]" where the game has named none."""
        for message in reversed(messages):
            if message["role"] == "user":
                for line in reversed(_SPEAKER.sub("", message["content"]).splitlines()):
                    if actions := _ACTION.findall(line):
                        return assistant(actions[int(self.rng.integers(len(actions)))])
        return assistant("[0]")
