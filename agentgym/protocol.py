"""The messages of agentgym: one frozen record per kind, validated on receipt.

worker  -> coordinator   hello, heartbeat, ready, episode, leaving, error
coordinator -> worker    welcome, servers, lease, ack, cancel, leaving, drain
worker  -> server        generate, abort, health
server  -> worker        completion, healthy, error
coordinator -> server    welcome, load_weights, drain
server  -> coordinator   hello, heartbeat, loaded, error
coordinator -> trainer   welcome, batch, drain
trainer -> coordinator   hello, heartbeat, batch_request, step_done, error
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict  # pydantic wants this one below Python 3.12

Role = Literal["worker", "server", "trainer"]

EXIT_REPLACE = 75
"""Exit status (EX_TEMPFAIL) of a worker that has left in order and wants to be started anew: no failure."""


class Header(BaseModel):
    """The fields of one kind of message."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    kind: ClassVar[str]


class Hello(Header):
    """A process says who it is, before anything but heartbeats."""

    kind: ClassVar[str] = "hello"
    role: Role
    name: str = Field(max_length=100)
    protocol: int
    pid: int
    address: str = ""
    """Servers: where workers reach it."""
    policy: str = ""
    """Servers: the policy that they answer for. Trainers: the one that they train."""
    version: int = 0
    """Servers: the weight version loaded. Trainers: the version of its weights."""
    weights: str = ""
    """Trainers, after a resume: the file that holds the weights of `version`; empty for the model folder's."""
    max_model_len: int = 0
    """Servers: the context length in tokens."""


class Welcome(Header):
    """The coordinator knows the peer and will count on it."""

    kind: ClassVar[str] = "welcome"
    episodes: str = ""
    """The folder of the run's episodes, where workers of the same machine leave their routes; see `agentgym.routes`."""


class Heartbeat(Header):
    """Sent every `coordinator.heartbeat_interval` seconds, with numbers for TensorBoard."""

    kind: ClassVar[str] = "heartbeat"
    stats: dict[str, float] = Field(default_factory=dict)


class Error(Header):
    """What could not be done, and why; answers a request, or ends the sender."""

    kind: ClassVar[str] = "error"
    text: str
    fatal: bool = False
    """True: the sender ends, and a restart would not help."""


class Drain(Header):
    """End. A policy server first answers what it has in hand; a worker drops its plays, which nobody wants any more."""

    kind: ClassVar[str] = "drain"


class Servers(Header):
    """The policy servers that a worker may ask."""

    kind: ClassVar[str] = "servers"
    addresses: dict[str, list[str]]
    """By policy."""
    max_model_len: int
    """The context length in tokens; 0 while no server is there."""


class Ready(Header):
    """A worker can hold this many more episodes, besides those that come in place of the ones it sends."""

    kind: ClassVar[str] = "ready"
    credits: int = Field(ge=0)


class Leaving(Header):
    """A worker gives its credits back, and ends when it has played its leases. The answer: there come no more."""

    kind: ClassVar[str] = "leaving"


class Recorded(TypedDict):
    """An answer of a recorded episode."""

    prompt: int
    """The checksum of the ids that it answered."""
    tokens: list[int]
    """Empty where the agent is to answer by itself."""
    message: dict[str, Any]
    """What the ids mean."""


class Lease(Header):
    """One episode to play."""

    kind: ClassVar[str] = "lease"
    lease_id: int
    task_index: int
    seed: int
    group_id: int
    member: int
    sampling_seed: int
    policies: dict[str, str]
    """Policy by agent, a pool's snapshot as "pool@version"; "*" is every agent that is not named."""
    teacher: str = ""
    """In a warm-up: the scripted policy that plays in place of every policy that is not scripted itself."""
    prefix: dict[str, list[Recorded]] = Field(default_factory=dict)
    """Of a fork, by agent: the answers that are given first, those of another episode; see `agentgym.prefix`."""


class Ack(Header):
    """The episode of this lease is in the coordinator's hands."""

    kind: ClassVar[str] = "ack"
    lease_id: int


class Cancel(Header):
    """The episode of this lease is no longer wanted, or could not be read; nobody waits for it."""

    kind: ClassVar[str] = "cancel"
    lease_id: int


class RoutesApart(TypedDict):
    """What is in a file of routes."""

    dtype: Literal["uint8", "uint16"]
    shape: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=3, max_length=3)]
    """[K, L, k]."""


class EpisodeDone(Header):
    """A finished episode, in place of which the worker can hold another; arrays as in `agentgym.episode_codec`."""

    kind: ClassVar[str] = "episode"
    lease_id: int
    episode: dict[str, Any]
    apart: RoutesApart | None = None
    """Where the routes lie in a file, see `agentgym.routes`; None: they are among the arrays, or there are none."""


class Generate(Header):
    """Sample one answer. Array: `tokens` int32 [prompt length]."""

    kind: ClassVar[str] = "generate"
    max_tokens: int = Field(ge=1)
    temperature: float = Field(ge=0.0)
    top_p: float = Field(gt=0.0, le=1.0)
    top_k: int = Field(ge=0)
    """0: no limit."""
    stop_token_ids: list[int]
    routes_start: int = Field(default=0, ge=0)
    """Routes of the tokens before this position are not sent back."""


class Completion(Header):
    """One sampled answer.

    Arrays: `tokens` int32 [n], `logprobs` float32 [n], and for MoE models `routes` uint8|uint16
    [prompt + n - 1 - routes_start, L, k]: the rows of the positions from `routes_start` on; the last sampled
    token has none.
    """

    kind: ClassVar[str] = "completion"
    finish_reason: Literal["stop", "length", "abort"]
    version_spans: list[Annotated[tuple[int, int], Field(strict=False)]]
    """[(first token index, version)], ascending: which weight version sampled which tokens."""
    seconds: float = 0.0
    """Wall time inside the engine."""


class Abort(Header):
    """Stop the generation with the request id of this message; it is answered with finish_reason "abort"."""

    kind: ClassVar[str] = "abort"


class Health(Header):
    """Ask a policy server whether it answers, and for its numbers."""

    kind: ClassVar[str] = "health"


class Healthy(Header):
    """A policy server's answer to `health`."""

    kind: ClassVar[str] = "healthy"
    version: int
    running: int
    max_model_len: int


class LoadWeights(Header):
    """Load the weights of a version; requests that are running go on under them."""

    kind: ClassVar[str] = "load_weights"
    version: int
    path: str
    """A safetensors file with Hugging Face names, or a model folder."""


class Loaded(Header):
    """A policy server samples with this version now."""

    kind: ClassVar[str] = "loaded"
    version: int
    seconds: float


class BatchRequest(Header):
    """The trainer can take the batch of this step."""

    kind: ClassVar[str] = "batch_request"
    step: int


class BatchHeader(Header):
    """One optimizer step's data; arrays: `agentgym.batch.MADE_HERE`, and where `recorded` is empty all others, too."""

    kind: ClassVar[str] = "batch"
    step: int
    loss: str
    """A name in `agentgym_trainers.losses`."""
    learning_rate: float
    updates: int
    """Passes over the batch, each with one optimizer update per `minibatches`."""
    lengths: list[int]
    """Tokens per sample."""
    checksums: list[int]
    """Of the samples, made by their workers."""
    sums: dict[str, int]
    """Of the arrays that the coordinator made; see `agentgym.batch.sums`."""
    microbatches: list[list[int]]
    """Sample indices per microbatch; see `agentgym.batch.share_of` for whose it is."""
    episodes: str = ""
    """The folder with the episodes that `recorded` names."""
    recorded: list[Annotated[tuple[int, int, int, int, int], Field(strict=False)]] = Field(
        default_factory=list
    )
    """By sample: the `agentgym.segments.Place` of its episode, and the number of its trajectory
    (`agentgym.origins`).
    Empty: what the workers recorded is among the arrays."""
    publish: bool
    """Write the weights after the step and name them in `step_done`."""
    checkpoint: bool
    """Write a checkpoint after the step."""
    state: dict[str, Any] = Field(default_factory=dict)
    """The coordinator's own state, for the checkpoint."""


class StepDone(Header):
    """An optimizer step is finished."""

    kind: ClassVar[str] = "step_done"
    step: int
    metrics: dict[str, float]
    weights: str = ""
    """The file with the weights of version `step`, if `publish` was asked."""
    checkpoint: str = ""
    """The folder of the checkpoint, if one was asked."""


def _kinds() -> dict[str, type[Header]]:
    return {record.kind: record for record in Header.__subclasses__()}


KINDS = _kinds()
