"""Costs of latent attention: what it keeps, multiplies again and sends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megapar.model.attention.latent_costs import LatentCosts
from megapar.model.cost.model_cost import OpCost
from megapar.model.cost.operators import Operators
from megapar.model.cost.rank_view import RankView
from tests.model.layers.test_latent_attention import BATCH, LENGTH, bytes_of_a_position, latent_sizes

VIEW = replace(RankView.alone(LENGTH), samples=BATCH)
SIZES = latent_sizes()
H, N = SIZES.hidden_size, SIZES.num_heads
W = SIZES.query_rank + SIZES.latent_rank + SIZES.rotary_dim


def operators(sizes: Any = SIZES, **view: Any) -> dict[str, OpCost]:
    """The operators of attention by their names, on a rank with this view."""
    shared = Operators(replace(VIEW, **view), H, normalization="rmsnorm", dropout=False)
    found = LatentCosts(shared, sizes, sizes.query_rank, sizes.latent_rank).all
    return {operator.name: operator for operator in found}


def test_what_is_kept_is_what_the_layer_keeps() -> None:
    """``test_latent_attention`` reads the same bytes from saved tensors; there the input is known, and has no norm."""
    found = operators()
    inputs = 4 * BATCH * LENGTH * H
    kept = sum(operator.kept for name, operator in found.items() if name != "norm")
    assert kept - inputs == BATCH * LENGTH * bytes_of_a_position(SIZES)
    assert found["kv"].kept == 0


def test_products_are_those_of_the_weights() -> None:
    weights = [(W, H), (N * SIZES.key_dim, SIZES.query_rank), (H, N * SIZES.value_dim)]
    weights.append((N * (SIZES.plain_dim + SIZES.value_dim), SIZES.latent_rank))
    flops = sum(2 * BATCH * LENGTH * out * inner for out, inner in weights)
    assert sum(product.flops for one in operators().values() for product in one.products) == flops


def test_keys_and_values_are_made_again_once() -> None:
    kv = operators()["kv"]
    assert kv.extra == (("backward", kv.products[0]),)
    assert kv.extra_flops == kv.flops


def test_every_rank_of_cp_makes_the_columns_of_all() -> None:
    kv = operators(cp=4, ring=True, sends_latents=True)["kv"]
    assert kv.extra_flops == kv.flops * (3 + 3 * 3 + 1)
    assert operators(cp=4, ring=True)["kv"].extra_flops == kv.flops
    assert operators(cp=4, ulysses=True, sends_latents=True)["kv"].extra_flops == kv.flops


def sent(axis: str, **view: Any) -> float:
    return sum(one.bytes for operator in operators(**view).values() for one in operator.sent if one.axis == axis)


@pytest.mark.parametrize("algorithm", [{"ring": True}, {}])
def test_latents_or_keys_and_values_travel_between_positions(algorithm: dict[str, bool]) -> None:
    latents, heads = (sent("cp", cp=2, sends_latents=chosen, **algorithm) for chosen in (True, False))
    columns = SIZES.latent_rank + SIZES.rotary_dim, N * (SIZES.key_dim + SIZES.value_dim)
    assert latents / heads == columns[0] / columns[1]
    assert heads == 3 * 4 * BATCH * LENGTH // 2 * columns[1]


def test_by_heads_latents_go_to_all_ranks() -> None:
    messages = operators(cp=2, ulysses=True, sends_latents=True)["core"].sent
    assert [message.kind for message in messages] == ["all_to_all", "all_to_all", "all_gather", "reduce_scatter"]


def test_ranks_of_mp_send_latents_alone() -> None:
    found = operators(mp=2, sequence_parallel=True)
    assert [message.kind for message in found["latents"].sent] == ["all_gather", "reduce_scatter"]
    assert found["latents"].sent[0].bytes == 4 * BATCH * LENGTH * W / 2
    assert found["qkv"].sent == ()
    straight = operators(replace(SIZES, query_rank=0), mp=2, sequence_parallel=True)
    assert straight["qkv"].sent != ()
