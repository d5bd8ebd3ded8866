"""One rank of a peer: the same model under torch's DistributedDataParallel, or under FSDP2 with one group per layer.

A turn is a few optimizer steps: forward, backward, fused AdamW. DDP keeps fp32 weights and computes in bf16 by
autocast; FSDP2 gathers in bf16 and reduces in fp32, as its documentation advises.
"""

from __future__ import annotations

import argparse
import contextlib
import time
import warnings
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.sharding.shape import DECODER, TIMED_STEPS, TRAINING
from benchmarks.support.contest import Figures, serve
from benchmarks.throughput.peer_rank import join
from megapar.arguments import parse
from megapar.core.comm.axis import Axis
from megapar.model.decoder.model import Decoder
from megapar.model.decoder.sizes import DecoderSizes


class Loss(nn.Module):
    """Decoder whose output is its mean loss, a tensor, as the wrappers need it."""

    def __init__(self, decoder: Decoder, tokens: int) -> None:
        super().__init__()
        self.decoder, self._tokens = decoder, tokens

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the mean loss, a scalar."""
        return self.decoder(dict(batch), self._tokens).sums["lm"] / self._tokens


def make_model(device: str) -> tuple[Loss, dict[str, Tensor]]:
    """Return the model with random weights, and a batch for it."""
    sizes = parse("moe", [*DECODER, *TRAINING], {}).model
    assert isinstance(sizes, DecoderSizes)
    single = Axis.single("mp")
    decoder = Decoder(
        sizes, mp=single, ep=single, emp=single, sequence_parallel=False, dtype=torch.float32, device=device
    )
    for parameter in decoder.parameters():
        nn.init.normal_(parameter.data, std=0.02)
    length = sizes.max_position_embeddings
    tokens = torch.randint(sizes.vocab_size, (1, length), device=device)
    positions = torch.arange(length, device=device).unsqueeze(0)
    return Loss(decoder, length), {"tokens": tokens, "labels": tokens, "positions": positions}


def wrap(model: Loss, kind: str, dtype: str) -> nn.Module:
    """Return the model under DDP or FSDP2."""
    if kind == "ddp":
        return DistributedDataParallel(model)
    policy = MixedPrecisionPolicy()
    if dtype == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in model.decoder.layers.values():
        fully_shard(layer, mp_policy=policy)
    wrapped: nn.Module = fully_shard(model, mp_policy=policy)
    return wrapped


def main() -> None:
    """Join the other rank and serve turns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rendezvous")
    parser.add_argument("--device")
    parser.add_argument("--kind", choices=("ddp", "fsdp2"))
    parser.add_argument("--dtype", choices=("fp32", "bf16"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    join(options.device, options.rendezvous)
    loss, batch = make_model(options.device)
    model = wrap(loss, options.kind, options.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    casts = options.kind == "ddp" and options.dtype == "bf16"

    def step() -> None:
        with torch.autocast(options.device, torch.bfloat16) if casts else contextlib.nullcontext():
            value = model(batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        if options.device == "cuda":
            torch.cuda.synchronize()

    def turn(request: str) -> Figures:
        dist.barrier()
        step()
        start = time.perf_counter()
        for _ in range(TIMED_STEPS):
            step()
        return {"seconds": (time.perf_counter() - start) / TIMED_STEPS}

    serve(turn)


if __name__ == "__main__":
    main()
