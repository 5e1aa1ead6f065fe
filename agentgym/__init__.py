"""agentgym: a gym for language-model agents.

Write an environment as a Gymnasium or PettingZoo class, train the models that play it. Reading order: `env`,
`tools`, `registry` (what happens), `worker` (who plays), `policy` (who answers), `episode` (what is recorded),
`coordinator` (who joins it), `batch` and `agentgym_trainers` (who learns).

    from agentgym import Env, ToolEnv, tool, AECEnv, ParallelEnv, register, make
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentgym.env import AECEnv, Env, ParallelEnv
    from agentgym.episode import EndReason, Episode, Trajectory, Turn
    from agentgym.errors import AgentGymError, ConfigError, EnvError
    from agentgym.messages import Message, assistant, system, user
    from agentgym.policy.scripted import ScriptedPolicy, SeededPolicy
    from agentgym.registry import EnvSpec, list_envs, make, register, spec
    from agentgym.rewards import reward
    from agentgym.tool_runner import ToolRunner, Toolset
    from agentgym.tool_schema import Context, ToolError
    from agentgym.tools import ToolEnv, tool
    from agentgym.wrappers.aec import TextAECWrapper
    from agentgym.wrappers.parallel import TextParallelWrapper
    from agentgym.wrappers.single import TextWrapper

__version__ = "0.1.0"

_HOME = {
    "AECEnv": "env",
    "AgentGymError": "errors",
    "ConfigError": "errors",
    "Context": "tool_schema",
    "EndReason": "episode",
    "Env": "env",
    "EnvError": "errors",
    "EnvSpec": "registry",
    "Episode": "episode",
    "Message": "messages",
    "ParallelEnv": "env",
    "ScriptedPolicy": "policy.scripted",
    "SeededPolicy": "policy.scripted",
    "TextAECWrapper": "wrappers.aec",
    "TextParallelWrapper": "wrappers.parallel",
    "TextWrapper": "wrappers.single",
    "ToolEnv": "tools",
    "ToolError": "tool_schema",
    "ToolRunner": "tool_runner",
    "Toolset": "tool_runner",
    "Trajectory": "episode",
    "Turn": "episode",
    "assistant": "messages",
    "list_envs": "registry",
    "make": "registry",
    "register": "registry",
    "reward": "rewards",
    "spec": "registry",
    "system": "messages",
    "tool": "tools",
    "user": "messages",
}
"""Where each public name is defined; it is imported when it is first used, so that the command line starts fast."""

__all__ = [
    "AECEnv",
    "AgentGymError",
    "ConfigError",
    "Context",
    "EndReason",
    "Env",
    "EnvError",
    "EnvSpec",
    "Episode",
    "Message",
    "ParallelEnv",
    "ScriptedPolicy",
    "SeededPolicy",
    "TextAECWrapper",
    "TextParallelWrapper",
    "TextWrapper",
    "ToolEnv",
    "ToolError",
    "ToolRunner",
    "Toolset",
    "Trajectory",
    "Turn",
    "__version__",
    "assistant",
    "list_envs",
    "make",
    "register",
    "reward",
    "spec",
    "system",
    "tool",
    "user",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'agentgym' has no attribute {name!r}")
    return getattr(import_module(f"agentgym.{_HOME[name]}"), name)
