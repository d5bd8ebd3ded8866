"""Tilings: the boxes of a global tensor in the files of a checkpoint, computed at save and searched at load.

    shape [6, 4], pieces in files          starts of dim 0: 0 2 4      -> runs [[0, 2, 3]]
        f0 f0 f3 f3                        starts of dim 1: 0 2        -> runs [[0, 2, 2]]
        f1 f1 f4 f4     (2 rows each)      files, row by row: 0 3 1 4 2 5
        f2 f2 f5 f5                                                    -> runs [[0, 3, 2], [1, 3, 2], [2, 3, 2]]

Almost every layout cuts a tensor into a grid of cells. The tiling is then a few runs of numbers, however many files
there are, and the cells that meet a box are found by bisection. Pieces that do not form a grid are listed one by one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from megapar.core.box import Box
from megapar.core.units import Json
from megapar.errors import CheckpointError
from megapar.files.tensor_file import is_number

Numbers: TypeAlias = NDArray[np.int64]

MAX_PIECES = 1 << 22  # per tensor; the counts in a layout file are checked before memory is allocated


@dataclass(frozen=True)
class BoxGrid:
    """A grid of cells.

    Attributes:
        shape: Shape of the global tensor.
        starts: For each dim, the first index of each cell along it, ascending from 0.
        files: The file number of each cell in row-major order [product of the lengths of ``starts``].
    """

    shape: tuple[int, ...]
    starts: tuple[Numbers, ...]
    files: Numbers

    def meeting(self, box: Box) -> Iterator[tuple[int, Box]]:
        """Yield (file number, box) of every piece that shares elements with ``box``."""
        ranges = []
        for starts, offset, size in zip(self.starts, box.offsets, box.sizes, strict=True):
            first = int(np.searchsorted(starts, offset, "right")) - 1
            ranges.append(range(first, int(np.searchsorted(starts, offset + size, "left"))))
        lengths = [len(starts) for starts in self.starts]
        for cell in itertools.product(*ranges):
            index = 0
            for position, length in zip(cell, lengths, strict=True):
                index = index * length + position
            yield int(self.files[index]), self._cell(cell)

    def _cell(self, cell: Sequence[int]) -> Box:
        offsets = tuple(int(starts[i]) for starts, i in zip(self.starts, cell, strict=True))
        ends = (
            int(starts[i + 1]) if i + 1 < len(starts) else size
            for starts, i, size in zip(self.starts, cell, self.shape, strict=True)
        )
        return Box(offsets, tuple(end - offset for offset, end in zip(offsets, ends, strict=True)))

    def to_json(self) -> dict[str, Json]:
        """Return the form in layout.json."""
        return {"starts": [to_runs(starts) for starts in self.starts], "files": to_runs(self.files)}


@dataclass(frozen=True)
class BoxList:
    """Boxes that do not form a grid.

    Attributes:
        files: The file number of each box [N].
        offsets: [N, dims].
        sizes: [N, dims].
    """

    files: Numbers
    offsets: Numbers
    sizes: Numbers

    def meeting(self, box: Box) -> Iterator[tuple[int, Box]]:
        """Yield (file number, box) of every piece that shares elements with ``box``."""
        for i in np.flatnonzero(_overlaps(self.offsets, self.sizes, np.array(box.offsets), np.array(box.sizes))):
            yield int(self.files[i]), Box(tuple(self.offsets[i].tolist()), tuple(self.sizes[i].tolist()))

    def to_json(self) -> dict[str, Json]:
        """Return the form in layout.json: rows of file, offsets, sizes."""
        return {"pieces": np.concatenate([self.files[:, None], self.offsets, self.sizes], axis=1).tolist()}


Tiling: TypeAlias = BoxGrid | BoxList


def tile(name: str, shape: Sequence[int], files: Sequence[int], boxes: Sequence[Box]) -> Tiling:
    """Return the tiling of boxes and their file numbers. Raises CheckpointError if they leave a hole or overlap."""
    dims, count = len(shape), len(boxes)
    numbers = np.array(files, dtype=np.int64)
    offsets = np.array([box.offsets for box in boxes], dtype=np.int64).reshape(count, dims)
    sizes = np.array([box.sizes for box in boxes], dtype=np.int64).reshape(count, dims)
    grid = _as_grid(tuple(shape), numbers, offsets, sizes)
    if grid is not None:
        return grid
    if int(sizes.prod(axis=1).sum()) != prod(shape):
        raise CheckpointError(
            f"{name}: the shards of all ranks hold {int(sizes.prod(axis=1).sum())} of its {prod(shape)} "
            "elements: a rank passed no shard, or no rank with the shard is primary"
        )
    for i in range(count - 1):
        if _overlaps(offsets[i + 1 :], sizes[i + 1 :], offsets[i], sizes[i]).any():
            raise CheckpointError(f"{name}: {boxes[i]} and another rank's box overlap without being the same")
    return BoxList(numbers, offsets, sizes)


def _as_grid(shape: tuple[int, ...], files: Numbers, offsets: Numbers, sizes: Numbers) -> BoxGrid | None:
    if prod(shape) == 0 or len(files) == 0:
        return BoxGrid(shape, tuple(np.zeros(0, np.int64) for _ in shape), files) if prod(shape) == 0 else None
    starts = tuple(np.unique(offsets[:, dim]) for dim in range(len(shape)))
    lengths = tuple(len(s) for s in starts)
    if prod(lengths) != len(files):
        return None
    cells = np.zeros(len(files), np.int64)
    for dim, (first, length) in enumerate(zip(starts, lengths, strict=True)):
        position = np.searchsorted(first, offsets[:, dim])
        ends = np.append(first[1:], shape[dim])
        if first[0] != 0 or (ends[position] - first[position] != sizes[:, dim]).any():
            return None
        cells = cells * length + position
    if len(np.unique(cells)) != len(cells):
        return None
    ordered = np.empty_like(files)
    ordered[cells] = files
    return BoxGrid(shape, starts, ordered)


def _overlaps(offsets: Numbers, sizes: Numbers, offset: Numbers, size: Numbers) -> NDArray[np.bool_]:
    """Return a mask [N] of the boxes [N, dims] that share elements with one box [dims]."""
    return np.asarray(((offsets < offset + size) & (offset < offsets + sizes)).all(axis=1))


def from_json(name: str, shape: tuple[int, ...], value: dict[str, Json], num_files: int) -> Tiling:
    """Return the tiling of a layout file, which is untrusted. Raises CheckpointError if the value is not a tiling."""
    if "pieces" in value:
        return _pieces_from_json(name, shape, value["pieces"], num_files)
    runs = value.get("starts")
    if not isinstance(runs, list) or len(runs) != len(shape):
        raise CheckpointError(f"{name}: starts are not given for each of {len(shape)} dims")
    starts = tuple(from_runs(name, run) for run in runs)
    files = from_runs(name, value.get("files"))
    empty = prod(shape) == 0
    if len(files) != (0 if empty else prod(len(s) for s in starts)):
        raise CheckpointError(f"{name}: {len(files)} files are named for {[len(s) for s in starts]} cells")
    for first, size in zip(starts, shape, strict=True):
        if not empty and not (len(first) and first[0] == 0 and (np.diff(first) > 0).all() and first[-1] < size):
            raise CheckpointError(f"{name}: starts do not rise from 0 to below {size}")
    _check_files(name, files, num_files)
    return BoxGrid(shape, starts, files)


def _pieces_from_json(name: str, shape: tuple[int, ...], rows: Json, num_files: int) -> BoxList:
    width = 1 + 2 * len(shape)
    if not isinstance(rows, list) or len(rows) > MAX_PIECES:
        raise CheckpointError(f"{name}: pieces are not a list of rows")
    for row in rows:
        if not isinstance(row, list) or len(row) != width or not all(is_number(n) for n in row):
            raise CheckpointError(f"{name}: {str(row)[:100]} is not a file, {len(shape)} offsets and as many sizes")
    table = np.array(rows, dtype=np.int64).reshape(len(rows), width)
    offsets, sizes = table[:, 1 : 1 + len(shape)], table[:, 1 + len(shape) :]
    if (sizes < 1).any() or (offsets + sizes > np.array(shape, dtype=np.int64)).any():
        raise CheckpointError(f"{name}: a piece is not inside the shape {list(shape)}")
    _check_files(name, table[:, 0], num_files)
    return BoxList(table[:, 0], offsets, sizes)


def _check_files(name: str, files: Numbers, num_files: int) -> None:
    if len(files) and (files.min() < 0 or files.max() >= num_files):
        raise CheckpointError(f"{name}: a piece is in file {int(files.max())} of {num_files}")


def to_runs(numbers: Numbers) -> list[list[int]]:
    """Return numbers as runs [first, stride, count], each as long as possible."""
    steps = np.diff(numbers)
    turns = np.append(np.flatnonzero(np.diff(steps)) + 1, len(steps))  # positions at which the stride changes
    runs, i = [], 0
    while i < len(numbers):
        if i == len(numbers) - 1:
            runs.append([int(numbers[i]), 0, 1])
            break
        end = int(turns[np.searchsorted(turns, i, "right")])
        runs.append([int(numbers[i]), int(steps[i]), end - i + 1])
        i = end + 1
    return runs


def from_runs(name: str, runs: Json) -> Numbers:
    """Return the numbers of runs. Raises CheckpointError if the value is not a list of runs or has too many."""
    if not isinstance(runs, list) or len(runs) > MAX_PIECES:
        raise CheckpointError(f"{name}: {str(runs)[:100]} is not a list of runs")
    total = 0
    for run in runs:
        if not (isinstance(run, list) and len(run) == 3 and all(type(number) is int for number in run)):
            raise CheckpointError(f"{name}: {str(run)[:100]} is not a run of first, stride and count")
        first, stride, count = run
        total += count
        if count < 1 or total > MAX_PIECES or not (is_number(first) and is_number(first + stride * (count - 1))):
            raise CheckpointError(f"{name}: the run {run} is outside the range of a tensor")
    if not runs:
        return np.zeros(0, np.int64)
    return np.concatenate([first + stride * np.arange(count, dtype=np.int64) for first, stride, count in runs])
