"""Every argument of MindSpeed and MindSpeed-LLM has a verdict and a reason; values decide."""

from __future__ import annotations

import pytest

from megapar.config.read import normal, spellings
from megapar.tools.translation import mindspeed
from megapar.tools.translation.table import DEFAULTS, FOREIGN
from megapar.tools.translation.translated import Translated, detect, translate
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

TABLES = ("mindspeed", "mindspeed_llm")


def translated(line: str) -> dict[str, Translated]:
    return {item.flag: item for item in translate(line.split(), "mindspeed")}


def first(line: str) -> Translated:
    return translate(line.split(), "mindspeed")[0]


@pytest.mark.parametrize(("table", "least"), [("mindspeed", 230), ("mindspeed_llm", 340)])
def test_the_table_is_a_whole_one_and_says_where_it_is_from(table: str, least: int) -> None:
    rows = declared(table)
    assert len(rows) >= least
    assert [row.name for row in rows] == sorted({row.name for row in rows})
    assert {row.kind for row in rows} <= {"value", "on", "off", "both"}
    head = (FOLDER / f"{table}.tsv").read_text(encoding="utf-8").splitlines()[0]
    assert head.startswith("# Ascend/MindSpeed")


@pytest.mark.parametrize("table", TABLES)
def test_no_argument_is_without_verdict_and_reason(table: str) -> None:
    bad = []
    for row in declared(table):
        for value in values_of(row):
            (item,) = translate(row.words(value), "mindspeed")
            written = item.ours if item.verdict in (SAME, RENAMED) else item.reason
            if item.verdict not in VERDICTS or item.verdict == UNKNOWN or not written:
                bad.append((row.name, value, item))
    assert not bad


@pytest.mark.parametrize("table", TABLES)
def test_a_row_stands_for_an_argument_that_no_flag_is(table: str) -> None:
    known = set(FOREIGN["mindspeed"]) | set(spellings())
    assert [row.name for row in declared(table) if normal(row.name) not in known] == []


def test_every_row_is_of_an_argument_that_there_is() -> None:
    names = {normal(row.name) for table in (*TABLES, "megatron_lm") for row in declared(table)}
    assert set(mindspeed.ROWS) <= names


def test_reasons_are_sentences() -> None:
    reasons = {row.reason for row in mindspeed.ROWS.values() if row.reason}
    assert not [reason for reason in reasons if len(reason) < 8 or reason.endswith(".")]
    assert len(reasons) > 110


@pytest.mark.parametrize(
    ("line", "verdict", "ours"),
    [
        ("--adaptive-recompute-device-size 61440", SAME, "--adaptive-recompute-device-size 61440"),
        ("--adaptive-recompute-device-size -1", UNNECESSARY, ""),
        ("--adaptive-recompute-device-swap", LEFT, ""),
        ("--adaptive-recompute-device-swap --adaptive-recompute-device-size 61440", IMPLIED, ""),
        ("--ampipe-degree 1", UNNECESSARY, ""),
        ("--ampipe-degree 2", SAME, "--ampipe-degree 2"),
        ("--ampipe-tp-sp-comm-overlap --ampipe-degree 2", SAME, "--ampipe-tp-sp-comm-overlap"),
        ("--ampipe-tp-sp-comm-overlap", UNNECESSARY, ""),
        ("--moe-model-type deepspeed_moe", SAME, "--moe-model-type deepspeed_moe"),
        ("--moe-model-type deepspeed_moe --moe-no-drop", RENAMED, "--moe-model-type megatron_moe"),
        ("--moe-train-capacity-factor 1.1 --moe-model-type deepspeed_moe", RENAMED, "--moe-capacity-factor 1.1"),
        ("--moe-train-capacity-factor 1.1", UNNECESSARY, ""),
        ("--moe-train-capacity-factor 1.1 --moe-model-type deepspeed_moe --moe-no-drop", UNNECESSARY, ""),
        ("--context-parallel-algo ulysses_cp_algo --context-parallel-size 2", SAME, None),
        ("--context-parallel-algo hybrid_cp_algo --context-parallel-size 4", RENAMED, None),
        ("--context-parallel-algo hybrid_cp_algo", UNNECESSARY, ""),
        ("--expert-model-parallel-size 4", RENAMED, "--ep-degree 4"),
        (
            "--expert-model-parallel-size 4 --moe-tp-extend-ep --tensor-model-parallel-size 8",
            RENAMED,
            "--ep-degree 32",
        ),
        (
            "--moe-router-load-balancing-type softmax_topk",
            *(RENAMED, "--moe-aux-loss-coeff 0 --no-norm-topk-prob"),
        ),
        ("--moe-router-load-balancing-type softmax_topk --norm-topk-prob", RENAMED, "--moe-aux-loss-coeff 0"),
        ("--moe-router-load-balancing-type sparsemixer_topk", OTHER, ""),
        ("--enable-expert-placement", UNNECESSARY, ""),
        (
            "--enable-expert-placement --expert-model-parallel-size 4 --expert-placement-freq 20",
            RENAMED,
            "--moe-rebalance-interval 20",
        ),
        ("--expert-placement-freq 20", UNNECESSARY, ""),
        ("--add-qkv-bias --disable-bias-linear", SAME, "--add-qkv-bias"),
        ("--add-dense-bias --disable-bias-linear", ANOTHER, ""),
        ("--add-qkv-bias", IMPLIED, ""),
        ("--optimizer-selection fused_ema_adamw", UNSUPPORTED, ""),
        ("--noisy-gate-policy Jitter", OTHER, ""),
        ("--noisy-gate-policy None", UNNECESSARY, ""),
        ("--pre-tockens 65536 --seq-length 4096", UNNECESSARY, ""),
        ("--pre-tockens 1024 --seq-length 4096", ANOTHER, ""),
        ("--pre-tockens 1024 --seq-length 4096 --sparse-mode 2", UNNECESSARY, ""),
        ("--num-layer-list 7,8,8,5", RENAMED, "--pp-seg-method 0,7,15,23"),
        ("--pipeline-num-transformer-layers [[3],[5]]", RENAMED, "--pp-seg-method 0,3"),
        ("--pipeline-num-transformer-layers [[3,2],[5,1]]", UNSUPPORTED, ""),
        ("--rope-scaling-factor 40", UNNECESSARY, ""),
        ("--rope-scaling-factor 40 --rope-scaling-type yarn", SAME, "--rope-scaling-factor 40"),
        ("--lora-r 16", UNNECESSARY, ""),
        ("--lora-r 16 --lora-target-modules linear_qkv", OTHER, ""),
        ("--stage sft", OTHER, ""),
        ("--cla-share-factor 1", UNNECESSARY, ""),
        ("--cla-share-factor 2", ANOTHER, ""),
        ("--quant-states fp8", OTHER, ""),
        ("--swiglu-limit 7.0", ANOTHER, ""),
        ("--shared-expert-gate", RENAMED, "--moe-shared-expert-gate"),
        ("--embedding-multiplier-scale 78.25", RENAMED, "--embedding-multiplier 78.25"),
        ("--output-multiplier-scale 0.5", RENAMED, "--logits-scaling 2.0"),
        ("--scale-emb 12", RENAMED, "--embedding-multiplier 12"),
        ("--scale-depth 1.5 --num-layers 9", RENAMED, "--residual-multiplier 0.5"),
        ("--scale-depth 1.5", LEFT, ""),
        ("--dim-model-base 256 --hidden-size 2304", RENAMED, "--logits-scaling 9.0"),
        ("--post-norm", ANOTHER, ""),
        ("--npu-deterministic", RENAMED, "--deterministic"),
        ("--layerzero", RENAMED, "--sharding-stage 3"),
        ("--recompute-in-bubble", UNSUPPORTED, ""),
    ],
)
def test_values_decide(line: str, verdict: str, ours: str | None) -> None:
    item = first(line)
    assert item.verdict == verdict, item
    assert ours is None or item.ours == ours


def test_inert_flags_of_newer_versions_are_named() -> None:
    assert "does nothing since core_r0.12.1" in first("--ampipe-degree 2").reason


# A default there that is another one here, and needs no flag: why.
EXPLAINED = {"distributed-timeout-minutes": "when a run that hangs ends"}


def test_a_default_that_differs_is_added_or_explained() -> None:
    added = {name for names in DEFAULTS["mindspeed"] for name in names.split()}
    bad = {name for table in TABLES for name in differing(table, "mindspeed")} - added
    assert bad == set(EXPLAINED)


def test_a_line_of_mindspeed_is_recognised() -> None:
    assert detect(["num-layers", "ampipe-degree", "moe-alltoall-overlap-comm"]) == "mindspeed"


def test_a_layout_that_extends_experts_over_mp_ranks_is_whole_experts() -> None:
    items = translated("--moe-tp-extend-ep --expert-model-parallel-size 2 --tensor-model-parallel-size 4")
    assert items["--moe-tp-extend-ep"].ours == "--expert-mp-degree 1"
    assert items["--expert-model-parallel-size"].ours == "--ep-degree 8"
