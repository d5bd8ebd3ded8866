"""What a recomputed unit of layers sends again, and what it does not: neither its output nor any splits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megapar.core.comm.axis import Axis
from megapar.core.comm.in_flight import CommContext
from megapar.core.recompute.checkpointing import Recompute
from megapar.core.recompute.choice import FirstLayers, Interval, RecomputeChoice
from megapar.core.tensor_parallel.execution import Execution
from megapar.model.decoder.sizes import DecoderSizes
from megapar.moe.sizes import MoeSizes
from tests.model.small import DENSE, MOE, batch_for, build
from tests.support.ranks import run_ranks

LAYERS = 3
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
UNEVEN = MoeSizes(32, 16, 4, 2, shared_experts=1)
EVEN = MoeSizes(32, 16, 4, 2, shared_experts=1, kind="deepspeed_moe", capacity_scope="rank", capacity_factor=0.7)
EXPERTS = {
    name: replace(MOE, num_layers=LAYERS, first_k_dense=0, moe=moe, **DROPOUT)
    for name, moe in {"uneven": UNEVEN, "even": EVEN}.items()
}
MIXED = replace(EXPERTS["uneven"], first_k_dense=1)
GPT = replace(DENSE, num_layers=LAYERS, tie_embeddings=False, add_bias_linear=True, **DROPOUT)


def runs(
    rank: int,
    world_size: int,
    sizes: DecoderSizes,
    axes: tuple[str, ...],
    sequence_parallel: bool,
    choice: RecomputeChoice,
) -> dict[str, Any]:
    """A forward and backward with and without recompute: gradients that differ, and what was launched in each.

    Loss and loads of experts, too, must be the same.
    """
    whole = {name: Axis(name, world_size, rank, dist.group.WORLD, tuple(range(world_size))) for name in axes}
    batch = batch_for(sizes, seed=0 if "mp" in axes else rank)
    found = []
    for again in (None, choice):
        comm = CommContext()
        recompute = None if again is None else Recompute(again, comm, next(iter(whole.values())).sent_bytes)
        options = {"execution": Execution(comm=comm), "recompute": recompute}
        model = build(sizes, sequence_parallel=sequence_parallel, **options, **whole)
        torch.manual_seed(5)
        terms = model(batch)
        (terms.sums["lm"] + terms.aux + terms.z).backward()
        comm.check_settled()
        grads = {name: parameter.grad for name, parameter in model.named_parameters()}
        losses = float(terms.sums["lm"].detach()), terms.load.tolist()
        found.append((losses, grads, dict(comm.launched), comm.host_waits))
    (loss, grads, plain, waits), (loss_again, grads_again, sent, waits_again) = found
    differ = [name for name, grad in grads.items() if not torch.equal(grad, grads_again[name])]
    more = {kind: sent[kind] - plain[kind] for kind in sent if sent[kind] != plain[kind]}
    same = loss == loss_again and not differ
    return {"same": same, "differ": differ, "plain": plain, "more": more, "waits": (waits, waits_again)}


@pytest.mark.parametrize(
    ("sizes", "choice", "sent"),
    [
        # Dispatch, combine and the two of the backward are 4 in every layer with experts; a unit's last one sends its
        # dispatch again and has 5, those before it send their combine again too and have 6.
        ("uneven", Interval(1), 5 + 5 + 5),
        ("uneven", Interval(2), 6 + 5 + 5),
        ("uneven", Interval(3), 6 + 6 + 5),
        ("uneven", FirstLayers(1), 5 + 4 + 4),
        ("even", Interval(2), 6 + 5 + 5),
    ],
)
def test_all_to_alls_of_experts(sizes: str, choice: RecomputeChoice, sent: int) -> None:
    """The last combine of a unit is not sent again, and no count ever is; gradients stay bit for bit."""
    for got in run_ranks(2, runs, EXPERTS[sizes], ("ep",), False, choice):
        assert got["differ"] == []
        assert got["same"]
        assert got["plain"]["all_to_all"] == 4 * LAYERS
        assert got["more"] == {"all_to_all": sent - 4 * LAYERS}
        assert got["waits"] == ((LAYERS, LAYERS) if sizes == "uneven" else (0, 0))


def test_a_dense_layer_behind_experts_needs_their_combine() -> None:
    """Only a unit's very last product is spared: of [dense, experts], [experts] each closes its unit."""
    (got, _) = run_ranks(2, runs, MIXED, ("ep",), False, Interval(2))
    assert got["same"]
    assert got["more"] == {"all_to_all": 1 + 1}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_collectives_of_mp(sequence_parallel: bool) -> None:
    """Forward two products leave a layer over mp; the one that closes the unit is not made again."""
    for got in run_ranks(2, runs, GPT, ("mp",), sequence_parallel, Interval(1)):
        assert got["differ"] == []
        assert got["same"]
        again = {"all_gather": 2 * LAYERS, "reduce_scatter": LAYERS} if sequence_parallel else {"all_reduce": LAYERS}
        assert got["more"] == again


def test_alone_the_last_product_of_a_unit_is_not_made_again() -> None:
    """One rank: same gradients, and one product less than in a forward."""
    products: list[int] = []
    batch = batch_for(GPT)
    grads = []
    for choice in (None, Interval(3)):
        recompute = None if choice is None else Recompute(choice, CommContext(), Axis.single("mp").sent_bytes)
        model = build(GPT, recompute=recompute)
        torch.manual_seed(5)
        with torch.profiler.profile() as profile:
            model(batch).sums["lm"].backward()
        products.append(sum(event.count for event in profile.key_averages() if event.key == "aten::addmm"))
        grads.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert [name for name, grad in grads[0].items() if not torch.equal(grad, grads[1][name])] == []
    assert products[1] - products[0] == 4 * LAYERS - 1
