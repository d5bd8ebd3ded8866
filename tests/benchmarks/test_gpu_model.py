"""The model of a GPU: its arithmetic, an earlier model's figures from its counts, and inputs of a measured day."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from benchmarks.gpu_model.inputs import FAST, MIDDLE, SLOW, TABLE, UNITS, WAYS, read, with_findings
from benchmarks.gpu_model.model import DEPTHS, Counted, Gemm, Gpu, Operation, of_a_layer
from benchmarks.gpu_model.run import MODELS, count, report
from megapar.arguments import parse
from megapar.model.flops import step_flops
from scripts.trace_cuda_budgets import LAYERS

TOKENS = 8192
TILE, UNITS_OF_H200 = 128, 132


def three(rows, inner, columns, groups=1):
    """The products of a weight: forward, and the gradients of its input and of itself."""
    return (
        Gemm(rows, columns, inner, groups),
        Gemm(rows, inner, columns, groups),
        Gemm(groups * inner, columns, rows / groups, groups),
    )


def counted(name, operations):
    """A run whose further layer is these operators, and nothing beside it; model FLOPs as in the trace."""
    run = next(run for run in LAYERS if run.name == name)
    flops = []
    for layers in DEPTHS:
        line = [*run.flags.split(), "--num-layers", str(layers)]
        config = parse(run.model, line, {"WORLD_SIZE": str(run.world), "RANK": "0"})
        samples = config.training.global_batch_size // (config.grid.dp * config.grid.sharding)
        flops.append(step_flops(config.model, samples, config.model.seq_length))
    few, more = (layers * tuple(operations) for layers in DEPTHS)
    return Counted(name, few, more, flops[1] - flops[0], 0.0)


# Layers at commit 4f3c225: 91 and 268 kernels, of which 14 and 23 are products and attention; 13 GB and 3.5 for the
# optimizer, and 20.4 GB, of which about 3.2 are picked rows.
OLD_DENSE = counted(
    "dense",
    [
        *(Operation("product", 1, gemms=(gemm,)) for gemm in three(TOKENS, 4096, 6144)),
        *(Operation("product", 1, gemms=(gemm,)) for gemm in three(TOKENS, 4096, 4096)),
        *(Operation("product", 1, gemms=(gemm,)) for gemm in three(TOKENS, 4096, 28672)),
        *(Operation("product", 1, gemms=(gemm,)) for gemm in three(TOKENS, 14336, 4096)),
        Operation("attention", 2, attention_flops=3.5 * 2 * TOKENS**2 * 4096),
        Operation("others", 77, bytes=16.5e9),
    ],
)
SENT = 6 * TOKENS * 2564 * 2 * 7 / 8
OLD_MOE = counted(
    "experts, dropless",
    [
        *(Operation("product", 1, gemms=(gemm,)) for gemm in three(TOKENS, 2560, 3584)),
        *(Operation("product", 1, gemms=(gemm,)) for gemm in three(TOKENS, 2560, 2560)),
        *(Operation("product", 1, gemms=(gemm,)) for gemm in three(TOKENS, 2560, 64)),
        *(Operation("product", 1, gemms=(gemm,)) for gemm in three(TOKENS, 2560, 6144)),
        *(Operation("product", 1, gemms=(gemm,)) for gemm in three(TOKENS, 3072, 2560)),
        Operation("attention", 2, attention_flops=3.5 * 2 * 2 * 4096**2 * 2560),
        Operation("counts", 1, message="alltoall_base_", message_bytes=448),
        Operation("after the counts", 60, waits=2),
        *(Operation("dispatch", 1, message="alltoall_base_", message_bytes=SENT, unaligned=True) for _ in range(2)),
        *(Operation("product", 1, gemms=(gemm,)) for gemm in three(6 * TOKENS, 2560, 3072, 8)),
        *(Operation("product", 1, gemms=(gemm,)) for gemm in three(6 * TOKENS, 1536, 2560, 8)),
        *(Operation("combine", 1, message="alltoall_base_", message_bytes=SENT) for _ in range(2)),
        Operation("others", 180, bytes=17.2e9, gathered_bytes=3.2e9),
    ],
)


@pytest.mark.parametrize(
    ("old", "kernels", "products", "gigabytes", "low", "high"),
    [(OLD_DENSE, 91, 12, 16.5, 0.45, 0.48), (OLD_MOE, 268, 21, 20.4, 0.20, 0.24)],
    ids=lambda x: x.name if isinstance(x, Counted) else None,
)
def test_an_earlier_models_figures_follow_from_its_counts(old, kernels, products, gigabytes, low, high):
    layer = of_a_layer(old)
    assert (layer["kernels"], layer["gemms"], layer["bytes"] / 1e9) == (kernels, products, pytest.approx(gigabytes))
    inputs = read()
    inputs["grouped_gemm"] = replace(inputs["grouped_gemm"], values=(400.0, 460.0, 600.0))  # its estimate
    slow, middle, fast = (Gpu(inputs, way).predict(old).layer_mfu for way in WAYS)
    assert low <= middle <= high
    assert slow <= low + 0.01
    assert fast >= high - 0.01


def gpu(**measured):
    """The GPU with the middle inputs, and some set to a value in SI units."""
    inputs = read()
    return Gpu(
        {**inputs, **{name: inputs[name].measured(value, "test", "today") for name, value in measured.items()}}, MIDDLE
    )


def test_a_product_takes_whole_waves_of_tiles():
    device = gpu(gemm=1e15, bandwidth=1e15)
    wave = UNITS_OF_H200 * 2 * TILE**2 * 4096 / 1e15
    assert device.gemm_seconds(Gemm(TILE, TILE * UNITS_OF_H200, 4096)) == pytest.approx(wave)
    assert device.gemm_seconds(Gemm(TILE, TILE * UNITS_OF_H200 + 1, 4096)) == pytest.approx(2 * wave)
    assert device.gemm_seconds(Gemm(1, 1, 4096)) == pytest.approx(wave)


def test_a_product_takes_at_least_the_time_of_its_bytes():
    narrow = Gemm(64, 4096, 4096)
    assert gpu(gemm=1e18, bandwidth=1e12).gemm_seconds(narrow) == pytest.approx(narrow.bytes / 1e12)


def test_groups_do_not_share_tiles():
    device = gpu(grouped_gemm=1e15, bandwidth=1e15)
    wave = UNITS_OF_H200 * 2 * TILE**2 * 4096 / 1e15
    columns = TILE * UNITS_OF_H200
    assert device.gemm_seconds(Gemm(8 * TILE, columns, 4096, 8)) == pytest.approx(8 * wave)
    assert device.gemm_seconds(Gemm(8 * (TILE + 1), columns, 4096, 8)) == pytest.approx(16 * wave)


def test_a_stretch_takes_the_longer_of_host_and_device():
    device = gpu(launch=5e-6, gap=0.0, bandwidth=1e12, wait=0.0)
    short, long = Operation("short", 1, bytes=1e6), Operation("long", 1, bytes=9e6)  # 1 and 9 microseconds
    assert device.step_seconds(100 * (short,)) == pytest.approx(100 * 5e-6 + 1e-6)
    assert device.step_seconds(100 * (long,)) == pytest.approx(5e-6 + 100 * 9e-6)
    together = Operation("sums of 100", 100, bytes=100 * 9e6)
    assert device.step_seconds([together]) == pytest.approx(5e-6 + 100 * 9e-6)


def test_a_wait_of_the_host_ends_its_lead():
    device = gpu(launch=5e-6, gap=0.0, bandwidth=1e12, wait=20e-6)
    long, short = Operation("long", 1, bytes=900e6), Operation("short", 1)
    without = device.step_seconds([long, *(10 * (short,))])
    waiting = device.step_seconds([long, Operation("wait", waits=1), *(10 * (short,))])
    assert waiting - without == pytest.approx(20e-6 + 10 * 5e-6)


def test_all_to_alls_are_exposed_and_gradients_are_reduced_under_the_backward():
    device = gpu(launch=0.0, gap=0.0, latency=0.0, all_to_all=1e11, collectives=1e11, bandwidth=1e12)
    backward = Operation("backward", 1, bytes=1e9)  # a millisecond
    norm = Operation("norm", 1, message="allreduce_")

    def message(kind, size):
        return Operation("message", 1, message=kind, message_bytes=size)

    assert device.step_seconds([message("alltoall_base_", 1e8), backward, norm]) == pytest.approx(2e-3)
    assert device.step_seconds([message("_reduce_scatter_base_", 1e8), backward, norm]) == pytest.approx(1e-3)
    assert device.step_seconds([message("_reduce_scatter_base_", 3e8), backward, norm]) == pytest.approx(3e-3)
    assert device.step_seconds([backward, norm, message("_allgather_base_", 3e8)]) == pytest.approx(1e-3)


def test_an_unaligned_message_is_slower():
    device, message = gpu(latency=0.0), Operation("m", 1, message="alltoall_base_", message_bytes=1e9)
    share = read()["unaligned_share"].si(MIDDLE)
    assert device.message_seconds(replace(message, unaligned=True)) * share == pytest.approx(
        device.message_seconds(message)
    )


def test_every_input_has_a_range_a_unit_a_source_and_a_date():
    for name, figure in read().items():
        assert figure.unit in UNITS, name
        assert figure.what, name
        assert figure.source, name
        assert len(figure.date) == len("2026-11-24"), name
        slow, middle, fast = (figure.si(way) for way in (SLOW, MIDDLE, FAST))
        assert slow <= middle <= fast or slow >= middle >= fast, name
    assert "date" in TABLE.read_text(encoding="utf-8")


LINES = (
    {"what": "launches", "host_seconds": 3e-6, "seconds": 3.2e-6},
    {"what": "products", "products": [], "large_tflops": 701.5},
    {
        "what": "attention",
        "torch_chooses_2048": {"tflops": 300.0},
        "torch_chooses_8192": {"seconds": 1, "tflops": 377.0},
    },
    {"what": "message rows", "bytes_of_h_0": 4e9, "clone_of_h_0": 1e-3, "gather_into_h_0": 2e-3},
    {"what": "copies", "pinned_65536": {"to_device": 1.0, "to_host": 1.0}},
)


def test_a_measured_day_replaces_inputs(tmp_path):
    facts = {"part": "micro", "ok": None, "date": "2026-12-01T10:00:00+00:00", "commit": "abc1234"}
    day = {**facts, "device": "cuda", "small": False}
    others = [{**day, "device": "cpu"}, {**day, "small": True}, {**day, "part": "waits"}]
    lines = [{**day, **line} for line in LINES] + [{**other, **LINES[1], "large_tflops": 1.0} for other in others]
    path = tmp_path / "findings.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    found = with_findings(read(), path)
    wanted = {"launch": 3.0, "gemm": 701.5, "attention": 377.0, "bandwidth": 4.0, "gather_bandwidth": 2.0}
    assert {name: found[name].values for name in wanted} == {
        name: (pytest.approx(x),) * 3 for name, x in wanted.items()
    }
    assert found["gemm"].date == "2026-12-01"
    assert found["gemm"].source == "measured: products, commit abc1234"
    assert found["all_to_all"] == read()["all_to_all"]
    assert found["gap"] == read()["gap"]  # the device waited for the host


def test_counts_survive_json():
    assert Counted.from_dict(json.loads(json.dumps(asdict(OLD_MOE)))) == OLD_MOE


def test_a_report_has_each_way_and_the_models_of_the_budgets(capsys):
    found = report(OLD_DENSE, read())
    assert set(found["predicted"]) == set(WAYS)
    assert found["layer"]["kernels"] == 91
    assert "91 kernels, 16.5 GB outside products, 12 products" in capsys.readouterr().out
    assert set(MODELS) <= {run.name for run in LAYERS}


@pytest.mark.table  # builds the stub of CUDA, like the trace
def test_a_traced_layer_has_the_products_and_flops_of_its_model():
    found = count(["dense"])
    if not found:
        pytest.skip("this machine cannot build the stub of CUDA")
    layer, old = of_a_layer(found[0]), of_a_layer(OLD_DENSE)
    assert layer["gemms"] == old["gemms"]
    assert layer["gemm_flops"] == pytest.approx(old["gemm_flops"])
    assert layer["attention_flops"] == pytest.approx(old["attention_flops"])
    assert layer["kernels"] > old["gemms"]
    assert found[0].layer_flops == OLD_DENSE.layer_flops
    assert Gpu(read(), MIDDLE).predict(found[0]).layer_mfu == pytest.approx(0.47, abs=0.1)
