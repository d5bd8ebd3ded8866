"""Small models and batches that the model tests share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megapar.core.comm.axis import Axis
from megapar.core.recompute.checkpointing import Recompute
from megapar.core.sharding.cut import box_at
from megapar.core.tensor_parallel.execution import DEFAULT, Execution
from megapar.core.tensor_parallel.layers import local
from megapar.model.decoder.model import Decoder
from megapar.model.decoder.sizes import DecoderSizes
from megapar.model.ernie.model import Ernie
from megapar.model.ernie.sizes import ErnieSizes
from megapar.model.initialize import fill
from megapar.model.parameter import ParameterSpec
from megapar.model.spec import table_of
from megapar.moe.sizes import MoeSizes

DENSE = DecoderSizes(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=8,
    ffn_hidden_size=48,
    vocab_size=67,
    seq_length=16,
    max_position_embeddings=32,
    init_std=0.1,
)
MOE = replace(
    DENSE,
    num_layers=3,
    first_k_dense=1,
    tie_embeddings=False,
    moe=MoeSizes(hidden_size=32, ffn_hidden_size=16, num_experts=4, topk=2, shared_experts=2),
)
LATENT = replace(
    DENSE,
    num_query_groups=4,
    head_dim=24,
    multi_latent_attention=True,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_head_dim=8,
    qk_pos_emb_head_dim=16,
    v_head_dim=12,
)
ERNIE = ErnieSizes(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    ffn_hidden_size=48,
    vocab_size=67,
    seq_length=16,
    max_position_embeddings=32,
    init_std=0.1,
)
ERNIE_21B = DecoderSizes(
    num_layers=28,
    hidden_size=2560,
    num_attention_heads=20,
    num_query_groups=4,
    head_dim=128,
    ffn_hidden_size=12288,
    vocab_size=103424,
    seq_length=4096,
    max_position_embeddings=4096,
    first_k_dense=1,
    moe=MoeSizes(2560, 1536, num_experts=64, topk=6, shared_experts=2),
)
ERNIE_300B = replace(
    ERNIE_21B,
    **{"num_layers": 54, "hidden_size": 8192, "num_attention_heads": 64, "num_query_groups": 8, "first_k_dense": 3},
    **{"ffn_hidden_size": 28672, "tie_embeddings": False},
    moe=MoeSizes(8192, 3584, num_experts=64, topk=8),
)
ERNIE_BASE = ErnieSizes(
    **{"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "ffn_hidden_size": 3072, "vocab_size": 40000},
    **{"seq_length": 512, "max_position_embeddings": 2048},
)
BIASED_MOE = replace(
    MOE,
    add_bias_linear=True,
    activation="gelu",
    moe=MoeSizes(32, 16, 4, 2, shared_experts=1, activation="gelu", add_bias=True),
)
GEMMA: dict[str, Any] = {
    **{"activation": "geglu", "norm_placement": "both", "apply_layernorm_1p": True, "qk_norm": True},
    **{"scale_embedding": True, "softmax_scale": 20**-0.5},
}
OLMO2: dict[str, Any] = {"qk_norm": True, "qk_norm_scope": "width", "norm_placement": "output"}
MULTIPLIED: dict[str, Any] = {
    **{"embedding_multiplier": 3.0, "residual_multiplier": 0.6, "softmax_scale": 0.2, "logits_scaling": 1.7},
}
VARIETIES = {
    "dense": DENSE,
    "untied": replace(DENSE, tie_embeddings=False),
    "layernorm": replace(DENSE, normalization="layernorm"),
    "learned positions": replace(DENSE, position_embedding_type="learned"),
    "gelu": replace(DENSE, activation="gelu"),
    "biases": replace(DENSE, add_bias_linear=True),
    "head dim": replace(DENSE, head_dim=12),
    "qk-norm": replace(DENSE, qk_norm=True),
    "width norms": replace(DENSE, qk_norm=True, qk_norm_scope="width"),
    "output norms": replace(DENSE, norm_placement="output"),
    "norms of inputs and outputs": replace(DENSE, **GEMMA),
    "multipliers": replace(DENSE, **MULTIPLIED),
    "qkv biases": replace(DENSE, add_qkv_bias=True),
    "gpt": replace(
        DENSE,
        num_query_groups=4,
        normalization="layernorm",
        position_embedding_type="learned",
        activation="gelu",
        add_bias_linear=True,
    ),
    "latent attention": LATENT,
    "latent attention, no query rank": replace(LATENT, q_lora_rank=0, mtp_depth=1),
    "math attention": replace(DENSE, use_flash_attn=False),
    "moe": MOE,
    "moe of OLMo 2's layers, multiplied": replace(MOE, **OLMO2, **MULTIPLIED),
    "moe everywhere, no shared": replace(MOE, first_k_dense=0, moe=MoeSizes(32, 16, 4, 2)),
    "moe with drops": replace(MOE, moe=replace(MOE.moe, kind="deepspeed_moe", capacity_factor=0.5, min_capacity=1)),
    "moe gelu with biases": BIASED_MOE,
    "moe with a gated shared expert, dense in between, undivided": replace(
        *(MOE,),
        **{"first_k_dense": 0, "moe_pattern": (1, 0, 1)},
        moe=MoeSizes(32, 16, 4, 2, shared_ffn=12, shared_gate=True, norm_topk_prob="off"),
    ),
    "multi-token prediction": replace(DENSE, mtp_depth=1),
    "moe of today": replace(
        MOE,
        mtp_depth=1,
        add_bias_linear=True,
        normalization="layernorm",
        moe_widths=(16, 8),
        moe=replace(MOE.moe, score="sigmoid", groups=2, group_topk=1, scaling=2.0, sequence_aux=True, orthogonal=True),
    ),
    "published multi-token prediction": replace(
        *(LATENT,),
        **{"num_layers": 3, "first_k_dense": 1, "mtp_depth": 1, "mtp_block": "layer", "tie_embeddings": False},
        moe=MoeSizes(32, 16, 4, 2, shared_experts=1, score="sigmoid", sequence_aux=True),
    ),
    "ernie": ERNIE,
    "ernie without sentence order": replace(ERNIE, sop=False),
}


def build(
    sizes: DecoderSizes | ErnieSizes,
    *,
    seed: int = 1,
    dtype: torch.dtype = torch.float32,
    mp: Axis | None = None,
    sequence_parallel: bool = False,
    execution: Execution = DEFAULT,
    recompute: Recompute | None = None,
    **more: object,
) -> Decoder | Ernie:
    """An initialised model; its biases, norms and correction biases are moved off their trivial initial values.

    execution, recompute: as its constructor takes them. more: what else a decoder's constructor takes.
    """
    mp = mp or Axis.single("mp")
    common = {"mp": mp, "sequence_parallel": sequence_parallel, "dtype": dtype}
    common |= {"execution": execution, "recompute": recompute}
    model: Decoder | Ernie
    if isinstance(sizes, ErnieSizes):
        model = Ernie(sizes, **common)  # type: ignore[arg-type]
    else:
        axes = {"ep": Axis.single("ep"), "emp": Axis.single("emp"), **more}
        model = Decoder(sizes, **common, **axes)  # type: ignore[arg-type]
    # Every row is drawn, so that no bias or norm hides behind zeros and ones.
    table = [replace(row, init="normal") for row in table_of(sizes) if row.trainable]
    table += [row for row in table_of(sizes) if not row.trainable]
    axes = {name: more.get(name, Axis.single(name)) for name in ("ep", "emp")} | {"mp": mp}
    places = {name: (axis.size, axis.rank) for name, axis in axes.items()}
    initialize(model, table, places, seed=seed, init_std=sizes.init_std)
    shift_norms(model)
    return model


def initialize(
    model: nn.Module,
    table: Iterable[ParameterSpec],
    places: Mapping[str, tuple[int, int]],
    *,
    seed: int,
    init_std: float,
) -> None:
    """Fill every parameter and buffer of the table as the rank at ``places`` has it: axis -> (size, coordinate)."""
    rows = {spec.name: spec for spec in table}
    for name, tensor in named_tensors(model):
        box = box_at(rows[name], dict(places))
        fill(local(tensor.detach()), rows[name], box, seed=seed, init_std=init_std)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, then checkpointed buffers: what the table has rows for."""
    yield from model.named_parameters()
    persistent = model.state_dict(keep_vars=True)
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)


def shift_norms(model: nn.Module) -> None:
    """Norm weights around 1."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm.weight" in name:
                weight += 1.0


def batch_for(sizes: DecoderSizes | ErnieSizes, *, padded: bool = False, seed: int = 0) -> dict[str, Tensor]:
    """Two samples of 16 tokens; padded: the second one ends after 11."""
    generator = torch.Generator().manual_seed(seed)
    batch, length = 2, 16

    def draw(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    tensors = {
        "tokens": draw(sizes.vocab_size, batch, length),
        "positions": torch.arange(length).expand(batch, length),
    }
    valid = torch.ones(batch, length, dtype=torch.bool)
    if padded:
        valid[1, 11:] = False
        tensors["valid"] = valid
    if isinstance(sizes, DecoderSizes):
        labels = draw(sizes.vocab_size, batch, length)
        labels[0, :3] = -100
        return {**tensors, "labels": labels.masked_fill(~valid, -100)}
    masked = torch.tensor([1, 5, 9, 17, 26])
    return {
        **tensors,
        "token_types": draw(sizes.type_vocab_size, batch, length),
        "task_types": draw(sizes.task_type_vocab_size, batch, length),
        "masked_index": masked,
        "masked_labels": draw(sizes.vocab_size, len(masked)),
        "sop_labels": draw(2, batch),
    }


def total(model: Decoder | Ernie, batch: dict[str, Tensor]) -> Tensor:
    """Everything that is differentiated, in one number."""
    terms = model(batch)
    routing = 0.1 * terms.aux + 0.01 * terms.z + 0.1 * terms.sequence + terms.orthogonal
    return sum(terms.sums.values()) + routing  # type: ignore[return-value]
