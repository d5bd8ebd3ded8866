"""Every argument that a framework declares has a verdict and a reason; a default that differs is added."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import pytest

from megapar.arguments import FLAGS
from megapar.config.hints import FEATURES
from megapar.config.read import normal, spellings
from megapar.tools.translation import open_values
from megapar.tools.translation.table import DEEPSPEED, DEFAULTS, FOREIGN, MINDSPEED, read_table
from megapar.tools.translation.translated import equivalent, implicit_defaults, translate
from megapar.tools.translation.verdict import ANOTHER, IMPLIED, LEFT, OTHER, RENAMED, SAME, UNKNOWN, VERDICTS
from tests.tools.translation.tables import FOLDER, declared, differing, values_of


class Table(NamedTuple):
    """A file of tables/: the framework, how many arguments it has at least, and where they are from."""

    framework: str
    least: int
    source: str


TABLES = {
    "megatron_lm": Table("megatron", 900, "NVIDIA/Megatron-LM"),
    "megatron_deepspeed": Table("deepspeed", 320, "deepspeedai/Megatron-DeepSpeed"),
    "mindspeed": Table("mindspeed", 230, "Ascend/MindSpeed"),
    "mindspeed_llm": Table("mindspeed", 340, "Ascend/MindSpeed-LLM"),
    "paddlenlp": Table("paddle", 130, "PaddlePaddle/"),
    "paddleformers": Table("paddle", 450, "PaddlePaddle/"),
    "ernie_4_5": Table("paddle", 215, "PaddlePaddle/"),
    "paddle_fleet": Table("paddle", 150, "PaddlePaddle/"),
}
# Defaults there that are others here, and are not added: why.
EXPLAINED = {
    "megatron": {
        "profile-step-start profile-step-end": "which steps --profile traces",
    },
    "deepspeed": {
        "checkpoint-num-layers": "nothing is recomputed without --checkpoint-activations",
    },
    "mindspeed": {"distributed-timeout-minutes": "when a run that hangs ends"},
    "paddle": {
        "attention-probs-dropout-prob hidden-dropout-prob": "said with the name of the model: of GPT only",
        "gradient-accumulation-steps gradient-merge-configs.k-steps pipeline-configs.accumulate-steps "
        "hybrid-configs.sharding-configs.accumulate-steps sharding-configs.gradient-merge-acc-step": (
            "one micro-batch, or what the global batch asks for"
        ),
        "sharding-configs.sharding-segment-strategy": "how much is sent at once",
        "moe-use-aux-free-update-coef": "added by moe_use_aux_free",
        "hidden-size intermediate-size num-attention-heads num-experts-per-tok num-hidden-layers vocab-size": (
            "sizes are those of the model's own configuration"
        ),
    },
}
tables = pytest.mark.parametrize("name", TABLES)
# Arguments that mean something beside others only.
BESIDE = {
    "context-parallel-algo": "--context-parallel-size 2",
    "fp8-recipe": "--fp8-format e4m3",
    "lr-wsd-decay-style": "--lr-decay-style WSD",
    "main-grads-dtype": "--bf16",
    "muon-coefficient-type muon-scale-mode": "--optimizer muon",
    "recompute-granularity": "--recompute true",
}
# Choices of our flags that are not those of the argument of the same name: why.
OTHERS = {
    "mindspeed": {
        "rope-scaling-type none": "not set",
        "task pretrain, task sft": "its tasks are those of an inference",
    },
    "paddle": {
        "device auto, device cpu, device cuda, device npu": "the device is found",
        "position-embedding-type rope, position-embedding-type learned": "only rope, the default, has been compared",
        "recompute-method uniform, recompute-method block": "its recomputation saves memory otherwise",
    },
}


@tables
def test_the_table_is_a_whole_one_and_says_where_it_is_from(name: str) -> None:
    rows, table = declared(name), TABLES[name]
    assert len(rows) >= table.least
    assert [row.name for row in rows] == sorted({row.name for row in rows})
    assert {row.kind for row in rows} <= ({"value"} if table.framework == "paddle" else {"value", "on", "off", "both"})
    assert (FOLDER / f"{name}.tsv").read_text(encoding="utf-8").startswith(f"# {table.source}")


@tables
def test_no_argument_is_without_verdict_and_reason(name: str) -> None:
    bad, framework = [], TABLES[name].framework
    for row in declared(name):
        for value in (*(("true", "false") if framework == "paddle" else ()), *values_of(row)):
            (item,) = translate(row.words(value), framework)
            written = item.ours if item.verdict in (SAME, RENAMED) else item.reason
            if item.verdict not in VERDICTS or item.verdict == UNKNOWN or not written:
                bad.append((row.name, value, item))
    assert not bad


@tables
def test_a_row_stands_for_an_argument_that_no_flag_is(name: str) -> None:
    known = set(FOREIGN[TABLES[name].framework]) | set(spellings())
    names = [normal(row.name) for row in declared(name)]
    assert [name for name in names if name not in known and name.rpartition(".")[2] not in known] == []


@pytest.mark.parametrize("framework", EXPLAINED)
def test_a_default_that_differs_is_added_or_explained(framework: str) -> None:
    added = {name for names in DEFAULTS[framework] for name in names.split()}
    others = {
        other for name, table in TABLES.items() if table.framework == framework for other in differing(name, framework)
    }
    assert {name for name in others if name.rpartition(".")[2] not in added} == set(
        " ".join(EXPLAINED[framework]).split()
    )
    if framework in ("megatron", "deepspeed"):
        assert {"adam-beta2", "weight-decay", "lr-decay-style", "attention-dropout"} <= others


def names_of(framework: str) -> set[str]:
    """The arguments of a framework, without the names of blocks."""
    rows = (row for name, table in TABLES.items() if table.framework == framework for row in declared(name))
    return {normal(row.name).rpartition(".")[2] for row in rows}


@pytest.mark.parametrize("framework", FOREIGN)
def test_each_choice_of_a_flag_is_one_of_the_argument_of_its_name_or_says_why_not(framework: str) -> None:
    """A row that lists the values of an argument has to know a new one, too."""
    beside = {name: line for names, line in BESIDE.items() for name in names.split()}
    others, there = set(), names_of(framework)
    for flag in FLAGS.values():
        spelled = (flag.spelling[2:], *(alias.name for alias in flag.aliases if alias.value is None))
        for name in {normal(word) for word in spelled} & there:
            for choice in flag.choices:
                items = translate([*beside.get(name, "").split(), f"--{name}", str(choice)], framework)
                (verdict,) = (item.verdict for item in items if normal(item.flag[2:]) == name)
                others |= {f"{name} {choice}"} if verdict not in (SAME, RENAMED, IMPLIED) else set()
    assert others == {one for listed in OTHERS.get(framework, {}) for one in listed.split(", ")}


def test_verdicts_of_rows_are_verdicts() -> None:
    assert {row.verdict for rows in FOREIGN.values() for row in rows.values()} <= set(VERDICTS) - {UNKNOWN}


def test_reasons_are_sentences_of_their_own() -> None:
    reasons = {row.reason for rows in FOREIGN.values() for row in rows.values() if row.reason}
    assert not [reason for reason in reasons if len(reason) < 8 or reason.endswith(".") or "no such flag" in reason]
    assert len(reasons) > 450


SECOND = "--disable-moe-top2-2nd-expert-sampling"


def test_no_row_says_what_an_alias_says() -> None:
    """An alias of a flag is translated by the flag's field alone."""
    said = [
        name
        for table in FOREIGN.values()
        for name, row in table.items()
        if name in spellings() and row.ours == f"{spellings()[name].flag.spelling} {{value}}" and not row.reason
    ]
    assert said == []


def test_no_feature_is_an_argument_of_deepspeed() -> None:
    """A later row would win in silence; within one table a second row is refused."""
    assert not set(read_table(FEATURES).rows) & set(DEEPSPEED.rows)


@pytest.mark.parametrize(
    ("line", "framework", "expected"),
    [
        ("--num-layers 2", "megatron", {"--no-bias-gelu-fusion"}),
        ("--num-layers 2 --swiglu", "megatron", set()),
        ("--num-layers 2 --swiglu --eod-mask-loss false", "megatron", set()),
        ("--num-layers 2 --swiglu --eod-mask-loss", "megatron", {"--calculate-per-token-loss"}),
        ("--num-layers 2 --disable-bias-linear", "megatron", set()),
        ("--swiglu --optimizer muon --tensor-model-parallel-size 2", "megatron", set()),
        ("--swiglu --optimizer muon --tensor-model-parallel-size 2", "mindspeed", {"--muon-tp-mode"}),
        ("--swiglu --optimizer muon --muon-tp-mode duplicated --tensor-model-parallel-size 2", "mindspeed", set()),
        ("--swiglu --optimizer muon", "mindspeed", set()),
        ("--num-experts 8 --topk 2 --swiglu", "deepspeed", {"--expert-interval", SECOND}),
        ("--num-experts 8 --topk 1 --swiglu --expert-interval 1", "deepspeed", set()),
        ("--num-layers 2 --swiglu", "deepspeed", set()),
    ],
)
def test_what_is_meant_and_not_here_is_said(line: str, framework: str, expected: set[str]) -> None:
    items = implicit_defaults(translate(line.split(), framework), framework)
    assert {item.flag for item in items if item.verdict in (OTHER, ANOTHER)} == expected


@pytest.mark.parametrize("framework", ["megatron", "mindspeed"])
def test_muon_has_their_momentum_without_nesterov(framework: str) -> None:
    def added(line: str) -> set[str]:
        items = implicit_defaults(translate(line.split(), framework), framework)
        return {item.ours for item in items if "muon" in item.ours}

    assert added("--optimizer muon") == {"--muon-momentum 0.9", "--muon-use-nesterov false"}
    assert added("--optimizer muon --muon-momentum 0.95 --muon-nesterov") == added("--optimizer adam") == set()


def test_what_deepspeed_means_is_added() -> None:
    items = translate(["--num-experts", "8", "--recompute-method", "uniform"], "deepspeed")
    added = {"--moe-router-topk 1", "--moe-aux-loss-coeff 0.1", "--recompute-num-layers 1"}
    items = implicit_defaults(items, "deepspeed")
    assert {item.ours for item in items} > added | {"--moe-model-type deepspeed_moe --moe-capacity-factor 1"}


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
        ("--lr 1e-4 $MORE $OTHERS", "megatron", ["--lr", "", ""]),
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


# Keys of models' own configurations, in Hugging Face's words.
OF_MODELS = "first-k-dense-replace n-shared-experts norm-topk-prob num-experts routed-scaling-factor scoring-func"


@pytest.mark.parametrize(
    ("rows", "names", "others"),
    [
        (MINDSPEED.rows, ("mindspeed", "mindspeed_llm", "megatron_lm"), ""),
        (FOREIGN["paddle"], [name for name, table in TABLES.items() if table.framework == "paddle"], OF_MODELS),
    ],
    ids=["MindSpeed", "Paddle"],
)
def test_every_row_is_of_an_argument_that_there_is(rows: Iterable[str], names: Iterable[str], others: str) -> None:
    there = {normal(row.name) for name in names for row in declared(name)}
    if others:
        there |= {name.rpartition(".")[2] for name in there}
    assert set(rows) - there == set(others.split())


def test_inert_flags_of_newer_versions_are_named() -> None:
    assert "does nothing since core_r0.12.1" in translate(["--ampipe-degree", "2"], "mindspeed")[0].reason
