"""Sharding of stages 1 and 2, apart from its numbers, which tests/equivalence has."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from megapar.core.device import kinds
from megapar.core.device.dtypes import WeightProduct
from megapar.core.device.ops import OPS
from megapar.core.sharding import bucket as bucket_module
from megapar.core.sharding import zero
from megapar.core.sharding.zero import ZeroSharding
from tests.equivalence.run import Trace, trace
from tests.equivalence.table import ROWS
from tests.support.ranks import run_ranks

SHARDED = next(
    row.flags() for row in ROWS if row.world_size == 2 and "--sharding-degree" in row.layout and row.kind == "moe"
)


def count_left_behind(rank: int, world_size: int, rendezvous: str, kind: str, flags: tuple[str, ...]) -> int:
    trace(rank, world_size, rendezvous, kind, flags, 1)
    gc.collect()
    return sum(isinstance(thing, ZeroSharding) for thing in gc.get_objects())


def test_nothing_is_left_of_a_trainer_that_is_gone() -> None:
    """Hooks on parameters once kept it, and with it its groups, whose threads wake a hundred times a second."""
    assert run_ranks(2, count_left_behind, "moe", SHARDED, group=False) == [0, 0]


def train(
    rank: int, world_size: int, rendezvous: str, row: tuple[str, tuple[str, ...]], most_bytes: int
) -> tuple[int, dict[str, torch.Tensor] | None]:
    """(most reductions in flight at once, the parameters after two steps)."""
    flying: set[int] = set()
    most = 0
    start, finish = bucket_module.Bucket.start_grad_reduce, bucket_module.Bucket.finish_grad_reduce

    def started(self: bucket_module.Bucket, **options: bool) -> None:
        nonlocal most
        start(self, **options)
        flying.add(id(self))
        most = max(most, len(flying))

    def finished(self: bucket_module.Bucket, **options: bool) -> None:
        finish(self, **options)
        flying.discard(id(self))

    with (
        patch.object(zero, "IN_FLIGHT_BYTES", most_bytes),
        patch.object(bucket_module.Bucket, "start_grad_reduce", started),
        patch.object(bucket_module.Bucket, "finish_grad_reduce", finished),
    ):
        found = trace(rank, world_size, rendezvous, *row, 2, backend="late")
    return most, None if found is None else found.parameters


@pytest.mark.parametrize("stage", ["1", "2"])
def test_few_reductions_in_flight_change_nothing(stage: str) -> None:
    """Buffers of what has landed serve the buckets that come, in every micro-batch."""
    flags = (*SHARDED, "--sharding-stage", stage, "--num-layers", "6")
    (all_at_once, free), _ = run_ranks(2, train, ("moe", flags), 1 << 30, group=False)
    (few, bound), _ = run_ranks(2, train, ("moe", flags), 0, group=False)
    assert few == zero.LEAST_IN_FLIGHT + 1 < all_at_once  # one is launched before the oldest lands
    assert free is not None
    assert bound is not None
    for name, value in free.items():
        assert torch.equal(bound[name], value), name


def train_alone(
    rank: int, world_size: int, rendezvous: str, flags: tuple[str, ...], products: bool
) -> tuple[Trace | None, set[int]]:
    """(the trace, how often buckets took each of the members that got products)."""
    made: Counter[tuple[int, int]] = Counter()
    taken: Counter[tuple[int, int]] = Counter()
    add, add_product = bucket_module.Bucket.add, bucket_module.Bucket.add_product

    def added(self: bucket_module.Bucket, index: int) -> bool:
        taken[id(self), index] += 1
        return add(self, index)

    def multiplied(self: bucket_module.Bucket, index: int, product: WeightProduct) -> None:
        made[id(self), index] += 1
        add_product(self, index, product)

    with (
        patch.object(bucket_module.Bucket, "add", added),
        patch.object(bucket_module.Bucket, "add_product", multiplied),
        patch.object(zero, "set_gradient_sink", zero.set_gradient_sink if products else lambda *_: None),
    ):
        found = trace(rank, world_size, rendezvous, "moe", flags, 2)
    assert bool(made) == products
    return found, {taken[member] for member in made}


@pytest.mark.parametrize("more", [(), ("--recompute-interval", "1"), ("--untie-embeddings-and-output-weights",)])
def test_products_in_the_buffer_are_the_gradients_of_autograd(more: tuple[str, ...]) -> None:
    """With every hook fired once in a micro-batch, however often the weight is used."""
    flags = ("--data-path", "mock", "--dtype", "fp64", "--num-layers", "2", "--hidden-size", "32", "--vocab-size", "64")
    flags = (*flags, "--num-attention-heads", "4", "--seq-length", "16", "--micro-batch-size", "2", "--num-experts")
    flags = (*flags, "0", "--gradient-merge-acc-step", "3", "--mtp-depth", "1", "--device", "cpu", *more)
    (got, fired), (want, _) = (run_ranks(1, train_alone, flags, products, group=False)[0] for products in (True, False))
    assert fired == {2 * 3}  # steps and micro-batches
    assert got is not None
    assert want is not None
    assert got.losses == pytest.approx(want.losses, rel=1e-13)
    assert got.norms == pytest.approx(want.norms, rel=1e-12)
    for name, value in want.parameters.items():
        torch.testing.assert_close(got.parameters[name], value, rtol=1e-10, atol=1e-12)


def train_packed(
    rank: int, world_size: int, rendezvous: str, row: tuple[str, tuple[str, ...]], packs: bool
) -> tuple[Counter[str], dict[str, torch.Tensor] | None]:
    """(calls of each operator, parameters after two steps), with the GPU's forms if ``packs``."""
    calls: Counter[str] = Counter()
    tables, op = kinds._tables(), bucket_module.op

    def form(name: str, like: torch.Tensor) -> Callable[..., torch.Tensor]:
        calls[name] += 1
        return OPS[name]["cuda"] if packs and name.endswith("pack_bucket") else op(name, like)

    classes = {name: replace(one, packs_rows=packs) for name, one in tables[1].items()}
    with patch.object(kinds, "_tables", lambda: (tables[0], classes)), patch.object(bucket_module, "op", form):
        found = trace(rank, world_size, rendezvous, *row, 2, backend="late")
    return calls, None if found is None else found.parameters


@pytest.mark.parametrize("stage", ["1", "2"])
@pytest.mark.parametrize("batch", ["2", "6"])
def test_gradients_that_are_copied_together_are_the_same(stage: str, batch: str) -> None:
    flags = (*SHARDED, "--sharding-stage", stage, "--global-batch-size", batch)
    (calls, packed), _ = run_ranks(2, train_packed, ("moe", flags), True, group=False)
    (_, want), _ = run_ranks(2, train_packed, ("moe", flags), False, group=False)
    assert calls["pack_bucket"] > 0
    assert packed is not None
    assert want is not None
    for name, value in want.items():
        assert torch.equal(packed[name], value), name
