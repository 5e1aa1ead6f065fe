"""agentgym.toolsets.mcp against a real server: sessions, failures, and processes that must not stay behind."""

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import alive, ends

from agentgym.errors import ConfigError, EnvError
from agentgym.messages import assistant, tool_call
from agentgym.tool_runner import ToolRunner
from agentgym.tools import ToolEnv, tool
from agentgym.toolsets import MCPToolset

pytest.importorskip("mcp")

SHOP = [sys.executable, str(Path(__file__).parents[1] / "mcp_shop.py")]
NAMES = ["price", "count", "session", "process", "fail", "dawdle", "name", "offer_more", "die"]


def call(runner: ToolRunner, name: str, /, **arguments: object) -> str:
    return runner.run([tool_call(name, json.dumps(arguments), "a")]).messages[0]["content"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The address of a server that is reached by http."""
    served = subprocess.Popen([*SHOP, "http"], stdout=subprocess.PIPE, text=True)
    assert served.stdout is not None
    yield f"http://127.0.0.1:{int(served.stdout.readline())}/mcp"
    served.kill()
    served.communicate()


@pytest.fixture(params=["stdio", "http"])
def shop(request: pytest.FixtureRequest) -> MCPToolset:
    if request.param == "stdio":
        return MCPToolset(SHOP, call_timeout=30.0, start_timeout=60.0)
    return MCPToolset(url=request.getfixturevalue("url"), call_timeout=30.0, start_timeout=60.0)


def test_the_servers_tools_are_called_and_their_failures_told_to_the_model(shop):
    runner = ToolRunner([shop])
    assert runner.names == []
    runner.open(0)
    assert runner.names == NAMES
    price = runner.schemas[0]["function"]
    assert price["description"] == "Look up a price."
    assert price["parameters"]["required"] == ["item"]
    assert call(runner, "price", item="tea", amount=2) == "2 tea: 6"
    assert call(runner, "name", name="tea", self=1) == "tea 1"
    assert call(runner, "fail") == "Error: Error executing tool fail"
    assert call(runner, "price", item=[]).startswith("Error: ")
    assert call(runner, "buy").startswith("Error: UnknownTool")
    runner.close()


def test_each_episode_has_a_session_of_its_own(shop):
    class Shopping(ToolEnv):
        toolsets = (shop,)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return "?", {}

        @tool
        def submit(self) -> None:
            """End."""
            self.finish(1.0)

    def count(env: ToolEnv) -> str:
        return env.step(assistant("", [tool_call("count", "{}", "a")]))[0][0]["content"]

    first, second = Shopping(), Shopping()
    for env in (first, second):
        env.reset(seed=0)
    assert [count(first), count(second), count(first), count(second)] == ["1", "1", "2", "2"]
    first.reset(seed=1)
    assert [count(first), count(second)] == ["1", "3"]
    assert [found["function"]["name"] for found in first.tools] == [*NAMES, "submit"]
    assert first.action_space.contains(assistant("", [tool_call("count", "{}", "a")]))
    for env in (first, second):
        env.step(assistant("", [tool_call("submit", "{}", "a")]))
        env.close()


def test_the_tools_stay_the_same_until_the_episode_ends():
    runner = ToolRunner([MCPToolset(SHOP, prefix="shop_", start_timeout=60.0)])
    runner.open(0)
    before = runner.schemas
    assert call(runner, "shop_offer_more") == "done"
    assert runner.schemas == before
    assert runner.names == [f"shop_{name}" for name in NAMES]
    runner.close()


def test_a_call_that_takes_too_long_is_told_to_the_model():
    runner = ToolRunner([MCPToolset(SHOP, call_timeout=0.5, start_timeout=60.0)])
    runner.open(0)
    assert call(runner, "dawdle", seconds=60) == "Error: TimeoutError: no result within 0.5 seconds"
    runner.close()


def test_a_server_that_dies_fails_the_play_by_name_with_its_last_words():
    runner = ToolRunner([MCPToolset(SHOP, start_timeout=60.0)])
    runner.open(0)
    with pytest.raises(EnvError, match=r"mcp_shop\.py went away in a call of 'die': .*the shop burns down"):
        call(runner, "die")
    with pytest.raises(EnvError, match="went away"):
        call(runner, "price", item="tea")
    runner.close()
    runner.open(0)
    assert call(runner, "price", item="tea") == "1 tea: 3"
    runner.close()


def test_a_server_on_the_network_that_dies_fails_the_play_by_name():
    served = subprocess.Popen([*SHOP, "http"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert served.stdout is not None
    url = f"http://127.0.0.1:{int(served.stdout.readline())}/mcp"
    runner = ToolRunner([MCPToolset(url=url, start_timeout=60.0)])
    runner.open(0)
    served.kill()
    served.communicate()
    with pytest.raises(EnvError, match=rf"{url} (went away|failed) in a call of 'price'"):
        call(runner, "price", item="tea")
    runner.close()
    with pytest.raises(EnvError, match=f"{url} did not start: "):
        runner.open(0)


@pytest.mark.parametrize(
    ("command", "seconds", "reason"),
    [
        (["no-such-server"], 60, "no-such-server did not start: .*no-such-server: No such file or directory"),
        (["sh", "-c", "echo broken >&2; exit 4"], 60, "did not start: .*ends with: broken"),
        (["sleep", "100"], 1, "sleep 100 did not start: no answer in time"),
    ],
)
def test_a_server_that_does_not_start_fails_the_play_by_name(command, seconds, reason):
    runner = ToolRunner([MCPToolset(command, start_timeout=seconds)])
    with pytest.raises(EnvError, match=reason):
        runner.open(0)


@pytest.mark.parametrize("mode", [[], ["stubborn"]])
def test_a_server_ends_with_its_episode(mode):
    runner = ToolRunner([MCPToolset([*SHOP, *mode], start_timeout=60.0)])
    runner.open(0)
    server = int(call(runner, "process"))
    assert alive(server)
    runner.close()
    runner.close()
    assert ends(server)


def test_a_session_on_the_network_is_ended_with_its_episode(url):
    runner = ToolRunner([MCPToolset(url=url, start_timeout=60.0)])
    runner.open(0)
    session = call(runner, "session")
    runner.close()
    headers = {
        "Mcp-Session-Id": session,
        "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream",
    }
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/list"}).encode()
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=30)
    assert refused.value.code == 404
    refused.value.close()


OWNER = """
import sys
from agentgym.tool_schema import Context
from agentgym.toolsets import MCPToolset
shop = MCPToolset(sys.argv[1:], start_timeout=60.0)
shop.open(Context())
process = next(tool for tool in shop.tools if tool.name == "process")
print(process.function(), flush=True)
sys.stdin.read()
"""


def test_no_server_outlives_the_process_that_started_it():
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, *SHOP, "stubborn"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    server = int(owner.stdout.readline())
    assert alive(server)
    owner.kill()
    owner.communicate()
    assert ends(server)


@pytest.mark.parametrize("settings", [{}, {"command": ["server"], "url": "http://127.0.0.1/mcp"}])
def test_a_toolset_has_a_command_or_an_address(settings):
    with pytest.raises(ConfigError, match="a command or a url"):
        MCPToolset(**settings)


@pytest.mark.parametrize(
    ("package", "make", "extra"),
    [
        ("mcp", "MCPToolset(['server'])", "agentgym-rl[mcp]"),
        ("pydantic_monty", "Python()", "agentgym-rl[python-tool]"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(package, make, extra):
    script = f"import sys; sys.modules[{package!r}] = None; from agentgym.toolsets import *; {make}"
    failed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert failed.returncode == 1
    assert f"pip install '{extra}'" in failed.stderr.splitlines()[-1]
