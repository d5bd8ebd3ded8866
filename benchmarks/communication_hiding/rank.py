"""One of the two ranks whose all-to-alls are hidden or not: forward and backward of one sample per turn.

Requests: a name of ``shape.WAYS``; ``alone WAY`` (the same computation, messages stay where they are); ``talk`` (the
serial step's all-to-alls, one after the other, and nothing else); ``draw WAY FILE`` (a step whose events are written).
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.communication_hiding.shape import WAYS, make_sizes
from benchmarks.support.contest import Figures, serve
from megapar.core import transport
from megapar.core.axis import Axis
from megapar.core.device.base import Device
from megapar.core.device.pick import pick
from megapar.core.meter import WaitMeter
from megapar.core.tickets import AllToAll, Exchange, Flight, Traffic, start, wait
from megapar.model.decoder import Decoder


class Diary(Traffic):
    """Notes when collectives were launched, and between which times the host waited for them."""

    def __init__(self, meter: WaitMeter, device: Device) -> None:
        super().__init__(meter, device)
        self.events: list[dict[str, object]] | None = None
        self._launched: dict[int, float] = {}

    def launch(self, exchange: Exchange, x: Tensor, aside: bool = False) -> Flight:
        """As it is, with the time."""
        now = time.perf_counter()
        flight = super().launch(exchange, x, aside)
        self._launched[id(flight)] = now
        return flight

    def land(self, flight: Flight, metered: bool = True) -> Tensor:
        """As it is, with the times before and behind."""
        before = time.perf_counter()
        output = super().land(flight, metered)
        begun = self._launched.pop(id(flight))
        if self.events is not None and flight.work is not None:
            times = {"launch": begun, "wait": before, "there": time.perf_counter()}
            self.events.append({"lane": flight.exchange.axis.name, "name": flight.exchange.kind, **times})
        return output

    def watch(self, owner: nn.Module, method: str, name: str) -> None:
        """Note the calls of a method, and what lies between the gradients of its result and of its first input."""
        call = getattr(owner, method)

        def noted(x: Tensor, *more: Any) -> Any:
            begun = time.perf_counter()
            y = call(x, *more)
            self._note(name, begun)
            if isinstance(y, Tensor) and y.requires_grad and x.requires_grad:
                starts: list[float] = []
                y.register_hook(lambda _: starts.append(time.perf_counter()))
                x.register_hook(lambda _: self._note(f"{name} backward", starts.pop()) if starts else None)
            return y

        setattr(owner, method, noted)

    def _note(self, name: str, begun: float) -> None:
        if self.events is not None:
            self.events.append({"lane": "compute", "name": name, "launch": begun, "there": time.perf_counter()})


class Steps:
    """The model in every way of slicing, with one set of weights."""

    def __init__(self, rank: int, device: str) -> None:
        self.device = pick(device, rank)
        sizes, torch_device = make_sizes(device), self.device.torch_device
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        ep, single = Axis("ep", 2, rank, dist.group.WORLD, (0, 1)), Axis.single("mp")
        self.ep, self.diary = ep, Diary(WaitMeter(self.device.timed_event()), self.device)
        self.models: dict[str, Decoder] = {}
        for name, slicing in WAYS.items():
            model = Decoder(
                sizes,
                mp=single,
                ep=ep,
                emp=single,
                traffic=self.diary,
                slicing=slicing,
                dtype=dtype,
                device=torch_device if not self.models else "meta",
            )
            if self.models:
                model.load_state_dict(self.models["serial"].state_dict(keep_vars=True), assign=True)
            else:
                for parameter in model.parameters():
                    nn.init.normal_(parameter.data, std=0.02)
                for bias in model.correction_biases():
                    bias.zero_()
            for block in model.layers.values():
                self.diary.watch(block.attention.proj, "forward", "attention")
                self.diary.watch(block.moe.experts, "compute", "experts")  # type: ignore[union-attr,arg-type]
            self.models[name] = model
        generator = torch.Generator().manual_seed(rank)
        positions = torch.arange(sizes.seq_length).unsqueeze(0)
        tokens = torch.randint(sizes.vocab_size, positions.shape, generator=generator)
        batch = {"tokens": tokens, "labels": tokens, "positions": positions}
        self.batch = {name: tensor.to(torch_device) for name, tensor in batch.items()}
        pairs = sizes.seq_length * 2
        self.messages = [
            torch.zeros(pairs, sizes.hidden_size + extra, dtype=dtype, device=torch_device) for extra in (1, 0)
        ]

    def __call__(self, request: str) -> Figures:
        """Seconds of a step, and of it the seconds that were spent waiting."""
        kind, _, rest = request.partition(" ")
        if request == "talk":
            return self._timed(self._talk)
        if kind == "alone":
            with patch.object(transport, "all_to_all", _stay):
                return self._timed(lambda: self._step(rest))
        if kind == "draw":
            way, _, path = rest.rpartition(" ")
            self.diary.events = []
            figures = self._timed(lambda: self._step(way))
            if self.ep.rank == 0:
                Path(path).write_text(json.dumps({"began": self.began, "events": self.diary.events}))
            self.diary.events = None
            return figures
        return self._timed(lambda: self._step(request))

    def _step(self, way: str) -> None:
        model = self.models[way]
        model.zero_grad()
        sum(model(self.batch).sums.values()).backward()  # type: ignore[union-attr]
        self.diary.check_settled()

    def _talk(self) -> None:
        for _ in range(2 * make_sizes(self.device.type).num_layers):
            for message in self.messages:
                wait(*start(AllToAll(self.ep), message, self.diary))

    def _timed(self, work: object) -> Figures:
        dist.barrier()
        self.device.synchronize()
        self.diary.meter.take()
        self.began = time.perf_counter()
        work()  # type: ignore[operator]
        self.device.synchronize()
        seconds = time.perf_counter() - self.began
        return {"seconds": seconds, "exposed": sum(self.diary.meter.take().seconds().values())}


def _stay(
    received: Tensor,
    sent: Tensor,
    axis: Axis,
    receive: Sequence[int] | None = None,
    send: Sequence[int] | None = None,
    *,
    async_op: bool = False,
) -> None:
    """An all-to-all whose rows stay here: as many arrive as leave, because counts stay as well."""
    received.copy_(sent)


def main() -> None:
    """Join the other rank and serve turns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int)
    parser.add_argument("--rendezvous")
    parser.add_argument("--device")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    if options.device == "cuda":
        torch.cuda.set_device(options.rank)
    backend = "cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=options.rendezvous, rank=options.rank, world_size=2)
    serve(Steps(options.rank, options.device))


if __name__ == "__main__":
    main()
