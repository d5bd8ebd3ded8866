"""Which way the collectives of linear layers take, from a configuration and a kind of device. No torch."""

from __future__ import annotations

from megapar.arguments import Config
from megapar.core.device.kinds import DeviceKind
from megapar.core.tensor_parallel.overlap_price import OFF, ON, CutLinear, Price
from megapar.model.sizes import ModelSizes
from megapar.training.building.segments import ITEM_BYTES


def hiding(config: Config, kind: DeviceKind, dtype: str, sizes: ModelSizes | None = None) -> str:
    """off, on or fused: what is asked for; of ``auto`` what is priced as faster in ``dtype`` on this kind.

    torch's fused operators are never chosen by themselves: no device has confirmed them.
    """
    asked = config.parallel.tp_comm_overlap
    if asked != "auto":
        return asked
    if kind.device_class.hides or dtype not in kind.flops:
        return ON if kind.device_class.hides else OFF
    mp = config.grid.mp
    sizes = sizes or config.model
    rows = config.training.micro_batch_size * sizes.seq_length // config.grid.cp
    price = Price(kind, dtype, ITEM_BYTES[dtype], mp, rows, config.parallel.sequence_parallel)
    return price.best(cut_linears(sizes, mp))


def cut_linears(sizes: ModelSizes, mp: int) -> tuple[CutLinear, ...]:
    """One rank's layers that are split over mp, of one block of each kind that the model has."""
    H, (queries, keys_values) = sizes.hidden_size, sizes.attention_widths
    gates = 2 if sizes.gated else 1
    found = []
    for width in sizes.mlp_widths:
        found += [CutLinear(True, H, (queries + keys_values) // mp), CutLinear(False, queries // mp, H)]
        if width:
            found += [CutLinear(True, H, gates * width // mp), CutLinear(False, width // mp, H)]
    return tuple(found)
