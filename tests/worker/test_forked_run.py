"""A run with forks, from its environment to the trainer's batches.

Coordinator, store, wire, worker and environment are the real ones; the policy server answers at random.
"""

import asyncio
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from builders import within
from live_run import play, small_run
from wire_peers import FakeServer, FakeTrainer, Office

from agentgym.batch import Sample, split
from agentgym.coordinator.store import stored_episodes
from agentgym.episode import NOT_SAMPLED, REPLAYED, Episode
from agentgym.origins import with_recorded
from agentgym.policy.template import ChatTokenizer
from agentgym.prefix import replayed
from agentgym.protocol import BatchHeader, Completion, Generate
from agentgym.wire import Packet
from agentgym.worker.process import Worker

WORDS = ("ant", "bee", "cat", "dog", "elk", "fox")


class Learner(FakeTrainer):
    """Keeps the samples that it was given."""

    samples: list[Sample]

    async def packet(self) -> Packet:
        packet = await super().packet()
        if isinstance(header := packet.header, BatchHeader):
            self.samples += split(with_recorded(header, packet.arrays), header.lengths, header.checksums)
        return packet


class Asked:
    """A policy server's socket for workers; it says the word that was shown, or another one."""

    def __init__(self, context: Any, folder: Path, model: Path, server: FakeServer) -> None:
        self.server = server
        self.office = Office(context, f"ipc://{folder}/server")
        self.tokenizer = ChatTokenizer(model)
        self.prompts: list[list[int]] = []
        self.rng = random.Random(1)

    async def serve(self) -> None:
        while True:
            packet = await self.office.packet()
            if isinstance(packet.header, Generate):
                self.answer(packet, packet.header)

    def answer(self, packet: Packet, wanted: Generate) -> None:
        prompt = packet.arrays["tokens"].tolist()
        self.prompts.append(prompt)
        text = self.tokenizer.decode(prompt)
        shown = max(WORDS, key=text.rfind)
        said = shown if self.rng.random() < 0.5 else self.rng.choice(WORDS)
        tokens = np.array([*self.tokenizer.encode(said), self.tokenizer.stop_token_ids[0]], np.int32)
        arrays = {
            "tokens": tokens,
            "logprobs": np.full(len(tokens), -0.5, np.float32),
            "routes": np.ones((len(prompt) + len(tokens) - 1 - wanted.routes_start, 1, 1), np.uint8),
        }
        header = Completion(finish_reason="stop", version_spans=[(0, self.server.version)])
        self.office.channel.send(header, arrays, to=packet.sender, request_id=packet.request_id)


def run(
    folder: Path, model: Path, env_id: str
) -> tuple[list[Episode], list[Sample], dict[str, int], list[list[int]]]:
    """Return the episodes of a run, the samples, the dispatcher's counts and what the server was asked."""

    async def scene() -> tuple[list[Episode], list[Sample], dict[str, int], list[list[int]]]:
        config = small_run(
            env={"id": env_id},
            model=str(model),
            run={"steps": 12},
            rollout={"tasks_per_step": 4, "group_size": 3, "max_staleness": 1, "fork_share": 0.6},
            algorithm={"advantage": "group_mean", "normalize_batch": False, "loss": "reinforce"},
            workers={"slots": 8},
        )
        async with play(config, folder) as cast:
            server, trainer = cast.server(), cast._connected(Learner)
            trainer.samples = []
            asked = Asked(cast._context, folder, model, server)
            answering = asyncio.create_task(asked.serve())
            worker = Worker(config, name="worker-0", coordinator=cast.run.places.coordinator)
            cast.start(
                server.serve(address=asked.office.address),
                trainer.train(cast.run.places.exchange),
                worker.run(),  # type: ignore[arg-type]
            )
            await cast.everyone_is_done()
            answering.cancel()
            counts = dict(cast.run.coordinator._dispatcher.counts)
            episodes = [stored.episode for stored in stored_episodes(cast.run.places.run)]
            return episodes, trainer.samples, counts, asked.prompts

    return within(120, scene())


def test_forks_of_a_real_environment_are_compared_and_trained_from_their_turn_on(
    tmp_path: Path, model: Path
) -> None:
    episodes, samples, counts, prompts = run(tmp_path, model, "broken_envs:Sound")
    groups: dict[int, list[Episode]] = defaultdict(list)
    for episode in episodes:
        groups[episode.group_id].append(episode)
    forks = {number: members for number, members in groups.items() if any(map(replayed, members))}
    assert len(forks) >= 3
    assert counts["forked"] == sum(len(members) for members in forks.values())
    assert "diverged" not in counts
    by_checksum = {episode.checksums[0]: episode for episode in episodes}
    asked = {tuple(prompt) for prompt in prompts}
    for members in forks.values():
        turn = replayed(members[0])
        records = {
            tuple(member.trajectories[0].tokens[: member.trajectories[0].turns[turn].start])
            for member in members
        }
        (common,) = records
        sources = [e for e in episodes if e.task_index == members[0].task_index and not replayed(e)]
        assert any(tuple(e.trajectories[0].tokens[: len(common)]) == common for e in sources)
        assert common in asked
    for sample in samples:
        sample.verify()
        episode = by_checksum[sample.checksum]
        (trajectory,) = episode.trajectories
        group = groups[episode.group_id]
        own = [sum(t.reward for t in e.trajectories[0].turns if t.finish_reason != REPLAYED) for e in group]
        mine = sum(t.reward for t in trajectory.turns if t.finish_reason != REPLAYED)
        for turn in trajectory.turns:
            answer = slice(turn.start, turn.end)
            if turn.finish_reason == REPLAYED:
                assert not sample.loss_mask[answer].any()
                assert (sample.versions[answer] == NOT_SAMPLED).all()
            elif sample.loss_mask[answer].all():  # others may be too old
                np.testing.assert_allclose(sample.advantages[answer], mine - np.mean(own), atol=1e-6)
    assert sum(bool(replayed(by_checksum[sample.checksum])) for sample in samples) > 3


def test_an_environment_that_does_not_repeat_itself_is_trained_on_plays_from_the_start(
    tmp_path: Path, model: Path
) -> None:
    episodes, samples, counts, _ = run(tmp_path, model, "broken_envs:IgnoresItsSeed")
    assert counts["diverged"] > 0
    assert sum(map(bool, map(replayed, episodes))) == counts.get(
        "forked", 0
    )  # by chance: the same words again
    whole = {e.checksums[0] for e in episodes if not replayed(e)}
    for sample in samples:
        if sample.checksum in whole:
            assert (sample.versions[sample.sampled] != NOT_SAMPLED).all()
