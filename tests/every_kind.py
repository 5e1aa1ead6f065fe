"""One message of every kind."""

from agentgym import protocol
from agentgym.protocol import Header

ONE_OF_EACH: dict[str, Header] = {
    header.kind: header
    for header in (
        protocol.Hello(role="server", name="s", protocol=1, pid=5, address="ipc://x", max_model_len=64),
        protocol.Welcome(),
        protocol.Heartbeat(stats={"busy": 0.5}),
        protocol.Error(text="no", fatal=True),
        protocol.Drain(),
        protocol.Servers(addresses={"learner": ["ipc://a", "ipc://b"], "past": []}, max_model_len=64),
        protocol.Ready(credits=3),
        protocol.Leaving(),
        protocol.Lease(
            lease_id=1,
            task_index=2,
            seed=3,
            group_id=4,
            member=5,
            sampling_seed=6,
            policies={"*": "noisy"},
            prefix={"a": [{"prompt": 7, "tokens": [1, 2], "message": {"role": "assistant", "content": "b"}}]},
        ),
        protocol.Ack(lease_id=1),
        protocol.Cancel(lease_id=1),
        protocol.EpisodeDone(lease_id=1, episode={"env_id": "x", "trajectories": [{"length": 2}]}),
        protocol.Generate(max_tokens=8, temperature=1.0, top_p=1.0, top_k=0, stop_token_ids=[1]),
        protocol.Completion(finish_reason="stop", version_spans=[(0, 3), (5, 4)], seconds=0.1),
        protocol.Abort(),
        protocol.Health(),
        protocol.Healthy(version=1, running=2, max_model_len=64),
        protocol.LoadWeights(version=1, path="weights-1.safetensors"),
        protocol.Loaded(version=1, seconds=0.2),
        protocol.BatchRequest(step=4),
        protocol.BatchHeader(
            step=1,
            loss="sft",
            learning_rate=1e-3,
            updates=1,
            lengths=[3, 2],
            checksums=[1, 2],
            sums={"weights": 3},
            microbatches=[[0], [1]],
            publish=True,
            checkpoint=False,
            state={"next_task": 4, "counts": {"ok": 2}},
        ),
        protocol.StepDone(step=1, metrics={"loss": 0.25}, weights="w", checkpoint="c"),
    )
}
