"""The settings of the table `algorithm`: what answers were worth, and the loss."""

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from agentgym.section import Positive, Probability, Section

ACROSS_GROUPS = ("turn_batch_mean", "rae")
"""Advantages that do not compare the members of a group with each other."""

CLIPS = {"ppo_clip": (0.2, 0.28), "decoupled_ppo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "cispo": (1.0, 0.28)}
"""The losses with a clipped ratio, and how far from 1 they let it be below and above where the settings do not
say."""

CORRECTED = ("ppo_clip", "gspo", "cispo", "reinforce")
"""The losses that `correction` goes with; the others have their ratio to the rollout policy inside."""

AboveZero = Annotated[float, Field(gt=0)]
Weight = Annotated[float, Field(ge=0)]


class AlgorithmConfig(Section):
    """Advantages and loss."""

    advantage: Literal[
        "group_mean",
        "group_mean_std",
        "leave_one_out",
        "dr_mas",
        "turn_group_mean",
        "turn_group_mean_std",
        "turn_batch_mean",
        "at_grpo",
        "magrpo",
        "rae",
    ] = "group_mean"
    """A function of `agentgym.advantages`. group_*, leave_one_out, dr_mas: whole plays of an agent compared in their
    group; turn_*: turns by their reward-to-go, turn_batch_mean in all groups of a step with the same players;
    at_grpo, magrpo: turns of a team; rae: plays against a running mean."""
    discount: Probability = 1.0
    """turn_*, at_grpo, magrpo: what a reward one turn later counts."""
    team_weight: Weight = 1.0
    """at_grpo: what the mean reward of the agents counts beside an agent's own."""
    baseline_decay: Probability = 0.95
    """rae: what the running mean keeps of itself after each play."""
    overlong_buffer: Positive | None = None
    """Tokens below `sampling.max_tokens` from which on the reward of an answer falls, linearly, until it is lower by
    `overlong_penalty` at the limit. None: off."""
    overlong_penalty: Weight = 1.0
    """overlong_buffer: what an answer of `sampling.max_tokens` loses."""
    normalize_batch: bool = True
    """Divide the advantages of a step by their standard deviation over the step."""
    loss_mean: Literal["token", "sequence", "constant", "agent"] = "token"
    """The loss of a step is the mean over its trained tokens (token); over its samples of the mean over their
    tokens (sequence) or of their sum divided by `loss_length` (constant); over its agents of the mean over their
    tokens, so that a talkative agent does not dominate (agent)."""
    loss_length: Positive | None = None
    """loss_mean "constant": the tokens that a sum is divided by, the same for short and long samples."""
    loss: Literal["dppo_tv", "ppo_clip", "gspo", "cispo", "decoupled_ppo", "reinforce", "topr"] = "dppo_tv"
    """A name in `agentgym_trainers.losses.menu`."""
    updates: Positive = 2
    """Optimizer updates per batch, each over the whole batch."""
    clip_low: AboveZero | None = None
    """ppo_clip, decoupled_ppo, gspo, cispo: lower distance of the probability ratio from 1. None: 0.2; gspo 3e-4;
    cispo 1, which is no limit."""
    clip_high: AboveZero | None = None
    """ppo_clip, decoupled_ppo, gspo, cispo: upper distance of the probability ratio from 1. None: 0.28; gspo 4e-4."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """ppo_clip, decoupled_ppo: a token with a negative advantage counts as if its ratio were at most this. None:
    off."""
    tv_threshold: AboveZero = 0.2
    """dppo_tv: a token whose probability moved further than this in its advantage's direction is masked."""
    kl_coefficient: Weight = 1e-3
    """dppo_tv: weight of the squared log-ratio to the rollout policy."""
    correction: Literal["none", "tis", "mis", "icepop"] = "none"
    """ppo_clip, gspo, cispo, reinforce: what the loss is multiplied by for the difference of the two engines, rho =
    pi_old / pi_rollout. tis: min(rho, high); mis: 1 for rho in [low, high], else 0; icepop: rho there, else 0.
    none: 1, and the rollout policy stands for the old one in the loss's own ratio."""
    correction_level: Literal["token", "sequence", "geometric"] = "token"
    """rho of a token; of a whole sample, as the product over its trained tokens; or as their geometric mean."""
    correction_low: Weight = 0.5
    """mis, icepop: the lower bound. Published: 0.5, geometric 0.99."""
    correction_high: AboveZero = 2.0
    """The upper bound. Published: 2 (tis, mis), 5 (icepop), geometric 1.01."""
    entropy_coefficient: Weight = 0.0
    """Weight of the entropy bonus, which is over the whole vocabulary, with the answers that an environment refuses."""
    kl_reference_coefficient: Weight = 0.0
    """Weight of the KL to the reference: the policy that reinforcement learning began with, which the trainer keeps as
    a second model in its memory. 0: there is none."""
    kl_reference_estimator: Literal["k1", "k2", "k3"] = "k3"
    """With x = log(pi / pi_reference): x, x^2 / 2, or exp(-x) - 1 + x."""
    kl_reference_in: Literal["loss", "reward"] = "loss"
    """loss: added to that of each token. reward: subtracted from a token's advantage, after `normalize_batch`, summed
    over it and the later tokens of its sample."""
    kl_reference_weighted: bool = False
    """kl_reference_in "loss": multiply the estimate by pi_theta / pi_rollout, so that k1 and k3 have the gradient of
    the divergence (DeepSeek-V3.2)."""

    @model_validator(mode="after")
    def _combinations(self) -> "AlgorithmConfig":
        loss = self.loss
        if self.correction != "none" and loss not in CORRECTED:
            raise ValueError(
                f"correction = {self.correction!r} does not go with loss = {loss!r}, whose ratio is to the rollout "
                f"policy already; it goes with {', '.join(CORRECTED)}"
            )
        if self.correction_low >= self.correction_high:
            raise ValueError(
                f"correction_low = {self.correction_low:g} is not below correction_high = {self.correction_high:g}"
            )
        if (self.clip_low, self.clip_high) != (None, None) and loss not in CLIPS:
            raise ValueError(f"clip_low and clip_high go with {', '.join(CLIPS)}, not with loss = {loss!r}")
        if self.dual_clip is not None and loss not in ("ppo_clip", "decoupled_ppo"):
            raise ValueError(f"dual_clip goes with ppo_clip and decoupled_ppo, not with loss = {loss!r}")
        if (self.loss_mean == "constant") != (self.loss_length is not None):
            raise ValueError("loss_mean = 'constant' and loss_length go together; give both or neither")
        if self.kl_reference_coefficient > 0:
            self._check_reference()
        return self

    def _check_reference(self) -> None:
        if self.kl_reference_in == "reward" and self.kl_reference_weighted:
            raise ValueError(
                "kl_reference_weighted goes with kl_reference_in = 'loss'; a reward has no gradient"
            )
        if (
            self.kl_reference_in == "loss"
            and self.kl_reference_estimator == "k1"
            and not self.kl_reference_weighted
        ):
            raise ValueError(
                "kl_reference_estimator = 'k1' in the loss has a gradient whose mean is 0; set kl_reference_weighted "
                "= true, another estimator, or kl_reference_in = 'reward'"
            )

    @property
    def regularized(self) -> bool:
        """Whether tokens without an advantage are trained too."""
        return self.entropy_coefficient > 0 or self.kl_reference_coefficient > 0

    def clip_of(self, loss: str) -> tuple[float, float]:
        """Return how far the ratio of a loss may be from 1, below and above; infinities where it has no clip."""
        low, high = CLIPS.get(loss, (math.inf, math.inf))
        return (
            low if self.clip_low is None else self.clip_low,
            high if self.clip_high is None else self.clip_high,
        )
