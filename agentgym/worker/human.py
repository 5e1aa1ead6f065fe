"""A person at the terminal, as a policy: reads what an agent reads, types its text or a tool call.

> 12                                 the answer is the text
> /calculate expression="3*4"        a call, its arguments as key=value with TOML values ...
> /submit {"answer": 12}             ... or as JSON
> //home                             a text that begins with a slash
"""

import json
import shlex
import signal
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.text import Text

from agentgym.config_file import parse_arguments
from agentgym.episode_print import visible
from agentgym.errors import ConfigError
from agentgym.messages import Message, ToolCall, ToolSchema, assistant, tool_call
from agentgym.policy.client import Speaker

_STYLES = {"system": "magenta", "user": "default", "tool": "cyan"}


class Human(Speaker):
    """Answers for one agent; several agents may share one."""

    def __init__(self, console: Console, read: Callable[[str], str] = input) -> None:
        """Write to `console`; `read` shows a prompt and returns a line."""
        self._console = console
        self._read = read

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, timeout: float
    ) -> tuple[Message, str]:
        """Return what is typed after the conversation is shown; a person is waited for, whatever the `timeout`.

        Raises:
            KeyboardInterrupt: the person leaves, by Ctrl-C or at the end of the input.
        """
        self._show(messages, tools)
        while True:
            try:
                return parse_answer(self._ask(), tools), "stop"
            except ConfigError as error:
                self._console.print(Text(str(error), "red"))

    def _show(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> None:
        answers = [number for number, m in enumerate(messages) if m["role"] == "assistant"]
        for message in messages[answers[-1] + 1 if answers else 0 :]:
            name = f"{message['name']}: " if message.get("name") else ""
            self._console.print(Text(visible(name + message["content"]), _STYLES[message["role"]]))
        for tool in () if answers else tools:
            function = tool["function"]
            arguments = " ".join(f"{name}=..." for name in function["parameters"].get("properties", {}))
            line = f"/{function['name']} {arguments}  {function.get('description', '')}"
            self._console.print(Text(visible(line), "dim"))

    def _ask(self) -> str:
        # asyncio's own handler only takes note of the first Ctrl-C, and reading would go on.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return self._read("> ")
        except EOFError:
            raise KeyboardInterrupt from None
        finally:
            signal.signal(signal.SIGINT, before)


def parse_answer(line: str, tools: Sequence[ToolSchema]) -> Message:
    """Return the answer in a typed line.

    Raises:
        ConfigError: it is meant as a call, and there is no such tool or its arguments cannot be read.
    """
    if not tools or not line.startswith("/"):
        return assistant(line)
    if line.startswith("//"):
        return assistant(line[1:])
    return assistant("", [_call(line[1:], tools)])


def _call(text: str, tools: Sequence[ToolSchema]) -> ToolCall:
    name, _, rest = text.strip().partition(" ")
    names = [tool["function"]["name"] for tool in tools]
    if name not in names:
        raise ConfigError(f"there is no tool {name!r}; tools: {', '.join(names)}. A text may begin with //")
    if rest.lstrip().startswith("{"):
        return tool_call(name, rest.strip(), "call_0")
    try:
        arguments = parse_arguments(shlex.split(rest))
    except ValueError as error:
        raise ConfigError(f"cannot read {rest!r}: {error}") from error
    return tool_call(name, json.dumps(arguments), "call_0")
