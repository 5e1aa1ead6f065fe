"""What a finished conversation is worth: tau2's criteria that need no model.

tau2's `EnvironmentEvaluator` plays the whole conversation again in a new world. Here the world that the conversation
has left is looked at instead: the same result (a test compares the two), in a fraction of the time, and tools whose
answers hold a random number do no harm.
"""

import functools
from typing import Any

from tau2.data_model.message import ToolCall
from tau2.data_model.tasks import EnvAssertion, RewardType, Task
from tau2.evaluator.evaluator_action import ActionEvaluator
from tau2.evaluator.evaluator_communicate import CommunicateEvaluator

from agentgym_envs.tau2.domains import World, make_task, make_world


def factors(domain: str, task: Task, world: World, messages: list[Any]) -> dict[str, float]:
    """Return what the task demands, each 0 or 1; the reward is their product.

    Args:
        domain: The domain's name.
        task: The task that was played.
        world: As the conversation left it.
        messages: The conversation, as tau2's messages.
    """
    criteria = task.evaluation_criteria
    if criteria is None:
        return {}
    found = {}
    if RewardType.DB in criteria.reward_basis:
        found["db"] = float(_as_gold(domain, task, world))
    if RewardType.ENV_ASSERTION in criteria.reward_basis:
        found["env_assertion"] = float(all(_holds(world, one) for one in criteria.env_assertions or []))
    if RewardType.ACTION in criteria.reward_basis:
        found["action"] = ActionEvaluator.calculate_reward(task, messages).reward
    if RewardType.COMMUNICATE in criteria.reward_basis:
        found["communicate"] = CommunicateEvaluator.calculate_reward(task, messages).reward
    return found


def _holds(world: World, assertion: EnvAssertion) -> bool:
    """Say whether an assertion holds; one about something that does not exist (tau2 raises there) does not."""
    try:
        return bool(world.run_env_assertion(assertion, raise_assertion_error=False))
    except ValueError:
        return False


def _as_gold(domain: str, task: Task, world: World) -> bool:
    """Say whether the databases are as the gold actions leave them."""
    criteria = task.evaluation_criteria
    if criteria.actions is None and criteria.env_assertions is None:
        return True
    return _gold_hashes(domain, task.model_dump_json()) == _hashes(world)


@functools.lru_cache(maxsize=256)
def _gold_hashes(domain: str, task_json: str) -> tuple[str, str | None]:
    """Return the hashes of the databases after the gold actions; the plays of a group ask for the same."""
    task = make_task(task_json)
    gold = make_world(domain, task)
    for action in task.evaluation_criteria.actions or []:  # one that fails changes nothing, as in tau2
        gold.get_response(ToolCall(name=action.name, arguments=action.arguments, requestor=action.requestor))
    return _hashes(gold)


def _hashes(world: World) -> tuple[str, str | None]:
    return world.get_db_hash(), world.get_user_db_hash()
