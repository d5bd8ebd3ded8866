"""Costs of models on ranks: layers are shared, ranks share the work, FLOPs are those of the whole model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megapar.model.cost.model_cost import UnitCost
from megapar.model.cost.operators import Operators
from megapar.model.cost.rank_view import RankView
from megapar.model.decoder.costs import DecoderCost
from megapar.model.decoder.sizes import DecoderSizes
from megapar.model.ernie.sizes import ErnieSizes
from megapar.model.ernie3.sizes import Ernie3Sizes
from megapar.model.flops import layer_flops, step_flops
from megapar.model.layers.rotary import RotaryEmbedding
from megapar.model.sizes import ModelSizes
from megapar.model.spec import spec_of
from megapar.moe.expert_costs import _ExpertLayer
from megapar.moe.sizes import MoeSizes

COMMON = {
    **{"num_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "ffn_hidden_size": 128, "vocab_size": 256},
    **{"seq_length": 32, "max_position_embeddings": 32},
}
DENSE = DecoderSizes(**COMMON, num_query_groups=4, head_dim=8)
MOE = replace(DENSE, moe=MoeSizes(64, 32, num_experts=8, topk=2), first_k_dense=1)
ERNIE = ErnieSizes(**COMMON)
ERNIE3 = Ernie3Sizes(**COMMON, task_layers=2, task_hidden_size=32, task_heads=4, task_type_vocab_size=5)
VIEW = replace(RankView.alone(32), samples=2, task_counts=lambda: ({"knowledge_mlm": 1.0, "document_lm": 1.0},))
MODELS = pytest.mark.parametrize("sizes", [DENSE, MOE, ERNIE, ERNIE3], ids=["dense", "moe", "ernie", "ernie3"])


def units(sizes: ModelSizes, view: RankView) -> list[UnitCost]:
    costs = spec_of(sizes).costs(sizes, view)
    return [costs.embedding, *(costs.layer(number) for number in range(sizes.num_blocks)), costs.head]


def products(found: list[UnitCost], *names: str) -> float:
    return sum(operator.flops for unit in found for operator in unit.operators if operator.name in names)


@MODELS
def test_a_layer_is_computed_once(sizes: ModelSizes) -> None:
    costs = spec_of(sizes).costs(sizes, VIEW)
    last = sizes.num_blocks - 1
    assert costs.layer(last) is costs.layer(last)
    assert costs.layer(1) is costs.layer(2)


@MODELS
def test_ranks_of_mp_share_the_products_of_attention_and_mlp(sizes: ModelSizes) -> None:
    names = ("qkv", "core", "proj") if sizes is MOE else ("qkv", "core", "proj", "up", "down")
    whole, half = (products(units(sizes, replace(VIEW, mp=mp)), *names) for mp in (1, 2))
    assert half * 2 == whole > 0


def test_the_hops_of_a_dispatch_by_node_are_in_the_order_of_their_way() -> None:
    """There between nodes first, back within a node first; the counts follow the rows."""
    layer = spec_of(MOE).costs(MOE, replace(VIEW, ep=4, node_ep=2)).layer(1)
    sent = {operator.name: operator.sent for operator in layer.operators}
    there, back = ["ep_between", "ep_within"], ["ep_within", "ep_between"]
    for name, forward, backward in (("dispatch", [*there, "ep"], back), ("combine", back, there)):
        hops = {phase: [one.axis for one in sent[name] if one.phase == phase] for phase in ("forward", "backward")}
        assert hops == {"forward": forward, "backward": backward}
    alone = spec_of(MOE).costs(MOE, replace(VIEW, ep=4, node_ep=1)).layer(1)
    assert {one.axis for one in alone.sent()} == {"ep_between", "ep"}  # a rank is its node
    pieces = replace(VIEW, ep=4, node_ep=2, pipe_experts=True, expert_parts=3)
    counts = [one.bytes for one in spec_of(MOE).costs(MOE, pieces).layer(1).sent() if one.axis == "ep"]
    assert counts == [8 * 6 * (2 + 4 + 4) * 3]  # of 6 messages: rows to nodes and ranks, pairs; to 3 ranks


@MODELS
def test_one_rank_sends_nothing_and_two_of_mp_do(sizes: ModelSizes) -> None:
    assert not [sent for unit in units(sizes, VIEW) for sent in unit.sent()]
    axes = {sent.axis for unit in units(sizes, replace(VIEW, mp=2)) for sent in unit.sent()}
    assert axes == {"mp"}


@MODELS
def test_selective_recompute_keeps_less_and_multiplies_as_much(sizes: ModelSizes) -> None:
    kept, selective = (units(sizes, replace(VIEW, selective_recompute=again)) for again in (False, True))
    assert sum(unit.kept for unit in selective) < sum(unit.kept for unit in kept)
    assert sum(unit.flops for unit in selective) == sum(unit.flops for unit in kept)


@pytest.mark.parametrize("sizes", [DENSE, MOE, ERNIE], ids=["dense", "moe", "ernie"])
def test_flops_of_layers_are_those_of_the_operators_on_one_rank(sizes: ModelSizes) -> None:
    layers = units(sizes, RankView.alone(32))[1:-1]
    assert layer_flops(sizes)[1:-1] == tuple(unit.flops for unit in layers)


@pytest.mark.parametrize("block", ["dense", "layer"])
def test_multi_token_prediction_multiplies_as_a_layer_a_join_and_a_head(block: str) -> None:
    sizes = replace(MOE, mtp_depth=1, mtp_block=block)
    plain, ahead = units(MOE, RankView.alone(32)), units(sizes, RankView.alone(32))
    layer, join = plain[-2 if block == "layer" else 1], 2 * 32 * 128 * 64
    assert [unit.flops for unit in ahead[:-1]] == [unit.flops for unit in plain[:-1]]
    assert ahead[-1].flops == 2 * plain[-1].flops + layer.flops + join


def test_dropped_tokens_count_as_flops_for_utilization() -> None:
    assert MOE.moe is not None
    drops = replace(MOE, moe=replace(MOE.moe, kind="deepspeed_moe", capacity_factor=0.5))
    assert step_flops(drops, 4, 32) == step_flops(MOE, 4, 32)
    assert sum(unit.flops for unit in units(drops, VIEW)) < sum(unit.flops for unit in units(MOE, VIEW))


def test_the_last_layers_gradients_are_the_most_where_logits_are_few_at_a_time() -> None:
    """Those of the rows with a loss and of the vocabulary, in the backward, which multiplies the kept ones."""
    rows, hidden, vocabulary = 512, 32, 64
    operators = Operators(RankView.alone(rows), hidden, normalization="rmsnorm", dropout=False)
    head, _ = operators.vocabulary(rows, vocabulary, replicated=False)
    assert head.transient == head.kept == 4 * hidden * (rows + vocabulary)


@pytest.mark.parametrize(
    ("normalization", "kernels", "wide", "kept"),
    [
        *(("layernorm", "cpu", False, True), ("rmsnorm", "cuda", False, True), ("rmsnorm", "cpu", False, False)),
        *(("layernorm", "cpu", True, False), ("rmsnorm", "cuda", True, False)),
    ],
)
def test_a_norm_keeps_its_input_or_a_wider_copy(normalization: str, kernels: str, wide: bool, kept: bool) -> None:
    view = replace(RankView.alone(8), item_bytes=2, kernels=kernels)
    norms = Operators(view, 32, normalization=normalization, dropout=False, wide_norms=wide)
    assert norms.norm_input_kept == (2 * 8 * 32 if kept else 0)


def test_rotated_queries_and_keys_are_moved_three_times() -> None:
    """By plain operators; what the product makes is moved once without a rotation."""
    rotated = replace(DENSE, num_query_groups=DENSE.num_attention_heads)
    moved = []
    for sizes in (rotated, replace(rotated, position_embedding_type="learned")):
        moved += [one.moved for one in units(sizes, VIEW)[1].operators if one.name == "qkv"]
    made, turned = 3 * 64, 2 * 64  # features of queries, keys and values; of queries and keys
    assert moved[0] - moved[1] == 4 * 2 * 32 * (3 * (made + turned) - made)


def test_keys_are_repeated_where_a_kernel_asks_for_it() -> None:
    kept = []
    for view in (VIEW, replace(VIEW, repeats_heads=True)):
        kept += [one.kept for one in units(DENSE, view)[1].operators if one.name == "qkv"]
    once, repeated = 2 * (8 + 4) * 8 + 4 * 8, 3 * 8 * 8  # features of 8 queries and 4 keys, made and turned, and values
    assert kept[0] - kept[1] == 4 * 2 * 32 * (once - repeated)


def test_a_router_in_one_kernel_keeps_its_input_logits_and_choices() -> None:
    """Of each choice an index, its probability and its weight, and of each token two sums."""
    layer = spec_of(MOE).costs(MOE, replace(VIEW, fused_router=True)).layer(1)
    kept = [operator.kept for operator in layer.operators if operator.name == "router"]
    assert kept == [2 * 32 * (4 * 64 + 4 * 8 + 2 * (8 + 4 + 4) + 2 * 4)]


@pytest.mark.parametrize(("ep", "more"), [(1, 0), (4, 2 * 8)])
def test_a_dispatch_keeps_the_order_of_its_rows(ep: int, more: int) -> None:
    """Indices of pairs both ways, of each row its token and weight; where rows travel, also those among rows here."""
    layer = spec_of(MOE).costs(MOE, replace(VIEW, ep=ep)).layer(1)
    kept = [operator.kept for operator in layer.operators if operator.name == "dispatch"]
    assert kept == [2 * 32 * 2 * (2 * 8 + 8 + 4 + more)]


def test_a_ring_holds_sums_and_the_keys_values_and_gradients_of_two_ranks() -> None:
    held = []
    for algorithm in ({"ring": True}, {"ulysses": True}):
        layer = units(DENSE, replace(VIEW, cp=2, **algorithm))[1]
        held += [operator.transient for operator in layer.operators if operator.name == "core"]
    assert held[0] - held[1] == 32 * 4 * (8 * 8 + 2 * 2 * (2 * 4 * 8))


def test_the_gradient_of_the_shared_experts_input_passes_the_router() -> None:
    passing = []
    for number in (0, 1):
        sizes = replace(MOE, moe=replace(MOE.moe, shared_experts=number))
        layer = spec_of(sizes).costs(sizes, VIEW).layer(1)
        passing += [operator.transient for operator in layer.operators if operator.name == "router"]
    assert passing[1] - passing[0] == 4 * 2 * 32 * 64


@pytest.mark.parametrize("percent", [1.0, 0.5])
def test_angles_cover_a_whole_head(percent: float) -> None:
    sizes = replace(DENSE, head_dim=16, rotary_percent=percent)
    own = sizes.attention
    made = RotaryEmbedding(own.rotary_dim, 1e4, torch.float32, None, own.angles_dim).angles(torch.arange(8)[None])
    assert DecoderCost(sizes, RankView.alone(8)).context == sum(x.nbytes for x in made)


def test_slices_with_their_own_capacity_send_all_of_it_and_count_once_each() -> None:
    view = replace(RankView.alone(1024), ep=2, ampipe_degree=2)
    sizes = MoeSizes(64, 32, num_experts=8, topk=2, kind="deepspeed_moe", capacity_factor=2.0)
    own, shared = (_ExpertLayer(replace(view, slice_capacity=own), sizes) for own in (True, False))
    assert own.even
    assert not shared.even
    assert own.rows.sent == 8 * sizes.capacity(view.local_tokens)
    whole = _ExpertLayer(replace(view, ampipe_degree=1), MoeSizes(64, 32, num_experts=8, topk=2))
    halves = _ExpertLayer(view, MoeSizes(64, 32, num_experts=8, topk=2))
    assert halves._sent_counts()[0].bytes == 2 * whole._sent_counts()[0].bytes
