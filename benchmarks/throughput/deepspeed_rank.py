"""One rank of DeepSpeed-MoE: transformers' decoder with its experts as DeepSpeed's own layer, cut over all ranks.

The layer does what the published one does: softmax in fp32, the two highest, their weights over their sum, no dropped
tokens (every expert is padded to the fullest one's rows), no noise, no auxiliary loss. Its experts are gated. In fp32
it runs without ZeRO; in bf16 it has DeepSpeed's bf16 parameters with fp32 master weights.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import Tensor, nn

from benchmarks.throughput.peer_rank import Batch, batches, join, make_model, quiet, serve_steps
from benchmarks.throughput.shape import contestant_parser, find


class Expert(nn.Module):
    """Expert that computes silu(gate) * up, then down. Gate and up are one product."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden, 2 * width, bias=False)
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the result for x, both [.., hidden]."""
        gate, up = self.gate_up(x).chunk(2, -1)
        y: Tensor = self.down(F.silu(gate) * up)
        return y


class Layer(nn.Module):
    """Layer in the place of a published layer's experts and router."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        weights = block.experts
        experts, hidden, width = weights.down_proj.shape
        self.moe = MoE(
            *(hidden, Expert(hidden, width), experts),
            ep_size=dist.get_world_size(),
            k=block.top_k,
            min_capacity=0,
            drop_tokens=False,
            use_rts=False,
            top2_2nd_expert_sampling=False,
        )
        layer = self.moe.deepspeed_moe
        own = len(layer.experts.deepspeed_experts)
        with torch.no_grad():
            layer.gate.wg.weight.copy_(block.gate.weight)
            for number, expert in enumerate(layer.experts.deepspeed_experts, dist.get_rank() * own):
                expert.gate_up.weight.copy_(weights.gate_up_proj[number])
                expert.down.weight.copy_(weights.down_proj[number])

    def forward(self, x: Tensor) -> Tensor:
        """Return the result for x, both [B, S, hidden]."""
        y: Tensor = self.moe(x)[0]
        return y


def replace_experts(model: nn.Module) -> None:
    """Replace every published mixture of experts in ``model`` by DeepSpeed's, with the same weights."""
    for parent in list(model.modules()):
        block = getattr(parent, "mlp", None)
        if block is not None and hasattr(block, "experts"):
            parent.mlp = Layer(block)


def make_engine(model: nn.Module, dtype: str, micro_batch: int) -> Any:
    """Return DeepSpeed's engine around ``model``, with fused AdamW and without clipping."""
    settings: dict[str, Any] = {"train_micro_batch_size_per_gpu": micro_batch, "steps_per_print": 1 << 30}
    if dtype == "bf16":
        settings |= {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    group = {"params": [p for p in model.parameters() if p.requires_grad], "name": "all"}
    groups = split_params_into_different_moe_groups_for_optimizer(group)
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return engine


def main() -> None:
    """Build the model and serve turns."""
    options = contestant_parser().parse_args()
    quiet()
    shape = find(options.device, options.model)
    join(options.device, options.rendezvous)
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    model = make_model(shape, options.folder, options.device, "")
    replace_experts(model)
    engine = make_engine(model, options.dtype, shape.micro_batch // dist.get_world_size())

    def train(batch: Batch) -> Tensor:
        loss: Tensor = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    serve_steps(train, batches(shape, options.folder, options.device), options.device)


if __name__ == "__main__":
    main()
