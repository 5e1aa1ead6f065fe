"""How far the trainer is from the policy server in bfloat16, with the experts that the server chose and without.

    python scripts/bench/mismatch.py CONFIG [--checkpoint RUN | --model FOLDER [--noise 0.2]] [--episodes 64]
        [section.key=value ...]

A policy server in bfloat16 plays episodes of the configuration (`agentgym eval`); the trainer, in bfloat16 as well,
computes the log-probabilities of their tokens with the same weights, once with the recorded routes and once with those
of its own routers. Printed are means over the sampled tokens: the KL divergence to the server by the estimators k3 and
k1, the largest and the mean |difference|, and the share of the tokens that are further away than a factor of 1.1.
"""

import argparse
import logging
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from agentgym.batch import Sample, pack_microbatches
from agentgym.episode import Trajectory
from agentgym.episode_json import EpisodeFile, read_episodes

TOKENS_PER_MICROBATCH = 2048


def play(arguments: argparse.Namespace, out: Path) -> EpisodeFile:
    """Play the episodes and read them."""
    players = ["--checkpoint", str(arguments.checkpoint)] if arguments.checkpoint else []
    settings = ["server.dtype=bfloat16", *arguments.settings]
    if arguments.model:
        settings.append(f"policies.learner.model={arguments.model}")
    command = [sys.executable, "-m", "agentgym", "eval", str(arguments.config), *players]
    episodes = ["--episodes", str(arguments.episodes), "--out", str(out)]
    subprocess.run([*command, *episodes, *settings], check=True, stdout=subprocess.DEVNULL)
    return read_episodes(out)


def with_noise(model: Path, folder: Path, scale: float) -> Path:
    """Copy a model, with noise on the matrices of its experts: `scale` times their standard deviation."""
    shutil.copytree(model, folder)
    generator = torch.Generator().manual_seed(0)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if ".experts." in name:
                noise = torch.randn(tensor.shape, generator=generator)
                tensors[name] = (tensor + scale * tensor.float().std() * noise).to(tensor.dtype)
        save_file(tensors, path, {"format": "pt"})
    return folder


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
def differences(
    model: Path, samples: Sequence[Sample], temperature: float, *, replayed: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield log-probabilities [N] of the trainer and of the server, a microbatch at a time."""
    from agentgym_trainers.megatron import parallel
    from agentgym_trainers.megatron.convert import load_hf, read_safetensors
    from agentgym_trainers.megatron.microbatch import build_microbatch
    from agentgym_trainers.megatron.model import build_model, read_config
    from agentgym_trainers.megatron.replay import ReplayController
    from agentgym_trainers.megatron.step import forward

    trained = build_model(read_config(model), torch.bfloat16, parallel.device())
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

    found = {
        estimator: values.double().mean().item() for estimator, values in kl_to_rollout(ours, rollout).items()
    }
    apart = (ours - rollout).abs()
    print(
        f"{name:15} k3 {found['kl_rollout']:.3e}, k1 {found['kl_rollout_k1']:+.2e}, |difference| mean "
        f"{apart.mean():.2e} and at most {apart.max():.2e}, beyond a factor of 1.1 "
        f"{(apart > np.log(1.1)).double().mean():.2%}",
        flush=True,
    )
    return found["kl_rollout"]


def measure(arguments: argparse.Namespace, out: Path) -> None:
    """Play, compute twice, print."""
    played = play(arguments, out)
    trajectories = [t for record in played.records for t in record.episode.trajectories]
    samples = [sample_of(trajectory) for trajectory in trajectories if trajectory.loss_mask.any()]
    config = played.header["config"]
    model, temperature = Path(config["policies"]["learner"]["model"]), config["sampling"]["temperature"]
    torch.set_num_threads(1)
    from agentgym_trainers.megatron import parallel

    with parallel.single_process(seed=0):
        print(
            f"{model}: {sum(int(s.sampled.sum()) for s in samples)} sampled tokens of {len(samples)} samples"
        )
        divergence = {}
        for name, replayed in (("replayed routes", True), ("its own routes", False)):
            ours, rollout = zip(*differences(model, samples, temperature, replayed=replayed), strict=True)
            divergence[replayed] = report(name, torch.cat(ours), torch.cat(rollout))
    print(f"k3 without replay over k3 with it: {divergence[False] / divergence[True]:.1f}")


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--checkpoint", type=Path, help="a run whose last checkpoint plays")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder that plays")
    parser.add_argument(
        "--noise", type=float, help="of --model's experts; those of an upcycled model are alike"
    )
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("settings", nargs="*", help="section.key=value")
    arguments = parser.parse_intermixed_args()
    logging.captureWarnings(True)
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.noise:
            arguments.model = with_noise(arguments.model, Path(scratch) / "model", arguments.noise)
        measure(arguments, Path(scratch) / "episodes.jsonl")


if __name__ == "__main__":
    main()
