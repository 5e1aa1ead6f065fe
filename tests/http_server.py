"""A real HTTP server on loopback that answers as a test says."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Heard:
    """One request."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


Answering = Callable[[Heard], Awaitable[tuple[int, Any]]]
"""From a request to a status and a body: a text, or what becomes JSON."""


@asynccontextmanager
async def listening(answer: Answering) -> AsyncIterator[str]:
    """Serve on a free port and yield the base URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            _, path, _ = (await reader.readline()).decode().split()
            headers = {}
            while line := (await reader.readline()).decode().strip():
                name, _, value = line.partition(":")
                headers[name.lower()] = value.strip()
            body = json.loads(await reader.readexactly(int(headers.get("content-length", 0))))
            status, reply = await answer(Heard(path, headers, body))
            content = (reply if isinstance(reply, str) else json.dumps(reply)).encode()
            head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
            writer.write(head.encode() + content)
            await writer.drain()
        except ConnectionError:
            pass  # the client has given up
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    try:
        yield f"http://{host}:{port}/v1"
    finally:
        server.close()


def completion(content: str | None, finish: str = "stop", **message: Any) -> dict[str, Any]:
    """A chat completion with one answer."""
    answer = {"role": "assistant", "content": content, **message}
    return {
        "object": "chat.completion",
        "choices": [{"index": 0, "message": answer, "finish_reason": finish}],
    }
