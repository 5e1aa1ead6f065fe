"""Models, references and running servers for the tests of the policy plane."""

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import safetensors.numpy
import zmq
from numpy.typing import NDArray

from agentgym.adapters import DOWN, UP, adapter_metadata
from agentgym.config import ServerConfig
from agentgym.protocol import Drain, Error, Header, Heartbeat, Hello, Loaded, LoadWeights, Welcome
from agentgym.tiny_model import init_model
from agentgym.upcycle import upcycle
from agentgym.wire import open_socket, pack, unpack

H = TypeVar("H", bound=Header)

START_SECONDS = 240.0
"""How long vLLM may take to start on a busy machine."""

RANK = 4
"""Of adapters."""

# A process of its own between the test and the server, so that a test can kill the server's parent.
PARENT = """
import subprocess, sys
sys.exit(subprocess.Popen([sys.executable, "-c", sys.argv[1], *sys.argv[2:]]).wait())
"""
SERVER = """
import os, sys
from pathlib import Path
from agentgym.config import ServerConfig
from agentgym.log import setup_logging
from agentgym.policy.server import run_server
if __name__ == "__main__":
    model, config, bind, coordinator, silence = sys.argv[1:]
    setup_logging("server")
    run_server(
        model=Path(model), config=ServerConfig.model_validate_json(config), bind=bind,
        coordinator=coordinator, name="server-under-test", parent_pid=os.getppid(), heartbeat_interval=0.2,
        silence_timeout=float(silence),
    )
"""


class RunningServer:
    """A policy server process; the test is its coordinator."""

    def __init__(self, model: Path, folder: Path, *, silence: float = 600.0, **config: object) -> None:
        self.model = model
        self.log = folder / "server.log"
        self._socket = open_socket(zmq.Context.instance(), zmq.ROUTER)
        coordinator = f"ipc://{folder}/coordinator"
        self._socket.bind(coordinator)
        settings = ServerConfig(kv_cache_gib=0.25, **config)  # type: ignore[arg-type]
        with self.log.open("w") as log:
            self.parent = subprocess.Popen(
                [
                    *(sys.executable, "-c", PARENT, SERVER),
                    *(str(model), settings.model_dump_json(), f"ipc://{folder}/server", coordinator),
                    str(silence),
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._identity = b""
        try:
            self.hello = self.expect(Hello, START_SECONDS)
        except AssertionError:
            self.stop()
            raise
        self.tell(Welcome())

    @property
    def address(self) -> str:
        return self.hello.address

    def tell(self, header: Header) -> None:
        self._socket.send_multipart([self._identity, *pack(header)])

    def expect(self, record: type[H], timeout: float = 30.0) -> H:
        """Return the next message of a kind; heartbeats and hellos between are passed over."""
        deadline = time.monotonic() + timeout
        while self._socket.poll(max(0.0, deadline - time.monotonic()) * 1000):
            self._identity, *frames = self._socket.recv_multipart()
            header = unpack(frames).header
            if isinstance(header, record):
                return header
            assert isinstance(header, Heartbeat | Hello), f"{header} instead of {record.kind}"
        raise AssertionError(
            f"no {record.kind!r} within {timeout} s; the log:\n{self.log.read_text()[-3000:]}"
        )

    def load(self, version: int, model: Path) -> None:
        """Load the weights of a folder, or a file."""
        file = model / "model.safetensors" if model.is_dir() else model
        self.tell(LoadWeights(version=version, path=str(file)))
        assert self.expect(Loaded).version == version

    def load_refused(self, version: int, path: Path) -> str:
        self.tell(LoadWeights(version=version, path=str(path)))
        return self.expect(Error).text

    def drain(self) -> int:
        self.tell(Drain())
        return self.parent.wait(60.0)

    def process_ids(self) -> list[int]:
        """The server and the processes that vLLM started for it."""
        children = Path(f"/proc/{self.hello.pid}/task/{self.hello.pid}/children").read_text().split()
        return [self.hello.pid, *map(int, children)]

    def stop(self) -> None:
        if self.parent.poll() is None:
            self.parent.send_signal(signal.SIGKILL)
            self.parent.wait()
        self._socket.close()


def gone(pid: int, timeout: float = 15.0) -> bool:
    """Wait until a process has ended."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        os.sched_yield()
    return False


def moe_model(folder: Path) -> Path:
    init_model(folder, "tiny-moe")
    return folder


def mixtral_model(folder: Path) -> Path:
    """A random Llama with a tied output layer, made by transformers and upcycled, with experts that differ."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    dense, same = folder / "dense", folder / "same"
    init_model(dense)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=105,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(dense)
    upcycle(dense, same, experts=4, top_k=2)
    return perturbed(same, folder / "model", seed=7)


def dense_tied_model(folder: Path) -> Path:
    """A random Qwen3 without experts and with a tied output layer, made by transformers."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    init_model(folder, "tiny-moe")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=105,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def perturbed(model: Path, folder: Path, *, seed: int, scale: float = 0.05) -> Path:
    """A copy of a model with noise on all weights."""
    shutil.copytree(model, folder)
    weights = safetensors.numpy.load_file(model / "model.safetensors")
    rng = np.random.default_rng(seed)
    changed = {k: v + scale * rng.standard_normal(v.shape, np.float32) for k, v in weights.items()}
    safetensors.numpy.save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def adapted(
    model: Path, folder: Path, *, seed: int, matrices: str = "_proj", scale: float = 0.5
) -> tuple[Path, Path]:
    """A file of random adapters for the matrices of a model with such names, and a copy of it with these merged in."""
    shutil.copytree(model, folder)
    weights = safetensors.numpy.load_file(model / "model.safetensors")
    rng, adapters = np.random.default_rng(seed), {}
    for name in [name for name in weights if matrices in name]:
        rows, columns = weights[name].shape
        down, up = (rng.normal(0, 0.3, shape).astype(np.float32) for shape in ((RANK, columns), (rows, RANK)))
        stem = name.removesuffix(".weight")
        adapters |= {stem + DOWN: down, stem + UP: up}
        weights[name] = weights[name] + np.float32(scale) * (up @ down)
    safetensors.numpy.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    safetensors.numpy.save_file(adapters, folder / "adapters.safetensors", adapter_metadata(scale, model))
    return folder / "adapters.safetensors", folder


ROUTER_ROUNDING = 1e-6
"""Of router logits, which are of the order of 1."""
Routes = NDArray[np.unsignedinteger]


@functools.lru_cache(maxsize=8)
def _reference_model(model: Path):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def _settle(logits: Any, experts: Any, recorded: Routes) -> Any:
    """The experts [K, k] of a layer; where the last one and the next are as good as each other, the recorded one.

    Which of them an engine takes is rounding.
    """
    k = experts.shape[1]
    best = logits.topk(k + 1)
    for row in (best.values[:, k - 1] - best.values[:, k] < ROUTER_ROUNDING).nonzero()[:, 0].tolist():
        taken = [expert for expert in best.indices[row, k - 1 :].tolist() if expert in recorded[row]]
        if len(taken) == 1:
            experts[row, k - 1] = taken[0]
    return experts


@contextlib.contextmanager
def _settled(reference: Any, recorded: Routes | None) -> Iterator[None]:
    """Let the routers of a Qwen3-MoE take the recorded experts [K, L, k] where rounding would decide."""
    gates = [gate for name, gate in reference.named_modules() if name.endswith("mlp.gate")]
    hooks = [
        gate.register_forward_hook(
            lambda _gate, _inputs, out, layer=layer: (*out[:2], _settle(out[0], out[2], recorded[:, layer]))
        )
        for layer, gate in enumerate(gates if recorded is not None else [])
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def reference_logprobs(
    model: Path,
    prompt: Sequence[int],
    answer: Sequence[int],
    temperature: float = 1.0,
    recorded: Routes | None = None,
) -> NDArray[np.float32]:
    """The log-probabilities of an answer's tokens by transformers; `recorded` routes decide between equal experts."""
    import torch

    reference, ids = _reference_model(model), torch.tensor([[*prompt, *map(int, answer)]])
    with torch.no_grad(), _settled(reference, recorded):
        logits = reference(ids).logits[0]
    logprobs = (logits / temperature).log_softmax(-1)[len(prompt) - 1 : -1]
    return logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


def reference_routes(model: Path, ids: Sequence[int], recorded: Routes | None = None) -> NDArray[np.int64]:
    """The experts of each token by transformers, [K, L, k], each row in ascending order; see `reference_logprobs`."""
    import torch

    reference = _reference_model(model)
    with torch.no_grad(), _settled(reference, recorded):
        layers = reference(torch.tensor([list(map(int, ids))]), output_router_logits=True).router_logits
    experts = [layer.topk(reference.config.num_experts_per_tok).indices for layer in layers]
    if recorded is not None:
        experts = [_settle(layers[n], own, recorded[:, n]) for n, own in enumerate(experts)]
    return torch.stack([own.sort().values for own in experts], 1).numpy()


def same_routes(routes: NDArray[np.unsignedinteger], model: Path, ids: list[int], start: int = 0) -> bool:
    """Whether routes are those of transformers from the token `start` on."""
    expected = reference_routes(model, ids)[start:-1]
    return np.array_equal(np.sort(routes.astype(np.int64), -1), expected)
