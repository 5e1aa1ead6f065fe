"""Forward and backward passes of several microbatches through the pipeline stages: one forward, one backward (1F1B).

A stage that has s stages behind it first runs s microbatches forward, then one forward and one backward in turn, and
in the end the backward passes that are left; so it holds the activations of s + 1 microbatches at most. With one stage
this is the plain loop.

Shapes: T tokens of a microbatch on this tensor-parallel rank, H hidden.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor

from agentgym_trainers.megatron.microbatch import Microbatch
from agentgym_trainers.megatron.replay import ReplayController


def run_stage(model: GPTModel, microbatch: Microbatch, received: Tensor | None = None) -> Tensor:
    """Return the hidden states [T, 1, H] behind the layers of this stage.

    `received` [T, 1, H] is what the stage before sent; None for the first.
    """
    model.set_input_tensor(received)
    return model(  # type: ignore[no-any-return]
        microbatch.tokens, microbatch.positions, None, packed_seq_params=microbatch.sequences
    )


def forward_only(model: GPTModel, microbatches: Sequence[Microbatch]) -> Iterator[Tensor]:
    """Yield the hidden states [T, 1, H] of each microbatch on the last stage, nothing on the others; no gradients."""
    link, first, last = _stage(model)
    for microbatch, shape in zip(microbatches, _shapes(model, microbatches), strict=True):
        out = run_stage(model, microbatch, link.recv_forward(shape, first))
        if last:
            yield out
        else:
            link.send_forward(out.contiguous(), last)


def forward_backward(
    model: GPTModel,
    replay: ReplayController,
    microbatches: Sequence[Microbatch],
    loss_of: Callable[[int, Tensor], Tensor],
) -> None:
    """Add the gradients of all microbatches.

    `loss_of` makes the loss of a microbatch, by its number, of its hidden states; it is asked on the last stage only.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    link, first, last = _stage(model)
    count = len(microbatches)
    ahead = min(group.size() - group.rank() - 1, count)
    held: deque[tuple[Tensor | None, Tensor]] = deque()
    shapes = _shapes(model, microbatches)

    def forward(number: int, received: Tensor | None) -> Tensor:
        with replay.forward(microbatches[number].routes):
            out = run_stage(model, microbatches[number], received)
        out = loss_of(number, out) if last else out.contiguous()
        held.append((received, out))
        return out.detach()

    def backward(gradient: Tensor | None) -> Any:
        received, out = held.popleft()
        torch.autograd.backward(out, gradient)
        return None if received is None or received.grad is None else received.grad.contiguous()

    for number in range(ahead):
        link.send_forward(forward(number, link.recv_forward(shapes[number], first)), last)
    received = link.recv_forward(shapes[ahead], first) if ahead < count else None
    for number in range(ahead, count):
        out = forward(number, received)
        sent = backward(link.send_forward_recv_backward(out, shapes[number - ahead], last))
        if number + 1 < count:
            received = link.send_backward_recv_forward(sent, shapes[number + 1], first)
        else:
            link.send_backward(sent, first)
    for number in range(count - ahead, count):
        link.send_backward(backward(link.recv_backward(shapes[number], last)), first)
    replay.clear()


def _stage(model: GPTModel) -> tuple[P2PCommunicator, bool, bool]:
    """Return the way to the other stages, and whether this is the first, and the last."""
    group = parallel_state.get_pipeline_model_parallel_group()
    return P2PCommunicator(group, model.config), group.rank() == 0, group.rank() == group.size() - 1


def _shapes(model: GPTModel, microbatches: Sequence[Microbatch]) -> list[tuple[int, int, int]]:
    """Return the shape of what stages send each other, per microbatch."""
    tensor_parallel = parallel_state.get_tensor_model_parallel_world_size()
    return [(mb.tokens.numel() // tensor_parallel, 1, model.config.hidden_size) for mb in microbatches]
