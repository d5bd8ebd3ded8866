"""One of the two ranks whose mp communication is hidden or not: forward and backward of one sample per turn.

Requests: ``blocking`` (the same collectives, waited for at once), ``whole`` and ``pieces`` (under the products, uncut
or cut), ``alone`` (the same computation, and collectives that return at once without their data).
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401 (makes the backend "fake" known)

from benchmarks.support.contest import Figures, serve
from benchmarks.support.pair import join
from benchmarks.support.synchronize import synchronize
from benchmarks.tensor_parallel.shape import SHAPES
from megapar.core.comm.axis import Axis
from megapar.core.comm.in_flight import CommContext
from megapar.core.tensor_parallel.layers import ColumnLinear, RowLinear
from megapar.core.tensor_parallel.overlapped_linear import Overlap
from megapar.model.decoder.model import Decoder
from megapar.model.decoder.sizes import DecoderSizes

BLOCKING = Overlap(pieces=1, blocking=True)
WAYS = {"blocking": BLOCKING, "whole": Overlap(pieces=1), "pieces": Overlap(), "alone": BLOCKING}


class Steps:
    """The model over the link, and the same model over an axis without communication."""

    def __init__(self, rank: int, device: str) -> None:
        self.device = torch.device(device, rank) if device == "cuda" else torch.device(device)
        shape, dtype = SHAPES[device], torch.bfloat16 if device == "cuda" else torch.float32
        sizes = DecoderSizes(**vars(shape), max_position_embeddings=shape.seq_length, tie_embeddings=False)
        generator = torch.Generator().manual_seed(rank)
        self.models = {}
        for name, group in (("link", dist.group.WORLD), ("alone", dist.new_group([0, 1], backend="fake"))):
            single = Axis.single("ep")
            mp = Axis("mp", 2, rank, group, (0, 1))
            model = Decoder(sizes, mp=mp, ep=single, emp=single, sequence_parallel=True, dtype=dtype, device=device)
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter.data, std=0.02)
            self.models[name] = model
        positions = torch.arange(shape.seq_length).unsqueeze(0)
        tokens = torch.randint(shape.vocab_size, positions.shape, generator=generator)
        batch = {"tokens": tokens, "labels": tokens, "positions": positions}
        self.batch = {name: tensor.to(self.device) for name, tensor in batch.items()}

    def __call__(self, way: str) -> Figures:
        """Return the seconds of a step, and the seconds of it that the host waited for messages under products."""
        model, comm = self.models["alone" if way == "alone" else "link"], CommContext()
        for module in model.modules():
            if isinstance(module, ColumnLinear | RowLinear):
                module.overlap, module.comm = WAYS[way], comm
        model.zero_grad()
        dist.barrier()
        synchronize(self.device)
        start = time.perf_counter()
        sum(model(self.batch).sums.values()).backward()
        synchronize(self.device)
        return {"seconds": time.perf_counter() - start, "waited": sum(comm.meter.take().seconds().values())}


def main() -> None:
    """Join the other rank and serve turns."""
    torch.set_flush_denormal(True)  # what never arrived over the fake axis may hold slow numbers
    serve(Steps(*join()))


if __name__ == "__main__":
    main()
