"""``megapar plan --search``: legal, fitting, fastest first, and every neighbour with its reason."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import time
from pathlib import Path
from typing import Any

import pytest

from megapar.tools.main import main

CONFIGS = Path(__file__).parents[2] / "configs"


@functools.cache
def search(*flags: str) -> dict[str, Any]:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main(["plan", "--search", "--json", *flags]) == 0
    found: dict[str, Any] = json.loads(said.getvalue())
    return found


def test_the_best_layouts_are_legal_fit_and_come_fastest_first(capsys: pytest.CaptureFixture[str]) -> None:
    config = ("--config", str(CONFIGS / "mixtral-8x7b.yaml"))
    found = search(*config, "--world-size", "64")
    seconds = [plan["step_seconds"] for plan in found["best"]]
    assert seconds == sorted(seconds)
    assert all(plan["fits"] for plan in found["best"])
    assert main(["plan", "--json", *config]) == 0
    assert json.loads(capsys.readouterr().out)["step_seconds"] > seconds[0]
    flags = [f"--{name.replace('_', '-')}={str(v).lower()}" for name, v in found["best"][0]["flags"].items()]
    assert main(["plan", "--json", *config, *flags]) == 0
    assert json.loads(capsys.readouterr().out)["step_seconds"] == pytest.approx(seconds[0])


def test_every_neighbour_has_its_reason() -> None:
    found = search("--config", str(CONFIGS / "mixtral-8x7b.yaml"), "--world-size", "64")
    assert len(found["neighbours"]) >= 8
    for why in found["neighbours"].values():
        assert "slower" in why or "GiB more" in why or why.startswith("[")
    assert not any(why.startswith("-") for why in found["neighbours"].values())


def test_layouts_that_do_not_allow_an_assumed_technique_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--config", str(CONFIGS / "tiny.yaml"), "--assume", "dualpipe")
    assert {plan["layout"]["pp"] for plan in search(*flags, "--world-size", "2")["best"]} == {2}
    assert main(["plan", "--search", *flags, "--world-size", "1"]) == 2
    assert "no layout is legal: [assume] --assume dualpipe: one stage" in capsys.readouterr().out


def test_long_sequences_are_shared_by_either_algorithm() -> None:
    flags = ("--num-experts", "0", "--num-layers", "4", "--hidden-size", "1024", "--num-attention-heads", "8")
    flags += ("--num-query-groups", "2", "--seq-length", "16384", "--dtype", "bf16", "--recompute-interval", "1")
    found = search(*flags, "--world-size", "8", "--global-batch-size", "2")
    best = found["best"][0]
    assert best["layout"]["cp"] * best["layout"]["mp"] * best["layout"]["pp"] >= 4  # two sequences on eight ranks
    algorithms = {plan["flags"].get("context_parallel_algo") for plan in found["best"]}
    assert algorithms & {"megatron_cp_algo", "ulysses_cp_algo", "allgather_cp_algo"}
    assert any("cp " in said for said in found["neighbours"])


def test_ten_thousand_ranks_take_seconds() -> None:
    start = time.process_time()
    flags = ("--world-size", "10240", "--global-batch-size", "5120")
    found = search("--config", str(CONFIGS / "megatron-h100-177b.yaml"), *flags)
    assert found["best"]
    assert time.process_time() - start < 20, "what is promised for 10,240 devices"


def test_a_model_that_fits_nowhere_says_by_how_much(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--num-experts", "0", "--num-layers", "8", "--hidden-size", "16384", "--num-attention-heads", "128")
    assert main(["plan", "--search", *flags, "--world-size", "2", "--global-batch-size", "2"]) == 3
    said = capsys.readouterr().out
    assert "no layout fits" in said
    assert "GiB more than the 80.0 GiB" in said


def test_a_batch_that_no_layout_can_share_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--num-experts", "0", "--num-layers", "8", "--world-size", "1024", "--global-batch-size", "24")
    assert main(["plan", "--search", *flags]) == 2
    said = capsys.readouterr().err
    assert "no layout of 1,024 ranks can share a global batch of 24" in said
    assert "a multiple of 256" in said


def test_without_a_batch_there_is_nothing_to_compare(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--search", "--num-experts", "0", "--world-size", "8"]) == 2
    assert "--global-batch-size" in capsys.readouterr().err
