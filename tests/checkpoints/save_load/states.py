"""States for the checkpoint tests: global tensors that every test can compute, cut as a layout cuts them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megapar.checkpoints.format.shards import Shard
from megapar.checkpoints.save_load import collective_io
from megapar.checkpoints.save_load.planner import ModelCheck
from megapar.core.box import Box
from megapar.files.location import Place
from megapar.model.facts import differences

MODEL = {"hidden_size": 8, "kind": "test", "shape": (2, 3)}
LAYOUT: dict[str, dict[str, Any]] = {"model": MODEL, "grid": {"sharding": 2, "mp": 1}}
SCALARS = {"iteration": 7, "lr": 0.1, "note": "naïve", "nested": {"a": [1, None, True]}}


def same_model(facts: Mapping[str, Any]) -> ModelCheck:
    """Return the check that the stored facts are these."""
    return partial(differences, expected=facts)


# name -> shape and dtype; some sizes are odd on purpose: no degree divides them
TENSORS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "model/weight": ((8, 6), torch.float32),
    "model/half": ((7, 5, 3), torch.bfloat16),
    "model/bias": ((5,), torch.float64),
    "model/experts": ((4, 2, 8), torch.float32),
    "model/scale": ((), torch.float32),
    "model/empty": ((0, 3), torch.float32),
    "optimizer/step": ((3,), torch.int64),
    "optimizer/mask": ((6,), torch.bool),
}

# layout -> (world size, {name: its cuts, applied one after the other}); a tensor without a name here is whole
Cut = tuple[int, int, int]  # dim, parts, divisor: part = rank // divisor % parts
LAYOUTS: dict[str, tuple[int, dict[str, tuple[Cut, ...]]]] = {
    "one": (1, {}),
    "rows": (2, {name: ((0, 2, 1),) for name, (shape, _) in TENSORS.items() if shape}),
    "columns": (2, {name: ((len(shape) - 1, 2, 1),) for name, (shape, _) in TENSORS.items() if shape}),
    "square": (
        4,
        {
            "model/weight": ((0, 2, 2), (1, 2, 1)),
            "model/half": ((0, 2, 2), (1, 2, 1)),
            "model/experts": ((0, 2, 1), (2, 2, 2)),
            "model/bias": ((0, 2, 1),),
            "optimizer/step": ((0, 4, 1),),  # ceil(3 / 4) = 1: the last rank is empty
        },
    ),
    "nested": (4, {"model/half": ((0, 2, 2), (0, 2, 1)), "model/bias": ((0, 2, 2), (0, 2, 1))}),
}


def world_size(layout: str) -> int:
    return LAYOUTS[layout][0]


def true_tensor(name: str, salt: int = 0) -> Tensor:
    """The global tensor of a name; ``salt`` makes other values."""
    shape, dtype = TENSORS[name]
    generator = torch.Generator().manual_seed(sum(name.encode()) + 1000 * salt)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    if dtype == torch.int64:
        return torch.randint(-(2**62), 2**62, shape, generator=generator)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def make_state(layout: str, rank: int, *, filled: bool, salt: int = 0) -> dict[str, Shard]:
    """This rank's shards of all tensors: of the true values, or filled with ones, as ``untouched`` expects."""
    state = {}
    for name, (shape, dtype) in TENSORS.items():
        box = Box.whole(shape)
        for dim, parts, divisor in LAYOUTS[layout][1].get(name, ()):
            box = box.cut(dim, parts, rank // divisor % parts)
        if filled:
            local = true_tensor(name, salt)[box.slices].clone()
        else:
            local = torch.ones(box.sizes, dtype=dtype)
        state[name] = Shard(name, shape, box, local)
    return state


def wrong(state: dict[str, Shard], salt: int = 0) -> list[str]:
    """Names whose local tensors are not bit for bit the true values."""
    names = []
    for name, shard in state.items():
        expected = true_tensor(name, salt)[shard.box.slices].contiguous().view(-1).view(torch.uint8)
        if not torch.equal(shard.tensor.contiguous().view(-1).view(torch.uint8), expected):
            names.append(name)
    return names


def untouched(state: dict[str, Shard]) -> bool:
    return all(bool((shard.tensor == 1).all()) for shard in state.values())


def group_of(world: int) -> dist.ProcessGroup | None:
    return dist.group.WORLD if world > 1 else None


def save_on(rank: int, world: int, folder: Place, layout: str, salt: int = 0) -> None:
    collective_io.save(
        folder, make_state(layout, rank, filled=True, salt=salt), SCALARS, layout=LAYOUT, group=group_of(world)
    )


def load_on(rank: int, world: int, folder: Place, layout: str, **options: Any) -> tuple[list[str], dict[str, Any]]:
    """Names that were loaded wrongly, and the scalars."""
    state = make_state(layout, rank, filled=False)
    scalars = collective_io.load(folder, state, expect_model=same_model(MODEL), group=group_of(world), **options)
    return wrong(state), scalars
