"""One rank of megapar's own trainer; a turn is one optimizer step."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.support.contest import Figures, serve
from benchmarks.support.memory import PeakMemory
from benchmarks.support.steps import make_trainer
from benchmarks.throughput.prepare import FILES
from benchmarks.throughput.shape import Shape, contestant_parser, find
from megapar.arguments import parse
from megapar.core.device.peak import peak_flops
from megapar.data.batches import Loader, MicroBatch
from megapar.model.flops import step_flops
from megapar.trainer import Trainer
from megapar.training.step.dtypes import compute_dtype


class RoundAndRound(Loader):
    """Loader that repeats the benchmark's samples, made into batches once."""

    def __init__(self, trainer: Trainer, shape: Shape, folder: Path, lengths: str = "full") -> None:
        samples = torch.load(folder / FILES[lengths], weights_only=False)
        data, size = trainer.data, trainer.config.training.micro_batch_size
        super().__init__(samples, trainer.collate, size, data.rank, data.size, prefetch=False)
        starts = range(0, len(samples), shape.micro_batch)
        self._batches = [super(RoundAndRound, self).step(start, 1)[0] for start in starts]
        self._size_of_all = shape.micro_batch
        self._sizes, self._latest = trainer.job.sizes, range(0)
        tokens = [int(sample["valid"].sum()) if "valid" in sample else shape.seq_length for sample in samples]
        self._tokens = [tokens[start : start + shape.micro_batch] for start in starts]

    def step(self, consumed_samples: int, num_micro_batches: int, length: int | None = None) -> list[MicroBatch]:
        """Return the next batches."""
        first = consumed_samples // self._size_of_all
        self._latest = range(first, first + num_micro_batches)
        return [self._batches[number % len(self._batches)] for number in self._latest]

    def work(self) -> Figures:
        """Return the valid tokens of the latest step, over all ranks, and their FLOPs."""
        tokens = [count for number in self._latest for count in self._tokens[number % len(self._tokens)]]
        flops = sum(step_flops(self._sizes, tokens.count(count), count) for count in sorted(set(tokens)))
        return {"valid_tokens": float(sum(tokens)), "flops": float(flops)}


def flags(shape: Shape, folder: Path, device: str, dtype: str, ranks: int) -> list[str]:
    """Return the flags of the command line."""
    return [
        *("--load-hf", str(folder), "--seq-length", str(shape.seq_length), *shape.flags, "--dtype", dtype),
        *("--data-path", "mock", "--micro-batch-size", str(shape.micro_batch // ranks), "--device", device),
        *("--train-iters", "100000", "--lr", "1e-4", "--min-lr", "1e-4", "--clip-grad", "0", "--weight-decay", "0.1"),
        *("--lr-decay-style", "constant", "--log-interval", "100000", "--eval-interval", "0"),
    ]


def main() -> None:
    """Build the trainer and serve turns."""
    parser = contestant_parser()
    parser.add_argument("--lengths", choices=tuple(FILES), default="full")
    parser.add_argument("flags", nargs="*")
    options = parser.parse_args()
    shape = find(options.device, options.model)
    ranks = int(os.environ["WORLD_SIZE"])
    line = [*flags(shape, options.folder, options.device, options.dtype, ranks), *options.flags]
    line += ["--gradient-merge-acc-step", str(options.micro_batches)]
    config = parse(shape.kind, line, dict(os.environ))
    trainer = make_trainer(config, options.rendezvous)
    device = trainer.world.device
    trainer.loader = loader = RoundAndRound(trainer, shape, options.folder, options.lengths)
    memory = PeakMemory(options.device)
    peak, _ = peak_flops(device, compute_dtype(config, device))

    def step(request: str) -> Figures:
        if ranks > 1:
            dist.barrier()
        device.synchronize()
        start = time.perf_counter()
        done = trainer.step()
        device.synchronize()
        seconds = time.perf_counter() - start
        loss = done.totals.sums["lm"].double()
        if ranks > 1:
            dist.all_reduce(loss)
        figures = {"seconds": seconds, "loss": loss.item() / done.denominators.items["lm"], "peak_bytes": memory.read()}
        return {**figures, **loader.work(), "peak_flops": peak}

    serve(step)


if __name__ == "__main__":
    main()
