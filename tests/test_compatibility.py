"""Every row's two examples, and how rows are evaluated."""

from __future__ import annotations

import random
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megapar.arguments import FLAGS, parse, resolved_values
from megapar.compatibility import DOWNGRADE, LIFTED, NOT_BUILT, RULES, SETTLED, Rule, check
from megapar.errors import Complaint, ConfigError
from megapar.model.ernie3.sizes import tasks_of
from megapar.rules import ampipe
from megapar.schema.rule import FACTS, Facts, either, near_divisors, near_multiples
from scripts.generated_pages import compatibility_page, stale

MATRIX = [pytest.param(rule, id=rule.id) for rule in RULES]


def values_of(rule: Rule, example: str) -> dict[str, Any]:
    return resolved_values(rule.models[0], shlex.split(example), {})


def refused(kind: str, line: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        parse(kind, shlex.split(line), {})
    return {complaint.rule: str(complaint) for complaint in caught.value.complaints}


@pytest.mark.parametrize("rule", MATRIX)
def test_passing_example_keeps_its_row(rule: Rule) -> None:
    values = values_of(rule, rule.passing)
    assert set(rule.reads) <= set(values)
    assert not rule.broken(values)


@pytest.mark.parametrize("rule", MATRIX)
def test_failing_example_breaks_its_row_and_is_explained(rule: Rule) -> None:
    values = values_of(rule, rule.failing)
    assert rule.broken(values)
    verdict = check(values, strict=True)
    said = " ".join([*map(str, (*verdict.refused, *verdict.not_built)), *verdict.warnings])
    assert (rule.id in said) == (rule.kind != SETTLED)
    assert rule.message in rule.text(values)
    assert rule.advice(values).strip() == rule.advice(values)


@pytest.mark.parametrize("rule", MATRIX)
def test_row_is_well_formed(rule: Rule) -> None:
    known = {*FLAGS, *FACTS}
    assert set(rule.reads) <= known
    assert set(dict(rule.sets)) <= set(FLAGS)
    assert rule.source
    assert bool(rule.reason) == (rule.kind == LIFTED)
    assert bool(rule.sets) <= (rule.kind == DOWNGRADE)
    for name in set(rule.reads) & set(FLAGS):
        assert (
            set(rule.models) <= set(FLAGS[name].models)
            or FLAGS[name].defaults["ernie"] is not None
            or name in ("num_query_groups", "head_dim", "moe_ffn_hidden_size", "expert_mp_degree")
        )


def test_ids_are_unique() -> None:
    ids = [rule.id for rule in RULES]
    assert sorted(set(ids)) == sorted(ids)


def test_order_of_rows_does_not_matter() -> None:
    values = resolved_values(
        "moe", shlex.split("--world-size 32 --mp-degree 3 --sharding-degree 5 --lr 1 --min-lr 2"), {}
    )
    rows = list(RULES)
    before = check(values, rules=rows)
    random.Random(1).shuffle(rows)
    after = check(values, rules=rows)
    assert set(before.refused) == set(after.refused)
    assert len(before.refused) >= 3


def test_a_row_reads_only_what_it_declares() -> None:
    facts = Facts({"mp_degree": 2, "lr": 1.0}, ("mp_degree",))
    assert facts.mp_degree == 2
    with pytest.raises(AttributeError, match="without declaring it"):
        _ = facts.lr


def test_downgrade_switches_the_feature_off_with_a_warning() -> None:
    line = (
        "--validate-only --world-size 4 --ep-degree 4 --num-experts 4 --moe-model-type deepspeed_moe --use-pipe-experts"
    )
    config = parse("moe", shlex.split(line), {})
    assert config.ampipe.use_pipe_experts is False
    assert config.origins["use_pipe_experts"] == "switched off by pipe-experts-nothing"
    assert config.origins["pipe_experts_multi_data"] == "default"
    (warning,) = config.warnings
    assert warning.startswith("[pipe-experts-nothing] --use-pipe-experts is off: a single local expert with N = 1")


def test_of_pipe_experts_with_slices_the_warning_says_what_is_off_and_what_would_do() -> None:
    line = "--validate-only --world-size 2 --ep-degree 2 --moe-model-type deepspeed_moe --use-pipe-experts"
    config = parse("moe", shlex.split(f"{line} --ampipe-degree 2"), {})
    (warning,) = config.warnings
    assert "--use-pipe-experts is off: --use-pipe-experts with --ampipe-degree > 1" in warning
    assert "Set --pipe-experts-multi-data to 2" in warning
    assert config.origins["use_pipe_experts"] == "switched off by ampipe-pipe-experts"
    for pieces, experts in ((2, 4), (4, 2)):
        fixed = f"{line} --ampipe-degree 2 --pipe-experts-multi-data {pieces} --num-experts {experts}"
        piped = parse("moe", shlex.split(fixed), {})
        assert piped.ampipe.use_pipe_experts
        assert piped.warnings == ()
    alone = parse("moe", shlex.split(f"{line} --ampipe-degree 2 --pipe-experts-multi-data 2 --num-experts 2"), {})
    assert not alone.ampipe.use_pipe_experts, "one expert, whose rows stay together, is one piece"
    assert "Set --pipe-experts-multi-data to 4" in alone.warnings[0]


def test_advice_changes_nothing_and_has_a_section_of_its_own() -> None:
    line = "--validate-only --world-size 2 --ep-degree 2 --ampipe-degree 4"
    config = parse("moe", shlex.split(line), {})
    assert config.ampipe.ampipe_degree == 4
    assert config.origins["ampipe_degree"] == "flag"
    assert "ampipe-fine" in "".join(config.warnings)
    page = compatibility_page()
    assert page.index("`ampipe-fine`") > page.index("## advice") > page.index("`ampipe-pipe-experts`")


def test_lifted_row_sleeps_until_strict_seed_rules() -> None:
    line = ["--moe-model-type", "deepspeed_moe", "--moe-router-topk", "4"]
    assert parse("moe", line, {}).value("moe_router_topk") == 4
    assert "deepspeed-topk" in refused("moe", "--strict-seed-rules " + shlex.join(line))


def test_not_built_refuses_a_run_and_is_a_note_under_rules_only() -> None:
    line = "--sharding-stage 3 --no-overlap-grad-reduce"
    assert "not-built-stage-3-overlap-off" in refused("moe", line)
    assert "not-built-stage-3-overlap-off" in refused("moe", f"--validate-only {line}")
    config = parse("moe", ["--rules-only", "--world-size", "2", *line.split()], {})
    assert any("not-built-stage-3-overlap-off" in note for note in config.notes)


@pytest.mark.parametrize("rule", [param for param in MATRIX if param.values[0].kind == NOT_BUILT])
def test_each_not_built_row_is_a_note_under_rules_only(rule: Rule) -> None:
    line = ["--rules-only", *shlex.split(rule.failing)]
    if check(values_of(rule, shlex.join(line))).refused:  # by other rows
        with pytest.raises(ConfigError):
            parse(rule.models[0], line, {})
    else:
        assert any(f"[{rule.id}]" in note for note in parse(rule.models[0], line, {}).notes)


def test_not_built_row_is_silent_about_the_default() -> None:
    assert parse("moe", ["--mp-degree", "1", "--recompute-interval", "0"], {}).notes == ()


def test_every_not_built_row_reads_a_flag_first_and_is_of_other_flags() -> None:
    """A row is of a flag, or of flags that cannot stand beside each other; no two rows are of the same ones."""
    rows = [rule for rule in RULES if rule.kind == NOT_BUILT]
    assert [rule.id for rule in rows if rule.reads[0] not in FLAGS] == []
    assert len({frozenset(rule.reads) for rule in rows}) == len(rows)


@pytest.mark.parametrize(
    ("line", "rule", "words"),
    [
        ("--world-size 32 --mp-degree 3 --sharding-degree 5", "world-size", ("--sharding-degree 8 --mp-degree 4", "5")),
        ("--world-size 32 --mp-degree 3", "world-size", ("--mp-degree 2",)),
        ("--world-size 8 --sharding-degree 2", "world-size", ("--world-size 8", "--hybrid-dp")),
        ("--world-size 4 --mp-degree 4 --num-attention-heads 6 --hidden-size 192", "mp-heads", ("1, 2, 3 or 6",)),
    ],
)
def test_a_refusal_names_what_is_near(line: str, rule: str, words: tuple[str, ...]) -> None:
    said = refused("moe", f"--validate-only {line}")[rule]
    assert [word for word in words if word not in said] == []


def test_hugging_face_form() -> None:
    assert {"hf-qk-norm"} == set(refused("moe", "--save-hf out --qk-norm --add-qkv-bias --num-experts 0"))
    assert {"hf-shared-experts"} == set(refused("moe", "--save-hf out --qk-norm --moe-shared-experts 1"))
    for line in ("moe --qk-norm --num-experts 0", "moe --qk-norm", "moe --head-dim 32", "ernie"):
        kind, *flags = line.split()
        assert parse(kind, ["--save-hf", "out", *flags], {}).checkpoint.save_hf == "out"


def test_sentences_of_values() -> None:
    assert either([1]) == "1"
    assert either([1, 2, 4]) == "1, 2 or 4"
    assert near_divisors(12, 5, count=3) == "3, 4 or 6"
    assert near_multiples(4, 10) == "8 or 12"
    assert near_multiples(4, 8) == "8"
    assert near_multiples(4, 2) == "4"


def test_generated_pages_are_fresh() -> None:
    assert stale(Path(__file__).parents[1] / "docs") == [], "run scripts/generated_pages.py"


@pytest.mark.parametrize(
    ("kind", "line", "rule"),
    [
        ("moe", "--num-layers 1 --first-k-dense 0 --moe-layer-freq [0]", "layer-freq"),
        ("moe", "--num-layers 4 --first-k-dense 2 --moe-layer-freq [0,1]*3", "layer-freq"),
        ("moe", "--num-experts 8 --moe-router-group-topk 2", "router-group"),
        (
            "moe",
            "--num-experts 64 --moe-router-topk 8 --moe-router-num-groups 7 --moe-router-group-topk 1",
            "router-group",
        ),
        (
            "moe",
            "--num-experts 8 --moe-router-topk 5 --moe-router-num-groups 4 --moe-router-group-topk 2 "
            "--moe-router-group-score-topk 2",
            "router-group",
        ),
        (
            "moe",
            "--num-experts 8 --moe-router-topk 2 --moe-router-num-groups 3 --moe-router-group-topk 1 "
            "--moe-router-group-score-topk 2",
            "router-group",
        ),
        (
            "moe",
            "--num-experts 8 --moe-router-num-groups 8 --moe-router-group-topk 2 --moe-router-topk 4",
            "router-group",
        ),
        (
            "ernie",
            "--ernie-model ernie3 --task-type-vocab-size 5 --seq-length 16 --generation-segments 8 --memory-length 1 "
            "--world-size 4 --mp-degree 4 --sequence-parallel",
            "segments",
        ),
    ],
)
def test_what_is_advised_is_accepted(kind: str, line: str, rule: str) -> None:
    def refused(*more: str) -> list[Complaint]:
        try:
            parse(kind, [*line.split(), "--rules-only", *more], {})
        except ConfigError as error:
            return [one for one in error.complaints if one.rule.startswith(rule)]
        return []

    complaint = refused()[0]
    if found := re.search(r"for example (\S+)( and --first-k-dense 0)?", complaint.fix):
        assert refused("--moe-layer-freq", found[1].rstrip("."), *(found[2] or "").split()[1:]) == []
        return
    flag, values = re.search(r"Choose (--[\w-]+) ([\d, or]+)", complaint.fix).groups()  # type: ignore[union-attr]
    for value in re.findall(r"\d+", values):
        assert refused(flag, value) == []


def test_what_no_value_mends_is_not_advised() -> None:
    def told(kind: str, line: str) -> dict[str, str]:
        with pytest.raises(ConfigError) as caught:
            parse(kind, [*line.split(), "--rules-only"], {})
        return {one.rule: str(one) for one in caught.value.complaints}

    groups = told("moe", "--num-experts 8 --moe-router-num-groups 4 --moe-router-group-topk 8")
    assert "Leave the groups out." in groups["router-groups"]
    odd = "--ernie-model ernie3 --task-type-vocab-size 5 --seq-length 128 --world-size 3 --mp-degree 3"
    sizes = "--hidden-size 48 --num-attention-heads 3 --task-hidden-size 24 --task-num-attention-heads 3"
    assert set(told("ernie", f"{odd} --sequence-parallel {sizes}")) == {"sequence-parallel-length"}
    warmup = told("moe", "--train-iters 100 --lr-warmup-iters 100")["warmup"]
    assert "--train-epochs" not in warmup
    assert "--lr-decay-iters 100" in warmup
    given = "--task sft --tokenizer-model t --data-path c.jsonl --train-epochs 3 --lr-decay-iters 50"
    assert "warmup" in told("moe", f"{given} --lr-warmup-iters 60")


def test_a_width_that_no_heads_divide_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    line = (
        "--ernie-model ernie3 --task-type-vocab-size 5 --task-hidden-size 6 --task-num-attention-heads 3 --world-size 4"
    )
    with pytest.raises(ConfigError, match="Choose a --task-hidden-size that is a multiple of 4"):
        parse("ernie", [*line.split(), "--mp-degree", "4", "--rules-only"], {})


def test_the_rule_of_pieces_has_the_capacity_of_the_run() -> None:
    facts = {"micro_batch_size": 1, "seq_length": 50, "num_experts": 1, "moe_capacity_factor": 1.1}
    found = SimpleNamespace(**facts, moe_router_topk=1, moe_min_capacity=1)
    assert ampipe._capacity(found) == 55  # type: ignore[arg-type]


@pytest.mark.parametrize("weight", ["1e400", "1e-400"])
def test_the_weight_of_a_task_is_a_float(weight: str) -> None:
    with pytest.raises(ValueError, match="NAME:WEIGHT"):
        tasks_of(f"knowledge_mlm:{weight}")
