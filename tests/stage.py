"""A stage for one episode: an environment, the seats of its agents and a policy that answers from a list."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from builders import lease_of, within

from agentgym.config import EnvConfig
from agentgym.episode import Episode, Trajectory
from agentgym.policy.client import Completion, Sampling
from agentgym.policy.scripted import ScriptedPolicy
from agentgym.policy.template import ChatTokenizer
from agentgym.protocol import Lease
from agentgym.rewards import Rewards
from agentgym.worker.calls import EnvCalls
from agentgym.worker.driver import DRIVERS, Driver
from agentgym.worker.rollout import Play, Rollout
from agentgym.worker.seat import Limits, Seat

LAYERS, TOPK = 2, 2


class FakePolicy:
    """Answers with given texts, token for token, as a policy server would; errors among them are raised."""

    def __init__(self, tokenizer: ChatTokenizer, *answers: str | Exception, version: int = 3) -> None:
        self.tokenizer, self.answers, self.version = tokenizer, list(answers), version
        self.prompts: list[str] = []
        self.asked: list[Sampling] = []
        self.timeouts: list[float] = []

    async def complete(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        routes_start: int,
        timeout: float,
        affinity: str | None = None,
    ) -> Completion:
        self.prompts.append(self.tokenizer.decode(prompt))
        self.asked.append(sampling)
        self.timeouts.append(timeout)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        tokens = [*self.tokenizer.encode(answer), self.tokenizer.stop_token_ids[0]]
        finish = "stop" if len(tokens) <= sampling.max_tokens else "length"
        tokens = tokens[: sampling.max_tokens]
        n = len(tokens)
        return Completion(
            tokens=np.array(tokens, np.int32),
            logprobs=np.full(n, -0.5, np.float32),
            versions=np.full(n, self.version, np.int32),
            routes=np.ones((len(prompt) + n - 1 - routes_start, LAYERS, TOPK), np.uint8),
            finish_reason=finish,  # type: ignore[arg-type]
            seconds=0.01,
        )


class Stage:
    """Plays one episode in an environment; every agent is played by the same policy unless it has its own."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        policy: FakePolicy | ScriptedPolicy,
        others: dict[str, ScriptedPolicy] | None = None,
        *,
        max_turns: int = 5,
        max_tokens: int = 500,
        context: bool = True,
        answer: int = 40,
        chars: int | None = None,
        clock: Callable[[], float] | None = None,
        rewards: Rewards | None = None,
    ) -> None:
        self.tokenizer, self.policy, self.others = tokenizer, policy, others or {}
        self.limits = Limits(max_turns, max_tokens, context, 10.0, chars)
        self.answer = answer
        self.clock = clock or itertools.count(100.0).__next__
        self.calls = EnvCalls(4)
        self.rewards = rewards or Rewards()

    def seat(self, agent: str, driver: Driver, lease: Lease) -> Seat:
        player = self.others.get(agent, self.policy)
        if not isinstance(player, FakePolicy):
            player.reset(agent, lease.seed)
        return Seat(
            agent,
            "other" if agent in self.others else "learner",
            player,
            trainable=agent not in self.others,
            tokenizer=self.tokenizer,
            sampling=Sampling(self.answer, stop_token_ids=tuple(self.tokenizer.stop_token_ids)),
            limits=self.limits,
            system_prompt=driver.system_prompt(agent),
            tools=driver.tools(agent),
            clock=self.clock,
        )

    def rollout(self, env: Any, kind: str = "single", **limits: float) -> Rollout:
        return Rollout(
            lease_of(seed=5, group_id=2, member=1, task_index=9),
            DRIVERS[kind](env),
            config=EnvConfig(id="toy", **limits),
            calls=self.calls,
            make_seat=self.seat,
            rewards=self.rewards,
            clock=itertools.count(100.0, 2.0).__next__,
        )

    def play(self, env: Any, kind: str = "single", **limits: float) -> Play:
        """Play; whatever happens, the record of the episode is in order."""

        async def scene() -> Play:
            return await self.rollout(env, kind, **limits).play()

        play = within(20, scene())
        episode = play.episode
        for trajectory in episode.trajectories:
            trajectory.check()
        assert episode.checksums == tuple(t.checksum() for t in episode.trajectories)
        return play

    def text(self, trajectory: Trajectory) -> str:
        return self.tokenizer.decode(trajectory.tokens.tolist())

    def said(self, trajectory: Trajectory) -> list[str]:
        """The text of the sampled tokens of each turn."""
        return [self.tokenizer.decode(trajectory.tokens[t.start : t.end].tolist()) for t in trajectory.turns]


def rewards(trajectory: Trajectory) -> list[float]:
    return [turn.reward for turn in trajectory.turns]


def of(episode: Episode, agent: str) -> Trajectory:
    (found,) = (t for t in episode.trajectories if t.agent == agent)
    return found
