"""Layers that run compiled functions: whole graphs, and the numbers of the plain ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from megapar.core.device.attention.table import CAUSAL, MASKED
from megapar.core.device.compiled import Compiled, plain
from megapar.core.device.routing import choose, score
from megapar.core.tensor_parallel.execution import Execution
from megapar.model.attention.self_attention import attend
from megapar.model.layers.norm import rms_norm
from megapar.moe.experts import activate
from tests.model.small import BIASED_MOE, DENSE, ERNIE, LATENT, MOE, batch_for, build, total

# What each of them runs, by the functions' names; all are compiled with fullgraph, so that a graph break gives up.
ATTENTION = {"rotated_heads", "attend"}
CASES = {
    "dense": (replace(DENSE, qk_norm=True), {*ATTENTION, "rms_norm", "add_rms_norm", "swiglu"}),
    "moe": (MOE, {*ATTENTION, "rms_norm", "add_rms_norm", "swiglu", "score", "choose", "activate"}),
    "moe of today": (
        replace(MOE, moe=replace(MOE.moe, score="sigmoid", groups=2, group_topk=1, sequence_aux=True)),
        {*ATTENTION, "rms_norm", "add_rms_norm", "swiglu", "score", "choose", "activate"},
    ),
    "moe gelu with biases": (
        BIASED_MOE,
        {*ATTENTION, "rms_norm", "add_rms_norm", "gelu", "score", "choose", "activate"},
    ),
    "gpt-oss": (  # sinks are the end of what attention runs uncompiled
        replace(
            *(MOE,),
            **{"attention_sinks": True, "activation": "clamped_swiglu"},
            moe=replace(MOE.moe, activation="clamped_swiglu", linear_bias=True),
        ),
        {"rotated_heads", "rms_norm", "add_rms_norm", "clamped_swiglu", "score", "choose", "activate_clamped"},
    ),
    "ernie": (ERNIE, {"attend", "layer_norm", "add_layer_norm", "gelu"}),
}


@pytest.fixture(autouse=True)
def anew():
    """What is compiled for one test is none of the next one's."""
    torch._dynamo.reset()


def gradients(sizes, run=plain, dtype=torch.float32):
    model = build(sizes, dtype=dtype, execution=Execution(run=run))
    loss = total(model, batch_for(sizes, padded=True))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", CASES)
def test_compiled_functions_are_whole_and_give_the_same_numbers(name):
    sizes, functions = CASES[name]
    run = Compiled("aot_eager")  # graphs and their backward are made, and run by torch's own kernels
    assert_same_numbers(sizes, run)
    assert {function.__name__ for function in run.functions} == functions
    assert not run.given_up  # by torch: a graph break, for one


def assert_same_numbers(sizes, run):
    """As the plain functions, loss and gradients."""
    loss, found = gradients(sizes, run)
    plain_loss, plain = gradients(sizes)
    torch.testing.assert_close(loss, plain_loss, rtol=1e-5, atol=0)
    assert found.keys() == plain.keys()
    for parameter, grad in plain.items():
        torch.testing.assert_close(found[parameter], grad, rtol=1e-4, atol=1e-5, msg=parameter)


def name(function):
    return function.__qualname__


class Copies(TorchDispatchMode):
    """The operators that copy a tensor."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name().partition(".")[0] in ("aten::clone", "aten::copy_"):
            self.found.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


def test_no_gradient_of_compiled_attention_is_copied():
    """It comes as the product before it made it, whose rows are tokens."""
    run = Compiled("aot_eager")
    for length in (8, 12):
        heads = [torch.randn(2, length, count, 8, requires_grad=True) for count in (4, 2, 2)]
        y = run(attend, *heads, None, CAUSAL, "attention")
        product = y.flatten(2)
        assert product.data_ptr() == y.data_ptr()
        with Copies() as copies:
            torch.autograd.backward(product, torch.randn(2, length, 32))
        assert (2, 4, length, 8) not in copies.found


@pytest.mark.parametrize("sizes", [DENSE, LATENT, ERNIE])
def test_layouts_of_documents_compile_nothing_again(sizes):
    """A function that took the host's facts of a mask would be compiled for each micro-batch."""
    model, batch = build(sizes, execution=Execution(run=Compiled("aot_eager"))), batch_for(sizes)
    if sizes is ERNIE:  # samples without padding, one after another
        batch |= {name: batch[name].reshape(1, -1) for name in ("tokens", "positions", "token_types", "task_types")}
    graphs = []
    for layout in range(20):
        ends = torch.tensor(sorted({2 + layout % 5, 5 + layout // 5, 16, 17 + layout % 4, 32}))
        starts = torch.cat((torch.zeros(1), ends)).int()
        total(model, batch | ({"ends": ends, "starts": starts} if sizes is ERNIE else {"ends": ends})).backward()
        graphs.append(dict(torch._dynamo.utils.counters["stats"]))
    assert graphs[0]["unique_graphs"] >= 3
    assert graphs[1:] == graphs[:1] * 19


def test_what_another_rank_gives_up_is_not_compiled():
    run = Compiled("eager")
    run.give_up({name(twice)})
    torch.testing.assert_close(run(twice, torch.ones(3)), torch.full((3,), 2.0))
    assert run.functions == {twice: {}}


def test_the_gradients_of_a_wider_router_s_input_are_added_by_compiled_code():
    run = Compiled("aot_eager")
    loss, found = gradients(MOE, run, torch.bfloat16)
    plain_loss, plain = gradients(MOE, dtype=torch.bfloat16)
    assert "gradient_sum" in {function.__name__ for function in run.functions}
    assert not run.given_up
    torch.testing.assert_close(loss, plain_loss, rtol=1e-2, atol=0)
    assert all(float((found[name] - grad).norm() <= 0.1 * grad.norm() + 1e-3) for name, grad in plain.items())


def test_what_torch_cannot_compile_runs_as_it_is_with_one_warning():
    def breaks(x):
        return x + 1 if x.sum().item() > 0 else x

    run = Compiled("eager")
    with pytest.warns(RuntimeWarning, match="breaks runs uncompiled from now on") as warnings:
        assert [float(run(breaks, torch.full((1,), value))) for value in (1.0, 2.0, -1.0)] == [2.0, 3.0, -1.0]
    assert len(warnings) == 1
    assert run.given_up == {name(breaks)}


def test_what_never_ends_to_be_compiled_runs_as_it_is(recwarn):
    run = Compiled("eager", most_forms=4)
    for width in range(2, 9):  # nobody said that these count anything
        torch.testing.assert_close(run(twice, torch.ones(3, width)), torch.full((3, width), 2.0))
    assert run.given_up == {name(twice)}
    assert len([warning for warning in recwarn if "compiled 4 times" in str(warning.message)]) == 1


def twice(x):
    return 2 * x


def test_a_backward_that_cannot_be_compiled_runs_as_it_is():
    """torch compiles a backward when it runs unless asked before, and an error there would end the run."""

    def fails(graph, inputs):
        raise RuntimeError("no backward")

    run = Compiled(aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph), bw_compiler=fails))
    x = torch.ones(3, requires_grad=True)
    with pytest.warns(RuntimeWarning, match="twice runs uncompiled from now on"):
        run(twice, x).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((3,), 2.0))
    assert run.given_up == {name(twice)}


def test_code_that_fails_at_its_first_call_is_given_up_and_an_error_of_the_function_is_raised():
    def out_of_registers(graph, inputs):
        def code(*inputs):
            raise RuntimeError("out of resources")

        return code

    run = Compiled(out_of_registers)
    with pytest.warns(RuntimeWarning, match="out of resources"):
        torch.testing.assert_close(run(twice, torch.ones(3)), torch.full((3,), 2.0))
    with pytest.warns(RuntimeWarning, match="uncompiled"), pytest.raises(RuntimeError, match="size of tensor"):
        Compiled("eager")(torch_add, torch.ones(3), torch.ones(4))


def torch_add(x, y):
    return x + y


@pytest.mark.table  # a minute of compiling
@pytest.mark.parametrize("name", ["dense", "moe", "ernie"])
def test_the_compilers_code_gives_the_same_numbers(name):
    assert_same_numbers(CASES[name][0], Compiled())


def graphs():
    """How many torch has made since the last reset."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def rows(*shape, trained=True):
    return torch.rand(shape, requires_grad=trained)


def life_of_experts(trained):
    """Rows come as the router sends them, also above frozen layers and out of wider rows."""
    for count in (40, 44, 52, 1, 0, 2, 60):
        yield activate, rows(count, 32, trained=trained), True, rows(count, 1, trained=trained)
    for count in (40, 44, 1, 0):
        weights = rows(count, 1, trained=trained)
        yield activate, rows(count, 32, trained=False), True, weights
        yield activate, rows(count, 64, trained=trained)[:, :32], True, weights


def life_of_norms(trained):
    """One function for hidden states, heads and single rows, of lengths that grow, with one sample and with several."""
    samples = (2, 16, 32), (2, 24, 32), (2, 40, 32), (1, 64, 32), (1, 72, 32)
    heads = (2, 16, 4, 8), (2, 40, 4, 8), (2, 16, 2, 8)
    for shape in (*samples, *heads, (9, 32), (1, 32), (0, 32), (77, 32)):
        yield rms_norm, rows(*shape, trained=trained), torch.ones(shape[-1]), 1e-5


def life_of_a_router(trained):
    """Slices of a growing sequence."""
    sizes, bias = MOE.moe, torch.zeros(MOE.moe.num_experts)
    for count in (40, 44, 52, 1, 0, 2, 60):
        logits = rows(count, sizes.num_experts, trained=trained)
        yield score, logits, sizes
        yield choose, logits.detach().softmax(1), bias, sizes


def life_of_attention(trained):
    """Lengths that grow, with padding and without."""
    for samples, length in ((2, 16), (2, 24), (1, 24), (1, 32), (3, 40)):
        heads = [rows(samples, length, n, 8, trained=trained) for n in (4, 2, 2)]
        yield attend, *heads, None, CAUSAL, "attention"
        yield attend, *heads, torch.arange(length).expand(samples, -1) < length - 3, MASKED, "attention"


# How many graphs the lives may take: for each function one per grad mode and width, and by what is differentiated,
# contiguous, padded, or a single sample.
LIVES = {life_of_experts: 5, life_of_norms: 10, life_of_a_router: 4, life_of_attention: 8}


@pytest.mark.parametrize("life", LIVES)
def test_no_size_in_a_life_ends_a_run_and_few_are_compiled(life, recwarn):
    run = Compiled("eager")
    torch._dynamo.utils.counters.clear()
    for trained in (True, False):  # then an evaluation
        with torch.set_grad_enabled(trained):
            for function, *arguments in life(trained):
                torch.testing.assert_close(run(function, *arguments), function(*arguments), msg=function.__name__)
    assert not [str(warning.message) for warning in recwarn if "compile" in str(warning.message)]
    assert graphs() <= LIVES[life]
