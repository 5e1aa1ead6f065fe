from agentgym.coordinator.peers import Offer, Peers, ServerPeer, TrainerPeer, WorkerPeer


def server_of(name: str, version: int = 0, heard: float = 0.0, policy: str = "learner") -> ServerPeer:
    return ServerPeer(name, policy, name.encode(), heard, f"ipc://{name}", 64, version)


def peers_of(*servers: ServerPeer, offer: int | None = None) -> Peers:
    peers = Peers()
    peers.servers = {server.identity: server for server in servers}
    if offer is not None:
        peers.offers["learner"] = Offer(offer, f"weights-{offer}" if offer else "")
    return peers


def names(servers: list[ServerPeer]) -> list[str]:
    return [server.name for server in servers]


def test_a_version_is_published_when_every_connected_server_has_it() -> None:
    old, new = server_of("old", 3), server_of("new", 4)
    assert peers_of(old, new).published("learner") is None
    assert peers_of(offer=4).published("learner") is None
    peers = peers_of(old, new, offer=4)
    assert peers.published("learner") is None
    old.version = 4
    assert peers.published("learner") == 4


def test_a_server_is_asked_once_for_a_version() -> None:
    peers = peers_of(server_of("a", 3), server_of("b", 4), offer=4)
    assert names([server for server, _ in peers.to_load()]) == ["a"]
    assert peers.to_load() == []
    peers.offers["learner"] = Offer(5, "weights-5")
    assert names([server for server, _ in peers.to_load()]) == ["a", "b"]


def test_the_model_folders_own_weights_are_not_loaded() -> None:
    assert peers_of(server_of("a", 0), offer=0).to_load() == []
    assert peers_of(server_of("a", 0)).to_load() == []


def test_workers_may_ask_servers_with_the_published_or_the_offered_version() -> None:
    peers = peers_of(server_of("stale", 2), server_of("published", 3), server_of("offered", 4), offer=4)
    assert names(peers.announced("learner", ever_published=3)) == ["published", "offered"]
    assert names(peers.announced("learner", ever_published=None)) == ["offered"]
    assert peers_of(server_of("a", 0)).announced("learner", None) == []


def test_the_worker_with_the_most_credits_is_the_next() -> None:
    peers = Peers()
    assert peers.freest_worker() is None
    peers.workers = {bytes([n]): WorkerPeer(f"w{n}", bytes([n]), 0.0, credits=n % 3) for n in range(4)}
    best = peers.freest_worker()
    assert best is not None
    assert best.name == "w2"
    for worker in peers.workers.values():
        worker.credits = 0
    assert peers.freest_worker() is None


def test_signs_of_life_are_noted_and_strangers_are_not_known() -> None:
    peers = peers_of(server_of("server-0", heard=1.0))
    peers.workers[b"w"] = WorkerPeer("worker-0", b"w", 2.0)
    peers.trainers["learner"] = TrainerPeer("trainer", "learner", b"t")
    assert peers.silent(before=2.0) == ["server-0"]
    assert peers.heard(b"server-0", 5.0) == "server-0"
    assert (peers.silent(before=2.0), peers.silent(before=9.0)) == ([], ["worker-0", "server-0"])
    assert (peers.heard(b"t", 5.0), peers.heard(b"who", 5.0)) == ("trainer", None)


def test_a_peer_is_forgotten_by_name_with_all_of_its_identities() -> None:
    peers = peers_of(server_of("server-0"))
    for identity in (b"x", b"y"):
        peers.workers[identity] = WorkerPeer("worker-0", identity, 0.0)
    assert peers.forget("worker-0") == [b"x", b"y"]
    assert (peers.workers, peers.forget("worker-0"), len(peers.servers)) == ({}, [], 1)
