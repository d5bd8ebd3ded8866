"""Published model families: how their tensors are called and laid out, against the table's (Ernie4_5 and Ernie)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megapar.errors import CheckpointError
from megapar.model.decoder.sizes import DecoderSizes
from megapar.model.ernie.sizes import ErnieSizes
from megapar.model.hugging_face.config import hf_config
from megapar.model.initialize import piece_box
from megapar.model.parameter import ParameterSpec, Piece
from megapar.rules.exports import class_of

_QK_NORM = (r"^layers\.(\d+)\.attention\.([qk])_norm\.weight$", r"model.layers.\1.self_attn.\2_norm.weight")
_BIAS = r"\.e_score_correction_bias$"
_TASK = r"\.task_type_embeddings\.weight$"
_ROTATED = re.compile(r"\.([qk])(_proj\.(weight|bias)|_norm\.weight)$")


@dataclass(frozen=True)
class Family:
    """One architecture of transformers.

    name: its class. renames: (pattern, replacement) over the table's Hugging Face names. absent: patterns of names
    that such folders do not hold; they are zero here. half_rope: rotary pairs are (i, i + D / 2), where they are
    (2i, 2i + 1) here, so that rows of queries and keys are stored in another order.
    """

    name: str
    renames: tuple[tuple[str, str], ...] = ()
    absent: tuple[str, ...] = ()
    half_rope: bool = False

    def hf_name(self, name: str) -> str | None:
        """The name in the family's folders; None for what they do not hold."""
        if any(re.search(pattern, name) for pattern in self.absent):
            return None
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name

    def outward(self, spec: ParameterSpec, piece: Piece, whole: Tensor) -> tuple[str | None, Tensor]:
        """Name and content of a piece of a whole parameter as the family's folders have them; no name: not at all.

        Raises CheckpointError for content that they have no place for.
        """
        part = whole[piece_box(spec, piece).slices]
        name, rotated = self.hf_name(piece.hf_name), self.rotated_dim(spec, piece)
        if name is None and bool(part.any()):
            raise CheckpointError(f"{spec.name} is not zero, and {self.name} has no place for it")
        return name, part if rotated is None else to_halves(part, rotated)

    def rotated_dim(self, spec: ParameterSpec, piece: Piece) -> int | None:
        """The dim of the parameter whose rows this piece stores in another order; None where the order is the same."""
        if not self.half_rope or not _ROTATED.search(self.hf_name(piece.hf_name) or ""):
            return None
        return 0 if len(spec.shape) == 1 else 2  # a norm [D]; qkv [G, Q + 2, D, ..]


def to_pairs(x: Tensor, dim: int) -> Tensor:
    """Rows in halves to rows in pairs: row i to 2i, row i + D / 2 to 2i + 1."""
    return x.index_select(dim, torch.arange(x.shape[dim]).view(2, -1).T.flatten())


def to_halves(x: Tensor, dim: int) -> Tensor:
    """The inverse of ``to_pairs``."""
    return x.index_select(dim, torch.arange(x.shape[dim]).view(-1, 2).T.flatten())


_MIXTRAL = (
    (r"\.mlp\.gate\.weight$", ".block_sparse_moe.gate.weight"),
    (r"\.mlp\.experts\.(\d+)\.gate_proj\.", r".block_sparse_moe.experts.\1.w1."),
    (r"\.mlp\.experts\.(\d+)\.up_proj\.", r".block_sparse_moe.experts.\1.w3."),
    (r"\.mlp\.experts\.(\d+)\.down_proj\.", r".block_sparse_moe.experts.\1.w2."),
)
FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        Family("ErnieForPreTraining"),
        Family("ErnieForMaskedLM"),
        Family("Ernie4_5ForCausalLM"),
        Family("Ernie4_5_MoeForCausalLM"),
        Family("MixtralForCausalLM", _MIXTRAL, (_BIAS,), half_rope=True),
        Family("Qwen3MoeForCausalLM", (_QK_NORM,), (_BIAS,), half_rope=True),
    )
}


def family_of_config(name: str, config: Mapping[str, Any]) -> Family:
    """The family of a folder with this config.json; an ERNIE without task types does not hold them."""
    family = FAMILIES[name]
    if name.startswith("ErnieFor") and not config.get("use_task_id", False):
        return Family(name, absent=(_TASK,))
    return family


def family_of_sizes(sizes: DecoderSizes | ErnieSizes) -> Family:
    """The family that a model is exported as where nobody said which."""
    if isinstance(sizes, ErnieSizes):
        return FAMILIES["ErnieForPreTraining" if sizes.sop else "ErnieForMaskedLM"]
    return FAMILIES[class_of(experts=bool(sizes.moe_layers), qk_norm=sizes.qk_norm)]


def config_of(family: Family, sizes: DecoderSizes | ErnieSizes, dtype: torch.dtype) -> dict[str, Any]:
    """The content of config.json."""
    config = hf_config(sizes, dtype)
    if isinstance(sizes, ErnieSizes):
        return config | {"architectures": [family.name]}
    if not family.half_rope:
        return config
    assert sizes.moe is not None
    keys = {
        *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
        *("hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps", "rope_parameters"),
        *("tie_word_embeddings", "dtype"),
    }
    common = {key: value for key, value in config.items() if key in keys}
    common |= {"architectures": [family.name], "num_experts_per_tok": sizes.moe.topk, "sliding_window": None}
    if family.name == "MixtralForCausalLM":
        experts = {"num_local_experts": sizes.moe.num_experts, "intermediate_size": sizes.moe.ffn_hidden_size}
        return {**common, "model_type": "mixtral", **experts}
    return {
        **common,
        "model_type": "qwen3_moe",
        "num_experts": sizes.moe.num_experts,
        "intermediate_size": sizes.ffn_hidden_size,
        "moe_intermediate_size": sizes.moe.ffn_hidden_size,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(sizes.first_k_dense)),
        "attention_bias": False,
    }
