"""Every argument of PaddleNLP, PaddleFormers, ERNIE 4.5 and Fleet has a verdict and a reason; values decide."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from megapar.arguments import parse
from megapar.config.read import normal, spellings
from megapar.tools.translate import translate_line
from megapar.tools.translation import paddle
from megapar.tools.translation.line import take_apart
from megapar.tools.translation.source import read_source
from megapar.tools.translation.table import DEFAULTS, FOREIGN
from megapar.tools.translation.translated import Translated, equivalent, implicit_defaults, translate
from megapar.tools.translation.verdict import (
    ANOTHER,
    IMPLIED,
    LEFT,
    OTHER,
    RENAMED,
    SAME,
    UNKNOWN,
    UNNECESSARY,
    UNSUPPORTED,
    VERDICTS,
)
from tests.tools.translation.tables import FOLDER, declared, differing, values_of

ROOT = Path(__file__).parents[3]
TABLES = {"paddlenlp": 130, "paddleformers": 450, "ernie_4_5": 215, "paddle_fleet": 150}


def first(line: str) -> Translated:
    return translate(shlex.split(line), "paddle")[0]


def added(line: str) -> dict[str, Translated]:
    return {item.flag[2:]: item for item in implicit_defaults(translate(shlex.split(line), "paddle"), "paddle")}


@pytest.mark.parametrize("table", TABLES)
def test_the_table_is_a_whole_one_and_says_where_it_is_from(table: str) -> None:
    rows = declared(table)
    assert len(rows) >= TABLES[table]
    assert [row.name for row in rows] == sorted({row.name for row in rows})
    assert {row.kind for row in rows} == {"value"}
    assert (FOLDER / f"{table}.tsv").read_text(encoding="utf-8").startswith("# PaddlePaddle/")


@pytest.mark.parametrize("table", TABLES)
def test_no_argument_is_without_verdict_and_reason(table: str) -> None:
    bad = []
    for row in declared(table):
        for value in ("true", "false", *values_of(row)):
            (item,) = translate(row.words(value), "paddle")
            written = item.ours if item.verdict in (SAME, RENAMED) else item.reason
            if item.verdict not in VERDICTS or item.verdict == UNKNOWN or not written:
                bad.append((row.name, value, item))
    assert not bad


@pytest.mark.parametrize("table", TABLES)
def test_a_row_stands_for_an_argument_that_no_flag_is(table: str) -> None:
    known = set(FOREIGN["paddle"]) | set(spellings())
    names = [normal(row.name) for row in declared(table)]
    assert [name for name in names if name not in known and name.rpartition(".")[2] not in known] == []


# Keys of models' own configurations, in Hugging Face's words.
OF_MODELS = {
    "first-k-dense-replace",
    "n-shared-experts",
    "norm-topk-prob",
    "num-experts",
    "routed-scaling-factor",
    "scoring-func",
}


def test_every_row_is_of_an_argument_that_there_is() -> None:
    names = {normal(row.name) for table in TABLES for row in declared(table)}
    parts = {name.rpartition(".")[2] for name in names}
    assert set(paddle.ROWS) - names - parts == OF_MODELS


def test_reasons_are_sentences() -> None:
    reasons = {row.reason for row in paddle.ROWS.values() if row.reason}
    assert not [reason for reason in reasons if len(reason) < 8 or reason.endswith(".")]
    assert len(reasons) > 130


WSD = "--lr-decay-style wsd --lr-wsd-decay-iters 100"


@pytest.mark.parametrize(
    ("line", "verdict", "ours"),
    [
        ("--tensor_parallel_degree 2", RENAMED, "--mp-degree 2"),
        ("--tensor_parallel_degree -1", UNNECESSARY, ""),
        ("--virtual_pp_degree 2", RENAMED, "--vpp-degree 2 --pp-schedule interleaved"),
        ("--sharding stage2", RENAMED, "--sharding-stage 2"),
        ("--sharding 'stage1 offload'", RENAMED, "--sharding-stage 1 --optimizer-offload"),
        ("--sharding true", RENAMED, "--sharding-stage 3"),
        ("--sharding stage9", LEFT, ""),
        ("--sharding_parallel_degree 8", RENAMED, "--sharding-degree 8"),
        ("--sharding_parallel_degree -1", UNNECESSARY, ""),
        ("--sharding_group_size 8", RENAMED, "--sharding-degree 8"),
        ("--sep_parallel_degree 4", RENAMED, "--cp-degree 4 --context-parallel-algo ulysses_cp_algo"),
        ("--data_parallel_degree 4", RENAMED, "--hybrid-dp"),
        ("--sequence_parallel 1 --tensor_parallel_degree 2", RENAMED, "--sequence-parallel"),
        ("--sequence_parallel 1", UNNECESSARY, ""),
        ("--max_steps -1", LEFT, ""),
        ("--num_train_epochs 1 --max_steps 10", UNNECESSARY, ""),
        ("--lr_scheduler_type linear", RENAMED, "--lr-decay-style linear"),
        ("--lr_scheduler_type polynomial", OTHER, ""),
        ("--lr_scheduler wsd:900 --max_steps 1000", RENAMED, WSD),
        ("--lr_scheduler wsd --max_steps 1000", RENAMED, WSD),
        ("--lr_scheduler wsd:900", LEFT, ""),
        ("--lr_scheduler wsd:231084 --max_steps 100", RENAMED, "--lr-decay-style constant"),
        (
            "--decay_function 1-sqrt --lr_scheduler wsd:9 --max_steps 10",
            RENAMED,
            "--lr-wsd-decay-style minus_sqrt",
        ),
        ("--decay_function half_life --lr_scheduler wsd:9 --max_steps 10", OTHER, ""),
        ("--decay_function half_life --lr_scheduler wsd:90 --max_steps 10", UNNECESSARY, ""),
        ("--warmup_ratio 0.1 --max_steps 1000", RENAMED, "--lr-warmup-iters 100"),
        ("--warmup_ratio 0.1 --max_steps 1000 --warmup_steps 5", UNNECESSARY, ""),
        ("--fp16_opt_level O2 --bf16 1", IMPLIED, ""),
        ("--fp16_opt_level O1 --bf16 1", OTHER, ""),
        ("--fp16_opt_level O1", UNNECESSARY, ""),
        ("--amp_master_grad 0 --bf16 true", OTHER, ""),
        ("--scale_loss 4096 --bf16 true", UNNECESSARY, ""),
        ("--scale_loss 4096 --fp16 true", RENAMED, "--initial-loss-scale 4096"),
        ("--amp_configs.decr_ratio 0.8", OTHER, ""),
        ("--amp_configs.decr_ratio 0.5", IMPLIED, ""),
        ("--recompute 1", RENAMED, "--recompute-interval 1"),
        ("--recompute true --recompute_granularity core_attn", RENAMED, None),
        ("--recompute_granularity core_attn", UNNECESSARY, ""),
        ("--recompute_granularity full --recompute_method uniform", RENAMED, "--recompute-granularity full"),
        ("--num_hidden_layers 56 --remove_tail_layer 2", RENAMED, "--num-layers 54"),
        ("--initializer_range 0.02 --hidden_size 8192 --moe_num_experts 64", RENAMED, "--init-std 0.00637856"),
        ("--initializer_range 0.02", RENAMED, "--init-std 0.02"),
        ("--moe_capacity 8 8 8 --moe_k 8", OTHER, ""),
        ("--moe_aux_loss_lambda 1e-5 --moe_k 8", RENAMED, "--moe-aux-loss-coeff 8e-05"),
        ("--moe_aux_loss_lambda 1e-2", RENAMED, "--moe-aux-loss-coeff 0.02"),
        ("--moe_aux_loss_lambda 1e-2 --moe_k 8 --moe_group_experts true", RENAMED, "--moe-aux-loss-coeff 1e-2"),
        ("--router_aux_loss_coef 1e-3 --moe_k 8", RENAMED, "--moe-aux-loss-coeff 1e-3"),
        ("--moe_layer_interval 2", ANOTHER, ""),
        ("--moe_layer_interval 1", UNNECESSARY, ""),
        ("--moe_norm_gate_logits false", OTHER, ""),
        ("--moe_use_aux_free_update_coef 0.001 --moe_use_aux_free false", UNNECESSARY, ""),
        ("--moe_use_aux_free true", RENAMED, "--moe-router-bias-update-rate 0.001"),
        ("--moe_gate_lr_ratio 0.01", OTHER, "--moe-router-lr-ratio 0.01"),
        ("--moe_gate_lr_ratio 0.01 --moe_layer_start_index 3", UNNECESSARY, ""),
        ("--multi_token_pred_depth 2", ANOTHER, ""),
        ("--use_fp8_mlp true", OTHER, ""),
        ("--use_fp8_mlp false", UNNECESSARY, ""),
        ("--optim adamw", IMPLIED, ""),
        ("--optim muon", OTHER, ""),
        ("--muon_momentum 0.95", UNNECESSARY, ""),
        ("--lora_rank 8", UNNECESSARY, ""),
        ("--lora true", OTHER, ""),
        ("--stage SFT", OTHER, ""),
        ("--stage PT", UNNECESSARY, ""),
        ("--input_dir '0.4 a 0.6 b'", RENAMED, "--data-path 0.4 a 0.6 b"),
        ("--eval_steps 100", RENAMED, "--eval-interval 0"),
        ("--eval_steps 100 --do_eval true", RENAMED, "--eval-interval 100"),
        ("--sharding_parallel_config 'split_param enable_stage1_overlap'", IMPLIED, ""),
        ("--sharding_parallel_config enable_wonders", OTHER, ""),
        ("--pipeline_parallel_config 'enable_delay_scale_loss best_unbalanced_scheduler'", IMPLIED, ""),
        ("--tensor_parallel_config 'sync_param sync_grad'", IMPLIED, ""),
        ("--sharding_comm_buffer_size_MB 2048", UNSUPPORTED, ""),
        ("--model_name_or_path meta-llama/Meta-Llama-3-8B", LEFT, ""),
        ("--resume_from_checkpoint out/checkpoint-100", LEFT, ""),
        ("--gradient_merge_configs.k_steps 4", RENAMED, "--gradient-merge-acc-step 4"),
        ("--localsgd true", OTHER, ""),
    ],
)
def test_values_decide(line: str, verdict: str, ours: str | None) -> None:
    item = first(line)
    assert item.verdict == verdict, item
    assert ours is None or item.ours == ours


def test_what_paddle_means_where_a_line_says_nothing() -> None:
    items = added("--max_steps 10 --max_seq_length 64 --input_dir data --sharding stage1")
    flags = [item.ours for item in items.values() if item.ours]
    assert flags == [
        "--adam-beta2 0.999",
        "--weight-decay 0.0",
        "--lr 5e-05",
        "--lr-decay-style linear",
        "--min-lr 1e-05",
        "--dtype fp32",
        "--micro-batch-size 8",
        "--seed 42",
        "--split 949,50,1",
        "--eval-interval 0",
        "--log-interval 500",
    ]


def test_fp16_scales_as_paddle_s_scaler() -> None:
    items = added("--fp16 true --fp16_opt_level O2")
    assert items["scale-loss"].ours == "--initial-loss-scale 32768"
    assert items["incr-every-n-steps"].ours == "--loss-scale-window 2000 --hysteresis 1"
    assert items.keys().isdisjoint({"bf16", "fp16-opt-level"})
    assert added("--bf16 true")["fp16-opt-level"].verdict == OTHER


def test_a_nested_key_counts_as_said() -> None:
    assert added("--trainer_args.adam_beta2 0.95 --trainer_args.bf16 true").keys().isdisjoint({"adam-beta2", "bf16"})
    assert first("--trainer_args.warmup_ratio 0.1 --trainer_args.max_steps 50").ours == "--lr-warmup-iters 5"


SIZES = "sizes are those of the model's own configuration"
# A default there that is another one here, and is not added: why.
EXPLAINED = {
    "attention-probs-dropout-prob": "said with the name of the model: of GPT only",
    "hidden-dropout-prob": "said with the name of the model: of GPT only",
    "gradient-accumulation-steps": "one micro-batch, or what the global batch asks for",
    "gradient-merge-configs.k-steps": "one micro-batch, or what the global batch asks for",
    "hybrid-configs.sharding-configs.accumulate-steps": "one micro-batch, or what the global batch asks for",
    "pipeline-configs.accumulate-steps": "one micro-batch, or what the global batch asks for",
    "sharding-configs.gradient-merge-acc-step": "one micro-batch, or what the global batch asks for",
    "sharding-configs.sharding-segment-strategy": "how much is sent at once",
    "moe-use-aux-free-update-coef": "added by moe_use_aux_free",
    "hidden-size": SIZES,
    "intermediate-size": SIZES,
    "num-attention-heads": SIZES,
    "num-experts-per-tok": SIZES,
    "num-hidden-layers": SIZES,
    "vocab-size": SIZES,
}


def test_a_default_that_differs_is_added_or_explained() -> None:
    names = {name for names in DEFAULTS["paddle"] for name in names.split()}
    others = {name for table in TABLES for name in differing(table, "paddle")}
    assert {name for name in others if name.rpartition(".")[2] not in names} == set(EXPLAINED)


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
model_args:
  max_seq_length: 4096
  base_seq_length: 4096
  moe_use_aux_free_update_coef: 0.001
  model_config: {multi_token_pred_depth: 1, moe_use_aux_free: true, moe_gate: top2_fused}
config: {hidden_size: 8192, intermediate_size: 28672, num_attention_heads: 64, num_key_value_heads: 8,
  num_hidden_layers: 56, remove_tail_layer: 2, rms_norm_eps: 1e-05, rope_theta: 10000, initializer_range: 0.00482174,
  moe_num_experts: 64, moe_num_shared_experts: 0, moe_layer_start_index: 3, moe_intermediate_size: 3584, moe_k: 8,
  moe_aux_loss_lambda: 1e-5, moe_layer_interval: 1, hidden_act: silu, use_rmsnorm: true, use_bias: false,
  vocab_size: 103424}
trainer_args:
  adam_beta1: 0.9
  adam_beta2: 0.95
  adam_epsilon: 1e-8
  learning_rate: 2.2e-4
  min_lr: 2.2e-5
  gradient_accumulation_steps: 90
  per_device_train_batch_size: 1
  lr_scheduler: wsd:231084
  decay_function: 1-sqrt
  max_grad_norm: 1.0
  weight_decay: 0.1
  warmup_steps: 200
  bf16: True
  fp16_opt_level: "O2"
  pipeline_parallel_degree: 12
  tensor_parallel_degree: 1
  expert_parallel_degree: 8
  sharding: "stage1"
  sharding_parallel_degree: 168
  sharding_parallel_config: split_param
  max_steps: 256760
  seed: 666
  moe_group: ep
""",
    ),
    "ernie-4.5-21b-a3b": (
        8,
        """
model_args:
  max_seq_length: 4096
  moe_use_aux_free_update_coef: 0.001
  model_config: {multi_token_pred_depth: 1, num_hidden_layers: 28, remove_tail_layer: 0}
config: {hidden_size: 2560, intermediate_size: 12288, num_attention_heads: 20, num_key_value_heads: 4,
  rms_norm_eps: 1e-05, rope_theta: 10000, initializer_range: 0.00482174, tie_word_embeddings: true, moe_num_experts: 64,
  moe_num_shared_experts: 2, moe_layer_start_index: 1, moe_intermediate_size: 1536, moe_k: 6,
  moe_aux_loss_lambda: 1e-5, moe_orthogonal_loss_lambda: 1e-3, moe_use_aux_free: true, moe_layer_interval: 1,
  vocab_size: 103424}
trainer_args:
  adam_beta1: 0.9
  adam_beta2: 0.95
  adam_epsilon: 1e-8
  learning_rate: 3.14e-4
  min_lr: 3.14e-6
  global_batch_size: 128
  gradient_accumulation_steps: 8
  per_device_train_batch_size: 2
  lr_scheduler: wsd:603000
  decay_function: 1-sqrt
  max_grad_norm: 1.0
  weight_decay: 0.1
  warmup_steps: 2000
  bf16: True
  fp16_opt_level: "O2"
  expert_parallel_degree: 8
  sharding: "stage1"
  sharding_parallel_degree: 8
  offload_optim: true
  max_steps: 670000
  moe_group: ep
""",
    ),
}
# What the files of configs/ may say otherwise: how long a run is and where it ends is not in the recipes (max_steps is
# 100 there), and what their headers name as differences.
FREE = {
    "train_iters",
    "lr_decay_iters",
    "lr_wsd_decay_iters",
    "lr_decay_style",
    "lr_wsd_decay_style",
    "save",
    "save_interval",
    "eval_interval",
    "log_interval",
    "data_path",
    "config",
    "recompute_granularity",
    "recompute_interval",
    "pp_seg_method",
    "rank_order",
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_published_recipe_becomes_what_the_preset_says(name: str, tmp_path: Path) -> None:
    ranks, text = RECIPES[name]
    environment = {"WORLD_SIZE": str(ranks)}
    words = command(tmp_path, text)
    ours = set(yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text(encoding="utf-8")))
    config = parse("moe", ["--config", str(ROOT / "configs" / f"{name}.yaml"), "--data-path", "mock"], environment)
    translated = parse("moe", [*words, "--data-path", "mock"], environment)
    there, here = config.values(), translated.values()
    asked = {key: (there.get(key), here.get(key)) for key in sorted(ours - FREE)}
    assert asked.pop("init_std")[0] == pytest.approx(here["init_std"], rel=1e-4)  # the preset has four digits of it
    assert {key: both for key, both in asked.items() if both[0] != both[1]} == {}
    assert len(ours - FREE) > 28


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
    assert paddle.trainer_kind(given) == kind


def test_a_line_that_paddle_starts() -> None:
    line = "python -m paddle.distributed.launch --gpus 0,1 run_pretrain.py --tensor_parallel_degree 2 --max_steps 10"
    found = translate_line(take_apart(shlex.split(line)))
    launcher, trainer = equivalent(found.found)
    assert launcher == ["--nproc-per-node 2"]
    assert {"--mp-degree 2", "--train-iters 10", "--adam-beta2 0.999"} <= set(trainer)
