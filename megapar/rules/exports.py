"""What the published classes that models are exported as have no place for: one table for flags and for checkpoints.

The rows that refuse ``--save-hf`` are made from it, and ``megapar convert`` and the export itself ask it again of the
model that they have before them. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megapar.schema.rule import Rule, show

ERNIE4_5 = "Ernie4_5ForCausalLM"
ERNIE4_5_MOE = "Ernie4_5_MoeForCausalLM"
MIXTRAL = "MixtralForCausalLM"
QWEN3_MOE = "Qwen3MoeForCausalLM"
ENCODER = "ErnieForPreTraining"
MASKED = "ErnieForMaskedLM"

_MOE = (ERNIE4_5_MOE, MIXTRAL, QWEN3_MOE)
_DECODERS = (ERNIE4_5, *_MOE)
_KEPT = "Leave --save-hf out: checkpoints of --save keep every weight."


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Something that some classes cannot be.

    id: of the row. classes: that have this limit. reads: settings, by the names of their flags. within: whether values
    keep it. message: the limit in words. instead: what else could be trained; way: how a trained model gets out all the
    same, where there is one. passing, failing: flags, as of a row; no failing ones where other complaints come first.
    """

    id: str
    classes: tuple[str, ...]
    reads: tuple[str, ...]
    within: Callable[[Any], bool]
    message: str
    instead: str = ""
    way: str = ""
    passing: str = ""
    failing: str = ""

    def rule(self) -> Rule:
        """The row that refuses it beside --save-hf."""
        return Rule(
            id=self.id,
            reads=("save_hf", "export_class", *self.reads),
            when=lambda f: f.save_hf is not None and f.export_class in self.classes,
            requires=self.within,
            message=self.message,
            fix=" ".join(part for part in (_KEPT, self.instead, self.way) if part),
            source="Hugging Face form",
            passing=f"--save-hf exported {self.passing}".strip(),
            failing=f"--save-hf exported {self.failing}",
            models=("moe",),
        )


LIMITS: tuple[Limit, ...] = (
    Limit(
        id="hf-decoder-variety",
        classes=_DECODERS,
        reads=("normalization", "position_embedding_type", "activation"),
        within=lambda f: (f.normalization, f.position_embedding_type, f.activation) == ("rmsnorm", "rope", "swiglu"),
        message="a decoder's Hugging Face form has rmsnorm, rotary positions and swiglu",
        instead="Or train with these three.",
        failing="--normalization layernorm",
    ),
    Limit(
        id="hf-qk-norm",
        classes=(ERNIE4_5, ERNIE4_5_MOE, MIXTRAL),
        reads=("qk_norm",),
        within=lambda f: not f.qk_norm,
        message="this class has no norms of queries and keys; Qwen3Moe has, which is written where there are experts",
        instead="Or train without --qk-norm.",
        passing="--qk-norm",
        failing="--qk-norm --num-experts 0",
    ),
    Limit(
        id="hf-moe-bias",
        classes=_MOE,
        reads=("add_bias_linear",),
        within=lambda f: not f.add_bias_linear,
        message="the experts of this class have no biases",
        instead="Or train without --add-bias-linear.",
        passing="--add-bias-linear --num-experts 0",
        failing="--add-bias-linear",
    ),
    Limit(
        id="hf-shared-experts",
        classes=(MIXTRAL, QWEN3_MOE),
        reads=("moe_shared_experts",),
        within=lambda f: f.moe_shared_experts == 0,
        message="this class has no shared experts",
        instead="Or train without --moe-shared-experts, or without --qk-norm: Ernie4_5_Moe has them.",
        passing="--moe-shared-experts 1",
        failing="--qk-norm --moe-shared-experts 1",
    ),
    Limit(
        id="hf-dense-lead",
        classes=(MIXTRAL,),
        reads=("first_k_dense",),
        within=lambda f: f.first_k_dense == 0,
        message="every layer of this class has experts",
        instead="Or train with --first-k-dense 0.",
    ),
    Limit(
        id="hf-moe-routing",
        classes=_MOE,
        reads=("moe_router_score_function", "moe_router_num_groups", "moe_router_topk_scaling_factor"),
        within=lambda f: (
            (f.moe_router_score_function, f.moe_router_num_groups, f.moe_router_topk_scaling_factor)
            == ("softmax", 1, 1.0)
        ),
        message="the routing of this class is a plain softmax: no sigmoid, no groups, no factor on the weights",
        instead="Or train with these.",
        passing="--mtp-depth 1",
        failing="--moe-router-score-function sigmoid",
    ),
    Limit(
        id="hf-moe-widths",
        classes=_MOE,
        reads=("moe_layer_ffn_hidden_sizes",),
        within=lambda f: not f.moe_layer_ffn_hidden_sizes,
        message="the experts of this class are of one size in all layers",
        instead="Or train with --moe-ffn-hidden-size in place of --moe-layer-ffn-hidden-sizes.",
        failing="--num-layers 2 --moe-layer-ffn-hidden-sizes 128 64",
    ),
    Limit(
        id="hf-moe-topk",
        classes=_MOE,
        reads=("moe_router_topk",),
        within=lambda f: f.moe_router_topk > 1,
        message="this class divides the weight of a single choice by itself, and here it is the raw probability",
        instead="Or train with --moe-router-topk 2.",
        passing="--moe-router-topk 2",
        failing="--moe-router-topk 1",
    ),
    Limit(
        id="hf-mtp",
        classes=(MIXTRAL, QWEN3_MOE),
        reads=("mtp_depth",),
        within=lambda f: f.mtp_depth == 0,
        message="this class has no multi-token prediction block",
        way="Without its block the model goes out: --load RUN --finetune --mtp-depth 0 --train-iters 0 --save-hf OUT.",
        passing="--mtp-depth 1",
        failing="--qk-norm --mtp-depth 1",
    ),
    Limit(
        id="hf-router-bias",
        classes=(MIXTRAL, QWEN3_MOE),
        reads=("moe_router_bias_update_rate",),
        within=lambda f: f.moe_router_bias_update_rate == 0,
        message="this class has no place for the correction bias that --moe-router-bias-update-rate moves",
        way=(
            "Without --qk-norm, megapar convert megapar-to-hf writes them as Ernie4_5_Moe, which has the bias; no "
            "class known here has both."
        ),
        passing="--moe-router-bias-update-rate 0.001",
        failing="--qk-norm --moe-router-bias-update-rate 0.001",
    ),
)

SETTINGS = tuple(dict.fromkeys(name for limit in LIMITS for name in limit.reads))
RULES = tuple(limit.rule() for limit in LIMITS if limit.failing)


def class_of(*, experts: bool, qk_norm: bool) -> str:
    """The class that a decoder is exported as where it is not from a published folder."""
    if experts:
        return QWEN3_MOE if qk_norm else ERNIE4_5_MOE
    return ERNIE4_5


def export_class(values: Mapping[str, Any], published: str | None) -> str | None:
    """The class that --save-hf writes; None where a value that decides is missing. published: the folder's class."""
    if published is not None:
        return ENCODER if published.startswith("ErnieFor") else published
    if values.get("kind") == "ernie":
        return ENCODER
    if "num_experts" not in values or "qk_norm" not in values:
        return None
    return class_of(experts=values["num_experts"] > 0, qk_norm=values["qk_norm"])


def exceeded(name: str, settings: Any) -> list[str]:
    """What a class has no place for, with the settings. settings: has an attribute for each of SETTINGS."""
    found = []
    for limit in LIMITS:
        if name in limit.classes and not limit.within(settings):
            values = ", ".join(f"{read} {show(getattr(settings, read))}" for read in limit.reads)
            found.append(f"{limit.message} ({values}){': ' + limit.way.rstrip('.') if limit.way else ''}")
    return found
