"""The choice of the overlap of linear layers' collectives, from a configuration and a device. Does not import torch."""

from __future__ import annotations

from megapar.arguments import Config
from megapar.core.device.kinds import DeviceKind
from megapar.core.tensor_parallel.overlap_price import OFF, ON, CutLinear, Price
from megapar.model.attention.kinds import kind_of
from megapar.model.sizes import ModelSizes
from megapar.training.building.segments import ITEM_BYTES


def hiding(config: Config, kind: DeviceKind, dtype: str, sizes: ModelSizes | None = None) -> str:
    """Return off, on or fused: the requested overlap, or for ``auto`` the faster one in ``dtype`` by estimate.

    ``auto`` never chooses torch's fused operators, because they are not confirmed to be faster on any device.
    It is on where a class of devices is measured to gain (a CPU), and off without a speed for ``dtype``.
    """
    requested = config.parallel.tp_comm_overlap
    if requested != "auto":
        return requested
    if kind.device_class.hides or dtype not in kind.flops:
        return ON if kind.device_class.hides else OFF
    mp = config.grid.mp
    sizes = sizes or config.model
    rows = config.training.micro_batch_size * sizes.seq_length // config.grid.cp
    price = Price(kind, dtype, ITEM_BYTES[dtype], mp, rows, config.parallel.sequence_parallel)
    return price.best(cut_linears(sizes, mp))


def cut_linears(sizes: ModelSizes, mp: int) -> tuple[CutLinear, ...]:
    """Return a rank's column and row parallel layers, for one block of each kind in the model."""
    H, (made, taken) = sizes.hidden_size, kind_of(sizes.attention).widths(sizes.attention)
    gates = 2 if sizes.gated else 1
    linears = []
    for width in sizes.mlp_widths:
        linears += [CutLinear(True, H, made // mp), CutLinear(False, taken // mp, H)]
        if width:
            linears += [CutLinear(True, H, gates * width // mp), CutLinear(False, width // mp, H)]
    return tuple(linears)
