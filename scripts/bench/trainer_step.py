"""How fast the trainer takes a step on one core: a microbatch of short sequences, tiny-moe, routes replayed.

    OMP_NUM_THREADS=1 python scripts/bench/trainer_step.py [--profile]

It prints CPU time, so that other work on the machine does not count; the first step pays for warm-up.
"""

import argparse
import logging
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.profiler import profile

from agentgym.algorithm_config import AlgorithmConfig
from agentgym.batch import Sample
from agentgym.tiny_model import init_model
from agentgym.trainer_config import TrainerConfig

TOKENS, SHORTEST, LONGEST, STEPS = 8192, 30, 90, 6


def sample_of(rng: np.random.Generator) -> Sample:
    """Make a sample whose second half was sampled, with random routes."""
    length = int(rng.integers(SHORTEST, LONGEST))
    mask = np.arange(length) >= length // 2
    routes = np.argsort(rng.random((length, 2, 8)), axis=-1)[..., :2].astype(np.uint8)
    routes[-1] = 255
    return Sample(
        tokens=rng.integers(0, 100, length).astype(np.int32),
        loss_mask=mask,
        logprobs=np.full(length, -4.6, np.float32),
        versions=np.zeros(length, np.int32),
        routes=routes,
        advantages=rng.normal(size=length).astype(np.float32),
        weights=np.full(length, 1e-4, np.float32),
        checksum=0,
        sampled=mask,
    )


def main() -> None:
    """Run the benchmark and print a line per step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    profiled = parser.parse_args().profile
    logging.captureWarnings(True)
    from agentgym_trainers.megatron import convert, model, parallel
    from agentgym_trainers.megatron.microbatch import build_microbatch
    from agentgym_trainers.megatron.optimizer import Optimizer
    from agentgym_trainers.megatron.replay import ReplayController
    from agentgym_trainers.megatron.step import StepSettings, train_step

    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    samples: list[Sample] = []
    while sum(len(sample.tokens) for sample in samples) < TOKENS - LONGEST:
        samples.append(sample_of(rng))
    with tempfile.TemporaryDirectory() as folder, parallel.single_process(seed=0):
        init_model(Path(folder) / "tiny")
        trained = model.build_model(
            model.read_config(Path(folder) / "tiny"), torch.float32, parallel.device()
        )
        convert.load_hf(trained, convert.read_safetensors(Path(folder) / "tiny"))
        replay, optimizer = ReplayController(trained), Optimizer(trained, TrainerConfig())
        packed = [build_microbatch(samples, 0, replay, parallel.device())]
        tokens = packed[0].tokens.numel()
        print(f"{len(samples)} sequences, {tokens} tokens")

        def step() -> float:
            started = time.process_time()
            settings = StepSettings("dppo_tv", 1e-3, 1)
            train_step(trained, optimizer, replay, packed, settings, AlgorithmConfig(), 1.0)
            return time.process_time() - started

        for _ in range(STEPS):
            seconds = step()
            print(f"{seconds:.3f} s CPU, {tokens / seconds:,.0f} tokens/s")
        if profiled:
            with profile() as recorded:
                step()
            print(recorded.key_averages().table(sort_by="self_cpu_time_total", row_limit=20))


if __name__ == "__main__":
    main()
