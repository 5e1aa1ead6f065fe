"""What all shipped environments have in common."""

import pytest
from plays import play_aec, play_parallel, play_single

from agentgym.env import system_prompt_of, tools_of
from agentgym.messages import SINGLE_AGENT
from agentgym.policy.scripted import load_scripted
from agentgym.registry import list_envs, make, spec
from agentgym_envs import register_envs

register_envs()
SHIPPED = [found.id for found in list_envs() if "agentgym_envs." in found.entry_point]


def plays_of(env_id: str, name: str, seed: int):
    found, env = spec(env_id), make(env_id)
    if found.kind == "single":
        policy = load_scripted(name, seed, env_spec=found)
        return {SINGLE_AGENT: play_single(env, policy, seed, found.max_turns or 100)}
    policies = {agent: load_scripted(name, seed, env_spec=found) for agent in env.possible_agents}
    return (play_aec if found.kind == "aec" else play_parallel)(env, policies, seed)


def test_five_environments_are_shipped():
    assert len(SHIPPED) == 5


@pytest.mark.parametrize("env_id", SHIPPED)
def test_every_text_is_printable_ascii(env_id):
    for name in spec(env_id).scripted:
        for seed in range(5):
            for agent, seat in plays_of(env_id, name, seed).items():
                texts = [m["content"] for m in seat.messages]
                texts.append(str(tools_of(make(env_id), agent)))
                assert all(" " <= c <= "~" or c == "\n" for text in texts for c in text)


@pytest.mark.parametrize("env_id", SHIPPED)
def test_the_same_seed_gives_the_same_episode(env_id):
    for name in spec(env_id).scripted:
        assert plays_of(env_id, name, 3) == plays_of(env_id, name, 3)


@pytest.mark.parametrize("env_id", SHIPPED)
def test_system_prompts_are_short(env_id):
    env = make(env_id)
    for agent in getattr(env, "possible_agents", [SINGLE_AGENT]):
        assert len(system_prompt_of(env, agent)) <= 50


@pytest.mark.parametrize("env_id", SHIPPED)
def test_environments_close_twice(env_id):
    env = make(env_id)
    env.reset(seed=0)
    env.close()
    env.close()
