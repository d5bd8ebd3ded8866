"""Our drop policies against the results of DeepSpeed's own gates, which are a file.

DeepSpeed 0.19.8 made them, by scripts/golden_deepspeed_gates.py of commit 532f9f80.
DeepSpeed's top-1 gate picks among first choices in an order it does not fix (torch.topk over ties), so for
k = 1 the kept set is compared only in size; capacity, loss and the weights of what it kept are compared.
"""

import json
from pathlib import Path

import pytest
import torch

from megapar.moe.capacity import keep_by_order, keep_by_probability, queue_starts
from megapar.moe.router import Routing, gate_weights
from megapar.moe.sizes import MoeSizes
from megapar.moe.stats import MoeStats, router_sums

ROWS = json.loads((Path(__file__).parent / "golden" / "deepspeed_gates.json").read_text())["rows"]


def name(row):
    return f"{row['gate']}-{row['policy']}-k{row['topk']}-{row['capacity_factor']}"


def route(row):
    logits = torch.tensor(row["logits"])
    probs = logits.softmax(1)
    experts = torch.topk(probs, row["topk"], dim=1).indices
    return Routing(probs, experts, router_sums(logits.logsumexp(1), probs, experts, None))


def sizes(row):
    return MoeSizes(
        hidden_size=8,
        ffn_hidden_size=8,
        num_experts=len(row["counts"]),
        topk=row["topk"],
        kind="deepspeed_moe",
        capacity_factor=row["capacity_factor"],
        min_capacity=row["min_capacity"],
        drop_policy=row["policy"],
    )


def spread(values, experts, num_experts):
    """[T, k] by choice to [T, E] by expert."""
    return torch.zeros(len(experts), num_experts, dtype=values.dtype).scatter(1, experts, values)


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_capacity_counts_and_loss(row):
    routing = route(row)
    tokens = len(row["logits"])
    assert sizes(row).capacity(tokens) == row["capacity"]
    assert routing.sums.counts.sum(0).tolist() == row["counts"]
    stats = MoeStats.of(routing.sums, tokens, row["topk"], first_choices_only=row["policy"] == "choice")
    assert float(stats.aux) == pytest.approx(row["aux"], rel=1e-6)


@pytest.mark.parametrize("row", [row for row in ROWS if row["topk"] > 1], ids=name)
def test_kept_pairs_and_weights(row):
    routing = route(row)
    num_experts, policy = len(row["counts"]), row["policy"]
    if policy == "probs":
        kept = keep_by_probability(routing.experts, None, routing.probs, capacity=row["capacity"])
    else:
        starts = queue_starts(routing.sums.counts[None], 0, policy)
        kept = keep_by_order(routing.experts, None, starts, capacity=row["capacity"], policy=policy)
    assert spread(kept.int(), routing.experts, num_experts).tolist() == row["kept"]
    weights = spread(gate_weights(routing, kept, over_kept=True), routing.experts, num_experts)
    torch.testing.assert_close(weights, torch.tensor(row["weights"]), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("row", [row for row in ROWS if row["topk"] == 1], ids=name)
def test_weights_of_the_top_one_gate(row):
    routing = route(row)
    theirs = torch.tensor(row["kept"]).gather(1, routing.experts).bool()
    weights = spread(gate_weights(routing, theirs, over_kept=True), routing.experts, len(row["counts"]))
    torch.testing.assert_close(weights, torch.tensor(row["weights"]), rtol=1e-5, atol=1e-7)
    starts = queue_starts(routing.sums.counts[None], 0, "token")
    ours = keep_by_order(routing.experts, None, starts, capacity=row["capacity"], policy="token")
    assert ours.sum() == theirs.sum()


def test_the_file_holds_drops():
    assert sum(torch.tensor(row["kept"]).sum() < len(row["logits"]) * row["topk"] for row in ROWS) >= 6
