"""What saving and loading cost: memory of one tensor, files of one's own boxes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from megapar.checkpoints.format.layout import read_layout
from megapar.checkpoints.format.names import LAYOUT_FILE, SCALARS_FILE, shard_name
from megapar.checkpoints.format.shards import Shard, TensorPlan, file_order, write_bytes, write_shards
from megapar.checkpoints.save_load import collective_io
from megapar.checkpoints.save_load.planner import GlobalPlan
from megapar.checkpoints.save_load.storage import make_layout
from megapar.core.box import Box

ROOT = Path(__file__).parents[3]

# Saves and loads 10 tensors of 8 MiB, all strided so that each must be copied to be written, and prints by how many
# bytes each of the two raised the peak of the resident memory.
MEASURE = """
import sys, torch
from pathlib import Path
from megapar.checkpoints.save_load import collective_io
from megapar.checkpoints.format.shards import Shard

def reset_peak():
    Path("/proc/self/clear_refs").write_text("5")
    return peak()

def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) * 1024

def state(fill):
    whole = [torch.full((2048, 1024), fill) for _ in range(10)]
    return {str(i): Shard.whole(str(i), tensor.t()) for i, tensor in enumerate(whole)}

torch.set_num_threads(1)
folder = Path(sys.argv[1])
layout = {"model": {}, "grid": {}}
small = {"a": Shard.whole("a", torch.zeros(8))}
collective_io.save(folder / "small", small, {}, layout=layout, group=None)
collective_io.load(folder / "small", small, expect_model=None, group=None)
saved, loaded = state(1.0), state(2.0)
before = reset_peak()
collective_io.save(folder / "c", saved, {}, layout=layout, group=None)
after_save = peak()
between = reset_peak()
collective_io.load(folder / "c", loaded, expect_model=None, group=None)
assert all((shard.tensor == 1).all() for shard in loaded.values())
print(after_save - before, peak() - between)
"""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads the peak from Linux' /proc")
def test_saving_and_loading_take_the_memory_of_about_one_tensor(tmp_path: Path) -> None:
    # A fixed threshold makes the allocator give back what is freed, so that the peak shows live bytes.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    save_bytes, load_bytes = map(int, done.stdout.split())
    print(f"peak rises by {save_bytes / 2**20:.1f} MiB at save and {load_bytes / 2**20:.1f} MiB at load")
    one_tensor = 8 << 20
    assert save_bytes < 2.5 * one_tensor
    assert load_bytes < 2.5 * one_tensor


MP = 8
# name -> (rows per file, columns per file, dim sharded by mp); sharding splits dim 0 of the local part
TENSORS = {"qkv": (2, 4, 0), "proj": (2, 3, 1), "up": (1, 8, 0), "down": (1, 5, 1)}


def shape_of(name: str, ranks: int) -> tuple[int, int]:
    """The global shape of a tensor in a run with this many ranks."""
    rows, columns, dim = TENSORS[name]
    return (rows * ranks, columns) if dim == 0 else (rows * ranks // MP, columns * MP)


def box_of(name: str, shape: tuple[int, int], rank: int, sharding: int, mp: int) -> Box:
    """The box of a rank: mp splits the tensor, then sharding splits the rows of the part."""
    return Box.whole(shape).cut(TENSORS[name][2], mp, rank % mp).cut(0, sharding, rank // mp % sharding)


def global_indices(box: Box, shape: tuple[int, int]) -> torch.Tensor:
    """The global index of every element, so that a wrong position is a wrong value."""
    rows, columns = (torch.arange(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
    return (rows[:, None] * shape[1] + columns).to(torch.int32)


def write(folder: Path, files: int) -> None:
    """The checkpoint of ``files`` ranks, sharding FILES/8 x mp 8, written by one process."""
    folder.mkdir()
    shapes = {name: shape_of(name, files) for name in TENSORS}
    boxes = [
        {name: box_of(name, shape, rank, files // MP, MP) for name, shape in shapes.items()} for rank in range(files)
    ]
    entries = []
    for rank, own in enumerate(boxes):
        values = {name: global_indices(box, shapes[name]) for name, box in own.items()}
        plans = file_order(TensorPlan(name, torch.int32, box.sizes) for name, box in own.items())
        entries.append(write_shards(folder / shard_name(rank), plans, values.__getitem__, sync=False))
    plan = GlobalPlan({name: (shape, torch.int32) for name, shape in shapes.items()}, boxes, {})
    scalars = write_bytes(folder / SCALARS_FILE, b'{"iteration": 1}')
    layout = make_layout(plan, entries, scalars, {"model": {}, "grid": {"sharding": files // MP, "mp": MP}})
    write_bytes(folder / LAYOUT_FILE, layout.to_bytes())


@contextmanager
def opened_files(suffix: str) -> Iterator[set[str]]:
    """Names of the files with this suffix that the process opens."""
    opened: set[str] = set()
    watching = True

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if watching and event == "open" and str(arguments[0]).endswith(suffix):
            opened.add(Path(str(arguments[0])).name)

    sys.addaudithook(hook)
    try:
        yield opened
    finally:
        watching = False


def test_a_rank_opens_only_files_that_overlap_its_boxes(tmp_path: Path) -> None:
    files, rank, folder = 2560, 17, tmp_path / "c"
    write(folder, files)
    layout = read_layout(folder)
    for sharding, mp, count in ((320, 8, 1), (1280, 2, 8), (40, 8, 8)):
        shapes = {name: shape_of(name, files) for name in TENSORS}
        boxes = {name: box_of(name, shape, rank, sharding, mp) for name, shape in shapes.items()}
        needed = {
            layout.files[writer].name
            for name, box in boxes.items()
            for writer in range(files)
            if box.meet(box_of(name, shapes[name], writer, files // MP, MP)) is not None
        }
        targets = {
            name: Shard(name, shapes[name], box, torch.full(box.sizes, -1, dtype=torch.int32))
            for name, box in boxes.items()
        }
        start = time.monotonic()
        with opened_files(".safetensors") as opened:
            collective_io.load(folder, targets, expect_model=None, group=None)
        assert time.monotonic() - start < 5
        assert opened == needed
        assert len(opened) == count
        for name, shard in targets.items():
            assert torch.equal(shard.tensor, global_indices(shard.box, shapes[name])), name
