"""The router by its kernels against the router in fp64, run by Triton's interpreter."""

from __future__ import annotations

from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megapar.core.device import ops, triton_operators
from megapar.core.device.ops import OPS
from megapar.core.device.triton_operators import KERNELS
from megapar.moe.router import Router, gate_weights
from megapar.moe.sizes import SCORES, MoeSizes
from tests.support.interpreted import run_interpreted

HIDDEN = 16


def by_kernels():
    """Let the CPU route by the kernels, in the interpreter."""
    for name in ("split_matrix", "route", "route_backward"):
        triton_operators._LIBRARY.impl(name, KERNELS[name], "CPU")
    triton_operators.use(torch.device("cpu"))


def made(sizes, dtype, weight, bias, hooked):
    router = Router(sizes, dtype=dtype)
    router.weight.data.copy_(weight)
    router.correction_bias.copy_(bias)
    if hooked:  # the neighbours of the best
        router.top.register_forward_hook(lambda _, inputs, experts: (experts + 1) % sizes.num_experts)
    return router


def outputs(router, x, valid, samples):
    """Everything differentiable, then everything counted."""
    routing = router(x, valid, samples)
    sizes = router.sizes
    kept = None if valid is None else valid[:, None].expand_as(routing.experts)
    more = {"scaling": sizes.scaling, "renormalizes": sizes.renormalizes}
    weights = gate_weights(routing, kept, over_kept=sizes.has_capacity, **more)
    sums = routing.sums
    readers = routing.passed or (x, x)
    found = [weights, sums.probs, sums.squares, sums.by_sample, *readers]
    return found, [routing.experts, sums.counts, sums.best], routing.probs


EXPERTS = (  # experts, choices, groups, chosen groups, scored experts of a group
    (1, 1, 1, 1, 0),
    (5, 2, 1, 1, 0),
    (6, 2, 3, 1, 1),
    (12, 4, 3, 2, 0),
    (16, 6, 1, 1, 0),
    (40, 3, 1, 1, 0),
    (40, 8, 8, 4, 2),
)


@given(
    experts=st.sampled_from(EXPERTS),
    score=st.sampled_from(SCORES),
    kind=st.sampled_from(("megatron_moe", "deepspeed_moe")),
    tokens=st.sampled_from((0, 1, 6, 34)),
    divided=st.sampled_from(("auto", "on", "off")),
    padded=st.booleans(),
    biased=st.booleans(),
    by_sample=st.booleans(),
    hooked=st.booleans(),
    losses=st.integers(1, 63),
    seed=st.integers(0, 99),
)
@settings(max_examples=14, deadline=None)
def check(experts, score, kind, tokens, divided, padded, biased, by_sample, hooked, losses, seed):
    """Choices and counts are equal; numbers and gradients have the accuracy of fp32, that of x of bf16."""
    random = torch.Generator().manual_seed(seed)
    E, topk, groups, group_topk, scored = experts
    sizes = MoeSizes(
        HIDDEN, 8, E, topk, score=score, kind=kind, groups=groups, group_topk=group_topk, group_score_topk=scored,
        norm_topk_prob=divided, scaling=2.5, sequence_aux=by_sample, biased=biased,
    )  # fmt: skip
    x = torch.randn(tokens, HIDDEN, generator=random).bfloat16()
    weight, bias = torch.randn(E, HIDDEN, generator=random), 0.2 * biased * torch.randn(E, generator=random)
    valid = torch.rand(tokens, generator=random) < 0.7 if padded else None
    samples = 2 if tokens % 2 == 0 else 1
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        router = made(sizes, dtype, weight, bias, hooked)
        leaf = x.to(dtype).requires_grad_()
        values, counts, probs = outputs(router, leaf, valid, samples)
        random.manual_seed(seed + 1)
        upstream = [torch.randn(value.shape, generator=random).bfloat16().to(value.dtype) for value in values]
        used = [n for n in range(len(values)) if losses >> n & 1 and values[n].requires_grad] or [0]
        gradients = torch.autograd.grad(
            [values[n] for n in used], (leaf, router.weight), [upstream[n] for n in used],
            allow_unused=True, materialize_grads=True,
        )  # fmt: skip
        found.append((counts, [probs, *values[:4], gradients[1]], gradients[0]))
    (counts, numbers, d_x), (wanted_counts, wanted, wanted_d_x) = found
    for a, b in zip(counts, wanted_counts, strict=True):
        assert a.dtype == torch.int64
        assert torch.equal(a, b)
    for a, b in zip(numbers, wanted, strict=True):
        assert a.dtype == torch.float32
        largest = float(b.detach().abs().max()) if b.numel() else 0.0
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-5 * max(1.0, largest))
    assert d_x.dtype == torch.bfloat16
    assert float((d_x - wanted_d_x).norm()) <= 2**-6 * float(wanted_d_x.norm()) + 1e-5


def check_all():
    by_kernels()
    with mock.patch.object(ops, "OPS", {**OPS, "route": {**OPS["route"], "cpu": OPS["route"]["cuda"]}}):
        check()
        check_worst()
    check_parts()


def check_worst():
    """Logits that are no numbers choose experts that exist, each once; vanishing scores have exact weights."""
    sizes = MoeSizes(HIDDEN, 8, 5, 3)
    router = made(sizes, torch.bfloat16, torch.full((5, HIDDEN), float("nan")), torch.zeros(5), False)
    routing = router(torch.ones(2, HIDDEN).bfloat16())
    assert routing.experts.tolist() == [[0, 1, 2]] * 2
    assert routing.weights.isnan().all()
    weight = torch.zeros(5, HIDDEN)
    weight[0], weight[3] = 100.0, 1.0
    router = made(sizes, torch.bfloat16, weight, torch.tensor([-5.0, 0.0, -5.0, 1.0, 0.0]), False)
    routing = router(torch.ones(1, HIDDEN).bfloat16())
    assert routing.experts.tolist() == [[3, 1, 4]]
    torch.testing.assert_close(routing.weights, torch.tensor([[16.0, 0.0, 0.0]]).softmax(1))


def check_parts():
    """Three parts are the matrix."""
    matrix = torch.randn(7, 9, generator=torch.Generator().manual_seed(0))
    high, again, middle, low = KERNELS["split_matrix"](matrix).double()
    assert torch.equal(high, again)
    assert torch.equal(high + middle + low, matrix.double())


def test_routes_and_gradients_are_those_of_fp64():
    run_interpreted(__file__, "check_all")
