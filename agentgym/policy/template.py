"""A model's tokenizer and chat template, without torch or transformers.

    tokenizer = ChatTokenizer(Path("models/tiny"))
    tokenizer.encode_chat([user("Hi")], tools=())    -> ids of the prompt, generation prompt included
    tokenizer.parse(sampled_ids)                     -> the assistant message for the environment

Rendering follows `transformers.utils.chat_template_utils` (the same Jinja settings, filters and globals), and
the text is encoded without special tokens of its own, as `apply_chat_template` does; a test compares the two.
"""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
import msgpack
from tokenizers import Tokenizer

from agentgym.errors import ModelError
from agentgym.messages import Message, ToolSchema, assistant, tool_call, user
from agentgym.model import check_model, read_chat_template, read_tokenizer_config, token_text
from agentgym.policy.answers import READERS, Reader, read_answer, read_tagged
from agentgym.policy.tool_text import answer_text, in_words, with_object

CACHED = 2048
"""Texts and rendered conversations that are remembered."""

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
_PROBE: ToolSchema = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "Probe.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}
_PROBE_CALL = tool_call("probe_tool", '{"key": "value"}', "call_0")


class ChatTokenizer:
    """Text to token ids and back, and conversations to prompts, for one model folder."""

    def __init__(self, model_dir: Path) -> None:
        """Load tokenizer and template.

        Raises:
            ModelError: the folder is not a complete model folder.
        """
        self.stop_token_ids: tuple[int, ...] = check_model(model_dir).stop_token_ids
        """The tokens that end an answer; the first one is the chat format's own."""
        config = read_tokenizer_config(model_dir)
        self._tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        texts = {name: token_text(config.get(name)) for name in SPECIAL_TOKENS}
        self._special = {name: text for name, text in texts.items() if text is not None}
        self.stop_texts: tuple[str, ...] = tuple(self.decode([i]) for i in self.stop_token_ids)
        """What the stop tokens look like in rendered text."""
        try:
            self._template = _environment().from_string(read_chat_template(model_dir))
        except jinja2.TemplateError as error:
            raise ModelError(f"the chat template of the model in {model_dir} is damaged: {error}") from error
        # The members of a group begin with the same prompt, and many environments say the same things again.
        self._encode_once = functools.lru_cache(CACHED)(self._encode)
        self._render_once = functools.lru_cache(CACHED)(self._render)
        # So do scripted players.
        self._encode_answer_once = functools.lru_cache(CACHED)(self._encode_answer)
        self._text_once = functools.lru_cache(CACHED)(self._text)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; nothing is added at its ends."""
        return list(self._encode_once(text))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some ids, special tokens included."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = (), *, generation_prompt: bool = True
    ) -> str:
        """Return a conversation as the chat template writes it.

        Raises:
            ModelError: the template refuses the conversation.
        """
        return self._render_once(msgpack.packb((messages, tools)), generation_prompt)

    def encode_chat(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> list[int]:
        """Return the ids of the prompt that asks for the next answer."""
        return self.encode(self.render(messages, tools))

    def parse(self, ids: Sequence[int], tools: Sequence[ToolSchema] = ()) -> Message:
        """Return the assistant message in sampled ids; without tools nothing in it is a call.

        Raises:
            ModelError: there are tools, and the template writes calls in a format that cannot be read.
        """
        return self.read(self.text(ids), tools)

    def read(self, text: str, tools: Sequence[ToolSchema] = ()) -> Message:
        """Return the assistant message in the text of an answer; see `parse`."""
        return read_answer(text, self.reader, tools) if tools else assistant(text)

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of sampled ids; a stop token at the end is left out."""
        return self._text_once(tuple(ids))

    def encode_answer(self, message: Message) -> tuple[int, ...]:
        """Return the ids of an assistant turn as the template writes it, the end token included.

        These are the ids that a scripted policy "samples".
        """
        return self._encode_answer_once(msgpack.packb(message))

    def _text(self, ids: tuple[int, ...]) -> str:
        return self.decode(ids[:-1] if ids and ids[-1] in self.stop_token_ids else ids)

    def _encode_answer(self, packed: bytes) -> tuple[int, ...]:
        message: Message = msgpack.unpackb(packed, strict_map_key=False)
        asked = [user("?")]
        prompt = self.render(asked)
        text = self.render([*asked, message], generation_prompt=False)
        end = self.end_of_turn(text, len(prompt)) if text.startswith(prompt) else None
        if end is None:  # the template opens its answers with something a message cannot hold
            return (*self._encode_once(answer_text(message)), self.stop_token_ids[0])
        return self._encode_once(text[len(prompt) : end[1]])

    def end_of_turn(self, text: str, start: int) -> tuple[int, int] | None:
        """Return where the first stop token at or after `start` begins and ends; None if there is none."""
        ends = [(at, at + len(stop)) for stop in self.stop_texts if (at := text.find(stop, start)) >= 0]
        return min(ends) if ends else None

    @functools.cached_property
    def reader(self) -> Reader:
        """What reads the tool calls in answers: the first reader that understands what the template writes.

        Raises:
            ModelError: none does.
        """
        if not self._knows_tools:
            return read_tagged
        asked = [user("?")]
        prompt = self._write(asked, [_PROBE], True)
        written = self._write([*asked, assistant("", [_PROBE_CALL])], [_PROBE], False)
        end = self.end_of_turn(written, len(prompt)) or (len(written), len(written))
        turn = written[len(prompt) : end[0]] if written.startswith(prompt) else written
        for reader in READERS.values():
            calls = read_answer(turn, reader, [_PROBE]).get("tool_calls")
            if calls is not None and [call["function"] for call in calls] == [_PROBE_CALL["function"]]:
                return reader
        raise ModelError(
            f"the model's chat template writes a tool call as {turn!r:.200}, which cannot be read back; the "
            f"formats that can are {', '.join(READERS)} (agentgym/policy/answers.py): use a template of these"
        )

    @functools.cached_property
    def _knows_tools(self) -> bool:
        return "probe_tool" in self._write([user("?")], [_PROBE], False)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _render(self, conversation: bytes, generation_prompt: bool) -> str:
        messages, tools = msgpack.unpackb(conversation, strict_map_key=False)
        with_tools = tools or any(m["role"] == "tool" or "tool_calls" in m for m in messages)
        if with_tools and not self._knows_tools:
            messages, tools = in_words(messages, tools), []
        return self._write(messages, tools, generation_prompt)

    def _write(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], generation_prompt: bool
    ) -> str:
        try:
            return self._template.render(
                messages=[_for_template(message) for message in messages],
                tools=tools or None,
                documents=None,
                add_generation_prompt=generation_prompt,
                **self._special,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ModelError(
                f"the model's chat template refuses the pattern {pattern_of(messages)}: {error}"
            ) from error


def pattern_of(messages: Sequence[Message]) -> str:
    """Return the roles of a conversation in words: "user, assistant (2 tool calls), tool, tool"."""
    words = []
    for message in messages:
        count = len(message.get("tool_calls", []))
        calls = f" ({count} tool call{'s' * (count > 1)})" if count else ""
        words.append(message["role"] + calls)
    return ", ".join(words) or "of no messages"


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
    return environment


class _Generation(jinja2.ext.Extension):
    """The tag `{% generation %}`, which marks the answers in training templates; it changes no text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _for_template(message: Message) -> Mapping[str, Any]:
    """Return a message whose calls have objects as arguments: many templates write them as JSON again."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [{**c, "function": with_object(c)} for c in calls]}
