"""Operators of Triton kernels: what a trace sees of them, and the trial before a device uses them."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megapar.core.device import triton_operators
from tests.support.interpreted import run_interpreted

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def untried():
    triton_operators.passed.cache_clear()
    yield
    triton_operators.passed.cache_clear()


def test_a_trace_sees_the_shapes_of_the_results():
    with FakeTensorMode():
        qkv, angle = torch.empty(2, 3, 4, 5, 8, dtype=torch.bfloat16), torch.empty(2, 3, 4)
        heads = triton_operators.rotary_heads(qkv, angle, angle)
        assert [tuple(x.shape) for x in heads] == [(2, 3, 12, 8), (2, 3, 4, 8), (2, 3, 4, 8)]
        assert triton_operators.rotary_heads_backward(*heads, angle, angle).shape == qkv.shape
        logits = torch.empty(6, 50)
        log_p, gradient = triton_operators.cross_entropy(logits, torch.empty(6, dtype=torch.int64), torch.bfloat16)
        assert (log_p.shape, log_p.dtype) == ((6,), torch.float32)
        assert (gradient.shape, gradient.dtype) == ((6, 50), torch.bfloat16)


@pytest.mark.parametrize(("device", "installed"), [("cpu", True), ("cuda:0", False)])
def test_other_devices_and_installations_try_nothing(device, installed, monkeypatch):
    monkeypatch.setattr(triton_operators, "find_spec", lambda name: object() if installed else None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not triton_operators.usable(torch.device(device))


@pytest.mark.parametrize("errors", [{"rotary_heads": 0.5}, {"rotary_heads": float("nan")}])
def test_a_kernel_that_computes_something_else_is_not_used(errors, monkeypatch):
    monkeypatch.setattr(triton_operators, "_errors", lambda device: {"cross_entropy": 0.001, **errors})
    with pytest.warns(RuntimeWarning, match=r"not used on cpu \(rotary_heads\)"):
        assert not triton_operators.passed(CPU)


def test_a_device_that_cannot_run_them_goes_without():
    with pytest.warns(RuntimeWarning, match="NotImplementedError.*the numbers are the same without them"):
        assert not triton_operators.passed(CPU)  # no kernel is registered for a CPU


def check():
    for name, kernel in (
        ("rotary_heads", triton_operators._rotary_heads),
        ("rotary_heads_backward", triton_operators._rotary_heads_backward),
        ("log_probabilities", triton_operators._log_probabilities),
        ("gradient_of_logits", triton_operators._gradient_of_logits),
    ):
        triton_operators._LIBRARY.impl(name, kernel, "CPU")
    found = triton_operators._errors(CPU)
    assert set(found) == {"rotary_heads", "rotary_heads_backward", "cross_entropy"}
    assert max(found.values()) < triton_operators.TOLERANCE


def test_the_examples_come_out_right_in_the_interpreter():
    run_interpreted(__file__)
