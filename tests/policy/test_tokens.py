from pathlib import Path

import numpy as np
import pytest
from chat_families import TEMPLATES, family, write_family
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.episode import NOT_SAMPLED
from agentgym.errors import IntegrityError
from agentgym.messages import Message, assistant, system, tool_call, tool_result, user
from agentgym.policy.template import ChatTokenizer
from agentgym.policy.tokens import Conversation
from agentgym.tiny_model import ALPHABET, init_model

F = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
LINES = """\
{%- for message in messages -%}
    {{- "<|" + message.role + "|>" + message.content + "<|end|>\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|assistant|>" -}}{%- endif -%}
"""
"""A line break after each end token, which no policy samples."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return tokenizer_with(tmp_path_factory.mktemp("tiny"), None)


def tokenizer_with(folder: Path, template: str | None) -> ChatTokenizer:
    init_model(folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return ChatTokenizer(folder)


def begin(tokenizer: ChatTokenizer, *messages: Message) -> Conversation:
    conversation = Conversation(tokenizer)
    conversation.initial(messages)
    return conversation


def say(conversation: Conversation, tokenizer: ChatTokenizer, text: str, version: int = 0) -> list[int]:
    """Append an answer as if it had been sampled."""
    ids = tokenizer.encode(text)
    conversation.append_sampled(ids, [-1.0] * len(ids), [version] * len(ids))
    return ids


def routes_of(rows: int, value: int) -> np.ndarray:
    return np.full((rows, 2, 2), value, np.uint8)


texts = st.text(ALPHABET, max_size=12)


@settings(max_examples=50)
@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=5))
def test_each_prompt_extends_the_last_and_is_what_the_template_writes(
    tokenizer: ChatTokenizer, rounds: list[tuple[str, str]]
):
    conversation = begin(tokenizer, system("S"), user("begin"))
    said: list[Message] = [system("S"), user("begin")]
    for answer, reply in rounds:
        before = list(conversation.prompt)
        assert before == tokenizer.encode_chat(said)
        ids = say(conversation, tokenizer, answer + "<|end|>")
        assert conversation.append_messages([user(reply)])
        said += [assistant(answer), user(reply)]
        assert conversation.prompt[: len(before) + len(ids)] == before + ids
    assert len(conversation.branches) == 1
    assert conversation.prompt == tokenizer.encode_chat(said)


def test_the_mask_is_true_exactly_on_sampled_tokens(tokenizer: ChatTokenizer):
    conversation = begin(tokenizer, user("U"))
    first = say(conversation, tokenizer, "one<|end|>", version=3)
    conversation.append_messages([user("V")])
    second = say(conversation, tokenizer, "two<|end|>", version=4)
    conversation.append_messages([user("never answered")])
    arrays = conversation.branches[0].arrays()
    sampled = arrays["loss_mask"]
    assert arrays["tokens"][sampled].tolist() == first + second
    assert arrays["versions"][sampled].tolist() == [3] * len(first) + [4] * len(second)
    assert set(arrays["versions"][~sampled]) == {NOT_SAMPLED}
    assert set(arrays["logprobs"][~sampled]) == {0.0}
    assert sampled[-1]  # what was read afterwards is left out


def test_a_span_says_where_an_answer_lies(tokenizer: ChatTokenizer):
    conversation = begin(tokenizer, user("U"))
    length = len(conversation.prompt)
    ids = tokenizer.encode("hey<|end|>")
    span = conversation.append_sampled(ids, [-1.0] * 4, [0] * 4)
    assert span == (0, length, length + 4)
    assert conversation.messages[-1] == assistant("hey")


def test_an_answer_that_was_cut_off_gets_an_end_token_that_is_not_trained(tokenizer: ChatTokenizer):
    conversation = begin(tokenizer, user("U"))
    say(conversation, tokenizer, "cut o")
    conversation.append_messages([user("V")])
    say(conversation, tokenizer, "x<|end|>")
    arrays = conversation.branches[0].arrays()
    text = tokenizer.decode(arrays["tokens"].tolist())
    assert text == "<|user|>U<|end|><|assistant|>cut o<|end|><|user|>V<|end|><|assistant|>x<|end|>"
    assert tokenizer.decode(arrays["tokens"][arrays["loss_mask"]].tolist()) == "cut ox<|end|>"


def test_sampled_ids_are_kept_where_the_template_would_write_them_differently(tokenizer: ChatTokenizer):
    conversation = Conversation(tokenizer)
    conversation.initial([user("U")], [F])
    opening = tokenizer.decode(conversation.prompt)
    written = '<tool_call>{"arguments":{"a":1},"name":"f"}</tool_call><|end|>'
    say(conversation, tokenizer, written)
    [call] = conversation.messages[-1]["tool_calls"]
    assert conversation.append_messages([tool_result("42", call)])
    assert tokenizer.decode(conversation.prompt) == (f"{opening}{written}<|tool|>42<|end|><|assistant|>")


def test_separators_behind_the_end_token_are_read_not_trained(tmp_path: Path):
    tokenizer = tokenizer_with(tmp_path, LINES)
    conversation = begin(tokenizer, user("U"))
    say(conversation, tokenizer, "A<|end|>")
    assert conversation.append_messages([user("V")])
    assert conversation.prompt == tokenizer.encode_chat([user("U"), assistant("A"), user("V")])
    assert tokenizer.decode(conversation.prompt).startswith(
        "<|user|>U<|end|>\n<|assistant|>A<|end|>\n<|user|>"
    )


def test_thinking_that_the_template_strips_opens_a_branch() -> None:
    tokenizer = family("qwen3")
    conversation = begin(tokenizer, user("U"))
    first = say(conversation, tokenizer, "<think>\nhm\n</think>\n\nA<|im_end|>")
    assert not conversation.append_messages([user("V")])
    assert conversation.prompt == tokenizer.encode_chat([user("U"), assistant("A"), user("V")])
    ids = tokenizer.encode("B<|im_end|>")
    span = conversation.append_sampled(ids, [-1.0] * 2, [0] * 2)
    assert span.branch == conversation.branch == 1
    old, new = (branch.arrays() for branch in conversation.branches)
    assert old["tokens"][old["loss_mask"]].tolist() == first
    # The first answer is part of the new prompt, but trained only where it was sampled.
    assert new["tokens"][new["loss_mask"]].tolist() == ids


def test_thinking_may_be_kept_though_the_template_would_strip_it() -> None:
    tokenizer = family("qwen3")
    conversation = Conversation(tokenizer, keep_thinking=True)
    conversation.initial([user("U")])
    before = tokenizer.decode(conversation.prompt)
    said = "<think>\nhm\n</think>\n\nA<|im_end|>"
    say(conversation, tokenizer, said)
    assert conversation.append_messages([user("V")])
    say(conversation, tokenizer, said)
    result = {"role": "tool", "content": "42", "tool_call_id": "call_0", "name": "f"}
    assert conversation.append_messages([result])
    asked = "\n<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n"
    answered = "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(conversation.prompt) == before + said + asked + said + answered


def test_thinking_that_the_template_keeps_goes_on_in_the_branch() -> None:
    tokenizer = family("qwen3")
    conversation = begin(tokenizer, user("U"))
    say(conversation, tokenizer, "<think>\nhm\n</think>\n\nA<|im_end|>")
    result = {"role": "tool", "content": "42", "tool_call_id": "call_0", "name": "f"}
    assert conversation.append_messages([result])
    # The next answer does not think, yet a user message would strip the thinking before it.
    say(conversation, tokenizer, "B<|im_end|>")
    assert not conversation.append_messages([user("V")])
    assert "hm" not in tokenizer.decode(conversation.prompt)


def test_thinking_that_was_only_read_in_a_branch_is_watched_too() -> None:
    tokenizer = family("qwen3")
    conversation = begin(tokenizer, user("U"))
    say(conversation, tokenizer, "<think>\nhm\n</think>\n\nA<|im_end|>")
    result = {"role": "tool", "content": "42", "tool_call_id": "call_0", "name": "f"}
    conversation.append_messages([result])
    assert not conversation.append_messages([result])  # again: what was heard is heard with it, in a branch
    assert "hm" in tokenizer.decode(conversation.prompt)
    say(conversation, tokenizer, "B<|im_end|>")
    assert not conversation.append_messages([user("V")])
    assert "hm" not in tokenizer.decode(conversation.prompt)


def test_an_empty_block_of_thinking_that_the_template_drops_opens_a_branch() -> None:
    tokenizer = family("qwen3")
    said = "<think>\n\n</think>\n\nA<|im_end|>"  # what Qwen 3 answers when it is asked not to think
    result = {"role": "tool", "content": "42", "tool_call_id": "call_0", "name": "f"}
    for new in (result, user("V")):
        conversation = begin(tokenizer, user("U"))
        say(conversation, tokenizer, said)
        assert not conversation.append_messages([new])
        assert "<think>" not in tokenizer.decode(conversation.prompt)


def test_a_thought_that_was_cut_off_is_kept_as_it_is() -> None:
    tokenizer = family("qwen3")
    conversation = begin(tokenizer, user("U"))
    say(conversation, tokenizer, "<think>\nhm")
    assert conversation.append_messages([user("V")])
    assert tokenizer.decode(conversation.prompt) == tokenizer.render(
        [user("U"), assistant("<think>\nhm"), user("V")]
    )


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "llama3_2", "smollm2"])
def test_answers_without_thinking_go_on_in_the_branch(name: str) -> None:
    tokenizer = family(name)
    conversation = begin(tokenizer, user("U"))
    said = [user("U")]
    for _ in range(3):
        say(conversation, tokenizer, "A" + tokenizer.stop_texts[0])
        assert conversation.append_messages([user("V")])
        said += [assistant("A"), user("V")]
        assert conversation.prompt == tokenizer.encode_chat(said)
    assert len(conversation.branches) == 1


def test_a_switch_in_the_system_message_is_seen(tmp_path: Path) -> None:
    template = (
        (TEMPLATES / "qwen3.jinja")
        .read_text()
        .replace(
            "enable_thinking is defined and enable_thinking is false", "'/no_think' in messages[0].content"
        )
    )
    tokenizer = ChatTokenizer(write_family(tmp_path / "model", "qwen3", template=template))
    for prompt in ("Think.", "Never. /no_think"):
        conversation = begin(tokenizer, system(prompt), user("U"))
        say(conversation, tokenizer, "A<|im_end|>")
        conversation.append_messages([user("V")])
        assert conversation.prompt == tokenizer.encode_chat(
            [system(prompt), user("U"), assistant("A"), user("V")]
        )


def test_a_template_that_repeats_the_system_message_goes_on_in_place(tmp_path: Path) -> None:
    reminder = LINES.replace("message.content +", "message.content + messages[0].content +")
    tokenizer = tokenizer_with(tmp_path / "model", reminder)
    conversation = begin(tokenizer, system("S"), user("U"))
    say(conversation, tokenizer, "A<|end|>")
    assert conversation.append_messages([user("V")])
    assert tokenizer.decode(conversation.prompt).endswith("A<|end|>\n<|user|>VS<|end|>\n<|assistant|>")


def test_a_template_that_counts_the_messages_opens_a_branch_for_each(tmp_path: Path) -> None:
    template = """\
{%- for message in messages -%}
    {{- message.role + (loop.index | string) + ":" + message.content + "<|end|>" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "assistant" + (messages | length + 1) | string + ":" -}}{%- endif -%}
"""
    tokenizer = tokenizer_with(tmp_path / "model", template)
    said = [system("S"), user("U"), user("V")]
    conversation = begin(tokenizer, *said)
    say(conversation, tokenizer, "A<|end|>")
    # The text behind the first answer is another one than behind a fifth: it cannot be taken from a short example.
    assert not conversation.append_messages([user("W")])
    assert tokenizer.decode(conversation.prompt).endswith("assistant4:A<|end|>user5:W<|end|>assistant6:")


def test_another_end_token_than_the_templates_is_kept() -> None:
    tokenizer = family("llama3_2")
    conversation = begin(tokenizer, user("U"))
    sampled = say(conversation, tokenizer, "A<|eom_id|>")
    assert conversation.append_messages([user("V")])
    text = tokenizer.decode(conversation.prompt)
    assert text.endswith(
        "A<|eom_id|><|start_header_id|>user<|end_header_id|>\n\nV<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert conversation.branches[0].arrays()["loss_mask"].sum() == len(sampled)


def test_an_answer_of_its_end_token_alone_is_trained_and_one_of_nothing_is_refused(
    tokenizer: ChatTokenizer,
) -> None:
    conversation = begin(tokenizer, user("U"))
    say(conversation, tokenizer, "<|end|>")
    assert conversation.messages[-1] == assistant("")
    assert conversation.append_messages([user("V")])
    with pytest.raises(IntegrityError, match="no tokens"):
        conversation.append_sampled([], [], [])
    assert conversation.branches[0].arrays()["loss_mask"].sum() == 1


def test_two_observations_in_a_row_open_a_branch(tokenizer: ChatTokenizer):
    conversation = begin(tokenizer, user("U"))
    assert not conversation.append_messages([user("V")])
    assert conversation.prompt == tokenizer.encode_chat([user("U"), user("V")])


def test_a_route_row_that_was_stored_first_stays(tokenizer: ChatTokenizer):
    conversation = begin(tokenizer, user("U"))
    prompt = len(conversation.prompt)
    ids = tokenizer.encode("one<|end|>")
    conversation.append_sampled(ids, [-1.0] * 4, [0] * 4, routes_of(prompt + 3, 1))
    assert conversation.routes_start == prompt + 3
    conversation.append_messages([user("V")])
    longer = len(conversation.prompt)
    # The server sends all rows again; only those that are missing are taken.
    conversation.append_sampled(ids, [-1.0] * 4, [0] * 4, routes_of(longer + 3, 2), routes_start=0)
    routes = conversation.branches[0].arrays()["routes"]
    assert routes is not None
    assert routes.shape == (longer + 4, 2, 2)
    assert (routes[: prompt + 3] == 1).all()
    assert (routes[prompt + 3 : longer + 3] == 2).all()
    assert (routes[-1] == 255).all()  # the last sampled token was never computed


def test_route_rows_with_a_gap_are_refused(tokenizer: ChatTokenizer):
    conversation = begin(tokenizer, user("U"))
    with pytest.raises(IntegrityError, match="do not continue"):
        conversation.append_sampled([9, 1], [-1.0] * 2, [0] * 2, routes_of(1, 1), routes_start=3)


def test_arrays_of_different_lengths_are_refused(tokenizer: ChatTokenizer):
    with pytest.raises(IntegrityError, match="2 tokens has 1 log-probabilities"):
        begin(tokenizer, user("U")).append_sampled([9, 1], [-1.0], [0, 0])


def test_a_scripted_answer_reads_as_the_template_writes_it(tokenizer: ChatTokenizer):
    message = assistant("Let me see.", [tool_call("f", '{"a": 1}', "call_0")])
    conversation = begin(tokenizer, user("U"))
    conversation.append_said(message, tokenizer.encode_answer(message))
    conversation.append_messages([tool_result("2", message["tool_calls"][0])])
    said = [user("U"), message, tool_result("2", message["tool_calls"][0])]
    assert conversation.prompt == tokenizer.encode_chat(said)
