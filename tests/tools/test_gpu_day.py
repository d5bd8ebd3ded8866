"""scripts/gpu_day.sh: a small day on a CPU, and what keeps its findings when something ends it."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import select
import subprocess
import sys
import time
import types
import warnings
from pathlib import Path

import pytest
import torch

from megapar.core.device.attention.table import CAUSAL, CUDNN, ROWS
from megapar.core.device.base import Device
from megapar.core.device.ops import OPS
from megapar.data.tokenizers.tokenizer import MockTokenizer
from megapar.moe.router import Router
from scripts.gpu_day import (
    ampipe,
    attention,
    curve,
    equivalence,
    kernels,
    operators,
    row_operators,
    run,
    throughput,
    waits,
)
from scripts.gpu_day.day import PART, Answer, Day, Findings
from scripts.gpu_day.trainers import Chain, flags, losses, parsed, trainer
from tests.equivalence.run import Trace

ROOT = Path(__file__).parents[2]
FACTS = {"device": "cpu", "small": True, "commit": "tried"}


def small_day(out, *more):
    line = [str(ROOT / "scripts/gpu_day.sh"), "--device", "cpu", "--small", "--minutes", "10", "--out", str(out), *more]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=600)
    lines = [json.loads(text) for text in (out / "findings.jsonl").read_text().splitlines()]
    return done, lines


@pytest.mark.table
@pytest.mark.parametrize(
    "parts", ["operators,attention,ampipe,waits,kernels,equivalence,micro,curve", "throughput,predicted"]
)
def test_a_small_day_finds_nothing_wrong(parts, tmp_path):
    done, lines = small_day(tmp_path, "--parts", parts)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in lines:
        assert line["ok"] is not False
        assert "error" not in line
        assert "left_out" not in line or line["left_out"] == 0
        assert {"part", "what", "date", "device", "commit"} <= set(line)
    assert {line["part"] for line in lines} == {"machine", "summary", *parts.split(",")}
    for part in parts.split(","):
        mine = [line for line in lines if line["part"] == part]
        assert len(mine) > 1
        assert (mine[-1]["what"], mine[-1]["ok"]) == (PART, True)
    assert json.loads(done.stdout.splitlines()[-1])["wrong"] == []
    last = {(line["part"], line["what"]): line for line in lines}
    if "predicted" in parts:
        assert last["predicted", "tiny-moe"]["predicted_to_measured_seconds"] > 0
        (results,) = tmp_path.glob("20*-cpu-*.jsonl")
        raced = [json.loads(text) for text in results.read_text().splitlines()]
        found = [(one["model"], one["lengths"], one["micro_batches"], one["contestant"]) for one in raced]
        full = [("tiny-moe", "full", 1, name) for name in ("megapar", "eager", "sum of kernels")]
        real = [("tiny-ernie", "real", 1, name) for name in ("megapar", "eager")]
        assert found == [*full, *real, *(("tiny-moe", "full", 2, name) for name in ("megapar", "eager"))]
        assert all(one["ended"] and one["date"] and one["commit"] and one["machine"] for one in raced)
        assert last["throughput", "profile of tiny-ernie, real lengths"]["kernel_seconds"] > 0
    else:
        assert json.loads((tmp_path / "kernels.json").read_text())["operators"]["mm"]["calls"] > 0


def test_the_order_is_the_days_and_unknown_parts_and_models_are_refused():
    assert list(run.PARTS)[:4] == ["ranks", "hazards", "theft", "copies"]
    for option, word in (("--parts", "ops"), ("--models", "gpt")):
        line = [str(ROOT / "scripts/gpu_day.sh"), option, word]
        done = subprocess.run(line, capture_output=True, text=True)
        assert done.returncode == 2
        assert f"no such {option[2:]}: {word}" in done.stderr


@pytest.fixture
def findings(tmp_path):
    return Findings(tmp_path / "findings.jsonl", FACTS)


def day_of(findings, **more):
    return Day("tried", "cpu", True, findings.path.parent, time.monotonic() + 100, findings, **more)


@pytest.fixture
def part(monkeypatch, findings):
    """Runs a function as a part, in a process of its own; the lines on it."""

    def as_part(work, seconds=60.0, again=False):
        module = types.ModuleType("scripts.gpu_day.tried")
        module.run = work
        monkeypatch.setitem(sys.modules, "scripts.gpu_day.tried", module)
        asked = argparse.Namespace(device="cpu", small=True, out=findings.path.parent, again=again, models=())
        run._run("tried", asked, findings, seconds)
        return {what: line for (name, what), line in findings.read().items() if name == "tried"}

    return as_part


def test_a_part_that_hangs_is_cut_off_with_what_it_started(part, findings):
    def hang(day):
        started = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        day.attempt("found before", lambda: Answer(True, {"started": started.pid}))
        started.wait()

    lines = part(hang, seconds=5.0)
    assert lines["found before"]["ok"]
    assert (lines[PART]["ok"], lines[PART]["error"]) == (False, "cut off")
    with contextlib.suppress(ProcessLookupError):  # gone already; else a killed process ends when it runs next
        ended = os.pidfd_open(lines["found before"]["started"])
        assert select.select([ended], [], [], 30)[0] == [ended]
        os.close(ended)
    assert run._sum_up(findings, ["tried"]) == 1


def test_errors_are_findings_and_the_rest_goes_on(part, findings):
    def work(day):
        day.attempt("breaks", lambda: 1 / 0)
        day.attempt("holds", lambda: Answer(True, {"figure": float("nan")}))

    lines = part(work)
    assert "ZeroDivisionError" in lines["breaks"]["error"]
    assert "1 / 0" in lines["breaks"]["traceback"]
    assert lines["holds"]["figure"] == "nan"
    assert lines[PART]["ok"]
    assert run._sum_up(findings, ["tried"]) == 1


def test_a_part_that_dies_says_so(part):
    def die(day):
        sys.exit(3)

    assert part(die)[PART]["error"] == "ended with status 3"


def test_a_later_call_goes_on_where_time_ran_out(part, findings):
    called = findings.path.parent / "called"

    def work(day):
        for name in ("first", "second"):
            day.attempt(name, lambda name=name: _called(called, name), least=0.0 if name == "first" else needed)

    needed = 1000.0
    lines = part(work)
    assert (lines["first"]["ok"], lines["second"]["ok"], lines[PART]["ok"]) == (True, None, False)
    needed = 0.0
    assert part(work)[PART]["ok"]
    assert called.read_text().split() == ["first", "second"]
    part(work)
    assert called.read_text().split() == ["first", "second"]
    part(work, again=True)
    assert called.read_text().split() == ["first", "second"] * 2


def _called(path, name):
    with path.open("a") as file:
        file.write(name + "\n")
    return Answer(True, {})


def test_other_commits_and_half_lines_are_not_read(findings):
    findings.record("part", "what", True)
    Findings(findings.path, {**FACTS, "commit": "another"}).record("part", "theirs", False)
    with findings.path.open("a") as file:
        file.write('{"part": "part", "what": "cut')
    assert list(findings.read()) == [("part", "what")]


def test_every_entry_of_the_operator_table_is_called():
    beside = {"adamw", "attention_block", "attention_block_backward", "cross_entropy", "route"}
    beside |= {*row_operators.ENTRIES, *(name for name in OPS if name.startswith("fp8"))}
    assert set(operators._CASES) | beside == set(OPS)


def test_a_form_that_is_a_little_wrong_is_found():
    x = torch.randn(4, 2, 8, dtype=torch.bfloat16, requires_grad=True)
    case, reference = operators.Case("rows", (x,), {}), OPS["swiglu"]["reference"]
    tolerance = operators.TOLERANCE[torch.bfloat16]
    assert operators.compare(reference, reference, case, tolerance).ok
    assert not operators.compare(lambda x: 1.1 * reference(x), reference, case, tolerance).ok
    assert not operators.compare(lambda x: reference(x).detach() + 0 * x.sum(), reference, case, tolerance).ok
    assert not operators.compare(lambda x: reference(x) * float("nan"), reference, case, tolerance).ok


def test_waits_are_told_by_the_last_line_of_the_package():
    def ask():
        warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=1)

    inside = compile("\n\ndef wait(ask):\n    ask()\n", str(waits.PACKAGE / "core" / "thing.py"), "exec")
    scope: dict[str, object] = {}
    exec(inside, scope)
    with waits.seen() as found:
        scope["wait"](ask)  # type: ignore[operator]
        scope["wait"](ask)  # type: ignore[operator]
        warnings.warn("a prototype, which does not yet detect all synchronizing operations", UserWarning, stacklevel=1)
    assert dict(found) == {"megapar/core/thing.py:4 wait": 2}
    assert waits.place_of("megapar/core/thing.py:4 wait") == ("megapar/core/thing.py", "wait")


def event(name, host=True, kernels=(), children=()):
    kind = types.SimpleNamespace(name="CPU" if host else "CUDA")
    launched = [types.SimpleNamespace(name=kernel) for kernel in kernels]
    return types.SimpleNamespace(
        name=name, device_type=kind, kernels=launched, cpu_children=list(children), is_user_annotation=False
    )


def test_kernels_are_counted_for_who_called_them():
    copy = event("aten::copy_", kernels=["Memcpy HtoD (Pageable -> Device)", "elementwise"])
    cast = event("aten::_to_copy", children=[copy])
    product = event("aten::mm", kernels=["Memset (Device)", "gemm", "splitKreduce"])
    names = ("Memset (Device)", "gemm", "splitKreduce", "elementwise", "Memcpy HtoD (Pageable)")
    device = [event(name, host=False) for name in names]
    found = kernels.counted([cast, copy, product, event("cudaLaunchKernel"), *device])
    assert (found.launches, found.fills, found.copies) == (3, 1, 1)
    assert found.calls == {"_to_copy": 1, "copy_": 1, "mm": 1}
    assert found.kernels == {"_to_copy": 1, "copy_": 1, "mm": 2}
    assert +found.filled == {"mm": 1}


@pytest.mark.parametrize(
    ("device", "kind"), [("NVIDIA H200", "h200-141g"), ("NVIDIA H20", "h20-96g"), ("cpu", "cpu"), ("Radeon", "")]
)
def test_the_planner_is_asked_for_the_device_that_is_there(device, kind):
    assert throughput.planned_kind(device) == kind


@pytest.mark.parametrize(
    ("contestant", "reason", "wrong"),
    [
        ("megapar", "", False),
        ("megapar --compile", "out of memory", True),
        ("eager", "out of memory", False),
        ("eager", "no answer in time", True),
        ("compile", "no answer in time", False),
        ("compile-layers", "tiny-moe fp32: first loss of compile-layers is 2.0, not 1.0", True),
    ],
)
def test_only_what_should_have_run_is_wrong(contestant, reason, wrong):
    assert throughput.wrong({"contestant": contestant, "ended": not reason, "reason": reason}) == wrong


def test_results_are_named_by_date_device_and_commit(findings):
    name = throughput.results_file(day_of(findings)).name
    assert re.fullmatch(r"20\d\d-\d\d-\d\d-cpu-tried\.jsonl", name)


def test_balance_is_forced_on_every_expert():
    sizes = types.SimpleNamespace(topk=2)
    with throughput.balanced():
        chosen = Router.choose(types.SimpleNamespace(sizes=sizes), torch.rand(10, 5))
    assert chosen.flatten().bincount().tolist() == [4] * 5
    assert all(a != b for a, b in chosen.tolist())


@pytest.mark.table
def test_a_race_that_raced_nothing_is_wrong(findings, monkeypatch):
    """AMPipe without its deferred launches, and with losses that move."""
    day = day_of(findings)
    assert not ampipe.race(day, ampipe.RUNS["plain"], 1).ok
    runs = iter([[6.0], [6.0], [6.1]])
    monkeypatch.setattr(ampipe, "losses", lambda made, steps: losses(made, 1) and next(runs))
    assert not ampipe.race(day, ampipe.RUNS["plain"], 2).ok


@pytest.fixture
def worse(monkeypatch):
    """Traces of the equivalence part, of which those with these numbers have scaled gradients."""

    def scale(numbers, by):
        real, made = equivalence.traced, []

        def traced(*arguments):
            found: Trace = real(*arguments)
            made.append(found)
            if len(made) in numbers:
                found.gradients = [{name: by * x for name, x in step.items()} for step in found.gradients]
            return found

        monkeypatch.setattr(equivalence, "traced", traced)
        return made

    return scale


def test_equivalence_finds_a_device_that_rounds_too_much(findings, worse):
    row = equivalence.rows(small=True)[0]
    assert not any("dropout" in flag for row in equivalence.rows(small=False) for flag in row.options)
    worse([2], 1.1)  # the device's
    answer = equivalence.compared(day_of(findings), row)
    assert not answer.ok
    assert list(answer.figures["wrong"]) == list(equivalence.ROUNDINGS)
    for found in answer.figures["wrong"].values():
        assert "bf16 gradient" in found[0]


def test_equivalence_allows_what_another_rounding_of_the_cpu_shows(findings, worse):
    made = worse([2, 4], 1.1)  # the device's and the CPU's second one
    answer = equivalence.compared(day_of(findings), equivalence.rows(small=True)[0])
    assert answer.ok
    assert len(made) == 4
    assert answer.figures["wrong"]["fused attention"]
    assert not answer.figures["wrong"]["plain attention"]


def test_rows_whose_packages_are_missing_are_figures(findings, monkeypatch):
    def lacking(*_):
        raise ModuleNotFoundError("No module named 'ahocorasick'", name="ahocorasick")

    monkeypatch.setattr(equivalence, "traced", lacking)
    answer = equivalence.compared(day_of(findings), equivalence.rows(small=True)[0])
    assert (answer.ok, answer.figures) == (None, {"not_to_be_had": "No module named 'ahocorasick'"})


def test_a_profile_adds_kernels_up_and_finds_the_time_without_one():
    def ran(name, start, end, launched=()):
        span = types.SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
        kernels = [types.SimpleNamespace(duration=took) for took in launched]
        return types.SimpleNamespace(
            name=name,
            time_range=span,
            device_type=types.SimpleNamespace(name="CPU"),
            kernels=kernels,
            input_shapes=[[2, 3], []],
        )

    events = [ran("a", 0.0, 4e6), ran("b", 3e6, 5e6), ran("c", 8e6, 9e6)]
    assert kernels.busy(events) == 6.0
    launches = list(kernels.launches([ran("aten::mm", 0.0, 1.0, [3000.0, 1000.0]), ran("aten::view", 0.0, 1.0)]))
    assert launches == [("mm [[2, 3]]", 3000.0), ("mm [[2, 3]]", 1000.0)]
    assert kernels.longest([("short", 10.0), *launches]) == {
        "mm [[2, 3]]": {"calls": 1.0, "milliseconds": 2.0, "share": 4000.0 / 4010.0},
        "short": {"calls": 0.5, "milliseconds": 0.005, "share": 10.0 / 4010.0},
    }


def test_a_curve_that_leaves_the_other_is_wrong(findings, monkeypatch):
    curves = iter([[6.0, 2.0], [6.0, 2.3], [6.0, 2.0], [6.0, 2.01]])
    monkeypatch.setattr(curve, "_losses", lambda *_: next(curves))
    assert not curve._curve(day_of(findings), "moe").ok
    assert curve._curve(day_of(findings), "moe").ok


def test_the_chain_names_its_next_token_and_repeats(findings):
    config = parsed(flags(day_of(findings), "dense"), "dense")
    with trainer(config, "cpu", learnable=True) as made:
        chain = made.corpus.train
        assert isinstance(chain, Chain)
        assert isinstance(made.corpus.tokenizer, MockTokenizer)
        first, again = chain[5], chain[5]
    tokens, labels = first["tokens"], first["labels"]
    assert (tokens == again["tokens"]).all()
    assert (labels[:-1] == tokens[1:]).all()
    named = (3 * (tokens - 7) + 1) % 211 + 7
    assert 0.5 < (named == labels).mean() < 0.95


def test_a_machine_without_the_kernels_of_attention_says_so(findings):
    attention.run(day_of(findings))
    lines = list(findings.read().values())
    documents = next(line for line in lines if "documents, each" in line["what"])
    assert documents["ok"] is True, "the day's own reference on a CPU"
    lines.remove(documents)
    assert len(lines) == 2 * (3 * 2 + 5)  # two head sizes; three rows of cuDNN with two forms, one of FlashAttention-3
    assert all(line["ok"] is None and "compute capability" in line["not_to_be_had"] for line in lines)


def test_whole_samples_are_compared_with_flash_attention_where_torch_chooses_cudnn(findings, monkeypatch):
    """On Hopper the operator without a name is cuDNN itself."""
    ran = []
    operators = {name: {"cpu": name} for name in ("attention", "attention_flash", "attention_cudnn")}
    slow = attention.Measured(2.0, 0.0, True)
    monkeypatch.setattr(attention, "OPS", operators)
    hopper = types.SimpleNamespace(name="an H200", capability=(9, 0), attention_lacks=lambda kernel: "")
    monkeypatch.setattr(attention, "pick", lambda kind: hopper)
    monkeypatch.setattr(attention, "measured", lambda day, form, size, kernel: ran.append(kernel) or slow)
    rows = [row for row in ROWS if row.kernel == CUDNN]
    answers = [attention.candidate(day_of(findings), row, CAUSAL, 64) for row in rows]
    assert ran == ["attention_flash", "attention_cudnn"]
    assert ["not_to_be_had" in answer.figures for answer in answers] == [False, True, True]


@pytest.mark.parametrize("form", ["causal", "full", "lower-right", "documents"])
def test_kernels_of_attention_are_measured_against_fp64(form, findings):
    kernel = OPS[attention._OPERATORS[form]]["cpu"]
    found = attention.measured(day_of(findings), form, 16, kernel)
    assert 0 < found.error < operators.TOLERANCE[torch.bfloat16]
    assert found.milliseconds > 0
    assert found.repeats
    wrong = attention.measured(day_of(findings), form, 16, lambda *tensors, **more: 1.1 * kernel(*tensors, **more))
    assert wrong.error > operators.TOLERANCE[torch.bfloat16]


def test_a_candidate_is_confirmed_if_it_is_faster_and_right():
    figures = ((2.0, 0.01, True), (1.0, 0.01, False), (1.0, 0.5, True))
    slow, fast, wrong = (attention.Measured(*some) for some in figures)
    assert attention.judged(slow, fast, Device()).figures["confirms"].startswith('standing="20')
    assert "repeats" not in attention.judged(slow, fast, Device()).figures
    assert "confirms" not in attention.judged(fast, slow, Device()).figures
    answer = attention.judged(slow, wrong, Device())
    assert not answer.ok
    assert "confirms" not in answer.figures
