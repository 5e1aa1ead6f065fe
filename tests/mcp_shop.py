"""An MCP server for tests, written with the server side of the package mcp.

python mcp_shop.py            speaks over stdio
python mcp_shop.py stubborn   the same, but stays when its input has ended
python mcp_shop.py http       serves streamable http on loopback, and prints its port
"""

import asyncio
import os
import socket
import sys
import time
from collections import Counter

import anyio
from mcp.server.mcpserver import Context, MCPServer

server = MCPServer("shop", log_level="CRITICAL")
counts: Counter[str] = Counter()


@server.tool()
def price(item: str, amount: int = 1) -> str:
    """Look up a price."""
    return f"{amount} {item}: {3 * amount}"


@server.tool()
def count(ctx: Context) -> int:
    """Count the calls of this session."""
    counts[session(ctx)] += 1
    return counts[session(ctx)]


@server.tool()
def session(ctx: Context) -> str:
    """Say which session this is."""
    return (ctx.headers or {}).get("mcp-session-id", "the only one")


@server.tool()
def process() -> int:
    """Say which process this is."""
    return os.getpid()


@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("out of tea")


@server.tool()
async def dawdle(seconds: float) -> str:
    """Take long."""
    await asyncio.sleep(seconds)
    return "late"


@server.tool()
def name(name: str, self: int) -> str:
    """Have arguments whose names mean something elsewhere."""
    return f"{name} {self}"


@server.tool()
def offer_more() -> str:
    """Offer one more tool."""
    server.add_tool(price, name="price_again")
    return "done"


@server.tool()
def die() -> str:
    """End the server at once."""
    sys.stderr.write("the shop burns down\n")
    sys.stderr.flush()
    os._exit(3)


def serve_http() -> None:
    import uvicorn

    listening = socket.create_server(("127.0.0.1", 0))
    sys.stdout.write(f"{listening.getsockname()[1]}\n")
    sys.stdout.flush()
    config = uvicorn.Config(server.streamable_http_app(), log_level="critical")
    anyio.run(lambda: uvicorn.Server(config).serve(sockets=[listening]))


if __name__ == "__main__":
    if sys.argv[1:] == ["http"]:
        serve_http()
    else:
        server.run("stdio")
        if sys.argv[1:] == ["stubborn"]:
            time.sleep(600)
