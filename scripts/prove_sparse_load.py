"""Show that a rank opens only the shard files that overlap its boxes, on a checkpoint with many files.

    python scripts/prove_sparse_load.py [--files 10240] [--rank 17]

Writes a checkpoint like a run of sharding FILES/8 x mp 8 (one small file per rank), then loads it as one rank of three
other runs and counts the files that the process opens. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megapar.checkpoints.format.layout import read_layout
from megapar.checkpoints.format.names import LAYOUT_FILE, SCALARS_FILE, shard_name
from megapar.checkpoints.format.shards import Shard, TensorPlan, file_order, write_bytes, write_shards
from megapar.checkpoints.save_load import collective_io
from megapar.checkpoints.save_load.planner import GlobalPlan
from megapar.checkpoints.save_load.storage import make_layout
from megapar.core.box import Box

MP = 8
# name -> (rows per file, columns per file, dim sharded by mp); sharding splits dim 0 of the local part
TENSORS = {"qkv": (2, 4, 0), "proj": (2, 3, 1), "up": (1, 8, 0), "down": (1, 5, 1)}


def shape_of(name: str, ranks: int) -> tuple[int, int]:
    """Return the global shape of a tensor in a run with this many ranks."""
    rows, columns, dim = TENSORS[name]
    sharding = ranks // MP
    return (rows * ranks, columns) if dim == 0 else (rows * sharding, columns * MP)


def box_of(name: str, shape: tuple[int, int], rank: int, sharding: int, mp: int) -> Box:
    """Return the box of a rank: mp splits the tensor, then sharding splits the rows of the part."""
    dim = TENSORS[name][2]
    return Box.whole(shape).cut(dim, mp, rank % mp).cut(0, sharding, rank // mp % sharding)


def true_values(box: Box, shape: tuple[int, int]) -> torch.Tensor:
    """Return the global index of every element, so that a wrong position is a wrong value."""
    rows, columns = (torch.arange(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
    return (rows[:, None] * shape[1] + columns).to(torch.int32)


def write(folder: Path, files: int) -> None:
    """Write the checkpoint of ``files`` ranks from one process."""
    folder.mkdir()
    shapes = {name: shape_of(name, files) for name in TENSORS}
    boxes = [
        {name: box_of(name, shape, rank, files // MP, MP) for name, shape in shapes.items()} for rank in range(files)
    ]
    entries = []
    for rank, own in enumerate(boxes):
        values = {name: true_values(box, shapes[name]) for name, box in own.items()}
        plans = file_order(TensorPlan(name, torch.int32, box.sizes) for name, box in own.items())
        entries.append(write_shards(folder / shard_name(rank), plans, values.__getitem__, sync=False))
    plan = GlobalPlan({name: (shape, torch.int32) for name, shape in shapes.items()}, boxes, {})
    scalars = write_bytes(folder / SCALARS_FILE, b'{"iteration": 1}')
    layout = make_layout(plan, entries, scalars, {"model": {}, "grid": {"sharding": files // MP, "mp": MP}})
    write_bytes(folder / LAYOUT_FILE, layout.to_bytes())


@contextmanager
def opened_files(suffix: str) -> Iterator[list[str]]:
    """Collect the files with this suffix that the process opens."""
    opened: list[str] = []
    watching = True

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if watching and event == "open" and str(arguments[0]).endswith(suffix):
            opened.append(str(arguments[0]))

    sys.addaudithook(hook)
    try:
        yield opened
    finally:
        watching = False


def load(folder: Path, files: int, rank: int, sharding: int, mp: int) -> dict[str, float]:
    """Load as one rank of another run. Return the numbers of opened and of overlapping files, and the duration."""
    layout = read_layout(folder)
    targets, needed = {}, set()
    for name in TENSORS:
        shape = shape_of(name, files)
        box = box_of(name, shape, rank, sharding, mp)
        targets[name] = Shard(name, shape, box, torch.full(box.sizes, -1, dtype=torch.int32))
        for writer in range(files):
            if box.meet(box_of(name, shape, writer, files // MP, MP)) is not None:
                needed.add(layout.files[writer].name)
    start = time.monotonic()
    with opened_files(".safetensors") as opened:
        collective_io.load(folder, targets, expect_model=None, group=None)
    seconds = time.monotonic() - start
    for name, shard in targets.items():
        if not torch.equal(shard.tensor, true_values(shard.box, shape_of(name, files))):
            raise SystemExit(f"{name} was loaded incorrectly")
    names = {Path(path).name for path in opened}
    return {
        "sharding": sharding,
        "mp": mp,
        "opened": len(names),
        "overlapping": len(needed),
        "only_overlapping": names == needed,
        "load_seconds": round(seconds, 3),
    }


def main() -> None:
    """Write the checkpoint, load it and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=10240, help="ranks of the writing run (a multiple of 64)")
    parser.add_argument("--rank", type=int, default=17, help="the rank that loads")
    options = parser.parse_args()
    files, rank = options.files, options.rank
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "checkpoint"
        start = time.monotonic()
        write(folder, files)
        written = time.monotonic() - start
        start = time.monotonic()
        read_layout(folder)
        parsed = time.monotonic() - start
        layout_bytes = (folder / LAYOUT_FILE).stat().st_size
        print(f"{files} files written in {written:.1f} s; layout.json: {layout_bytes} bytes, read in {parsed:.3f} s")
        loads = [
            load(folder, files, rank, sharding, mp)
            for sharding, mp in ((files // MP, MP), (files // 2, 2), (files // 64, MP))
        ]
    for row in loads:
        print(
            f"as rank {rank} of sharding {row['sharding']} x mp {row['mp']}: opened {row['opened']} files, "
            f"{row['overlapping']} overlap, {row['load_seconds']} s"
        )
    print(
        json.dumps(
            {"files": files, "rank": rank, "layout_bytes": layout_bytes, "parse_seconds": parsed, "loads": loads}
        )
    )


if __name__ == "__main__":
    main()
