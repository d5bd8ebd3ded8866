"""One of the ranks that share a sequence, or the one process that has it whole: attention forward and backward.

Requests: an algorithm of ``--context-parallel-algo``, or "in_order" (the ring without its zig-zag), by itself or
followed by a space and ``alone`` (the same computation, with messages that arrive immediately without their data) or
``waiting`` (every message is waited for where it is launched). "whole": torch's attention of the whole sequence.
"window" and "window_all": attention in a window of ``WINDOW`` keys, of which ranks fetch those that their rows see, or
all.
"""

from __future__ import annotations

import argparse
import time
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.testing._internal.distributed import fake_pg  # noqa: F401 (makes the backend "fake" known)

from benchmarks.support.contest import Figures, serve
from benchmarks.support.synchronize import synchronize
from megapar.core.attention_mask import AttentionMask
from megapar.core.comm.axis import Axis
from megapar.core.comm.exchange import Exchange
from megapar.core.comm.in_flight import CommContext, InFlight
from megapar.core.context_parallel.blockwise import attend_blockwise
from megapar.core.context_parallel.heads import to_heads, to_positions
from megapar.core.context_parallel.method import ContextParallel
from megapar.core.context_parallel.positions import GATHERED, RING, SequenceLayout, choose_layout
from megapar.core.device.attention.mask import DeviceMask
from megapar.core.device.ops import op

HEADS, GROUPS, SIZE = 8, 4, 64
WINDOW = 128


class WaitingTraffic(CommContext):
    """Context of communication that waits for each message where it is launched, so that nothing is hidden."""

    def launch(self, exchange: Exchange, x: Tensor, aside: bool = False, owned: bool = False) -> InFlight:
        """Launch, and wait at once."""
        flight = super().launch(exchange, x, aside, owned)
        if flight.work is not None:
            self.meter.wait(flight.work, flight.kind)
        return flight


class Attention:
    """One layer's attention to one sequence, shared by ``ranks`` ranks."""

    def __init__(self, rank: int, ranks: int, length: int, device: torch.device) -> None:
        self.rank, self.ranks, self.length, self.device = rank, ranks, length, device
        self.groups = {"link": dist.group.WORLD, "alone": None}
        if ranks > 1:
            self.groups["alone"] = dist.new_group(list(range(ranks)), backend="fake")
        generator = torch.Generator().manual_seed(0)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        heads = (HEADS, GROUPS, GROUPS)
        self.qkv = [torch.randn(1, length, n, SIZE, generator=generator).to(device, dtype) for n in heads]

    def __call__(self, request: str) -> Figures:
        """Return the seconds of a forward and backward, and the seconds of them spent waiting for messages."""
        algorithm, _, way = request.partition(" ")
        comm = WaitingTraffic() if way == "waiting" else CommContext()
        if algorithm == "whole":
            own = [x.detach().requires_grad_() for x in self.qkv]
        else:
            group = self.groups["alone" if way == "alone" else "link"]
            axis = Axis("cp", self.ranks, self.rank, group, tuple(range(self.ranks)))
            name = {"in_order": RING, "window": GATHERED, "window_all": GATHERED}.get(algorithm, algorithm)
            layout = choose_layout(name, self.ranks, causal=True, length=self.length)
            layout = SequenceLayout(self.ranks) if algorithm == "in_order" else layout
            method = ContextParallel(axis, name, layout, comm)
            places = torch.tensor(layout.positions(self.length, self.rank), device=self.device)
            own = [x[:, places].requires_grad_() for x in self.qkv]
        if self.ranks > 1:
            dist.barrier()
        synchronize(self.device)
        start = time.perf_counter()
        if algorithm.startswith("window"):
            y = _windowed(method, *own, fetched=self.length - 1 if algorithm == "window_all" else WINDOW)
        else:
            y = _whole(*own) if algorithm == "whole" else _shared(method, *own)
        y.backward(torch.ones_like(y))
        synchronize(self.device)
        return {"seconds": time.perf_counter() - start, "waited": sum(comm.meter.take().seconds().values())}


def _whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the result of attention on one rank. q, k, v: [1, S, heads, D]."""
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    return F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(1, 2)


def _shared(method: ContextParallel, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return this rank's part of the result of attention. q, k, v: [1, S / cp, heads, D]."""
    if method.deals_heads:
        y = _whole(*to_heads(q, k, v, method.axis, method.comm))
        return to_positions(y, method.axis, method.comm)
    plan = method.plan(AttentionMask.of(1, q.shape[1] * method.axis.size, causal=True))
    assert plan is not None
    heads = (x.transpose(1, 2) for x in (q, k, v))
    return attend_blockwise(*heads, method.transport, plan, flash=True).transpose(1, 2)


def _windowed(method: ContextParallel, q: Tensor, k: Tensor, v: Tensor, fetched: int) -> Tensor:
    """Return ``_shared`` in a window, after the keys of a window of ``fetched`` were exchanged."""
    mask = AttentionMask.of(1, q.shape[1] * method.axis.size, causal=True)
    (halo,) = method.halos(mask.within(fetched))
    columns = method.window_keys.fetch(k, v, halo)
    q, k, v = (x.transpose(1, 2) for x in (q, *columns))
    window, parts = DeviceMask.of(mask.within(WINDOW), q.device), []
    for run, own, keys in zip(halo.runs, halo.queries, halo.rows, strict=True):
        seen = slice(keys.stop - min(run.stop, len(run) + WINDOW - 1), keys.stop)
        cut = window.cut(slice(run.start, run.stop), q.device)
        parts.append(op("packed_attention_slice", q)(q[:, :, own], k[:, :, seen], v[:, :, seen], documents=cut))
    return torch.cat(parts, dim=2).transpose(1, 2)


def main() -> None:
    """Join the others and serve turns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--length", type=int)
    parser.add_argument("--rendezvous")
    parser.add_argument("--device")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    device = torch.device(options.device, options.rank) if options.device == "cuda" else torch.device("cpu")
    if options.ranks > 1:
        backend = "nccl" if options.device == "cuda" else "gloo"
        dist.init_process_group(backend, options.rendezvous, rank=options.rank, world_size=options.ranks)
    serve(Attention(options.rank, options.ranks, options.length, device))


if __name__ == "__main__":
    main()
