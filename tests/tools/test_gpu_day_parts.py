"""Parts of the GPU day that measure: small on a CPU, and their judgements."""

from __future__ import annotations

import importlib
import time
from contextlib import contextmanager

import pytest
import torch

from megapar.core.device.ops import OPS
from scripts.gpu_day import apex, clock, fp8, hazards, host, kernels, theft, timed
from scripts.gpu_day.day import Day, Findings
from tests.support import apex as stand_in

LACKS = "not_to_be_had"


def day_of(folder, device="cpu", small=True):
    findings = Findings(folder / "findings.jsonl", {"device": device, "small": small, "commit": "tried"})
    return Day("tried", device, small, folder, time.monotonic() + 100, findings)


def lines_of(day):
    return {what: line for (_, what), line in day.findings.read().items()}


# Part -> its attempts on a small CPU, and those of them that have a criterion there.
PARTS = {
    "apex": (1, ()),
    "clock": (1, ()),
    "copies": (5, ()),
    "fp8": (4, ()),
    "hazards": (3, ("attention with padding", "flight recorder")),
    "host": (4, ()),
    "theft": (5, ()),
}


def test_kernels_of_apex_are_compared_with_torchs(tmp_path, monkeypatch):
    stand_in.installed(tmp_path / "site", monkeypatch)
    wide = lambda total, a, b, begins: total.add_(a.float() @ b.float())  # noqa: E731
    monkeypatch.setattr("scripts.gpu_day.apex.add_product_wide", wide)  # torch's takes CUDA only
    day = day_of(tmp_path)
    apex.run(day)
    lines = lines_of(day)
    assert {name: line["ok"] for name, line in lines.items()} == dict.fromkeys(
        ("rms norm", "layer norm", "weight gradient", "AdamW"), True
    )
    assert all(line["ratio"] > 0 for line in lines.values())


LONG = ("host", "clock")


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=[pytest.mark.table] if part in LONG else []) for part in PARTS]
)
def test_a_part_runs_small_on_a_cpu(part, tmp_path):
    day = day_of(tmp_path)
    importlib.import_module(f"scripts.gpu_day.{part}").run(day)
    lines, (number, judged) = lines_of(day), PARTS[part]
    assert len(lines) == number
    assert day.missing == 0
    for what, line in lines.items():
        assert "error" not in line, line
        assert line["ok"] is (True if what in judged else None), line
        assert "clocks" not in line
    assert (
        len(judged) + sum(LACKS in line or "lacks" in line or "operators_of_a_layer" in line for line in lines.values())
        == number
    )


def test_theft_says_what_to_set() -> None:
    dear = theft.to_set({2: 1.131, 4: 1.152, 8: 1.158})
    assert dear["set"] == "beside_blocks: {2: 1.13, 4: 1.15, 8: 1.16}"
    assert dear["messages of 0.5% of a forward"]["receives_ahead"] in {"0", "1"}
    free = theft.to_set({2: 0.99, 4: 1.0, 8: 1.0})
    assert all(free[name]["receives_ahead"] == "null" for name in free if name != "set")


@pytest.mark.parametrize("part", ["clock", "theft", "host"])
def test_the_trainers_of_a_part_have_legal_flags_on_a_gpu(part, tmp_path, monkeypatch):
    """At the sizes of a GPU, up to the trainer, which needs it."""
    widths = []

    @contextmanager
    def instead(config, *_):
        widths.append((config.model.hidden_size, config.model.num_layers))
        raise InterruptedError
        yield

    module = importlib.import_module(f"scripts.gpu_day.{part}")
    for owner in (module, kernels):
        monkeypatch.setattr(owner, "trainer", instead)
    day = day_of(tmp_path, "cuda", small=False)
    attempts = {"clock": clock.run, "theft": lambda day: day.attempt("step", lambda: theft.step(day)), "host": host.run}
    attempts[part](day)
    assert [line["error"] for line in lines_of(day).values()] == ["InterruptedError: "] * len(widths)
    assert len(widths) == {"clock": 1, "theft": 1, "host": 12 + 2}[part]
    assert {width for width, _ in widths} == ({1024, 2048} if part == "host" else {2048})


# Blocks that hold multiprocessors


class FakeBlocks:
    """Blocks that slow down what runs beside them by one percent each."""

    def __init__(self, ends_early=()):
        self.blocks, self.ends_early, self.outlasted = 0, ends_early, True

    @contextmanager
    def held(self, blocks):
        self.blocks = blocks
        yield
        self.blocks, self.outlasted = 0, blocks not in self.ends_early


@pytest.mark.parametrize("ends_early", [(), (16,)])
def test_ratios_are_those_to_running_alone(ends_early, tmp_path, monkeypatch):
    spinning_blocks = FakeBlocks(ends_early)
    monkeypatch.setattr(theft, "SpinningBlocks", lambda: spinning_blocks)
    answer = theft.beside(day_of(tmp_path, "cuda"), lambda _: [2.0 + 0.02 * spinning_blocks.blocks])
    assert answer.ok is not bool(ends_early)
    measured = [blocks for blocks in theft.BLOCKS if blocks <= min(ends_early, default=32)]
    assert answer.figures["ratios"] == pytest.approx({blocks: 1 + 0.01 * blocks for blocks in measured})
    assert answer.figures["blocks_ended_early"] == list(ends_early)


def test_without_a_compiler_for_the_blocks_the_work_runs_alone(tmp_path, monkeypatch):
    def lacking():
        raise RuntimeError("by_cupy: no; by_torch: no")

    monkeypatch.setattr(theft, "SpinningBlocks", lacking)
    answer = theft.beside(day_of(tmp_path, "cuda"), lambda _: [2.0])
    assert (answer.ok, answer.figures) == (None, {"alone_seconds": 2.0, LACKS: "by_cupy: no; by_torch: no"})


@pytest.mark.skipif(torch.cuda.is_available(), reason="here the kernel is compiled")
def test_both_compilers_say_why_they_cannot():
    with pytest.raises(RuntimeError, match=r"cupy: .*; torch: "):
        theft._compiled()


# fp8


@pytest.mark.parametrize("scale", [fp8.per_tensor, fp8.per_row, lambda x: fp8.per_block(x, 1)])
def test_scaled_numbers_are_those_of_the_operand(scale):
    x = torch.randn(64, 256) * torch.logspace(-3, 0, 64)[:, None]
    values, factor = scale(x)
    assert values.dtype == torch.float8_e4m3fn
    wide = factor.repeat_interleave(fp8.BLOCK, 1) if factor.dim() and factor.shape[1] == 2 else factor
    torch.testing.assert_close(values.float() * wide, x, rtol=2**-4, atol=float(x.abs().max()) * 2**-9 / fp8.LARGEST)


def test_a_block_of_a_weight_has_one_scale_and_they_are_filled_up():
    w = torch.randn(256, 384)
    values, scale = fp8.per_block(w, fp8.BLOCK)
    assert scale.shape == (2, 3)
    assert scale[1, 2] == w[128:, 256:].abs().max() / fp8.LARGEST
    torch.testing.assert_close(values[128:, 256:].float() * scale[1, 2], w[128:, 256:], rtol=2**-4, atol=1e-4)
    padded = fp8.blocks_together(scale)
    assert (padded.shape, padded.stride()) == ((4, 2), (1, 4))
    assert fp8.rows_together(scale).stride() == (1, 2)


def test_a_product_that_e4m3_does_not_explain_is_wrong(tmp_path):
    day, exact = day_of(tmp_path), torch.randn(8, 16, dtype=torch.float64)
    good, bad = (fp8._measured(day, lambda by=by: by * exact, exact, 1.0) for by in (1.03, 1.1))
    assert fp8._judged(day, {"good": good, "refused": {LACKS: "no"}}).ok is None
    assert fp8._judged(day, {"good": good, "bad": bad}).ok is False
    assert fp8._judged(day, {"nan": {"error": float("nan")}}).ok is False


# Hazards


def test_a_result_that_is_not_a_number_is_wrong(tmp_path, monkeypatch):
    def lost(q, k, v, **more):
        y = OPS["attention"]["cpu"](q, k, v, **more)
        y.register_hook(lambda gradient: gradient * float("nan"))
        return y

    monkeypatch.setattr(Day, "operator", lambda day, name: lost)
    answer = hazards.padded(day_of(tmp_path))
    assert answer.ok is False
    nan = answer.figures["package"]["nan"]
    assert nan["result"] == 0
    assert nan["q"] > 0


def test_the_scores_are_as_low_as_the_fault_needs(tmp_path):
    (q, _, _), valid, lowest = hazards.low_scores(day_of(tmp_path), hazards.LENGTH)
    assert hazards.LENGTH % 128 == 64
    assert q.shape[2] == hazards.LENGTH
    assert lowest < 1.5 * hazards.LOWEST
    assert not valid.all()


@pytest.mark.parametrize(("record", "ok"), [(b"", False), (b'{"record_id":1}' * hazards.COLLECTIVES, True)])
def test_a_package_that_misses_the_collectives_is_wrong(record, ok, tmp_path, monkeypatch):
    monkeypatch.setattr(hazards, "flight_record", lambda: record)
    monkeypatch.setattr(hazards.torch._C._distributed_c10d, "_dump_nccl_trace_json", lambda: b'{"record_id":0}', False)
    answer = hazards.recorders(day_of(tmp_path))
    assert answer.ok is ok
    assert answer.figures["nccl"] == 1


# The others


def test_seconds_are_measured_of_each_call(tmp_path):
    calls = []
    assert len(timed.seconds_each(day_of(tmp_path), lambda: calls.append(1), 10)) == 2
    assert len(calls) == 3
    assert timed.moved(3e9, 0.5) == {"milliseconds": 500.0, "gigabytes_per_second": 6.0}
    assert timed.computed(4e12, 2.0)["tflops"] == 2.0
