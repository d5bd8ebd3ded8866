"""One rank of a peer: transformers' model, eager or compiled, alone or under DDP or FSDP2.

A turn is one optimizer step: forward, backward, fused AdamW. On a CPU, and under DDP, bf16 means autocast over fp32
weights; FSDP2 gathers in bf16 and reduces in fp32, as its documentation advises. Alone on a GPU the weights are bf16
with fp32 masters: autocast would leave transformers' grouped products in fp32. Several micro-batches add their
gradients in the dtype of the weights, each weighted by its share of the labels.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.support.contest import Figures, serve
from benchmarks.support.memory import PeakMemory
from benchmarks.throughput.prepare import FILES, IGNORED
from benchmarks.throughput.shape import Shape, contestant_parser, find

COMPILE, LAYERS = "compile", "compile-layers"  # the whole model, and each layer by itself
KINDS = ("eager", COMPILE, LAYERS, "ddp", "fsdp2")
Batch = dict[str, Tensor]
Data = TypeVar("Data")


def make_model(shape: Shape, folder: Path, device: str, experts: str) -> nn.Module:
    """Return the published class with the folder's weights in fp32."""
    kind = getattr(transformers, shape.architecture)
    chosen = {} if not experts else {"experts_implementation": experts}
    model: nn.Module = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa", **chosen)
    # Weights that are mapped from the file would count as memory in addition to the process's own; copies do not.
    for name, parameter in model.named_parameters():
        if device == "cpu":
            parameter.data = parameter.data.clone()
        if name.endswith("e_score_correction_bias"):
            parameter.requires_grad_(False)  # as in its class, but not after loading: DDP would wait for its gradient
    return model.train().to(device)


def wrap(model: nn.Module, kind: str, dtype: str) -> nn.Module:
    """Return the model as a contestant of this kind runs it."""
    if kind == COMPILE:
        compiled: Any = torch.compile(model)
        return compiled
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if kind == LAYERS:
        for layer in stacks[0]:  # all have the same code, so the first one's is reused
            layer.compile()
        return model
    if kind == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    if kind == "fsdp2":
        policy = MixedPrecisionPolicy()
        if dtype == "bf16":
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        for layer in (layer for stack in stacks for layer in stack):
            fully_shard(layer, mp_policy=policy)
        whole: nn.Module = fully_shard(model, mp_policy=policy)
        return whole
    return model


class Masters(list[nn.Parameter]):
    """The fp32 master weights of a model, which it turns into bf16."""

    def __init__(self, model: nn.Module) -> None:
        self._weights: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        super().__init__(nn.Parameter(weight.detach().clone()) for weight in self._weights)
        model.to(torch.bfloat16)

    def take_gradients(self) -> None:
        """Take the gradients of the weights, which have none afterwards."""
        for master, weight in zip(self, self._weights, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None

    def publish(self) -> None:
        """Copy the new values to the weights."""
        with torch.no_grad():
            torch._foreach_copy_(self._weights, list(self))


def batches(shape: Shape, folder: Path, device: str, lengths: str = "full") -> list[Batch]:
    """Return this rank's part of each micro-batch's samples, as the model's forward takes them."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    samples = torch.load(folder / FILES[lengths], weights_only=False)
    own = shape.micro_batch // ranks
    found = []
    for start in range(0, len(samples), shape.micro_batch):
        mine = samples[start + rank * own : start + (rank + 1) * own]
        stacked = {
            name: torch.from_numpy(np.stack([sample[name] for sample in mine])).to(device)
            for name in ("tokens", "labels")
        }
        inputs = {"input_ids": stacked["tokens"], "labels": stacked["labels"]}
        if shape.kind == "ernie":
            types = torch.from_numpy(np.stack([sample["token_types"] for sample in mine])).to(device)
            inputs |= {"token_type_ids": types, "task_type_ids": torch.zeros_like(types)}
            valid = torch.from_numpy(np.stack([sample["valid"] for sample in mine])).to(device)
            inputs |= {} if valid.all() else {"attention_mask": valid.long()}
        else:
            inputs |= {"shift_labels": stacked["labels"]}  # samples contain the token after the last one
        found.append(inputs)
    return found


def join(device: str, rendezvous: str | None) -> None:
    """Join the other ranks."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device == "cuda":
        torch.cuda.set_device(rank)
    if rendezvous is not None:
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=ranks)


def serve_steps(train: Callable[[Data], Tensor], data: Sequence[Data], device: str) -> None:
    """Answer each request with one call of ``train``, which returns this rank's mean loss. The data are repeated."""
    memory = PeakMemory(device)
    number = 0

    def step(request: str) -> Figures:
        nonlocal number
        if dist.is_initialized():
            dist.barrier()
        batch = data[number % len(data)]
        number += 1
        start = time.perf_counter()
        loss = train(batch)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        mean = loss.double()
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        return {"seconds": seconds, "loss": mean.item(), "peak_bytes": memory.read()}

    serve(step)


def updates(data: Sequence[Batch], micro_batches: int) -> list[list[tuple[Batch, float]]]:
    """Return the micro-batches of each update, in the order of megapar's, with their shares of its labels."""
    labels = [int((batch["labels"] != IGNORED).sum()) for batch in data]
    found = []
    for start in range(0, len(data) * micro_batches, micro_batches):
        numbers = [number % len(data) for number in range(start, start + micro_batches)]
        total = sum(labels[number] for number in numbers)
        found.append([(data[number], labels[number] / total) for number in numbers])
    return found


def quiet() -> None:
    """Silence warnings, and the log and progress bars of transformers: only answers are printed."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def main() -> None:
    """Build the model and serve turns."""
    parser = contestant_parser()
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--experts", default="", help="transformers' experts implementation")
    parser.add_argument("--lengths", choices=tuple(FILES), default="full")
    options = parser.parse_args()
    quiet()
    shape = find(options.device, options.model)
    join(options.device, options.rendezvous)
    base = make_model(shape, options.folder, options.device, options.experts)
    alone = options.device == "cuda" and options.kind in ("eager", COMPILE, LAYERS)
    masters = Masters(base) if alone and options.dtype == "bf16" else None
    model = wrap(base, options.kind, options.dtype)
    optimizer = torch.optim.AdamW(
        masters or model.parameters(), lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, fused=True
    )
    casts: Any = contextlib.nullcontext()
    if options.dtype == "bf16" and options.kind != "fsdp2" and masters is None:
        casts = torch.autocast(options.device, torch.bfloat16)

    def train(update: list[tuple[Batch, float]]) -> Tensor:
        loss = torch.zeros((), device=options.device)
        for batch, share in update:
            with casts:
                part: Tensor = model(**batch).loss
            (part if share == 1.0 else part * share).backward()
            loss += share * part.detach().float()
        if masters is not None:
            masters.take_gradients()
        optimizer.step()
        if masters is not None:
            masters.publish()
        optimizer.zero_grad()
        return loss

    data = batches(shape, options.folder, options.device, options.lengths)
    serve_steps(train, updates(data, options.micro_batches), options.device)


if __name__ == "__main__":
    main()
