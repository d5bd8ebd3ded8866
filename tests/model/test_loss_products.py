"""How the loss is cut on a GPU: fake tensors, forward with its gradients, every product looked at."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megapar.core.comm.axis import Axis
from megapar.core.device import ops
from megapar.core.device.kinds import device_class
from megapar.model.layers.loss import vocab_parallel_linear_cross_entropy

ROWS, HIDDEN, VOCABULARY = 8192, 2560, 103424  # of ERNIE-4.5-21B-A3B
PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm")


class Seen(TorchDispatchMode):
    """Products by operator, and the bytes that other operators add to a tensor of the weight's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.products: Counter[str] = Counter()
        self.added_bytes = 0
        self.largest_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it and count it."""
        made = func(*args, **(kwargs or {}))
        if func._schema.name in PRODUCTS:
            self.products[str(func)] += 1
        elif func._schema.name == "aten::add_" and args[0].shape == (VOCABULARY, HIDDEN):
            self.added_bytes += 2 * args[0].nbytes + args[1].nbytes
        if isinstance(made, Tensor) and made.shape[-1:] == (VOCABULARY,) and made.shape[0] != HIDDEN:
            self.largest_bytes = max(self.largest_bytes, made.nbytes)
        return made


def seen_on(device: str) -> Seen:
    """With the device's forms and sizes, on fake tensors of a CPU: those of a GPU without a driver cannot be copied."""
    seen = Seen()
    forms = {name: {**forms, "cpu": forms.get(device, forms["reference"])} for name, forms in ops.OPS.items()}
    with patch.object(ops, "OPS", forms), FakeTensorMode(), seen:
        hidden = torch.empty(ROWS, HIDDEN, dtype=torch.bfloat16)
        weight = torch.empty(VOCABULARY, HIDDEN, dtype=torch.bfloat16)
        labels, mp, held = torch.zeros(ROWS, dtype=torch.int64), Axis.single("mp"), device_class(device).logits_bytes
        vocab_parallel_linear_cross_entropy(
            hidden, weight, None, labels, vocab_size=VOCABULARY, mp=mp, logits_bytes=held
        )
    return seen


def test_a_gpu_takes_thousands_of_rows_at_a_time_and_adds_in_the_product() -> None:
    seen = seen_on("cuda")
    assert sum(seen.products.values()) <= 9  # three for each piece of the rows
    assert seen.added_bytes == 0
    assert seen.largest_bytes <= 1.8e9


def test_a_cpu_keeps_its_pieces_in_the_cache() -> None:
    seen = seen_on("cpu")
    assert seen.largest_bytes <= 2**26
    assert sum(seen.products.values()) <= 3 * 52
