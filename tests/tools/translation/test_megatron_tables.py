"""Every argument of Megatron-LM and Megatron-DeepSpeed has a verdict and a reason; a default that differs is added."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from pathlib import Path

import pytest

from megapar.config.read import normal, spellings
from megapar.config.values import convert
from megapar.tools.translation import deepspeed, features, megatron, open_values, verdict
from megapar.tools.translation.table import DEFAULTS, FOREIGN
from megapar.tools.translation.translated import Translated, detect, equivalent, implicit_defaults, translate
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
)
from tests.tools.translation.tables import Declared, declared

TABLES = {"megatron_lm": "megatron", "megatron_deepspeed": "deepspeed"}
SECOND = "--disable-moe-top2-2nd-expert-sampling"
ROWS = [(table, row) for table in TABLES for row in declared(table)]


def answer(table: str, row: Declared, value: str) -> Translated:
    items = translate(row.words(value), TABLES[table])
    assert len(items) == 1, items
    return items[0]


@pytest.mark.parametrize(("table", "least"), [("megatron_lm", 900), ("megatron_deepspeed", 320)])
def test_the_table_is_a_whole_one_and_says_where_it_is_from(table: str, least: int) -> None:
    rows = declared(table)
    assert len(rows) >= least
    assert [row.name for row in rows] == sorted({row.name for row in rows})
    assert {row.kind for row in rows} <= {"value", "on", "off", "both"}
    head = (Path(__file__).parent / "tables" / f"{table}.tsv").read_text(encoding="utf-8").splitlines()[0]
    assert head.startswith("# ")
    assert "/Megatron-" in head


@pytest.mark.parametrize("table", TABLES)
def test_no_argument_is_without_verdict_and_reason(table: str) -> None:
    bad = []
    for row in declared(table):
        for value in dict.fromkeys((row.default, *row.choices, "1", "0.5", "some/path")):
            item = answer(table, row, value)
            if item.verdict == UNKNOWN and row.kind == "value":
                bad.append((row.name, value, item))
            if item.verdict not in (SAME, RENAMED) and not item.reason:
                bad.append((row.name, value, item))
            if item.verdict in (SAME, RENAMED) and not item.ours:
                bad.append((row.name, value, item))
    assert not bad


def test_a_switch_gets_a_verdict_too() -> None:
    for table, row in ROWS:
        if row.kind != "value":
            item = answer(table, row, "")
            assert item.verdict != UNKNOWN, item
            assert item.ours or item.reason, item


@pytest.mark.parametrize("table", TABLES)
def test_a_row_stands_for_an_argument_that_no_flag_is(table: str) -> None:
    known = set(FOREIGN[TABLES[table]]) | set(spellings())
    assert [row.name for row in declared(table) if normal(row.name) not in known] == []


def test_no_row_says_what_an_alias_says() -> None:
    """An alias of a flag is translated by the flag's field alone."""
    said = [
        name
        for table in FOREIGN.values()
        for name, row in table.items()
        if name in spellings() and row.ours == f"{spellings()[name].flag.spelling} {{value}}" and not row.reason
    ]
    assert said == []


def test_reasons_are_sentences_of_their_own() -> None:
    reasons = {row.reason for row in (*megatron.ROWS.values(), *deepspeed.ROWS.values()) if row.reason}
    assert not [reason for reason in reasons if len(reason) < 8 or reason.endswith(".") or "no such flag" in reason]
    assert len(reasons) > 230


def test_no_feature_is_an_argument_of_deepspeed() -> None:
    """A later row would win in silence; within one table a second row is refused."""
    assert not set(features.ROWS) & set(deepspeed.ROWS)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--num-query-groups 8", UNNECESSARY),
        ("--num-query-groups 8 --group-query-attention", SAME),
        ("--group-query-attention", RENAMED),
        ("--position-embedding-type yarn", ANOTHER),
        ("--position-embedding-type learned_absolute", RENAMED),
        ("--qk-layernorm --normalization RMSNorm", RENAMED),
        ("--qk-layernorm", ANOTHER),
        ("--rotary-percent 0.5", SAME),
        ("--rope-scaling-factor 8 --use-rope-scaling", SAME),
        ("--rope-scaling-factor 1", UNNECESSARY),
        ("--mtp-num-layers 1", RENAMED),
        ("--mtp-num-layers 2", ANOTHER),
        ("--mtp-num-layers 0", UNNECESSARY),
        ("--moe-router-bias-update-rate 1e-3", UNNECESSARY),
        ("--moe-router-bias-update-rate 1e-3 --moe-router-enable-expert-bias", SAME),
        ("--moe-router-bias-update-rate 1e-3 --moe-router-load-balancing-type noaux_tc", SAME),
        ("--moe-router-load-balancing-type noaux_tc --moe-router-bias-update-rate 1e-2", IMPLIED),
        ("--moe-router-enable-expert-bias", RENAMED),
        ("--moe-router-enable-expert-bias false", UNNECESSARY),
        ("--moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type none", UNNECESSARY),
        ("--position-embedding-type none", ANOTHER),
        ("--position-embedding-type None", UNNECESSARY),
        ("--qk-layernorm false --normalization RMSNorm", UNNECESSARY),
        ("--group-query-attention false", UNNECESSARY),
        ("--num-query-groups 8 --group-query-attention false", UNNECESSARY),
        ("--profile false", UNNECESSARY),
        ("--use-megatron-fsdp false", UNNECESSARY),
        ("--data-parallel-sharding-strategy optim_grads --use-megatron-fsdp false", UNNECESSARY),
        ("--sequence-parallel false --tensor-model-parallel-size 2", UNNECESSARY),
        ("--model.sequence_parallel false --tensor-model-parallel-size 2", UNNECESSARY),
        ("--finetune false --load x", UNNECESSARY),
        ("--split 99,1,0 --mock-data false", SAME),
        ("--lr-warmup-iters 0 --lr-warmup-fraction 0.1 --train-iters 100", UNNECESSARY),
        ("--lr-warmup-samples 0 --lr-warmup-iters 5 --global-batch-size 8", UNNECESSARY),
        ("--lr-warmup-fraction 0 --lr-warmup-iters 5 --train-iters 100", UNNECESSARY),
        ("--lr-warmup-iters 0", SAME),
        ("--moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-topk 8", OTHER),
        ("--moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-topk 4", SAME),
        ("--moe-router-num-groups 8 --moe-router-score-function sigmoid --moe-router-topk 8", SAME),
        ("--moe-router-score-function sqrtsoftplus", ANOTHER),
        ("--moe-layer-freq ([0]*3+[1]*58)", RENAMED),
        ("--moe-layer-freq [0,0,1,1]", RENAMED),
        ("--moe-layer-freq 2", SAME),
        ("--moe-layer-freq [1,0]*4", SAME),
        ("--moe-layer-freq [1,2]", ANOTHER),
        ("--moe-router-load-balancing-type global_aux_loss", OTHER),
        ("--moe-shared-expert-intermediate-size 2048 --moe-ffn-hidden-size 1024", RENAMED),
        ("--moe-shared-expert-intermediate-size 1500 --moe-ffn-hidden-size 1024", SAME),
        ("--lr-warmup-init 1e-6", OTHER),
        ("--lr-warmup-init 0.0", UNNECESSARY),
        ("--exp-avg-dtype bf16", OTHER),
        ("--exp-avg-dtype fp32", IMPLIED),
        ("--use-mup", OTHER),
        ("--fp8-format hybrid", OTHER),
        ("--window-size 128,0", ANOTHER),
        ("--softmax-type learnable", ANOTHER),
        ("--enable-hyper-connections", ANOTHER),
        ("--cuda-graph-impl local", UNSUPPORTED),
        ("--cp-comm-type a2a --context-parallel-size 2", RENAMED),
        ("--cp-comm-type a2a+p2p --context-parallel-size 4", UNSUPPORTED),
        ("--data-parallel-sharding-strategy optim_grads", UNNECESSARY),
        ("--data-parallel-sharding-strategy optim_grads --use-megatron-fsdp", RENAMED),
        ("--vocab-size 32000", SAME),
        ("--vocab-size 50257", RENAMED),
        ("--make-vocab-size-divisible-by 128", LEFT),
        ("--decoder-first-pipeline-num-layers 2 --num-layers 8 --pipeline-model-parallel-size 3", RENAMED),
        ("--decoder-first-pipeline-num-layers 3 --num-layers 8 --pipeline-model-parallel-size 3", LEFT),
    ],
)
def test_values_decide(line: str, expected: str) -> None:
    assert translate(line.split(), "megatron")[0].verdict == expected


@pytest.mark.parametrize(
    ("line", "ours"),
    [
        ("--group-query-attention", "--num-query-groups 1"),
        ("--vocab-size 50257 --tensor-model-parallel-size 8", "--vocab-size 51200"),
        ("--vocab-size 32000 --tokenizer-type NullTokenizer", "--vocab-size 32128"),
        ("--vocab-size 32000 --tokenizer-type NullTokenizer --no-pad-vocab-size", "--vocab-size 32001"),
        ("--moe-router-load-balancing-type none --moe-aux-loss-coeff 0.01", "--moe-aux-loss-coeff 0"),
        (
            "--moe-shared-expert-intermediate-size 2048 --moe-intermediate-size 1024 --ffn-hidden-size 2048",
            "--moe-shared-experts 2",
        ),
        (
            "--moe-router-bias-update-rate 1e-2 --moe-router-load-balancing-type noaux_tc",
            "--moe-router-bias-update-rate 1e-2",
        ),
        ("--moe-layer-freq ([0]*3+[1]*58)", "--first-k-dense 3"),
        ("--cp-comm-type p2p --context-parallel-size 2", "--context-parallel-algo megatron_cp_algo"),
        (
            "--decoder-last-pipeline-num-layers 2 --num-layers 8 --pipeline-model-parallel-size 3",
            "--pp-seg-method 0,3,6",
        ),
        ("--mtp-num-layers 1", "--mtp-depth 1 --mtp-block layer"),
    ],
)
def test_what_is_written(line: str, ours: str) -> None:
    assert translate(line.split(), "megatron")[0].ours == ours


@pytest.mark.parametrize(
    ("line", "expected", "ours"),
    [
        ("--num-experts 1", RENAMED, "--num-experts 0"),
        ("--num-experts 32 32 64", ANOTHER, ""),
        ("--num-experts 8 --topk 2 --expert-interval 1", SAME, "--num-experts 8"),
        ("--topk 2", RENAMED, "--moe-router-topk 2"),
        ("--expert-interval 2 --num-experts 8", ANOTHER, ""),
        ("--mlp-type residual", ANOTHER, ""),
        ("--moe-expert-parallel-size 4", RENAMED, "--ep-degree 4"),
        ("--ds-sequence-parallel-size 4", RENAMED, "--cp-degree 4 --context-parallel-algo ulysses_cp_algo"),
        ("--load-tag global_step500", RENAMED, "--ckpt-step 500"),
        ("--lr-warmup-tokens 2048000 --global-batch-size 100 --seq-length 2048", RENAMED, "--lr-warmup-iters 10"),
        ("--enable-zbh1-pipeline", RENAMED, "--pp-schedule zero_bubble"),
        ("--train-tokens 8192 --train-iters 10 --global-batch-size 8 --seq-length 128", RENAMED, "--train-iters 8"),
        ("--train-tokens 8192 --train-iters 5 --global-batch-size 8 --seq-length 128", RENAMED, "--train-iters 5"),
        ("--train-iters 10 --train-tokens 8192 --global-batch-size 8 --seq-length 128", IMPLIED, ""),
        ("--train-iters 10 --train-tokens 8192 --global-batch-size 8", SAME, "--train-iters 10"),
        ("--train-iters 10", SAME, "--train-iters 10"),
    ],
)
def test_deepspeed_s_values_decide(line: str, expected: str, ours: str) -> None:
    item = translate(line.split(), "deepspeed")[0]
    assert (item.verdict, item.ours) == (expected, ours)


# A default there that is another one here, and needs no flag: why.
EXPLAINED = {
    "profile-step-start": "which steps --profile traces",
    "profile-step-end": "which steps --profile traces",
    "weight-decay-incr-style": "said by the default of --weight-decay",
    "checkpoint-num-layers": "nothing is recomputed without --checkpoint-activations",
}


def differing(table: str) -> dict[str, str]:
    """Arguments whose default is another than that of the flag they are here."""
    found = {}
    for row in declared(table):
        if row.kind != "value" or not row.default or row.default == "[]":
            continue
        ours = shlex.split(answer(table, row, row.default).ours)
        for place, word in enumerate(ours):
            here = spellings()[normal(word[2:])].flag if word.startswith("--") else None
            if here is not None and here.takes_value:
                usual = here.defaults.get("moe")
                if convert(here, ours[place + 1]) != usual:
                    found[normal(row.name)] = f"{row.default} there, {usual} here"
    return found


@pytest.mark.parametrize("table", TABLES)
def test_a_default_that_differs_is_added_or_explained(table: str) -> None:
    added = {name for names in DEFAULTS[TABLES[table]] for name in names.split()}
    others = differing(table)
    assert {name: text for name, text in others.items() if name not in added and name not in EXPLAINED} == {}
    assert {"adam-beta2", "weight-decay", "lr-decay-style", "attention-dropout"} <= set(others)


def test_every_explanation_is_of_a_default_that_differs() -> None:
    assert set(EXPLAINED) <= {name for table in TABLES for name in differing(table)}


@pytest.mark.parametrize(
    ("line", "framework", "expected"),
    [
        ("--num-layers 2", "megatron", {"--no-bias-gelu-fusion"}),
        ("--num-layers 2 --swiglu", "megatron", set()),
        ("--num-layers 2 --swiglu --eod-mask-loss false", "megatron", set()),
        ("--num-layers 2 --swiglu --eod-mask-loss", "megatron", {"--calculate-per-token-loss"}),
        ("--num-layers 2 --disable-bias-linear", "megatron", set()),
        ("--num-experts 8 --topk 2 --swiglu", "deepspeed", {"--expert-interval", SECOND}),
        ("--num-experts 8 --topk 1 --swiglu --expert-interval 1", "deepspeed", set()),
        ("--num-layers 2 --swiglu", "deepspeed", set()),
    ],
)
def test_what_is_meant_and_not_here_is_said(line: str, framework: str, expected: set[str]) -> None:
    items = implicit_defaults(translate(line.split(), framework), framework)
    assert {item.flag for item in items if item.verdict in (OTHER, ANOTHER)} == expected


def test_what_deepspeed_means_is_added() -> None:
    items = implicit_defaults(
        translate(["--num-experts", "8", "--recompute-method", "uniform"], "deepspeed"), "deepspeed"
    )
    assert {item.ours for item in items} >= {
        *("--moe-router-topk 1", "--moe-aux-loss-coeff 0.1", "--recompute-num-layers 1"),
        "--moe-model-type deepspeed_moe --moe-capacity-factor 1",
    }


def test_verdicts_of_rows_are_verdicts() -> None:
    assert {row.verdict for rows in FOREIGN.values() for row in rows.values()} <= set(verdict.VERDICTS) - {UNKNOWN}


@pytest.mark.parametrize(
    ("line", "framework"),
    [
        ("--train-tokens 8192 --train-iters 10 --global-batch-size 8 --seq-length 128", "deepspeed"),
        ("--train-iters 5 --train-tokens 8192 --global-batch-size 8 --seq-length 128", "deepspeed"),
        ("--lr-warmup-fraction 0.1 --lr-warmup-iters 0 --train-iters 100", "megatron"),
        ("--lr-warmup-samples 80 --lr-warmup-iters 0 --global-batch-size 8", "megatron"),
        ("--moe-router-bias-update-rate 1e-2 --moe-router-load-balancing-type noaux_tc", "megatron"),
        ("--moe-router-bias-update-rate 1e-2 --moe-router-load-balancing-type noaux_tc", "mindspeed"),
        ("--moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type none", "mindspeed"),
        ("--lr 1e-3 --lr 1e-4", "megatron"),
        ("--model_name_or_path x --lr 3.0e-4", "paddle"),
    ],
)
def test_no_flag_of_a_command_has_two_values(line: str, framework: str) -> None:
    items = translate(line.split(), framework)
    written = [
        piece
        for item in equivalent([*items, *implicit_defaults(items, framework)])[1]
        for piece in re.split(" (?=--)", item)
    ]
    names = Counter(flag.split()[0] for flag in written)
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize(
    ("line", "framework", "flags"),
    [
        ("--lr 1e-4 $MORE --bf16", "megatron", ["--lr", "", "--bf16"]),
        ("--bf16 $MORE --lr $LR", "megatron", ["--bf16", "", "--lr"]),
        ("--use-rotary-position-embeddings $MORE", "megatron", ["--use-rotary-position-embeddings", ""]),
        ("--train-samples 80 $MORE", "megatron", ["--train-samples", ""]),
        ("$MORE --lr 1", "megatron", ["", "--lr"]),
        ("--data-path 1 $FIRST 2 $SECOND", "megatron", ["--data-path"]),
        ("--rampup-batch-size 8 8 $SAMPLES", "megatron", ["--rampup-batch-size"]),
        ("--bf16 $BF16", "paddle", ["--bf16"]),
    ],
)
def test_an_open_variable_behind_a_whole_argument_is_one_of_its_own(
    line: str, framework: str, flags: list[str]
) -> None:
    words = [open_values.mark(word) if word.startswith("$") else word for word in line.split()]
    items = translate(words, framework)
    assert [item.flag for item in items] == flags
    assert all(
        (item.verdict, item.reason, item.decides) == (LEFT, "further arguments", True)
        for item in items
        if not item.flag
    )


def test_megatron_s_own_file_is_megatron_s() -> None:
    names = ["language_model.num_layers", "language_model.gated_linear_unit", "model_parallel.fp16", "train_iters"]
    assert detect(names) == "megatron"
    assert detect(["model.num_layers", "model.hidden_size", "seed"]) == "megatron"
