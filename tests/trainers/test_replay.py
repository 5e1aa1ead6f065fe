from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter
from trainer_builders import (
    CPU,
    EXPERTS,
    LAYERS,
    TOPK,
    Reference,
    relative_difference,
    routes_of,
    samples_of,
)

from agentgym.algorithm_config import AlgorithmConfig
from agentgym.errors import IntegrityError
from agentgym.trainer_config import TrainerConfig
from agentgym_trainers.megatron.convert import load_hf, read_safetensors
from agentgym_trainers.megatron.export import iter_hf
from agentgym_trainers.megatron.microbatch import build_microbatch
from agentgym_trainers.megatron.model import build_model, read_config
from agentgym_trainers.megatron.optimizer import Optimizer
from agentgym_trainers.megatron.replay import Action, FirstRoutes, ReplayController, coverage
from agentgym_trainers.megatron.step import StepSettings, forward, train_step

LENGTHS = (13, 5, 22)


def load(folder: Path):
    model = build_model(read_config(folder), torch.float32, CPU)
    load_hf(model, read_safetensors(folder))
    return model, ReplayController(model)


def logprobs_of(model, replay, samples, *, use: bool = True) -> torch.Tensor:
    packed = build_microbatch(samples, 0, replay if use else None, CPU)
    found, _ = forward(model, replay, packed, 1.0)
    replay.clear()
    return found


@pytest.fixture
def loaded(hf_model: Callable[..., Path]):
    return load(hf_model("Qwen3Moe"))


def gradients_of(model) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    return dict(iter_hf(model))


def test_log_probabilities_and_gradients_equal_transformers_with_the_same_experts(
    hf_model: Callable[..., Path],
):
    folder, samples = hf_model("Qwen3Moe"), samples_of(LENGTHS)
    reference = Reference(folder)
    expected = torch.cat([reference.logprobs(sample) for sample in samples])
    expected.sum().backward()
    model, replay = load(folder)
    found = logprobs_of(model, replay, samples)
    assert (found - expected).abs().max() <= 1e-4
    assert (
        found - logprobs_of(model, replay, samples, use=False)
    ).abs().max() > 0.1  # the routes matter here
    found.sum().backward()
    ours, theirs = gradients_of(model), reference.named(gradients=True)
    assert ours.keys() == theirs.keys()
    assert max(relative_difference(ours[name], theirs[name]) for name in theirs) <= 1e-4
    assert all(ours[f"model.layers.{n}.mlp.gate.weight"].norm() > 0 for n in range(LAYERS))


def test_the_missing_route_of_the_last_token_does_not_matter(loaded):
    model, replay = loaded
    samples = samples_of(LENGTHS)
    before = logprobs_of(model, replay, samples)
    for sample in samples:
        sample.routes[-1] = (6, 7)
    assert torch.equal(before, logprobs_of(model, replay, samples))


def test_a_token_without_a_route_is_routed_by_the_trainers_own_router(hf_model: Callable[..., Path], loaded):
    samples = samples_of(LENGTHS)
    for sample in samples:
        sample.routes[::3] = 255
    reference = Reference(hf_model("Qwen3Moe"))
    expected = torch.cat([reference.logprobs(sample) for sample in samples])
    assert (logprobs_of(*loaded, samples) - expected).abs().max() <= 1e-4


def test_routes_that_are_all_missing_are_native_routing(loaded):
    samples = samples_of(LENGTHS)
    for sample in samples:
        sample.routes[:] = 255
    found, native = logprobs_of(*loaded, samples), logprobs_of(*loaded, samples, use=False)
    assert torch.equal(found, native)


def test_the_first_routes_of_the_trainer_are_kept_in_later_updates_when_its_router_has_changed_its_mind(
    hf_model: Callable[..., Path],
):
    chosen: dict[str, list[torch.Tensor]] = {}
    for kind in ("first", "first recompute", "native"):
        trainer = TrainerConfig(recompute=kind.endswith("recompute"))
        model = build_model(read_config(hf_model("Qwen3Moe")), torch.float32, CPU, trainer)
        load_hf(model, read_safetensors(hf_model("Qwen3Moe")))
        replay, optimizer = ReplayController(model), Optimizer(model, trainer)
        packed = [build_microbatch([sample], 0, None, CPU) for sample in samples_of((13, 22))]
        if kind != "native":
            packed = [replace(microbatch, routes=FirstRoutes()) for microbatch in packed]
        routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
        maps: list[torch.Tensor] = []
        for router in routers:
            router.register_forward_hook(lambda module, inputs, output, maps=maps: maps.append(output[1]))
        train_step(
            model, optimizer, replay, packed, StepSettings("dppo_tv", 0.1, updates=2), AlgorithmConfig(), 1.0
        )
        again = 2 if trainer.recompute else 1  # each forward pass is done again in the backward pass
        assert len(maps) == 2 * 2 * LAYERS * again
        half = len(maps) // 2
        chosen[kind] = maps[:half]
        same = [torch.equal(*pair) for pair in zip(maps[:half], maps[half:], strict=True)]
        assert all(same) if kind != "native" else not any(same)
    assert all(map(torch.equal, chosen["first"], chosen["native"]))


def test_a_router_that_would_skip_the_replay_is_refused(loaded):
    model, _ = loaded
    for module in model.modules():
        if isinstance(module, TopKRouter):
            module.config.moe_router_fusion = True
    with pytest.raises(ValueError, match="moe_router_fusion skips the replay"):
        ReplayController(model)


def test_routes_older_than_the_limit_are_left_to_the_trainers_own_router(loaded):
    model, replay = loaded
    samples = samples_of(LENGTHS)  # of version 0
    native = logprobs_of(model, replay, samples, use=False)
    for version, max_age, ours in ((3, 3, False), (3, 2, True), (3, None, False)):
        packed = build_microbatch(samples, version, replay, CPU, max_age=max_age)
        found, _ = forward(model, replay, packed, 1.0)
        replay.clear()
        assert torch.equal(found, native) == ours
        assert packed.route_coverage == (0 if ours else 1)


def test_a_microbatch_without_routes_is_routed_natively_between_two_with_routes(loaded):
    _, replay = loaded
    routes = replay.check(routes_of(np.random.default_rng(0), 9), 9)
    for given in (routes, None, routes):
        with replay.forward(given):
            pass
    assert [layer.action for layer in replay._layers] == [Action.BACKWARD] * LAYERS
    assert [target is None for target in replay._layers[0].waiting] == [False, True, False]
    scores = torch.rand(9, EXPERTS)

    def topk(scores: torch.Tensor, k: int, **_: object):
        return torch.topk(scores, k, dim=1)

    asked = [replay._layers[0].get_replay_topk(scores, TOPK, default_compute_topk=topk)[1] for _ in range(3)]
    assert torch.equal(asked[1], torch.topk(scores, TOPK, dim=1).indices)
    assert torch.equal(asked[0], asked[2])
    assert not torch.equal(asked[0], asked[1])


def test_a_controller_touches_its_own_model_only(hf_model: Callable[..., Path], loaded):
    other, _ = load(hf_model("Qwen3Moe"))
    _, replay = loaded
    with replay.forward(replay.check(routes_of(np.random.default_rng(0), 9), 9)):
        mine = {id(layer) for layer in replay._layers}
        theirs = {id(module.router_replay) for module in other.modules() if isinstance(module, TopKRouter)}
        assert not mine & theirs


def test_a_second_forward_in_the_backward_pass_gets_the_routes_of_its_own_microbatch(loaded):
    _, replay = loaded
    rng = np.random.default_rng(0)
    batches = [replay.check(routes_of(rng, 9), 9) for _ in range(2)]
    for routes in batches:
        with replay.forward(routes):
            pass
    scores = torch.zeros(9, EXPERTS)
    layer = replay._layers[1]
    native = torch.topk(scores, TOPK, dim=1).indices

    def topk(scores: torch.Tensor, k: int, **_: object):
        return torch.topk(scores, k, dim=1)

    for routes in batches:
        _, experts = layer.get_replay_topk(scores, TOPK, default_compute_topk=topk)
        assert torch.equal(experts, torch.where(routes[1] == -1, native, routes[1]))


def bad(change: Callable[[np.ndarray], object], dtype: type = np.uint8) -> np.ndarray:
    routes = routes_of(np.random.default_rng(0), 6).astype(dtype)
    changed = change(routes)
    return routes if changed is None else changed


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (bad(lambda r: r[:-1]), "5, 2, 2"),
        (bad(lambda r: r[:, :1]), "6, 1, 2"),
        (bad(lambda r: r[..., :1]), "6, 2, 1"),
        (bad(lambda r: None, np.int64), "int64"),
        (bad(lambda r: r.__setitem__((2, 1), (3, 3))), "token 2 in layer 1"),
        (bad(lambda r: r.__setitem__((2, 0), (3, 8))), "different experts below 8"),
        (bad(lambda r: r.__setitem__((4, 1), (3, 255))), "token 4 in layer 1 is partly missing"),
    ],
)
def test_wrong_routes_are_refused(loaded, routes: np.ndarray, message: str):
    _, replay = loaded
    with pytest.raises(IntegrityError, match=message):
        replay.check(routes, 6)


def test_coverage_counts_the_rows_that_have_a_route():
    routes = np.zeros((4, 2, 2), np.uint8)
    routes[1, 0] = 255
    routes[3] = 255
    assert coverage(routes, np.array([True, True, True, False])) == pytest.approx(5 / 6)


def test_sixteen_bit_routes_have_a_sentinel_of_their_own(loaded):
    _, replay = loaded
    routes = routes_of(np.random.default_rng(0), 6).astype(np.uint16)
    routes[-1] = 65535
    assert (replay.check(routes, 6)[:, -1] == -1).all()
