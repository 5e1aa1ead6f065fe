from pathlib import Path

import numpy as np
import pytest
import toy_envs
from builders import lease_of, within
from desk import TAUGHT, desk
from wire_peers import Office

from agentgym.episode import NOT_SAMPLED, EndReason, Status
from agentgym.errors import RunError
from agentgym.policy.template import ChatTokenizer
from agentgym.protocol import (
    Ack,
    Cancel,
    Completion,
    EpisodeDone,
    Error,
    Generate,
    Heartbeat,
    Hello,
    Ready,
    Servers,
    Welcome,
)
from agentgym.wire import PROTOCOL_VERSION


def test_a_worker_says_who_it_is_what_it_can_hold_and_that_it_lives(tmp_path: Path, model: Path) -> None:
    async def scene() -> None:
        async with desk(tmp_path, model, coordinator={"heartbeat_interval": 0.02}) as d:
            packet = await d.office.packet()
            hello = packet.expect(Hello)
            assert (hello.role, hello.name, hello.protocol) == ("worker", "worker-7", PROTOCOL_VERSION)
            d.worker = packet.sender
            d.send(Welcome())
            assert (await d.office.next(Ready)).credits == 4
            while d.office.heartbeats < 3:
                beat = (await d.office.inbox.get()).expect(Heartbeat)
                d.office.heartbeats += 1
                assert (beat.stats["episodes"], beat.stats["turns"]) == (0.0, 0.0)
            await d.drain()

    within(20, scene())


def test_leases_come_back_once_each_as_checked_episodes(tmp_path: Path, model: Path) -> None:
    async def scene() -> None:
        async with desk(tmp_path, model, "agentgym/GuessNumber-v0") as d:
            assert await d.open() == 4
            leases = {
                n: lease_of(n, seed=n % 5, group_id=n // 4, member=n % 4, task_index=n, teacher="expert")
                for n in range(1, 20)
            }
            d.send(*leases.values())
            episodes = await d.episodes(len(leases))
            assert episodes.keys() == leases.keys()
            for lease_id, episode in episodes.items():
                lease = leases[lease_id]
                assert (episode.seed, episode.group_id, episode.member) == (
                    lease.seed,
                    lease.group_id,
                    lease.member,
                )
                assert (episode.status, episode.agent_metrics["agent"]["success"]) == (Status.OK, 1.0)
                (trajectory,) = episode.trajectories
                assert (trajectory.policy, trajectory.trainable) == ("learner", True)
                assert (trajectory.versions == NOT_SAMPLED).all()
                assert episode.checksums == (trajectory.checksum(),)
            d.send(*(Ack(lease_id=lease_id) for lease_id in leases))
            await d.drain()

    within(30, scene())


@pytest.mark.parametrize(
    "env", ["agentgym/GuessNumber-v0", "agentgym/TicTacToe-v0", "agentgym/SplitCoins-v0"]
)
def test_the_same_lease_is_the_same_episode(tmp_path: Path, model: Path, env: str) -> None:
    async def scene() -> None:
        async with desk(tmp_path, model, env, workers={"slots": 1}) as d:
            await d.open()
            sums = []
            for lease_id, sampling_seed in ((1, 5), (2, 5), (3, 6)):
                d.send(lease_of(lease_id, sampling_seed=sampling_seed, teacher="random"))
                sums.append((await d.episode())[1].checksums)
            assert sums[0] == sums[1] != sums[2]
            await d.drain()

    within(30, scene())


def test_environments_are_used_again_unless_they_failed_and_closed_in_the_end(
    tmp_path: Path, model: Path
) -> None:
    async def scene() -> None:
        toy_envs.counted.clear()
        async with desk(tmp_path, model) as d:
            await d.open()
            for lease_id, seed in ((1, 1), (2, 2), (3, 13), (4, 4)):
                d.send(lease_of(lease_id, seed=seed, teacher=TAUGHT))
                _, episode = await d.episode()
                assert episode.status is (Status.FAILED if seed == 13 else Status.OK)
                assert ("reset returned 'nonsense'" in episode.error) == (seed == 13)
            assert [env.plays for env in toy_envs.counted] == [3, 1]
            await d.drain()
            assert all(env.closed.is_set() for env in toy_envs.counted)

    within(20, scene())


def test_an_environment_that_cannot_be_made_fails_the_episode(tmp_path: Path, model: Path) -> None:
    async def scene() -> None:
        async with desk(tmp_path, model, "toy_envs:Unmakeable") as d:
            await d.open()
            d.send(lease_of(1, group_id=8, member=3, teacher=TAUGHT))
            _, episode = await d.episode()
            assert (episode.end_reason, episode.group_id, episode.member) == (EndReason.ENV_FAILED, 8, 3)
            assert "no licence for this game" in episode.error
            await d.drain()

    within(20, scene())


def test_a_cancelled_lease_gives_its_credit_back_and_no_episode(tmp_path: Path, model: Path) -> None:
    async def scene() -> None:
        toy_envs.stuck.clear()
        async with desk(tmp_path, model, "toy_envs:Stuck", coordinator={"heartbeat_interval": 0.02}) as d:
            await d.open()
            d.send(lease_of(1, teacher=TAUGHT))
            while not toy_envs.stuck:
                await d.office.inbox.get()  # heartbeats, until the play has begun
            d.send(Cancel(lease_id=1), Cancel(lease_id=99))
            assert (await d.office.next(Ready)).credits == 1
            await d.drain()

    within(20, scene())


def test_a_drain_ends_plays_that_are_in_hand(tmp_path: Path, model: Path) -> None:
    async def scene() -> None:
        toy_envs.stuck.clear()
        async with desk(tmp_path, model, "toy_envs:Stuck", coordinator={"heartbeat_interval": 0.02}) as d:
            await d.open()
            d.send(*(lease_of(n, teacher=TAUGHT) for n in range(3)))
            while len(toy_envs.stuck) < 3:
                await d.office.inbox.get()
            await d.drain()
            assert all(env.released.is_set() for env in toy_envs.stuck)

    within(20, scene())


def test_a_lease_that_cannot_be_played_at_all_is_a_fatal_error(tmp_path: Path, model: Path) -> None:
    async def scene() -> None:
        async with desk(tmp_path, model) as d:
            await d.open()
            d.send(lease_of(1, teacher="grandmaster"))
            error = await d.office.next(Error)
            assert error.fatal
            assert error.text.startswith("ConfigError: there is no scripted policy 'grandmaster'")
            assert (await d.office.next(Ready)).credits == 1
            await d.drain()

    within(20, scene())


def test_messages_that_make_no_sense_are_passed_over(tmp_path: Path, model: Path) -> None:
    async def scene() -> None:
        async with desk(tmp_path, model) as d:
            await d.open()
            for frames in ([b"nonsense"], [b"lease", b"", b"\xc1"], [b"lease", b"", b"\x80"]):
                d.office.raw.send_multipart([d.worker, *frames])
            d.send(Hello(role="worker", name="x", protocol=1, pid=1), Error(text="not fatal"))
            d.send(lease_of(1, teacher=TAUGHT))
            assert (await d.episode())[0] == 1
            await d.drain()

    within(20, scene())


@pytest.mark.parametrize("welcomed", [True, False])
def test_a_worker_that_is_refused_says_so_at_once(tmp_path: Path, model: Path, welcomed: bool) -> None:
    async def scene() -> None:
        async with desk(tmp_path, model) as d:
            if welcomed:
                await d.open()
            else:
                d.worker = (await d.office.packet()).sender
            d.send(Error(text="install one version", fatal=True))
            with pytest.raises(RunError, match=r"the coordinator at ipc://.* says: install one version"):
                await d.task

    within(20, scene())


def test_a_coordinator_that_does_not_answer_is_not_waited_for_for_ever(tmp_path: Path, model: Path) -> None:
    async def scene() -> None:
        async with desk(tmp_path, model, coordinator={"start_timeout": 0.1}) as d:
            with pytest.raises(RunError, match=r"the coordinator at ipc://.* did not answer within 0\.1 s"):
                await d.task

    within(20, scene())


def test_a_coordinator_that_falls_silent_is_given_up(tmp_path: Path, model: Path) -> None:
    async def scene() -> None:
        times = {"heartbeat_interval": 0.05, "heartbeat_timeout": 0.1}
        async with desk(tmp_path, model, coordinator=times) as d:
            await d.open()
            with pytest.raises(RunError, match="nothing heard from the coordinator for 0 s"):
                await d.task

    within(20, scene())


def test_an_episode_that_could_not_be_read_is_not_waited_for(tmp_path: Path, model: Path) -> None:
    async def scene() -> None:
        async with desk(tmp_path, model, coordinator={"heartbeat_interval": 0.02}) as d:

            async def waiting() -> float:
                """What the worker says when it has taken in all that it was told before."""
                for _ in range(3):
                    while not isinstance(header := (await d.office.inbox.get()).header, Heartbeat):
                        pass
                return header.stats["unacknowledged"]

            await d.open()
            d.send(lease_of(1, teacher=TAUGHT))
            (await d.office.packet()).expect(EpisodeDone)
            assert await waiting() == 1.0
            d.send(Cancel(lease_id=1))
            assert await waiting() == 0.0
            await d.drain()

    within(20, scene())


def test_the_learner_is_asked_at_the_servers_that_the_coordinator_names(tmp_path: Path, model: Path) -> None:
    async def scene() -> None:
        tokenizer = ChatTokenizer(model)
        async with desk(tmp_path, model, sampling={"max_tokens": 9, "temperature": 0.5}) as d:
            server = Office(d.context, f"ipc://{tmp_path}/server")
            await d.open(Servers(addresses={"learner": [server.address]}, max_model_len=300))
            d.send(lease_of(1))
            asked = await server.packet()
            wanted = asked.expect(Generate)
            assert (wanted.max_tokens, wanted.temperature, wanted.stop_token_ids) == (
                9,
                0.5,
                list(tokenizer.stop_token_ids),
            )
            prompt = asked.arrays["tokens"]
            assert tokenizer.decode(prompt.tolist()) == "<|user|>begin<|end|><|assistant|>"
            answer = np.array([*tokenizer.encode("ok"), tokenizer.stop_token_ids[0]], np.int32)
            server.channel.send(
                Completion(finish_reason="stop", version_spans=[(0, 4), (2, 5)]),
                {
                    "tokens": answer,
                    "logprobs": np.full(3, -0.25, np.float32),
                    "routes": np.ones((len(prompt) + 2, 2, 2), np.uint8),
                },
                to=asked.sender,
                request_id=asked.request_id,
            )
            _, episode = await d.episode()
            (trajectory,) = episode.trajectories
            assert trajectory.tokens.tolist() == [*prompt.tolist(), *answer.tolist()]
            assert trajectory.versions[trajectory.loss_mask].tolist() == [4, 4, 5]
            assert trajectory.logprobs[trajectory.loss_mask].tolist() == [-0.25] * 3
            server.channel.close()
            await d.drain()

    within(20, scene())
