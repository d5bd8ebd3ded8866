"""Operators of Triton kernels: their results, and the trial before a device uses them."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from megapar.core.comm.axis import Axis
from megapar.core.device import ops, triton_operators, triton_trial
from megapar.core.device.layer_ops import (
    clamped_swiglu_reference,
    cross_entropy_reference,
    in_one_kernel,
    swiglu_reference,
)
from megapar.core.device.ops import OPS
from megapar.core.device.rotary import rotary_heads_in_one_kernel, rotary_heads_reference, rotary_reference
from megapar.core.tensor_parallel.execution import Execution
from megapar.model.layers.mlp import Mlp
from megapar.moe.expert_order import order_by_expert, permute, sort_by_expert, unpermute
from megapar.moe.experts import Experts
from megapar.moe.token_dispatcher import pack, unpack
from tests.model.small import ERNIE, batch_for, build, total
from tests.support.interpreted import cast_as_torch, run_interpreted

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def unused(monkeypatch):
    monkeypatch.setattr(triton_operators, "_USED", set())


def test_without_triton_nothing_is_tried(monkeypatch):
    monkeypatch.setattr(triton_trial, "find_spec", lambda name: None)
    assert triton_trial.triton_failure(CPU) == "Triton is not installed"


@pytest.mark.parametrize("wrong", [0.5, float("nan")])
def test_a_kernel_that_computes_something_else_fails(wrong, monkeypatch):
    monkeypatch.setattr(triton_trial, "find_spec", lambda name: object())
    monkeypatch.setattr(triton_trial, "errors", lambda device: {"cross_entropy": 0.001, "rotary_heads": wrong})
    assert triton_trial.triton_failure(CPU) == "wrong results: rotary_heads"


def test_a_device_that_cannot_run_them_fails(monkeypatch):
    monkeypatch.setattr(triton_trial, "find_spec", lambda name: object())
    assert triton_trial.triton_failure(CPU).startswith("NotImplementedError: ")  # no kernel is registered for a CPU


def plain_kernels(monkeypatch):
    """Let the CPU use the kernels, each computed by the form that it replaces."""

    def backward(dq, dk, dv, cos, sin):
        back = [rotary_reference(x, cos, -sin).unflatten(2, (dk.shape[2], -1)) for x in (dq, dk)]
        return torch.cat((*back, dv.unsqueeze(3)), dim=3)

    monkeypatch.setattr(triton_operators, "rotary_heads", rotary_heads_reference)
    monkeypatch.setattr(triton_operators, "rotary_heads_backward", backward)

    def activated(gate_up, weights, *, clamped):
        return (clamped_swiglu_reference if clamped else swiglu_reference)(gate_up, weights)

    def swiglu_backward(gradient, gate_up, weights, *, clamped):
        inputs = [x.detach().requires_grad_() for x in (gate_up, weights) if x is not None]
        with torch.enable_grad():
            found = torch.autograd.grad(activated(*(*inputs, None)[:2], clamped=clamped), inputs, gradient)
        return found[0], None if weights is None else found[1]

    monkeypatch.setattr(triton_operators, "cross_entropy", cross_entropy_reference)
    monkeypatch.setattr(triton_operators, "swiglu", activated)
    monkeypatch.setattr(triton_operators, "swiglu_backward", swiglu_backward)
    triton_operators.use(CPU)


def test_operators_of_a_device_that_uses_them_call_them(monkeypatch):
    plain_kernels(monkeypatch)
    qkv = torch.randn(2, 3, 2, 6, 8, requires_grad=True)
    angles = torch.randn(2, 3, 4)
    arguments = (qkv, angles.cos(), angles.sin())
    heads, expected = OPS["rotary_heads"]["cuda"](*arguments), rotary_heads_reference(*arguments)
    for got, wanted in zip(heads, expected, strict=True):
        torch.testing.assert_close(got, wanted)
    grads = [torch.randn_like(x) for x in expected]
    torch.testing.assert_close(*(torch.autograd.grad(x, qkv, grads) for x in (heads, expected)))
    monkeypatch.setattr(triton_operators, "cross_entropy", lambda *arguments: "the kernel")
    logits, labels = torch.randn(4, 9), torch.tensor([1, 0, 8, 8])
    assert OPS["cross_entropy"]["cuda"](logits, labels, torch.bfloat16) == "the kernel"
    assert OPS["cross_entropy"]["cuda"](logits, labels, torch.float32)[1] is logits  # one buffer is enough
    assert not triton_operators.takes_heads(torch.empty(1, 1, 1, 66, 64))  # too many heads for a block
    assert rotary_heads_in_one_kernel(qkv)
    assert not rotary_heads_in_one_kernel(qkv.double())


@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.parametrize(("bias", "clamped"), [(False, False), (True, False), (True, True)])
def test_activations_by_a_kernel_are_not_compiled_and_give_the_same_gradients(selective, bias, clamped, monkeypatch):
    """Of experts and of an MLP, also where their output is computed again in the backward."""
    called = []

    def run(function, *arguments):
        called.append(function)
        return function(*arguments)

    results = []
    for kernels in (False, True):
        if kernels:
            plain_kernels(monkeypatch)
        execution = Execution(run=run, selective=selective)
        form = {"gated": True, "clamped": clamped}
        experts = Experts(8, 16, 3, **form, add_bias=bias, dtype=torch.float32, execution=execution)
        options = {"mp": Axis.single("mp"), "sequence_parallel": False, "dtype": torch.float32, "device": None}
        mlp = Mlp(8, 16, **form, bias=bias, **options, execution=execution)
        torch.manual_seed(0)
        for parameter in [*experts.parameters(), *mlp.parameters()]:
            torch.nn.init.normal_(parameter)
        x, weights = torch.randn(9, 8, requires_grad=True), torch.rand(9, requires_grad=True)
        called.clear()
        y = experts.compute(x, torch.tensor([4, 0, 5]), None, weights), mlp(x[None])[0]
        assert bool(called) is not kernels
        leaves = [x, weights, *experts.parameters(), *mlp.parameters()]
        results.append([*y, *torch.autograd.grad(y[0].sum() + y[1].square().sum(), leaves)])
        assert in_one_kernel(x) is kernels
        assert not in_one_kernel(x.double())
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted)


def by_kernels():
    """Let the CPU use the kernels, in the interpreter."""
    for name, kernel in triton_operators.KERNELS.items():
        triton_operators._LIBRARY.impl(name, kernel, "CPU")
    triton_operators.use(CPU)


# What they order is positions and numbers of experts, whatever the dtype of the rows.
WITHOUT_ROWS = ("sort_pairs", "spread_pairs", "order_runs", "order_equal_runs")


def check_rows():
    """Every entry for cuda is its reference, through operators whose fakes promise the shapes that kernels return."""
    from scripts.gpu_day import row_operators as expert_rows

    by_kernels()
    torch.manual_seed(0)
    for name, small in (("T", 20), ("CAPACITY", 20), ("RUN", 9)):
        setattr(expert_rows, name, small)
    for name in expert_rows.EXPERT_ENTRIES:
        for dtype in (torch.float32, *(() if name in WITHOUT_ROWS else (torch.bfloat16,))):
            for arguments, more in expert_rows.calls(name, CPU, dtype):
                got, wanted = (OPS[name][form](*arguments, **more) for form in ("cuda", "reference"))
                for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, wanted)), strict=True):
                    if b is not None:
                        assert (a.shape, a.dtype) == (b.shape, b.dtype)
                        rounded = 2**-5 if a.dtype == torch.bfloat16 and name == "sum_message" else 0.0
                        torch.testing.assert_close(a, b, rtol=rounded, atol=rounded or 1e-6, equal_nan=True)
    trip()


def trip():
    """A message there and back in autograd, and rows without weights: as by the references, with all gradients."""
    experts = torch.rand(7, 5).topk(3).indices
    kept = torch.rand(7, 3) < 0.7
    found = []
    for device in ("cuda", "reference"):
        forms = {
            name: dict.fromkeys(("cpu", "reference"), entries.get(device, entries["reference"]))
            for name, entries in OPS.items()
        }
        with mock.patch.object(ops, "OPS", forms):
            torch.manual_seed(1)
            x, weights = torch.randn(7, 24, requires_grad=True), torch.rand(7, 3, requires_grad=True)
            order = sort_by_expert(experts, kept, 5, int(kept.sum())).order
            back, _, _ = order_by_expert(
                torch.tensor([[[0, 3], [int(kept.sum()) - 4, 1]]]), int(kept.sum()), len(order.pair)
            )
            rows, sent = unpack(pack(x, weights, order), 24, torch.float32, back, len(order.pair), sort_weights=True)
            y = unpermute(unpermute(rows * sent[:, None], back), order) + unpermute(permute(x, order), order)
            found.append((y, *torch.autograd.grad(y.sin().sum(), (x, weights))))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def check_biases():
    """Loss and gradients of a model whose biases' gradients gelu and norms make, with dropout, as by autograd."""
    found, sizes = [], replace(ERNIE, hidden_dropout=0.25)
    for start in (lambda: None, by_kernels):
        start()
        model = build(sizes)
        # On a GPU both are this operator; on a CPU a dropout draws other numbers.
        with mock.patch(
            "torch.nn.functional.dropout", lambda x, probability: torch.native_dropout(x, probability, True)[0]
        ):
            loss = total(model, batch_for(sizes, padded=True))
        loss.backward()
        found.append({"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()})
        assert ("DroppedSumNorm" in str(nodes(loss.grad_fn))) is bool(triton_operators._USED)
    for name, wanted in found[0].items():
        torch.testing.assert_close(found[1][name], wanted, rtol=1e-4, atol=1e-6, msg=name)


def nodes(node):
    """Names of a graph's nodes."""
    waiting, seen = [node], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [next_node for next_node, _ in node.next_functions]
    return {node.name() for node in seen}


def check():
    by_kernels()
    cast_as_torch()
    found = triton_trial.errors(CPU)
    made_of = {"log_probabilities", "gradient_of_logits"}
    assert set(found) == {*triton_operators.KERNELS, "spread_pairs", "cross_entropy"} - made_of
    assert max(found.values()) < triton_trial.TOLERANCE


@pytest.mark.table  # the suite runs the kernels against formulas, and their operators by the trial's examples
def test_rows_of_experts_are_those_of_the_references():
    run_interpreted(__file__, "check_rows")


def test_gradients_of_biases_are_those_of_autograd():
    run_interpreted(__file__, "check_biases")


def test_the_examples_come_out_right_in_the_interpreter():
    run_interpreted(__file__)
