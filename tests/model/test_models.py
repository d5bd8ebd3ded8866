"""Both models in every variety: a step is finite, gradients are right, statistics and dropout behave."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megapar.data.batches import MicroBatch
from megapar.data.reduced_batch import unpadded_collate
from tests.model.small import DENSE, ERNIE, GEMMA, MOE, VARIETIES, batch_for, build, total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("sizes", VARIETIES.values(), ids=VARIETIES)
def test_forward_and_backward_are_finite(sizes, dtype):
    model = build(sizes, dtype=dtype)
    batch = batch_for(sizes, padded=True)
    total(model, batch).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == parameter.dtype
        assert bool(parameter.grad.isfinite().all()), name
    logits = model.logits(batch)
    logits = logits if isinstance(logits, torch.Tensor) else logits[0]
    assert logits.shape == (2, 16, sizes.vocab_size)


@pytest.mark.parametrize("name", ["dense", "gpt", "qk-norm", "moe", "moe gelu with biases", "ernie"])
def test_gradients_are_the_finite_differences(name):
    sizes = VARIETIES[name]
    model = build(sizes, dtype=torch.float64)
    batch = batch_for(sizes, padded=True)
    total(model, batch).backward()
    generator = torch.Generator().manual_seed(0)
    for parameter_name, parameter in model.named_parameters():
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        step = 1e-6
        with torch.no_grad():
            parameter += step * direction
            above = total(model, batch)
            parameter -= 2 * step * direction
            below = total(model, batch)
            parameter += step * direction
        expected = float(above - below) / (2 * step)
        actual = float((parameter.grad * direction).sum())
        assert actual == pytest.approx(expected, rel=1e-5, abs=1e-6), parameter_name


def test_the_embedding_times_the_rounded_root_of_its_width():
    model = build(replace(DENSE, scale_embedding=True), dtype=torch.bfloat16)
    batch = batch_for(DENSE)
    rows = model.embedding.word.weight[batch["tokens"]]
    root = torch.tensor(DENSE.hidden_size**0.5, dtype=torch.bfloat16)
    assert float(root) != DENSE.hidden_size**0.5
    assert torch.equal(model.embedding(batch["tokens"], batch["positions"]), rows * root)


def test_sums_are_over_predicted_tokens_only():
    model = build(DENSE, dtype=torch.float64)
    batch = batch_for(DENSE)
    log_probabilities = model.logits(batch).log_softmax(-1)
    own = batch["labels"] != -100
    picked = log_probabilities[own].gather(-1, batch["labels"][own].unsqueeze(-1))
    terms = model(batch)
    assert float(terms.sums["lm"].detach()) == pytest.approx(-float(picked.detach().sum()), rel=1e-12)
    assert terms.load.shape == (0, 0)
    assert float(terms.aux) == float(terms.z) == int(terms.dropped) == 0


def test_sums_of_16_bit_models_are_fp32():
    for sizes in (MOE, ERNIE):
        terms = build(sizes, dtype=torch.bfloat16)(batch_for(sizes))
        assert {value.dtype for value in terms.sums.values()} == {torch.float32}
        assert terms.aux.dtype == terms.z.dtype == torch.float32


@pytest.mark.parametrize("sizes", [DENSE, MOE, ERNIE], ids=["dense", "moe", "ernie"])
def test_padding_changes_nothing(sizes):
    """What stands at padded positions is not seen by any valid one, and takes no part in routing."""
    model = build(sizes, dtype=torch.float64)
    batch = batch_for(sizes, padded=True)
    other = {**batch, "tokens": torch.where(batch["valid"], batch["tokens"], 5)}
    assert not torch.equal(other["tokens"], batch["tokens"])
    a, b = model(batch), model(other)
    for name in a.sums:
        assert float(a.sums[name]) == pytest.approx(float(b.sums[name]), rel=1e-12)
    assert torch.equal(a.load, b.load)
    assert float(a.aux) == pytest.approx(float(b.aux), rel=1e-12)
    first = {name: t[:1] for name, t in batch.items() if t.shape[0] == 2 and name not in ("masked_index", "valid")}
    whole, alone = model.logits(batch), model.logits(first)
    if isinstance(whole, tuple):
        whole, alone = whole[0], alone[0]
    assert torch.allclose(whole[:1], alone, rtol=0, atol=1e-12)


IN_WINDOWS = {"window_size": 3, "window_attn_skip_freq": "2", "attention_sinks": True}


@pytest.mark.parametrize("more", [{}, IN_WINDOWS], ids=["all keys", "windows"])
@pytest.mark.parametrize(
    ("sizes", "dtype", "bound"),
    [
        *((DENSE, dtype, 0.0) for dtype in (torch.float32, torch.bfloat16, torch.float64)),
        (replace(DENSE, **GEMMA), torch.bfloat16, 0.0),
        *((MOE, dtype, bound) for dtype, bound in ((torch.float32, 1e-5), (torch.float64, 1e-12))),
    ],
)
def test_a_document_is_not_seen_by_others(sizes, more, dtype, bound):
    """Permuting one changes no bit of the logits of the others; rows of experts, which it moves, are rounded apart."""
    model, batch = build(replace(sizes, **more), dtype=dtype), batch_for(sizes)
    batch["ends"] = torch.tensor([7, 16, 16 + 4, 16 + 13, 32])
    other = {**batch, "tokens": batch["tokens"].clone()}
    other["tokens"][0, :7] = batch["tokens"][0, :7].flip(0)
    other["tokens"][1, 4:13] = batch["tokens"][1, 4:13].roll(1)
    difference = (model.logits(batch) - model.logits(other)).detach().abs().amax(-1)
    assert float(torch.cat((difference[0, 7:], difference[1, :4], difference[1, 13:])).max()) <= bound
    assert float(difference[0, :7].max()) > 1e-3


def test_no_masked_position_is_a_loss_of_zero():
    model = build(ERNIE)
    batch = batch_for(ERNIE)
    empty = torch.empty(0, dtype=torch.int64)
    terms = model({**batch, "masked_index": empty, "masked_labels": empty})
    assert float(terms.sums["lm"]) == 0.0
    sum(terms.sums.values()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name
    assert float(model.lm_head.transform.weight.grad.abs().sum()) == 0.0


def test_a_sample_of_padding_alone_stays_finite():
    for flash in (True, False):
        sizes = replace(ERNIE, use_flash_attn=flash)
        model = build(sizes)
        batch = batch_for(sizes, padded=True)
        batch["valid"][1] = False
        total(model, batch).backward()
        assert all(bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("flash", [True, False])
def test_padding_that_is_removed_changes_no_gradient(flash, multiple):
    """Samples of their own lengths, with filler or without, against the same samples with a mask, in fp64."""
    model = build(replace(ERNIE, use_flash_attn=flash, sop=True), dtype=torch.float64)
    batch = batch_for(ERNIE, padded=True)
    batch["masked_index"] = torch.tensor([1, 4, 18])
    batch["masked_labels"] = torch.tensor([3, 5, 7])
    batch["sop_labels"] = torch.tensor([0, 1])
    whole = MicroBatch(batch, {}, int(batch["valid"].sum()), batch["valid"].numel())
    bare = unpadded_collate(lambda _: whole, multiple)([]).tensors
    assert bare["tokens"].shape[1] < batch["tokens"].numel()
    found = []
    for given in (batch, bare):
        terms = model(given)
        loss = sum(terms.sums.values())
        found.append((loss, *torch.autograd.grad(loss, list(model.parameters()))))
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("sizes", [DENSE, ERNIE], ids=["dense", "ernie"])
@pytest.mark.parametrize("kind", ["attention_dropout", "hidden_dropout"])
def test_dropout_is_random_in_training_only_and_repeats_with_the_seed(sizes, kind):
    model = build(replace(sizes, **{kind: 0.5}), dtype=torch.float64)
    plain = build(sizes, dtype=torch.float64)
    batch = batch_for(sizes)

    def loss(seed: int) -> float:
        torch.manual_seed(seed)
        return float(total(model, batch))

    assert loss(1) == loss(1)
    assert loss(1) != loss(2)
    model.eval()
    assert loss(1) == float(total(plain, batch))


@pytest.mark.parametrize("sizes", [DENSE, ERNIE], ids=["dense", "ernie"])
def test_dropout_spares_the_residual(sizes):
    """Where halves of a layer give nothing, there is nothing to drop."""
    model = build(replace(sizes, hidden_dropout=0.5), dtype=torch.float64)
    batch = batch_for(sizes)
    context = model._context(batch, None) if sizes is DENSE else model._context(batch)
    x = torch.randn(*batch["tokens"].shape, sizes.hidden_size, dtype=torch.float64)
    dropped = model.layers["0"](x, context)[0]
    for name, parameter in model.layers["0"].named_parameters():
        if ".proj." in name or ".down." in name:
            parameter.data.zero_()
    training, evaluation = (model.train(mode).layers["0"](x, context)[0] for mode in (True, False))
    assert torch.equal(training, evaluation)
    assert not torch.allclose(training, dropped)


def test_router_bias_moves_towards_idle_experts():
    model = build(MOE)
    load = torch.tensor([[4, 0, 2, 2], [1, 1, 1, 5]])
    model.update_router_bias(load, 0.5)
    biases = torch.stack(model.correction_biases())
    assert biases.tolist() == [[-0.5, 0.5, 0.0, 0.0], [0.5, 0.5, 0.5, -0.5]]


def test_load_counts_every_valid_choice():
    model = build(MOE)
    batch = batch_for(MOE, padded=True)
    terms = model(batch, valid_tokens=27)
    assert terms.load.shape == (2, 4)
    assert terms.load.sum(1).tolist() == [27 * 2, 27 * 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"normalization": "batchnorm"}, "normalization is 'batchnorm'"),
        ({"num_query_groups": 3}, "not a multiple of num_query_groups"),
        ({"head_dim": 7}, "must be even"),
    ],
)
def test_wrong_sizes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(DENSE, **change)


def test_ernie_heads_must_divide():
    with pytest.raises(ValueError, match="not a multiple"):
        replace(ERNIE, num_attention_heads=5)
