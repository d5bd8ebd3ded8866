"""The names of torch in use: the committed list is that of the code, and torch 2.11 has them all."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megapar.core import torch_names
from scripts.gpu_day.torch_names import Wheel, missing_here, read, used, walked, written

AGAIN = "python -m scripts.gpu_day.torch_names --write --reference WHEEL (its docstring says which) writes it anew"


def test_the_list_is_that_of_the_code():
    listed, now = set(read()), {written(*item) for item in used(walked()).items()}
    assert sorted(now - listed) == [], AGAIN
    assert sorted(listed - now) == [], AGAIN


def test_the_oldest_torch_has_them_all():
    """As looked up in its wheel when the list was written."""
    listed = read()
    assert len(listed) > 200
    assert [name for name, place in listed.items() if place not in ("python", "stub", "operators")] == []


def test_this_torch_has_them_all():
    assert missing_here(used(walked())) == []
    lacking = {"torch.nowhere": frozenset[str](), "torch.nn.functional.linear": frozenset({"out"})}
    assert len(missing_here({**lacking, "torch.nn.attention.sdpa_kernel": frozenset({"priority"})})) == 2


def test_names_are_read_through_imports_and_aliases(tmp_path):
    file = tmp_path / "code.py"
    file.write_text(
        "import torch\nimport torch.distributed as dist\n"
        "from torch.nn import functional as F\nfrom torch import Tensor\n"
        "def f(x: Tensor): return F.pad(x, (1, 1), value=0.0), dist.ReduceOp.SUM, torch.add(x, x), other.add(y=1)\n"
        "newer = getattr(dist, 'all_gather_single', None)\n"
    )
    found = used([file])
    assert found["torch.nn.functional.pad"] == {"value"}
    assert " ".join(sorted(found)) == (
        "torch torch.Tensor torch.add torch.distributed torch.distributed.ReduceOp.SUM torch.nn.functional "
        "torch.nn.functional.pad"
    )


@pytest.fixture
def wheel(tmp_path):
    files = {
        "torch/__init__.py": "from torch._C import *\nfrom math import inf\nfrom torch import nn\n",
        "torch/_C/__init__.pyi": "from torch._C._VariableFunctions import *\ndef _cuda_sleep(cycles): ...\n",
        "torch/_C/_VariableFunctions.pyi": "def add(input, other, *, alpha=1, out=None): ...\n",
        "torch/_C/_nn.pyi": "",
        "torch/nn/__init__.py": "from .kernels import attend as attend\n",
        "torch/nn/kernels.py": "if True:\n    def attend(q, *, scale=None): ...\n    def loose(**more): ...\n",
        "torch/_subclasses/fake_tensor.py": "func is torch.ops.prim.device.default",
        "torch/distributed/_symmetric_memory/__init__.py": (
            'lib = torch.library.Library("near", "DEF")\n'
            'lib.define(\n    "fused("\n    "Tensor A, *, bool return_A = True) -> Tensor",\n)\n'
        ),
        "torchgen/packaged/ATen/native/native_functions.yaml": "- func: _efficient.out(Tensor q) -> Tensor\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Wheel(tmp_path)


@pytest.mark.parametrize(
    ("name", "keywords", "there"),
    [
        ("torch.add", ("alpha",), True),
        ("torch.add", ("beta",), False),
        ("torch.inf", (), True),
        ("torch.nn.attend", ("scale",), True),
        ("torch.nn.attend", ("enable_gqa",), False),
        ("torch.nn.kernels.loose", ("anything",), True),
        ("torch.nn.absent", (), False),
        ("torch.absent.attend", (), False),
        ("torch.ops.aten._efficient", (), True),
        ("torch.ops.aten._newer", (), False),
        ("torch.ops.prim.device.default", (), True),
        ("torch.ops.prim.newer.default", (), False),
        ("torch.ops.near.fused", ("return_A",), True),
        ("torch.ops.near.fused", ("bias",), False),
        ("torch.ops.near.newer", (), False),
    ],
)
def test_a_wheel_is_asked_without_being_run(wheel, name, keywords, there):
    assert bool(wheel.has(name, frozenset(keywords))) == there


EMPTY, GLOO, NCCL = (b'{"pg_config":{}}', b'{"entries":[{"record_id":1}]}', b'{"entries":[{"record_id":2}]}')


@pytest.mark.parametrize(
    ("recorders", "record"),
    [
        ({"fr": GLOO}, GLOO),  # a torch without NCCL
        ({"fr": EMPTY, "nccl": NCCL}, NCCL),
        ({"fr": GLOO, "nccl": NCCL}, NCCL + b"\n" + GLOO),
        ({"fr": NCCL, "nccl": NCCL}, NCCL),  # a torch whose two names are one recorder
        ({"fr": GLOO, "nccl": EMPTY}, GLOO),
        ({"fr": EMPTY, "nccl": EMPTY}, b""),
        ({}, b""),
    ],
)
def test_the_flight_record_has_the_collectives_of_nccl_and_of_gloo(recorders, record, monkeypatch):
    dumps = {f"_dump_{name}_trace_json": lambda held=held: held for name, held in recorders.items()}
    monkeypatch.setattr(torch._C, "_distributed_c10d", SimpleNamespace(**dumps))
    assert torch_names.flight_record() == record
