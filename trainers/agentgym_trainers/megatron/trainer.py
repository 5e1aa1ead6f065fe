"""The trainer: a model, its optimizer, and what a batch message does to them. No sockets here."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from agentgym.adapters import adapter_metadata, check_base
from agentgym.batch import check_sums, share_of, split
from agentgym.config import Config
from agentgym.errors import IntegrityError, ModelError
from agentgym.protocol import BatchHeader, StepDone
from agentgym.weights import weights_file
from agentgym_trainers.megatron import checkpoint, parallel
from agentgym_trainers.megatron.convert import load_hf, read_safetensors
from agentgym_trainers.megatron.export import Stream, iter_hf, stream_hf, stream_trained
from agentgym_trainers.megatron.lora import load_adapters, reset_adapters
from agentgym_trainers.megatron.microbatch import build_microbatch
from agentgym_trainers.megatron.model import build_model, read_config
from agentgym_trainers.megatron.optimizer import Optimizer
from agentgym_trainers.megatron.reference import Reference
from agentgym_trainers.megatron.replay import FirstRoutes, ReplayController
from agentgym_trainers.megatron.step import Metrics, StepSettings, train_step

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Trainer:
    """Trains one model. The version of its weights is the number of steps that made them.

    On several ranks each has a part of it, all are given every batch, and all do the same at the same time; what is
    written, rank 0 writes. It lives inside of `parallel.process_groups`.
    """

    def __init__(
        self,
        config: Config,
        *,
        policy: str,
        exchange: Path,
        checkpoints: Path,
        resume: Path | None = None,
    ) -> None:
        """Load a policy's model, or go on from the folder of a checkpoint.

        Raises:
            ModelError: the model or the checkpoint cannot be used.
        """
        torch.set_num_threads(config.trainer.threads)
        self._config = config
        self._exchange = exchange
        self._checkpoints = checkpoints
        self.step = 0
        self._model_folder = config.model_of(policy)
        self._adapters = config.trainer.lora_rank > 0
        self._metadata: dict[str, str] = {}
        # Beside adapters the weights stay those of the run's model.
        folder = self._model_folder if resume is None or self._adapters else resume / checkpoint.MODEL
        self._device = parallel.device()
        self._dtype = DTYPES[config.trainer.dtype]
        self.model = build_model(read_config(folder), self._dtype, self._device, config.trainer)
        load_hf(self.model, read_safetensors(folder))
        if self._adapters:
            reset_adapters(self.model, config.run.seed)
            self._metadata = adapter_metadata(config.trainer.lora_scale, folder)
            if resume is not None:
                tensors = checkpoint.read_adapters(resume)
                check_base(resume / checkpoint.ADAPTERS, folder)
                load_adapters(self.model, tensors)
        self.replay = ReplayController(self.model)
        self.optimizer = Optimizer(self.model, config.trainer)
        self._reference: Reference | None = None
        if resume is not None:
            self.step, updates = checkpoint.read_progress(resume)
            self.optimizer.load(updates, checkpoint.read_optimizer(resume))
            checkpoint.restore_rng(resume)

    def train(self, header: BatchHeader, arrays: Mapping[str, NDArray[Any]]) -> StepDone:
        """Take the step of a batch message, publish and checkpoint as it asks, and return the answer.

        Raises:
            IntegrityError: the batch is not what its workers recorded, or of another step; nothing was
            trained. RunError: the gradient is not finite.
        """
        if header.step != self.step + 1:
            raise IntegrityError(f"got the batch of step {header.step} after step {self.step}")
        metrics = self._update(header, arrays)
        self.step = header.step
        weights = str(self.publish()) if header.publish else ""
        folder = str(self.save(header.state)) if header.checkpoint else ""
        return StepDone(step=self.step, metrics=metrics, weights=weights, checkpoint=folder)

    def publish(self) -> Path:
        """Write the weights of this version, or its adapters, into the exchange folder and return the file."""
        path = weights_file(self._exchange, self.step)
        checkpoint.write_weights(path, self._trained())
        return path

    def save(self, coordinator: Mapping[str, Any]) -> Path:
        """Write a checkpoint with the coordinator's state and return its folder."""
        return checkpoint.save_checkpoint(
            self._checkpoints,
            self.step,
            weights=stream_hf(self.model),
            adapters=self._trained() if self._adapters else None,
            optimizer=self.optimizer.stream(),
            updates=self.optimizer.steps,
            coordinator=coordinator,
            model_folder=self._model_folder,
            keep=self._config.trainer.keep_checkpoints,
        )

    def weights(self) -> dict[str, Tensor]:
        """Return the weights, with the adapters in them, with Hugging Face names on rank 0."""
        return dict(iter_hf(self.model))

    def _trained(self) -> Stream:
        """Return the adapters, or all weights where there are none."""
        return replace(stream_trained(self.model), metadata=self._metadata)

    def _update(self, header: BatchHeader, arrays: Mapping[str, NDArray[Any]]) -> Metrics:
        samples = split(dict(arrays), header.lengths, header.checksums)
        check_sums(arrays, header.sums)
        for number, sample in enumerate(samples):
            try:
                sample.verify()
            except IntegrityError as error:
                raise IntegrityError(f"sample {number} of step {header.step}: {error}") from error
        named = sorted(index for microbatch in header.microbatches for index in microbatch)
        if named != list(range(len(samples))):
            raise IntegrityError(
                f"the microbatches of step {header.step} name {named}, not each of {len(samples)} samples"
            )
        supervised = header.loss == "sft"
        settings = self._config.trainer
        microbatches = [
            build_microbatch(
                [samples[index] for index in indices],
                self.step,
                self.replay if settings.router_replay == "rollout" else None,
                self._device,
                max_age=settings.replay_max_age,
                multiple=settings.tp,
            )
            for indices in share_of(parallel.data_rank(), settings.dp, header.microbatches)
        ]
        if settings.router_replay == "trainer":
            microbatches = [replace(microbatch, routes=FirstRoutes()) for microbatch in microbatches]
        return train_step(
            self.model,
            self.optimizer,
            self.replay,
            microbatches,
            StepSettings(header.loss, header.learning_rate, header.updates),
            self._config.algorithm,
            # Greedy sampling has no distribution to speak of; the model's own stands for it.
            1.0 if supervised else self._config.sampling.temperature or 1.0,
            None if supervised else self._the_reference(),
        )

    def _the_reference(self) -> Reference | None:
        """Return the policy that reinforcement learning began with, where the loss is about it.

        After a warm-up it is written to the disk, where a resumed run finds it.

        Raises:
            ModelError: the run is resumed, and began without one.
        """
        if self._config.algorithm.kl_reference_coefficient == 0:
            return None
        if self._reference is None:
            warmup = self._config.warmup.steps
            folder = self._checkpoints / checkpoint.REFERENCE if warmup else self._model_folder
            if warmup and self.step == warmup:
                base = None if self._adapters else self._model_folder
                checkpoint.save_reference(self._checkpoints, self._trained(), base)
            elif not folder.exists():
                raise ModelError(
                    f"{folder} is missing: this run began without algorithm.kl_reference_coefficient; set it to 0, or "
                    f"go on from a checkpoint of step {warmup}"
                )
            if self._adapters:
                begun = checkpoint.read_adapters(folder) if warmup else None
                self._reference = Reference.with_adapters(self.model, begun)
            else:
                self._reference = Reference.load(folder, self._dtype, self._device, self._config.trainer)
        return self._reference
