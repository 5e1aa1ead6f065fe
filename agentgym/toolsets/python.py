"""Python for the model: a tool that runs code in a sandbox, in a process that may be lost.

The sandbox is Monty (package pydantic-monty), an interpreter of a large part of Python that knows no files, no
network, no environment variables and no other processes. Variables live from call to call within an episode. Time and
memory are limited; the clock stands still and random numbers follow from the episode's seed, so that the same code in
the same episode gives the same result.
"""

import contextlib
import datetime
import importlib.util
import time
from typing import TYPE_CHECKING, Any

from agentgym.errors import ConfigError
from agentgym.tool_runner import Toolset
from agentgym.tool_schema import Context, ToolError
from agentgym.tools import tool

if TYPE_CHECKING:
    import pydantic_monty

_GRACE = 1.0
"""Seconds that the interpreter has to end by itself after its time limit, before its process is killed."""
_MAX_OUTPUT = 1_000_000
"""Bytes that a call may print."""
_CLOCK = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


class Python(Toolset):
    """A Python interpreter for each episode.

    Its process starts with the first call; it ends with the episode, or with this process: at once where it waits,
    by its time limit where it computes.
    """

    def __init__(self, *, timeout: float = 5.0, memory_mb: int = 64) -> None:
        """Take the seconds a call may run, and the megabytes that variables may fill.

        Raises ConfigError where the package pydantic-monty is missing.
        """
        if importlib.util.find_spec("pydantic_monty") is None:
            raise ConfigError(
                "Python needs the package pydantic-monty: pip install 'agentgym-rl[python-tool]'"
            )
        self._timeout = timeout
        self._memory_mb = memory_mb
        self._seed = 0
        self._session: pydantic_monty.MontySession | None = None
        self._opened = contextlib.ExitStack()

    def open(self, context: Context) -> None:
        """Forget all variables."""
        self.close()
        self._seed = context.seed or 0

    def close(self) -> None:
        """End the interpreter."""
        self._session = None
        self._opened.close()

    @tool
    def python(self, code: str) -> str:
        """Run Python code and read what it prints and the value of its last line. Variables are kept.

        Args:
            code: The code.
        """
        import pydantic_monty

        session = self._session or self._start()
        printed = pydantic_monty.CollectString(_MAX_OUTPUT)
        started = time.monotonic()
        try:
            value = session.feed_run(code, print_callback=printed)
            shown = "" if value is None else _repr(session, value)
        except pydantic_monty.MontyCrashedError as error:
            self.close()
            cause = f"the code ran longer than {self._timeout:g} s" if error.timed_out else str(error)
            raise ToolError(f"{cause}; all variables are lost") from error
        except (pydantic_monty.MontyRuntimeError, pydantic_monty.MontySyntaxError) as error:
            cause = ""
            if time.monotonic() - started >= self._timeout:
                cause = f"the code ran longer than {self._timeout:g} s"
            elif isinstance(error.exception(), MemoryError):
                cause = f"the variables need more than {self._memory_mb} MB"
            if cause:  # a heap that a limit stopped half-way is of no more use
                self.close()
                raise ToolError(f"{cause}; all variables are lost") from error
            raise ToolError(f"{printed.output}{error.display('traceback')}") from error
        return printed.output + shown or "(no output)"

    def _start(self) -> "pydantic_monty.MontySession":
        import pydantic_monty

        limits: pydantic_monty.ResourceLimits = {
            "max_feed_duration_secs": self._timeout,
            "max_memory": self._memory_mb * 1_000_000,
        }
        policy: pydantic_monty.OSPolicy = {
            "datetime": _CLOCK,
            "sleep": "zero",
            "random_start": {"seed": self._seed},
        }
        with contextlib.ExitStack() as opened:
            pool = opened.enter_context(
                pydantic_monty.Monty(max_processes=1, request_timeout=self._timeout + _GRACE)
            )
            session = opened.enter_context(pool.checkout(limits=limits, os_policy=policy))
            self._opened = opened.pop_all()
        self._session = session
        return session


def _repr(session: "pydantic_monty.MontySession", value: Any) -> str:
    """Return the value's repr, made within the sandbox and its limits: a small value may have an endless one."""
    import pydantic_monty

    unshown = f"<{getattr(value, 'name', type(value).__name__)} object>"  # for what does not go back in
    try:
        return str(session.feed_run("repr(_)", inputs={"_": value}))
    except (pydantic_monty.MontyConversionError, TypeError, ValueError):
        return unshown
    except pydantic_monty.MontyRuntimeError as error:
        if isinstance(error.exception(), RuntimeError):
            return unshown
        raise
