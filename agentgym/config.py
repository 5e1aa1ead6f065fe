"""The settings of a run: one frozen pydantic class per section of the TOML file, a string under each field.

    config = load_config(Path("run.toml"), ["run.steps=20", "rollout.group_size=4"])

Unknown keys are refused with the nearest right key. The resolved settings are saved in the run directory and are
what every process of the run reads.
"""

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agentgym.errors import ConfigError

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
Probability = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A table of the TOML file."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


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
    """A registered id ("agentgym/GuessNumber-v0"), "module:Class", or "gymnasium:ID"."""
    kwargs: dict[str, Any] = {}
    """Arguments of the environment's constructor."""
    max_turns: Positive | None = None
    """Answers per agent; None: the environment's own limit, or 32."""
    max_tokens: Positive | None = None
    """Tokens per agent in an episode, prompts included; None: the model's context length."""
    reset_timeout: Seconds = 30.0
    """Seconds that `reset` may take."""
    step_timeout: Seconds = 30.0
    """Seconds that `step` may take."""
    episode_timeout: Seconds = 300.0
    """Seconds that an episode may take before it is truncated."""


class PolicyConfig(Section):
    """One policy: exactly one of `model` and `scripted`."""

    model: str | None = None
    """A local Hugging Face folder; this policy is served by vLLM and trained."""
    scripted: str | None = None
    """A scripted policy's name in the environment ("random", "expert"), or "module:Class"."""

    @model_validator(mode="after")
    def _one_kind(self) -> "PolicyConfig":
        if (self.model is None) == (self.scripted is None):
            raise ValueError("give exactly one of `model` and `scripted`")
        return self


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
    group_timeout: Seconds = 120.0
    """Seconds after its first member finished until a group goes on with the members it has (2 or more)."""


class AlgorithmConfig(Section):
    """Advantages and loss."""

    advantage: Literal[
        "group_mean", "group_mean_std", "leave_one_out", "turn_group_mean", "turn_batch_mean"
    ] = "group_mean"
    """A function of `agentgym.advantages`: whole plays compared in their group, or turns by their reward-to-go."""
    discount: Probability = 1.0
    """turn_*: what a reward one turn later counts."""
    normalize_batch: bool = True
    """Divide the advantages of a step by their standard deviation over the step."""
    loss_mean: Literal["token", "agent"] = "token"
    """The loss of a step is the mean over its trained tokens, or the mean over its agents of the mean over their
    tokens, so that a talkative agent does not dominate."""
    loss: Literal["dppo_tv", "ppo_clip"] = "dppo_tv"
    """A name in `agentgym_trainers.losses`."""
    updates: Positive = 2
    """Optimizer updates per batch, each over the whole batch."""
    clip_low: Annotated[float, Field(gt=0)] = 0.2
    """ppo_clip: lower distance of the probability ratio from 1."""
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    """ppo_clip: upper distance of the probability ratio from 1."""
    tv_threshold: Annotated[float, Field(gt=0)] = 0.2
    """dppo_tv: a token whose probability moved further than this in its advantage's direction is masked."""
    kl_coefficient: Annotated[float, Field(ge=0)] = 1e-3
    """dppo_tv: weight of the squared log-ratio to the rollout policy."""
    entropy_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus."""
    tis_cap: Annotated[float, Field(gt=0)] | None = None
    """Truncated importance sampling: the loss is multiplied by min(pi_old / pi_rollout, cap). None: off."""


class TrainerConfig(Section):
    """The Megatron-core trainer."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    """Adam's step size at its highest."""
    lr_warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of reinforcement learning over which the learning rate rises from 0."""
    lr_decay: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls until `run.steps`."""
    lr_min_ratio: Probability = 0.1
    """Where the decay ends, as a share of `learning_rate`."""
    adam_beta1: Probability = 0.9
    """Decay of Adam's first moment."""
    adam_beta2: Probability = 0.95
    """Decay of Adam's second moment."""
    adam_eps: Annotated[float, Field(gt=0)] = 1e-8
    """Adam's epsilon."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay, on matrices only."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are scaled down to this norm."""
    tokens_per_microbatch: Positive = 8192
    """Token budget of one forward and backward pass."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and activations."""
    router_replay: bool = True
    """Send tokens to the experts that the policy server used (MoE models)."""
    threads: Positive = 1
    """CPU threads."""
    checkpoint_every: Positive = 25
    """Steps between checkpoints; the last step always writes one."""
    keep_checkpoints: Positive = 2
    """Older checkpoints are removed."""


class ServerConfig(Section):
    """The vLLM policy servers."""

    count: Positive = 1
    """Server processes."""
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
    """Episodes that one worker plays at once."""


class CoordinatorConfig(Section):
    """Deadlines and retries."""

    max_retries: Annotated[int, Field(ge=0)] = 3
    """Times an episode is issued again after its worker died or its play failed, before it is given up."""
    heartbeat_interval: Seconds = 1.0
    """Seconds between heartbeats."""
    heartbeat_timeout: Seconds = 20.0
    """Seconds of silence after which a process counts as dead."""
    start_timeout: Seconds = 180.0
    """Seconds that a process may take to say hello."""
    step_timeout: Seconds = 600.0
    """Seconds that an optimizer step, a weight update or a batch of episodes may take."""
    max_restarts: Annotated[int, Field(ge=0)] = 5
    """Restarts of one process before the run ends."""


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


class Config(Section):
    """All settings of a run."""

    run: RunConfig = RunConfig()
    env: EnvConfig
    policies: dict[str, PolicyConfig]
    """Policies by name."""
    policies_to_train: list[str] = ["learner"]
    """Names of the policies that are trained; one for now."""
    policy_mapping: dict[str, str] = {}
    """Agent to policy; agents that are not named play the first of `policies_to_train`."""
    sampling: SamplingConfig = SamplingConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    server: ServerConfig = ServerConfig()
    workers: WorkersConfig = WorkersConfig()
    coordinator: CoordinatorConfig = CoordinatorConfig()
    warmup: WarmupConfig = WarmupConfig()
    tensorboard: TensorBoardConfig = TensorBoardConfig()

    @model_validator(mode="after")
    def _cross_checks(self) -> "Config":
        if len(self.policies_to_train) != 1:
            raise ValueError(f"policies_to_train = {self.policies_to_train}: name exactly one policy")
        learner = self.policies.get(self.learner)
        if learner is None or learner.model is None:
            raise ValueError(f"policies_to_train names {self.learner!r}; set policies.{self.learner}.model")
        for agent, policy in self.policy_mapping.items():
            if policy not in self.policies:
                raise ValueError(
                    f"policy_mapping.{agent} = {policy!r}; known policies: {sorted(self.policies)}"
                )
            if policy != self.learner and self.policies[policy].model is not None:
                raise ValueError(f"policies.{policy} has a model but is not in policies_to_train")
        if self.rollout.group_size < 2 and self.algorithm.advantage != "turn_batch_mean" and self.run.steps:
            raise ValueError(
                f"algorithm.advantage = {self.algorithm.advantage!r} compares the members of a group; "
                "set rollout.group_size >= 2"
            )
        sampling = self.sampling
        if self.run.steps and (sampling.temperature == 0 or sampling.top_p < 1 or sampling.top_k > 0):
            raise ValueError(
                "the trainer compares log-probabilities over the whole vocabulary; for training set "
                "sampling.temperature > 0, sampling.top_p = 1 and sampling.top_k = 0"
            )
        if self.sampling.max_tokens >= self.server.max_model_len:
            raise ValueError(
                f"sampling.max_tokens = {self.sampling.max_tokens} leaves no room for a prompt in "
                f"server.max_model_len = {self.server.max_model_len}"
            )
        return self

    @property
    def learner(self) -> str:
        """The name of the policy that is trained."""
        return self.policies_to_train[0]

    @property
    def model(self) -> Path:
        """The folder of the model that is trained."""
        return Path(self.policies[self.learner].model or "")

    @property
    def run_dir(self) -> Path:
        """The run's directory."""
        return Path(self.run.dir) / self.run.name

    @property
    def episodes_per_step(self) -> int:
        """Episodes in the batch of a step."""
        return self.rollout.tasks_per_step * self.rollout.group_size


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML (or resolved JSON) file and apply `section.key=value` overrides, whose values are TOML.

    Raises:
        ConfigError: the file is missing or malformed, a key is unknown (with the nearest right one) or a value
            is wrong.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file: {error}") from error
    try:
        tables = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not valid {path.suffix.lstrip('.').upper()}: {error}") from error
    for override in overrides:
        _apply(tables, override)
    try:
        return Config.model_validate(tables)
    except ValidationError as error:
        raise ConfigError("\n".join([f"{path}:", *(f"  {line}" for line in _explain(error))])) from error


def save_config(config: Config, path: Path) -> None:
    """Write the resolved settings as JSON."""
    path.write_text(config.model_dump_json(indent=2) + "\n")


def _apply(tables: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"override {override!r} is not of the form section.key=value, as in run.steps=20")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value  # bare words are strings: run.name=first
    for part in parts[:-1]:
        tables = tables.setdefault(part, {})
        if not isinstance(tables, dict):
            raise ConfigError(f"override {override!r}: {part!r} is a value, not a section")
    tables[parts[-1]] = parsed


def _explain(error: ValidationError) -> Iterator[str]:
    for problem in error.errors():
        place = [str(part) for part in problem["loc"]]
        if problem["type"] == "extra_forbidden":
            known = _fields_at(place[:-1])
            near = difflib.get_close_matches(place[-1], known, n=1) or difflib.get_close_matches(
                place[-1], [name for name, _ in all_keys()], n=1
            )
            known_keys = ", ".join(sorted(known))
            hint = f"did you mean {near[0]!r}?" if near else f"known here: {known_keys}"
            yield f"unknown key {'.'.join(place)!r}; {hint}"
        elif problem["type"] == "missing":
            yield f"{'.'.join(place)} is required and was not given"
        else:
            message = problem["msg"].removeprefix("Value error, ")
            found = f" (found {problem['input']!r:.60})" if not isinstance(problem["input"], Mapping) else ""
            yield f"{'.'.join(place) + ': ' if place else ''}{message}{found}"


def _fields_at(place: Sequence[str]) -> list[str]:
    section: type[BaseModel] = Config
    for part in place:
        field = section.model_fields.get(part)
        if field is None:  # a name inside a dict, as in policies.learner
            continue
        options = [field.annotation, *get_args(field.annotation)]
        inner = [o for o in options if isinstance(o, type) and issubclass(o, BaseModel)]
        if not inner:
            return []
        section = inner[0]
    return list(section.model_fields)


def all_keys() -> Iterator[tuple[str, Any]]:
    """Yield every dotted key of the configuration with its pydantic field, for the reference in the README."""
    for name, field in Config.model_fields.items():
        options = [field.annotation, *get_args(field.annotation)]
        inner = [o for o in options if isinstance(o, type) and issubclass(o, Section)]
        if not inner:
            yield name, field
            continue
        prefix = f"{name}.NAME" if field.annotation not in inner else name
        for key, part in inner[0].model_fields.items():
            yield f"{prefix}.{key}", part
