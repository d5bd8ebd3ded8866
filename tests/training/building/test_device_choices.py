"""Choices that depend on a device and its figures: figures by flags, the dispatch of experts, the overlap of layers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megapar.arguments import Config, parse
from megapar.checkpoints.ownership.identity import flags_of
from megapar.core.comm.axis import Axis
from megapar.core.device.base import Device
from megapar.core.device.kinds import kind_of, kinds
from megapar.core.device.peak import peak_flops
from megapar.core.tensor_parallel.layers import ColumnLinear, RowLinear
from megapar.core.tensor_parallel.overlap_price import CutLinear
from megapar.errors import ConfigError
from megapar.launch_environment import equal_nodes
from megapar.planning.assume import Assumed
from megapar.planning.devices import planned_memory
from megapar.planning.plan import Plan
from megapar.planning.text import describe
from megapar.tools.plan import main
from megapar.training.building.device_choices import (
    DispatchChoice,
    assumed_node,
    cut_linears,
    dispatch_choice,
    kind_of_run,
    tensor_overlap,
    unknown_device,
    with_figures,
)
from megapar.training.building.parallelize import check_device
from megapar.training.building.parts import make_overlap
from megapar.training.loop.outline import outline
from tests.model.small import BIASED_MOE, DENSE, ERNIE, MOE, build

A100 = kinds()["a100-80g"]


def config_of(*flags: str, ranks: int = 1) -> Config:
    return parse("moe", [*flags, "--rules-only", "--world-size", str(ranks)], {})


def test_a_figure_replaces_that_of_the_row_and_no_other() -> None:
    config = config_of("--device-tflops", "71", "--device-memory-gib", "24", "--link-gb", "16", "--network-gb", "2")
    kind = with_figures(A100, config)
    assert kind.flops == {"bf16": 71e12}  # of other dtypes nothing is known
    assert (kind.memory_bytes, kind.inside, kind.between) == (24 * 2**30, 16e9, 2e9)
    changed = {"flops", "memory_bytes", "inside", "pair", "between", "replaced"}
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


H100 = kinds()["h100-80g"]
DISPATCHED = (
    *("--num-layers", "2", "--hidden-size", "2048", "--num-attention-heads", "16", "--num-experts", "128"),
    *("--moe-router-topk", "8", "--moe-ffn-hidden-size", "768", "--seq-length", "4096", "--vocab-size", "1000"),
    *("--micro-batch-size", "1", "--data-path", "mock", "--validate-only"),
)


def dispatched(*flags: str, ranks: int = 16, environ: Mapping[str, str] | None = None) -> Config:
    return parse("moe", [*DISPATCHED, "--world-size", str(ranks), "--ep-degree", str(ranks), *flags], environ or {})


def chosen(*flags: str, ranks: int = 16, node: int | None = None) -> DispatchChoice:
    return dispatch_choice(dispatched(*flags, ranks=ranks), H100, "bf16", node)


def test_without_nodes_all_ranks_are_on_one_and_nothing_changes() -> None:
    assert chosen() == DispatchChoice(0, "the 16 ranks of ep are on one node")
    assert chosen(node=16).name == "plain"
    assert dispatch_choice(dispatched("--ep-degree", "1"), H100, "bf16", 8).node_ranks == 0


def test_auto_goes_by_node_where_it_is_faster_by_estimate() -> None:
    """The formula by hand: rows of 4112 and 4096 bytes at 50 GB/s, four of them by pairs; once per node and rank."""
    found = chosen("--ranks-per-node", "8")
    assert found.node_ranks == 8
    tokens, latency = 4096, H100.device_class.latency_seconds
    plain = sum(tokens * 4 * row / 50e9 + latency for row in (4112, 4096)) * 2
    between, within = 0.9969041, 5.7719487
    by_node = sum(tokens * row * (between / 50e9 + within / 450e9) + 2 * latency for row in (4144, 4096)) * 2
    assert found.reason == f"{plain / by_node:.2f} times the speed of plain by estimate on h100-80g, 2 nodes"


def test_auto_stays_plain_where_it_is_not_worth_it() -> None:
    """A choice per token has no copies to save, and short messages only have more latencies."""
    assert chosen("--ranks-per-node", "8", "--moe-router-topk", "1").node_ranks == 0
    assert chosen("--ranks-per-node", "8", "--seq-length", "32").node_ranks == 0


def test_auto_stays_plain_where_ep_is_not_whole_nodes() -> None:
    ragged = dispatched("--num-experts", "12", "--moe-router-topk", "4", "--ranks-per-node", "8", ranks=12)
    assert dispatch_choice(ragged, H100, "bf16") == DispatchChoice(
        0, "the 12 ranks of ep are not whole nodes of 8 ranks"
    )


def test_more_experts_than_a_slot_can_name_travel_plainly() -> None:
    nodes = ("--ranks-per-node", "8")
    assert chosen(*nodes, "--num-experts", "32768").node_ranks == 8
    assert chosen(*nodes, "--num-experts", "32784") == DispatchChoice(0, "by node takes 32,768 experts at most")
    with pytest.raises(ConfigError, match=r"moe-dispatch-experts.*takes 32,768 experts at most.*--num-experts 32768"):
        dispatched("--moe-dispatch", "node", "--num-experts", "32784")


def test_a_request_is_followed_or_refused() -> None:
    assert chosen("--moe-dispatch", "plain", node=8) == DispatchChoice(0, "by --moe-dispatch")
    assert chosen("--moe-dispatch", "node", "--moe-router-topk", "1", node=4) == DispatchChoice(4, "by --moe-dispatch")
    with pytest.raises(ConfigError, match="are not several nodes of 16, as far as this rank's launcher tells"):
        chosen("--moe-dispatch", "node")
    with pytest.raises(ConfigError, match=r"moe-dispatch-nodes.*needs several nodes"):
        dispatched("--moe-dispatch", "node", "--ranks-per-node", "16")


@pytest.mark.parametrize(
    ("local", "world", "nodes", "ranks"),
    [
        ("8", "16", "2", 8),
        ("8", "16", "", 8),  # a launcher that does not count nodes
        ("8", "16", "3", None),  # 8 + 4 + 4
        ("4", "16", "2", None),
        ("", "16", "2", None),
        ("eight", "16", "2", None),
    ],
)
def test_the_launcher_tells_the_ranks_of_a_node_if_all_have_as_many(
    local: str, world: str, nodes: str, ranks: int | None
) -> None:
    environ = {"LOCAL_WORLD_SIZE": local, "WORLD_SIZE": world, "GROUP_WORLD_SIZE": nodes}
    assert equal_nodes(environ) == ranks
    assert dispatched(environ=environ).parallel.ranks_per_node == ranks


def test_a_flag_overrides_the_launcher() -> None:
    environ = {"LOCAL_WORLD_SIZE": "16", "WORLD_SIZE": "16"}
    assert dispatched("--ranks-per-node", "4", environ=environ).parallel.ranks_per_node == 4


def test_validate_only_shows_the_choice() -> None:
    told = dispatched("--ranks-per-node", "4")
    line = f"dispatch of experts: {dispatch_choice(told, H100, 'bf16').describe()}\n"
    assert line in outline(told)
    assert "dispatch of experts: node (" in outline(dispatched())  # nodes of 8, as such a device's have
    alone = replace(told, grid=replace(told.grid, ep=1))
    assert "dispatch of experts" not in outline(alone)


def test_a_checkpoint_may_be_continued_by_the_other_dispatch() -> None:
    assert not {"moe_dispatch", "ranks_per_node"} & flags_of(dispatched("--moe-dispatch", "plain")).keys()


def test_ranks_of_a_planned_node() -> None:
    assert assumed_node(H100, 64) == 8
    assert assumed_node(kinds()["cpu"], 64) == 64


MP = "--mp-degree 2 --sequence-parallel --bf16"
H200 = kinds()["h200-141g"]


class Gpu(Device):
    """What is asked of one before its first product."""

    type = "cuda"
    name = "NVIDIA H200"  # type: ignore[assignment]

    def fused_lacks(self) -> str:
        return ""


def two_ranks(flags: str, ranks: int = 2):
    return parse("moe", f"--num-experts 0 {flags}".split(), {"WORLD_SIZE": str(ranks), "RANK": "0"})


@pytest.mark.parametrize("form", ["on", "off", "fused"])
def test_what_is_asked_for_is_taken(form):
    assert tensor_overlap(two_ranks(f"{MP} --tp-comm-overlap {form} --device cuda"), H200, "bf16") == form


def test_auto_is_what_pays():
    large = two_ranks(f"{MP} --hidden-size 4096 --num-attention-heads 32 --seq-length 8192")
    assert tensor_overlap(large, H200, "bf16") == "on"
    assert tensor_overlap(large, kind_of("cpu", "abacus"), "fp32") == "on"
    assert (
        tensor_overlap(large, kinds()["v100-32g"], "bf16") == "off"
    )  # which has no such products, so nothing is known


@pytest.mark.parametrize("sizes", [DENSE, MOE, BIASED_MOE, ERNIE], ids=["dense", "moe", "biased", "ernie"])
def test_the_layers_priced_are_those_of_the_model(sizes):
    model = build(sizes)
    found = {
        CutLinear(isinstance(m, ColumnLinear), m.weight.shape[-1], m.weight.shape[:-1].numel())
        for m in model.modules()
        if isinstance(m, ColumnLinear | RowLinear)
    }
    assert set(cut_linears(sizes, 1)) == found


def test_fused_stays_in_a_node(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    config = two_ranks("--mp-degree 4 --sequence-parallel --bf16 --tp-comm-overlap fused", 8)
    world = SimpleNamespace(device=Gpu(), grid=config.grid, axis=lambda name: Axis(name, 4, 0, None, (0, 1, 2, 3)))
    with pytest.raises(ConfigError, match="on nodes of 2 ranks"):
        make_overlap(config, world)


def test_fused_needs_a_gpu():
    config = two_ranks(f"{MP} --tp-comm-overlap fused")
    with pytest.raises(ConfigError, match="reads the memory of other GPUs"):
        check_device(config, Device())
    check_device(config, Gpu())


def test_a_gpus_sizes_reach_the_layers():
    config = two_ranks(f"{MP} --tp-comm-overlap on")
    world = SimpleNamespace(device=Gpu(), grid=config.grid, axis=lambda name: Axis(name, 2, 0, None, (0, 1)))
    overlap = make_overlap(config, world)
    assert (overlap.batched, overlap.least_rows, overlap.whole) == (True, H200.device_class.least_rows, False)
