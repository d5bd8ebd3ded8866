"""Products of a layer cut over mp, as one rank of a node of GPUs has them: how many, and of how many rows."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megapar.arguments import parse
from megapar.core.device.base import Device
from megapar.tools.tracing.pretend import pretend

PRODUCTS = {"aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm"}
LAYER = "--num-experts 0 --hidden-size 4096 --num-attention-heads 32 --num-query-groups 8 --ffn-hidden-size 14336"
RUN = "--data-path mock --device cpu --bf16 --train-iters 1 --eval-interval 0 --vocab-size 512 --global-batch-size {}"


class Node(Device):
    """A CPU that is called what a driver calls an H200: its sizes, not its kernels."""

    name = "NVIDIA H200"  # type: ignore[assignment]


class Rows(TorchDispatchMode):
    """How many products there are of so many rows (tokens), all the batches of one together."""

    def __init__(self) -> None:
        super().__init__()
        self.products: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note it."""
        if func._schema.name in PRODUCTS:
            left = [x for x in args if isinstance(x, torch.Tensor)][-2]
            turned = left.stride(-2) == 1 and left.stride(-1) > 1  # a weight's gradient: tokens are what is summed over
            self.products[left.shape[-1] if turned else left.shape[:-1].numel()] += 1
        return func(*args, **(kwargs or {}))


def products(layers: int, rank: int, samples: int, flags: str) -> Counter[int]:
    """Of a step."""
    line = f"{RUN.format(samples)} --micro-batch-size {samples} --num-layers {layers} {LAYER} {flags}"
    rows = Rows()
    with pretend(parse("moe", line.split(), {"WORLD_SIZE": "8", "RANK": "0"}), rank, rows, Node()) as trainer:
        rows.products.clear()
        trainer.step()
    return rows.products


def per_layer(rank: int, samples: int, flags: str) -> Counter[int]:
    """Of a layer, forward and backward."""
    more, less = (products(layers, rank, samples, flags) for layers in (2, 1))
    return more - less


@pytest.mark.parametrize(("rank", "samples", "most"), [(0, 1, 32), (3, 1, 32), (3, 2, 40)])
def test_pieces_are_few_and_large(rank: int, samples: int, most: int) -> None:
    flags = "--mp-degree 8 --sequence-parallel --tp-comm-overlap on --seq-length"
    found = per_layer(rank, samples, f"{flags} {8192 // samples}")
    assert 12 < found.total() <= most
    assert min(found) >= 1024


@pytest.mark.parametrize("samples", [1, 2])
def test_off_is_off(samples: int) -> None:
    flags = f"--mp-degree 8 --sequence-parallel --no-tp-comm-overlap --seq-length {8192 // samples}"
    assert per_layer(3, samples, flags) == {8192: 12}
