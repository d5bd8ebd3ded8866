"""The parameter table against the module tree, and its own arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megapar.core.box import Box
from megapar.core.comm.axis import Axis
from megapar.core.sharding.cut import box_at
from megapar.model.decoder.model import Decoder
from megapar.model.ernie.model import Ernie
from megapar.model.initialize import piece_box
from megapar.model.spec import parameter_counts, table_of
from tests.model.small import DENSE, ERNIE, ERNIE_21B, ERNIE_300B, ERNIE_BASE, MOE, VARIETIES, build, named_tensors


def place(rank: int, size: int, name: str = "mp") -> Axis:
    """An axis for building only: nothing communicates."""
    return Axis(name, size, rank, None, tuple(range(size)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("sizes", VARIETIES.values(), ids=VARIETIES)
def test_table_equals_the_module_tree(sizes, dtype):
    model = build(sizes, dtype=dtype)
    table = {row.name: row for row in table_of(sizes)}
    tensors = dict(named_tensors(model))
    assert list(table) == [row.name for row in table_of(sizes)], "a name stands twice"
    assert set(tensors) == set(table)
    trainable = {name for name, _ in model.named_parameters()}
    for name, row in table.items():
        assert tuple(tensors[name].shape) == row.shape, name
        assert tensors[name].dtype == (torch.promote_types(dtype, torch.float32) if row.fp32 else dtype), name
        assert row.trainable == (name in trainable), name
    assert not {name for name, _ in model.named_buffers()} - set(table)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", [n for n, s in VARIETIES.items() if not getattr(s, "moe", None)])
def test_local_shapes_are_the_boxes(name, sequence_parallel):
    sizes = VARIETIES[name]
    for rank in range(2):
        model = build(sizes, mp=place(rank, 2), sequence_parallel=sequence_parallel)
        for row in table_of(sizes):
            local = dict(named_tensors(model))[row.name]
            assert tuple(local.shape) == box_at(row, {"mp": (2, rank)}).sizes, row.name


def test_units_of_the_table_are_the_modules_units():
    for sizes in (MOE, DENSE, ERNIE):
        model = build(sizes)
        by_unit = {
            id(parameter): unit
            for unit, modules in model.units().items()
            for module in modules
            for parameter in module.parameters()
        }
        parameters = dict(model.named_parameters())
        for row in table_of(sizes):
            if row.trainable:
                assert by_unit[id(parameters[row.name])] == row.unit, row.name
        assert len(by_unit) == len(parameters)


def test_building_on_meta_needs_no_memory():
    single = Axis.single("one")
    with torch.device("meta"):
        model = Decoder(ERNIE_21B, mp=single, ep=single, emp=single, dtype=torch.bfloat16)
    assert all(parameter.is_meta for parameter in model.parameters())
    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(model)}
    assert shapes == {row.name: row.shape for row in table_of(ERNIE_21B)}


@pytest.mark.parametrize("sizes", VARIETIES.values(), ids=VARIETIES)
def test_pieces_cover_each_parameter_once(sizes):
    names = set()
    for row in table_of(sizes):
        count = torch.zeros(row.shape, dtype=torch.int64)
        for piece in row.pieces:
            assert piece.hf_name not in names
            names.add(piece.hf_name)
            assert count[piece.index].reshape(piece.hf_shape).shape == piece.hf_shape
            count[piece_box(row, piece).slices] += 1
        assert bool((count == 1).all()), row.name


def test_decay_leaves_out_biases_and_norms():
    for sizes in (VARIETIES["gpt"], VARIETIES["moe gelu with biases"], ERNIE):
        for row in table_of(sizes):
            plain = "norm" in row.name or row.name.endswith("bias")
            assert row.decay != plain, row.name


def test_expert_axes_cut_experts_and_features():
    rows = {row.name: row for row in table_of(MOE)}
    gate_up = rows["layers.1.moe.experts.gate_up"]
    assert gate_up.expert
    assert box_at(gate_up, {"ep": (2, 1), "emp": (2, 1)}) == Box((2, 0, 8, 0), (2, 2, 8, 32))
    assert box_at(rows["layers.1.moe.experts.down"], {"emp": (2, 1)}) == Box((0, 0, 8), (4, 32, 8))
    assert rows["layers.1.moe.router.correction_bias"].trainable is False


def test_a_cut_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="not divisible by the 4 ranks of mp"):
        build(DENSE, mp=place(0, 4))


def test_counts_are_the_published_ones():
    total, active = parameter_counts(ERNIE_21B)
    assert total == pytest.approx(21.8e9, rel=0.02)
    assert active == pytest.approx(3.35e9, rel=0.02)
    total, active = parameter_counts(ERNIE_300B)
    assert total == pytest.approx(299.5e9, rel=0.001)
    assert active == pytest.approx(47.9e9, rel=0.001)


def test_counts_of_ernie_base():
    # ernie-3.0-base-zh, counted by transformers (ErnieForPreTraining with task types).
    base = replace(ERNIE_BASE, type_vocab_size=4, task_type_vocab_size=3)
    model = Ernie(base, mp=Axis.single("mp"), dtype=torch.float32, device="meta")
    assert parameter_counts(base) == (118578498, 118578498)
    assert sum(p.numel() for p in model.parameters()) == 118578498
