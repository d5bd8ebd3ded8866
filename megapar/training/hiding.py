"""Which way the collectives of linear layers take, from a configuration and a kind of device. No torch."""

from __future__ import annotations

from megapar.arguments import Config
from megapar.core.device.kinds import DeviceKind
from megapar.core.hiding import OFF, ON, CutLinear, Price
from megapar.model.decoder.sizes import DecoderSizes
from megapar.training.sizes import ITEM_BYTES, Sizes, make_sizes


def hiding(config: Config, kind: DeviceKind, dtype: str, sizes: Sizes | None = None) -> str:
    """off, on or fused: what is asked for; of ``auto`` what is priced as faster in ``dtype`` on this kind.

    torch's fused operators are never chosen by themselves: no device has confirmed them.
    """
    asked = config.parallel.tp_comm_overlap
    if asked != "auto":
        return asked
    if kind.of.hides or dtype not in kind.flops:
        return ON if kind.of.hides else OFF
    mp = config.grid.mp
    sizes = sizes or make_sizes(config)
    rows = config.training.micro_batch_size * sizes.seq_length // config.grid.cp
    price = Price(kind, dtype, ITEM_BYTES[dtype], mp, rows, config.parallel.sequence_parallel)
    return price.best(cut_linears(sizes, mp))


def cut_linears(sizes: Sizes, mp: int) -> tuple[CutLinear, ...]:
    """One rank's layers that are cut over mp, of one of each of the model's blocks."""
    H = sizes.hidden_size
    if isinstance(sizes, DecoderSizes):
        widths = sizes.num_attention_heads * sizes.head_dim, 2 * sizes.num_query_groups * sizes.head_dim
        moes = {sizes.moe_at(layer) for layer in range(sizes.num_layers)}
        inner = [sizes.ffn_hidden_size if moe is None else moe.shared_width for moe in moes]
        gates = 2 if sizes.activation == "swiglu" else 1
    else:
        widths, inner, gates = (H, 2 * H), [sizes.ffn_hidden_size], 1
    found = []
    for width in inner:
        found += [CutLinear(True, H, sum(widths) // mp), CutLinear(False, widths[0] // mp, H)]
        if width:
            found += [CutLinear(True, H, gates * width // mp), CutLinear(False, width // mp, H)]
    return tuple(found)
