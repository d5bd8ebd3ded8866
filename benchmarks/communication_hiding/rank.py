"""One of the two ranks whose all-to-alls are hidden or not: forward and backward of one sample per turn.

Requests: a name of ``shape.WAYS``; ``auto`` (the degree that ``--ampipe-degree auto`` chooses, at its first turn);
``alone WAY`` (the same computation, messages stay where they are); ``talk`` (the serial step's all-to-alls, one after
the other, and nothing else); ``memory WAY`` (the most bytes that a step holds in addition to the weights); ``draw WAY
FILE`` (a step whose events are written to the file; ``draw mp WAY FILE``: one whose ranks also share attention).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.communication_hiding.shape import AUTO, WAYS, make_sizes
from benchmarks.support.contest import Figures, serve
from benchmarks.support.pair import join
from megapar.core.comm import collectives
from megapar.core.comm.async_pairs import start, wait
from megapar.core.comm.axis import Axis
from megapar.core.comm.exchange import AllToAll, Exchange
from megapar.core.comm.in_flight import CommContext, InFlight
from megapar.core.comm.meter import WaitMeter
from megapar.core.device.base import Device
from megapar.core.device.memory_tracker import MemoryTracker
from megapar.core.device.pick import pick
from megapar.core.tensor_parallel.execution import Execution
from megapar.model.decoder.model import Decoder
from megapar.training.building import ampipe_degree as degree


class Diary(CommContext):
    """Context of communication that records when collectives were launched, and when the host waited for them."""

    def __init__(self, meter: WaitMeter, device: Device) -> None:
        super().__init__(meter, device)
        self.events: list[dict[str, object]] | None = None
        self._launched: dict[int, float] = {}

    def launch(self, exchange: Exchange, x: Tensor, aside: bool = False, owned: bool = False) -> InFlight:
        """Launch as the base class does, and record the time."""
        now = time.perf_counter()
        flight = super().launch(exchange, x, aside, owned)
        self._launched[id(flight)] = now
        return flight

    def wait(self, flight: InFlight, metered: bool = True) -> Tensor:
        """Wait as the base class does, and record the times before and after."""
        before = time.perf_counter()
        output = super().wait(flight, metered)
        begun = self._launched.pop(id(flight))
        if self.events is not None and flight.work is not None:
            times = {"launch": begun, "wait": before, "there": time.perf_counter()}
            self.events.append({"lane": flight.exchange.axis.name, "name": flight.exchange.kind, **times})
        return output

    def watch(self, owner: nn.Module, method: str, name: str) -> None:
        """Record the calls of a method, and the time between the gradients of its result and of its first input."""
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
    """The model with every way of slicing, on one set of weights."""

    def __init__(self, rank: int, device: str) -> None:
        self.device = pick(device, rank)
        self.sizes, torch_device = make_sizes(device), self.device.torch_device
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.ep = Axis("ep", 2, rank, dist.group.WORLD, (0, 1))
        self.mp = Axis("mp", 2, rank, dist.new_group([0, 1]), (0, 1))
        self.diary = Diary(WaitMeter(self.device.timed_event()), self.device)
        self.models: dict[str, Decoder] = {}
        for name in WAYS:
            self.models[name] = self._model(name, Axis.single("mp"), self.models.get("serial"))
        self.chosen: int | None = None
        self.own, self.shared = self._batch(rank), self._batch(2)
        pairs = self.sizes.seq_length * 2
        self.messages = [
            torch.zeros(pairs, self.sizes.hidden_size + extra, dtype=self.dtype, device=torch_device)
            for extra in (1, 0)
        ]

    def __call__(self, request: str) -> Figures:
        """Return the seconds of a step and of the waits in it, or the figures that the request asks for."""
        kind, _, rest = request.partition(" ")
        if request == "talk":
            return self._timed(self._talk)
        if kind == "alone":
            with patch.object(collectives, "all_to_all", _stay):
                figures = self._timed(lambda: self._step(self.models[rest]))
                return {**figures, "forward": self.turned - self.began}
        if kind == "memory":
            return {"bytes": self._peak_bytes(self.models[rest])}
        if kind == "draw":
            way, _, path = rest.rpartition(" ")
            return self._drawn(way, Path(path))
        if request == AUTO:
            found = self._choose()
            return {**self._timed(lambda: self._step(self._sliced(found))), "degree": found}
        return self._timed(lambda: self._step(self.models[request]))

    def _batch(self, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        positions = torch.arange(self.sizes.seq_length).unsqueeze(0)
        tokens = torch.randint(self.sizes.vocab_size, positions.shape, generator=generator)
        batch = {"tokens": tokens, "labels": tokens, "positions": positions}
        return {name: tensor.to(self.device.torch_device) for name, tensor in batch.items()}

    def _model(self, way: str, mp: Axis, weights: Decoder | None) -> Decoder:
        """Return the model with one way of slicing.

        Args:
            way: Name of the way.
            mp: Axis that shares attention. Experts are not shared.
            weights: Model whose weights it uses; None initializes new ones.
        """
        model = Decoder(
            self.sizes,
            mp=mp,
            ep=self.ep,
            emp=Axis.single("emp"),
            sequence_parallel=mp.size > 1,
            execution=Execution(comm=self.diary),
            slicing=replace(WAYS[way], overlap_mp=mp.size > 1),
            dtype=self.dtype,
            device="meta" if weights is not None else self.device.torch_device,
        )
        if weights is not None:
            model.load_state_dict(weights.state_dict(keep_vars=True), assign=True)
        else:
            for parameter in model.parameters():
                nn.init.normal_(parameter.data, std=0.02)
            for bias in model.correction_biases():
                bias.zero_()
        for block in model.layers.values():
            self.diary.watch(block.attention.proj, "forward", "attention")
            self.diary.watch(block.moe.experts, "compute", "experts")
        return model

    def _sliced(self, found: int) -> Decoder:
        return self.models["serial" if found == 1 else f"ampipe {found}"]

    def _choose(self) -> int:
        """Return the degree that the trainer chooses at its start with ``--ampipe-degree auto``."""
        if self.chosen is None:
            world = Axis("world", 2, self.ep.rank, self.ep.group, self.ep.ranks)
            seconds = degree.measure(
                degree.DEGREES,
                lambda found: self._timed(lambda: self._step(self._sliced(found)))["seconds"],
                world,
                self.device.torch_device,
            )
            self.chosen = degree.choose(seconds)[0]
        return self.chosen

    def _step(self, model: Decoder) -> None:
        model.zero_grad()
        batch = self.own if model.mp.size == 1 else self.shared
        loss = sum(model(batch).sums.values())
        self.device.synchronize()
        self.turned = time.perf_counter()
        loss.backward()
        self.diary.check_settled()

    def _peak_bytes(self, model: Decoder) -> float:
        """Return the largest sum of bytes of activations, messages and gradients in a step."""
        for other in self.models.values():
            other.zero_grad()
        if self.device.type == "cpu":
            with MemoryTracker() as tracker:
                self._step(model)
            return tracker.peak_bytes
        module = torch.get_device_module(self.device.type)
        module.reset_peak_memory_stats()
        before = module.memory_allocated()
        self._step(model)
        self.device.synchronize()
        return float(module.max_memory_allocated() - before)

    def _drawn(self, way: str, path: Path) -> Figures:
        """Run a step, and write its events to a file."""
        shared = way.startswith("mp ")
        model = self._model(way.removeprefix("mp "), self.mp, None) if shared else self.models[way]
        self._step(model)  # the first one makes connections and buffers
        self.diary.events = []
        figures = self._timed(lambda: self._step(model))
        if self.ep.rank == 0:
            path.write_text(json.dumps({"began": self.began, "events": self.diary.events}))
        self.diary.events = None
        return figures

    def _talk(self) -> None:
        for _ in range(2 * self.sizes.num_layers):
            for message in self.messages:
                wait(*start(AllToAll(self.ep), message, self.diary))

    def _timed(self, work: Callable[[], object]) -> Figures:
        dist.barrier()
        self.device.synchronize()
        self.diary.meter.take()
        self.began = time.perf_counter()
        work()
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
    """Copy the rows in place of an all-to-all. As many arrive as leave, because counts stay as well."""
    received.copy_(sent)


def main() -> None:
    """Join the other rank and serve turns."""
    serve(Steps(*join()))


if __name__ == "__main__":
    main()
