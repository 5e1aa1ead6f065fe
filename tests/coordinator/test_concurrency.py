"""The episodes in play, against a simulated policy server: seats, a key-value cache, preemption."""

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from builders import config_of

from agentgym.coordinator.concurrency import Concurrency, Window
from agentgym.coordinator.peers import ServerPeer

SEATS = 64
STEPS = 10
"""Engine steps between two heartbeats."""


@dataclass
class Request:
    prompt: int
    answer: int
    done: int = 0


@dataclass
class Play:
    """An episode: some turns, with pauses of the environment between them."""

    turns: int
    pause: int
    request: Request | None = None
    wakes: int = 0


@dataclass
class Server:
    """Admits requests while they fit, a token for each per step; where the cache is full, the newest starts again."""

    cache: int
    """Tokens."""
    running: list[Request] = field(default_factory=list)
    waiting: deque[Request] = field(default_factory=deque)
    tokens = 0
    """That were of use."""
    wasted = 0
    """Thrown away by preemptions."""

    @property
    def used(self) -> int:
        return sum(request.prompt + request.done for request in self.running)

    def step(self) -> None:
        while self.waiting and len(self.running) < SEATS:
            if self.used + self.waiting[0].prompt + 1 > self.cache:
                break
            self.running.append(self.waiting.popleft())
        while self.used + len(self.running) > self.cache:
            victim = self.running.pop()
            self.wasted += victim.prompt + victim.done
            self.tokens -= victim.done
            victim.done = 0
            self.waiting.appendleft(victim)
        for request in self.running:
            request.done += 1
            self.tokens += 1
        self.running = [request for request in self.running if request.done < request.answer]


class World:
    """A coordinator with more tasks than can be played, and one server."""

    def __init__(self, *, cache: int, prompt: int = 100, answer: int = 60, pause: int = 0, **settings: int):
        config = config_of(server={"max_num_seqs": SEATS}, rollout=settings)
        self.concurrency = Concurrency(config)
        self.server, self.plays, self.now = Server(cache), list[Play](), 0
        self.prompt, self.answer, self.pause = prompt, answer, pause
        self.random = random.Random(7)
        self.tasks = 100_000
        self.usage: list[float] = []
        self.limits: list[int] = []
        self.busy: list[int] = []

    def heartbeats(self, count: int) -> "World":
        self.usage, self.limits, self.busy = [], [], []
        self.server.tokens = self.server.wasted = 0
        for _ in range(count):
            for _ in range(STEPS):
                self._step()
            requests = len(self.server.running) + len(self.server.waiting)
            stats = {"kv_usage": self.server.used / self.server.cache, "running": float(requests)}
            peer = ServerPeer("s", "learner", b"s", 0.0, "ipc://s", 64, 0, stats=stats)
            self.concurrency.adapt([peer], playing=len(self.plays), wanted=self.tasks > 0)
            self.usage.append(stats["kv_usage"])
            self.limits.append(self.concurrency.limit)
            self.busy.append(len(self.server.running))
        return self

    def _step(self) -> None:
        while len(self.plays) < self.concurrency.limit and self.tasks:
            self.tasks -= 1
            self.plays.append(Play(turns=self.random.randint(2, 6), pause=self.pause))
        for play in self.plays:
            if play.request is not None and play.request.done >= play.request.answer:
                play.request, play.turns = None, play.turns - 1
                play.wakes = self.now + play.pause
            if play.request is None and play.turns and play.wakes <= self.now:
                play.request = Request(self.prompt, self.random.randint(1, 2 * self.answer))
                self.server.waiting.append(play.request)
        self.plays = [play for play in self.plays if play.turns]
        self.server.step()
        self.now += 1


def mean(values: list[float] | list[int]) -> float:
    return sum(values) / len(values)


def test_a_cache_that_is_too_small_for_all_seats_is_filled_and_not_flooded() -> None:
    small = 30 * 160  # about 30 of the 64 seats
    held, flooded = World(cache=small), World(cache=small, max_playing=1000)
    held.heartbeats(100).heartbeats(300)
    flooded.heartbeats(100).heartbeats(300)
    assert 0.8 < mean(held.usage) < 0.95
    assert held.server.wasted < 0.1 * flooded.server.wasted
    assert held.server.tokens > 0.9 * flooded.server.tokens
    assert len(flooded.server.waiting) > 900
    assert len(held.server.waiting) < 10


def test_it_follows_when_the_episodes_change() -> None:
    world = World(cache=30 * 160).heartbeats(200)
    before = mean(world.limits[-50:])
    world.prompt = 400
    world.heartbeats(200)
    assert mean(world.limits[-50:]) < 0.5 * before
    world.prompt = 100
    world.heartbeats(300)
    assert mean(world.limits[-50:]) > 0.8 * before


def test_slow_environments_let_more_episodes_be_played_than_there_are_seats() -> None:
    world = World(cache=10**6, pause=300).heartbeats(200)
    assert mean(world.limits[-50:]) > 3 * SEATS
    assert mean(world.busy[-50:]) > 0.8 * SEATS


def test_episodes_that_can_only_wait_for_a_seat_are_not_started() -> None:
    world = World(cache=10**6).heartbeats(200)
    assert mean(world.busy[-50:]) > 0.95 * SEATS
    assert max(world.limits[-50:]) <= 1.5 * SEATS


def test_the_limit_does_not_move_while_it_is_not_reached() -> None:
    world = World(cache=10**6)
    world.tasks = 20
    assert set(world.heartbeats(50).limits) == {SEATS}


def test_a_fixed_number_stays() -> None:
    assert set(World(cache=1000, max_playing=7).heartbeats(50).limits) == {7}


def test_the_fullest_server_decides_for_its_policy_and_the_tightest_policy_for_the_run() -> None:
    config = config_of(
        server={"max_num_seqs": 10, "count": 2},
        policies={"frozen": {"model": "other"}},
        policy_mapping={"b": "frozen"},
    )

    def server(policy: str, usage: float) -> ServerPeer:
        return ServerPeer("s", policy, b"s", 0.0, "", 64, 0, stats={"kv_usage": usage, "running": 5.0})

    concurrency = Concurrency(config)
    assert concurrency.limit == 20
    roomy = [server("learner", 0.1), server("learner", 0.1)]
    concurrency.adapt([*roomy, server("frozen", 0.1)], playing=20, wanted=True)
    assert concurrency.limit == 10  # one server of the other policy
    pair = [server("learner", 0.1), server("learner", 0.97)]
    concurrency.adapt(pair, playing=10, wanted=True)
    assert concurrency.limit == 9
    concurrency.adapt(pair, playing=9, wanted=True)  # nobody has said anything since
    assert concurrency.limit == 9
    concurrency.adapt([], playing=9, wanted=True)  # everybody has died: what was found out stays
    assert concurrency.limit == 9


@pytest.mark.parametrize("playing", [1.0, 3.0])
def test_there_is_always_room_for_one(playing: float) -> None:
    window = Window(4)
    for _ in range(40):
        window.adapt(usage=1.0, requests=4.0, playing=min(playing, window.size), wanted=True)
    assert window.size == 1.0
