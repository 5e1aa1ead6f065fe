"""The tools of an MCP server: a process that is started for the episode, or a server that is reached by http.

    class Files(ToolEnv):
        toolsets = [MCPToolset(["my-file-server", "--root", "data"], prefix="files_")]

    class Shared(ToolEnv):
        toolsets = [MCPToolset(url="http://127.0.0.1:8000/mcp")]

Each episode has a session of its own, and a process of its own where the server is a command. What the server lists
when the episode begins are the tools until it ends. The server checks the arguments; what it refuses, and what its
tools report as an error, is told to the model. A server that cannot be started or reached, or that goes away, fails
the play with an `EnvError` that names it and ends with what it wrote to its standard error.
"""

import asyncio
import contextlib
import functools
import importlib.util
import os
import shlex
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from agentgym import lifeline
from agentgym.errors import ConfigError, EnvError
from agentgym.tool_runner import Toolset
from agentgym.tool_schema import Context, Tool, ToolError

if TYPE_CHECKING:
    import mcp
    from anyio.from_thread import BlockingPortal, BlockingPortalProvider

_STDERR_TAIL = 2_000
"""Bytes of a server's standard error that an error message shows."""
_GRACE = 5.0
"""Seconds beyond its own limit after which a call that is still not back counts as lost."""
_MAX_PAGES = 100
"""Pages of tools that are read; a server that has ever more of them is not read for ever."""


class MCPToolset(Toolset):
    """The tools of one MCP server."""

    def __init__(
        self,
        command: Sequence[str] = (),
        *,
        url: str | None = None,
        prefix: str = "",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        start_timeout: float = 20.0,
        call_timeout: float = 20.0,
    ) -> None:
        """Take the server's command, or its address (streamable http).

        `prefix` goes before the tools' names. `env` adds to the few variables that a server inherits (PATH, HOME
        and the like), `cwd` is where it starts. The timeouts are seconds: for starting and listing the tools, and
        for a call. Raises ConfigError where there is not exactly one of command and url, or no package mcp.
        """
        if bool(command) == bool(url):
            raise ConfigError(
                "MCPToolset needs a command or a url: MCPToolset(['my-server']) or MCPToolset(url='...')"
            )
        if importlib.util.find_spec("mcp") is None:
            raise ConfigError("MCPToolset needs the package mcp: pip install 'agentgym-rl[mcp]'")
        self._command = list(command)
        self._url = url
        self._prefix = prefix
        self._env = dict(env or {})
        self._cwd = cwd
        self._start_timeout = start_timeout
        self._call_timeout = call_timeout
        self._tools: list[Tool] = []
        self._session: contextlib.ExitStack | None = None

    @property
    def tools(self) -> Sequence[Tool]:
        """What the server listed when the episode began; none before the first one."""
        return self._tools

    def open(self, context: Context) -> None:
        """Start or reach the server and ask for its tools. Raises EnvError where that fails."""
        with contextlib.ExitStack() as opened:
            self._stderr: IO[str] = opened.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
            try:
                self._portal: BlockingPortal = opened.enter_context(_portals())
                connection = self._portal.wrap_async_context_manager(self._connect())
                self._client, listed = opened.enter_context(connection)
            except Exception as error:  # whatever a server and the road to it may bring
                raise EnvError(self._blame("did not start", error)) from error
            self._tools = [self._tool(found) for found in listed]
            self._session = opened.pop_all()

    def close(self) -> None:
        """End the session, and the server if it was started for it."""
        if self._session is not None:
            session, self._session = self._session, None
            with contextlib.suppress(Exception):  # the server may be long gone, or break while it ends
                session.close()

    @contextlib.asynccontextmanager
    async def _connect(self) -> "AsyncIterator[tuple[mcp.Client, list[mcp.Tool]]]":
        """Hold a session open; entered and left by one task of the portal's event loop."""
        import mcp

        server: Any = self._url
        if self._url is None:
            # The kernel ends the server with this process, however that dies.
            launcher = ["-I", "-S", lifeline.__file__, str(os.getpid()), *self._command]
            parameters = mcp.StdioServerParameters(
                command=sys.executable, args=launcher, env=self._env, cwd=self._cwd
            )
            server = mcp.stdio_client(parameters, errlog=self._stderr)  # type: ignore[arg-type]
        async with contextlib.AsyncExitStack() as stack:
            async with asyncio.timeout(self._start_timeout):
                client = await stack.enter_async_context(mcp.Client(server, mode="legacy", cache=None))
                page = await client.list_tools()
                tools = page.tools
                for _ in range(_MAX_PAGES):
                    if page.next_cursor is None:
                        break
                    page = await client.list_tools(cursor=page.next_cursor)
                    tools += page.tools
            yield client, tools

    def _tool(self, found: "mcp.Tool") -> Tool:
        call = functools.partial(self._call, found.name)
        return Tool(self._prefix + found.name, found.description or "", found.input_schema, call)

    def _call(self, name: str, /, **arguments: Any) -> str:
        """Call a tool of the server and return what the model reads."""
        import mcp
        from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        if self._session is None:
            raise EnvError(f"the MCP server {self._name} has no session; call super().reset() first")
        call = self._portal.start_task_soon(self._client.call_tool, name, arguments, self._call_timeout)
        try:
            result = call.result(self._call_timeout + _GRACE)
        except mcp.MCPError as error:
            if error.code == REQUEST_TIMEOUT:
                raise TimeoutError(f"no result within {self._call_timeout:g} seconds") from error
            if error.code == CONNECTION_CLOSED:
                raise EnvError(self._blame(f"went away in a call of {name!r}", error)) from error
            raise ToolError(error.message) from error
        except Exception as error:  # the road to the server
            raise EnvError(self._blame(f"failed in a call of {name!r}", error)) from error
        text = "\n".join(_text(block) for block in result.content)
        if result.is_error:
            raise ToolError(text)
        return text

    @property
    def _name(self) -> str:
        return self._url or shlex.join(self._command)

    def _blame(self, what: str, error: BaseException) -> str:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        reason = (
            "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
        )
        text = f"the MCP server {self._name} {what}: {reason}"
        written = self._stderr_tail()
        return f"{text}; its standard error ends with: {written}" if written else text

    def _stderr_tail(self) -> str:
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - _STDERR_TAIL))
        return self._stderr.read().strip()


@functools.cache
def _portals() -> "BlockingPortalProvider":
    """Return the provider of the event loop that all sessions of this process share."""
    from anyio.from_thread import BlockingPortalProvider

    return BlockingPortalProvider()


def _text(block: Any) -> str:
    """Return a part of a result as text; the model reads nothing else."""
    if block.type == "text":
        return str(block.text)
    if block.type == "resource" and hasattr(block.resource, "text"):
        return str(block.resource.text)
    return f"[{block.type} left out]"
