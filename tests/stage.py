"""A stage for one episode: an environment, the seats of its agents and a policy that answers from a list."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from builders import lease_of, within

from agentgym.config import EnvConfig
from agentgym.episode import Episode, Trajectory
from agentgym.policy.client import Completion, Sampling
from agentgym.policy.scripted import Script, ScriptedPolicy
from agentgym.policy.template import ChatTokenizer
from agentgym.protocol import Lease, Recorded
from agentgym.registry import EnvSpec
from agentgym.rewards import Rewards
from agentgym.worker.driver import DRIVERS
from agentgym.worker.rollout import Play, Rollout
from agentgym.worker.seat import Limits, Seat
from agentgym.worker.table import Opening, Table
from agentgym.worker.threads import Mailbox, ThreadHost

LAYERS, TOPK = 2, 2


class FakePolicy:
    """Answers with given texts, token for token, as a policy server would; errors among them are raised."""

    def __init__(self, tokenizer: ChatTokenizer, *answers: str | Exception, version: int = 3) -> None:
        self.tokenizer, self.answers, self.version = tokenizer, list(answers), version
        self.prompts: list[str] = []
        self.asked: list[Sampling] = []
        self.timeouts: list[float] = []
        self.affinities: list[object] = []

    async def complete(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        routes_start: int,
        timeout: float,
        affinity: object = None,
    ) -> Completion:
        self.prompts.append(self.tokenizer.decode(prompt))
        self.asked.append(sampling)
        self.timeouts.append(timeout)
        self.affinities.append(affinity)
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


class Given(Script):
    """A script whose policy is there already."""

    def __init__(self, name: str, policy: ScriptedPolicy, max_turns: int) -> None:
        super().__init__(name, "given", 0, max_turns)
        object.__setattr__(self, "given", policy)

    def build(self, agent: str, episode_seed: int, env_spec: EnvSpec) -> ScriptedPolicy:
        policy: ScriptedPolicy = self.given  # type: ignore[attr-defined]
        policy.reset(agent, episode_seed)
        return policy


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
        prefix: dict[str, list[Recorded]] | None = None,
    ) -> None:
        self.prefix = prefix or {}
        self.tokenizer, self.policy, self.others = tokenizer, policy, others or {}
        self.limits = Limits(max_turns, max_tokens, context, 10.0, chars)
        self.answer = answer
        self.clock = clock or itertools.count(100.0).__next__
        self.rewards = rewards or Rewards()

    def seat(self, agent: str, opening: Opening, lease: Lease) -> Seat:
        player = self.others.get(agent, self.policy)
        name = "other" if agent in self.others else "learner"
        return Seat(
            agent,
            name,
            player if isinstance(player, FakePolicy) else Given(name, player, self.limits.max_turns),
            trainable=agent not in self.others,
            tokenizer=self.tokenizer,
            sampling=Sampling(self.answer, stop_token_ids=tuple(self.tokenizer.stop_token_ids)),
            limits=self.limits,
            system_prompt=opening.system_prompt,
            tools=opening.tools,
            clock=self.clock,
        )

    def rollout(self, env: Any, kind: str = "single", **limits: float) -> Rollout:
        return Rollout(
            lease_of(seed=5, group_id=2, member=1, task_index=9, prefix=self.prefix),
            ThreadHost(Mailbox(), Table(EnvSpec("toy", "toys:Toy", kind), DRIVERS[kind](env))),  # type: ignore[arg-type]
            config=EnvConfig(id="toy", **limits),
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
