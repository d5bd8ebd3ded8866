"""Keys of config.json that decoders share, each with its flag."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from megapar.model.decoder.layer_pattern import ernie_interval, flags_of, layers_of, to_pattern
from megapar.model.decoder.layer_ropes import no_rope_text, roped_or_all
from megapar.model.decoder.rope_keys import rope_settings
from megapar.model.decoder.windows import NO_FULL, skip_text, window_or_none, window_text, windowed_or_all
from megapar.schema.legal_values import (
    COUNT,
    EPSILON,
    FULL,
    LAYER_KINDS,
    LAYERS,
    OPTIONAL_COUNT,
    OPTIONAL_PROBABILITY,
    OPTIONAL_SIZE,
    POSITIVE,
    SIZE,
    SLIDING,
    Check,
    anything,
    layer_numbers,
    text,
    true_or_false,
    whole,
)
from megapar.schema.published import Json, Setting, Settings


def _head_dim(config: Json) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _unseen(config: Json) -> str:
    window = config.get("sliding_window")
    if window is None or not config.get("use_sliding_window", True) or window >= config["max_position_embeddings"]:
        return ""
    return "but attention here always sees all earlier positions"


def _layer_types(config: Json) -> str:
    kinds = config.get("layer_types") or []
    plain = all(kind == "full_attention" for kind in kinds) or (
        set(kinds) <= {"full_attention", "sliding_attention"} and not _unseen(config)
    )
    return "" if plain else "but attention here always sees all earlier positions"


def _biases(config: Json) -> str:
    same = config["attention_bias"] == config["mlp_bias"]
    return (
        "" if same else "but biases here are in all linear layers or in none, apart from those of queries, keys, values"
    )


def _clipped(config: Json) -> str:
    return "" if config.get("clip_qkv") is None else "but queries, keys and values are not clipped here"


VOCABULARY = (Setting("vocab_size", SIZE, "vocab_size"), Setting("hidden_size", SIZE, "hidden_size"))
DENSE_WIDTH = Setting("intermediate_size", SIZE, "ffn_hidden_size")


ATTENTION_DROPOUT = Setting(
    "attention_dropout",
    OPTIONAL_PROBABILITY,
    "attention_dropout",
    written=False,
    to_flag=lambda config: config.get("attention_dropout") or 0.0,
)


def attention_settings(partial: float | None = None) -> tuple[Setting, ...]:
    """Return the settings of attention. partial: See ``rope_settings``."""
    return (
        Setting("num_hidden_layers", LAYERS, "num_layers"),
        Setting("num_attention_heads", SIZE, "num_attention_heads"),
        Setting(
            "num_key_value_heads",
            OPTIONAL_SIZE,
            "num_query_groups",
            to_flag=lambda config: config.get("num_key_value_heads") or config["num_attention_heads"],
        ),
        Setting("head_dim", OPTIONAL_SIZE, "head_dim", to_flag=_head_dim),
        Setting("hidden_act", text, only="silu"),
        Setting("max_position_embeddings", SIZE, "max_position_embeddings", retrained=True),
        Setting("initializer_range", anything, from_flags=lambda settings: settings["init_std"]),
        Setting("rms_norm_eps", EPSILON, "layernorm_epsilon"),
        *rope_settings(partial),
        Setting("sliding_window", OPTIONAL_COUNT, written=False, refused=_unseen),
        Setting("use_sliding_window", true_or_false, written=False),
        Setting("layer_types", anything, written=False, refused=_layer_types),
        ATTENTION_DROPOUT,
        Setting(
            "router_jitter_noise", OPTIONAL_PROBABILITY, written=False, ignored="the router's inputs have no noise here"
        ),
    )


ATTENTION = attention_settings()
_WINDOW_KEYS = ("sliding_window", "use_sliding_window", "layer_types")


def with_windows(settings: tuple[Setting, ...], windows: tuple[Setting, ...]) -> tuple[Setting, ...]:
    """Return the settings of a class whose layers may have a window, in place of those that refuse one."""
    return (*(setting for setting in settings if setting.name not in _WINDOW_KEYS), *windows)


def _sliding(config: Json) -> tuple[bool, ...]:
    """Return for each layer of Qwen whether it has the window: those listed, or from ``max_window_layers`` on."""
    layers = config["num_hidden_layers"]
    if not config["use_sliding_window"]:
        return (False,) * layers
    return _listed_sliding(config) or tuple(number >= config["max_window_layers"] for number in range(layers))


def alternating(every: int, old_key: str, config: Json) -> tuple[bool, ...]:
    """Return for each layer whether it has the window: those listed, or all but every N-th, as ``old_key`` may say."""
    step = config.get(old_key) or every
    return _listed_sliding(config) or tuple((number + 1) % step > 0 for number in range(config["num_hidden_layers"]))


def _sliding_before(config: Json) -> tuple[bool, ...]:
    """Return for each layer of Qwen2-MoE whether it has the window: those listed, or every second one before N."""
    layers, end = config["num_hidden_layers"], config["max_window_layers"]
    if not config["use_sliding_window"]:
        return (False,) * layers
    return _listed_sliding(config) or tuple(number < end and number % 2 == 0 for number in range(layers))


def _unrotated(config: Json) -> tuple[bool, ...]:
    """Return for each layer of SmolLM3 whether it has no rotary positions: those listed with 0, or every N-th."""
    layers, rotated = config["num_hidden_layers"], config.get("no_rope_layers")
    if rotated is not None:
        return tuple(not own for own in rotated[:layers])
    return tuple((number + 1) % config["no_rope_layer_interval"] == 0 for number in range(layers))


def _sliding_unrotated(config: Json) -> tuple[bool, ...]:
    """Return for each layer of SmolLM3 whether it has the window: those listed, or those without rotary positions."""
    if not config["use_sliding_window"]:
        return (False,) * config["num_hidden_layers"]
    return _listed_sliding(config) or _unrotated(config)


def _listed_sliding(config: Json) -> tuple[bool, ...]:
    return tuple(kind == SLIDING for kind in config.get("layer_types") or ())


def windowed(settings: Settings) -> tuple[bool, ...]:
    """Return for each layer of a model whether it has a window; none if no layer has."""
    if not window_or_none(settings["window_size"]):
        return ()
    return windowed_or_all(settings["window_attn_skip_freq"], settings["num_layers"])[:-1]


def _window(settings: Settings) -> int | None:
    return window_or_none(settings["window_size"]) or None


def _kinds(settings: Settings) -> list[str] | None:
    return [SLIDING if own else FULL for own in windowed(settings)] or None


def every_kind(settings: Settings) -> list[str]:
    """Return the kind of each layer."""
    return _kinds(settings) or [FULL] * settings["num_layers"]


def _full_lead(settings: Settings) -> int | None:
    """Return the number of full layers before those with a window; None without, or with full layers after one."""
    layers = windowed(settings)
    full = layers.count(False)
    return full if layers and all(layers[full:]) else None


def wrong_list(config: Json) -> str:
    """Return why ``layer_types`` is not a list of the two kinds of layers, "" if it is one, or is left out."""
    kinds, layers = config.get("layer_types") or [], config["num_hidden_layers"]
    if not kinds or (isinstance(kinds, list) and len(kinds) == layers and all(kind in LAYER_KINDS for kind in kinds)):
        return ""
    return f"and only a list of {FULL} and {SLIDING} for its {layers} layers is supported"


def _wrong_kinds(config: Json) -> str:
    unused = SLIDING in (config.get("layer_types") or []) and not config.get("use_sliding_window", True)
    return wrong_list(config) or ("but use_sliding_window is not true" if unused else "")


def _wrong_rotated(config: Json) -> str:
    rotated, layers = config.get("no_rope_layers"), config["num_hidden_layers"]
    whole = isinstance(rotated, list) and len(rotated) >= layers and all(own in (0, 1) for own in rotated)
    return "" if rotated is None or whole else f"and only a list of 1 (rope) and 0 for its {layers} layers is supported"


def _sizeless(config: Json) -> str:
    lacks = config["use_sliding_window"] and not config["sliding_window"]
    return "but sliding_window does not say how many keys" if lacks else ""


def _mixed_kinds(config: Json) -> str:
    kind = SLIDING if config["sliding_window"] and config.get("use_sliding_window", True) else FULL
    return "" if set(config.get("layer_types") or []) <= {kind} else "but the layers of this class are all alike"


Sliding = Callable[[Json], tuple[bool, ...]]  # config.json -> for each layer whether it has the window


def of_both(
    sliding: Sliding, name: str, legal: Check, from_flags: Callable[[Settings], Any], **more: Any
) -> tuple[Setting, Setting]:
    """Return the settings of a key that a change of the window, or of its layers, changes."""

    def window(config: Json) -> str:
        return window_text(config["sliding_window"] if any(sliding(config)) else None)

    def skipped(config: Json) -> str:
        layers = sliding(config)
        return skip_text((*layers, layers[-1])) if any(layers) else NO_FULL

    return (
        Setting(name, legal, "window_size", to_flag=window, from_flags=from_flags, **more),
        Setting(name, legal, "window_attn_skip_freq", to_flag=skipped, from_flags=from_flags, **more),
    )


def _windows_in_use(sliding: Sliding) -> tuple[Setting, ...]:
    """Return the settings of a window that ``use_sliding_window`` turns on; without it some classes write a 0."""
    return (
        *of_both(sliding, "sliding_window", OPTIONAL_COUNT, _window),
        *of_both(
            sliding,
            "use_sliding_window",
            true_or_false,
            lambda settings: bool(windowed(settings)),
            implied=False,
            refused=_sizeless,
        ),
    )


def _some_windows(sliding: Sliding) -> tuple[Setting, ...]:
    """Return the settings of a window in some layers."""
    kinds = of_both(sliding, "layer_types", anything, _kinds, implied=None, refused=_wrong_kinds)
    return (*_windows_in_use(sliding), *kinds)


SAME_WINDOW = (
    Setting(
        "sliding_window",
        OPTIONAL_SIZE,
        "window_size",
        to_flag=lambda config: window_text(config["sliding_window"]),
        from_flags=_window,
    ),
    Setting("layer_types", anything, written=False, refused=_mixed_kinds),
)
QWEN_WINDOWS = (*_some_windows(_sliding), *of_both(_sliding, "max_window_layers", COUNT, _full_lead, implied=None))
QWEN2_MOE_WINDOWS = (*_some_windows(_sliding_before), Setting("max_window_layers", COUNT, written=False))
QWEN3_MOE_WINDOWS = (
    *_windows_in_use(lambda config: (bool(config["use_sliding_window"]),) * config["num_hidden_layers"]),
    Setting("layer_types", anything, written=False, refused=_mixed_kinds),
)
SMOLLM3_WINDOWS = _some_windows(_sliding_unrotated)
SKIPPED_ROPE = (
    Setting(
        "no_rope_layers",
        anything,
        "no_rope_freq",
        to_flag=lambda config: no_rope_text(tuple(not own for own in (*_unrotated(config), _unrotated(config)[-1]))),
        from_flags=lambda s: [int(own) for own in roped_or_all(s["no_rope_freq"], s["num_layers"])[:-1]],
        refused=_wrong_rotated,
    ),
    Setting("no_rope_layer_interval", SIZE, written=False),
)
_alternating = partial(alternating, 2, "")  # of GPT-OSS
UNUSED_WINDOW = 128  # the class needs a number if no layer has a window, too
ALTERNATING_WINDOWS = (
    *of_both(_alternating, "sliding_window", SIZE, lambda settings: _window(settings) or UNUSED_WINDOW),
    *of_both(_alternating, "layer_types", anything, every_kind, refused=wrong_list),
)
OUTPUT = (
    Setting(
        "tie_word_embeddings",
        true_or_false,
        "untie_embeddings_and_output_weights",
        to_flag=lambda config: not config["tie_word_embeddings"],
        from_flags=lambda settings: not settings["untie_embeddings_and_output_weights"],
    ),
    Setting("dtype", anything, from_flags=lambda settings: settings["dtype"]),
)
DECODER = (*VOCABULARY, DENSE_WIDTH, *ATTENTION, *OUTPUT)
BIASES = Setting("use_bias", true_or_false, "add_bias_linear", to_flag=lambda config: bool(config["use_bias"]))
LLAMA_BIASES = (
    Setting("attention_bias", true_or_false, "add_bias_linear", refused=_biases),
    Setting("mlp_bias", true_or_false, from_flags=lambda settings: settings["add_bias_linear"]),
)
NO_QKV_CLIP = Setting("clip_qkv", anything, written=False, refused=_clipped)
MULTIPLIERS = (
    Setting("embedding_multiplier", POSITIVE, "embedding_multiplier"),
    Setting(
        "attention_multiplier",
        POSITIVE,
        "softmax_scale",
        from_flags=lambda settings: settings["softmax_scale"] or settings["head_dim"] ** -0.5,
    ),
    Setting("residual_multiplier", POSITIVE, "residual_multiplier"),
    Setting("logits_scaling", POSITIVE, "logits_scaling"),
)
CLAMPED = (
    Setting("attention_bias", true_or_false, only=True),
    Setting("swiglu_limit", POSITIVE, only=7.0, implied=7.0),
    Setting("swiglu_alpha", POSITIVE, only=1.702, implied=1.702),
)
NO_ATTENTION_BIAS = Setting("attention_bias", true_or_false, only=False)
MTP = Setting(
    "num_nextn_predict_layers",
    OPTIONAL_COUNT,
    "mtp_depth",
    implied=0,
    retrained=True,
    to_flag=lambda config: config.get("num_nextn_predict_layers") or 0,
    refused=lambda config: (
        "but at most one block is supported" if (config.get("num_nextn_predict_layers") or 0) > 1 else ""
    ),
)


NORM_TOPK_PROB = Setting(
    "norm_topk_prob",
    true_or_false,
    "norm_topk_prob",
    to_flag=lambda config: "on" if config["norm_topk_prob"] else "off",
    from_flags=lambda settings: settings["norm_topk_prob"] == "on",
)


def _sparse_layers(config: Json) -> list[int]:
    """Return the numbers of the layers with experts: every ``decoder_sparse_step``-th that is not listed as dense."""
    dense, step = config.get("mlp_only_layers") or [], config["decoder_sparse_step"]
    return [n for n in range(config["num_hidden_layers"]) if n not in dense and (n + 1) % step == 0]


def _dense_layers(settings: Settings) -> list[int]:
    moe = moe_layers(settings)
    return [n for n in range(settings["num_layers"]) if n not in moe]


def moe_layers(settings: Settings) -> tuple[int, ...]:
    """Return the numbers of a model's layers with experts."""
    pattern = to_pattern(settings["moe_layer_freq"])
    return layers_of(pattern, settings["num_layers"], settings["first_k_dense"])


def _ernie_layers(config: Json) -> list[int]:
    """Return the numbers of the layers with experts: every ``moe_layer_interval``-th from the first to the last one."""
    first, last, step = config["moe_layer_start_index"], config["moe_layer_end_index"], config["moe_layer_interval"]
    end = config["num_hidden_layers"] if last == -1 else min(last + 1, config["num_hidden_layers"])
    return [n for n in range(first, end) if (n + 1) % step == 0]


def _expert_layers(
    name: str, legal: Check, layers: Callable[[Json], list[int]], from_flags: Callable[[Settings], Any]
) -> tuple[Setting, Setting]:
    """Return the settings of a key that places the experts: leading dense layers and pattern. layers: their numbers."""

    def flag(number: int) -> Callable[[Json], Any]:
        return lambda config: flags_of(layers(config), config["num_hidden_layers"])[number]

    def refused(config: Json) -> str:
        return "" if layers(config) else "but at least one layer must have experts"

    return (
        Setting(name, legal, "first_k_dense", to_flag=flag(0), from_flags=from_flags, refused=refused),
        Setting(name, legal, "moe_layer_freq", written=False, to_flag=flag(1)),
    )


def shared_width(settings: Settings) -> int:
    """Return the intermediate features of a model's shared experts."""
    width = settings["moe_shared_expert_intermediate_size"] or (
        settings["moe_shared_experts"] * settings["moe_ffn_hidden_size"]
    )
    return int(width)


ERNIE_EXPERTS = (
    Setting("moe_num_experts", SIZE, "num_experts"),
    Setting("moe_k", SIZE, "moe_router_topk"),
    Setting("moe_intermediate_size", SIZE, "moe_ffn_hidden_size"),
    Setting(
        "moe_num_shared_experts",
        OPTIONAL_COUNT,
        "moe_shared_experts",
        to_flag=lambda config: config["moe_num_shared_experts"] or 0,
        from_flags=lambda settings: shared_width(settings) // settings["moe_ffn_hidden_size"],
    ),
    *_expert_layers("moe_layer_start_index", COUNT, _ernie_layers, lambda settings: moe_layers(settings)[0]),
    Setting("moe_layer_end_index", whole(-1), from_flags=lambda settings: moe_layers(settings)[-1]),
    Setting("moe_layer_interval", SIZE, from_flags=lambda settings: ernie_interval(moe_layers(settings))),
    Setting("moe_norm_min", EPSILON, only=1e-12, written=False),
)
MIXTRAL_EXPERTS = (
    Setting("intermediate_size", SIZE, "moe_ffn_hidden_size"),
    Setting("intermediate_size", SIZE, "ffn_hidden_size", written=False),
    Setting("num_experts_per_tok", SIZE, "moe_router_topk"),
    Setting("num_local_experts", SIZE, "num_experts"),
)
OLMO_EXPERTS = (
    *MIXTRAL_EXPERTS[:2],
    Setting("num_experts_per_tok", SIZE, "moe_router_topk"),
    Setting("num_experts", SIZE, "num_experts"),
    NORM_TOPK_PROB,
)
QWEN_SHARED = (
    Setting("shared_expert_intermediate_size", SIZE, "moe_shared_expert_intermediate_size", from_flags=shared_width),
    Setting("qkv_bias", true_or_false, "add_qkv_bias", to_flag=lambda config: bool(config["qkv_bias"])),
)
QWEN_EXPERTS = (
    Setting("num_experts_per_tok", SIZE, "moe_router_topk"),
    Setting(
        "num_experts",
        SIZE,
        "num_experts",
        to_flag=lambda config: config["num_experts"] if "num_experts" in config else config["num_local_experts"],
    ),
    Setting("num_local_experts", OPTIONAL_SIZE, written=False),
    Setting("moe_intermediate_size", SIZE, "moe_ffn_hidden_size"),
    NORM_TOPK_PROB,
    Setting("decoder_sparse_step", SIZE, from_flags=lambda settings: 1),
    *_expert_layers("mlp_only_layers", layer_numbers, _sparse_layers, _dense_layers),
)
