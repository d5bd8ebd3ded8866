"""Every form of attention has the sinks of one formula, forward and backward, after any number of merges of tiles."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megapar.core.device.attention import whole, windows
from megapar.core.device.attention.mask import causal_keys
from megapar.core.device.attention.row_statistic import RowStatistic
from megapar.core.device.attention.sinks import SinkRows
from megapar.core.device.attention.table import CAUSAL, FULL, LSE, MASKED, MAXIMUM
from megapar.core.device.attention.whole import attention_reference
from megapar.core.device.ops import OPS
from tests.core.device.attention.test_row_statistic import (
    CPU,
    ENDS,
    NAMES,
    NPU,
    REFERENCE,
    SLICE,
    WINDOW,
    B,
    N,
    S,
    by_hand,
    called,
    heads,
)
from tests.support.ascend import FromOutput

STRONG, WEAK, MIXED = (8.0,) * N, (-8.0,) * N, (8.0, -8.0, 0.5, 3.0)  # scores are up to about 10
SINKS = (STRONG, WEAK, MIXED)


def sinks_of(values: tuple[float, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype, requires_grad=True)


def seen_keys(name: str) -> Tensor:
    """[B, 1, S, S] bool: causal, in documents, in a window."""
    seen = causal_keys(S, S, torch.device("cpu"), window=WINDOW if name.startswith("window") else None)
    if name.startswith("packed") or name.endswith("documents"):
        number = torch.bucketize(torch.arange(B * S), torch.tensor(ENDS), right=True).view(B, 1, S)
        return ((number.mT == number) & seen)[:, None]
    return seen.expand(B, 1, S, S)


def formula(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, seen: Tensor) -> Tensor:
    """A softmax over the keys and one column more, which is dropped, as transformers computes it."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    return torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)), -1).softmax(-1)[..., :-1] @ v


def compared(y: Tensor, want: Tensor, inputs: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    """Within ``tolerance`` of the largest element, output and gradients of all inputs."""
    upstream = torch.randn(want.shape, generator=torch.Generator().manual_seed(7), dtype=want.dtype)
    found = (y, *torch.autograd.grad(y, inputs, upstream.to(y.dtype), retain_graph=True))
    for a, b in zip(found, (want, *torch.autograd.grad(want, wanted, upstream)), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=tolerance * float(b.detach().abs().max()))


@pytest.mark.parametrize("values", SINKS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("device", [REFERENCE, CPU, NPU])
def test_every_form_is_the_formula(name: str, device: str, values: tuple[float, ...]) -> None:
    """In fp64 to rounding; the operators of Ascend have scores in fp32."""
    inputs, wanted = [*heads(torch.float64), sinks_of(values)], [*heads(torch.float64), sinks_of(values)]
    y = called(name, device, *inputs[:3], rows=SinkRows(inputs[3]))
    want = formula(*wanted, seen_keys(name))
    if "slice" in name:
        want = want[:, :, SLICE]
    compared(y, want, inputs, wanted, 2e-5 if device == NPU else 1e-12)


@pytest.mark.parametrize("device", [CPU, NPU])
def test_attention_in_both_directions_and_with_padding(device: str) -> None:
    valid = torch.arange(S) < torch.tensor([[7], [4]])
    for form, seen in ((FULL, torch.ones(1, 1, S, S, dtype=torch.bool)), (MASKED, valid[:, None, None])):
        inputs, wanted = [*heads(torch.float64), sinks_of(MIXED)], [*heads(torch.float64), sinks_of(MIXED)]
        more = {"valid": valid} if form == MASKED else {}
        y = OPS["attention"][device](*inputs[:3], form=form, rows=SinkRows(inputs[3]), **more)
        compared(y, formula(*wanted, seen), inputs, wanted, 2e-5 if device == NPU else 1e-12)


def of_output(q, k, v, seen, scale=None):
    """(y, log-sum-exps) of [B, heads, S, D] by a backward that reads its output, as those of kernels do."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT).double() * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~seen, -torch.inf)
    return FromOutput.apply(scores, v), scores.detach().logsumexp(-1)


def causal(q: Tensor, k: Tensor, window: int | None = None) -> Tensor:
    return causal_keys(q.shape[2], k.shape[2], q.device, k.shape[2] - q.shape[2], window)


def flash(q, k, v, dropout, is_causal, scale=None):
    return (*of_output(q, k, v, causal(q, k), scale), None, None)


def cudnn(q, k, v, bias, compute_lse, dropout, is_causal):
    y, lse = of_output(q, k, v, causal(q, k))
    return y, lse.unsqueeze(-1), None


def varlen(
    q, k, v, starts_q, starts_k, most_q, most_k, dropout, is_causal, debug, *,
    scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    """[T, heads, D] by the starts of documents, log-sum-exps [N, T], from one output."""
    seen = torch.zeros(q.shape[0], k.shape[0], dtype=torch.bool)
    for a, b, c, d in zip(*(x.tolist() for x in (starts_q, starts_q[1:], starts_k, starts_k[1:])), strict=False):
        window = None if window_size_left is None else window_size_left + 1
        seen[a:b, c:d] = causal_keys(b - a, d - c, q.device, d - c - b + a, window)
    y, lse = of_output(*(x.transpose(0, 1)[None] for x in (q, k, v)), seen, scale)
    return y[0].transpose(0, 1), lse[0], None, None, None


@pytest.mark.parametrize(
    "name", ["attention_flash", "attention_cudnn", "packed_attention", "attention_slice", "packed_attention_slice",
             "window", "window, documents"],
)  # fmt: skip
def test_kernels_of_a_gpu_get_the_output_that_their_backward_reads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They run on CUDA only; stand-ins with their signatures read the output that they saved, as theirs do."""
    monkeypatch.setattr(whole, "capability_of", lambda like: (9, 0))
    operators = {"_scaled_dot_product_flash_attention": flash, "_scaled_dot_product_cudnn_attention": cudnn}
    for operator, form in {**operators, "_flash_attention_forward": varlen}.items():
        monkeypatch.setattr(torch.ops.aten, operator, form)
    for sinks in SINKS:
        inputs = [*heads(torch.bfloat16), sinks_of(sinks, torch.bfloat16)]
        wanted = [x.detach().double().requires_grad_() for x in inputs]
        y = called(name, "cuda", *inputs[:3], rows=SinkRows(inputs[3]))
        want = formula(*wanted, seen_keys(name.removesuffix("_flash").removesuffix("_cudnn")))
        compared(y, want[:, :, SLICE] if "slice" in name else want, inputs, wanted, 4e-2)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_plain_tiles_of_a_window_and_dropped_weights(dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a GPU without FlashAttention. Dropped weights are those of keys: a sink is not drawn."""
    monkeypatch.setattr(windows, "block_cpu", windows.block_reference)
    monkeypatch.setattr(windows, "block_backward_cpu", windows.block_backward_reference)
    inputs, wanted = [*heads(torch.float64), sinks_of(MIXED)], [*heads(torch.float64), sinks_of(MIXED)]
    want = formula(*wanted, seen_keys("window"))
    if not dropout:
        y = windows.attention_window(*inputs[:3], window=WINDOW, rows=SinkRows(inputs[3]))
        compared(y, want, inputs, wanted, 1e-12)
        return
    dropped = []
    for rows in (None, SinkRows(inputs[3])):
        torch.manual_seed(0)
        dropped.append(windows.attention_window(*inputs[:3], window=WINDOW, dropout=dropout, rows=rows))
    q, k = inputs[0], inputs[1].repeat_interleave(2, 1)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen_keys("window"), -torch.inf)
    factor = torch.sigmoid(scores.logsumexp(-1) - inputs[3][:, None]).unsqueeze(-1)
    compared(dropped[1], dropped[0] * factor, inputs, inputs, 1e-12)


@pytest.mark.parametrize("device", [REFERENCE, CPU, NPU])
def test_a_row_that_sees_nothing_is_zero(device: str) -> None:
    """And has no gradient, of any kind."""
    inputs = [*heads(), sinks_of(WEAK, torch.float32)]
    valid = torch.zeros(B, S, dtype=torch.bool)
    rows = SinkRows(inputs[3])
    y = OPS["attention"][device](*inputs[:3], form=MASKED, valid=valid, rows=rows) if device != NPU else (
        rows.weigh(torch.zeros(B, N, S, 2, requires_grad=True) * inputs[0].sum(), torch.full((B, N, S), -math.inf))
    )  # fmt: skip
    assert not y.any()
    for grad in torch.autograd.grad(y.sum(), inputs, allow_unused=True):
        assert grad is None or not grad.any()


@pytest.mark.parametrize(("device", "kind"), [(REFERENCE, LSE), (REFERENCE, MAXIMUM), (CPU, LSE), (NPU, LSE)])
@pytest.mark.parametrize("name", NAMES)
def test_a_statistic_is_that_of_the_scores_without_a_sink(name: str, device: str, kind: str) -> None:
    """So that QK-clip clips scores, whatever the sink."""
    part = SLICE if "slice" in name else slice(0, S)
    largest, rows = torch.full((N,), -torch.inf), torch.ones(B, S, dtype=torch.bool)
    called(name, device, *heads(), rows=SinkRows(sinks_of(STRONG, torch.float32), RowStatistic(largest, kind)))
    documents = name.startswith("packed") or name.endswith("documents")
    window = WINDOW if name.startswith("window") else S
    want = by_hand(kind, rows[:, part], part.start, ENDS if documents else None, window)
    torch.testing.assert_close(largest.double(), want, rtol=1e-5, atol=1e-5)


def test_sums_are_in_fp32_in_bf16() -> None:
    """An output rounds twice, a sink's gradient once: many small terms are not lost."""
    inputs = [*heads(torch.bfloat16), sinks_of(MIXED, torch.bfloat16)]
    wanted = [x.detach().double().requires_grad_() for x in inputs]
    y = called("attention", CPU, *inputs[:3], rows=SinkRows(inputs[3]))
    compared(y, formula(*wanted, seen_keys("attention")), inputs, wanted, 4e-2)
    plain = attention_reference(*inputs[:3], form=CAUSAL)
    assert float((plain - y).detach().abs().max()) > 0.5, "the sink would show"
