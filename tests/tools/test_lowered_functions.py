"""Kernels that the compiler would generate for a GPU, beside those that it generates for the CPU here."""

from __future__ import annotations

import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from megapar.core.device.compiled import plain
from megapar.model.layers.mlp import gelu, swiglu
from megapar.model.layers.norm import add_rms_norm
from scripts.lowered_functions import GENERATED, LoweredFunctions
from scripts.tracing.gpu import FakeGpu
from scripts.tracing.tally import MatrixProduct, Sums, Tally

ROWS, WIDTH = 64, 128


def inputs(function, device):
    shapes = {
        add_rms_norm: [(2, ROWS, WIDTH), (2, ROWS, WIDTH), (WIDTH,)],
        swiglu: [(2, ROWS, 2, WIDTH)],
        gelu: [(2, ROWS, WIDTH)],
        scores: [(ROWS, WIDTH), (WIDTH, 8)],
    }
    tensors = [torch.ones(shape, device=device) for shape in shapes[function]]
    return (*tensors, 1e-5) if function is add_rms_norm else tuple(tensors)


def scores(x, weight):
    return (2 * x @ weight).softmax(-1)


def on_a_gpu(function):
    """The tally of one call without gradients: a backward needs the preloaded library of scripts/trace_cuda.sh."""
    tally, device = Tally("cuda"), FakeGpu(torch.device("cuda", 0))
    run = LoweredFunctions(tally, device)
    with FakeTensorMode(), torch.no_grad():
        arguments = inputs(function, "cuda")
        expected = plain(function, *arguments)
        tally.sums = Sums()
        for _ in range(2):  # lowered once, counted twice
            with tally:
                made = run(function, *arguments)
    assert type(made) is type(expected)
    for one, other in zip(tree_leaves(made), tree_leaves(expected), strict=True):
        assert (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
    return tally.sums


@pytest.mark.parametrize("function", [add_rms_norm, swiglu, gelu])
def test_as_many_kernels_as_the_compiler_generates_for_the_cpu(function):
    torch._dynamo.reset()
    with torch.no_grad():
        _, codes = run_and_get_code(torch.compile(function, fullgraph=True), *inputs(function, "cpu"))
    calls = [call for code in codes for call in re.findall(r"^ +cpp_fused_\w+\(", code, re.MULTILINE)]
    assert on_a_gpu(function).kernels == {(GENERATED, function.__name__): 2 * len(calls)}


def test_each_tensor_is_read_and_written_once():
    size = 4 * 2 * ROWS * WIDTH
    assert on_a_gpu(add_rms_norm).bytes == {(GENERATED, "add_rms_norm"): 2 * (4 * size + 4 * WIDTH)}
    assert on_a_gpu(swiglu).bytes == {(GENERATED, "swiglu"): 2 * 3 * size}


def test_products_are_kernels_of_their_library():
    sums = on_a_gpu(scores)
    assert sums.kernels == {("mm", "scores"): 2, (GENERATED, "scores"): 4}  # before and after the product
    assert sums.products == {(MatrixProduct(ROWS, 8, WIDTH), "scores"): 2}
