"""Figures of a device by flags: what they replace in a plan and in a run, and what is said where they are missing."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch

from megapar.arguments import Config, parse
from megapar.core.device.base import Device
from megapar.core.device.kinds import kinds
from megapar.core.device.peak import peak_flops
from megapar.errors import ConfigError
from megapar.planning.out_of_memory import planned_memory
from megapar.planning.plan import Plan
from megapar.planning.text import describe
from megapar.tools.plan import main
from megapar.training.building.device_figures import kind_of_run, unknown_device, with_figures
from megapar.training.building.expert_dispatch import dispatch_choice

A100 = kinds()["a100-80g"]


def config_of(*flags: str, ranks: int = 1) -> Config:
    return parse("moe", [*flags, "--rules-only", "--world-size", str(ranks)], {})


def test_a_figure_replaces_that_of_the_row_and_no_other() -> None:
    config = config_of("--device-tflops", "71", "--device-memory-gib", "24", "--link-gb", "16", "--network-gb", "2")
    kind = with_figures(A100, config)
    assert kind.flops == {"bf16": 71e12}  # of other dtypes nothing is known
    assert (kind.memory_bytes, kind.inside, kind.between) == (24 * 2**30, 16e9, 2e9)
    changed = {"flops", "memory_bytes", "inside", "between", "replaced"}
    assert all(getattr(kind, name) == getattr(A100, name) for name in vars(A100) if name not in changed)
    assert kind.title == "a100-80g with 71 TFLOP/s in bf16, 24 GiB, 16 GB/s in a node, 2 GB/s between nodes"
    assert with_figures(kind, config) == kind
    assert with_figures(A100, config_of()) is A100


@pytest.mark.parametrize(("dtype", "expected"), [("auto", "fp16"), ("fp32", "fp32")])
def test_products_are_those_of_the_runs_dtype(dtype: str, expected: str) -> None:
    kind = with_figures(kinds()["v100-32g"], config_of("--device-tflops", "10", "--dtype", dtype))
    assert kind.flops == {expected: 10e12}


@pytest.mark.parametrize(
    ("figure", "ranks", "flags"),
    [
        ("--device-tflops", 1, ()),
        ("--link-gb", 2, ("--mp-degree", "2")),
        ("--network-gb", 4, ("--ep-degree", "4", "--moe-dispatch", "node", "--ranks-per-node", "2")),
    ],
)
def test_a_plan_with_less_of_it_takes_longer(figure: str, ranks: int, flags: tuple[str, ...]) -> None:
    more, less = (Plan(config_of(*flags, figure, value, ranks=ranks), A100).speed for value in ("50", "1"))
    assert less.step_seconds > more.step_seconds


def test_a_plan_fits_into_the_memory_that_is_given() -> None:
    plan = Plan(config_of("--device-memory-gib", "0.5"), A100)
    assert not plan.fits
    assert "the 0.5 GiB of a100-80g with 0.5 GiB" in plan.advice()
    assert describe(plan).startswith("megapar plan: 1 x a100-80g with 0.5 GiB, ")


def test_a_plan_does_not_guess_the_other_figures(capsys: pytest.CaptureFixture[str]) -> None:
    for more in ((), ("--search", "--global-batch-size", "8")):
        assert main(["--world-size", "2", "--link-gb", "16", *more]) == 2
        said = capsys.readouterr().err
        assert "[device-figures] --link-gb replaces a figure" in said
        assert "--device-kind: v100-32g, " in said
    assert main(["--device-kind", "RTX_4090", "--link-gb", "16", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert (planned["device_kind"], planned["device_figures"]) == ("rtx-4090-24g", ["16 GB/s in a node"])


def test_fp8_of_a_device_whose_bf16_is_given_is_not_known() -> None:
    from megapar.planning.assume import Assumed

    kind, fp8 = kinds()["rtx-4090-24g"], Assumed(fp8="all")
    assert Plan(config_of(), kind, fp8).speed.mfu > 0
    with pytest.raises(ConfigError, match="rtx-4090-24g with 100 TFLOP/s in bf16 has no fp8 products"):
        Plan(config_of("--device-tflops", "100"), kind, fp8)


def test_the_dispatch_of_a_run_follows_its_links() -> None:
    flags = ("--num-experts", "32", "--ep-degree", "16", "--moe-router-topk", "8", "--seq-length", "4096")
    sizes = ("--hidden-size", "2048", "--num-attention-heads", "16", "--ranks-per-node", "8")
    slow = config_of(*flags, *sizes, "--link-gb", "200", "--network-gb", "5", ranks=16)
    fast = config_of(*flags, *sizes, "--link-gb", "20", "--network-gb", "200", ranks=16)
    chosen = [dispatch_choice(config, kind_of_run(config, "cuda", ""), "bf16") for config in (slow, fast)]
    assert [one.name for one in chosen] == ["node", "plain"]
    assert "h100-80g with 200 GB/s in a node, 5 GB/s between nodes" in chosen[0].reason


def test_a_flag_gives_the_peak_of_mfu_before_the_table_and_before_a_measurement() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert peak_flops(Device(), dtype, 0.25) == (0.25e12, "flag")


def test_a_run_says_whose_figures_an_unknown_device_has() -> None:
    assert unknown_device(config_of(), "cuda", "NVIDIA GeForce RTX 4090") == ""
    assert unknown_device(config_of(), "cpu", "cpu (2 threads)") == ""
    said = unknown_device(config_of("--link-gb", "16"), "cuda", "NVIDIA GeForce RTX 3090")
    assert "NVIDIA GeForce RTX 3090 is not in the device table" in said
    assert "h100-80g with 16 GB/s in a node" in said


def test_out_of_memory_on_an_unknown_device_is_explained_by_its_memory() -> None:
    assert "--device-memory-gib" in planned_memory(config_of(), "cuda", "abacus")
    said = planned_memory(config_of("--device-memory-gib", "0.01"), "cuda", "abacus")
    assert "h100-80g with 0.01 GiB" in said
    assert "stage 0 peaks at" in said


def test_without_flags_a_plan_is_the_rows() -> None:
    config = config_of("--mp-degree", "2", ranks=2)
    assert asdict(Plan(config, A100).speed) == asdict(Plan(config, with_figures(A100, config)).speed)
