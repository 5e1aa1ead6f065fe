"""vLLM as agentgym uses it: token ids in, token ids out, exact weight versions, live updates.

    engine = await Engine.start(model, config)
    answer = await engine.generate(tokens, Sampling(max_tokens=16))
    await engine.load_weights(7, path)

`prepare_environment` (in `agentgym.policy.server`) must have run before this module is imported: torch reads
its thread count when it is loaded.

Shapes: n sampled tokens, P prompt tokens, L MoE layers, k experts per token.
"""

import asyncio
import itertools
import multiprocessing
import os
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError, VLLMServerError
from vllm.inputs.engine import tokens_input
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from agentgym.adapters import adapter_scale, check_adapters, check_base
from agentgym.busy import forget_startup
from agentgym.config import ServerConfig
from agentgym.errors import ModelError, PolicyError
from agentgym.lifeline import die_with_parent
from agentgym.model import ModelInfo, check_context, check_model, model_shapes, weight_files
from agentgym.policy.client import Sampling
from agentgym.policy.vllm_plugin import SERVER_PID_VARIABLE

GIB = 1 << 30
CLOSE_SECONDS = 2.0
"""How long vLLM's process may take to end; it holds nothing that could be lost."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the engine sampled for one request."""

    tokens: NDArray[np.int32]
    """[n], the stop token included."""
    logprobs: NDArray[np.float32]
    """[n], of the distribution that was sampled from."""
    routes: NDArray[np.unsignedinteger[Any]] | None
    """[P + n - 1 - routes_start, L, k], each row from the computation that the next token was sampled in, also
    where a weight update made the keys and values be computed anew. None for dense models."""
    finish_reason: Literal["stop", "length"]
    version_spans: list[tuple[int, int]]
    """[(first token index, version)], ascending, the first one at token 0."""
    seconds: float


class Engine:
    """One vLLM engine with the weights of one version at a time."""

    def __init__(self, llm: AsyncLLM, info: ModelInfo, config: ServerConfig, model: Path) -> None:
        """Wrap an engine that runs; use `start`."""
        self.llm = llm
        """vLLM's own engine; requests made there directly have no version spans."""
        self._info = info
        self._config = config
        self._model = model
        self._shapes = model_shapes(model)
        self._version = 0
        self._loads = 0
        """Weight updates so far: unlike versions, which are loaded again after a resume or by a pool, none repeats."""
        self._ids = itertools.count()
        self._spans: dict[str, list[tuple[int, int]]] = {}
        """By our request id, for requests whose answer has not arrived."""
        self._updating = asyncio.Lock()

    @classmethod
    async def start(cls, model: Path, config: ServerConfig) -> "Engine":
        """Start vLLM with a model folder; takes about half a minute, most of it imports.

        Raises:
            ModelError: the folder is not usable, or its context is shorter than `max_model_len`.
        """
        info = check_model(model)
        check_context(model, info, config.max_model_len)
        os.environ[SERVER_PID_VARIABLE] = str(os.getpid())
        settings = _engine_args(model, config, info).create_engine_config()
        if current_platform.is_cpu():
            # vLLM asks for a new interpreter, which would spend half the start on importing everything again.
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        # A new interpreter is told by the plugin to end with this process, a fork here.
        os.register_at_fork(after_in_child=lambda: die_with_parent(os.getppid()))
        llm = AsyncLLM.from_vllm_config(settings, disable_log_stats=True)
        await llm.collective_rpc("agentgym_attach")
        forget_startup()
        return cls(llm, info, config, model)

    @property
    def version(self) -> int:
        """The weight version that new requests are sampled with."""
        return self._version

    @property
    def max_model_len(self) -> int:
        """Prompt and answer together, in tokens."""
        return self._config.max_model_len

    @property
    def running(self) -> int:
        """Requests whose answer has not arrived."""
        return len(self._spans)

    @property
    def dead(self) -> bool:
        """Whether vLLM's own process ended or failed; nothing can be asked any more."""
        return bool(self.llm.errored)

    async def kv_usage(self) -> float:
        """Return the share of the key-value cache that running requests use.

        Raises:
            PolicyError: vLLM does not say.
        """
        try:
            return float(await self.llm.engine_core.call_utility_async("agentgym_kv_usage"))
        except (VLLMServerError, VLLMClientError) as error:
            raise PolicyError(f"vLLM does not say how full its cache is: {error}") from error

    def close(self) -> None:
        """Stop vLLM's process. It holds nothing that could be lost, and would take 15 s to end by itself."""
        for process in multiprocessing.active_children():
            process.kill()
        self.llm.shutdown(timeout=CLOSE_SECONDS)

    async def generate(
        self, tokens: Sequence[int] | NDArray[np.int32], sampling: Sampling, routes_start: int = 0
    ) -> Answer:
        """Sample one answer. Cancelling the call stops the generation.

        Args:
            tokens: the prompt, ids [P].
            sampling: how to sample.
            routes_start: a position in the prompt; routes of earlier tokens are left out.

        Raises:
            PolicyError: the request cannot be served as it is; the engine is unharmed.
        """
        prompt = np.asarray(tokens, np.int32)
        self._check(prompt, sampling, routes_start)
        name = str(next(self._ids))
        spans = self._spans[name] = [(0, self._version)]
        start = time.monotonic()
        # The salt keeps keys and values that other weights computed away from this request.
        request = tokens_input(prompt.tolist(), cache_salt=str(self._loads))
        stream: AsyncGenerator[Any, None] = self.llm.generate(
            request, self.sampling_params(sampling, routes_start), name
        )
        try:
            async for output in stream:  # one output: only the final one is asked for
                result = output.outputs[0]
        except (VLLMServerError, VLLMClientError, ValueError) as error:
            raise PolicyError(f"vLLM failed on a request: {error}") from error
        finally:
            del self._spans[name]
        n = len(result.token_ids)
        return Answer(
            tokens=np.array(result.token_ids, np.int32),
            logprobs=np.array(result.logprobs.logprobs, np.float32),
            routes=self._routes(result.routed_experts),
            finish_reason="stop" if result.finish_reason == "stop" else "length",
            version_spans=[(first, version) for first, version in spans if first < n or first == 0],
            seconds=time.monotonic() - start,
        )

    def sampling_params(self, sampling: Sampling, routes_start: int) -> SamplingParams:
        """Return what vLLM is asked for in one request."""
        return SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,  # the caller's stop tokens are the only ones
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            routed_experts_prompt_start=routes_start,
            skip_clone=True,  # made for this request alone
        )

    async def load_weights(self, version: int, path: Path) -> None:
        """Replace the weights between two engine steps; requests that run go on with the new ones.

        A file of adapters stands for the weights of the engine's model folder with these in them; the folder is read
        again.

        With `kv_on_update = "recompute"` their keys and values are computed anew, so that every later token
        has exactly the new weights' probability; with "keep" the old ones are still attended to.

        Raises:
            ModelError: the file or folder does not hold this model's weights or adapters; nothing was changed.
        """
        files = self._files(path)
        recompute = self._config.kv_on_update == "recompute"
        async with self._updating:
            if recompute:
                await self.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=True)
            # Requests made from here on reach vLLM behind the reload: they travel through the same pipe.
            self._version, self._loads = version, self._loads + 1
            [counts] = await self.llm.collective_rpc("agentgym_load_weights", args=files)
            # vLLM appends a hyphen and a random suffix to our request ids.
            sampled = {name.rpartition("-")[0]: count for name, count in counts.items()}
            for name, spans in self._spans.items():
                if spans[-1][1] != version:
                    _switch(spans, sampled.get(name, 0), version)
            if recompute:
                await self.llm.engine_core.resume_scheduler_async()

    def _check(self, prompt: NDArray[np.int32], sampling: Sampling, routes_start: int) -> None:
        # vLLM itself would end, or cut the answer short without a word, on most of these.
        if not len(prompt):
            raise PolicyError("the prompt is empty; send at least one token")
        if len(prompt) + sampling.max_tokens > self.max_model_len:
            raise PolicyError(
                f"a prompt of {len(prompt)} tokens and an answer of up to {sampling.max_tokens} do not fit "
                f"into the context of {self.max_model_len}; shorten them or raise server.max_model_len"
            )
        vocabulary = self._info.vocab_size
        if prompt.min() < 0 or prompt.max() >= vocabulary:
            raise PolicyError(
                f"the prompt has token ids outside 0 to {vocabulary - 1}; is it another model's?"
            )
        if not 0 <= routes_start < len(prompt):
            raise PolicyError(
                f"routes_start = {routes_start} lies outside the prompt of {len(prompt)} tokens"
            )
        if any(not 0 <= token < vocabulary for token in sampling.stop_token_ids):
            raise PolicyError(f"stop_token_ids = {sampling.stop_token_ids} are outside 0 to {vocabulary - 1}")

    def _files(self, path: Path) -> tuple[list[str], str | None]:
        """Return the files that hold all weights, and the one of adapters that are to be in them."""
        # A load that fails half-way leaves a broken model behind, so everything is compared before.
        found, adapters = model_shapes(path), None
        if adapter_scale(path) is not None:
            check_adapters(path, found, self._shapes)
            check_base(path, self._model)
            adapters, path, found = str(path), self._model, model_shapes(self._model)
        wrong = [name for name in {**self._shapes, **found} if found.get(name) != self._shapes.get(name)]
        if wrong:
            name = min(wrong)
            raise ModelError(
                f"{path} does not hold this model's weights: {len(wrong)} tensors differ, first {name} "
                f"(found {found.get(name)}, expected {self._shapes.get(name)}); the old weights stay"
            )
        return [str(file) for file in weight_files(path)], adapters

    def _routes(self, rows: NDArray[Any] | None) -> NDArray[np.unsignedinteger[Any]] | None:
        if not self._info.num_experts or rows is None:
            return None
        # One value of the dtype must stay free to say "no route".
        dtype = np.uint8 if self._info.num_experts <= 255 else np.uint16
        if self._info.moe_layers < self._info.layers:
            rows = rows[:, list(self._info.moe_layer_indices)]
        return np.asarray(rows, dtype)


def _switch(spans: list[tuple[int, int]], sampled: int, version: int) -> None:
    """Note that tokens from index `sampled` on come from `version`."""
    while spans and spans[-1][0] >= sampled:
        spans.pop()
    spans.append((sampled, version))


def _engine_args(model: Path, config: ServerConfig, info: ModelInfo) -> AsyncEngineArgs:
    on_cpu = current_platform.is_cpu()
    return AsyncEngineArgs(
        model=str(model),
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        gpu_memory_utilization=config.gpu_memory_utilization,
        kv_cache_memory_bytes=int(config.kv_cache_gib * GIB) if on_cpu else None,
        enforce_eager=on_cpu,
        enable_prefix_caching=True,
        enable_return_routed_experts=info.num_experts > 0,
        # With a step in flight, the token counts at a weight update would not be exact.
        async_scheduling=False,
        # The multi-process executor spins while it waits: twice the CPU time.
        distributed_executor_backend="uni",
        logprobs_mode="processed_logprobs",
        skip_tokenizer_init=True,
        disable_log_stats=True,
        worker_extension_cls="agentgym.policy.vllm_worker.WeightLoader",
    )
