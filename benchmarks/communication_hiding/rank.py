"""One of the two ranks whose all-to-alls are hidden or not: forward and backward of one sample per turn.

A request is a name of ``shape.WAYS``.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.communication_hiding.shape import WAYS, make_sizes
from benchmarks.support.contest import Figures, serve
from benchmarks.support.pair import join
from megapar.core.comm.axis import Axis
from megapar.core.comm.in_flight import CommContext
from megapar.core.comm.meter import WaitMeter
from megapar.core.device.pick import pick
from megapar.core.tensor_parallel.execution import Execution
from megapar.model.decoder.model import Decoder


class Steps:
    """The model with every way of slicing, on one set of weights."""

    def __init__(self, rank: int, device: str) -> None:
        self._device, self._sizes = pick(device, rank), make_sizes(device)
        self._ep = Axis("ep", 2, rank, dist.group.WORLD, (0, 1))
        self._comm = CommContext(WaitMeter(self._device.timed_event()), self._device)
        self._models: dict[str, Decoder] = {}
        for way in WAYS:
            self._models[way] = self._model(way, self._models.get("serial"))
        self._batch = self._make_batch(rank)

    def __call__(self, way: str) -> Figures:
        """Return the seconds of a step, and those of it that the host waited for all-to-alls."""
        model = self._models[way]
        dist.barrier()
        self._device.synchronize()
        self._comm.meter.take()
        began = time.perf_counter()
        model.zero_grad()
        sum(model(self._batch).sums.values()).backward()
        self._comm.check_settled()
        self._device.synchronize()
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "exposed": sum(self._comm.meter.take().seconds().values())}

    def _make_batch(self, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        positions = torch.arange(self._sizes.seq_length).unsqueeze(0)
        tokens = torch.randint(self._sizes.vocab_size, positions.shape, generator=generator)
        batch = {"tokens": tokens, "labels": tokens, "positions": positions}
        return {name: tensor.to(self._device.torch_device) for name, tensor in batch.items()}

    def _model(self, way: str, weights: Decoder | None) -> Decoder:
        """Return the model with one way of slicing, and the weights of another one; None initializes new ones."""
        model = Decoder(
            self._sizes,
            mp=Axis.single("mp"),
            ep=self._ep,
            emp=Axis.single("emp"),
            execution=Execution(comm=self._comm),
            slicing=WAYS[way],
            dtype=torch.bfloat16 if self._device.type == "cuda" else torch.float32,
            device="meta" if weights is not None else self._device.torch_device,
        )
        if weights is not None:
            model.load_state_dict(weights.state_dict(keep_vars=True), assign=True)
            return model
        for parameter in model.parameters():
            nn.init.normal_(parameter.data, std=0.02)
        for bias in model.correction_biases():
            bias.zero_()
        return model


def main() -> None:
    """Join the other rank and serve turns."""
    serve(Steps(*join()))


if __name__ == "__main__":
    main()
