"""Every form of attention gives the statistic of the same rows, and its output is what it is without one."""

from __future__ import annotations

import math

import pytest
import torch

from megapar.core.attention_mask import AttentionMask
from megapar.core.device.attention import whole, windows
from megapar.core.device.attention.mask import DeviceMask
from megapar.core.device.attention.row_statistic import RowStatistic
from megapar.core.device.attention.slices import packed_attention_slice_merged
from megapar.core.device.attention.table import AUTO, CAUSAL, LSE, MAXIMUM, ROWS, AttentionCall, choose
from megapar.core.device.attention.table import WINDOW as WINDOW_FORM
from megapar.core.device.ops import OPS, op
from tests.support.ascend import stand_in

stand_in()
B, N, G, S, D = 2, 4, 2, 8, 16
ENDS = [3, 8, 9, 10, 16]
SLICE = slice(2, 7)
WINDOW = 3  # shorter than a document, and S is not a multiple of it
REFERENCE, CPU, NPU = "reference", "cpu", "npu"
NAMES = (
    *("attention", "packed_attention", "attention_slice", "packed_attention_slice"),
    *("window", "window, documents"),
)


def heads(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(11)  # with it the largest scores are before a window, and in padding
    return [torch.randn(B, n, S, D, generator=draw).mul(3).to(dtype).requires_grad_() for n in (N, G, G)]


def counted() -> torch.Tensor:
    """Padding in both samples; in the second one it begins inside the slice."""
    return torch.arange(S) < torch.tensor([[7], [4]])


def by_hand(kind: str, rows: torch.Tensor, first: int, ends: list[int] | None, window: int = S) -> torch.Tensor:
    """[N]: row by row, each with the keys before it in document and window. rows: [B, S] bool of those that count."""
    q, k, _ = (x.detach().double() for x in heads())
    largest = [-math.inf] * N
    for b in range(B):
        for row in range(first, first + rows.shape[1]):
            if not rows[b, row - first]:
                continue
            start = 0 if ends is None else max((end - b * S for end in ends if end <= b * S + row), default=0)
            start = max(start, 0, row + 1 - window)
            for n in range(N):
                scores = k[b, n // (N // G), start : row + 1] @ q[b, n, row] * D**-0.5
                found = scores.max() if kind == MAXIMUM else scores.logsumexp(0)
                largest[n] = max(largest[n], float(found))
    return torch.tensor(largest, dtype=torch.float64)


def windowed(name: str) -> DeviceMask:
    mask = AttentionMask.of_documents(ENDS, B) if name == "window, documents" else AttentionMask(B, S, causal=True)
    return DeviceMask.of(mask, torch.device("cpu")).within(WINDOW)


def seen_by(name: str) -> tuple[list[int] | None, int]:
    """The ends of the documents and the window of a form."""
    documents = name.startswith("packed") or name.endswith("documents")
    return ENDS if documents else None, WINDOW if name.startswith("window") else S


def called(name: str, device: str, q, k, v, **more):
    """One call of a form, and the first row that it has."""
    if name.startswith("window"):
        return OPS["packed_attention"][device](q, k, v, mask=windowed(name), **more)
    mask = DeviceMask.of(AttentionMask.of_documents(ENDS, B), torch.device("cpu"))
    form = OPS[name][device]
    if name in ("attention", "attention_flash", "attention_cudnn"):
        return form(q, k, v, form=CAUSAL, **more)
    if name == "packed_attention":
        return form(q, k, v, mask=mask, **more)
    q, k, v = q[:, :, SLICE], k[:, :, : SLICE.stop], v[:, :, : SLICE.stop]
    return form(q, k, v, **({"documents": mask.cut(SLICE)} if name.startswith("packed") else {}), **more)


def lower_right(q, k, v, scale, causal=True, left=None):
    """(y, log-sum-exps) of [B, heads, S, D], as FlashAttention aligns its mask. left: keys before a row's own."""
    k, v = (x.float().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q.float() @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        unseen = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2])
        if left is not None:
            unseen |= torch.ones_like(unseen).tril(k.shape[2] - q.shape[2] - left - 1)
        scores = scores.masked_fill(unseen, -torch.inf)
    return (scores.softmax(-1) @ v).to(q.dtype), scores.logsumexp(-1)


def flash(q, k, v, dropout, causal, scale=None):
    return (*lower_right(q, k, v, scale, causal), None, None)


def cudnn(q, k, v, bias, compute_lse, dropout, causal):
    assert (bias, compute_lse) == (None, True)
    y, lse = lower_right(q, k, v, None, causal)
    return y, lse.unsqueeze(-1), None


def varlen(
    q, k, v, starts_q, starts_k, most_q, most_k, dropout, causal, debug, *,
    scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    """[T, heads, D] by the starts of documents, log-sum-exps [N, T]."""
    assert window_size_right == (None if window_size_left is None else 0)
    ys, lses = [], []
    for a, b, c, d in zip(*(x.tolist() for x in (starts_q, starts_q[1:], starts_k, starts_k[1:])), strict=False):
        heads_of = (x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d]))
        y, lse = lower_right(*heads_of, scale, causal, window_size_left)
        ys.append(y[0].transpose(0, 1))
        lses.append(lse[0])
    return torch.cat(ys), torch.cat(lses, dim=1), None, None, None


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("name", "of"),
    [
        *(("attention_flash", "attention"), ("attention_cudnn", "attention"), ("packed_attention",) * 2),
        *(("attention_slice",) * 2, ("packed_attention_slice",) * 2, ("window",) * 2, ("window, documents",) * 2),
    ],
)
def test_kernels_of_a_gpu_give_the_statistic(name, of, padded, monkeypatch):
    """They run on CUDA only; stand-ins with their signatures return log-sum-exps in the shapes that theirs have."""
    monkeypatch.setattr(whole, "capability_of", lambda like: (9, 0))
    operators = {"_scaled_dot_product_flash_attention": flash, "_scaled_dot_product_cudnn_attention": cudnn}
    for operator, form in {**operators, "_flash_attention_forward": varlen}.items():
        monkeypatch.setattr(torch.ops.aten, operator, form)
    part = SLICE if "slice" in name else slice(0, S)
    rows = counted() if padded else torch.ones(B, S, dtype=torch.bool)
    largest = torch.full((N,), -torch.inf)
    q, k, v = heads(torch.bfloat16)
    y = called(name, "cuda", q, k, v, rows=RowStatistic(largest, LSE, rows[:, part] if padded else None))
    want = by_hand(LSE, rows[:, part], part.start, *seen_by(name))
    torch.testing.assert_close(largest.double(), want, rtol=2e-2, atol=2e-2)
    same = called(of, REFERENCE, *(x.float() for x in heads(torch.bfloat16)))
    torch.testing.assert_close(y.float(), same, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("device", "kind"), [(REFERENCE, LSE), (REFERENCE, MAXIMUM), (CPU, LSE), (NPU, LSE)])
def test_every_form_gives_the_statistic(name: str, device: str, kind: str, padded: bool) -> None:
    """And the same output and gradients as without it."""
    part = SLICE if "slice" in name else slice(0, S)
    rows = counted() if padded else torch.ones(B, S, dtype=torch.bool)
    largest = torch.full((N,), -torch.inf)
    seen = RowStatistic(largest, kind, rows[:, part] if padded else None)
    inputs = heads()
    y = called(name, device, *inputs, rows=seen)
    want = by_hand(kind, rows[:, part], part.start, *seen_by(name))
    torch.testing.assert_close(largest.double(), want, rtol=1e-5, atol=1e-5)
    plain = heads()
    same = called(name, device, *plain)
    torch.testing.assert_close(y, same)
    for a, b in zip(torch.autograd.grad(y.sum(), inputs), torch.autograd.grad(same.sum(), plain), strict=True):
        torch.testing.assert_close(a, b)


def test_padding_would_show() -> None:
    """The rows that do not count have larger scores here, so that the tests above see them left out."""
    everything = torch.ones(B, S, dtype=torch.bool)
    assert (by_hand(LSE, everything, 0, None) > by_hand(LSE, counted(), 0, None)).any()


@pytest.mark.parametrize("ends", [None, ENDS])
def test_keys_before_a_window_would_show(ends: list[int] | None) -> None:
    everything = torch.ones(B, S, dtype=torch.bool)
    for kind in (LSE, MAXIMUM):
        assert (by_hand(kind, everything, 0, ends) > by_hand(kind, everything, 0, ends, WINDOW)).any()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_plain_tiles_of_a_window_give_the_log_sum_exps(dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a GPU without FlashAttention; dropped weights change no score."""
    monkeypatch.setattr(windows, "block_cpu", windows.block_reference)
    largest = torch.full((N,), -torch.inf)
    windows.attention_window(*heads(), window=WINDOW, dropout=dropout, rows=RowStatistic(largest, LSE, counted()))
    torch.testing.assert_close(largest.double(), by_hand(LSE, counted(), 0, None, WINDOW), rtol=1e-5, atol=1e-5)


def test_tiles_of_a_window_have_no_maximum() -> None:
    rows = RowStatistic(torch.full((N,), -torch.inf), MAXIMUM)
    with pytest.raises(ValueError, match="the statistic is the maximum"):
        windows.attention_window(*heads(), window=WINDOW, rows=rows)


def test_a_statistic_grows_over_calls_and_refuses_what_it_is_not() -> None:
    largest = torch.full((2,), -torch.inf)
    rows = RowStatistic(largest, LSE)
    for values in ([1.0, 5.0], [3.0, 2.0]):
        rows.see_lse(torch.tensor(values).view(1, 2, 1))
    assert largest.tolist() == [3.0, 5.0]
    with pytest.raises(ValueError, match="the statistic is the maximum"):
        RowStatistic(largest, MAXIMUM).see_lse(torch.zeros(1, 2, 1))


def test_the_log_sum_exp_is_at_most_the_logarithm_of_the_keys_above_the_maximum() -> None:
    rows = torch.ones(B, S, dtype=torch.bool)
    lse, maximum = (by_hand(kind, rows, 0, None) for kind in (LSE, MAXIMUM))
    assert ((lse - maximum >= 0) & (lse - maximum <= math.log(S))).all()


def test_documents_by_one_call_each_count_their_rows() -> None:
    """The table has another form for this device's dtype, and other devices fall back to this one."""
    assert OPS["packed_attention_slice"]["cpu"] is packed_attention_slice_merged
    assert op("packed_attention_slice", torch.zeros(1)) is packed_attention_slice_merged


def test_plain_products_alone_give_the_maximum() -> None:
    assert {row.kernel for row in ROWS if MAXIMUM in row.statistics} == {"math"}
    assert {row.kernel for row in ROWS if LSE not in row.statistics} == {"efficient"}


def test_every_kernel_of_a_window_gives_the_log_sum_exp() -> None:
    kernels = {row.kernel: row.statistics for row in ROWS if WINDOW_FORM in row.forms}
    assert kernels == {"flash3": (LSE,), "varlen": (LSE,), "math": (LSE, MAXIMUM)}
    call = AttentionCall(WINDOW_FORM, 128, 128, "bfloat16", (9, 0))
    assert choose(AUTO, call._replace(statistic=LSE)) == choose(AUTO, call)
    assert choose(AUTO, call._replace(statistic=MAXIMUM)).kernel == "math"
