"""The environment behind `tau2:DOMAIN`."""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from tau2.data_model.message import AssistantMessage, UserMessage
from tau2.data_model.message import ToolCall as Tau2Call
from tau2.user.base import OUT_OF_SCOPE, STOP, TRANSFER

from agentgym.env import AECEnv, AgentObservation, action_text
from agentgym.errors import ConfigError
from agentgym.messages import Action, AgentId, Message, ToolCall, ToolSchema, user
from agentgym.tool_runner import ToolRunner
from agentgym.tool_schema import Tool, ToolError
from agentgym_envs.tau2 import prompts
from agentgym_envs.tau2.domains import SIMULATOR, load_domain, load_tasks, make_task, make_world
from agentgym_envs.tau2.reward import factors

AGENT, USER = "agent", "user"

_ROLE = {AGENT: "assistant", USER: "user"}
"""tau2's names of the two."""
_SPEAKS = {AGENT: AssistantMessage, USER: UserMessage}
"""tau2's messages by them."""


class CustomerService(AECEnv):
    """A customer and a company's agent; see the package's docstring."""

    metadata: dict[str, Any] = {  # noqa: RUF012  as in PettingZoo
        "name": "tau2",
        "render_modes": [],
        "is_parallelizable": False,
    }

    def __init__(
        self,
        name: str,
        *,
        split: str = "base",
        task_id: str | Sequence[str] | None = None,
        policy: str | None = None,
        tools: Sequence[str] | None = None,
        max_errors: int = 10,
    ) -> None:
        """Take the domain and which tasks are played; what else there is to set says the package's docstring."""
        self.possible_agents = [AGENT, USER]
        self._domain = name
        self._tasks = load_tasks(name, split)
        if task_id is not None:
            wanted = [task_id] if isinstance(task_id, str) else list(task_id)
            strange = [one for one in wanted if one not in self._tasks]
            if strange or not wanted:
                raise ConfigError(f"tau2:{name} has no task {', '.join(strange)} in its split {split!r}")
            self._tasks = {one: self._tasks[one] for one in wanted}
        self._max_errors = max_errors
        self._rng = np.random.default_rng()
        domain = load_domain(name)
        self._policy = domain.policy if policy is None else policy
        self._runners = {AGENT: ToolRunner(self._tools_of(AGENT, domain.tools, tools))}
        if domain.user_tools:
            self._runners[USER] = ToolRunner(self._tools_of(USER, domain.user_tools, None), agent=USER)
        guidelines = "simulation_guidelines_tools.md" if USER in self._runners else "simulation_guidelines.md"
        self._guidelines = (SIMULATOR / guidelines).read_text()

    def system_prompt(self, agent: AgentId) -> str:
        """Return the policy document, or the guidelines and the scenario."""
        if agent == AGENT:
            return prompts.agent_prompt(self._policy)
        return prompts.user_prompt(self._guidelines, str(self._task.user_scenario))

    def tools(self, agent: AgentId) -> list[ToolSchema]:
        """Return the domain's tools for the agent, and the phone's for telecom's user."""
        return self._runners[agent].schemas if agent in self._runners else []

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Choose a task; the customer is greeted."""
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        ids = list(self._tasks)
        self._task = make_task(self._tasks[ids[int(self._rng.integers(len(ids)))]])
        self._world = make_world(self._domain, self._task)
        self._conversation: list[Any] = [AssistantMessage(role="assistant", content=prompts.GREETING)]
        self._errors = 0
        self.agents = list(self.possible_agents)
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[AgentId, dict[str, Any]] = {
            AGENT: {"gold": self._gold(), "task": self._task.id, "success": 0.0},
            USER: {"gold": self._gold(), "task": self._task.id},
        }
        self._inbox: dict[AgentId, list[Message]] = {AGENT: [], USER: [user(prompts.GREETING)]}
        self.agent_selection = USER

    def observe(self, agent: AgentId) -> AgentObservation:
        """Return what the agent has not answered yet; the same until it does."""
        return {"messages": list(self._inbox[agent])}

    def step(self, action: Action | None) -> None:
        """Deliver a text, or run tool calls."""
        agent = self.agent_selection
        if self.terminations[agent]:
            self._was_dead_step(action)
            return
        if action is None:
            raise ValueError(f"{agent} has not ended and must answer with a message; got None")
        self._inbox[agent] = []
        self._cumulative_rewards[agent] = 0.0
        self.infos[agent] = {"success": 0.0} if agent == AGENT else {}
        self._clear_rewards()
        calls = [] if isinstance(action, str) else action.get("tool_calls", [])
        if calls:
            self._call(agent, calls)
        else:
            self._say(agent, action_text(action))
        if self._errors >= self._max_errors and not self.terminations[agent]:
            self._finish(0.0, {"too_many_errors": 1.0})

    def _say(self, agent: AgentId, text: str) -> None:
        """Deliver a text to the other, or end the conversation."""
        if text.strip():
            self._conversation.append(_SPEAKS[agent](role=_ROLE[agent], content=text))
        else:
            self.infos[agent]["metrics"] = {"empty": 1.0}
            self._errors += 1
        if agent == USER and any(token in text for token in (STOP, TRANSFER, OUT_OF_SCOPE)):
            parts = factors(self._domain, self._task, self._world, self._conversation)
            self._finish(math.prod(parts.values()), parts)
            return
        other = USER if agent == AGENT else AGENT
        self._inbox[other] = [user(text if text.strip() else prompts.SILENCE)]
        self.agent_selection = other

    def _call(self, agent: AgentId, calls: Sequence[ToolCall]) -> None:
        """Run an agent's tool calls; it keeps the move."""
        self._made: list[tuple[Tau2Call, Any]] = []
        answers = self._runners[agent].run(calls)
        self._inbox[agent] = answers.messages
        self.infos[agent]["metrics"] = answers.metrics
        self._errors += int(answers.metrics.get("tools/errors", 0) + answers.metrics.get("tools/invalid", 0))
        if self._made:
            made, results = zip(*self._made, strict=True)
            self._conversation += [_SPEAKS[agent](role=_ROLE[agent], tool_calls=list(made)), *results]

    def _run(self, agent: AgentId, name: str, /, **arguments: Any) -> str:
        """Run one tool and note the call for the evaluation."""
        if name == "calculate" and "**" in str(arguments.get("expression")):
            raise ToolError(prompts.NO_POWERS)  # tau2 evaluates it with Python, and 9**9**9 would never end
        call = Tau2Call(id=f"call_{len(self._made)}", name=name, arguments=arguments, requestor=_ROLE[agent])
        result = self._world.get_response(call.model_copy(deep=True))
        self._made.append((call, result))
        if result.error:
            raise ToolError(result.content.removeprefix("Error: "))
        return str(result.content)

    def _finish(self, reward: float, metrics: dict[str, float]) -> None:
        """End the conversation and pay the agent."""
        info = self.infos[AGENT]
        info["rewards"], info["success"] = {"success": reward}, reward
        info["metrics"] = {**info.get("metrics", {}), **metrics}
        self.rewards[AGENT] = reward
        self.terminations = dict.fromkeys(self.agents, True)
        self._accumulate_rewards()
        self._deads_step_first()

    def _tools_of(self, agent: AgentId, offered: Iterable[Any], names: Sequence[str] | None) -> list[Tool]:
        """Return the tools of these names (None: all) of those that tau2 offers, with tau2's own schemas."""
        known = {one.name: one.openai_schema["function"] for one in offered}
        strange = [name for name in names or () if name not in known]
        if strange:
            raise ConfigError(
                f"tau2:{self._domain} has no tool {', '.join(strange)}; it has {', '.join(known)}"
            )
        return [
            Tool(name, found["description"], found["parameters"], functools.partial(self._run, agent, name))
            for name, found in known.items()
            if names is None or name in names
        ]

    def _gold(self) -> dict[str, Any]:
        """Return the gold actions, in order, the facts to say, and how the customer begins."""
        criteria, said = self._task.evaluation_criteria, self._task.user_scenario.instructions
        begin = said if isinstance(said, str) else f"{said.reason_for_call} {said.known_info or ''}".strip()
        actions = (criteria.actions if criteria else None) or []
        return {
            "actions": [
                {
                    "agent": USER if one.requestor == "user" else AGENT,
                    "name": one.name,
                    "arguments": one.arguments,
                }
                for one in actions
            ],
            "say": list((criteria.communicate_info if criteria else None) or []),
            "begin": begin,
        }
