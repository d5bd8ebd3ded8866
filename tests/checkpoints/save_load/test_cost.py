"""What saving and loading cost: memory of one tensor, files of one's own boxes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import prove_sparse_load

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


def test_a_rank_opens_only_files_that_overlap_its_boxes(tmp_path: Path) -> None:
    files = 2560  # the script itself does 10,240
    prove_sparse_load.write(tmp_path / "c", files)
    for sharding, mp, opened in ((320, 8, 1), (1280, 2, 8), (40, 8, 8)):
        row = prove_sparse_load.load(tmp_path / "c", files, 17, sharding, mp)
        assert row["only_overlapping"]
        assert row["opened"] == opened
        assert row["load_seconds"] < 5
