"""Initial weights: the drawn values are frozen, and a piece drawn alone is the piece of the whole."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
import torch

from megapar.core.box import Box
from megapar.model.initialize import draw_block, fill, std_of
from megapar.model.spec import table_of
from tests.model.ernie3.test_model import SIZES as ERNIE3
from tests.model.small import DENSE, ERNIE, GEMMA, MOE

WIDE = replace(MOE, hidden_size=40, head_dim=24, vocab_size=150, moe=replace(MOE.moe, hidden_size=40))


def drawn(sizes, row, box=None, seed=5, dtype=torch.float32):
    box = box or Box.whole(row.shape)
    target = torch.full(box.sizes, torch.nan, dtype=dtype)
    fill(target, row, box, seed=seed, init_std=sizes.init_std)
    return target


def test_a_block_is_what_its_name_says():
    seed = int.from_bytes(hashlib.sha256(b"7/some.name/3").digest()[:8], "little")
    expected = torch.empty(64, 5).normal_(0.0, 0.02, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(draw_block(7, "some.name", 3, (64, 5), 0.02), expected)


def test_golden_block():
    """Frozen: a change of these values changes the start of every run."""
    block = draw_block(1234, "model.embed_tokens.weight", 0, (64, 8), 1.0)
    golden = torch.tensor([-0.8611293, -0.3205985, -0.9895335, 0.4290745, -0.3079512, 0.8626270, -0.4984175, 0.0307292])
    assert torch.allclose(block[0], golden, rtol=0, atol=1e-6)


@pytest.mark.parametrize("sizes", [WIDE, DENSE, ERNIE], ids=["moe", "dense", "ernie"])
def test_each_piece_is_its_hugging_face_tensor(sizes):
    for row in table_of(sizes):
        whole = drawn(sizes, row)
        for piece in row.pieces if row.init == "normal" else ():
            tensor = whole[piece.index].reshape(piece.hf_shape)
            for block in range(0, -(-piece.hf_shape[0] // 64)):
                rows = tensor[64 * block : 64 * block + 64]
                expected = draw_block(5, piece.hf_name, block, tuple(rows.shape), sizes.init_std)
                assert torch.equal(rows, expected), piece.hf_name


@pytest.mark.parametrize("sizes", [WIDE, ERNIE], ids=["moe", "ernie"])
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_pieces_along_any_dim_are_pieces_of_the_whole(sizes, parts):
    for row in table_of(sizes):
        whole = drawn(sizes, row)
        for dim in range(len(row.shape)):
            for part in range(parts):
                box = Box.whole(row.shape).cut(dim, parts, part)
                assert torch.equal(drawn(sizes, row, box), whole[box.slices]), (row.name, dim, part)
        if len(row.shape) > 1:
            box = Box.whole(row.shape).cut(0, 2, 1).cut(len(row.shape) - 1, 3, 1)
            assert torch.equal(drawn(sizes, row, box), whole[box.slices]), row.name


def test_a_rank_draws_only_its_blocks(monkeypatch):
    names = []

    def counted(seed, name, block, shape, init_std):
        names.append(block)
        return draw_block(seed, name, block, shape, init_std)

    monkeypatch.setattr("megapar.model.initialize.draw_block", counted)
    row = next(row for row in table_of(WIDE) if row.name == "embedding.word.weight")
    drawn(WIDE, row, Box((64, 0), (70, 40)))
    assert names == [1, 2]


def test_the_dtype_casts_the_same_numbers():
    row = table_of(DENSE)[0]
    exact = drawn(DENSE, row)
    assert torch.equal(drawn(DENSE, row, dtype=torch.float64), exact.double())
    assert torch.equal(drawn(DENSE, row, dtype=torch.bfloat16), exact.bfloat16())


def test_seeds_and_names_give_different_numbers():
    row, other = (row for row in table_of(ERNIE) if row.name in ("embedding.token_type.weight", "sop_head.weight"))
    assert not torch.equal(drawn(ERNIE, row, seed=1), drawn(ERNIE, row, seed=2))
    assert not torch.equal(drawn(ERNIE, row)[:2], drawn(ERNIE, other))


@pytest.mark.parametrize("sizes", [ERNIE, replace(DENSE, **GEMMA)], ids=["ernie", "gemma"])
def test_norms_are_ones_and_biases_zeros(sizes):
    """Gemma's norms multiply by 1 + w."""
    for row in table_of(sizes):
        value = drawn(sizes, row)
        if row.name.endswith("bias"):
            assert not value.any()
        elif "norm" in row.name:
            assert bool((value == (0 if sizes is not ERNIE else 1)).all())
        else:
            assert float(value.std()) == pytest.approx(sizes.init_std, rel=0.3)


@pytest.mark.parametrize("sizes", [WIDE, DENSE, ERNIE, ERNIE3], ids=["moe", "dense", "ernie", "ernie3"])
def test_depth_scales_what_is_added_to_the_residual_stream(sizes):
    """Megatron-LM's rule: std / sqrt(2 L) for attention's projection and the second product of MLPs and experts."""
    scaled = replace(sizes, depth_scaled_init=True)
    small = [row.name for row in table_of(sizes) if std_of(row, scaled) != sizes.init_std]
    ends = ("attention.proj.weight", "mlp.down.weight", "shared.down.weight", "experts.down")
    assert small == [row.name for row in table_of(sizes) if row.name.endswith(ends)] != []
    for row in table_of(sizes):
        std = sizes.init_std / (2 * sizes.num_blocks) ** 0.5 if row.name in small else sizes.init_std
        assert std_of(row, scaled) == std
        assert std_of(row, sizes) == sizes.init_std


def test_a_scaled_weight_is_the_plain_one_times_the_factor():
    sizes = replace(WIDE, num_layers=8)
    row = next(row for row in table_of(sizes) if row.name.endswith("experts.down"))
    scaled = torch.empty(row.shape, dtype=torch.float64)
    fill(scaled, row, Box.whole(row.shape), seed=5, init_std=std_of(row, replace(sizes, depth_scaled_init=True)))
    assert torch.allclose(scaled, drawn(sizes, row, dtype=torch.float64) / 4, rtol=1e-6)


@pytest.mark.parametrize("sizes", [WIDE, DENSE, ERNIE], ids=["moe", "dense", "ernie"])
def test_no_two_tensors_start_alike(sizes):
    starts = {}
    for row in table_of(sizes):
        whole = drawn(sizes, row)
        for piece in row.pieces if row.init == "normal" else ():
            start = tuple(whole[piece.index].flatten()[:8].tolist())
            assert starts.setdefault(start, piece.hf_name) == piece.hf_name
    assert len(starts) > 4 * sizes.num_layers
