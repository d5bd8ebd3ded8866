"""Products of layers in fp8, emulated, and the casts of weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megapar.core.comm.axis import Axis
from megapar.core.comm.in_flight import CommContext
from megapar.core.device import fp8 as casts
from megapar.core.tensor_parallel import fp8
from megapar.core.tensor_parallel.execution import Execution
from megapar.core.tensor_parallel.fp8 import Fp8Casts, Fp8Weight
from megapar.core.tensor_parallel.overlapped_linear import CopiedColumn, LinearComm, Overlap
from megapar.core.tensor_parallel.weight_gradients import linear
from megapar.model.layers import mlp, norm
from megapar.model.parameter import fp8_flag
from megapar.model.spec import table_of
from tests.model.small import DENSE, ERNIE, LATENT, MOE, batch_for, build, total

WIDE = {"hidden_size": 128, "num_attention_heads": 4, "num_query_groups": 2, "head_dim": 64, "ffn_hidden_size": 128}


def test_gradients_are_those_of_the_cast_numbers():
    """The forward and dx multiply what was cast; dw is the product of the numbers themselves."""
    random = torch.Generator().manual_seed(0)
    x, weight, bias, dy = (
        torch.randn(*shape, generator=random, dtype=torch.float64)
        for shape in ((3, 5, 256), (128, 256), (128,), (3, 5, 128))
    )
    leaves = [leaf.requires_grad_() for leaf in (x, weight, bias)]
    y = linear(x, weight, bias, None, fp8=Fp8Weight(Fp8Casts()))
    forward, backward = casts.cast_weight_reference(weight.detach())
    assert torch.equal(
        y.detach().flatten(0, 1), casts.product_reference(x.detach().flatten(0, 1), forward) + bias.detach()
    )
    dx, dw, db = torch.autograd.grad(y, leaves, dy)
    assert torch.equal(dx.flatten(0, 1), casts.product_reference(dy.flatten(0, 1), backward))
    torch.testing.assert_close(dw, dy.flatten(0, 1).t() @ x.detach().flatten(0, 1))
    torch.testing.assert_close(db, dy.sum((0, 1)))


def test_no_rows_have_a_product():
    weight, bias = torch.ones(128, 256), torch.ones(128)
    y = fp8.product(torch.empty(2, 0, 256), Fp8Weight(Fp8Casts()).forward(weight), bias)
    assert y.shape == (2, 0, 128)


@pytest.mark.parametrize("kept", [True, False])
def test_a_weight_is_cast_once_for_an_update_if_casts_are_kept(kept, monkeypatch):
    counted = []
    monkeypatch.setattr(
        fp8, "op", lambda name, like: lambda weight: counted.append(name) or casts.cast_weight_reference(weight)
    )
    shared = Fp8Casts(kept=kept)
    one, weight = Fp8Weight(shared), torch.ones(128, 128)
    for _ in range(2):
        one.forward(weight)
        one.backward(weight)
    assert len(counted) == (1 if kept else 4)
    weight.mul_(3)
    shared.forget()
    for cast in (one.forward, one.backward):
        assert casts.dequantized(cast(weight))[0, 0] == 3
    assert Fp8Weight(shared)._pair is None


def test_a_cast_is_taken_once_and_only_for_the_tensor_that_it_is_of():
    def leave():
        x = torch.randn(4, 2, 256)
        shared.leave(x, *casts.cast_rows_reference(x.flatten(0, 1)))
        return x

    shared = Fp8Casts()
    assert shared.take(torch.ones(4, 2, 256)) is None
    x = leave()
    for other in (x.clone(), x[1:], x.view(8, 2, 128), x.transpose(0, 1), x.view(torch.int32)):
        assert shared.take(other) is None
    found = shared.take(x.view(8, 256))
    assert found is not None
    assert torch.equal(found.scale, casts.cast_rows_reference(x.view(8, 256)).scale)
    assert shared.take(x) is None
    leave().add_(1)
    x = leave()
    x.view(-1)[3] = 7
    assert shared.take(x) is None
    x = leave()
    shared.forget()
    assert shared.take(x) is None


@pytest.mark.parametrize("activation", ["swiglu", "clamped_swiglu"])
@pytest.mark.parametrize("selective", [False, True])
def test_outputs_that_are_cast_where_they_are_made_change_no_bit(activation, selective, monkeypatch):
    """Of a layer's eight casts, four are left: those of both norms, of swiglu and of its gradient."""
    sizes, taken = replace(DENSE, **WIDE, activation=activation), []
    take = Fp8Casts.take
    monkeypatch.setattr(Fp8Casts, "take", lambda self, x: taken.append(take(self, x)) or taken[-1])
    loss, found = gradients(sizes, Fp8Casts(), selective=selective)
    assert len(taken) == 8 * sizes.num_layers
    assert sum(cast is not None for cast in taken) == 4 * sizes.num_layers
    for module in (mlp, norm):
        monkeypatch.setattr(module, "leaves_casts", lambda casts, x: False)
    loss8, wanted = gradients(sizes, Fp8Casts(), selective=selective)
    assert loss == loss8
    for name, gradient in wanted.items():
        assert torch.equal(found[name], gradient), name


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_norms_on_several_ranks_leave_their_casts_where_they_are_not_gathered(sequence_parallel):
    shared, mp = Fp8Casts(), Axis("mp", 2, 0, None, (0, 1))
    model = build(replace(DENSE, **WIDE), mp=mp, sequence_parallel=sequence_parallel, execution=Execution(fp8=shared))
    block = model.layers["0"]
    assert block.mlp.casts is None
    y, weight = block.mlp_norm(torch.randn(2, 3, 128)), torch.randn(256, 128)
    left = shared.take(y)
    assert (left is None) == sequence_parallel
    if left is not None:  # a product of twice the cast shows that it is taken
        shared.leave(y, left.values, 2 * left.scale)
        column = LinearComm(mp, Overlap(), CommContext(), fp8=Fp8Weight(shared))
        twice = 2 * casts.product_reference(y.flatten(0, 1), casts.cast_weight_reference(weight)[0])
        assert torch.equal(CopiedColumn.apply(y, weight, None, column).flatten(0, 1), twice)


def gradients(sizes, some=None, *, selective=False):
    model = build(sizes, dtype=torch.bfloat16, execution=Execution(fp8=some, selective=selective))
    loss = total(model, batch_for(sizes))
    loss.backward()
    return float(loss), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "sizes",
    [
        replace(DENSE, **WIDE),
        replace(MOE, **WIDE, moe=replace(MOE.moe, hidden_size=128, ffn_hidden_size=64)),
        replace(LATENT, hidden_size=128, v_head_dim=32, ffn_hidden_size=128),
    ],
    ids=["dense", "moe", "latent attention"],
)
def test_a_model_in_fp8_stays_near_bf16(sizes):
    loss, plain = gradients(sizes)
    loss8, found = gradients(sizes, Fp8Casts())
    assert loss8 == pytest.approx(loss, rel=0.02)
    assert loss8 != loss
    for name in ("layers.0.attention.proj.weight", "layers.0.mlp.down.weight"):
        angle = torch.cosine_similarity(plain[name].flatten().float(), found[name].flatten().float(), 0)
        assert float(angle) > 0.95, name


@pytest.mark.parametrize("sizes", [MOE, LATENT, ERNIE], ids=["moe", "latent attention", "ernie"])
def test_the_table_knows_the_weights_that_are_cast(sizes):
    model = build(sizes, execution=Execution(fp8=Fp8Casts()))
    experts = {row.name for row in table_of(sizes) if fp8_flag(row) == "fp8_experts"}
    assert experts == {row.name for row in table_of(sizes) if ".experts." in row.name}
    cast = {f"{name}.weight" for name, module in model.named_modules() if getattr(module, "fp8", None) is not None}
    assert cast == {row.name for row in table_of(sizes) if fp8_flag(row) == "fp8"}
    assert any(name.endswith("mlp.down.weight") for name in cast)
