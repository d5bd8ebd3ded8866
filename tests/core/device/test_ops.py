"""Every entry of the operator table against its reference: values and gradients."""

from __future__ import annotations

import itertools

import pytest
import torch

from megapar.core.device.ops import (
    OPS,
    attention_fused,
    attention_reference,
    attention_slice_merged,
    attention_slice_reference,
    op,
    rotary_reference,
    wide,
)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
ENTRIES = [
    (name, device) for name, forms in OPS.items() for device, form in forms.items() if form is not forms["reference"]
]


def draw(seed, *shape, dtype):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return tensor.requires_grad_()


def cases(name, dtype):
    """(tensors, keyword arguments) for one op."""
    if name == "rms_norm":
        return [((draw(0, 3, 16, dtype=dtype), draw(1, 16, dtype=dtype)), {"epsilon": 1e-5})]
    if name == "attention_slice":
        return [
            (tuple(draw(i, *shape, dtype=dtype) for i, shape in enumerate(((2, 4, s, 16), keys, keys))), {})
            for keys in ((2, 2, 8, 16), (2, 4, 8, 16))
            for s in (1, 3, 8)
        ]
    valid = torch.ones(2, 8, dtype=torch.bool)
    valid[1, 5:] = False
    query, grouped, whole = ((2, n, 8, 16) for n in (4, 2, 4))
    return [
        (tuple(draw(i, *shape, dtype=dtype) for i, shape in enumerate((query, keys, keys))), arguments)
        for keys in (grouped, whole)
        for arguments in ({"causal": True}, {"causal": False}, {"causal": False, "valid": valid})
    ]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("name", "device"), ENTRIES)
def test_entry_equals_its_reference(name, device, dtype):
    """The forms are torch functions that run on the CPU too, so each is compared here."""
    form, reference = OPS[name][device], OPS[name]["reference"]
    for tensors, arguments in cases(name, dtype):
        exact = tuple(t.detach().double().requires_grad_() for t in tensors)
        actual, expected = form(*tensors, **arguments), reference(*exact, **arguments)
        actual_grads = torch.autograd.grad(actual.square().sum(), tensors)
        expected_grads = torch.autograd.grad(expected.square().sum(), exact)
        for a, b in zip((actual, *actual_grads), (expected, *expected_grads), strict=True):
            assert a.dtype == dtype
            assert float((a - b).norm() / b.norm()) < TOLERANCE[dtype]


def test_every_form_has_a_case():
    assert {name for name, _ in ENTRIES} == {"attention", "attention_slice", "rms_norm"}


def test_fp64_and_unknown_devices_take_the_reference():
    assert op("attention", torch.zeros(1)) is attention_fused
    assert op("attention", torch.zeros(1, dtype=torch.float64)) is attention_reference
    assert op("attention", torch.zeros(1, device="meta")) is attention_reference
    with pytest.raises(KeyError, match="nothing"):
        op("nothing", torch.zeros(1))


def test_wide_is_at_least_fp32():
    assert wide(torch.bfloat16) == wide(torch.float16) == wide(torch.float32) == torch.float32
    assert wide(torch.float64) == torch.float64


def test_attention_reference_by_hand():
    q, k, v = (draw(i, 1, 1, 3, 4, dtype=torch.float64) for i in range(3))
    first = attention_reference(q, k, v, causal=True)[0, 0, 0]
    assert torch.allclose(first, v[0, 0, 0])
    weights = (q[0, 0, 1] @ k[0, 0, :2].T / 2.0).softmax(0)
    second = attention_reference(q, k, v, causal=True)[0, 0, 1]
    assert torch.allclose(second, weights @ v[0, 0, :2])


@pytest.mark.parametrize("form", [attention_reference, attention_fused])
def test_attention_dropout_keeps_the_mean(form):
    torch.manual_seed(0)
    q, k = torch.zeros(1, 1, 64, 4), torch.zeros(1, 1, 64, 4)
    y = form(q, k, torch.ones(1, 1, 64, 4), causal=False, dropout=0.5)
    assert float(y.mean()) == pytest.approx(1.0, abs=0.05)
    assert float(y.std()) > 0.05


@pytest.mark.parametrize("form", [attention_slice_reference, attention_slice_merged])
def test_slices_of_causal_attention_are_the_whole(form):
    """Outputs and gradients of uneven slices against the whole, in fp64; a mask aligned top left would differ."""
    tensors = [draw(i, 2, heads, 9, 16, dtype=torch.float64) for i, heads in enumerate((4, 2, 2))]
    q, k, v = tensors
    whole = attention_reference(q, k, v, causal=True)
    edges = (0, 1, 5, 9)
    pieces = [form(q[:, :, a:b], k[:, :, :b], v[:, :, :b]) for a, b in itertools.pairwise(edges)]
    sliced = torch.cat(pieces, dim=2)
    assert torch.allclose(sliced, whole, rtol=1e-13, atol=1e-13)
    upstream = draw(9, *whole.shape, dtype=torch.float64).detach()
    for a, b in zip(
        torch.autograd.grad(sliced, tensors, upstream), torch.autograd.grad(whole, tensors, upstream), strict=True
    ):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-13)


def test_rotation_keeps_lengths_and_depends_on_distances_only():
    x, y = (draw(i, 1, 1, 1, 8, dtype=torch.float64).detach() for i in range(2))

    def at(z, position):
        angles = position * 10.0 ** -torch.arange(4, dtype=torch.float64).view(1, 1, 4)
        return rotary_reference(z, angles.cos(), angles.sin()).flatten()

    assert torch.allclose(at(x, 7).norm(), x.norm())
    assert torch.allclose(at(x, 3) @ at(y, 8), at(x, 10) @ at(y, 15))
    assert torch.allclose(at(x, 0), x.flatten())
