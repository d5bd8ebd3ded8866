"""The models of this benchmark, as their published classes' configurations, and how much of them a step takes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Shape:
    """A model and its micro-batch.

    Attributes:
        kind: Kind of trainer.
        architecture: Class of the model in transformers.
        config: Settings of the class.
        config_class: Class of the settings.
        micro_batch: Samples of a step, over all ranks.
        flags: Flags of megapar's trainer that the published folder does not determine.
    """

    kind: str
    architecture: str
    config_class: str
    config: Mapping[str, Any]
    seq_length: int
    micro_batch: int
    flags: tuple[str, ...] = field(default=())

    @property
    def experts(self) -> bool:
        """True if the published class has experts, of which transformers has several implementations."""
        return "moe_k" in self.config or self.latent

    @property
    def latent(self) -> bool:
        """True if attention is latent, which the sum of kernels does not support."""
        return "kv_lora_rank" in self.config

    @property
    def tokens(self) -> int:
        """Tokens of a step, over all ranks."""
        return self.micro_batch * self.seq_length


_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_DROPOUT_FLAGS = ("--hidden-dropout", "0", "--attention-dropout", "0")
_ROUTER_FLAGS = ("--moe-aux-loss-coeff", "0", "--moe-z-loss-coeff", "0")


def _ernie(layers: int, hidden: int, heads: int, length: int, micro_batch: int) -> Shape:
    config = {
        **{"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads},
        **{"intermediate_size": 4 * hidden, "vocab_size": 40000, "max_position_embeddings": length},
        **{"type_vocab_size": 2, "task_type_vocab_size": 3, "use_task_id": True, "hidden_act": "gelu", **_NO_DROPOUT},
    }
    flags = ("--sop-loss-weight", "0", *_DROPOUT_FLAGS)
    return Shape("ernie", "ErnieForMaskedLM", "ErnieConfig", config, length, micro_batch, flags)


def _decoder(layers: int, hidden: int, heads: int, groups: int, length: int, vocabulary: int) -> dict[str, Any]:
    return {
        **{"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "vocab_size": vocabulary},
        **{"num_key_value_heads": groups, "max_position_embeddings": length, "tie_word_embeddings": False},
        **{"use_bias": False, "use_cache": False, "hidden_act": "silu"},
    }


def _moe(decoder: Mapping[str, Any], experts: int, topk: int, width: int, micro_batch: int) -> Shape:
    config = {
        **{**decoder, "intermediate_size": width, "moe_intermediate_size": width, "moe_num_experts": experts},
        **{"moe_k": topk, "moe_num_shared_experts": 0, "moe_layer_start_index": 0},
    }
    length = decoder["max_position_embeddings"]
    flags = (*_DROPOUT_FLAGS, *_ROUTER_FLAGS)
    return Shape("moe", "Ernie4_5_MoeForCausalLM", "Ernie4_5_MoeConfig", config, length, micro_batch, flags)


def _mla(
    decoder: Mapping[str, Any], experts: int, topk: int, width: int, ranks: tuple[int, int], heads: tuple[int, int, int]
) -> Shape:
    """Return a decoder of the DeepSeek-V3 class, without the block of multi-token prediction that transformers lacks.

    Args:
        decoder: Settings of any decoder.
        experts: Number of experts.
        topk: Experts per token.
        width: Width of an expert.
        ranks: Ranks of the latents of queries, and of keys and values.
        heads: Features of a head: plain, rotated, values.
    """
    config = {
        **{**decoder, "intermediate_size": 4 * width, "moe_intermediate_size": width, "n_routed_experts": experts},
        **{"num_experts_per_tok": topk, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2},
        **{"topk_group": 1, "q_lora_rank": ranks[0], "kv_lora_rank": ranks[1], "attention_bias": False},
        "num_nextn_predict_layers": 0,
        **dict(zip(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), heads, strict=True)),
    }
    del config["use_bias"]
    length = decoder["max_position_embeddings"]
    flags = (*_DROPOUT_FLAGS, *_ROUTER_FLAGS)
    return Shape("moe", "DeepseekV3ForCausalLM", "DeepseekV3Config", config, length, 2, flags)


def _dense(decoder: Mapping[str, Any], width: int, micro_batch: int) -> Shape:
    config = {
        **decoder,
        "intermediate_size": width,
        "head_dim": decoder["hidden_size"] // decoder["num_attention_heads"],
    }
    length = decoder["max_position_embeddings"]
    return Shape("moe", "Ernie4_5ForCausalLM", "Ernie4_5Config", config, length, micro_batch, _DROPOUT_FLAGS)


SHAPES: Mapping[str, Mapping[str, Shape]] = {
    "cpu": {
        "ernie": _ernie(12, 768, 12, 512, 4),
        "mla": _mla(_decoder(8, 512, 8, 8, 1024, 32000), 8, 2, 512, (192, 128), (64, 32, 64)),
        "moe": _moe(_decoder(8, 512, 8, 4, 1024, 32000), 8, 2, 512, 2),
    },
    # About 1.5 B parameters, and 3 B of which 1 B act on a token.
    "cuda": {
        "dense": _dense(_decoder(24, 2048, 16, 16, 4096, 32000), 6144, 4),
        # As many layers of Llama 3.1 8B as a GPU of 80 GB trains, with its embedding and its output layer.
        "dense8b": _dense(_decoder(6, 4096, 32, 8, 4096, 128256), 14336, 2),
        "ernie": _ernie(28, 2048, 16, 4096, 4),
        "moe": _moe(_decoder(16, 2048, 16, 4, 4096, 32000), 16, 4, 1536, 4),
    },
}
# To test the benchmark itself on any device; their times have no meaning.
TINY: Mapping[str, Shape] = {
    "tiny-dense": _dense(_decoder(2, 64, 4, 2, 64, 512), 96, 2),
    "tiny-ernie": replace(_ernie(2, 64, 4, 64, 2), config={**_ernie(2, 64, 4, 64, 2).config, "vocab_size": 512}),
    "tiny-mla": _mla(_decoder(2, 64, 4, 4, 64, 512), 4, 2, 48, (24, 16), (16, 8, 16)),
    "tiny-moe": _moe(_decoder(2, 64, 4, 2, 64, 512), 4, 2, 48, 2),
}


def shallow(model: str, layers: int) -> Shape:
    """Return a dense or MoE model so small that its step is host time: hidden size 64, one sample of 16 positions."""
    decoder = _decoder(layers, 64, 4, 2, 16, 512)
    return {"dense": _dense(decoder, 128, 1), "moe": _moe(decoder, 4, 2, 64, 1)}[model]


def find(device: str, model: str) -> Shape:
    """Return a model of a device, or a tiny one. Raises KeyError for an unknown one."""
    return TINY[model] if model in TINY else SHAPES[device][model]


def contestant_parser() -> argparse.ArgumentParser:
    """Return the parser of what all contestants are given. The folder has the weights and the samples."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rendezvous")
    parser.add_argument("--device", choices=tuple(SHAPES), required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), required=True)
    parser.add_argument("--micro-batches", type=int, default=1, help="of a step")
    parser.add_argument("folder", type=Path)
    return parser
