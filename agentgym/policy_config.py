"""The settings of the policies, and who plays whom: the tables `policies` and `policy_mapping`."""

from collections.abc import Collection, Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from agentgym.section import Positive, Probability, Section

PolicyName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=60)]
"""No "@": the records call a snapshot "pool@version"."""
Choice = str | dict[str, Probability]
"""One policy, or several with their probabilities."""


class PolicyConfig(Section):
    """One policy of one kind: a model, a scripted policy, a pool of snapshots, or an endpoint."""

    model: str | None = None
    """A local Hugging Face folder that vLLM serves; frozen, unless `policies_to_train` names the policy. With
    `endpoint`: the model's name there."""
    history: Literal["strip", "keep"] = "strip"
    """model, pool: what becomes of the thinking in earlier answers that the chat template leaves out (Qwen 3). strip:
    it is left out, and the conversation goes on in a new branch; keep: it stays, and the branch goes on."""
    scripted: str | None = None
    """A scripted policy's name in the environment ("random", "expert"), or "module:Class"."""
    pool: str | None = None
    """The name of a trained policy, whose earlier weights are played: one snapshot for each round of
    `rollout.tasks_per_step` groups."""
    every: Positive = 20
    """pool: versions from one snapshot to the next."""
    keep: Positive = 8
    """pool: snapshots that are kept; with another one the oldest is removed."""
    sample: Literal["uniform", "latest", "win_rate"] = "uniform"
    """pool: how the snapshot of a round is drawn. win_rate: those that the trained policy loses to more often, by the
    square of its losing rate."""
    endpoint: str | None = Field(default=None, pattern=r"^https?://.")
    """The base URL of an OpenAI-compatible server of chat completions, as in "http://127.0.0.1:8001/v1"."""
    api_key_env: str | None = None
    """endpoint: the environment variable that holds the API key."""

    @property
    def kind(self) -> Literal["model", "scripted", "pool", "endpoint"]:
        """What the policy is."""
        if self.endpoint is not None:
            return "endpoint"
        return "pool" if self.pool is not None else "scripted" if self.scripted is not None else "model"

    @model_validator(mode="after")
    def _one_kind(self) -> "PolicyConfig":
        given = [key for key in ("scripted", "pool", "endpoint") if getattr(self, key) is not None]
        if self.model is not None and self.endpoint is None:
            given.append("model")
        if len(given) != 1:
            raise ValueError(
                "give exactly one of `model`, `scripted`, `pool` and `endpoint`"
                + (f", not {' and '.join(sorted(given))}" if given else "")
            )
        if self.endpoint is not None and self.model is None:
            raise ValueError("with `endpoint` say in `model` which of its models to ask")
        for owners, keys in (
            (("pool",), ("every", "keep", "sample")),
            (("endpoint",), ("api_key_env",)),
            (("model", "pool"), ("history",)),
        ):
            for key in keys:
                if self.kind not in owners and getattr(self, key) != type(self).model_fields[key].default:
                    raise ValueError(
                        f"`{key}` goes with `{'` or `'.join(owners)}`; this policy is of the kind `{self.kind}`"
                    )
        return self


def weights_of(choice: Choice) -> dict[str, float]:
    """Return the policies of a choice with their probabilities."""
    return {choice: 1.0} if isinstance(choice, str) else choice


def check_mapping(
    mapping: Mapping[str, Choice], policies: Collection[str], *, key: str = "policy_mapping"
) -> None:
    """Raise ValueError where a mapping names an unknown policy, or its probabilities do not sum to 1."""
    for agent, choice in mapping.items():
        weights = weights_of(choice)
        for policy in weights:
            if policy not in policies:
                raise ValueError(f"{key}.{agent} = {policy!r}; known policies: {sorted(policies)}")
        if abs(sum(weights.values()) - 1.0) > 1e-6:
            raise ValueError(f"the probabilities of {key}.{agent} sum to {sum(weights.values()):g}, not to 1")
