"""What an environment promises: the contract between an environment and the worker that plays it.

An environment is an ordinary Farama environment. `Env` is a `gymnasium.Env`, `AECEnv` and `ParallelEnv` are
PettingZoo's, and anything else with the same methods whose observations and actions are text is accepted as
it is; these classes only supply spaces, prompts and tools.

Observations hold what is *new*. A single-agent environment returns a text (one user message) or a list of
messages of role "user" or "tool", "system" only from `reset`. A multi-agent environment returns
`{"messages": [...]}` for each agent, and optionally "action_mask" (the legal ones of `action_space.choices`).
The worker owns the conversation; an environment never repeats the history.

Actions. An agent without tools answers with a `str`. An agent with tools (`tools` is not empty) answers with
the whole assistant message, tool calls included.

Prompts. `system_prompt` (an attribute of `Env`, a method of agent for the others) opens the conversation.
It may depend on the episode: it is read after `reset`.

Rewards are floats per step and agent. Four keys of `info` mean something, each is optional:

    info["rewards"]   dict[str, float]  the named parts of the step's reward; they sum to it (weights come later)
    info["success"]   float, 0 to 1     how well the agent did; the last one given counts
    info["metrics"]   dict[str, float]  other numbers; summed over the episode
    info["legal"]     list[str]         the answers that are legal now; a scripted policy sees it, a model does not

In an AEC environment `infos[agent]` covers the same span as the reward that `last()` returns: everything
since the agent's previous action. The environment empties it when the agent acts.

`agentgym.rewards` gives parts weights, and adds rewards for whole episodes and groups.

Ends. `terminated` comes from the environment only and means that the task is over. `truncated` means that it
was cut short: the environment may say so (gymnasium's TimeLimit does), and the worker cuts at its own limits
(turns, tokens, context, time) without telling the environment. `reset` starts a new episode at any time.

Randomness comes from `self.np_random`, seeded by `reset(seed=...)`: same seed and same actions, same episode.

Isolation. An instance runs in a process of its own, where `random` and numpy's global generator are seeded from the
episode's seed before each `reset`. A class that keeps no state outside of its instances says `isolation = "shared"`
(an attribute, or an argument of `register`): its instances run in threads of one process, which is cheaper. One whose
`reset` and `step` also take microseconds and wait for nothing, as a board game's do, says "inline" and is called
without a thread, which is cheaper still; while a call runs, its whole worker waits.

Two agents by turns (AEC): a reward belongs to the agent's latest answer, whoever moved since.

    step  whose turn  observation ("messages")  action   rewards after it  ended
    0     player_1    [user "........."]        "5"      0, 0
    1     player_2    [user "....o...."]        "1"      0, 0
    ...
    4     player_1    [user "xx.oo...."]        "3"      +1, -1            both terminated
    5     player_2    []                        None     player_2's last() gives -1, for its last answer
    6     player_1    []                        None     player_1's last() gives +1, for its last answer

Agents at once (parallel): every live agent answers, then one step.

    step   observations                                actions                rewards      ended
    reset  a: [user "Round 1?"], b: [user "Round 1?"]
    1      a: [user "claim 7"], b: [user "claim 5"]    a "claim 5", b "claim 7"   0, 0
    2      a: [], b: []                                a "claim 4", b "claim 6"   0.4, 0.6   both terminated

One agent leaves early (parallel): an agent that ended is absent from `agents` and gets nothing any more.

    step  agents   actions            rewards        terminated
    1     a, b, c  a, b and c answer  0, -1, 0       b
    2     a, c     a and c answer     0, 0           (none)
    3     a, c     a and c answer     1, 0           a, c

A play cut by a limit (single agent, three turns allowed): the environment sees nothing of it.

    step   observation          action  reward  terminated  truncated  episode's end reason
    reset  "Guess 1-20."
    1      "higher"             "10"    0       no          no
    2      "higher"             "15"    0       no          no
    3      "lower"              "18"    0       no          no         max_turns, set by the worker
"""

from functools import cached_property
from typing import Any

import gymnasium
import pettingzoo

from agentgym.messages import Action, AgentId, Observation, ToolSchema
from agentgym.spaces import AssistantMessage, Messages, Text, agent_observation_space

AgentObservation = dict[str, Any]
"""What one agent of a multi-agent environment sees: {"messages": [...]}, optionally "action_mask"."""
ParallelStart = tuple[dict[AgentId, AgentObservation], dict[AgentId, dict[str, Any]]]
"""What `ParallelEnv.reset` returns: observations and infos by agent."""
ParallelStep = tuple[
    dict[AgentId, AgentObservation],
    dict[AgentId, float],
    dict[AgentId, bool],
    dict[AgentId, bool],
    dict[AgentId, dict[str, Any]],
]
"""What `ParallelEnv.step` returns: observations, rewards, terminations, truncations and infos by agent."""


class Env(gymnasium.Env[Observation, Action]):
    """An environment for one agent; write `reset` and `step` as for any `gymnasium.Env`."""

    system_prompt: str | None = None
    """Opens the conversation; set it in the class, in `__init__` or in `reset`."""

    @cached_property
    def observation_space(self) -> gymnasium.Space[Observation]:  # type: ignore[override]  # lazy default
        """Text or new messages; a class or an instance may set its own."""
        return Messages(text=True)

    @cached_property
    def action_space(self) -> gymnasium.Space[Action]:  # type: ignore[override]  # lazy default
        """Text, or an assistant message where the environment has tools."""
        return AssistantMessage(self.tools) if self.tools else Text()

    @property
    def tools(self) -> list[ToolSchema]:
        """The tools that the agent may call; fixed during an episode."""
        return []

    def render(self) -> str | None:
        """Return the state as text, where the environment has something to show."""
        return None


class _ManyAgents:
    """What the two multi-agent classes share: spaces, prompts and tools per agent."""

    render_mode: str | None = None

    @cached_property
    def _agent_spaces(self) -> dict[tuple[str, AgentId], gymnasium.Space[Any]]:
        return {}

    def observation_space(self, agent: AgentId) -> gymnasium.Space[Any]:
        """Return the agent's observation space, the same object each time."""
        return self._agent_spaces.setdefault(("observation", agent), agent_observation_space())

    def action_space(self, agent: AgentId) -> gymnasium.Space[Any]:
        """Return the agent's action space, the same object each time."""
        key = ("action", agent)
        if key not in self._agent_spaces:
            tools = self.tools(agent)
            self._agent_spaces[key] = AssistantMessage(tools) if tools else Text()
        return self._agent_spaces[key]

    def system_prompt(self, agent: AgentId) -> str | None:
        """Return what opens the agent's conversation."""
        return None

    def tools(self, agent: AgentId) -> list[ToolSchema]:
        """Return the tools that the agent may call; fixed during an episode."""
        return []

    def render(self) -> str | None:
        """Return the state as text, where the environment has something to show."""
        return None

    def close(self) -> None:
        """Release what the environment holds; may be called more than once."""


class AECEnv(_ManyAgents, pettingzoo.AECEnv[AgentId, AgentObservation, Action | None]):  # type: ignore[misc]
    """An environment for agents that act by turns; write `reset`, `step` and `observe` as in PettingZoo."""

    metadata: dict[str, Any] = {"render_modes": [], "is_parallelizable": False}  # noqa: RUF012  as in PettingZoo


class ParallelEnv(_ManyAgents, pettingzoo.ParallelEnv[AgentId, AgentObservation, Action]):  # type: ignore[misc]
    """An environment for agents that act at once; write `reset` and `step` as in PettingZoo."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  as in PettingZoo


def action_text(action: Action) -> str:
    """Return the text of an answer, whichever form it has."""
    return action if isinstance(action, str) else action["content"]


def system_prompt_of(env: Any, agent: AgentId) -> str | None:
    """Return an agent's system prompt from any environment; None where the environment names none."""
    prompt = getattr(getattr(env, "unwrapped", env), "system_prompt", None)
    return prompt(agent) if callable(prompt) else prompt


def tools_of(env: Any, agent: AgentId) -> list[ToolSchema]:
    """Return an agent's tools from any environment; none where the environment names none."""
    tools = getattr(getattr(env, "unwrapped", env), "tools", [])
    return list(tools(agent) if callable(tools) else tools)
