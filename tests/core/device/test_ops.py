"""Every entry of the operator table against its reference: values and gradients."""

from __future__ import annotations

import inspect
import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import varlen

from megapar.core.attention_mask import AttentionMask
from megapar.core.device.attention import documents as packed_attention
from megapar.core.device.attention import slices
from megapar.core.device.attention import whole as attention
from megapar.core.device.attention.documents import (
    by_kernel,
    packed_attention_by_document,
    packed_attention_reference,
    packed_attention_varlen,
)
from megapar.core.device.attention.mask import DeviceMask, causal_keys
from megapar.core.device.attention.slices import (
    attention_slice_merged,
    attention_slice_reference,
    packed_attention_slice_reference,
)
from megapar.core.device.attention.table import CAUSAL, FULL, MASKED, VARLEN, WINDOW
from megapar.core.device.attention.whole import attention_fused, attention_reference, plain_attention
from megapar.core.device.kinds import device_class
from megapar.core.device.ops import OPS, op
from megapar.moe.expert_order import sort_by_expert
from tests.support.ascend import stand_in

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
stand_in()
# In test_blocks, test_dtypes, test_layer_ops, test_triton_operators, test_bucket_rows, test_latent_heads, test_fp8 and
# triton_kernels/test_router.
APART = [
    "fp8_weight",
    "fp8_tensor_weight",
    "fp8_product",
    "fp8_norm",
    "fp8_swiglu",
    "fp8_swiglu_backward",
    "fp8_experts",
    "fp8_grouped_product",
    "attention_block",
    "attention_block_backward",
    "add_gradient",
    "add_product",
    "route",
    "wide_product",
    "cross_entropy",
    "pack",
    "unpack",
    "sum_message",
    "sort_pairs",
    "spread_pairs",
    "order_runs",
    "order_equal_runs",
    "adamw",
    "pack_bucket",
    "unpack_bucket",
    "rotate_last",
    "join_heads",
]
ENTRIES = [
    (name, device)
    for name, forms in OPS.items()
    for device, form in forms.items()
    if form is not forms["reference"] and name not in APART
]


def draw(seed, *shape, dtype):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return tensor.requires_grad_()


def cases(name, dtype):
    """(tensors, keyword arguments) for one op."""
    if name == "rms_norm":
        return [((draw(0, 3, 16, dtype=dtype), draw(1, 16, dtype=dtype)), {"epsilon": 1e-5})]
    if name in ("swiglu", "clamped_swiglu"):
        weights = torch.rand(2, 3, 1, generator=torch.Generator().manual_seed(1))
        return [((draw(0, 2, 3, 2, 16, dtype=dtype),), arguments) for arguments in ({}, {"weights": weights})]
    if name == "small_embedding":
        indices = torch.tensor([[0, 3, 3], [1, 0, 3]])
        return [((draw(0, 5, 16, dtype=dtype),), {"indices": some}) for some in (indices, indices[0])]
    if name in ("rotary", "rotary_heads"):
        angles = draw(1, 2, 5, 8, dtype=torch.float32).detach()
        shapes = [(2, 5, 4, 16)] if name == "rotary" else [(2, 5, 2, queries + 2, 16) for queries in (1, 4)]
        return [((draw(0, *shape, dtype=dtype),), {"cos": angles.cos(), "sin": angles.sin()}) for shape in shapes]
    if name.startswith("grouped"):
        widths = {"linear": (16, None), "input_gradient": (24, None), "weight_gradient": (24, 16)}
        width, second = widths[name.removeprefix("grouped_")]
        return [
            ((draw(0, 9, width, dtype=dtype), draw(1, *((9, second) if second else (3, 24, 16)), dtype=dtype)),
             {"counts_E": torch.tensor(counts)})
            for counts in ([4, 0, 5], [9, 0, 0])
        ]  # fmt: skip
    if name in ("permute", "unpermute"):
        return permutations(name, dtype)
    if name == "packed_attention":
        masks = [AttentionMask.of_documents([3, 8, 9, 10, 16], 2, causal=causal) for causal in (True, False)]
        masks += [mask.within(window) for mask in (masks[0], AttentionMask(2, 8, causal=True)) for window in (1, 2, 4)]
        shapes = [[(2, n, 8, 16) for n in (4, keys, keys)] for keys in (2, 4)]
        return [
            (
                tuple(draw(i, *s, dtype=dtype) for i, s in enumerate(one)),
                {"mask": DeviceMask.of(mask, torch.device("cpu"))},
            )
            for one in shapes
            for mask in masks
        ]
    if name == "packed_attention_slice":
        documents = DeviceMask.of(AttentionMask.of_documents([3, 8, 9, 10, 16], 2), torch.device("cpu"))
        masks = [documents, documents.within(3), DeviceMask(AttentionMask(2, 8, causal=True)).within(4)]
        cuts = [mask.cut(slice(*place)) for mask in masks for place in ((0, 3), (2, 8), (4, 5), (0, 8))]
        return [
            (
                tuple(draw(i, 2, *shape, 16, dtype=dtype) for i, shape in enumerate(((4, own), (n, seen), (n, seen)))),
                {"documents": cut},
            )
            for cut in cuts
            for own, seen in ((cut.place.stop - cut.place.start, cut.place.stop - cut.first_key),)
            for n in (2, 4)
        ]
    if name == "attention_slice":
        return [
            (tuple(draw(i, *shape, dtype=dtype) for i, shape in enumerate(((2, 4, s, 16), keys, keys))), {})
            for keys in ((2, 2, 8, 16), (2, 4, 8, 16))
            for s in (1, 3, 8)
        ]
    assert name in ("attention", "attention_flash", "attention_cudnn"), f"{name} has no case"
    valid = torch.ones(2, 8, dtype=torch.bool)
    valid[1, 5:] = False
    memory = torch.ones(8, 8, dtype=torch.bool).tril(3)[None]
    query, grouped, whole = ((2, n, 8, 16) for n in (4, 2, 4))
    return [
        (tuple(draw(i, *shape, dtype=dtype) for i, shape in enumerate((query, keys, keys))), arguments)
        for keys in (grouped, whole)
        for arguments in (
            {"form": CAUSAL},
            {"form": FULL},
            {"form": MASKED, "valid": valid},
            {"form": MASKED, "valid": memory},
        )
    ]


def permutations(name, dtype):
    """Three of four experts get rows, all pairs or those that are kept."""
    experts = torch.tensor([[2, 0], [0, 3], [3, 2], [2, 3], [0, 2]])
    found = []
    for kept in (None, torch.tensor([[1, 1], [0, 1], [1, 0], [1, 1], [0, 0]]).bool()):
        rows = experts.numel() if kept is None else int(kept.sum())
        permutation = sort_by_expert(experts, kept, 4, rows).order
        arguments = {"row_Tk": permutation.row, "kept_Tk": kept}
        if name == "permute":
            found.append(((draw(0, 5, 8, dtype=dtype),), {"pair_R": permutation.pair, **arguments}))
        else:
            found.append(((draw(0, rows, 8, dtype=dtype),), arguments))
    return found


def widened(arguments):
    """The same for the fp64 reference."""
    return {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in arguments.items()}


def joined(results):
    """The result of a form; queries, keys and values as one tensor."""
    return results if isinstance(results, torch.Tensor) else torch.cat(results, dim=2)


def compare(name, device, dtype, tensors, arguments):
    """Hold one form against its reference in fp64, values and gradients.

    A gradient that is zero, as that of queries with one key each, has an error relative to the largest of the others.
    Attention's backward on an NPU reads the output as it was rounded, so that small gradients are rounded twice.
    """
    tolerance = TOLERANCE[dtype] * (2 if device == "npu" and "attention" in name else 1)
    exact = tuple(t.detach().double().requires_grad_() for t in tensors)
    actual = joined(OPS[name][device](*tensors, **arguments))
    expected = joined(OPS[name]["reference"](*exact, **widened(arguments)))
    actual_grads = torch.autograd.grad(actual.square().sum(), tensors)
    expected_grads = torch.autograd.grad(expected.square().sum(), exact)
    largest = max(float(grad.norm()) for grad in expected_grads)
    for a, b in zip((actual, *actual_grads), (expected, *expected_grads), strict=True):
        assert (a.dtype, a.shape) == (dtype, b.shape)
        assert float((a - b).detach().norm()) < tolerance * (float(b.detach().norm()) or largest)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("name", "device"), ENTRIES)
def test_entry_equals_its_reference(name, device, dtype):
    """The forms are torch functions that run on the CPU too, so each is compared here; Ascend's by stand-ins."""
    for tensors, arguments in cases(name, dtype):
        compare(name, device, dtype, tensors, arguments)


@pytest.mark.parametrize("value_dim", [8, 24])
@pytest.mark.parametrize(("name", "device"), [entry for entry in ENTRIES if "attention" in entry[0]])
def test_attention_takes_values_of_another_head_size(name, device, value_dim):
    """Queries and keys have 16 features; values, and what comes out, fewer or more."""
    for (q, k, v), arguments in cases(name, torch.float32):
        other = draw(7, *v.shape[:-1], value_dim, dtype=torch.float32)
        compare(name, device, torch.float32, (q, k, other), arguments)


@pytest.mark.parametrize("kept", [None, torch.tensor([[True, False], [False, False]])])
def test_messages_are_summed_by_each_devices_form(kept):
    """The columns after the weights are not read; pairs without a row have weight 0."""
    message = torch.randn(4, 12, generator=torch.Generator().manual_seed(0))
    message[:, 9:] = float("nan")
    row = torch.tensor([[2, 0], [3, 1]])
    chosen = torch.ones(2, 2) if kept is None else kept.float()
    for form in OPS["sum_message"].values():
        sums, weights = form(message, 8, torch.float32, row, kept)
        torch.testing.assert_close(sums, (message[row, :8] * chosen[..., None]).sum(1))
        torch.testing.assert_close(weights, message[row, 8] * chosen)


@pytest.mark.parametrize(("head", "value"), [(16, 16), (12, 12), (12, 16), (24, 16)])
def test_flash_by_name_pads_heads_as_torch_does(head, value, monkeypatch):
    """The kernel runs on CUDA only; plain products stand in for it and see heads of a multiple of 8."""

    def flash(q, k, v, dropout, causal, scale):
        assert q.shape[-1] == k.shape[-1] == v.shape[-1]
        assert q.shape[-1] % 8 == 0
        k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
        scores = (q.float() @ k.float().mT * scale).masked_fill(torch.ones(8, 8).triu(1).bool(), -torch.inf)
        return (scores.softmax(-1) @ v.float()).to(q.dtype), scores.logsumexp(-1)

    monkeypatch.setattr(attention, "capability_of", lambda like: (9, 0))
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention", flash)
    q, k, v = (
        draw(i, 2, n, 8, size, dtype=torch.bfloat16) for i, (n, size) in enumerate(((4, head), (2, head), (2, value)))
    )
    got = OPS["attention_flash"]["cuda"](q, k, v, form=CAUSAL)
    want = attention_reference(*(x.double() for x in (q, k, v)), form=CAUSAL)
    assert got.shape == want.shape
    assert float((got - want).detach().norm() / want.detach().norm()) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("given", [{"form": FULL, "dropout": 0.5}, {"form": MASKED, "valid": torch.ones(2, 8).bool()}])
def test_cudnn_by_name_leaves_other_calls_to_torch(given, monkeypatch):
    monkeypatch.setattr(attention, "capability_of", lambda like: (9, 0))
    monkeypatch.setattr(attention, "attention_fused", lambda *tensors, **more: "torch's choice")
    q = draw(0, 2, 4, 8, 16, dtype=torch.bfloat16)
    assert OPS["attention_cudnn"]["cuda"](q, q, q, **given) == "torch's choice"


def test_fp64_and_unknown_devices_take_the_reference():
    assert op("attention", torch.zeros(1)) is attention_fused
    assert op("attention", torch.zeros(1, dtype=torch.float64)) is attention_reference
    assert op("attention", torch.zeros(1, device="meta")) is attention_reference
    with pytest.raises(KeyError, match="nothing"):
        op("nothing", torch.zeros(1))


def test_attention_reference_by_hand():
    q, k, v = (draw(i, 1, 1, 3, 4, dtype=torch.float64) for i in range(3))
    first = attention_reference(q, k, v, form=CAUSAL)[0, 0, 0]
    assert torch.allclose(first, v[0, 0, 0])
    weights = (q[0, 0, 1] @ k[0, 0, :2].T / 2.0).softmax(0)
    second = attention_reference(q, k, v, form=CAUSAL)[0, 0, 1]
    assert torch.allclose(second, weights @ v[0, 0, :2])


@pytest.mark.parametrize("form", [attention_reference, attention_fused])
def test_attention_dropout_keeps_the_mean(form):
    torch.manual_seed(0)
    q, k = torch.zeros(1, 1, 64, 4), torch.zeros(1, 1, 64, 4)
    y = form(q, k, torch.ones(1, 1, 64, 4), form=FULL, dropout=0.5)
    assert float(y.mean()) == pytest.approx(1.0, abs=0.05)
    assert float(y.std()) > 0.05


@pytest.mark.parametrize("form", [attention_slice_reference, attention_slice_merged])
def test_slices_of_causal_attention_are_the_whole(form):
    """Outputs and gradients of uneven slices against the whole, in fp64; a mask aligned top left would differ."""
    tensors = [draw(i, 2, heads, 9, 16, dtype=torch.float64) for i, heads in enumerate((4, 2, 2))]
    q, k, v = tensors
    whole = attention_reference(q, k, v, form=CAUSAL)
    edges = (0, 1, 5, 9)
    pieces = [form(q[:, :, a:b], k[:, :, :b], v[:, :, :b]) for a, b in itertools.pairwise(edges)]
    sliced = torch.cat(pieces, dim=2)
    assert torch.allclose(sliced, whole, rtol=1e-13, atol=1e-13)
    upstream = draw(9, *whole.shape, dtype=torch.float64).detach()
    for a, b in zip(
        torch.autograd.grad(sliced, tensors, upstream), torch.autograd.grad(whole, tensors, upstream), strict=True
    ):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ["rotary", "rotary_heads", "swiglu"])
def test_gradients_of_forms_for_cuda_are_those_of_autograd(name):
    """Those of the CPU's form bit for bit, on views, with gradients that are expanded, and without rows."""
    for (x,), arguments in cases(name, torch.bfloat16):
        for rows in (x.shape[0], 0):
            wide = torch.cat((x, x), dim=-1).detach()[:rows, ..., : x.shape[-1]].requires_grad_()
            angles = {key: value[:rows] for key, value in arguments.items()}
            found = []
            reference = OPS[name]["reference"]
            for form in (OPS[name]["cuda"], OPS[name].get("cpu", reference), reference):
                result = joined(form(wide, **angles))
                upstream = torch.randn(result.shape[-1], generator=torch.Generator().manual_seed(3)).to(result.dtype)
                found.append((result, *torch.autograd.grad(result, wide, upstream.expand_as(result))))
            for a, b, exact in zip(*found, strict=True):
                assert torch.equal(a, b)
                torch.testing.assert_close(a, exact, rtol=TOLERANCE[a.dtype], atol=TOLERANCE[a.dtype])
            assert all(a.shape[0] == rows for a in found[0])


def test_packed_attention_is_attention_of_each_document_alone():
    documents = DeviceMask.of(AttentionMask.of_documents([3, 8, 9, 10, 16], 2), torch.device("cpu"))
    q, k, v = (draw(i, 2, n, 8, 16, dtype=torch.float64) for i, n in enumerate((4, 2, 2)))
    packed = packed_attention_reference(q, k, v, mask=documents)
    for sample, start, end in ((0, 0, 3), (0, 3, 8), (1, 0, 1), (1, 1, 2), (1, 2, 8)):
        alone = attention_reference(*(x[sample : sample + 1, :, start:end] for x in (q, k, v)), form=CAUSAL)
        assert torch.allclose(packed[sample : sample + 1, :, start:end], alone, atol=1e-12)


@pytest.mark.parametrize("step", [1, 4, 8])
def test_documents_that_are_filled_have_the_results_and_gradients_of_packed_ones(step):
    documents = DeviceMask.of(AttentionMask.of_documents([3, 8, 9, 16, 24, 32], 2), torch.device("cpu"))
    tensors = [draw(i, 2, n, 16, 16, dtype=torch.float64).requires_grad_() for i, n in enumerate((4, 2, 2))]
    found = []
    for form in (packed_attention_reference, partial(packed_attention.packed_attention_filled, step=step)):
        y = form(*tensors, mask=documents)
        found.append((y, *torch.autograd.grad((y * torch.arange(16)).sum(), tensors)))
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("least", "causal", "window", "alone"),
    [(3, True, 0, True), (4, True, 0, False), (0, True, 0, False), (3, False, 0, False), (3, True, 2, False)],
)
def test_long_documents_are_calls_of_whole_samples(least, causal, window, alone, monkeypatch):
    """Where the class of the device says so, if no document is shorter; others are one call for variable lengths."""
    chosen = replace(device_class("cuda"), least_document=least, document_step=4)
    monkeypatch.setattr(packed_attention, "device_class", lambda kind: chosen)
    monkeypatch.setattr(packed_attention, "takes", lambda kernel, call: True)
    monkeypatch.setattr(packed_attention, "by_kernel", lambda q, *more, **options: torch.zeros_like(q))
    mask = DeviceMask.of(AttentionMask.of_documents([3, 8, 11, 16], 2, causal=causal), torch.device("cpu"))
    mask = mask.within(window) if causal else mask
    q, k, v = (draw(i, 2, n, 8, 16, dtype=torch.float64) for i, n in enumerate((4, 2, 2)))
    got = packed_attention_varlen(q, k, v, mask=mask)
    wanted = packed_attention_reference(q, k, v, mask=mask) if alone else torch.zeros_like(q)
    assert torch.allclose(got, wanted, rtol=0, atol=1e-12)
    assert not packed_attention_varlen(q, k, v, mask=mask, dropout=0.1).any()


def test_packed_attention_never_holds_a_square():
    """One call per document: the largest tensor made is no larger than the scores of the longest document."""
    documents = DeviceMask.of(AttentionMask.of_documents(range(16, 2049, 16)), torch.device("cpu"))
    q = torch.randn(1, 2, 2048, 8)
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor))
            return out

    with Watch():
        packed_attention_by_document(q, q, q, mask=documents)
    assert max(sizes) <= q.numel()


@pytest.mark.parametrize("version", ["this", "2.11"])
def test_the_kernel_for_unequal_lengths_is_called_as_it_wants(version, monkeypatch):
    """The kernel runs on CUDA only; a stand-in with its signature, by the starts it is given, must give the same."""
    signature = inspect.signature(varlen.varlen_attn)
    if version == "2.11":
        newer = ("enable_gqa", "seqused_k", "block_table", "num_splits")
        older = [parameter for name, parameter in signature.parameters.items() if name not in newer]
        signature = signature.replace(parameters=older)

    def stand_in(*args, **kwargs):
        given = signature.bind(*args, **kwargs).arguments
        q, k, v, starts = (given[name] for name in ("query", "key", "value", "cu_seq_q"))
        assert (starts.dtype, given["max_q"], given["window_size"]) == (torch.int32, 6, (-1, 0))
        assert all(x.stride(-1) == 1 and x.shape[-1] == q.shape[-1] for x in (q, k, v))
        parts = [
            F.scaled_dot_product_attention(
                *(x[a:b].transpose(0, 1)[None] for x in (q, k, v)),
                is_causal=True,
                scale=given.get("scale"),
                enable_gqa=given.get("enable_gqa", version == "2.11"),
            )[0].transpose(0, 1)
            for a, b in itertools.pairwise(starts.tolist())
        ]
        return torch.cat(parts)

    stand_in.__signature__ = signature
    monkeypatch.setattr(varlen, "varlen_attn", stand_in)
    documents = DeviceMask.of(AttentionMask.of_documents([3, 8, 9, 10, 16], 2), torch.device("cpu"))
    for value_dim in (16, 8, 24):
        shapes = ((4, 16), (2, 16), (2, value_dim))
        tensors = [draw(i, 2, n, 8, size, dtype=torch.float32) for i, (n, size) in enumerate(shapes)]
        expected = packed_attention_reference(*tensors, mask=documents)
        assert torch.allclose(by_kernel(*tensors, (documents.starts, documents.starts), (6, 6)), expected, atol=1e-5)


@pytest.mark.parametrize("ends", [None, [3, 8, 9, 10, 16]])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_kernel_for_unequal_lengths_gets_the_keys_before_a_position(ends, dropout, monkeypatch):
    """Those of a window without the position's own: both of its calls count as FlashAttention does."""
    whole = DeviceMask.of(AttentionMask.of(2, 8, causal=True, ends=ends), torch.device("cpu"))
    given = []
    monkeypatch.setattr(packed_attention, "takes", lambda kernel, call: (kernel, call.form) == (VARLEN, WINDOW))
    monkeypatch.setattr(
        packed_attention, "varlen_attention", lambda q, k, v, *place, **more: given.append((place, more)) or q
    )
    monkeypatch.setattr(
        torch.ops.aten,
        "_flash_attention_forward",
        lambda q, k, v, *place, **more: given.append((place[:4], more)) or (q, None),
    )
    q = draw(0, 2, 4, 8, 16, dtype=torch.float32)
    packed_attention_varlen(q, q, q, mask=whole.within(3), dropout=dropout)
    (((starts, again, *longest), more),) = given
    assert starts is again
    assert (starts.tolist(), starts.dtype, longest) == ([0, *(ends or [8, 16])], torch.int32, [6 if ends else 8] * 2)
    sides = (more["window_size_left"], more["window_size_right"]) if dropout else more["window_size"]
    assert sides == (2, 0)


def test_layers_of_one_window_share_a_mask():
    whole = DeviceMask.of(AttentionMask(2, 8, causal=True), torch.device("cpu"))
    assert whole.within(0) is whole.within(8) is whole
    assert whole.within(3) is whole.within(3) is not whole.within(2)
    starts = whole.within(3).starts_on(torch.device("cpu"))
    assert starts is whole.within(3).starts_on(torch.device("cpu"))
    assert starts.tolist() == [0, 8, 16]


def lower_right(query, key, value, starts_q, starts_k, max_q, max_k, *, window_size, **more):
    """What torch's kernel computes: the last query of a sequence sees all of its keys."""
    assert starts_q.dtype == starts_k.dtype == torch.int32
    before, after = window_size
    assert after == 0
    assert max_q == (starts_q[1:] - starts_q[:-1]).max()
    found = []
    for (a, b), (c, d) in zip(
        itertools.pairwise(starts_q.tolist()), itertools.pairwise(starts_k.tolist()), strict=True
    ):
        assert d - c <= max_k
        heads = [x.transpose(0, 1)[None] for x in (query[a:b], key[c:d], value[c:d])]
        if a < b:
            seen = causal_keys(b - a, d - c, query.device, d - c - b + a, window=None if before < 0 else before + 1)
            found.append(plain_attention(*heads, seen, 0.0)[0].transpose(0, 1))
    return torch.cat(found)


@pytest.mark.parametrize("ends", [[8, 16], [3, 8, 9, 10, 16], [8, 11, 12, 16], [4, 5, 8, 12, 13, 16]])
@pytest.mark.parametrize("place", [slice(0, 3), slice(3, 4), slice(4, 8), slice(0, 8)])
@pytest.mark.parametrize("window", [0, 1, 3])
def test_documents_of_a_slice_are_one_call_of_the_kernel(ends, place, window, monkeypatch):
    """In a window, from the first key that a query sees."""
    documents = DeviceMask.of(AttentionMask.of_documents(ends, 2), torch.device("cpu")).within(window)
    monkeypatch.setattr(packed_attention, "varlen_attention", lower_right)
    monkeypatch.setattr(slices, "takes", lambda *call: True)
    q, k, v = (draw(i, 2, n, 8, 16, dtype=torch.float64)[:, :, : place.stop] for i, n in enumerate((4, 2, 2)))
    cut = documents.cut(place)
    assert cut is documents.cut(place)  # one for all layers
    assert cut.first_key == (documents.host.first_key(place.start) if window else 0)
    k, v = (x[:, :, cut.first_key :] for x in (k, v))
    got = slices.packed_attention_slice_varlen(q[:, :, place], k, v, documents=cut)
    expected = packed_attention_slice_reference(q[:, :, place], k, v, documents=cut)
    assert float((got - expected).detach().abs().max()) < 1e-14


@pytest.mark.parametrize("window", [0, 2])
def test_slices_inside_documents_are_the_whole_cut(window):
    documents = DeviceMask.of(AttentionMask.of_documents([3, 8, 9, 10, 16], 2), torch.device("cpu")).within(window)
    q, k, v = (draw(i, 2, n, 8, 16, dtype=torch.float64) for i, n in enumerate((4, 2, 2)))
    whole = packed_attention_reference(q, k, v, mask=documents)
    for place in (slice(0, 3), slice(3, 4), slice(4, 8)):
        cut = documents.cut(place)
        seen = [x[:, :, cut.first_key : place.stop] for x in (k, v)]
        got = packed_attention_slice_reference(q[:, :, place], *seen, documents=cut)
        assert float((got - whole[:, :, place]).detach().abs().max()) < 1e-14
