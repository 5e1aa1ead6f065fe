"""Group rewards: functions over the episodes of a complete group, called beside the coordinator's loop.

Each group is scored in a thread of its own, so that a slow function (a judge, a solver) delays no message. A call that
outlives its limit is left behind; its thread ends with the process at the latest.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable

from agentgym.config import Config
from agentgym.coordinator.groups import Group
from agentgym.episode import Episode
from agentgym.errors import EnvError
from agentgym.registry import spec
from agentgym.rewards import Rewards, load_functions, score_group

Scored = list[Episode] | EnvError
"""The episodes with their group rewards, or why there are none."""


class GroupScorer:
    """Scores groups and hands each over once, by calling `done(group, scored)` on the event loop."""

    def __init__(self, config: Config, *, done: Callable[[Group, Scored], None]) -> None:
        """Load the functions. Raises ConfigError where the configuration names one that is not there."""
        self._functions = load_functions(config.rollout.group_rewards)
        self._rewards = Rewards.of(config.env, spec(config.env.id))
        self._timeout = config.env.reward_timeout
        self._done = done
        self._running: set[int] = set()

    def start(self, group: Group) -> None:
        """Score a group; needs a running event loop."""
        loop = asyncio.get_running_loop()
        names = ", ".join(self._functions)
        late = EnvError(f"group rewards ({names}) did not return within {self._timeout:g} s")

        def work() -> None:
            scored = self._score(group.members)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._finish, group, scored)

        self._running.add(group.group_id)
        loop.call_later(self._timeout, self._finish, group, late)
        threading.Thread(target=work, name=f"score-{group.group_id}", daemon=True).start()

    def _finish(self, group: Group, scored: Scored) -> None:
        if group.group_id in self._running:  # whichever comes first, the scores or their deadline
            self._running.discard(group.group_id)
            self._done(group, scored)

    def _score(self, episodes: list[Episode]) -> Scored:
        try:
            found = score_group(self._functions, episodes)
        except EnvError as error:
            return error
        pairs = zip(episodes, found, strict=True)
        return [self._rewards.credit(episode, scores) for episode, scores in pairs]
