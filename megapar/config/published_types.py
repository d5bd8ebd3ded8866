"""Types and bounds of what is read of a Hugging Face ``config.json``, all complaints at once.

A stranger's file holds whatever JSON can say, and Python's JSON more than that: NaN, infinities, numbers of any
length. What has passed here can be reckoned with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from megapar.config.shown import shown
from megapar.config.values import MAX_INT

SHOWN = 8

Check = Callable[[Any], str]
"""What would be right, where a value is not; "" where it is."""


def _whole(low: int, *, optional: bool = False) -> Check:
    wanted = f"a whole number from {low} on" + (" or null" if optional else "")

    def check(value: Any) -> str:
        if value is None and optional:
            return ""
        good = isinstance(value, int) and not isinstance(value, bool) and low <= value <= MAX_INT
        # 4096.0 is written by tools that keep every number in double precision.
        good = good or (isinstance(value, float) and value.is_integer() and low <= value <= 2**53)
        return "" if good else wanted

    return check


def _number(low: float, high: float = math.inf, *, above: bool = False, optional: bool = False) -> Check:
    range_ = f"from {low:g} to {high:g}" if high < math.inf else f"{'above' if above else 'from'} {low:g}"
    wanted = f"a number {range_}" + (" or null" if optional else "")

    def check(value: Any) -> str:
        if value is None and optional:
            return ""
        if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > 1e300 or value != value:
            return wanted
        return "" if (low < value if above else low <= value) and value <= high else wanted

    return check


def _switch(value: Any) -> str:
    return "" if value is None or isinstance(value, bool) else "true or false"


def _text(value: Any) -> str:
    return "" if value is None or isinstance(value, str) else "a text"


def _rope(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, dict):
        return "an object or null"
    for name, check in (("rope_theta", _THETA), ("rope_type", _text), ("type", _text)):
        if name in value and (wanted := check(value[name])):
            return f"an object whose {name} is {wanted}"
    return ""


def _layers(value: Any) -> str:
    good = value is None or (isinstance(value, list) and all(not _whole(0)(layer) for layer in value))
    return "" if good else "a list of whole numbers"


_SIZE, _SHARE = _whole(1), _number(0.0, 1.0, optional=True)
_THETA, _EPSILON = _number(0.0, above=True, optional=True), _number(0.0, 1.0)
CHECKS: Mapping[str, Check] = {
    **dict.fromkeys(
        (
            *("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"),
            *("max_position_embeddings", "moe_num_experts", "num_experts"),
            *("moe_intermediate_size", "moe_k", "num_experts_per_tok", "moe_layer_interval", "decoder_sparse_step"),
        ),
        _SIZE,
    ),
    **dict.fromkeys(("num_key_value_heads", "head_dim", "num_local_experts"), _whole(1, optional=True)),
    **dict.fromkeys(("type_vocab_size", "task_type_vocab_size", "moe_layer_start_index"), _whole(0)),
    **dict.fromkeys(("sliding_window", "num_nextn_predict_layers", "moe_num_shared_experts"), _whole(0, optional=True)),
    "moe_layer_end_index": _whole(-1),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "moe_norm_min"), _EPSILON),
    "rope_theta": _THETA,
    **dict.fromkeys(
        ("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout", "router_jitter_noise"), _SHARE
    ),
    **dict.fromkeys(
        (
            *("tie_word_embeddings", "use_bias", "use_sliding_window", "attention_bias", "norm_topk_prob"),
            *("is_decoder", "add_cross_attention", "use_task_id"),
        ),
        _switch,
    ),
    "hidden_act": _text,
    "rope_parameters": _rope,
    "rope_scaling": _rope,
    "mlp_only_layers": _layers,
}


_DECODER = frozenset(
    (
        *("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"),
        *("max_position_embeddings", "num_key_value_heads", "head_dim", "sliding_window", "use_sliding_window"),
        *("rms_norm_eps", "rope_theta", "rope_parameters", "rope_scaling", "attention_dropout", "hidden_act"),
        *("tie_word_embeddings", "router_jitter_noise"),
    )
)
_ERNIE4_5 = _DECODER | {"use_bias", "num_nextn_predict_layers"}
_OF_CLASS: Mapping[str, frozenset[str]] = {
    "Ernie4_5ForCausalLM": _ERNIE4_5,
    "Ernie4_5_MoeForCausalLM": _ERNIE4_5 | {name for name in CHECKS if name.startswith("moe_")},
    "MixtralForCausalLM": _DECODER | {"num_local_experts", "num_experts_per_tok"},
    "Qwen3MoeForCausalLM": _DECODER
    | {"num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "attention_bias"}
    | {"norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"},
}
"""What is read of a decoder's class; what another class would read may stand there and mean nothing."""


def wrong_values(architecture: str, config: Mapping[str, Any]) -> list[str]:
    """What is wrong with the values of a config.json that are read of this class, each without a full stop."""
    read = _OF_CLASS.get(architecture, CHECKS.keys())
    found = [
        f"{name} is {shown(config[name])}, where {wanted} is needed"
        for name, check in CHECKS.items()
        if name in config and name in read and (wanted := check(config[name]))
    ]
    more = [f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
    return [*found[:SHOWN], *more]
