"""One optimizer step of the trainer, against a bare megatron-core loop, itself without replay, and TRL's GRPO step.

    OMP_NUM_THREADS=1 python scripts/bench/trainer_step.py [--rounds 9] [--model FOLDER] [--trl FOLDER] [--profile]

All take a step on the same sequences (half of each is sampled, lengths are uniform in 30 to 90), with one model, loss,
clipping and AdamW, on one core. They take turns; the ratios are of the CPU times of one round, so that other work on
the machine does not count, and the medians are printed.

ours      `Trainer.train` of a batch message: checksums, packing, routes checked and replayed, loss, metrics, update
native    the same without router replay
bare      forward, the loss, backward, clip and AdamW on the packed tensors, with megatron-core alone
trl       `GRPOTrainer.training_step` on the padded sequences, clip and AdamW; the sequences of a pass have similar
          lengths, and passes of 8, 32 and all sequences are tried in turn: the fastest one counts

TRL is not part of the environment; without it that line is left out. It is put into a folder of its own by

    pip install --target FOLDER/site-packages --no-deps trl accelerate datasets pyarrow multiprocess xxhash

(datasets tells by this name what is installed and what is the user's).
"""

import argparse
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import profile

from agentgym.batch import Sample, concatenate, sums
from agentgym.config import Config
from agentgym.episode import no_route, recorded_checksum
from agentgym.protocol import BatchHeader
from agentgym.tiny_model import init_model

SHORTEST, LONGEST = 30, 90
LEARNING_RATE, MAX_NORM = 1e-3, 1.0
TRL_PASSES = (8, 32, 0)
Step = Callable[[], None]


def sample_of(rng: np.random.Generator, vocabulary: int, routes: tuple[int, int, int]) -> Sample:
    """Make a sample whose second half was sampled; `routes`: layers, experts, experts per token (0: none)."""
    length = int(rng.integers(SHORTEST, LONGEST))
    sampled = np.arange(length) >= length // 2
    layers, experts, topk = routes
    chosen = np.argsort(rng.random((length, layers, experts)), axis=-1)[..., :topk].astype(np.uint8)
    chosen[-1] = no_route(chosen.dtype)
    arrays: dict[str, Any] = {
        "tokens": rng.integers(0, vocabulary, length).astype(np.int32),
        "sampled": sampled,
        "logprobs": np.where(sampled, -np.log(vocabulary), 0).astype(np.float32),
        "versions": np.where(sampled, 0, -1).astype(np.int32),
        "routes": chosen if topk else None,
    }
    return Sample(
        loss_mask=sampled,
        advantages=np.where(sampled, rng.normal(), 0).astype(np.float32),
        weights=np.where(sampled, 1e-4, 0).astype(np.float32),
        checksum=recorded_checksum(*arrays.values()),
        **arrays,
    )


def samples_of(fields: dict[str, Any], tokens: int) -> list[Sample]:
    """Make samples of about so many tokens for the model with this config.json."""
    experts = fields.get("num_experts") or fields.get("num_local_experts") or 0
    routes = (fields["num_hidden_layers"], experts, fields["num_experts_per_tok"] if experts else 0)
    rng, samples = np.random.default_rng(0), list[Sample]()
    while sum(len(sample.tokens) for sample in samples) < tokens - LONGEST:
        samples.append(sample_of(rng, fields["vocab_size"], routes))
    return samples


def ours(model: Path, scratch: Path, samples: Sequence[Sample], *, replay: bool) -> Step:
    """Return the step of the trainer, from the batch message on."""
    from agentgym_trainers.megatron.trainer import Trainer

    settings = {
        "env": {"id": "bench"},
        "policies": {"learner": {"model": str(model)}},
        "trainer": {"router_replay": "rollout" if replay else "off", "max_grad_norm": MAX_NORM},
        "algorithm": {"loss": "ppo_clip"},
    }
    trainer = Trainer(
        Config.model_validate(settings), policy="learner", exchange=scratch, checkpoints=scratch
    )
    arrays = {name: array for name, array in concatenate(samples).items() if array is not None}
    made = sums(arrays)  # by the coordinator, as the checksums by the workers

    def step() -> None:
        header = BatchHeader(
            step=trainer.step + 1,
            loss="ppo_clip",
            learning_rate=LEARNING_RATE,
            updates=1,
            lengths=[len(sample.tokens) for sample in samples],
            checksums=[sample.checksum for sample in samples],
            sums=made,
            microbatches=[list(range(len(samples)))],
            publish=False,
            checkpoint=False,
        )
        trainer.train(header, arrays)

    return step


def bare(folder: Path, samples: Sequence[Sample]) -> Step:
    """Return the step that nothing can be left out of; its tensors were packed before."""
    from agentgym_trainers.megatron import convert, model, parallel
    from agentgym_trainers.megatron.microbatch import build_microbatch
    from agentgym_trainers.megatron.predictions import words_of

    gpt = model.build_model(model.read_config(folder), torch.float32, parallel.device())
    convert.load_hf(gpt, convert.read_safetensors(folder))
    adam = torch.optim.AdamW(gpt.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    packed = build_microbatch(samples, 0, None, parallel.device())

    def step() -> None:
        adam.zero_grad()
        hidden = gpt(packed.tokens, packed.positions, None, packed_seq_params=packed.sequences)[:, 0]
        logits = hidden @ words_of(gpt).T  # of all tokens, as megatron-core makes them
        logprobs = logits[packed.rows].log_softmax(-1).gather(1, packed.targets[:, None])[:, 0]
        ratio = (logprobs - packed.rollout).exp()
        gain = torch.minimum(ratio * packed.advantages, ratio.clamp(0.8, 1.2) * packed.advantages)
        (-gain * packed.weights).sum().backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), MAX_NORM)
        adam.step()

    return step


def trl(folder: Path, scratch: Path, samples: Sequence[Sample], in_a_pass: int) -> Step:
    """Return TRL's step; its first half of a sequence is the prompt."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    class Prepared(GRPOTrainer):  # type: ignore[misc]
        def _prepare_inputs(self, generation_batch: Any) -> Any:
            return generation_batch  # which is what was generated

    in_a_pass = in_a_pass or len(samples)
    trainer = Prepared(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0 for _ in completions],
        args=GRPOConfig(
            str(scratch / "trl"), use_cpu=True, bf16=False, report_to=[], beta=0.0, num_generations=2,
            per_device_train_batch_size=in_a_pass + in_a_pass % 2, gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["?"]}),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )  # fmt: skip
    adam = torch.optim.AdamW(
        trainer.model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0
    )
    ordered = sorted(samples, key=lambda sample: len(sample.tokens))
    passes = [ordered[start : start + in_a_pass] for start in range(0, len(ordered), in_a_pass)]
    trainer.current_gradient_accumulation_steps = len(passes)
    total = torch.tensor(sum(int(sample.sampled.sum()) for sample in samples))
    inputs = [{**_padded(part), "num_items_in_batch": total} for part in passes]

    def step() -> None:
        trainer.model.train()
        for part in inputs:
            trainer.training_step(trainer.model, part, None)
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), MAX_NORM)
        adam.step()
        adam.zero_grad()

    return step


def _padded(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """Return prompts, padded on the left, and completions, padded on the right, as TRL makes them."""
    prompts = [torch.from_numpy(sample.tokens[~sample.sampled]).long() for sample in samples]
    completions = [torch.from_numpy(sample.tokens[sample.sampled]).long() for sample in samples]
    logprobs = [torch.from_numpy(sample.logprobs[sample.sampled]) for sample in samples]

    def pad(rows: list[torch.Tensor], side: str = "right") -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side=side)

    return {
        "prompt_ids": pad(prompts, "left"),
        "prompt_mask": pad([torch.ones_like(prompt) for prompt in prompts], "left"),
        "completion_ids": pad(completions),
        "completion_mask": pad([torch.ones_like(completion) for completion in completions]),
        "old_per_token_logps": pad(logprobs),
        "advantages": torch.tensor([float(sample.advantages[-1]) for sample in samples]),
    }


def measure(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds of each step in each round; a first round, which pays for warm-up, does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            started = time.process_time()
            step()
            if number:
                seconds[name].append(time.process_time() - started)
        if number:
            times = ", ".join(f"{name} {taken[-1]:.3f}" for name, taken in seconds.items())
            print(f"round {number}, seconds: {times}", flush=True)
    return seconds


def report(seconds: dict[str, list[float]], tokens: int) -> None:
    """Print a line for each, with its speed and that of ours over its own."""
    peers = [name for name in seconds if name.startswith("trl")]
    fastest = min(peers, key=lambda name: statistics.median(seconds[name]), default=None)
    for name, times in seconds.items():
        ratios = [theirs / mine for theirs, mine in zip(times, seconds["ours"], strict=True)]
        mark = "  <- the fastest" if name == fastest and len(peers) > 1 else ""
        print(
            f"{name:8} {tokens / statistics.median(times):8,.0f} tokens/s; speed of ours over it "
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}){mark}"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=8192, help="of the batch, at most")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; by default a random tiny-moe")
    parser.add_argument("--trl", type=Path, help="the FOLDER that TRL was installed into")
    parser.add_argument("--profile", action="store_true", help="print where the time of our step goes")
    arguments = parser.parse_args()
    logging.captureWarnings(True)
    torch.set_num_threads(1)
    from agentgym_trainers.megatron import parallel
    from agentgym_trainers.megatron.model import read_config

    with tempfile.TemporaryDirectory() as folder, parallel.single_process(seed=0):
        scratch = Path(folder)
        model = arguments.model or scratch / "tiny-moe"
        if arguments.model is None:
            init_model(model)
        samples = samples_of(read_config(model), arguments.tokens)
        tokens = sum(len(sample.tokens) for sample in samples)
        print(f"{model.name}: {len(samples)} sequences, {tokens} tokens, float32, one thread", flush=True)
        steps = {"ours": ours(model, scratch, samples, replay=True), "bare": bare(model, samples)}
        if samples[0].routes is not None:
            steps["native"] = ours(model, scratch, samples, replay=False)
        if arguments.trl is None:
            print("trl      left out; --trl FOLDER names where it is installed")
        else:
            sys.path.append(str(arguments.trl / "site-packages"))
            for size in TRL_PASSES:
                steps[f"trl-{size or 'all'}"] = trl(model, scratch, samples, size)
        report(measure(steps, arguments.rounds), tokens)
        if arguments.profile:
            with profile() as recorded:
                steps["ours"]()
            print(recorded.key_averages().table(sort_by="self_cpu_time_total", row_limit=25))


if __name__ == "__main__":
    main()
