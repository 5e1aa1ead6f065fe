"""Gradients of all ranks: summed where ranks hold copies of a parameter, and their common norm.

The loss of a step is a plain sum over tokens, so what each rank has seen is added up, nowhere averaged.
"""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.nn import Parameter


def is_expert(parameter: Parameter) -> bool:
    """Say whether a parameter belongs to an expert that only some of the data-parallel ranks have."""
    return not getattr(parameter, "allreduce", True)


def is_shared(parameter: Parameter) -> bool:
    """Say whether tensor-parallel ranks have the whole of a parameter, and each saw a share of the tokens or heads."""
    return getattr(parameter, "sequence_parallel", False)


def is_tied_copy(model: GPTModel, parameter: Parameter) -> bool:
    """Say whether a parameter is the copy of the embedding that the last of several pipeline stages projects with."""
    return (
        model.share_embeddings_and_output_weights
        and not model.pre_process
        and parameter is model.shared_embedding_or_output_weight()
    )


def sum_over_ranks(model: GPTModel) -> None:
    """Make the gradients of this rank those of the whole batch; a trained parameter without one gets zeros."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    if model.share_embeddings_and_output_weights and model.pre_process != model.post_process:
        _sum([model.shared_embedding_or_output_weight()], parallel_state.get_embedding_group())
    shared = [p for p in parameters if is_shared(p)]
    _sum([p for p in shared if not is_expert(p)], parallel_state.get_tensor_model_parallel_group())
    _sum([p for p in shared if is_expert(p)], parallel_state.get_expert_tensor_parallel_group())
    _sum([p for p in parameters if not is_expert(p)], parallel_state.get_data_parallel_group())
    _sum([p for p in parameters if is_expert(p)], parallel_state.get_expert_data_parallel_group())


def _sum(parameters: list[Parameter], group: dist.ProcessGroup) -> None:
    gradients = [p.grad for p in parameters if p.grad is not None]
    if group.size() == 1 or not gradients:
        return
    flat = torch.cat([gradient.float().flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    for gradient, total in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))


def norm(model: GPTModel, gradients: Mapping[Parameter, Tensor]) -> float:
    """Return the norm of the gradient of the whole model, each parameter counted once."""
    first = parallel_state.get_tensor_model_parallel_rank() == 0
    first_of_experts = parallel_state.get_expert_tensor_parallel_rank() == 0
    dense, experts = [], []
    for parameter, gradient in gradients.items():
        if is_expert(parameter):
            if first_of_experts or not is_shared(parameter):
                experts.append(gradient)
        elif (first or getattr(parameter, "tensor_model_parallel", False)) and not is_tied_copy(
            model, parameter
        ):
            dense.append(gradient)
    squares = _squares(dense, parallel_state.get_model_parallel_group()) + _squares(
        experts, parallel_state.get_expert_tensor_model_pipeline_parallel_group()
    )
    return float(squares**0.5)


def _squares(gradients: Iterable[Tensor], group: dist.ProcessGroup) -> float:
    total = torch.nn.utils.get_total_norm(gradients).double() ** 2
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    return total.item()
