"""Trace for ``scripts/trace_npu.sh``: training steps as one rank with NPUs, on fake tensors, checking every operator.

A run fails if an operator on a tensor of the device
* has no NPU kernel: torch_npu would copy its arguments to the host and compute there;
* uses fp64, which the hardware does not support;
* copies a tensor to the host, except for the few that the host reads once per step.
After all runs, every entry of the operator table must have been called.
"""

from __future__ import annotations

import collections
import inspect
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megapar.arguments import parse
from megapar.core.device import ascend
from megapar.core.device.accelerators import NpuDevice
from megapar.tools.tracing.pretend import pretend
from scripts.trace_table import counted, described, never_called, report
from tests.support.ascend import SCHEMAS

COMMON = "--data-path mock --device npu --num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 512"
COMMON += " --micro-batch-size 2 --seq-length 64 --train-iters 1 --eval-interval 0"
MOE = f"{COMMON} --num-query-groups 2 --num-experts 4 --moe-ffn-hidden-size 64 --first-k-dense 1"
SLICES = f"{MOE} --moe-model-type deepspeed_moe --moe-router-topk 2 --ep-degree 2 --ampipe-degree 2"
LATENT = "--multi-latent-attention --q-lora-rank 48 --kv-lora-rank 32 --qk-head-dim 24 --qk-pos-emb-head-dim 16"
LATENT_MOE = MOE.replace("--num-query-groups 2", f"{LATENT} --v-head-dim 24")
LATENT_MP = f"{LATENT_MOE} --mp-degree 2 --sequence-parallel --reset-attention-mask"
# (name, model, world size, flags)
RUNS = (
    ("ERNIE", "ernie", 1, COMMON),
    ("ERNIE, dropout, mp 2, sharding 2", "ernie", 4, f"{COMMON} --mp-degree 2 --sequence-parallel"),
    ("MoE decoder", "moe", 1, f"{MOE} --moe-model-type megatron_moe"),
    (
        "MoE decoder, norms of OLMo 2, mp 2",
        "moe",
        2,
        f"{MOE} --qk-norm --qk-norm-scope width --norm-placement output --mp-degree 2",
    ),
    ("MoE decoder, norms of queries and keys", "moe", 1, f"{MOE} --qk-norm"),
    ("MoE decoder, offloaded optimizer", "moe", 2, f"{MOE} --sharding-degree 2 --optimizer-offload"),
    ("MoE decoder, documents, fp16", "moe", 1, f"{MOE} --reset-attention-mask --reset-position-ids --fp16"),
    ("MoE decoder, ep 2, slices", "moe", 2, SLICES),
    ("MoE decoder, ep 4 by node, slices", "moe", 4, f"{SLICES} --ep-degree 4 --moe-dispatch node --ranks-per-node 2"),
    ("MoE decoder, slices of documents", "moe", 2, f"{SLICES} --reset-attention-mask"),
    ("MoE decoder, latent attention", "moe", 1, LATENT_MOE),
    ("MoE decoder, latent attention, documents, mp 2", "moe", 2, LATENT_MP),
    ("MoE decoder, ring cp 2, recompute", "moe", 2, f"{MOE} --cp-degree 2 --recompute-interval 1 --recompute-offload"),
    ("MoE decoder, zero-bubble pp 2", "moe", 2, f"{MOE} --pp-degree 2 --gradient-merge-acc-step 4 --use-nanopipe"),
)  # fmt: skip


class Watch(TorchDispatchMode):
    """Mode that checks every operator.

    Attributes:
        problems: Number of problems by description.
        host: Number of tensors copied to the host, by location.
        operators: Operators that ran on the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.problems: collections.Counter[str] = collections.Counter()
        self.host: collections.Counter[str] = collections.Counter()
        self.operators: set[str] = set()
        self._kernels: dict[Any, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Run the operator, then check its inputs and outputs."""
        result = func(*args, **(kwargs or {}))
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        if func.namespace == "prim" or not any(x.device.type == "npu" for x in (*given, *made)):
            return result
        name = str(func)
        self.operators.add(name)
        if any(x.device.type == "npu" and x.dtype == torch.float64 for x in (*given, *made)):
            self.problems[f"{name} in fp64 {_where()}"] += 1
        if "_to_copy" in name or "copy_" in name:
            if any(x.device.type == "npu" for x in given) and any(x.device.type == "cpu" for x in made):
                self.host[_where()] += 1
        elif any(x.device.type == "npu" for x in given) and "fallback" in self._kernel(func):
            self.problems[f"{name} has no kernel {_where()}"] += 1
        return result

    def _kernel(self, func: Any) -> str:
        """Return the line of the dispatcher's table for the device."""
        if func not in self._kernels:
            table = torch._C._dispatch_dump_table(f"{func._schema.name}.{func._schema.overload_name}".rstrip("."))
            lines = [line for line in table.splitlines() if line.startswith("PrivateUse1:")]
            self._kernels[func] = lines[0] if lines else "fallback: none registered"
        return self._kernels[func]


def _where() -> str:
    """Return the innermost line of megapar on the stack."""
    for frame in inspect.stack(0)[2:]:
        if f"{os.sep}megapar{os.sep}" in frame.filename:
            return f"at {frame.filename[frame.filename.rindex('megapar' + os.sep) :]}:{frame.lineno}"
    return "in the backward"


def schemas() -> Iterator[str]:
    """Yield the stand-ins of the tests whose schemas do not match the wheel's arguments and their order."""
    for name, text in SCHEMAS.items():
        real = [(a.name, str(a.type), a.kwarg_only) for a in getattr(torch.ops.npu, name).default._schema.arguments]
        parsed = torch._C.parse_schema(f"npu::{name}{text}")
        ours = [(a.name, str(a.type), a.kwarg_only) for a in parsed.arguments]
        by_position, really = ([a for a in arguments if not a[2]] for arguments in (ours, real))
        if [a for a in real if a in ours] != ours or by_position != really[: len(by_position)]:
            yield f"{name}: the stand-in of the tests has {ours}, torch_npu has {real}"


def profiler_lacks(device: NpuDevice) -> Iterator[str]:
    """Yield the methods of torch's profiler that ``--profile`` calls and the vendor's has not."""
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # a new one writes its settings where it is
        profiler = device.new_profiler()
        os.chdir(here)
    for method in ("start", "stop", "export_chrome_trace"):
        if not callable(getattr(profiler, method, None)):
            yield f"the vendor's profiler has no {method}"


def trace(model: str, world: int, flags: str, device: NpuDevice, calls: collections.Counter[str]) -> Watch:
    """Trace two steps of the last rank."""
    config = parse(model, flags.split(), {"WORLD_SIZE": str(world), "RANK": "0"})
    ascend.causal_mask.cache_clear()  # it holds a tensor of another fake mode
    watch = Watch()
    with counted(calls, "npu"), pretend(config, world - 1, watch, device, padded=False) as trainer:
        trainer.step()
        trainer.step()
    return watch


def main() -> int:
    """Trace all runs. Return 1 if there are problems."""
    dist.Backend.backend_capability["fake"].append("npu")  # missing in torch's list
    device = NpuDevice(0)
    problems, calls = [*schemas(), *profiler_lacks(device)], collections.Counter[str]()
    operators: set[str] = set()
    for name, model, world, flags in RUNS:
        start = time.perf_counter()
        try:
            watch = trace(model, world, flags, device, calls)
        except Exception as error:
            problems.append(f"{name}: {described(error)}")
            continue
        operators |= watch.operators
        problems += [f"{name}: {problem} ({times} times)" for problem, times in watch.problems.items()]
        to_host = ", ".join(f"{times} {where}" for where, times in watch.host.items()) or "nothing"
        print(
            f"trace_npu: {name}: {len(watch.operators)} operators, to the host {to_host}; "
            f"{time.perf_counter() - start:.1f} s"
        )
    problems += never_called(calls, "npu")
    native = sum("npu." in name for name in operators)
    return report("trace_npu", problems, f"{len(operators)} operators of device npu, {native} of them torch_npu's own")


if __name__ == "__main__":
    sys.exit(main())
