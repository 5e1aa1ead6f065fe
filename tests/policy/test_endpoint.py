import asyncio
import os
import re
from typing import Any

import pytest
from builders import within
from http_server import Answering, Heard, completion, listening

from agentgym.config import SamplingConfig
from agentgym.errors import ConfigError, PolicyError
from agentgym.messages import Message, assistant, system, tool_call, tool_result, user
from agentgym.policy.endpoint import TRIES, Endpoint
from agentgym.policy_config import PolicyConfig

TALK = [system("Be brief."), user("Hello?")]
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}
]


class Script:
    """Answers one after the other, the last one for ever; keeps what it heard."""

    def __init__(self, *replies: tuple[int, Any]) -> None:
        self.replies, self.heard = list(replies), list[Heard]()

    async def __call__(self, heard: Heard) -> tuple[int, Any]:
        self.heard.append(heard)
        return self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]


async def ask(
    url: str,
    messages: list[Message] = TALK,
    tools: list[dict[str, Any]] | None = None,
    *,
    timeout: float = 20.0,
    **settings: Any,
) -> tuple[Message, str]:
    config = PolicyConfig(endpoint=url, model="judge", **settings)
    endpoint = Endpoint("foe", config, SamplingConfig(temperature=0.5, top_p=0.9, max_tokens=7))
    try:
        return await endpoint.chat(messages, tools or [], timeout=timeout)
    finally:
        await endpoint.close()


def asked(answer: Answering, *arguments: Any, **settings: Any) -> tuple[Message, str]:
    async def scene() -> tuple[Message, str]:
        async with listening(answer) as url:
            return await ask(url, *arguments, **settings)

    return within(20, scene())


def test_a_conversation_is_sent_with_tools_and_sampling() -> None:
    script = Script((200, completion("Hi.", "length")))
    talk = [*TALK, assistant("", [call := tool_call("add", "{}", "c1")]), tool_result("3", call)]
    assert asked(script, talk, TOOLS) == (assistant("Hi."), "length")
    (heard,) = script.heard
    assert heard.path == "/v1/chat/completions"
    assert heard.body == {
        "model": "judge",
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 7,
        "messages": talk,
        "tools": TOOLS,
    }
    assert "authorization" not in heard.headers


def test_without_tools_none_are_named() -> None:
    script = Script((200, completion("Hi.")))
    asked(script)
    assert "tools" not in script.heard[0].body


def test_calls_of_tools_become_calls_of_ours() -> None:
    call = {"id": "x7", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    message, finish = asked(Script((200, completion(None, "tool_calls", tool_calls=[call]))), TALK, TOOLS)
    assert message == assistant("", [tool_call("add", '{"a": 1}', "x7")])
    assert finish == "tool_calls"


def test_the_key_comes_from_the_environment_variable_that_is_named() -> None:
    script = Script((401, "no such key"))
    with pytest.raises(PolicyError) as caught:
        asked(script, api_key_env="PATH")
    assert script.heard[0].headers["authorization"] == f"Bearer {os.environ['PATH']}"
    assert os.environ["PATH"] not in str(caught.value)
    with pytest.raises(
        ConfigError, match=r"policies\.foe\.api_key_env names 'NO_SUCH_KEY', which is not set"
    ):
        asked(script, api_key_env="NO_SUCH_KEY")


def test_a_busy_server_is_asked_again() -> None:
    script = Script((429, "slow down"), (503, "not yet"), (200, completion("Hi.")))
    assert asked(script)[0] == assistant("Hi.")
    assert len(script.heard) == 3


def test_retries_end_and_the_error_names_the_server_and_its_last_answer() -> None:
    script = Script((503, "out of order"))
    with pytest.raises(
        PolicyError, match=r"policy 'foe': http://127\.0\.0\.1:\d+/v1/chat/completions answered 503"
    ):
        asked(script)
    assert len(script.heard) == TRIES


def test_a_request_that_is_wrong_is_not_repeated() -> None:
    script = Script((400, "this model's maximum context length is 10 tokens"))
    with pytest.raises(PolicyError, match="answered 400: this model's maximum context length"):
        asked(script)
    assert len(script.heard) == 1


def test_a_server_that_is_not_there_is_named() -> None:
    async def scene() -> str:
        async with listening(Script((200, ""))) as url:
            pass
        with pytest.raises(PolicyError, match="cannot be reached: ConnectError") as caught:
            await ask(url)
        assert url in str(caught.value)
        return url

    within(20, scene())


def test_a_server_that_does_not_answer_is_given_up_at_the_deadline() -> None:
    async def silent(_: Heard) -> tuple[int, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(PolicyError, match=r"did not answer within 0\.2 s"):
        asked(silent, timeout=0.2)


def test_the_deadline_holds_for_all_tries_together() -> None:
    with pytest.raises(PolicyError, match=r"did not answer within 0\.3 s"):
        asked(Script((503, "busy")), timeout=0.3)


@pytest.mark.parametrize(
    "body", ["<html>", {}, {"choices": []}, {"choices": [{"message": {"tool_calls": [{"id": "a"}]}}]}, [1]]
)
def test_an_answer_that_is_no_chat_completion_is_shown(body: Any) -> None:
    with pytest.raises(PolicyError, match=re.escape("/v1/chat/completions sent no chat completion: ")):
        asked(Script((200, body)))
