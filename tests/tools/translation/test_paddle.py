"""Every argument of PaddleNLP, PaddleFormers, ERNIE 4.5 and Fleet has a verdict and a reason; values decide."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from megapar.arguments import parse
from megapar.config.read import normal
from megapar.tools.translation import of_paddle, open_values
from megapar.tools.translation.source import read_source
from megapar.tools.translation.translated import Translated, equivalent, implicit_defaults, translate
from megapar.tools.translation.verdict import OTHER, UNNECESSARY

ROOT = Path(__file__).parents[3]


def first(line: str) -> Translated:
    return translate(shlex.split(line), "paddle")[0]


def added(line: str) -> dict[str, Translated]:
    return {item.flag[2:]: item for item in implicit_defaults(translate(shlex.split(line), "paddle"), "paddle")}


def test_what_paddle_means_where_a_line_says_nothing() -> None:
    items = added("--max_steps 10 --max_seq_length 64 --input_dir data --sharding stage1")
    assert " ".join(item.ours for item in items.values() if item.ours) == (
        "--adam-beta2 0.999 --weight-decay 0.0 --lr 5e-05 --lr-decay-style linear --min-lr 1e-05 --dtype fp32 "
        "--micro-batch-size 8 --seed 42 --split 949,50,1 --eval-interval 0 --log-interval 500"
    )


def test_fp16_scales_as_paddle_s_scaler() -> None:
    items = added("--fp16 true --fp16_opt_level O2")
    assert items["scale-loss"].ours == "--initial-loss-scale 32768"
    assert items["incr-every-n-steps"].ours == "--loss-scale-window 2000 --hysteresis 1"
    assert items.keys().isdisjoint({"bf16", "fp16-opt-level"})
    assert added("--bf16 true")["fp16-opt-level"].verdict == OTHER


def test_a_nested_key_counts_as_said() -> None:
    assert added("--trainer_args.adam_beta2 0.95 --trainer_args.bf16 true").keys().isdisjoint({"adam-beta2", "bf16"})
    assert first("--trainer_args.warmup_ratio 0.1 --trainer_args.max_steps 50").ours == "--lr-warmup-iters 5"


def command(tmp_path: Path, text: str, name: str = "run.yaml") -> list[str]:
    """The trainer's flags for a file."""
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    (line,) = read_source(path, {}, ()).lines
    items = [*translate(line.arguments, "paddle"), *implicit_defaults(translate(line.arguments, "paddle"), "paddle")]
    return [word for flags in equivalent(items)[1] for word in shlex.split(flags)]


# The keys of ERNIE 4.5's published recipes and model configurations (PaddlePaddle/ERNIE, examples/pre-training,
# 2985deca) that configs/ say, too.
RECIPES = {
    "ernie-4.5-300b-a47b": (
        2016,
        """
model_args: {max_seq_length: 4096, base_seq_length: 4096, moe_use_aux_free_update_coef: 0.001, model_config:
  {multi_token_pred_depth: 1, moe_use_aux_free: true, moe_gate: top2_fused}}
config: {hidden_size: 8192, intermediate_size: 28672, num_attention_heads: 64, num_key_value_heads: 8,
  num_hidden_layers: 56, remove_tail_layer: 2, rms_norm_eps: 1e-05, rope_theta: 10000, initializer_range: 0.00482174,
  moe_num_experts: 64, moe_num_shared_experts: 0, moe_layer_start_index: 3, moe_intermediate_size: 3584, moe_k: 8,
  moe_aux_loss_lambda: 1e-5, moe_layer_interval: 1, hidden_act: silu, use_rmsnorm: true, use_bias: false,
  vocab_size: 103424}
trainer_args: {adam_beta1: 0.9, adam_beta2: 0.95, adam_epsilon: 1e-8, learning_rate: 2.2e-4, min_lr: 2.2e-5,
  gradient_accumulation_steps: 90, per_device_train_batch_size: 1, lr_scheduler: wsd:231084, decay_function: 1-sqrt,
  max_grad_norm: 1.0, weight_decay: 0.1, warmup_steps: 200, bf16: True, fp16_opt_level: "O2",
  pipeline_parallel_degree: 12, tensor_parallel_degree: 1, expert_parallel_degree: 8, sharding: "stage1",
  sharding_parallel_degree: 168, sharding_parallel_config: split_param, max_steps: 256760, seed: 666, moe_group: ep}
""",
    ),
    "ernie-4.5-21b-a3b": (
        8,
        """
model_args: {max_seq_length: 4096, moe_use_aux_free_update_coef: 0.001, model_config: {multi_token_pred_depth: 1,
  num_hidden_layers: 28, remove_tail_layer: 0}}
config: {hidden_size: 2560, intermediate_size: 12288, num_attention_heads: 20, num_key_value_heads: 4,
  rms_norm_eps: 1e-05, rope_theta: 10000, initializer_range: 0.00482174, tie_word_embeddings: true, moe_num_experts: 64,
  moe_num_shared_experts: 2, moe_layer_start_index: 1, moe_intermediate_size: 1536, moe_k: 6,
  moe_aux_loss_lambda: 1e-5, moe_orthogonal_loss_lambda: 1e-3, moe_use_aux_free: true, moe_layer_interval: 1,
  vocab_size: 103424}
trainer_args: {adam_beta1: 0.9, adam_beta2: 0.95, adam_epsilon: 1e-8, learning_rate: 3.14e-4, min_lr: 3.14e-6,
  global_batch_size: 128, gradient_accumulation_steps: 8, per_device_train_batch_size: 2, lr_scheduler: wsd:603000,
  decay_function: 1-sqrt, max_grad_norm: 1.0, weight_decay: 0.1, warmup_steps: 2000, bf16: True, fp16_opt_level: "O2",
  expert_parallel_degree: 8, sharding: "stage1", sharding_parallel_degree: 8, offload_optim: true, max_steps: 670000,
  moe_group: ep}
""",
    ),
}
# What the files of configs/ may say otherwise: how long a run is and where it ends is not in the recipes (max_steps is
# 100 there), and what their headers name as differences.
FREE = """
    train_iters lr_decay_iters lr_wsd_decay_iters lr_decay_style lr_wsd_decay_style save save_interval eval_interval
    log_interval data_path config recompute_granularity recompute_interval pp_seg_method rank_order
"""


@pytest.mark.parametrize("name", RECIPES)
def test_a_published_recipe_becomes_what_the_preset_says(name: str, tmp_path: Path) -> None:
    ranks, text = RECIPES[name]
    environment = {"WORLD_SIZE": str(ranks)}
    words = command(tmp_path, text)
    ours = set(yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text(encoding="utf-8"))) - set(FREE.split())
    config = parse("moe", ["--config", str(ROOT / "configs" / f"{name}.yaml"), "--data-path", "mock"], environment)
    translated = parse("moe", [*words, "--data-path", "mock"], environment)
    there, here = config.values(), translated.values()
    asked = {key: (there.get(key), here.get(key)) for key in sorted(ours)}
    assert asked.pop("init_std")[0] == pytest.approx(here["init_std"], rel=1e-4)  # the preset has four digits of it
    assert {key: both for key, both in asked.items() if both[0] != both[1]} == {}
    assert len(ours) > 28


# The four dictionaries of the pull request that made Fleet's sharding configurable, as YAML.
SEEDS = {
    "sharding-32": "sharding_degree: 32",
    "sharding-8-dp-4": "{sharding_degree: 8, hybrid_dp: True, gradient_merge_acc_step: 4}",
    "mp-8-sharding-4": "{sharding_degree: 4, mp_degree: 8, hybrid_dp: False}",
    "mp-2-sharding-4-dp-4": "{sharding_degree: 4, mp_degree: 2, hybrid_dp: True, segment_anchors: None}",
}


@pytest.mark.parametrize("name", SEEDS)
def test_fleet_s_dictionaries_become_the_layouts_of_the_presets(name: str, tmp_path: Path) -> None:
    inner = SEEDS[name] if SEEDS[name].startswith("{") else f"{{{SEEDS[name]}}}"
    sizes = "hidden_size: 64\nnum_attention_heads: 8\nmax_steps: 10\nmax_seq_length: 64\n"
    words = command(tmp_path, f"sharding: True\nsharding_configs: {inner}\n{sizes}")
    environment = {"WORLD_SIZE": "32"}
    here = parse("moe", [*words, "--data-path", "mock"], environment).values()
    config = ROOT / "configs" / f"{name}.yaml"
    there = parse("ernie", ["--config", str(config), "--data-path", "mock"], environment).values()
    for key in ("sharding_degree", "mp_degree", "pp_degree", "hybrid_dp", "gradient_merge_acc_step"):
        assert here[key] == there[key], key
    assert here["sharding_stage"] == 3


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("--model_type ernie --hidden_size 8", "ernie"),
        ("--model_name_or_path ernie-3.0-base-zh", "ernie"),
        ("--model_name_or_path model_configs/ERNIE-4p5-300B-A47B/ --use_moe true", "moe"),
        ("--model_name_or_path baidu/ERNIE-4.5-0.3B-PT", "moe"),
        ("--model_name_or_path meta-llama/Llama-2-7b", "moe"),
        ("--model_name_or_path bert-base", ""),
    ],
)
def test_which_trainer_a_model_is_for(line: str, kind: str) -> None:
    words = shlex.split(line)
    given = {normal(name[2:]): value for name, value in zip(words[::2], words[1::2], strict=True)}
    assert of_paddle.trainer_kind(given) == kind


def test_values_of_text_and_image_that_are_alike_are_one() -> None:
    assert first("--moe_layer_start_index 3 3").ours == "--first-k-dense 3"
    assert first("--moe_intermediate_size 1536 1536").ours == "--moe-ffn-hidden-size 1536"
    items = [
        *translate(shlex.split("--moe_num_experts 64 64 --moe_gate_lr_ratio 0.5 --moe_layer_start_index 1 1"), "paddle")
    ]
    items += implicit_defaults(items, "paddle")
    assert not [item.reason for item in items if "is not a number" in item.reason]


@pytest.mark.parametrize(("start", "dense"), [("1", True), ("1 1", True), ("0", False), ("-1", False), ("$S", False)])
def test_a_rate_of_gates_has_no_effect_only_where_layer_0_is_known_to_be_dense(start: str, dense: bool) -> None:
    words = ["--moe_gate_lr_ratio", "0.1", "--moe_layer_start_index", *start.split()]
    marked = [open_values.mark(word) if word.startswith("$") else word for word in words]
    assert (translate(marked, "paddle")[0].verdict == UNNECESSARY) == dense
