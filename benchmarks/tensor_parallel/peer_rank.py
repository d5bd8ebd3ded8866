"""One rank of the peer: a transformers model cut by DTensor's ``parallelize_module``; a turn is one optimizer step.

The model is Ernie4_5ForCausalLM of the same shape; the plans are those of PyTorch's tensor parallel tutorial: column
and row linear layers, a vocabulary-parallel embedding, head and loss, and with ``--sequence-parallel`` activations cut
along the sequence between them. Its layers are called one after the other, as its forward does, without a mask.
"""

from __future__ import annotations

import argparse
import time
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from transformers import Ernie4_5Config, Ernie4_5ForCausalLM

from benchmarks.support.contest import Figures, serve
from benchmarks.support.synchronize import synchronize
from benchmarks.tensor_parallel.shape import SHAPES, Shape
from benchmarks.throughput.peer_rank import join


def make_model(shape: Shape, dtype: torch.dtype, device: str) -> nn.Module:
    """Return the whole model."""
    config = Ernie4_5Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_query_groups,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.seq_length,
        tie_word_embeddings=False,
        use_bias=False,
        attn_implementation="sdpa",
    )
    return Ernie4_5ForCausalLM(config).to(device=device, dtype=dtype)


def cut(model: nn.Module, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Cut the model over the mesh, as the tutorial does."""
    outside = Shard(1) if sequence_parallel else Replicate()
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=outside),
        "lm_head": ColwiseParallel(input_layouts=outside, output_layouts=Shard(-1), use_local_output=False),
    }
    if sequence_parallel:
        plan["model.norm"] = SequenceParallel()
    parallelize_module(model, mesh, plan)
    for layer in model.model.layers:
        plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        plan |= {name: RowwiseParallel(output_layouts=outside) for name in ("self_attn.o_proj", "mlp.down_proj")}
        if sequence_parallel:
            plan |= {"input_layernorm": SequenceParallel(), "post_attention_layernorm": SequenceParallel()}
            gathered = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
            plan["mlp"] = PrepareModuleInput(**gathered)
            plan["self_attn"] = PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            )
        parallelize_module(layer, mesh, plan)


class Steps:
    """Steps of forward, cross-entropy of every token, backward and AdamW."""

    def __init__(self, model: nn.Module, shape: Shape, device: str) -> None:
        self.model, self.device = model, device
        # Fused AdamW takes no mixture: without sequence parallelism the plan leaves the norms plain.
        groups: dict[bool, list[Tensor]] = {}
        for parameter in model.parameters():
            groups.setdefault(isinstance(parameter, DTensor), []).append(parameter)
        self.optimizer = torch.optim.AdamW(
            [{"params": group} for group in groups.values()], lr=1e-4, weight_decay=0.1, fused=True
        )
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(shape.vocab_size, (1, shape.seq_length), generator=generator).to(device)
        self.positions = torch.arange(shape.seq_length, device=device).unsqueeze(0)

    def __call__(self, request: str) -> Figures:
        """Return the seconds of one step."""
        synchronize(self.device)
        start = time.perf_counter()
        with loss_parallel():
            logits = self._logits()
            F.cross_entropy(logits.flatten(0, 1).float(), self.tokens.flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        synchronize(self.device)
        return {"seconds": time.perf_counter() - start}

    def _logits(self) -> Tensor:
        inner = self.model.model
        x = inner.embed_tokens(self.tokens)
        angles = inner.rotary_emb(x, self.positions)
        for layer in inner.layers:
            x = layer(x, attention_mask=None, position_embeddings=angles)
        logits: Tensor = self.model.lm_head(inner.norm(x))
        return logits


def main() -> None:
    """Join the other rank and serve turns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rendezvous")
    parser.add_argument("--device")
    parser.add_argument("--sequence-parallel", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    device, shape = options.device, SHAPES[options.device]
    join(device, options.rendezvous)
    model = make_model(shape, torch.bfloat16 if device == "cuda" else torch.float32, device)
    cut(model, init_device_mesh(device, (dist.get_world_size(),)), options.sequence_parallel)
    serve(Steps(model, shape, device))


if __name__ == "__main__":
    main()
