"""Seconds that a save delays training, and that a load takes, relative to ``torch.save`` and ``torch.load``.

    python -m benchmarks.checkpoint.run --megabytes 512 --rounds 5 --device cpu

Each round saves and loads in turns: by torch.save (written, fsynced), by megapar in the foreground, and by megapar in
the background under compute. As in training, the copy of a background save runs under the compute of a step, which
takes --step-seconds. The stall is the part of the copy that is left when the step's update is due.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from megapar.checkpoints.format.shards import Shard
from megapar.checkpoints.save_load import collective_io
from megapar.checkpoints.save_load.background import Background
from megapar.core.device.accelerators import pick

LAYOUT: dict[str, dict[str, int]] = {"model": {}, "grid": {}}


def make_state(megabytes: int, device: torch.device) -> dict[str, Shard]:
    """Return master weights and two moments, fp32, in tensors of 16 MB."""
    count = max(1, megabytes // 16)
    tensors = {f"model/{i}": torch.randn(2048, 2048, device=device) for i in range(count)}
    return {name: Shard.whole(name, tensor) for name, tensor in tensors.items()}


def seconds(call: Callable[[], object]) -> float:
    """Return the wall time of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def torch_save(path: Path, state: dict[str, Shard]) -> None:
    """Save as a plain script does, with an fsync, without which a loss of power may lose the file."""
    with path.open("wb") as file:
        torch.save({name: shard.tensor for name, shard in state.items()}, file)
        file.flush()
        os.fsync(file.fileno())


def compute(for_seconds: float, device: torch.device) -> None:
    """Multiply matrices for about this long, in place of a forward and a backward."""
    x = torch.randn(512, 512, device=device)
    end = time.perf_counter() + for_seconds
    while time.perf_counter() < end:
        x = torch.nn.functional.normalize(x @ x)


def one_round(
    root: Path, state: dict[str, Shard], background: Background, step_seconds: float, device: torch.device
) -> dict[str, float]:
    """Return the figures of one round, in which each way of saving and loading has its turn."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    scalars = {"iteration": 1}
    figures = {"torch.save": seconds(lambda: torch_save(root / "plain.pt", state))}
    figures["save"] = seconds(lambda: collective_io.save(root / "ours", state, scalars, layout=LAYOUT, group=None))
    background.begin(
        state, lambda copies: collective_io.save(root / "behind", copies, scalars, layout=LAYOUT, group=None)
    )
    compute(step_seconds, device)
    background.wait_for_copy()
    figures["stall"] = background.written.stall_seconds
    written = background.join()
    assert written is not None
    assert written.error is None
    figures["background"] = written.total_seconds
    figures["torch.load"] = seconds(lambda: torch.load(root / "plain.pt", map_location=device, weights_only=True))
    for verify in ("full", "size"):
        figures[f"load {verify}"] = seconds(
            lambda: collective_io.load(root / "ours", state, expect_model=None, verify=verify, group=None)  # noqa: B023
        )
    return figures


def main() -> None:
    """Print the table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-seconds", type=float, default=1.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, help="where files go (a temporary folder)")
    options = parser.parse_args()
    device = pick(options.device)
    state = make_state(options.megabytes, device.torch_device)
    background = Background(device)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rounds = [
            one_round(Path(folder) / "c", state, background, options.step_seconds, device.torch_device)
            for _ in range(options.rounds + 1)
        ][1:]  # the first one takes the memory for the copy
    medians = {name: statistics.median(figures[name] for figures in rounds) for name in rounds[0]}
    ratios = {
        "save / torch.save": statistics.median(r["save"] / r["torch.save"] for r in rounds),
        "stall / save": statistics.median(r["stall"] / r["save"] for r in rounds),
        "stall / torch.save": statistics.median(r["stall"] / r["torch.save"] for r in rounds),
        "load full / torch.load": statistics.median(r["load full"] / r["torch.load"] for r in rounds),
        "load size / torch.load": statistics.median(r["load size"] / r["torch.load"] for r in rounds),
    }
    for name, value in (*medians.items(), *ratios.items()):
        print(f"{name:24} {value:9.4f}{'' if '/' in name else ' s'}")
    print(json.dumps({"megabytes": options.megabytes, "rounds": options.rounds, "seconds": medians, "ratios": ratios}))


if __name__ == "__main__":
    main()
