from collections.abc import Generator

import pytest
from hypothesis import settings

from agentgym.busy import large_imports

LONGEST = [
    "test_pool_run",
    "test_chaos",
    "test_runs",
    "test_ranks",
    "test_configs",
    "test_two_policies",
    "test_bad_input",
    "test_numbers",
    "test_trainer_process",
    "test_liveness",
    "test_crash_phases",
    "test_commands",
    "test_keys",
    "test_endpoint",
]
"""Files of tests that take long, the longest first."""

# Machines are busy at times: how long an example takes says nothing about what is tested.
settings.register_profile("agentgym", deadline=None, max_examples=50)
settings.load_profile("agentgym")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import all tests, and with them torch and megatron-core."""
    with large_imports():
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take long before the others, so that two processes that share the files end together."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
