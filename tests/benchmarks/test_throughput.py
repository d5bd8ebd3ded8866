"""The races of training steps: both sides train on the same, and whatever ends a contestant is in its line."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time

import pytest
import torch

from benchmarks.support.contest import Contest, Rank
from benchmarks.support.steps import make_trainer
from benchmarks.throughput.ours_rank import RoundAndRound, flags
from benchmarks.throughput.peer_rank import batches, make_model, updates
from benchmarks.throughput.prepare import FILES, write
from benchmarks.throughput.run import COMPILE, LAYERS, LIMIT, MEMORY, OURS, Race
from benchmarks.throughput.shape import find
from megapar.arguments import parse

ANSWER = {"seconds": 0.5, "loss": 2.0, "peak_bytes": 8.0, "valid_tokens": 100.0, "flops": 50.0}
SERVE = "import json, sys\nfor line in sys.stdin: print('answer: ' + json.dumps({}), flush=True)"
SLEEP = "import time; time.sleep(60)"


@pytest.mark.parametrize(
    ("model", "lengths", "micro_batches"),
    [("tiny-ernie", "real", 2), ("tiny-dense", "full", 8), ("tiny-moe", "full", 2)],
)
def test_both_sides_have_the_same_loss_of_an_update(model, lengths, micro_batches, tmp_path, monkeypatch):
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    shape = find("cpu", model)
    write(shape, "cpu", tmp_path)
    peer = make_model(shape, tmp_path, "cpu", "")
    data = updates(batches(shape, tmp_path, "cpu", lengths), micro_batches)
    line = [*flags(shape, tmp_path, "cpu", "fp32", 1), "--gradient-merge-acc-step", str(micro_batches)]
    trainer = make_trainer(parse(shape.kind, line, dict(os.environ)), None)
    trainer.loader = loader = RoundAndRound(trainer, shape, tmp_path, lengths)
    for update in data[:1]:
        assert len(update) == micro_batches
        with torch.no_grad():
            wanted = sum(share * peer(**batch).loss.double() for batch, share in update)
        done = trainer.step()
        mean = done.totals.sums["lm"].double() / done.denominators.items["lm"]
        torch.testing.assert_close(mean, wanted, rtol=1e-4, atol=0.0)
        valid = sum(int(batch.get("attention_mask", torch.ones_like(batch["labels"])).sum()) for batch, _ in update)
        assert loader.work()["valid_tokens"] == valid
        assert (valid < micro_batches * shape.tokens) == (lengths == "real")


def test_real_lengths_have_a_mean_of_three_fifths_and_labels_only_inside(tmp_path):
    shape = find("cpu", "tiny-ernie")
    write(shape, "cpu", tmp_path)
    samples = torch.load(tmp_path / FILES["real"], weights_only=False)
    lengths = [int(sample["valid"].sum()) for sample in samples]
    assert len(set(lengths)) == len(lengths)
    assert sum(lengths) / len(lengths) / shape.seq_length == pytest.approx(0.6, abs=0.01)
    for sample, length in zip(samples, lengths, strict=True):
        assert sample["valid"][:length].all()
        assert not sample["tokens"][length:].any()
        assert (sample["labels"] >= 0).sum() == round(length * 0.15) == (sample["labels"][:length] >= 0).sum()


def test_a_turn_ends_in_time_though_a_child_holds_the_pipe():
    script = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}])\n{SLEEP}"
    began = time.monotonic()
    with pytest.raises(TimeoutError), Contest({"hangs": [Rank([sys.executable, "-c", script])]}) as contest:
        contest.turn("hangs", "step", 0.5)
    assert time.monotonic() - began < 20.0


class Raced(Race):
    """A race of scripts, with the names of those that were started."""

    def __init__(self, scripts, jsonl, folder, seconds=60.0):
        options = argparse.Namespace(
            device="cpu", peer=None, ranks=1, micro_batches=1, lengths="full", rounds=2, peer_seconds=1.0, jsonl=jsonl
        )
        options.facts = {"date": "2026-01-02", "commit": "c", "machine": "m"}
        options.ends = time.monotonic() + seconds
        super().__init__(options, "tiny-dense", "fp32", folder, folder)
        self._scripts = scripts
        self.started = []

    def _contestants(self):
        for name, script in self._scripts.items():
            line = [sys.executable, "-c", script]
            yield name, [Rank(line, errors=self._meet / f"{name.replace(' ', '_')}.0.errors")]

    def _by_itself(self, name, ranks):
        self.started.append(name)
        super()._by_itself(name, ranks)


def serve(**more):
    return SERVE.format(ANSWER | more)


def test_whatever_ends_a_contestant_is_in_its_line_and_the_others_run(tmp_path):
    scripts = {
        OURS: serve(),
        "eager": "import sys; sys.exit('torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB')",
        "differs": serve(loss=2.1),
        LIMIT: serve(gemm_flops=200.0),
        COMPILE: SLEEP,
        LAYERS: serve(seconds=0.25),
    }
    path = tmp_path / "found.jsonl"
    race = Raced(scripts, path, tmp_path)
    found = race.run()
    assert race.started == list(scripts)
    assert found["speed_to"] == {LAYERS: 0.5}
    lines = {line["contestant"]: line for line in map(json.loads, path.read_text().splitlines())}
    assert {name for name, line in lines.items() if line["ended"]} == {OURS, LIMIT, LAYERS}
    assert lines["eager"]["reason"] == MEMORY
    assert "Tried to allocate" in lines["eager"]["output"]
    assert "first loss of differs is 2.1, not 2.0" in lines["differs"]["reason"]
    assert (lines[COMPILE]["reason"], "seconds" in lines[COMPILE]) == ("no answer in time", False)
    assert 1.0 < lines[COMPILE]["took"] < 30.0
    assert all((line["date"], line["commit"], line["machine"]) == ("2026-01-02", "c", "m") for line in lines.values())
    again = Raced(scripts | {COMPILE: serve()}, path, tmp_path)
    assert again.run()["speed_to"] == {LAYERS: 0.5, COMPILE: 1.0}
    assert again.started == ["eager", "differs", COMPILE]


def test_contestants_without_time_are_left_out(tmp_path):
    path = tmp_path / "found.jsonl"
    with pytest.raises(SystemExit, match="megapar has no times"):
        Raced({OURS: serve(), "eager": serve()}, path, tmp_path, seconds=2.0).run()
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    assert [line["reason"] for line in lines] == ["left out: 2 s were left"] * 2
    assert math.isclose(lines[0]["took"], 0.0, abs_tol=1.0)
