"""Layers that run compiled functions: whole graphs, and the numbers of the plain ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megapar.core.compiled import Compiled, run_functions
from tests.model.small import BIASED_MOE, DENSE, ERNIE, MOE, batch_for, build, total

# What each of them runs, by the functions' names; all are compiled with fullgraph, so that a graph break raises.
ATTENTION = {"turned_heads", "attend"}
CASES = {
    "dense": (replace(DENSE, qk_norm=True), {*ATTENTION, "rms_norm", "add_rms_norm", "swiglu"}),
    "moe": (MOE, {*ATTENTION, "rms_norm", "add_rms_norm", "swiglu", "score", "choose", "router_sums", "activate"}),
    "moe of today": (
        replace(MOE, moe=replace(MOE.moe, score="sigmoid", groups=2, group_topk=1, sequence_aux=True)),
        {*ATTENTION, "rms_norm", "add_rms_norm", "swiglu", "score", "choose", "router_sums", "activate"},
    ),
    "moe gelu with biases": (
        BIASED_MOE,
        {*ATTENTION, "rms_norm", "add_rms_norm", "gelu", "score", "choose", "router_sums", "activate"},
    ),
    "ernie": (ERNIE, {"attend", "layer_norm", "add_layer_norm", "gelu"}),
}


@pytest.fixture(autouse=True)
def anew():
    """What is compiled for one test is none of the next one's."""
    torch._dynamo.reset()


def gradients(sizes, run=None, dtype=torch.float32):
    model = build(sizes, dtype=dtype)
    if run is not None:
        run_functions(model, run)
    loss = total(model, batch_for(sizes, padded=True))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", CASES)
def test_compiled_functions_are_whole_and_give_the_same_numbers(name):
    sizes, functions = CASES[name]
    run = Compiled("aot_eager")  # graphs and their backward are made, and run by torch's own kernels
    loss, found = gradients(sizes, run)
    plain_loss, plain = gradients(sizes)
    assert {function.__name__ for function in run.functions} == functions
    torch.testing.assert_close(loss, plain_loss, rtol=1e-5, atol=0)
    assert found.keys() == plain.keys()
    for parameter, grad in plain.items():
        torch.testing.assert_close(found[parameter], grad, rtol=1e-4, atol=1e-5, msg=parameter)


def test_a_graph_break_is_an_error():
    def breaks(x):
        return x + 1 if x.sum().item() > 0 else x

    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        Compiled("eager")(breaks, torch.ones(2))


@pytest.mark.table  # a minute of compiling
@pytest.mark.parametrize("name", ["dense", "moe", "ernie"])
def test_the_compilers_code_gives_the_same_numbers(name):
    sizes, _ = CASES[name]
    loss, found = gradients(sizes, Compiled())
    plain_loss, plain = gradients(sizes)
    torch.testing.assert_close(loss, plain_loss, rtol=1e-5, atol=0)
    for parameter, grad in plain.items():
        torch.testing.assert_close(found[parameter], grad, rtol=1e-4, atol=1e-5, msg=parameter)
