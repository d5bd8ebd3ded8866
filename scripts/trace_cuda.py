"""Trace for ``scripts/trace_cuda.sh``: training steps as one rank with GPUs, on fake tensors, checking every operator.

A run fails if
* an operator on a tensor of the device has no CUDA kernel according to torch's list, or runs in fp64 without a row in
  ``FP64``;
* the host waits for the device, or data are copied between them, without a row in the budgets;
* a message of more than 64 KiB for a peer has a part that is not aligned to 16 bytes;
* a figure exceeds its budget (``trace_cuda_budgets.py``).
After all runs, every GPU entry of the operator table must have been called.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.testing._internal.distributed.fake_pg  # registers the backend
from torch import Tensor
from torch.utils._pytree import tree_leaves

from megapar.arguments import parse
from megapar.core.device.compiled import plain
from megapar.tools.tracing.pretend import pretend
from scripts.fake_cuda import Kernels, as_a_build_with_cuda, stand_in
from scripts.lowered_functions import LoweredFunctions
from scripts.trace_cuda_budgets import BUDGETS, COPIES, FP64, LAYERS, RUNS, WAITS, Row, Run
from scripts.trace_table import counted, described, never_called, report
from scripts.tracing.gpu import FakeGpu, as_on_a_gpu
from scripts.tracing.tally import Sums, Tally, WaitTally, caller

READ = "Dispatcher.read"
LIST = "--operators"


class Watch(Tally):
    """Tally that also detects operators that the device cannot run; ``problems`` counts them by description."""

    def __init__(self, kernels: Kernels, device: FakeGpu) -> None:
        super().__init__("cuda", device.locked)
        self.problems: Counter[str] = Counter()
        self.operators: set[str] = set()
        self._kernels = kernels

    def clear(self) -> None:
        """Forget the counts."""
        self.sums = Sums()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Run the operator, then check its inputs and outputs."""
        result = super().__torch_dispatch__(func, types, args, kwargs)
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor) and x.device.type == "cuda"]
        if tensors and func.namespace != "prim":
            name = str(func)
            self.operators.add(name)
            if self._kernels.lacks(func):
                self.problems[f"{name} has no kernel on CUDA, in {caller()}"] += 1
            if any(x.dtype == torch.float64 for x in tensors) and caller() not in FP64:
                self.problems[f"{name} in fp64 in {caller()}"] += 1
        return result


class Tracer:
    """Traces runs on one device.

    Args:
        listed: Layers print the kernels and bytes of every operator.

    Attributes:
        calls: Calls per entry of the operator table.
        operators: Operators that ran on the device.
    """

    def __init__(self, *, listed: bool = False) -> None:
        self._listed = listed
        self.calls: Counter[str] = Counter()
        self.operators: set[str] = set()
        self._kernels = Kernels()
        self._device = FakeGpu(torch.device("cuda", 0))

    def trace(self, run: Run, more: str = "", kind: type[Watch] = Watch) -> Watch:
        """Trace the second step of the last rank, because the first one allocates buffers.

        Args:
            run: Run to trace.
            more: Additional flags.
            kind: Class of the watch that is returned.
        """
        config = parse(run.model, [*run.flags.split(), *more.split()], {"WORLD_SIZE": str(run.world), "RANK": "0"})
        watch = kind(self._kernels, self._device)
        with ExitStack() as stack:
            for context in (
                as_a_build_with_cuda(self._kernels),
                as_on_a_gpu(self._device),
                counted(self.calls, "cuda"),
            ):
                stack.enter_context(context)
            compiled = config.training.compile == "on"
            runner = LoweredFunctions(watch, self._device) if compiled else plain
            made = pretend(config, run.world - 1, watch, self._device, WaitTally(watch), run=runner, padded=False)
            trainer = stack.enter_context(made)
            trainer.step()
            watch.clear()
            trainer.step()
        self.operators |= watch.operators
        return watch

    def run(self, run: Run) -> tuple[str, list[str]]:
        """Return (summary of a run, its problems)."""
        watch = self.trace(run)
        wrong = [*complaints(run, watch.sums), *(f"{what} ({times} times)" for what, times in watch.problems.items())]
        waits, copies = watch.sums.waits.total(), watch.sums.copies.total()
        return f"{watch.sums.launches} kernels, {waits} waits of the host, {copies} copies", wrong

    def layer(self, run: Run) -> tuple[str, list[str]]:
        """Return (figures of a layer next to its budgets, the figures that exceed them)."""
        one, two = (self.trace(run, f"--num-layers {layers}").sums for layers in (1, 2))
        layer = two.without(one)
        beside = one.without(layer)
        lines, wrong = [], []
        for row in BUDGETS:
            sums = {run.name: layer, f"{run.name}, beside": beside}.get(row.layer)
            if sums is not None:
                text, ok = compare(row, sums)
                lines.append(text)
                wrong += [] if ok else [text]
        wrong += [f"{what}: a part is not aligned to 16 bytes ({times} times)" for what, times in two.unaligned.items()]
        if self._listed:
            lines += [*listed(run.name, layer), *listed(f"{run.name}, beside", beside)]
        return "\n  ".join(["layer", *lines]), wrong


def listed(name: str, sums: Sums) -> Iterator[str]:
    """Yield the kernels and bytes of every operator and caller, most kernels first."""
    yield f"{name}: {sums.launches} kernels, {sums.bytes_outside_products / 1e6:,.0f} megabytes outside products"
    for (operator, label), kernels in sums.kernels.most_common():
        yield f"{kernels:6d} kernels {sums.bytes[operator, label] / 1e6:9,.1f} MB  {operator}  in {label}"


def figure(row: Row, sums: Sums) -> float:
    """Return the figure of these sums that the row bounds."""

    def fits(operator: str, label: str) -> bool:
        return fnmatchcase(operator, row.operator) and fnmatchcase(label, row.label)

    if row.figure == "kernels":
        return sum(count for key, count in sums.kernels.items() if fits(*key))
    if row.figure == "megabytes":
        return sum(count for key, count in sums.bytes.items() if fits(*key)) / 1e6
    if row.figure == "waits":
        return sum(count for label, count in sums.waits.items() if fits("", label))
    products = [(product.rows, count) for (product, label), count in sums.products.items() if fits("", label)]
    if row.figure == "products":
        return sum(count for _, count in products)
    assert row.figure == "rows", row.figure
    return min((rows for rows, _ in products), default=row.bound)


def compare(row: Row, sums: Sums) -> tuple[str, bool]:
    """Return (figure next to its budget, True if it is within the budget)."""
    found = figure(row, sums)
    ok = found >= row.bound if row.figure == "rows" else found <= row.bound
    what = " ".join(name for name in (row.operator, row.label) if name != "*")
    limit = "at least" if row.figure == "rows" else "at most"
    text = (
        f"{row.layer}: {what + ': ' if what else ''}{found:,.0f} {row.figure}, {limit} {row.bound:,.0f} ({row.reason})"
    )
    return text + ("" if ok else " EXCEEDED"), ok


def complaints(run: Run, sums: Sums) -> Iterator[str]:
    """Yield the waits, copies and messages of a run that no row allows."""
    for label, times in sums.waits.items():
        allowed = run.counts if label == READ else WAITS.get(label, (0, ""))[0]
        if times > allowed:
            yield f"the host waits {times} times in {label}, {allowed} allowed"
    for (way, label), times in sums.copies.items():
        if label not in COPIES:
            yield f"{times} copies {way} in {label}, which no row allows"
    for message, times in sums.unaligned.items():
        yield f"{message}: a part is not aligned to 16 bytes ({times} times)"


def main(argv: Sequence[str]) -> int:
    """Trace the runs whose names start with one of the arguments, by default all. Return 1 if there are problems."""
    stand_in()
    names = [name for name in argv if name != LIST]
    tracer, problems = Tracer(listed=len(names) < len(argv)), []
    for kind, runs in (("", RUNS), ("layer: ", LAYERS)):
        for run in runs:
            name, start = kind + run.name, time.perf_counter()
            if names and not any(name.startswith(prefix) for prefix in names):
                continue
            try:
                summary, wrong = (tracer.layer if kind else tracer.run)(run)
            except Exception as error:
                summary, wrong = "stopped", [described(error)]
            problems += [f"{name}: {what}" for what in wrong]
            print(f"trace_cuda: {name}: {summary}; {time.perf_counter() - start:.1f} s", flush=True)
    if not names:
        problems += never_called(tracer.calls, "cuda")
    return report("trace_cuda", problems, f"{len(tracer.operators)} operators of device cuda")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
