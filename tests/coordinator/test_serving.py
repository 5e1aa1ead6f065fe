from typing import Any

from builders import config_of

from agentgym.coordinator.peers import Peers, ServerPeer, WorkerPeer
from agentgym.coordinator.serving import Serving
from agentgym.protocol import Header, LoadWeights, Servers

POLICIES = {"past": {"pool": "learner"}, "frozen": {"model": "other"}}
MAPPING = {"a": "past", "b": "frozen"}


class Scene:
    """A serving with one worker and servers by name; what is sent is kept."""

    def __init__(self, **settings: Any) -> None:
        self.peers = Peers()
        self.peers.workers[b"worker"] = WorkerPeer("worker-0", b"worker", 0.0)
        self.sent: list[tuple[bytes, Header]] = []
        config = config_of(policies=POLICIES, policy_mapping=MAPPING, **settings)
        self.serving = Serving(config, self.peers, lambda header, to: self.sent.append((to, header)))

    def server(self, name: str, policy: str, version: int = 0) -> ServerPeer:
        server = ServerPeer(name, policy, name.encode(), 0.0, f"ipc://{name}", 64, version)
        self.peers.servers[name.encode()] = server
        return server

    def update(self) -> list[Header]:
        """Return what a moment's work sends."""
        self.sent.clear()
        self.serving.update()
        return [header for _, header in self.sent]

    def loads(self, server: ServerPeer) -> None:
        assert server.loading is not None
        server.version, server.loading = server.loading, None


def addresses(sent: list[Header]) -> dict[str, list[str]]:
    (message,) = (header for header in sent if isinstance(header, Servers))
    return message.addresses


def test_workers_hear_of_the_servers_of_each_policy() -> None:
    scene = Scene()
    for name, policy in (("s", "learner"), ("t", "learner"), ("f", "frozen"), ("p", "past")):
        scene.server(name, policy)
    scene.serving.offer("learner", 0, "")
    assert addresses(scene.update()) == {"learner": ["ipc://s", "ipc://t"], "frozen": ["ipc://f"], "past": []}
    assert scene.update() == []


def test_a_frozen_model_is_there_as_soon_as_its_server_is() -> None:
    scene = Scene()
    scene.server("s", "learner")
    scene.serving.offer("learner", 0, "")
    scene.update()
    assert not scene.serving.models_are_there
    scene.server("f", "frozen")
    scene.update()
    assert scene.serving.models_are_there
    assert scene.serving.published == {"learner": 0, "frozen": 0}


def test_new_weights_of_the_trained_policy_leave_the_others_alone() -> None:
    scene = Scene()
    learner = scene.server("s", "learner")
    scene.server("f", "frozen")
    scene.server("p", "past")
    scene.serving.offer("learner", 7, "/weights-7")
    scene.update()
    assert [to for to, header in scene.sent if isinstance(header, LoadWeights)] == [b"s"]
    scene.loads(learner)
    scene.update()
    assert scene.serving.published == {"learner": 7, "frozen": 0}


def test_a_pools_server_is_named_only_while_it_has_the_snapshot_that_is_played() -> None:
    scene = Scene()
    pool = scene.server("p", "past")
    scene.serving.offer("past", 20, "/snapshots/20")
    sent = scene.update()
    assert sent == [LoadWeights(version=20, path="/snapshots/20")]
    assert scene.peers.published("past") is None
    scene.loads(pool)
    assert addresses(scene.update())["past"] == ["ipc://p"]
    assert scene.peers.published("past") == 20


def test_a_pools_server_that_comes_back_is_brought_to_the_snapshot_first() -> None:
    scene = Scene()
    scene.serving.offer("past", 20, "/snapshots/20")
    scene.server("p", "past", version=20)
    scene.update()
    scene.peers.forget("p")
    assert addresses(scene.update())["past"] == []
    scene.server("p", "past", version=0)
    assert scene.update() == [LoadWeights(version=20, path="/snapshots/20")]


def test_a_pool_can_go_back_to_the_model_folder() -> None:
    scene = Scene()
    scene.server("p", "past", version=20)
    scene.serving.offer("past", 0, "/model")
    assert scene.update() == [LoadWeights(version=0, path="/model")]


def test_only_policies_of_the_run_are_known() -> None:
    scene = Scene()
    assert [scene.serving.knows(name) for name in ("learner", "past", "frozen", "stranger", "")] == [
        True, True, True, False, False,
    ]  # fmt: skip
