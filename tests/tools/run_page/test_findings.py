"""Findings at the top of a page: each is said where it is worth it, with a link, and a calm run has none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megapar.planning.plan import Plan
from megapar.tools.run_page.findings import BUSY, DROPPED, IDLE, OFF_PLAN, RISEN, SKIPPED, SLOW, WAITS, sentence
from megapar.tools.run_page.run_folder import RunFolder

CALM = {"loss": 2.0, "iteration_seconds": 1.0, "exposed_seconds": {"ep/all_to_all": 0.05, "pp/receive": 0.05}}
CALM |= {"rank_seconds": {"p50": 1.0, "max": 1.1}, "dropped_tokens": 2, "skipped": False}
EVEN = {"layers": [{"min": 0.9, "max": 1.1}], "loads": [[0.9, 1.1]]}
TOPK = {"configuration": {"moe_router_topk": {"value": 2}}}


def a_run(experts: Mapping[str, Any] = EVEN, **changed: Any) -> RunFolder:
    """Twenty steps of 200 tokens; ``changed``: what is other than in a calm run."""
    records = [{"iteration": n, "consumed_tokens": 200 * n, **CALM, **changed} for n in range(1, 21)]
    return RunFolder("run", records, TOPK, [{"iteration": n, **experts} for n in range(1, 21)], {})


def said(run: RunFolder, plan: object = None) -> list[tuple[str, str]]:
    """The findings, each with the figure that it links to."""
    links = re.findall(r'<a href="#(.*?)">(.*?)</a>', sentence(run, cast(Plan | None, plan)))
    return [(text, place) for place, text in links]


def test_a_calm_run_has_no_findings() -> None:
    assert sentence(a_run(), None) == ""


def test_a_run_of_one_record_without_facts_or_experts_has_none() -> None:
    assert sentence(RunFolder("run", [{"iteration": 1, "loss": 2.0, "consumed_tokens": 8}], {}, [], {}), None) == ""


def test_the_docs_have_the_thresholds() -> None:
    page = (Path(__file__).parents[3] / "docs" / "report.md").read_text(encoding="utf-8")
    table = page.partition("| finding |")[2].partition("##")[0]
    froms = [row.split(" | ")[1] for row in table.splitlines()[2:] if row]
    shares = [f"{100 * share:.0f}" for share in (WAITS, DROPPED, RISEN, SKIPPED)]
    assert [row.split(" %")[0] for row in froms if "%" in row] == shares
    assert [row.split(" times")[0] for row in froms if "times" in row] == [str(one) for one in (SLOW, OFF_PLAN, BUSY)]
    assert IDLE == 0.1
    assert "a tenth" in froms[4]


BAR, LOAD = "where-the-time-of-a-step-went", "load-of-each-expert"


@pytest.mark.parametrize(
    ("run", "finding"),
    [
        (a_run(exposed_seconds={"ep/all_to_all": 0.29}), ("29 % of a step waits for messages", BAR)),
        (
            a_run(exposed_seconds={"pp/receive": 0.12}),
            ("12 % of a step is the pipeline&#x27;s bubble and its messages", BAR),
        ),
        (
            a_run(rank_seconds={"p50": 1.0, "max": 1.3}),
            ("the slowest rank works 1.3 × as long as the median", "work-of-the-ranks"),
        ),
        (
            a_run({"layers": [{"max": 1.4}, {"max": 1.8}]}),
            ("the busiest expert has 1.6 × the mean load", "busiest-expert-over-the-mean"),
        ),
        (
            a_run({**EVEN, "loads": [[0.05, 1.95], [1.0, 1.0]]}),
            ("1 of 4 experts get less than a tenth of the mean load", LOAD),
        ),
        (
            a_run(dropped_tokens=12),
            ("3 % of the (token, choice) pairs are dropped", "dropped-token-choice-pairs"),
        ),
        (a_run(skipped=True), ("20 of 20 steps were skipped", "gradient-norm")),
    ],
)
def test_what_stands_out_is_said_with_its_figure(run: RunFolder, finding: tuple[str, str]) -> None:
    assert said(run) == [finding]


def test_an_evaluation_loss_that_rises_is_said_and_one_that_scatters_is_not() -> None:
    run = a_run()
    for at, loss in ((5, 3.0), (10, 2.5), (15, 2.6)):
        run.records[at - 1]["eval_loss"] = loss  # type: ignore[index]
    assert said(run) == [("the evaluation loss has risen since iteration 10 (2.5 to 2.6)", "loss")]
    run.records[14]["eval_loss"] = 2.51  # type: ignore[index]
    assert said(run) == []


def test_a_step_far_longer_than_planned_is_said_but_not_of_a_cpu() -> None:
    def plan(kernels: str, seconds: float) -> object:
        return SimpleNamespace(kind=SimpleNamespace(kernels=kernels), speed=SimpleNamespace(step_seconds=seconds))

    assert said(a_run(), plan("cuda", 0.5)) == [("a step takes 2.0 × the planned time", BAR)]
    assert said(a_run(), plan("cuda", 0.9)) == []
    assert said(a_run(), plan("cpu", 0.01)) == []
