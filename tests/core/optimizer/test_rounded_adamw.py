"""AdamW with moments in bf16: the same bits however a tensor is cut, and means that do not stall."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from megapar.core.box import Box
from megapar.core.device.adamw import SLAB
from megapar.core.device.stochastic_rounding import random_bits, rounded
from megapar.core.optimizer.optimizer import Optimizer
from megapar.core.optimizer.tensor_pieces import TensorRegion, pieces_of, tensor_key
from megapar.core.optimizer.update_rule import AdamW, RoundedAdamW
from megapar.core.sharding.master_shard import MasterShard, ParameterView
from megapar.model.initialize import piece_box
from megapar.model.parameter import ParameterSpec, attention_rows, mlp_rows, norm_rows

HEADS = {"q": slice(0, 3), "k": 3, "v": 4}
TABLE: tuple[ParameterSpec, ...] = (
    *attention_rows("qkv", (4, 5, 6, 10), HEADS, "layers.0", bias=True),
    *mlp_rows("mlp", (12, 10), True, True, "mlp", "layers.0"),
    *norm_rows("norm", 10, "norm", "layers.0"),
)
BOTH = RoundedAdamW((0.9, 0.95), 1e-8, 0.1, rounds=(True, True))


@dataclass
class Rows:
    """A sharding of flat rows, in each of which pieces of parameters follow one another with a gap between them."""

    boxes: Sequence[dict[str, Box]]
    gap: int = 3
    master_shards: list[MasterShard] = field(default_factory=list)

    def __post_init__(self) -> None:
        for row in self.boxes:
            memory = torch.zeros(7 + sum(box.numel + self.gap for box in row.values()))
            self.master_shards.append(MasterShard(memory[7:], torch.zeros_like(memory[7:]), True, True))

    def views(self, tensors: Sequence[Tensor | None]) -> Iterator[ParameterView]:
        specs = {spec.name: spec for spec in TABLE}
        for row, flat in zip(self.boxes, tensors, strict=True):
            at = 0
            for name, box in row.items():
                assert flat is not None
                yield ParameterView(specs[name], box, flat[at : at + box.numel].view(box.sizes))
                at += box.numel + self.gap


def regions(spec: ParameterSpec) -> list[TensorRegion]:
    return [TensorRegion(piece_box(spec, piece), tensor_key(7, piece.hf_name)) for piece in spec.pieces]


def run(boxes: Sequence[dict[str, Box]], rule: AdamW, steps: int = 4) -> dict[str, dict[str, Tensor]]:
    """Return every parameter's master and moments, put together from the rows, after steps on fixed gradients."""
    rows = Rows(boxes)
    optimizer = Optimizer(rows.master_shards, rule, pieces_of(rows, regions))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    wholes = {spec.name: torch.randn(spec.shape, generator=generator) for spec in TABLE}
    for view in rows.views([shard.master for shard in rows.master_shards]):
        view.tensor.copy_(wholes[view.spec.name][view.box.slices])
    for _ in range(steps):
        gradients = {spec.name: torch.randn(spec.shape, generator=generator) for spec in TABLE}
        for view in rows.views([shard.grad for shard in rows.master_shards]):
            view.tensor.copy_(gradients[view.spec.name][view.box.slices])
        optimizer.step(1e-2)
    results: dict[str, dict[str, Tensor]] = {}
    lists = {"master": [shard.master for shard in rows.master_shards]}
    for kind, tensors in (lists | {name: [*optimizer.state(name)] for name in rule.states}).items():
        results[kind] = {spec.name: torch.full(spec.shape, math.nan, dtype=tensors[0].dtype) for spec in TABLE}
        for view in rows.views(tensors):
            results[kind][view.spec.name][view.box.slices] = view.tensor
    return results


WHOLE = [{spec.name: Box.whole(spec.shape) for spec in TABLE}]


@pytest.mark.parametrize("dims", [(0,), (1,), (-1,), (0, 1), (1, -1), (0, -1, 0), (-1, 0, 1)])
def test_any_cut_gives_the_same_bits(dims: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(WHOLE, BOTH)
    assert expected["exp_avg"]["norm.bias"].dtype == torch.bfloat16
    rows = WHOLE
    for number, dim in enumerate(dims):
        parts = 2 + number
        rows = [
            {name: box.cut(dim % len(box.sizes) if dim < 0 else min(dim, len(box.sizes) - 1), parts, part)
             for name, box in row.items()}
            for row in rows
            for part in range(parts)
        ]  # fmt: skip
    monkeypatch.setitem(SLAB, "cpu", 17)
    found = run(rows, BOTH)
    for kind, tensors in expected.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, found[kind][name]), (kind, name)


def test_moments_are_rounded_by_different_bits() -> None:
    rows = Rows(WHOLE)
    (shard,) = rows.master_shards
    shard.grad = torch.rand(shard.master.shape, generator=torch.Generator().manual_seed(2))
    pieces = pieces_of(rows, regions)  # type: ignore[arg-type]
    optimizer = Optimizer(rows.master_shards, BOTH, pieces)
    optimizer.step(1e-2)
    for piece in pieces[0].pieces:
        gradient = piece.within(shard.grad)
        bits = random_bits(piece.key, torch.tensor(1), piece.indices(torch.device("cpu")))
        first, second = gradient * torch.tensor(1 - 0.9), gradient * gradient * torch.tensor(1 - 0.95)
        assert torch.equal(piece.within(optimizer.state("exp_avg")[0]), rounded(first, bits, 0))
        assert torch.equal(piece.within(optimizer.state("exp_avg_sq")[0]), rounded(second, bits, 1))


def test_unrounded_moments_are_those_of_adamw() -> None:
    plain = run(WHOLE, AdamW((0.9, 0.95), 1e-8, 0.1))
    for rounds in ((False, True), (True, False)):
        found = run(WHOLE, RoundedAdamW((0.9, 0.95), 1e-8, 0.1, rounds=rounds))
        for name, rounds_it in zip(("exp_avg", "exp_avg_sq"), rounds, strict=True):
            for parameter, tensor in plain[name].items():
                # A rounding errs by at most the distance of two neighbours, here in each of four updates.
                rtol, atol = (2**-5, 2e-2) if rounds_it else (0.0, 1e-6)
                torch.testing.assert_close(found[name][parameter].float(), tensor, rtol=rtol, atol=atol)


def test_padding_does_not_change() -> None:
    rows = Rows(WHOLE)
    (shard,) = rows.master_shards
    shard.grad = torch.ones_like(shard.master)
    Optimizer(rows.master_shards, BOTH, pieces_of(rows, regions)).step(1.0)  # type: ignore[arg-type]
    changed = sum(view.tensor.count_nonzero().item() for view in rows.views([shard.master]))
    assert changed == shard.master.count_nonzero().item() == sum(spec.numel for spec in TABLE)


def test_a_second_moment_rounded_to_nearest_stalls_and_ours_does_not() -> None:
    """With beta 0.999 the mean of squares of ones is one; a step of it is less than half of what bf16 resolves."""
    numel, beta, steps = 4096, 0.999, 5000
    spec = ParameterSpec("w", (numel,), (), "head", "normal", decay=True)
    rows = Rows([{"w": Box.whole((numel,))}], gap=0)
    (shard,) = rows.master_shards
    shard.grad = torch.ones_like(shard.master)
    rows.views = lambda tensors: iter([ParameterView(spec, Box.whole((numel,)), tensors[0])])  # type: ignore
    rule = RoundedAdamW((0.9, beta), 1e-8, 0.0, rounds=(True, True))
    pieces = pieces_of(rows, lambda _: [TensorRegion(Box.whole((numel,)), tensor_key(7, "w"))])  # type: ignore
    optimizer = Optimizer(rows.master_shards, rule, pieces)
    nearest = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(steps):
        optimizer.step(1e-3)
        nearest = (nearest.float() * beta + (1 - beta)).to(torch.bfloat16)
    exact = 1 - beta**steps
    (first,), (second,) = optimizer.state("exp_avg"), optimizer.state("exp_avg_sq")
    assert nearest.item() < 0.6 * exact
    assert abs(second.double().mean().item() / exact - 1) < 2e-3
    assert second.double().std().item() < 0.1
    assert abs(first.double().mean().item() - 1) < 2e-3


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    rows = Rows(WHOLE)
    (shard,) = rows.master_shards
    shard.grad = torch.full_like(shard.master, math.nan)
    optimizer = Optimizer(rows.master_shards, BOTH, pieces_of(rows, regions))  # type: ignore[arg-type]
    optimizer.step(1e-2, found_inf=torch.tensor(1.0))
    assert optimizer.num_steps == 0
    assert not shard.master.any()
    assert not any(state.any() for name in BOTH.states for state in optimizer.state(name))
    shard.grad = torch.full_like(shard.master, 6.0)
    other = Rows(WHOLE)
    other.master_shards[0].grad = torch.full_like(shard.master, 3.0)
    again = Optimizer(other.master_shards, BOTH, pieces_of(other, regions))  # type: ignore[arg-type]
    optimizer.step(1e-2, found_inf=torch.tensor(0.0), grad_scale=torch.tensor(2.0))
    again.step(1e-2)
    assert optimizer.num_steps == again.num_steps == 1
    assert torch.equal(shard.master, other.master_shards[0].master)
