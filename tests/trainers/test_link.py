import queue
from pathlib import Path

import pytest
import zmq
from trainer_builders import batch_of, samples_of

from agentgym.busy import BusyShare
from agentgym.protocol import BatchRequest, Drain, Heartbeat
from agentgym.wire import open_socket, pack, unpack
from agentgym_trainers.megatron.link import Link

DEADLINE_MS = 20_000


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_busy_share_counts_what_is_still_running():
    clock = Clock()
    share = BusyShare(clock)
    clock.now = 2.0
    with share.busy():
        clock.now = 4.0
        assert share.read() == 0.5
        clock.now = 5.0
        assert share.read() == 1.0
    clock.now = 10.0
    assert share.read() == 0.0


def test_messages_cross_and_heartbeats_go_out_while_nobody_receives(tmp_path: Path):
    with zmq.Context() as context, open_socket(context, zmq.ROUTER) as router:
        router.bind(f"ipc://{tmp_path}/socket")
        link = Link(
            f"ipc://{tmp_path}/socket",
            heartbeat_interval=0.05,
            busy=BusyShare(),
            on_silence=lambda reason: None,
            silence=30.0,
        )
        link.send(BatchRequest(step=1))
        kinds = []
        while kinds.count("heartbeat") < 3:
            assert router.poll(DEADLINE_MS)
            peer, *frames = router.recv_multipart()
            kinds.append(unpack(frames).kind)
        assert kinds[0] == "batch_request"
        router.send_multipart([peer, b"nonsense"])
        router.send_multipart([peer, *pack(Heartbeat())])
        router.send_multipart([peer, *pack(Drain())])
        assert link.receive().kind == "drain"
        link.close()


def test_silence_is_reported_once_with_the_address(tmp_path: Path):
    reasons: queue.Queue[str] = queue.Queue()
    address = f"ipc://{tmp_path}/nobody"
    link = Link(address, heartbeat_interval=0.02, busy=BusyShare(), on_silence=reasons.put, silence=0.1)
    assert (
        reasons.get(timeout=DEADLINE_MS / 1000) == f"the coordinator at {address} has been silent for 0.1 s"
    )
    link.close()
    assert reasons.empty()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_connection_that_fails_is_reported(tmp_path: Path):
    reasons: queue.Queue[str] = queue.Queue()
    address = f"ipc://{tmp_path}/nobody"
    link = Link(address, heartbeat_interval=1.0, busy=BusyShare(), on_silence=reasons.put, silence=30.0)
    header, _ = batch_of(samples_of((3,)), state={"not msgpack": object()})
    link.send(header)
    assert "failed" in reasons.get(timeout=DEADLINE_MS / 1000)
    link.close()
