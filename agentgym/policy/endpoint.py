"""A policy behind an OpenAI-compatible server: messages and tools in, an answer out.

Such a server speaks text: which tokens it sampled is not known here, so its answers are logged and never trained.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from agentgym.config import SamplingConfig
from agentgym.errors import ConfigError, PolicyError
from agentgym.messages import Message, ToolSchema, assistant, tool_call
from agentgym.policy.client import Speaker
from agentgym.policy_config import PolicyConfig

TRIES = 4
FIRST_PAUSE = 0.5
"""Seconds between the first two tries; each later pause is twice as long."""
BUSY = {408, 425, 429, 500, 502, 503, 504}
"""Answers after which asking again may help."""


class Endpoint(Speaker):
    """Asks one model of a server for chat completions; many requests may wait at once."""

    def __init__(self, policy: str, config: PolicyConfig, sampling: SamplingConfig) -> None:
        """Prepare requests for the policy of this name; nothing is sent yet.

        Raises:
            ConfigError: the environment variable of the API key is not set.
        """
        self._policy = policy
        self._url = f"{(config.endpoint or '').rstrip('/')}/chat/completions"
        self._request = {
            "model": config.model,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
        }
        key = api_key(policy, config)
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            limits=httpx.Limits(max_connections=None),
            timeout=None,  # `chat` has a deadline for everything
        )

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, timeout: float
    ) -> tuple[Message, str]:
        """Return the answer to a conversation, and why it ended ("stop", "length", "tool_calls").

        A server that cannot be reached or is busy is asked again, four times in all.

        Raises:
            PolicyError: no answer within `timeout` seconds, retries included, or one that is of no use.
        """
        body = {**self._request, "messages": list(messages), **({"tools": list(tools)} if tools else {})}
        try:
            async with asyncio.timeout(timeout):
                return self._answer(await self._post(body))
        except TimeoutError as error:
            raise PolicyError(
                f"policy {self._policy!r}: {self._url} did not answer within {timeout:g} s"
            ) from error

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def _post(self, body: Mapping[str, Any]) -> httpx.Response:
        pause = FIRST_PAUSE
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(pause)
                pause *= 2
            try:
                response = await self._client.post(self._url, json=body)
            except httpx.TransportError as error:
                problem = f"cannot be reached: {type(error).__name__} {error}"
                continue
            except httpx.HTTPError as error:
                raise PolicyError(f"policy {self._policy!r}: {self._url}: {error}") from error
            if response.is_success:
                return response
            problem = f"answered {response.status_code}: {response.text:.300}"
            if response.status_code not in BUSY:
                raise PolicyError(f"policy {self._policy!r}: {self._url} {problem}")
        raise PolicyError(f"policy {self._policy!r}: {self._url} {problem} ({TRIES} tries)")

    def _answer(self, response: httpx.Response) -> tuple[Message, str]:
        try:
            choice = response.json()["choices"][0]
            message = choice["message"]
            calls = [
                tool_call(str(call["function"]["name"]), str(call["function"]["arguments"]), str(call["id"]))
                for call in message.get("tool_calls") or ()
            ]
            return assistant(str(message.get("content") or ""), calls), str(choice.get("finish_reason"))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise PolicyError(
                f"policy {self._policy!r}: {self._url} sent no chat completion: {response.text:.300}"
            ) from error


def api_key(policy: str, config: PolicyConfig) -> str:
    """Return the API key of an endpoint, empty if it has none.

    Raises:
        ConfigError: the environment variable that is to hold it is not set.
    """
    if config.api_key_env is None:
        return ""
    key = os.environ.get(config.api_key_env)
    if not key:
        raise ConfigError(
            f"policies.{policy}.api_key_env names {config.api_key_env!r}, which is not set in the environment"
        )
    return key
