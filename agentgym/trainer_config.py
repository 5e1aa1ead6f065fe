"""The `[trainer]` section of the settings: the optimizer, and how ranks divide the work."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from agentgym.section import Positive, Probability, Section


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
    router_replay: Literal["rollout", "trainer", "off"] = "rollout"
    """MoE models: which experts a token meets. rollout: those that the policy server used (R3); trainer: in all
    `algorithm.updates` on a batch those that the trainer's own router chose in the first (R2); off: those that it
    chooses each time."""
    replay_max_age: Annotated[int, Field(ge=0)] | None = None
    """Versions that the routes of a token may be old; tokens with older ones are left to the trainer's own router.
    None: any age."""
    recompute: bool = False
    """Keep only the inputs of the layers, and compute the rest again in the backward pass: less memory, more time."""
    lora_rank: Annotated[int, Field(ge=0)] = 0
    """Rank of the low-rank adapters that are trained in place of the weights; 0: all weights are trained."""
    lora_alpha: Annotated[float, Field(gt=0)] = 32.0
    """What the adapters' products are multiplied by, over `lora_rank`."""
    lora_layers: Annotated[tuple[Literal["attention", "mlp"], ...], Field(min_length=1)] = (
        "attention",
        "mlp",
    )
    """Whose matrices have adapters: the attention's, and those of the experts, or of a dense model's MLP."""
    nproc: Positive = 1
    """Processes of the trainer, each with a GPU if there are any; what `tp * pp` leaves of them is data-parallel."""
    tp: Positive = 1
    """Tensor parallelism: ranks that divide each matrix, and the tokens between the matrices."""
    pp: Positive = 1
    """Pipeline parallelism: ranks that divide the layers, and pass microbatches on."""
    ep: Positive = 1
    """Expert parallelism: ranks that divide the experts, and send each other their tokens."""
    etp: Positive | None = None
    """Ranks that divide each matrix of an expert; None: `tp`."""
    threads: Positive = 1
    """CPU threads, of each process."""
    checkpoint_every: Positive = 25
    """Steps between checkpoints; the last step always writes one."""
    keep_checkpoints: Positive = 2
    """Older checkpoints are removed."""

    @model_validator(mode="after")
    def _divides(self) -> "TrainerConfig":
        if self.nproc % (self.tp * self.pp):
            raise ValueError(
                f"nproc = {self.nproc} is not a multiple of tp * pp = {self.tp * self.pp}; start more processes"
            )
        if self.nproc // self.pp % (self.ep * self.expert_tp):
            raise ValueError(
                f"nproc / pp = {self.nproc // self.pp} is not a multiple of ep * etp = {self.ep * self.expert_tp}"
            )
        if self.ep == 1 and self.expert_tp != self.tp:
            raise ValueError(
                f"etp = {self.etp} and tp = {self.tp} differ although ep = 1: megatron-core would not sum the experts' "
                "gradients; leave etp out, or set ep > 1"
            )
        return self

    @property
    def lora_scale(self) -> float:
        """What the product of an adapter's matrices is multiplied by."""
        return self.lora_alpha / max(self.lora_rank, 1)

    @property
    def expert_tp(self) -> int:
        """Ranks that divide each matrix of an expert."""
        return self.tp if self.etp is None else self.etp

    @property
    def dp(self) -> int:
        """Ranks, or groups of `tp * pp` ranks, that divide the batch."""
        return self.nproc // (self.tp * self.pp)
