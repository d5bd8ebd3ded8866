"""The rows of buckets: their lengths, and that nobody reads what fills them up."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import nn

from megapar.core.box import Box
from megapar.core.comm.axis import Axis
from megapar.core.comm.buffers import BufferPool
from megapar.core.device.remainders import split_master
from megapar.core.sharding import bucket as bucket_module
from megapar.core.sharding import bucket_row
from megapar.core.sharding.bucket import Bucket, BucketDtypes
from megapar.core.sharding.bucket_row import LARGE_BYTES, make_members, make_ranges, row_length
from megapar.core.sharding.cut import ALIGNED_BYTES
from megapar.core.sharding.master_shard import MasterShard
from megapar.model.parameter import ParameterSpec
from tests.core.sharding.test_zero import SHARDED
from tests.equivalence.run import trace
from tests.support.late import poison
from tests.support.ranks import run_ranks


def test_large_rows_are_whole_16_bytes_and_small_ones_as_they_are():
    odd = LARGE_BYTES // 2 + 3
    assert row_length(odd, 2) == odd + 5
    assert row_length(odd, 4) == odd + 1
    assert row_length(odd, 8) == odd + 1
    assert row_length(odd + 5, 2) == odd + 5
    assert row_length(LARGE_BYTES // 2 - 1, 2) == LARGE_BYTES // 2 - 1


@pytest.mark.parametrize(("rows", "rank", "parts"), [(4, 0, (3, 3)), (5, 0, (3, 3, 3)), (5, 1, (3, 3, 3))])
def test_a_piece_is_cut_into_its_rows_and_the_padding(rows: int, rank: int, parts: tuple[int, ...]) -> None:
    """Two pieces of rows of 3; the last of five rows and its padding are the second piece's."""
    spec = ParameterSpec("experts", (rows, 3), (), "layer", "normal", True)
    entry = (spec, nn.Parameter(torch.zeros(rows, 3)), Box.whole((rows, 3)).cut(0, 2, rank), True, -(-rows // 2) * 3)
    member = make_members([entry], 2)[0]
    assert (member.parts(by_row=True), member.parts(by_row=False)) == (parts, (sum(parts),))


def test_ranks_of_dp_update_the_second_copy_of_a_tied_embedding_in_the_same_ranges() -> None:
    """Only the first rank of dp counts the last stage's own weight in the norm, and none of them the copy."""
    own = ParameterSpec("head.dense.weight", (3, 5), (), "head", "normal", True, stage=1)
    copy = replace(own, name="embedding.word.weight", stage=0)
    tensor, whole = nn.Parameter(torch.zeros(3, 5)), Box.whole((3, 5))
    found = [
        [(one.start, one.end) for one in make_ranges(make_members(members, 1))]
        for members in ([(own, tensor, whole, first, 15), (copy, tensor, whole, False, 15)] for first in (True, False))
    ]
    assert found == [[(0, 15), (15, 30)]] * 2


WIDE = BucketDtypes(torch.float32, torch.float32)


def lone_bucket(*shapes: tuple[int, ...], dtypes: BucketDtypes = WIDE) -> Bucket:
    """A bucket of bf16 parameters on an axis of one rank."""
    entries = []
    for number, shape in enumerate(shapes):
        spec = ParameterSpec(f"p{number}", shape, (), "layer", "normal", True)
        parameter = nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16))
        entries.append((spec, parameter, Box.whole(shape), True, parameter.numel()))
    pool = BufferPool.for_messages(torch.device("cpu"))
    axes = (Axis.single("shard"), Axis.single("replica"))
    return Bucket(entries, *axes, dtypes, accumulates_unsharded=True, pool=pool)


@pytest.mark.parametrize("odd", [(), (3,)])
def test_one_rank_casts_its_masters_where_its_parameters_lie(odd: tuple[int, ...]) -> None:
    """Without a buffer, unless a parameter would leave the next one unaligned."""
    bucket = lone_bucket((4, 8), odd or (8,), (2, 3, 8))
    assert bucket.master is not None
    for step in range(2):
        bucket.master.copy_(torch.randn(bucket.row, generator=torch.Generator().manual_seed(step)))
        bucket.start_param_gather(overlap=True)
        bucket.finish_param_gather()
        for member in bucket.members:
            expected = bucket.piece(bucket.master, member).to(torch.bfloat16)
            assert torch.equal(member.parameter, expected)
            assert member.parameter.data_ptr() % ALIGNED_BYTES == 0
    storages = {member.parameter.untyped_storage().data_ptr() for member in bucket.members}
    assert (len(storages), bucket.parameter_row is None) == ((3, True) if odd else (1, False))
    assert (bucket._pool.bytes > 0) == bool(odd)


@pytest.mark.parametrize("odd", [(), (3,)])
def test_a_split_master_is_its_parameters_and_remainders(odd: tuple[int, ...]) -> None:
    """The optimizer's changes reach the parameters, and nothing is kept twice after that."""
    bucket = lone_bucket((4, 8), odd or (8,), (2, 3, 8), dtypes=BucketDtypes(*WIDE[:2], torch.bfloat16, splits=True))
    remainders = torch.zeros(bucket.row, dtype=torch.int16)
    shard = MasterShard(remainders, None, True, True, weights=lambda: bucket.weights)
    assert bucket.master is None
    for step in range(2):
        values = torch.randn(bucket.row, generator=torch.Generator().manual_seed(step))
        shard.change(values)
        assert torch.equal(shard.values, values)
        bucket.start_param_gather(overlap=True)
        bucket.finish_param_gather()
        assert bucket._weights is None
        for member in bucket.members:
            assert torch.equal(member.parameter, split_master(bucket.piece(values, member).contiguous())[0])
        for member in bucket.members:
            place = slice(member.offset, member.offset + member.numel)
            assert torch.equal(shard.values[place], values[place])
        bucket.forget_weights()
    bucket.begin_micro_batch()
    for index, member in enumerate(bucket.members):
        member.parameter.grad = torch.ones_like(member.parameter)
        bucket.add(index)
    bucket.start_grad_reduce(overlap=False)
    bucket.finish_grad_reduce(last=True, overlap=False)
    assert bucket.gradient is not None
    assert bucket.gradient.dtype == torch.bfloat16


def test_gradients_of_many_micro_batches_add_up_in_the_main_dtype() -> None:
    """1 + 256 / 512: in bf16 each of the later ones would vanish."""
    bucket = lone_bucket((2, 3, 8))
    (member,) = bucket.members
    for number in range(257):
        bucket.begin_micro_batch()
        member.parameter.grad = torch.full_like(member.parameter, 1.0 if number == 0 else 2.0**-9)
        bucket.add(0)
    bucket.start_grad_reduce(overlap=False)
    bucket.finish_grad_reduce(last=True, overlap=False)
    assert bucket.gradient is not None
    assert set(bucket.piece(bucket.gradient, member).flatten().tolist()) == {1.5}


def train(rank: int, world_size: int, rendezvous: str, kind: str, flags: tuple[str, ...], filled: bool):
    """(whether a row was filled up, parameters after two steps), with NaN wherever a buffer is taken."""
    lengths = []
    take, length = BufferPool.take, row_length

    def taken(self: BufferPool, *arguments: object) -> torch.Tensor:
        buffer = take(self, *arguments)
        poison(buffer)
        return buffer

    def made(elements: int, item_bytes: int) -> int:
        # fp64, in which rows are compared, leaves one element: fp16's four times as many show more.
        lengths.append((elements, length(elements, 2) if filled else elements))
        return lengths[-1][1]

    with (
        patch.object(bucket_row, "LARGE_BYTES", 0),
        patch.object(bucket_module, "row_length", made),
        patch.object(BufferPool, "take", taken),
    ):
        found = trace(rank, world_size, rendezvous, kind, flags, 2)
    return any(own < whole for own, whole in lengths), None if found is None else found


@pytest.mark.parametrize("stage", ["1", "2"])
def test_what_fills_a_row_up_changes_nothing(stage: str) -> None:
    flags = (*SHARDED, "--sharding-stage", stage, "--dtype", "fp64", "--clip-grad", "0.05", "--hybrid-dp")
    flags = (*flags, "--sharding-degree", "3", "--global-batch-size", "12")
    (filled, got), *_ = run_ranks(6, train, "moe", flags, True, group=False)
    (plain, want), *_ = run_ranks(6, train, "moe", flags, False, group=False)
    assert (filled, plain) == (True, False)
    assert got.losses == want.losses
    assert got.norms == want.norms
    for name, value in want.parameters.items():
        assert torch.equal(got.parameters[name], value), name
