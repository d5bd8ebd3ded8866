"""The list of published architectures: what a class writes is read again, and its parts agree with each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megapar.config.published import flags_of
from megapar.model.architectures import ARCHITECTURES, model_of_architecture, not_exportable, own_architecture
from megapar.model.decoder import limits
from megapar.model.rope import Rope
from megapar.model.rope_scaling import RopeScaling
from megapar.model.sizes import ModelSizes
from megapar.model.spec import spec_of
from megapar.moe.sizes import MoeSizes
from megapar.schema.flag import to_flags
from tests.model.small import DENSE, ERNIE, GEMMA, LATENT, MOE, MULTIPLIED, OLMO2

GROUPED = MoeSizes(32, 16, num_experts=8, topk=3, groups=4, group_topk=2, group_score_topk=2, scaling=2.5)
SIGMOID = replace(GROUPED, score="sigmoid", shared_experts=1)
LEADING: dict[str, Any] = {"num_layers": 3, "first_k_dense": 1, "attention_latent_norm_epsilon": 1e-6}
PLAIN = MoeSizes(32, 16, num_experts=4, topk=3)
ALTERNATING: dict[str, Any] = {"num_layers": 4, "window_size": 5, "window_attn_skip_freq": "2"}
LONGER = RopeScaling(rope_type="linear", factor=3.0)
LATER: dict[str, Any] = {"num_layers": 3, "window_size": 5, "window_attn_skip_freq": "[0,1,1]"}
SIZES: Mapping[str, ModelSizes] = {
    "Ernie4_5ForCausalLM": replace(DENSE, add_bias_linear=True, head_dim=12, mtp_depth=1),
    "Ernie4_5_MoeForCausalLM": replace(MOE, tie_embeddings=True, rope_theta=5e5),
    "GraniteForCausalLM": replace(DENSE, add_bias_linear=True, **MULTIPLIED),
    "LlamaForCausalLM": replace(DENSE, add_bias_linear=True, head_dim=12, rope_theta=5e5),
    "MistralForCausalLM": replace(DENSE, tie_embeddings=False, window_size=5),
    "MixtralForCausalLM": replace(MOE, first_k_dense=0, moe=PLAIN, ffn_hidden_size=16, window_size=5),
    "Olmo2ForCausalLM": replace(DENSE, head_dim=12, **OLMO2),
    "Olmo3ForCausalLM": replace(DENSE, **ALTERNATING, **OLMO2, window_rope=Rope(100.0), rope_scaling=LONGER),
    "Gemma3ForCausalLM": replace(DENSE, **ALTERNATING, **GEMMA, head_dim=12, window_rope=Rope(100.0, LONGER)),
    "SmolLM3ForCausalLM": replace(DENSE, **LATER, no_rope_freq="2", tie_embeddings=False),
    "Qwen2ForCausalLM": replace(DENSE, **ALTERNATING, add_qkv_bias=True, layernorm_epsilon=1e-6),
    "Qwen3ForCausalLM": replace(DENSE, **LATER, qk_norm=True, head_dim=12),
    "Qwen2MoeForCausalLM": replace(
        *(MOE,),
        **{"first_k_dense": 0, "moe_pattern": (0, 1, 0), "add_qkv_bias": True, **LATER},
        moe=MoeSizes(32, 16, num_experts=4, topk=3, shared_ffn=24, shared_gate=True, norm_topk_prob="off"),
    ),
    "OlmoeForCausalLM": replace(
        *(MOE,),
        **{"first_k_dense": 0, "ffn_hidden_size": 16, "qk_norm": True, "qk_norm_scope": "width"},
        moe=replace(PLAIN, norm_topk_prob="off"),
    ),
    "GraniteMoeForCausalLM": replace(
        *(MOE,),
        **{"first_k_dense": 0, "ffn_hidden_size": 16, "logits_scaling": 4.0, "softmax_scale": 0.3},
        moe=PLAIN,
    ),
    "GptOssForCausalLM": replace(
        *(MOE,),
        **{**ALTERNATING, "num_layers": 3, "first_k_dense": 0, "ffn_hidden_size": 16, "head_dim": 12},
        **{"attention_sinks": True, "activation": "clamped_swiglu", "add_bias_linear": True},
        moe=replace(PLAIN, activation="clamped_swiglu", add_bias=True, linear_bias=True),
    ),
    "Qwen3MoeForCausalLM": replace(
        MOE, window_size=5, qk_norm=True, first_k_dense=2, moe=PLAIN, layernorm_epsilon=1e-6
    ),
    "DeepseekV2ForCausalLM": replace(
        LATENT, **LEADING, moe=replace(GROUPED, group_score_topk=1, norm_topk_prob="off", shared_experts=2)
    ),
    "DeepseekV3ForCausalLM": replace(LATENT, **LEADING, moe=SIGMOID, mtp_depth=1, mtp_block="layer"),
    "Glm4MoeForCausalLM": replace(MOE, rotary_percent=0.5, add_qkv_bias=True, moe=SIGMOID, mtp_block="layer"),
    "ErnieForPreTraining": replace(ERNIE, hidden_dropout=0.1),
    "ErnieForMaskedLM": replace(ERNIE, sop=False, type_vocab_size=2),
}


def settings_of(name: str) -> dict[str, Any]:
    sizes = SIZES[name]
    return {**spec_of(sizes).published.settings(sizes), "dtype": "float32"}


@pytest.mark.parametrize("name", SIZES)
def test_the_flags_of_a_written_config_are_the_model_s(name: str) -> None:
    settings = settings_of(name)
    kind, flags = flags_of(ARCHITECTURES[name].config(settings))
    assert kind == spec_of(SIZES[name]).kind
    assert flags == {flag: settings[flag] for flag in flags}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_entry_agrees_with_itself(name: str) -> None:
    architecture = ARCHITECTURES[name]
    keys = {one.name for one in architecture.settings}
    assert set(architecture.defaults) <= keys
    fixed = {read for limit in architecture.limits for read in limit.reads}
    free = {"hidden_dropout"} | {flag for flag in architecture.flags if architecture.sets(flag)}
    assert set(architecture.flags) - free <= fixed, "a flag that the class fixes is checked at the export"
    own = SimpleNamespace(**settings_of(name))
    assert all(limit.within(own) for limit in architecture.limits)
    if architecture.trained_as:
        assert model_of_architecture(architecture.trained_as) is model_of_architecture(name)


# Sizes that no weight of a published model depends on, and those that mean something beside another one only.
NOT_PUBLISHED = (
    *("seq_length", "init_std", "depth_scaled_init", "use_flash_attn", "moe_model_type", "moe_drop_policy"),
    *("moe_capacity_factor", "moe_min_capacity", "moe_capacity_scope"),
)
BESIDE = {
    **dict.fromkeys((*to_flags(MOE.moe), "moe_layer_freq", "moe_layer_ffn_hidden_sizes"), "num_experts"),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim"), "multi_latent_attention"),
    **dict.fromkeys(("v_head_dim", "attention_latent_norm_epsilon"), "multi_latent_attention"),
    **{"num_experts": "", "first_k_dense": "num_experts", "mtp_block": "mtp_depth", "head_dim": "qk_head_dim"},
}


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if not name.startswith("ErnieFor")])
def test_no_size_of_a_decoder_is_lost_in_an_export(name: str) -> None:
    """A size is a key of config.json, or its other values are refused."""
    architecture = ARCHITECTURES[name]
    limited = {read for limit in (*architecture.limits, *architecture.specific) for read in limit.reads}
    kept = {*limited, *architecture.flags, *architecture.fixed_sizes, *(one.flag for one in architecture.settings)}
    sizes = {*to_flags(MOE), *to_flags(MOE.moe)} - {*NOT_PUBLISHED}
    assert {size for size in sizes if size not in kept and BESIDE.get(size) not in kept} == set()


def test_windows_are_written_as_their_classes_read_them() -> None:
    keys = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
    kinds = {True: "sliding_attention", False: "full_attention"}
    for name, windowed, lead in (("Qwen2", (1, 0, 1, 0), None), ("Qwen3", (0, 1, 1), 1)):
        config = ARCHITECTURES[f"{name}ForCausalLM"].config(settings_of(f"{name}ForCausalLM"))
        assert [config.get(key) for key in keys] == [True, 5, lead, [kinds[bool(own)] for own in windowed]]
    gpt_oss = ARCHITECTURES["GptOssForCausalLM"].config(settings_of("GptOssForCausalLM"))
    assert gpt_oss["layer_types"] == ["sliding_attention", "full_attention", "sliding_attention"]
    for name in ("Mistral", "Mixtral"):
        config = ARCHITECTURES[f"{name}ForCausalLM"].config(settings_of(f"{name}ForCausalLM"))
        assert [config.get(key) for key in keys] == [None, 5, None, None]


@pytest.mark.parametrize(
    ("keys", "window", "skipped"),
    [
        ({}, "none", "0"),
        ({"sliding_window": 5}, "none", "0"),
        ({"use_sliding_window": True, "sliding_window": 5}, "none", "0"),  # max_window_layers is 28
        ({"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}, "5", "0"),
        ({"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}, "5", "[0,1,1]"),
        ({"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3}, "none", "0"),
    ],
)
def test_windows_are_read_as_by_their_classes(keys: dict[str, Any], window: str, skipped: str) -> None:
    """A folder's keys that say nothing of a window stay as they are."""
    architecture, settings = ARCHITECTURES["Qwen3ForCausalLM"], settings_of("Qwen3ForCausalLM")
    plain = architecture.config({**settings, "window_size": "none", "window_attn_skip_freq": "0"})
    flags = flags_of({**plain, **keys})[1]
    assert (flags["window_size"], flags["window_attn_skip_freq"]) == (window, skipped)
    assert architecture.continued({**plain, **keys}, {**settings, **flags}) == {**plain, **keys}


def test_a_model_with_windows_is_saved_as_a_class_that_has_them() -> None:
    for sizes, name, reason in (
        (replace(DENSE, window_size=5), "MistralForCausalLM", None),
        (replace(DENSE, **ALTERNATING), "MistralForCausalLM", "all layers of this class have the window"),
        (replace(DENSE, **ALTERNATING, qk_norm=True), "Qwen3ForCausalLM", None),
        (replace(MOE, first_k_dense=0, moe=PLAIN, ffn_hidden_size=16, window_size=5), "MixtralForCausalLM", None),
        (replace(MOE, qk_norm=True, moe=PLAIN, window_size=5), "Qwen3MoeForCausalLM", None),
        (replace(MOE, rotary_percent=0.5, moe=SIGMOID, window_size=5), "Glm4MoeForCausalLM", "no layer of this class"),
    ):
        own, why = own_architecture(sizes), not_exportable(sizes)
        assert own is not None
        assert own.name == name
        assert why is None if reason is None else reason in str(why)


def test_weights_that_were_quantized_are_written_as_numbers() -> None:
    architecture, settings = ARCHITECTURES["LlamaForCausalLM"], settings_of("LlamaForCausalLM")
    plain = architecture.config(settings)
    quantized = {**plain, "quantization_config": {"quant_method": "fp8"}}
    assert architecture.continued(quantized, {**settings, "dtype": "bfloat16"}) == {**plain, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("scale", "fits"), [(0.0, True), (1.0, True), (0.0625, True), (1.2, False), (2.0, False), (1e-200, False)]
)
def test_a_query_scalar_is_a_whole_number(scale: float, fits: bool) -> None:
    assert limits.QUERY_SCALAR.within(SimpleNamespace(softmax_scale=scale)) == fits


def test_dense_layers_lead_however_the_flags_say_so() -> None:
    assert limits.LEADING_DENSE.within(SimpleNamespace(moe_layer_freq="2", num_layers=3, first_k_dense=1))
    assert not limits.LEADING_DENSE.within(SimpleNamespace(moe_layer_freq="2", num_layers=5, first_k_dense=1))
