"""How far the trainer is from the policy server, with the experts that the server chose and without.

    python scripts/bench/mismatch.py RUN [RUN ...] [--dtype bfloat16] [--tokens 4000]

For each training run, the newest checkpoint is taken whose weights played episodes that the run still has. The trainer
computes the log-probabilities of their tokens with these weights, in the dtype that is given, once with the recorded
routes and once with those of its own routers. Printed are means over the sampled tokens: the KL divergence to the
policy server by the estimators k3 and k1, the mean and the largest |difference|; and how many tokens are apart by more
than a factor of 1.1. Conversations in which the weights changed are left out.
"""

import argparse
import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from agentgym.batch import Sample, pack_microbatches
from agentgym.config import Config
from agentgym.config_file import load_config
from agentgym.coordinator.store import stored_episodes
from agentgym.episode import Trajectory

TOKENS_PER_MICROBATCH = 2048


def of_one_version(run: Path, config: Config) -> dict[int, list[Trajectory]]:
    """Return what the trained policy said in the episodes of a run, by the version that said all of it."""
    found: dict[int, list[Trajectory]] = defaultdict(list)
    for stored in stored_episodes(run):
        for trajectory in stored.episode.trajectories:
            versions = set(trajectory.versions[trajectory.loss_mask].tolist())
            if trajectory.trainable and trajectory.policy == config.learner and len(versions) == 1:
                found[versions.pop()].append(trajectory)
    return found


def sample_of(trajectory: Trajectory) -> Sample:
    """Make a sample of all sampled tokens; what they were worth is of no interest."""
    nothing = np.zeros(len(trajectory.tokens), np.float32)
    return Sample(
        tokens=trajectory.tokens,
        loss_mask=trajectory.loss_mask,
        logprobs=trajectory.logprobs,
        versions=trajectory.versions,
        routes=trajectory.routes,
        advantages=nothing,
        weights=nothing,
        checksum=trajectory.checksum(),
        sampled=trajectory.loss_mask,
    )


@torch.no_grad()
def log_probabilities(
    model: Path, samples: Sequence[Sample], dtype: torch.dtype, temperature: float, *, replayed: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield those of the trainer and of the policy server [N], a microbatch at a time."""
    from agentgym_trainers.megatron import parallel
    from agentgym_trainers.megatron.convert import load_hf, read_safetensors
    from agentgym_trainers.megatron.microbatch import build_microbatch
    from agentgym_trainers.megatron.model import build_model, read_config
    from agentgym_trainers.megatron.replay import ReplayController
    from agentgym_trainers.megatron.step import forward

    trained = build_model(read_config(model), dtype, parallel.device())
    load_hf(trained, read_safetensors(model))
    replay = ReplayController(trained)
    for indices in pack_microbatches([len(sample.tokens) for sample in samples], TOKENS_PER_MICROBATCH):
        chosen = [samples[index] for index in indices]
        microbatch = build_microbatch(chosen, 0, replay if replayed else None, parallel.device())
        yield forward(trained, replay, microbatch, temperature)[0], microbatch.rollout
        replay.clear()


def report(name: str, ours: Tensor, rollout: Tensor) -> float:
    """Print a line and return the divergence."""
    from agentgym_trainers.losses.kl import kl_to_rollout

    kl = {estimator: values.double().mean() for estimator, values in kl_to_rollout(ours, rollout).items()}
    apart = (ours - rollout).abs()
    print(
        f"  {name:17} k3 {kl['kl_rollout']:.3e}, k1 {kl['kl_rollout_k1']:+.2e}, |difference| {apart.mean():.2e}, "
        f"at most {apart.max():.2e}; {int((apart > np.log(1.1)).sum())} tokens apart by more than 1.1",
        flush=True,
    )
    return kl["kl_rollout"].item()


def measure(run: Path, dtype: str, tokens: int) -> None:
    """Measure one run and print its lines."""
    from agentgym_trainers.megatron.trainer import DTYPES

    config = load_config(run / "config.json")
    played = of_one_version(run, config)
    kept = {int(path.name.removeprefix("step-")): path for path in (run / "checkpoints").glob("step-*")}
    version = max(played.keys() & kept.keys(), default=None)
    if version is None:
        print(f"{run}: none of the episodes that are left was played by a checkpoint that is left")
        return
    samples, sampled = [], 0
    for trajectory in played[version]:
        if sampled < tokens:
            samples.append(sample_of(trajectory))
            sampled += int(trajectory.loss_mask.sum())
    print(f"{run}, version {version}: {sampled} tokens, sampled in {config.server.dtype}, trainer in {dtype}")
    divergence = {}
    for name, replayed in (("replayed routes", True), ("the trainer's own", False)):
        pairs = log_probabilities(
            kept[version] / "model",
            samples,
            DTYPES[dtype],
            config.sampling.temperature or 1.0,
            replayed=replayed,
        )
        ours, rollout = zip(*pairs, strict=True)
        divergence[replayed] = report(name, torch.cat(ours), torch.cat(rollout))
    print(f"  without replay over with it: {divergence[False] / divergence[True]:.1f}", flush=True)


def main() -> None:
    """Measure all runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the trainer")
    parser.add_argument("--tokens", type=int, default=4000, help="sampled tokens of a run, about as many")
    arguments = parser.parse_args()
    logging.captureWarnings(True)
    torch.set_num_threads(1)
    from agentgym_trainers.megatron import parallel

    with parallel.single_process(seed=0):
        for run in arguments.runs:
            measure(run, arguments.dtype, arguments.tokens)


if __name__ == "__main__":
    main()
