"""Launch budgets: what a layer of each kind asks of a GPU, and the waits of the host in a step."""

from __future__ import annotations

import json

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megapar.arguments import parse
from scripts.trace_cuda_budgets import BUDGETS, LAYERS
from scripts.tracing.budget import Budget, _NumbersCopied, budget, main
from scripts.tracing.tally import Tally
from tests.support.ranks import run_ranks

SMALL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 512 --micro-batch-size 2"
SMALL += " --data-path mock --device cpu"
EXPERTS = f"{SMALL} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64"
UNEVEN = f"{EXPERTS} --moe-model-type megatron_moe --ep-degree 2"


def counted(rank: int, world_size: int, rendezvous: str, model: str, ranks: int, flags: str) -> Budget:
    return budget(parse(model, flags.split(), {"WORLD_SIZE": str(ranks), "RANK": "0"}))


def of(model: str, ranks: int, flags: str) -> Budget:
    return run_ranks(1, counted, model, ranks, flags, group=False, timeout=120)[0]


def test_a_dense_layer_multiplies_twelve_times_and_its_step_waits_for_the_log():
    found = of("moe", 1, f"{SMALL} --num-experts 0 --bf16")
    assert found.layers.keys() == {"dense"}
    layer = found.layers["dense"]
    assert layer.products == 12
    assert layer.smallest_product_rows == 2 * 64
    assert 30 < layer.launches < 50
    assert layer.bytes_outside_products > 0
    assert found.host_waits == 1


def test_mixed_layers_are_counted_apart_and_each_as_if_alone():
    mixed = of("moe", 2, f"{UNEVEN} --num-layers 5 --first-k-dense 3 --bf16")
    only = of("moe", 2, f"{UNEVEN} --first-k-dense 0 --bf16")
    assert mixed.layers.keys() == {"dense", "moe"}
    assert mixed.layers["moe"] == only.layers["moe"]
    assert 0 < mixed.layers["dense"].launches < mixed.layers["moe"].launches
    assert "a layer (dense) on a GPU" in mixed.describe()
    assert "-" not in mixed.describe().replace("micro-batch", "")


def waits(flags: str, ranks: int = 2) -> int:
    return of("moe", ranks, f"{flags} --bf16").host_waits


def test_waits_are_drawn_out_to_all_layers_and_micro_batches():
    """Of what a step really has with 3 layers and 4 micro-batches, counted in models that are shorter."""
    one = waits(f"{UNEVEN} --num-layers 1 --first-k-dense 0")
    per_layer = one - waits(f"{SMALL} --num-experts 0", 1)
    assert per_layer >= 1  # the counts
    assert waits(f"{UNEVEN} --num-layers 3 --first-k-dense 0 --gradient-merge-acc-step 4") == 1 + 12 * per_layer
    assert waits(f"{UNEVEN} --num-layers 3 --first-k-dense 2 --gradient-merge-acc-step 4") == 1 + 4 * per_layer


def test_waits_of_a_pipeline_are_those_of_its_last_stage():
    piped = f"{UNEVEN} --first-k-dense 1 --pp-degree 2"
    few = waits(f"{piped} --num-layers 4 --gradient-merge-acc-step 2", 4)
    assert waits(f"{piped} --num-layers 4 --gradient-merge-acc-step 12", 4) == 1 + 6 * (few - 1)


def test_pieces_of_experts_whose_tokens_are_gathered_are_counted_too():
    flags = (
        f"{EXPERTS} --first-k-dense 0 --moe-model-type deepspeed_moe --ep-degree 2 --mp-degree 2 --sequence-parallel"
    )
    whole = of("moe", 4, f"{flags} --bf16").layers["moe"]
    pieces = of("moe", 4, f"{flags} --use-pipe-experts --pipe-experts-multi-data 2 --bf16").layers["moe"]
    # Two experts of a rank in two pieces each: four times two weights, forward and twice backward, in place of grouped
    # products.
    assert pieces.products - whole.products == 4 * 2 * 3 - 2 * 3
    assert pieces.launches > whole.launches


@pytest.mark.parametrize("name", ["dense", pytest.param("mp 8", marks=pytest.mark.table), "experts, dropless"])
def test_the_figures_are_those_that_the_trace_on_fake_cuda_is_held_to(name):
    """What holds there of whole layers holds here, of the same layer counted on another fake device."""
    layer = next(layer for layer in LAYERS if layer.name == name)
    found = of(layer.model, layer.world, f"{layer.flags} --num-layers 2").layers
    one = found["moe" if layer.name == "experts, dropless" else "dense"]
    figures = {
        "kernels": one.launches,
        "products": one.products,
        "rows": one.smallest_product_rows,
        "megabytes": one.bytes_outside_products / 1e6,
    }
    for row in BUDGETS:
        if (row.layer, row.operator, row.label) == (name, "*", "*") and row.figure in figures:
            most, least = (row.bound, figures[row.figure])[:: -1 if row.figure == "rows" else 1]
            assert least <= most, row


def test_numbers_that_become_a_tensor_or_an_element_are_waited_for():
    tally = Tally("meta")
    with FakeTensorMode(allow_non_fake_inputs=True), tally, _NumbersCopied(tally):
        x = torch.empty(3, device="meta")
        torch.tensor([1, 2], device="meta")
        torch.as_tensor([1.0], device="meta")
        x.new_tensor([1])
        x[0] = 2
        assert tally.sums.waits.total() == 4
        torch.tensor([1, 2])
        torch.as_tensor(x)
        x[:] = 2
        assert tally.sums.waits.total() == 4


def test_json_has_the_layers_and_the_waits(capsys):
    assert main(["moe", "--json", "--config", "configs/tiny.yaml"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["layers"].keys() == {"dense", "moe"}
    for layer in said["layers"].values():
        assert layer.keys() == {"launches", "products", "smallest_product_rows", "bytes_outside_products"}
        assert all(isinstance(figure, int) and figure > 0 for figure in layer.values())
    assert said["host_waits"] == 1
