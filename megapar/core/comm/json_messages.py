"""Blocking collectives of JSON values, sent as tensors. Unlike a pickle, a received value is parsed, never executed.

Every rank of the group calls the same function. Training steps do not use them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megapar.core.units import Json
from megapar.errors import DistributedError


def all_gather(value: Json, group: dist.ProcessGroup) -> list[Json]:
    """Return the values of all ranks, on every rank, in rank order. Raises DistributedError if one is not JSON."""
    data = _encoded(value, group)
    sizes = _sizes(data, group)
    parts = [data.new_empty(max(sizes)) for _ in sizes]
    dist.all_gather(parts, _padded(data, max(sizes)), group=group)
    return [_decoded(part[:size]) for part, size in zip(parts, sizes, strict=True)]


def gather(value: Json, group: dist.ProcessGroup) -> list[Json] | None:
    """Return all ranks' values on the group's first rank, else None. Raises DistributedError if one is not JSON."""
    data = _encoded(value, group)
    sizes = _sizes(data, group)
    parts = [data.new_empty(max(sizes)) for _ in sizes] if dist.get_rank(group) == 0 else None
    dist.gather(_padded(data, max(sizes)), parts, group=group, group_dst=0)
    return None if parts is None else [_decoded(part[:size]) for part, size in zip(parts, sizes, strict=True)]


def broadcast(value: Json, group: dist.ProcessGroup) -> Json:
    """Return the value of the group's first rank, on every rank. Raises DistributedError if it is not JSON."""
    first = dist.get_rank(group) == 0
    device = _device(group)
    data = _encoded(value, group) if first else torch.empty(0, dtype=torch.uint8, device=device)
    size = torch.tensor([data.numel()], device=device)
    dist.broadcast(size, group=group, group_src=0)
    if not first:
        data = data.new_empty(int(size.item()))
    dist.broadcast(data, group=group, group_src=0)
    return value if first else _decoded(data)


def scatter(values: Sequence[Json] | None, group: dist.ProcessGroup) -> Json:
    """Return this rank's value of those on the group's first rank. Raises DistributedError if it is not JSON."""
    parts = None if values is None else [_encoded(value, group) for value in values]
    device, rank = _device(group), dist.get_rank(group)
    count = dist.get_world_size(group)
    sizes = torch.tensor([part.numel() for part in parts] if parts else [0] * count, device=device)
    dist.broadcast(sizes, group=group, group_src=0)
    longest = int(sizes.max().item())
    data = torch.empty(longest, dtype=torch.uint8, device=device)
    padded = None if parts is None else [_padded(part, longest) for part in parts]
    dist.scatter(data, padded, group=group, group_src=0)
    return _decoded(data[: int(sizes[rank].item())])


def _device(group: dist.ProcessGroup) -> torch.device:
    """Return the device of the tensors that the group accepts, preferably the CPU."""
    types = {device.type for device in group._device_types}
    return torch.device("cpu" if "cpu" in types or not types else min(types))


def _encoded(value: Json, group: dist.ProcessGroup) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(_device(group))


def _decoded(data: Tensor) -> Json:
    try:
        return json.loads(data.cpu().numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise DistributedError(f"a rank's message of {data.numel()} bytes is not JSON: {str(error)[:200]}") from error


def _sizes(data: Tensor, group: dist.ProcessGroup) -> list[int]:
    """Return the message size of every rank, in bytes."""
    size = torch.tensor([data.numel()], device=data.device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    return [int(size.item()) for size in sizes]


def _padded(data: Tensor, size: int) -> Tensor:
    return torch.cat([data, data.new_zeros(size - data.numel())]) if data.numel() < size else data
