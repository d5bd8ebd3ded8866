"""The kernels of a run: by its flags and device, as refused at the start, as planned and as built."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megapar.arguments import parse
from megapar.core.device.attention import table as attention_table
from megapar.core.device.base import Device
from megapar.core.device.kinds import kinds
from megapar.errors import ConfigError
from megapar.training.building.attention_backend import (
    attention_kernels,
    attention_operator,
    backend_lacks,
    chosen_rows,
    forms_of,
    needs_flash3,
    skips_padding,
)
from megapar.training.building.parallelize import check_device

DENSE = "moe --num-experts 0 --bf16"
PACKED = ("documents", "window")


def gpu(*missing, capability=(9, 0)):
    return SimpleNamespace(
        capability=capability, attention_lacks=lambda kernel: f"no {kernel}" if kernel in missing else ""
    )


def config_of(line, world=1):
    kind, *flags = line.split()
    return parse(kind, [*flags, "--world-size", str(world), "--validate-only"], {})


@pytest.mark.parametrize(
    ("line", "world", "forms"),
    [
        (DENSE, 1, ("causal",)),
        (f"{DENSE} --reset-attention-mask", 1, ("documents",)),
        (f"{DENSE} --window-size 8", 1, ("window",)),
        (f"{DENSE} --num-layers 4 --window-size 8 --window-attn-skip-freq 2", 1, ("causal", "window")),
        (f"{DENSE} --window-size 8 --reset-attention-mask --num-layers 2 --window-attn-skip-freq [0,1]", 1, PACKED),
        (f"{DENSE} --seq-length 64 --window-size 64", 1, ("causal",)),
        (f"{DENSE} --seq-length 64 --window-size 64 --cp-degree 2", 2, ("blocks",)),
        (f"{DENSE} --cp-degree 2", 2, ("blocks",)),
        (f"{DENSE} --cp-degree 2 --window-size 8", 2, ("window",)),
        (f"{DENSE} --cp-degree 2 --window-size 8 --num-layers 4 --window-attn-skip-freq 2", 2, ("blocks", "window")),
        ("moe --ep-degree 2 --ampipe-degree 2 --window-size 8", 2, ("window",)),
        (f"{DENSE} --cp-degree 2 --context-parallel-algo ulysses_cp_algo", 2, ("causal",)),
        ("moe --ep-degree 2 --ampipe-degree 2", 2, ("lower-right",)),
        ("moe --ep-degree 2 --ampipe-degree auto", 2, ("causal", "lower-right")),
        ("ernie", 1, ("documents", "full")),
        ("ernie --cp-degree 2 --context-parallel-algo ulysses_cp_algo", 2, ("masked", "full")),
        ("ernie --cp-degree 2", 2, ("blocks",)),
        ("ernie --ernie-model ernie3 --task-type-vocab-size 5", 1, ("full", "masked", "causal")),
    ],
)
def test_forms_of_a_run(line, world, forms):
    config = config_of(line, world)
    assert forms_of(config) == forms
    assert skips_padding(config) == (forms == ("documents", "full"))


@pytest.mark.parametrize(
    ("flags", "operator"),
    [
        ("", "attention"),
        ("--attention-backend flash", "attention_flash"),
        ("--attention-backend cudnn", "attention_cudnn"),
        ("--attention-backend flash3", "attention_flash"),
        ("--attention-backend flash --reset-attention-mask", "attention"),
    ],
)
def test_operators_of_names(flags, operator):
    config = config_of(f"{DENSE} {flags}")
    assert attention_operator(config, gpu(), "bfloat16") == operator
    assert needs_flash3(config, gpu(), "bfloat16") == ("flash3" in flags)
    assert attention_operator(config, gpu(capability=None), "bfloat16") == "attention"
    assert attention_operator(config, gpu(), "float64") == "attention"


def test_a_confirmed_row_reaches_the_layers_if_its_kernel_is_installed(monkeypatch):
    rows = tuple(row._replace(standing=row.standing or "2026-12-01, NVIDIA H200") for row in attention_table.ROWS)
    monkeypatch.setattr(attention_table, "ROWS", rows)
    config = config_of(DENSE)
    assert attention_operator(config, gpu(), "bfloat16") == "attention_cudnn"
    assert attention_operator(config, gpu("cudnn"), "bfloat16") == "attention_flash"
    assert needs_flash3(config, gpu("cudnn"), "bfloat16")
    assert attention_operator(config, gpu("cudnn", "flash3"), "bfloat16") == "attention"
    assert attention_operator(config_of(f"{DENSE} --deterministic"), gpu(), "bfloat16") == "attention"
    assert attention_operator(config_of(f"{DENSE} --no-use-flash-attn"), gpu(), "bfloat16") == "attention"


def test_qk_clip_names_the_kernel_that_torch_would_choose():
    """torch's choice returns no log-sum-exps; maxima and what no kernel takes are left to plain products."""
    config = config_of(f"{DENSE} --qk-clip-threshold 100")
    assert attention_operator(config, gpu(), "bfloat16") == "attention_cudnn"
    assert attention_operator(config, gpu("cudnn"), "bfloat16") == "attention_flash"
    assert attention_operator(config, gpu(), "float32") == "attention"
    assert [row.kernel for row in chosen_rows(config, gpu(), "float32")] == ["math"]
    sinks = config_of(f"{DENSE} --attention-sinks")
    assert attention_operator(sinks, gpu(), "bfloat16") == "attention_cudnn"
    assert [row.kernel for row in chosen_rows(sinks, gpu(), "float32")] == ["math"]
    by_maximum = config_of(f"{DENSE} --qk-clip-threshold 100 --qk-clip-statistic max --no-use-flash-attn")
    assert {row.kernel for row in chosen_rows(by_maximum, gpu(), "bfloat16")} == {"math"}


@pytest.mark.parametrize(
    ("flags", "device", "reason"),
    [
        ("--attention-backend cudnn", gpu(), ""),
        ("--attention-backend cudnn", gpu("cudnn"), "no cudnn"),
        ("--attention-backend cudnn", gpu(capability=(7, 0)), "compute capability 9.0 to 9.0, not 7.0"),
        ("--attention-backend flash3", gpu(capability=(10, 0)), "compute capability 9.0 to 9.0, not 10.0"),
        ("--attention-backend cudnn --head-dim 256", gpu(capability=(8, 0)), "compute capability"),
        ("--attention-backend flash --head-dim 256", gpu(capability=(8, 0)), ""),
        ("--attention-backend flash --window-size 8", gpu(), ""),
        ("--attention-backend flash --window-size 8 --head-dim 20", gpu(), "multiple of 8 features, not 20"),
        ("--attention-backend cudnn --window-size 8", gpu(), "no form for window"),
        ("", gpu("cudnn", "flash3"), ""),
    ],
)
def test_a_name_that_cannot_run_is_refused_at_the_start(flags, device, reason):
    found = backend_lacks(config_of(f"{DENSE} {flags}"), device, "bfloat16")
    assert reason in found
    assert bool(found) == bool(reason)


def test_a_cpu_refuses_every_name():
    config = config_of(f"{DENSE} --attention-backend flash")
    with pytest.raises(ConfigError, match="flash is a kernel for NVIDIA GPUs"):
        check_device(config, Device())
    check_device(config_of(DENSE), Device())


@pytest.mark.parametrize(
    ("line", "kind", "text"),
    [
        (DENSE, "h200-141g", "causal by cudnn (today's choice)"),
        (DENSE, "a100-80g", "causal by flash (today's choice)"),
        (f"{DENSE} --deterministic", "h200-141g", "causal by flash (today's choice)"),
        (f"{DENSE} --attention-backend cudnn", "a100-80g", "causal by cudnn (not confirmed by a measurement)"),
        ("ernie --bf16", "a100-80g", "documents by varlen (today's choice), full by flash (today's choice)"),
        ("ernie --fp16", "v100-32g", "documents by efficient (today's choice), full by efficient (today's choice)"),
        (
            f"{DENSE} --num-layers 4 --window-size 8 --window-attn-skip-freq 4",
            "h200-141g",
            "a window of 8 keys in 3 of 4 layers; causal by cudnn (today's choice), window by varlen (today's choice)",
        ),
        (
            f"{DENSE} --seq-length 64 --window-size 4096",
            "cpu",
            "no position has more keys than the window of 4096; torch's fused kernel for CPUs",
        ),
        (DENSE, "ascend-910b", "npu_fusion_attention"),
        (DENSE, "cpu", "torch's fused kernel for CPUs"),
        (f"{DENSE} --no-use-flash-attn", "h200-141g", "plain products (--no-use-flash-attn)"),
        ("moe --num-experts 0 --dtype fp64", "h200-141g", "plain products (fp64)"),
    ],
)
def test_the_plan_and_the_log_name_the_kernels(line, kind, text):
    assert attention_kernels(config_of(line), kinds()[kind]) == text


@pytest.mark.parametrize(("window", "rows"), [(8, "at most 7 of 8"), (9, "all 8")])
def test_ranks_of_cp_get_no_more_rows_for_a_window_than_there_are(window, rows):
    layout = "moe --ep-degree 2 --cp-degree 2 --ampipe-degree 2 --seq-length 16 --window-size"
    said = attention_kernels(config_of(f"{layout} {window}", world=2), kinds()["cpu"])
    assert f"layers; there a rank of cp gets {rows} rows of others; torch's" in said
    ulysses = config_of(f"{layout} {window} --context-parallel-algo ulysses_cp_algo", world=2)
    assert "layers; torch's" in attention_kernels(ulysses, kinds()["cpu"])


@pytest.mark.parametrize(
    ("steps", "said"),
    [(3, "no position has more keys than the window of 64;"), (4, "a window of 64 keys in 2 of 2 layers;")],
)
def test_a_window_is_held_against_the_longest_samples_that_a_run_reaches(steps, said):
    phases = ["--data-path", "a=builtin", "--data-phases", "0: a=1; 3 iterations: a=1 seq-length=128"]
    sizes = "--num-layers 2 --window-size 64 --seq-length 64 --lr-warmup-iters 0 --train-iters"
    config = parse("moe", [*DENSE.split()[1:], *sizes.split(), str(steps), *phases], {})
    assert attention_kernels(config, kinds()["cpu"]).startswith(said)
