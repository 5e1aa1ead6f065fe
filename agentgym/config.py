"""The settings of a run: one frozen pydantic class per section of the TOML file, a string under each field.

`agentgym.config_file` reads them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from agentgym.algorithm_config import ACROSS_GROUPS, AlgorithmConfig
from agentgym.policy_config import Choice, PolicyConfig, PolicyName, check_mapping, weights_of
from agentgym.section import Positive, Seconds, Section
from agentgym.simulation_config import SimulationConfig
from agentgym.trainer_config import TrainerConfig


class RunConfig(Section):
    """The run as a whole."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The run directory is `dir/name`."""
    dir: str = "runs"
    """Where run directories are made."""
    seed: int = Field(default=1, ge=0, lt=2**31)
    """Tasks, sampling and the warm-up teacher derive their seeds from it."""
    steps: Annotated[int, Field(ge=0)] = 100
    """Optimizer steps of reinforcement learning, after the warm-up."""


class EnvConfig(Section):
    """The environment and its limits."""

    id: str
    """A registered id ("agentgym/GuessNumber-v0"), "module:Class", or a library's "gymnasium:ID", "openspiel:NAME"."""
    kwargs: dict[str, Any] = Field(default={})
    """Arguments of the environment's constructor."""
    isolation: Literal["inline", "shared", "process"] | None = None
    """Where instances are called: on the worker's event loop, each in a thread of the worker, or each in a process of
    its own; None: as the environment declares, and those that declare nothing get processes."""
    max_turns: Positive | None = None
    """Answers per agent; None: the environment's own limit, or 32."""
    max_tokens: Positive | None = None
    """Tokens per agent in an episode, prompts included; None: the model's context length."""
    reward_weights: dict[str, float] = Field(default={})
    """What named parts of a turn's reward are multiplied by; they win over the environment's own weights."""
    rewards: list[str] = Field(default=[])
    """Reward functions "module:function": (episode, agent) -> float, called when an episode is over."""
    reward_timeout: Seconds = 30.0
    """Seconds that the reward functions of an episode, or of a group, may take."""
    max_observation_chars: Positive | None = None
    """Characters of a message from the environment; the middle of a longer one is left out, and a mark says so. None:
    no limit."""
    reset_timeout: Seconds = 30.0
    """Seconds that `reset` may take."""
    step_timeout: Seconds = 30.0
    """Seconds that `step` may take."""
    episode_timeout: Seconds = 300.0
    """Seconds that an episode may take before it is truncated."""

    @property
    def patience(self) -> float:
        """Seconds after which a worker that enforces these limits has answered a lease, whatever happened."""
        return 2 * self.episode_timeout + self.reset_timeout + self.step_timeout + self.reward_timeout


class SamplingConfig(Section):
    """How the policy server samples."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Softmax temperature; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; 1 keeps the whole distribution."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample among the k likeliest tokens; 0 is no limit."""
    max_tokens: Positive = 32
    """Tokens per answer."""


class RolloutConfig(Section):
    """How many episodes are played for a step, and how old their tokens may be."""

    tasks_per_step: Positive = 32
    """Groups that a step trains on."""
    group_size: Positive = 8
    """Episodes of the same task (the same seed) in a group."""
    max_staleness: Annotated[int, Field(ge=0)] = 1
    """Versions that a trained token may be older than the weights it trains. 0: generation and training alternate."""
    max_playing: Positive | None = None
    """Episodes in play at once, over all workers; None: as many as the policy servers can use, which is measured."""
    group_timeout: Seconds = 120.0
    """Seconds after its first member finished until a group goes on with the members it has (2 or more)."""
    max_filtered: Annotated[int, Field(ge=0)] = 0
    """Groups of a step that others take the place of, because their plays compare as equal and teach nothing (DAPO's
    dynamic sampling); what comes after that many is trained on as it is. 0: no group is left out. `episode/*` in
    TensorBoard is about those that are trained on."""
    fork_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the groups that are forks: their members begin with the first answers of an episode that was trained on
    before, up to a random turn, and go on from there in `group_size` ways, which alone are compared and trained."""
    group_rewards: list[str] = Field(default=[])
    """Reward functions "module:function": (episodes of a group) -> [{agent: reward}, one dictionary per episode]."""


class ServerConfig(Section):
    """The vLLM policy servers."""

    count: Positive = 1
    """Server processes."""
    bind: str | None = Field(default=None, pattern=r"^tcp://[^*0].*:\*$")
    """An address at which the workers of other machines reach the servers, "tcp://HOST:*"; each takes a free port.
    None: this machine's alone."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    """Of weights and activations; "auto": the model's own."""
    max_model_len: Positive = 512
    """Context length in tokens."""
    max_num_seqs: Positive = 256
    """Requests in one engine step."""
    kv_cache_gib: Annotated[float, Field(gt=0)] = 1.0
    """Memory for the key-value cache on a CPU."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of a GPU's memory that vLLM may use."""
    kv_on_update: Literal["keep", "recompute"] = "keep"
    """After a weight update, running requests keep the keys and values of the old weights, or compute them anew."""
    threads: Positive = 1
    """CPU threads."""


class WorkersConfig(Section):
    """The environment workers."""

    count: Positive = 1
    """Worker processes that the coordinator starts."""
    slots: Positive = 256
    """Episodes that one worker plays at once; the most threads or processes with environments that it makes."""
    max_episodes: Positive | None = None
    """Episodes after which a worker is replaced by a new one, for environments that leak; None: never."""
    max_memory_gib: Annotated[float, Field(gt=0)] | None = None
    """Memory of a worker and its environments' processes beyond which it is replaced by a new one; None: no limit."""


class CoordinatorConfig(Section):
    """Addresses, deadlines and retries."""

    bind: str | None = Field(default=None, pattern=r"^tcp://.+:\d+$")
    """An address for the workers of other machines, "tcp://HOST:PORT"; it needs `keys`. None: this machine's alone."""
    keys: Path | None = None
    """The folder that `agentgym keys` made. All connections of the run are then encrypted, and only keys of its list
    are let in."""
    max_retries: Annotated[int, Field(ge=0)] = 3
    """Times an episode is issued again after its worker died or its play failed, before it is given up."""
    heartbeat_interval: Seconds = 1.0
    """Seconds between heartbeats."""
    heartbeat_timeout: Seconds = 20.0
    """Seconds of silence after which a process counts as dead, and is killed and replaced."""
    start_timeout: Seconds = 300.0
    """Seconds that a process may take to say hello."""
    step_timeout: Seconds = 600.0
    """Seconds that an optimizer step, a weight update or a batch of episodes may take."""
    notice_after: Seconds = 60.0
    """Seconds of waiting for one of these after which a line says who is waited for."""
    max_restarts: Annotated[int, Field(ge=0)] = 5
    """Restarts of one process from one checkpoint to the next; with one more the run ends."""
    keep_episodes: Annotated[int, Field(ge=0)] = 1000
    """Episodes that stay readable in the run directory after a checkpoint covers the steps that trained on them."""
    max_store_gib: Annotated[float, Field(gt=0)] = 8.0
    """Size of the episodes on disk; when they fill half of it, a checkpoint is written early, so that they can go."""

    @property
    def abandoned_after(self) -> float:
        """Seconds of the coordinator's silence after which a process ends by itself."""
        return 3 * self.heartbeat_timeout


class WarmupConfig(Section):
    """The cold start: supervised steps on episodes that a scripted policy played."""

    steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps; 0 is no warm-up."""
    policy: str = "noisy"
    """The scripted policy, as in `policies.*.scripted`."""
    episodes: Positive = 256
    """Episodes per step."""
    learning_rate: Annotated[float, Field(gt=0)] = 3e-3
    """Adam's step size."""


class TensorBoardConfig(Section):
    """What is written to TensorBoard."""

    samples_every: Positive = 10
    """Steps between sample episodes written as text."""
    samples: Annotated[int, Field(ge=0)] = 3
    """Episodes per sample."""


class EvaluationConfig(Section):
    """Evaluations of the checkpoints while the training goes on: `agentgym eval` in a process beside it."""

    every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations, each of which gets a checkpoint; 0: none."""
    episodes: Positive = 64
    """Episodes of an evaluation, always of the same tasks."""
    policy_mapping: dict[str, Choice] = Field(default={})
    """Who plays whom in them, in place of the training's `policy_mapping`: opponents that stay the same. A pool cannot
    play."""

    def due(self, step: int) -> bool:
        """Whether the checkpoint of a step of reinforcement learning is to be played; 0 is the end of the warm-up."""
        return bool(self.every) and step >= 0 and step % self.every == 0


class Config(Section):
    """All settings of a run."""

    run: RunConfig = RunConfig()
    env: EnvConfig
    policies: dict[PolicyName, PolicyConfig]
    """Policies by name."""
    policies_to_train: list[str] = Field(default=["learner"], min_length=1)
    """Names of the policies that are trained, each with weights, a trainer and policy servers of its own."""
    policy_mapping: dict[str, Choice] = Field(default={})
    """Agent to policy, or to policies with their probabilities, drawn anew for each group; "*" are the agents that are
    not named, which by default play the first of `policies_to_train`."""
    policy_mapping_fn: str | None = None
    """In place of `policy_mapping`: "module:function", called with an agent and a dictionary (group_id, task_index,
    seed) and returning the name of a policy; once per group."""
    seat_rotation: bool = False
    """From group to group the policies of `policy_mapping` move on by one seat, so that each plays every agent."""
    sampling: SamplingConfig = SamplingConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    server: ServerConfig = ServerConfig()
    workers: WorkersConfig = WorkersConfig()
    coordinator: CoordinatorConfig = CoordinatorConfig()
    warmup: WarmupConfig = WarmupConfig()
    tensorboard: TensorBoardConfig = TensorBoardConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    simulation: SimulationConfig = SimulationConfig()

    @model_validator(mode="after")
    def _cross_checks(self) -> "Config":
        if len(set(self.policies_to_train)) != len(self.policies_to_train):
            raise ValueError(f"policies_to_train = {self.policies_to_train}: name each policy once")
        for name in self.policies_to_train:
            trained = self.policies.get(name)
            if trained is None or trained.kind != "model":
                raise ValueError(f"policies_to_train names {name!r}; set policies.{name}.model")
        if len(self.policies_to_train) > 1 and self.trainer.keep_checkpoints < 2:
            raise ValueError(
                "policies_to_train names several policies, whose checkpoints must be of one step: set "
                "trainer.keep_checkpoints >= 2"
            )
        for name, policy in self.policies.items():
            if policy.pool is not None and policy.pool not in self.policies_to_train:
                raise ValueError(
                    f"policies.{name}.pool = {policy.pool!r}; a pool holds snapshots of one of policies_to_train: "
                    f"{self.policies_to_train}"
                )
        if self.policy_mapping_fn is not None and (self.policy_mapping or self.seat_rotation):
            raise ValueError(
                "policy_mapping_fn takes the place of policy_mapping and seat_rotation; give it alone"
            )
        check_mapping(self.policy_mapping, self.policies)
        for name in self.policies_to_train:
            if name not in self.mapped:
                raise ValueError(f"policy_mapping lets no agent play {name!r}, which is to be trained")
        check_mapping(self.evaluation.policy_mapping, self.policies, key="evaluation.policy_mapping")
        if self.evaluation.every:
            self._check_evaluation()
        self._check_comparisons()
        sampling = self.sampling
        if (self.algorithm.overlong_buffer or 0) > sampling.max_tokens:
            raise ValueError(
                f"algorithm.overlong_buffer = {self.algorithm.overlong_buffer} is more tokens than an answer may "
                f"have: sampling.max_tokens = {sampling.max_tokens}"
            )
        if self.run.steps and (sampling.temperature == 0 or sampling.top_p < 1 or sampling.top_k > 0):
            raise ValueError(
                f"sampling.temperature = {sampling.temperature:g}, top_p = {sampling.top_p:g} and top_k = "
                f"{sampling.top_k} sample from a part of the vocabulary, and the trainer has the probabilities of all "
                "of it; for training set temperature > 0, top_p = 1 and top_k = 0"
            )
        if self.sampling.max_tokens >= self.server.max_model_len:
            raise ValueError(
                f"sampling.max_tokens = {self.sampling.max_tokens} leaves no room for a prompt in "
                f"server.max_model_len = {self.server.max_model_len}"
            )
        return self

    def _check_comparisons(self) -> None:
        rollout, advantage = self.rollout, self.algorithm.advantage
        if rollout.group_size < 2 and advantage not in ACROSS_GROUPS and self.run.steps:
            raise ValueError(
                f"algorithm.advantage = {advantage!r} compares the members of a group; set rollout.group_size >= 2"
            )
        if rollout.max_filtered and advantage in ACROSS_GROUPS:
            raise ValueError(
                f"rollout.max_filtered leaves out groups whose plays compare as equal, but algorithm.advantage = "
                f"{advantage!r} does not compare them; set rollout.max_filtered = 0"
            )
        if rollout.fork_share and advantage in ACROSS_GROUPS:
            raise ValueError(
                f"rollout.fork_share lets groups begin from the middle of an episode, but algorithm.advantage = "
                f"{advantage!r} compares them with plays from the beginning; set rollout.fork_share = 0"
            )

    def _check_evaluation(self) -> None:
        own = self.evaluation.policy_mapping
        playing = self._named({**own, "*": own.get("*", self.learner)}) if own else self.mapped
        for name in self.policies_to_train:
            if name not in playing:
                raise ValueError(
                    f"evaluation.policy_mapping lets no agent play {name!r}, which is to be trained"
                )
        pools = sorted(name for name in playing if self.policies[name].kind == "pool")
        if pools and (own or self.policy_mapping_fn is None):
            raise ValueError(
                f"evaluation.every: {pools[0]!r} is a pool, which cannot play in an evaluation; say in "
                "evaluation.policy_mapping who plays in its place"
            )

    @property
    def learner(self) -> str:
        """The first policy that is trained; agents that nothing else is said of play it."""
        return self.policies_to_train[0]

    def place_of(self, policy: str, folder: Path) -> Path:
        """Return where a trained policy has its files in a folder of the run: there itself, if it is the only one."""
        return folder if len(self.policies_to_train) == 1 else folder / policy

    @property
    def mapped(self) -> set[str]:
        """The policies that may play an agent."""
        if self.policy_mapping_fn is not None:
            return set(self.policies)
        return self._named({"*": self.learner, **self.policy_mapping})

    @staticmethod
    def _named(mapping: Mapping[str, Choice]) -> set[str]:
        return {name for choice in mapping.values() for name in weights_of(choice)}

    @property
    def served(self) -> dict[str, Path]:
        """The policies that policy servers answer for, those to be trained first, with their model folders."""
        names = sorted(
            self.mapped | set(self.policies_to_train), key=lambda n: (n not in self.policies_to_train, n)
        )
        return {n: self.model_of(n) for n in names if self.policies[n].kind in ("model", "pool")}

    def model_of(self, name: str) -> Path:
        """Return the model folder of a policy that is served; a pool's is that of the policy it holds snapshots of."""
        policy = self.policies[name]
        return Path(self.policies[policy.pool or name].model or "")

    @property
    def model(self) -> Path:
        """The folder of the model that is trained; of the first one, if there are several."""
        return self.model_of(self.learner)

    @property
    def run_dir(self) -> Path:
        """The run's directory."""
        return Path(self.run.dir) / self.run.name

    @property
    def episodes_per_step(self) -> int:
        """Episodes in the batch of a step."""
        return self.rollout.tasks_per_step * self.rollout.group_size
