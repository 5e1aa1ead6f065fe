"""A laboratory: whole episodes played on one real vLLM, and what Megatron-core makes of them.

A random model calls no tool and makes few legal moves. Two players help without touching a number: `Coached` puts
given answers in between, marked as not sampled; `Choosy` asks until it likes an answer.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from builders import lease_of
from numpy.typing import NDArray
from policy_builders import RunningServer, moe_model
from torch import Tensor
from trainer_builders import CPU, batch_of

from agentgym.algorithm_config import AlgorithmConfig
from agentgym.batch import pack_microbatches, split
from agentgym.config import EnvConfig
from agentgym.coordinator.assemble import assemble
from agentgym.coordinator.groups import Group
from agentgym.episode import NOT_SAMPLED, Episode, Trajectory
from agentgym.episode_codec import decode_episode, encode_episode
from agentgym.messages import AgentId, Message
from agentgym.policy.client import Completion, Policy, PolicyClient, Sampling
from agentgym.policy.template import ChatTokenizer
from agentgym.protocol import BatchHeader, EpisodeDone, Lease
from agentgym.registry import spec
from agentgym.wire import Packet, pack, unpack
from agentgym.worker.pool import EnvPool
from agentgym.worker.rollout import Rollout
from agentgym.worker.seat import Limits, Seat
from agentgym.worker.table import Opening
from agentgym_trainers.megatron import parallel
from agentgym_trainers.megatron.convert import load_hf, read_safetensors
from agentgym_trainers.megatron.microbatch import build_microbatch
from agentgym_trainers.megatron.model import build_model, read_config
from agentgym_trainers.megatron.replay import ReplayController
from agentgym_trainers.megatron.step import forward

CONTEXT = 1024
TOKENS_PER_MICROBATCH = 2048
Arrays = dict[str, NDArray[Any]]


class Coached:
    """Gives the first answers from a list, where it has one, and asks the policy server for the others.

    A given answer is recorded as the answers of scripted policies are: trained never, version NOT_SAMPLED.
    """

    def __init__(self, client: Policy, tokenizer: ChatTokenizer, given: Sequence[Message | None]) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._given = iter(given)

    async def complete(self, prompt: Sequence[int], sampling: Sampling, **options: Any) -> Completion:
        message = next(self._given, None)
        if message is None:
            return await self._client.complete(prompt, sampling, **options)
        tokens = np.array(self._tokenizer.encode_answer(message), np.int32)
        unsampled = np.full(len(tokens), NOT_SAMPLED, np.int32)
        return Completion(tokens, np.zeros(len(tokens), np.float32), unsampled, None, "stop", 0.0)


class Choosy:
    """Asks the policy server for answers, some at once, until `accept(prompt, tokens)` likes one."""

    def __init__(
        self, client: Policy, accept: Callable[[Sequence[int], Sequence[int]], bool], *, at_once: int = 64
    ) -> None:
        self._client = client
        self._accept = accept
        self._at_once = at_once

    async def complete(self, prompt: Sequence[int], sampling: Sampling, **options: Any) -> Completion:
        while True:
            asked = (self._client.complete(prompt, sampling, **options) for _ in range(self._at_once))
            for answer in await asyncio.gather(*asked):
                if self._accept(prompt, answer.tokens.tolist()):
                    return answer


class Watched:
    """Passes everything on, and says when an answer has come."""

    def __init__(self, client: Policy, answered: asyncio.Event) -> None:
        self._client = client
        self._answered = answered

    async def complete(self, prompt: Sequence[int], sampling: Sampling, **options: Any) -> Completion:
        completion = await self._client.complete(prompt, sampling, **options)
        self._answered.set()
        return completion


PlayerMaker = Callable[[Policy, ChatTokenizer, Lease], Policy]


@dataclass(frozen=True)
class Table:
    """An environment, how often it is played, and by whom; every group is one task."""

    env_id: str
    groups: int
    members: int
    max_tokens: Callable[[Lease], int]
    """Of an answer."""
    player: PlayerMaker = lambda client, _tokenizer, _lease: client
    """Makes the policy of a seat from the client of the policy server."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Of the environment."""

    def leases(self) -> list[Lease]:
        return [
            lease_of(
                group * self.members + member,
                task_index=group,
                seed=100 + group,
                group_id=group,
                member=member,
            )
            for group in range(self.groups)
            for member in range(self.members)
        ]


class Lab:
    """A policy server with a tiny MoE in float32 whose weights the tests replace; the tests are its coordinator."""

    def __init__(self, folder: Path) -> None:
        model = moe_model(folder / "model")
        self.tokenizer = ChatTokenizer(model)
        self.models = {0: model}
        """By version."""
        self._server = RunningServer(model, folder, kv_on_update="recompute", max_model_len=CONTEXT)

    @property
    def version(self) -> int:
        return max(self.models)

    @property
    def model(self) -> Path:
        """The folder of the weights that are served now."""
        return self.models[self.version]

    def load(self, model: Path, adapters: Path | None = None) -> None:
        """Serve other weights from now on: those of a folder, of which it may be told by adapters alone."""
        version = self.version + 1
        self._server.load(version, adapters or model)
        self.models[version] = model

    def stop(self) -> None:
        self._server.stop()

    async def play(self, table: Table, updates: Sequence[Path] = ()) -> list[Episode]:
        """Play a table, all episodes at once; load each update after an answer that came since the last one."""
        client, answered = PolicyClient([self._server.address]), asyncio.Event()
        config = EnvConfig(id=table.env_id, kwargs=dict(table.kwargs))
        pool = EnvPool(config, slots=table.groups * table.members)
        try:
            async with asyncio.TaskGroup() as tasks:
                plays = [
                    tasks.create_task(self._episode(table, lease, Watched(client, answered), config, pool))
                    for lease in table.leases()
                ]
                for model in updates:
                    answered.clear()
                    await answered.wait()
                    await asyncio.to_thread(self.load, model)
            return [play.result() for play in plays]
        finally:
            client.close()
            await pool.close()

    async def _episode(
        self, table: Table, lease: Lease, client: Policy, config: EnvConfig, pool: EnvPool
    ) -> Episode:
        def seat(agent: AgentId, opening: Opening, lease: Lease) -> Seat:
            return Seat(
                agent,
                "learner",
                table.player(client, self.tokenizer, lease),
                trainable=True,
                tokenizer=self.tokenizer,
                sampling=Sampling(table.max_tokens(lease), stop_token_ids=self.tokenizer.stop_token_ids),
                limits=Limits(spec(table.env_id).max_turns or 32, CONTEXT, True, 120.0),
                system_prompt=opening.system_prompt,
                tools=opening.tools,
            )

        host = await pool.take()
        play = await Rollout(lease, host, config=config, make_seat=seat).play()
        pool.give_back(host, reusable=play.reusable)
        assert not play.episode.error, play.episode.error
        return play.episode


def sampled(trajectory: Trajectory) -> NDArray[np.bool_]:
    """The tokens [K] that the policy server sampled."""
    return trajectory.versions != NOT_SAMPLED


def delivered(episode: Episode) -> Episode:
    """An episode as the coordinator gets it: through the frames of a message."""
    header, arrays = encode_episode(episode)
    packet = _sent(pack(EpisodeDone(lease_id=1, episode=header), arrays))
    return decode_episode(packet.expect(EpisodeDone).episode, packet.arrays)


def batch_message(episodes: Sequence[Episode], version: int) -> tuple[BatchHeader, Arrays]:
    """The batch that the trainer gets for a step from `version`, with every token of that version."""
    groups: dict[tuple[str, int], list[Episode]] = {}
    for episode in map(delivered, episodes):
        groups.setdefault((episode.env_id, episode.group_id), []).append(episode)
    assembled = assemble(
        [
            Group(number, members[0].task_index, len(members), dict(enumerate(members)))
            for number, members in enumerate(groups.values())
        ],
        policies=["learner"],
        # With an entropy bonus, episodes without an advantage stay in the batch.
        algorithm=AlgorithmConfig(entropy_coefficient=1e-3),
        max_tokens=64,
        warmup=False,
        version=version,
        max_staleness=0,
    )["learner"]
    lengths = [len(sample.tokens) for sample in assembled.samples]
    header, arrays = batch_of(
        assembled.samples, step=version + 1, microbatches=pack_microbatches(lengths, TOKENS_PER_MICROBATCH)
    )
    packet = _sent(pack(header, arrays))
    return packet.expect(BatchHeader), packet.arrays


def _sent(frames: Sequence[Any]) -> Packet:
    return unpack([bytes(frame) for frame in frames])


def trainer_logprobs(
    model: Path, header: BatchHeader, arrays: Arrays, *, dtype: torch.dtype, replayed: bool
) -> tuple[Tensor, Tensor]:
    """The log-probabilities [N] of a batch's trained tokens: the trainer's, and those of the rollout."""
    megatron = build_model(read_config(model), dtype, CPU)
    load_hf(megatron, read_safetensors(model))
    replay = ReplayController(megatron)
    samples = split(arrays, header.lengths, header.checksums)
    pairs = []
    with torch.no_grad():
        for indices in header.microbatches:
            microbatch = build_microbatch(
                [samples[index] for index in indices], header.step - 1, replay if replayed else None, CPU
            )
            pairs.append((forward(megatron, replay, microbatch, 1.0)[0], microbatch.rollout))
            replay.clear()
    ours, rollout = zip(*pairs, strict=True)
    return torch.cat(ours), torch.cat(rollout)


@contextlib.contextmanager
def megatron_groups() -> Iterator[None]:
    """Megatron's process groups, unless this process has them already."""
    torch.set_num_threads(1)
    if torch.distributed.is_initialized():
        yield
    else:
        with parallel.single_process(seed=1):
            yield
