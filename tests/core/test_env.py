"""agentgym.env: what the base classes supply, and what is accepted without them."""

import gymnasium
import pytest
from farama import api_test, parallel_api_test

from agentgym.env import AECEnv, Env, ParallelEnv, action_text, system_prompt_of, tools_of
from agentgym.messages import assistant, user
from agentgym.spaces import AssistantMessage, Messages, Text

TOOL = {
    "type": "function",
    "function": {"name": "pay", "description": "", "parameters": {"type": "object", "properties": {}}},
}


class Echo(Env):
    system_prompt = "Say it again."

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "hello", {}

    def step(self, action):
        return action_text(action), 0.0, False, False, {}


class Leaving(ParallelEnv):
    """Three agents; the second one leaves after the first round."""

    metadata = {"name": "leaving", "render_modes": []}  # noqa: RUF012
    possible_agents = ["player_0", "player_1", "player_2"]  # noqa: RUF012

    def reset(self, seed=None, options=None):
        self.agents = list(self.possible_agents)
        self.round = 0
        return {a: {"messages": [user("?")]} for a in self.agents}, {a: {} for a in self.agents}

    def step(self, actions):
        agents, self.round = self.agents, self.round + 1
        ended = {a: self.round == 3 or a == "player_1" for a in agents}
        self.agents = [a for a in agents if not ended[a]]
        observations = {a: {"messages": [user(str(self.round))]} for a in agents}
        return (
            observations,
            dict.fromkeys(agents, 0.0),
            ended,
            dict.fromkeys(agents, False),
            {a: {} for a in agents},
        )

    def tools(self, agent):
        return [TOOL] if agent == "player_2" else []


class Turns(AECEnv):
    """Two agents that speak once each."""

    metadata = {"name": "turns", "render_modes": []}  # noqa: RUF012
    possible_agents = ["player_0", "player_1"]  # noqa: RUF012

    def reset(self, seed=None, options=None):
        self.agents = list(self.possible_agents)
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos = {agent: {} for agent in self.agents}
        self.agent_selection = "player_0"

    def observe(self, agent):
        return {"messages": [user("?")]}

    def step(self, action):
        agent = self.agent_selection
        if self.terminations[agent]:
            self._was_dead_step(action)
            return
        self._cumulative_rewards[agent] = 0.0
        self.agent_selection = self.agents[(self.agents.index(agent) + 1) % 2]
        if agent == "player_1":
            self.terminations = dict.fromkeys(self.agents, True)

    def system_prompt(self, agent):
        return f"You are {agent}."


def test_an_environment_has_spaces_of_its_own():
    first, second = Echo(), Echo()
    assert first.observation_space == Messages(text=True)
    assert first.action_space == Text()
    assert first.observation_space is first.observation_space
    assert first.action_space is not second.action_space


def test_a_class_or_an_instance_may_set_its_spaces():
    class Short(Echo):
        observation_space = Text(10)

    env = Short()
    env.action_space = Text(3)
    assert env.observation_space == Text(10)
    assert env.action_space == Text(3)


def test_an_environment_with_tools_takes_messages():
    class Paying(Echo):
        @property
        def tools(self):
            return [TOOL]

    assert Paying().action_space == AssistantMessage([TOOL])
    assert tools_of(Paying(), "agent") == [TOOL]


def test_gymnasium_accepts_a_minimal_environment():
    with pytest.warns(UserWarning, match="not having a spec"):
        gymnasium.utils.env_checker.check_env(Echo())


def test_multi_agent_spaces_are_the_same_object_each_time():
    for env in (Leaving(), Turns()):
        for agent in env.possible_agents:
            assert env.observation_space(agent) is env.observation_space(agent)
            assert env.action_space(agent) is env.action_space(agent)
        assert env.action_space("player_0") is not env.action_space("player_1")
        assert env.render() is None
        env.close()


def test_pettingzoo_accepts_agents_that_leave_early():
    parallel_api_test(Leaving(), num_cycles=20)


@pytest.mark.filterwarnings("ignore:Observation is not a NumPy array:UserWarning")
@pytest.mark.filterwarnings("ignore:Observation space for each agent probably should be:UserWarning")
@pytest.mark.filterwarnings("ignore:Action space for each agent probably should be:UserWarning")
def test_pettingzoo_accepts_a_minimal_environment_by_turns():
    api_test(Turns(), num_cycles=20)


def test_prompts_and_tools_are_read_from_any_environment():
    assert system_prompt_of(Echo(), "agent") == "Say it again."
    assert system_prompt_of(gymnasium.wrappers.TimeLimit(Echo(), 3), "agent") == "Say it again."
    assert system_prompt_of(Turns(), "player_1") == "You are player_1."
    assert system_prompt_of(Leaving(), "player_1") is None
    assert tools_of(Leaving(), "player_2") == [TOOL]
    assert tools_of(Leaving(), "player_1") == []
    assert Leaving().action_space("player_2") == AssistantMessage([TOOL])
    foreign = gymnasium.make("FrozenLake-v1")
    assert system_prompt_of(foreign, "agent") is None
    assert tools_of(foreign, "agent") == []


def test_the_text_of_an_answer_is_found_in_both_forms():
    assert action_text("hi") == "hi"
    assert action_text(assistant("hi")) == "hi"
