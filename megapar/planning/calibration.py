"""Calibrations: shares of their data sheets that devices reach, and costs that a software adds to operators.

Devices, models and layouts share one calibration. A prediction names its software: ``megapar``, with the kernels and
bytes of this package's budgets (``scripts/trace_cuda_budgets.py``), or ``megatron``, with those of Megatron-LM and its
fused kernels, by which published runs are predicted. They differ in the costs of operators alone.

The numbers are in ``calibration.yaml``, which ``benchmarks/prediction/fit.py`` writes. Those of ``megatron`` and the
shares of devices are fitted to published runs. ``scores``, ``memory`` and ``grouped`` of ``megapar`` were measured on
one H200 (``benchmarks/throughput/results/2026-11-26-h200-day.jsonl``), inside steps: attention at 420 to 434 TFLOP/s if
causal, about 525 otherwise; grouped products at 665 against 733 of others, 0.91 of their rate, of which ``small``
explains 0.96. Its other costs are counts of the budgets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

TABLE = Path(__file__).with_suffix(".yaml")
MEGAPAR, MEGATRON = "megapar", "megatron"
NAMES = (MEGAPAR, MEGATRON)


@dataclass(frozen=True)
class Software:
    """Costs of a software's operators beyond the products, scores and bytes of their mathematics.

    Attributes:
        name: ``megapar`` or ``megatron``.
        scores: Share of peak FLOP/s of attention's core.
        memory: Share of the memory bandwidth of kernels that no product bounds.
        bytes: Factor of the bytes that memory-bound kernels of an operator move, by operator; 1 for others.
        grouped: Rate of grouped products, relative to a single one.
        launches: Launches of an operator's forward and of its backward; 1 and 2 for others.
        wait: Launches that the host is late after it waited for the rows per expert, once per layer without a capacity.
        launches_per_expert: Launches of a grouped product per group, beyond those; 0 for one kernel of all groups.
        fp8_launches_per_expert: Those of a grouped product in fp8, with its casts.
        cast: Bytes that a product in fp8 moves per element of its input, to cast it for both directions.
        launch: Time of a launch, relative to that of the class of device.
        expert_bias: Bytes that biased experts move per element of their outputs, beyond those of the operators.
        casts_groups: Grouped products in fp8 cast their inputs, too.
    """

    name: str
    scores: float
    memory: float
    bytes: Mapping[str, float]
    grouped: float
    launches: Mapping[str, tuple[float, float]]
    wait: float
    launches_per_expert: float
    fp8_launches_per_expert: float
    cast: float
    launch: float
    expert_bias: float
    casts_groups: bool = True


@dataclass(frozen=True)
class Calibration:
    """Shares of the data sheets' figures that devices reach, and the software's costs.

    Attributes:
        product: Share of peak FLOP/s of a large matrix product.
        small: Smallest dim at which a matrix product reaches half of that.
        fp8: Share of peak fp8 FLOP/s of a matrix product, without the casts of its inputs.
        inside: Share of the bandwidth inside a node.
        between: Share of the bandwidth between nodes.
        shown: Share of a collective that even a long enough matrix product does not hide.
        jitter: Share of the time lost to stragglers for each doubling of the ranks.
        clocks: Shares of its peak that a kind of device keeps under load, relative to an H100, in its compute dtype and
            in fp8; 1 for other kinds.
        software: The software's costs.
    """

    product: float
    small: float
    fp8: float
    inside: float
    between: float
    shown: float
    jitter: float
    clocks: Mapping[str, tuple[float, float]]
    software: Software


# Kinds of device with a published run that plans are compared with (benchmarks/prediction): the shares are theirs.
COMPARED = frozenset(("h100-80g", "h200-141g", "h800-80g", "b200-180g", "b300-288g", "gb200-186g", "gb300-288g"))


@cache
def calibrations() -> Mapping[str, Calibration]:
    """Return the calibration of each software."""
    import yaml

    numbers = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    shares, clocks = numbers["shares"], {name: (wide, narrow) for name, (wide, narrow) in numbers["clocks"].items()}
    found = {name: Software(name, **costs) for name, costs in numbers["software"].items()}
    made = {name: Calibration(**shares, clocks=clocks, software=software) for name, software in found.items()}
    return MappingProxyType(made)
