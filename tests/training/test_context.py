"""Context parallelism in whole training runs: what is metered, dropout, evaluation, resuming on another layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.training import run

ALGORITHMS = {"megatron_cp_algo": "send", "ulysses_cp_algo": "all_to_all", "allgather_cp_algo": "all_gather"}
CP = ("--cp-degree", "2", "--context-parallel-algo")


@pytest.mark.parametrize(("algorithm", "kind"), ALGORITHMS.items())
def test_waits_for_keys_and_values_are_metered(algorithm: str, kind: str) -> None:
    """A wait that found everything there is seconds of nearly nothing, but it was counted."""
    record = run(2, "moe", *CP, algorithm, "--train-iters", "1").records[0]
    assert record.exposed_seconds[f"cp/{kind}"] > 0.0
    assert record.exposed_communication_seconds >= record.exposed_seconds[f"cp/{kind}"]
    assert record.sent_bytes[f"cp/{kind}"] > 0


MLA = (
    *("--multi-latent-attention", "--num-query-groups", "4", "--kv-lora-rank", "10", "--qk-head-dim", "6"),
    *("--qk-pos-emb-head-dim", "2", "--v-head-dim", "8"),
)
ATTENTIONS = {
    "latents": ((*MLA, "--mla-cp-exchange", "latent"), 10 + 2),
    "keys and values": ((*MLA, "--mla-cp-exchange", "kv"), 4 * (6 + 2 + 8)),
    "grouped queries": (("--num-query-groups", "2", "--head-dim", "8"), 2 * (8 + 8)),
}


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_bytes_of_what_ranks_send(algorithm: str, attention: str) -> None:
    """Latents cost less than keys and values, also than those of few groups; by heads all ranks get all latents."""
    flags, features = ATTENTIONS[attention]
    sent = run(2, "moe", *CP, algorithm, *flags, "--train-iters", "1", "--dtype", "fp64").records[0].sent_bytes
    positions, layers, micro_batches = 8, 2, 8
    rows = 8 * positions * layers * micro_batches  # bytes of a feature of all positions, the same in the backward
    if algorithm == "megatron_cp_algo":
        assert sent["cp/send"] == 3 * rows * features
    elif algorithm == "allgather_cp_algo":
        # Ranks of experts and of the loss gather less than that over cp.
        assert 0 <= sent["cp/all_gather"] - 2 * rows * features < 0.1 * rows * features
    else:
        heads = 4 * (8 + 8) + (0 if attention == "latents" else features)
        assert sent["cp/all_to_all"] == 2 * rows * heads // 2
        if attention == "latents":
            assert 0 <= sent["cp/all_gather"] - rows * features < 0.1 * rows * features


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_dropout_repeats_where_layers_are_computed_again(algorithm: str) -> None:
    dropout = ("--attention-dropout", "0.2", "--hidden-dropout", "0.1", "--dtype", "fp64", "--train-iters", "3")
    plain = run(2, "moe", *CP, algorithm, *dropout)
    again = run(2, "moe", *CP, algorithm, *dropout, "--recompute-interval", "1")
    without = run(2, "moe", *CP, algorithm, *dropout[4:-1], "1")
    losses, repeated, other = ([record.loss for record in one.records] for one in (plain, again, without))
    assert losses == repeated
    assert losses[0] != other[0]


@pytest.mark.parametrize("kind", ["moe", "ernie"])
def test_evaluation_and_a_checkpoint_on_another_layout(kind: str, tmp_path: Path) -> None:
    """Four steps alone; or two on cp 2, and from its checkpoint two alone: the same losses, evaluation included."""
    flags = ("--dtype", "fp64", "--eval-interval", "2", "--eval-iters", "1", "--lr-decay-iters", "4")
    flags = (*flags, "--attention-dropout", "0", "--hidden-dropout", "0", "--train-iters")
    alone = run(1, kind, *flags, "4")
    folder = str(tmp_path / "checkpoint")
    first = run(2, kind, *flags, "2", *CP, "megatron_cp_algo", "--save", folder)
    second = run(1, kind, *flags, "4", "--load", folder)
    got = [*first.records, *second.records]
    for a, b in zip(got, alone.records, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-10)
        assert a.eval_loss == pytest.approx(b.eval_loss, rel=1e-10) if b.eval_loss is not None else a.eval_loss is None
