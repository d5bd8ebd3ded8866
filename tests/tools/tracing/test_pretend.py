"""The 32-GPU examples of the sharding design document, each run as the actual ranks 0, 7, 17 and 31."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from megapar.arguments import parse
from megapar.core.sharding.master_shard import MasterShard
from megapar.planning.devices import device_kind
from megapar.planning.planned_run import PlannedRun
from megapar.planning.traffic import stage_traffic
from megapar.tools.tracing.pretend import pretend
from tests.support.ranks import run_ranks

CONFIGS = Path(__file__).parents[3] / "configs"
RANKS = (0, 7, 17, 31)
ALL = tuple(range(32))
# axis -> its ranks through ranks 0, 7, 17, 31, written out by hand from rank = mp + MP (sharding + SH dp)
EXAMPLES: dict[str, dict[str, tuple[tuple[int, ...], ...]]] = {
    "sharding-32": {"sharding": (ALL,) * 4, "mp": ((0,), (7,), (17,), (31,)), "dp": ((0,), (7,), (17,), (31,))},
    "sharding-8-dp-4": {
        "sharding": (tuple(range(8)), tuple(range(8)), tuple(range(16, 24)), tuple(range(24, 32))),
        "dp": ((0, 8, 16, 24), (7, 15, 23, 31), (1, 9, 17, 25), (7, 15, 23, 31)),
        "mp": ((0,), (7,), (17,), (31,)),
    },
    "mp-8-sharding-4": {
        "mp": (tuple(range(8)), tuple(range(8)), tuple(range(16, 24)), tuple(range(24, 32))),
        "sharding": ((0, 8, 16, 24), (7, 15, 23, 31), (1, 9, 17, 25), (7, 15, 23, 31)),
        "dp": ((0,), (7,), (17,), (31,)),
    },
    "mp-2-sharding-4-dp-4": {
        "mp": ((0, 1), (6, 7), (16, 17), (30, 31)),
        "sharding": ((0, 2, 4, 6), (1, 3, 5, 7), (17, 19, 21, 23), (25, 27, 29, 31)),
        "dp": ((0, 8, 16, 24), (7, 15, 23, 31), (1, 9, 17, 25), (7, 15, 23, 31)),
    },
}


def step_as(rank: int, world_size: int, rendezvous: str, name: str, stage: int) -> list[dict[str, object]]:
    """One step as each of the four ranks; what they saw."""
    seen = []
    for pretended in RANKS:
        flags = ["--config", str(CONFIGS / f"{name}.yaml"), "--data-path", "mock", "--sharding-stage", str(stage)]
        flags += ["--device", "cpu", "--micro-batch-size", "1", "--num-layers", "2"]
        config = parse("ernie", flags, {"WORLD_SIZE": "32", "RANK": str(pretended)})
        with pretend(config, pretended) as trainer:
            step = trainer.step()
            shards: list[MasterShard] = trainer.job.sharding.master_shards
            axes = {axis: trainer.world.axis(axis).ranks for axis in ("sharding", "mp", "dp")}
            seen.append(
                {
                    "axes": axes,
                    "fake": all(isinstance(shard.master, FakeTensor) for shard in shards)
                    and isinstance(step.norm, torch.Tensor),
                    "elements": sum(shard.master.numel() for shard in shards),
                    "sent": step.sent_bytes,
                }
            )
    return seen


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_seed_examples_step_on_32_ranks(name: str) -> None:
    results = run_ranks(1, step_as, name, 1, group=False, timeout=120)[0]
    for number, result in enumerate(results):
        assert result["axes"] == {axis: ranks[number] for axis, ranks in EXAMPLES[name].items()}
        assert result["fake"]
    elements = [result["elements"] for result in results]
    assert len(set(elements)) == 1


PIPELINE = """
    --pp-degree 4 --mp-degree 2 --num-layers 8 --num-experts 0 --use-nanopipe
    --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 128
    --micro-batch-size 4 --gradient-merge-acc-step 8 --data-path mock --device cpu
"""


def stages_as(rank: int, world_size: int, rendezvous: str) -> list[tuple[int, dict[str, int]]]:
    """(stage, bytes sent) of one step as a rank of the first, a middle and the last stage."""
    seen = []
    for pretended in (0, 9, 31):
        config = parse("moe", PIPELINE.split(), {"WORLD_SIZE": "32", "RANK": str(pretended)})
        with pretend(config, pretended) as trainer:
            sent = trainer.step().sent_bytes
            seen.append((trainer.world.axis("pp").rank, sent))
    return seen


def test_stages_of_a_large_pipeline_send_activations_gradients_and_the_tied_embedding_s() -> None:
    results = run_ranks(1, stages_as, group=False, timeout=120)[0]
    activations = 8 * 4 * 32 * 64 * 4  # micro-batches, samples, positions, features, bytes
    tied = 128 // 2 * 64 // 4 * 4  # this rank's shard of this mp rank's vocabulary, in fp32
    assert [stage for stage, _ in results] == [0, 1, 3]
    assert [sent["pp/send"] for _, sent in results] == [activations + tied, 2 * activations, activations + tied]


CONTEXT = """
    --cp-degree 8 --mp-degree 2 --sequence-parallel --num-experts 0 --num-layers 2
    --hidden-size 64 --num-attention-heads 16 --num-query-groups 4 --seq-length 64
    --vocab-size 128 --micro-batch-size 2 --data-path mock --device cpu
    --gradient-merge-acc-step 3 --reset-attention-mask
"""
BY_ALGORITHM = {"megatron_cp_algo": 1, "ulysses_cp_algo": 1, "allgather_cp_algo": 2}  # kinds of messages


SLICES = "--num-experts 4 --moe-ffn-hidden-size 32 --ep-degree 2 --ampipe-degree 2"


def shared_as(
    rank: int, world_size: int, rendezvous: str, algorithm: str, more: str = ""
) -> tuple[dict[str, int], dict[str, float]]:
    """Bytes sent of one step that shares sequences, and what a plan says of them."""
    line = f"{CONTEXT} --context-parallel-algo {algorithm} --dtype bf16 {more}"
    config = parse("moe", line.split(), {"WORLD_SIZE": "32", "RANK": "11"})
    with pretend(config, 11) as trainer:
        sent = trainer.step().sent_bytes
    return sent, stage_traffic(PlannedRun(config, device_kind("cpu")), 0)


def context_bytes(algorithm: str, more: str = "") -> dict[str, int]:
    """Bytes that a step sends over cp, as planned."""
    sent, planned = run_ranks(1, shared_as, algorithm, more, group=False, timeout=120)[0]
    ours = {name: amount for name, amount in sent.items() if name.startswith("cp/")}
    assert ours == {name: amount for name, amount in planned.items() if name.startswith("cp/")}
    return ours


@pytest.mark.parametrize("algorithm", BY_ALGORITHM)
def test_shared_sequences_send_what_a_plan_says(algorithm: str) -> None:
    assert len(context_bytes(algorithm)) == BY_ALGORITHM[algorithm]


LATENT = """
    --multi-latent-attention --num-query-groups 16 --kv-lora-rank 12 --qk-head-dim 6
    --qk-pos-emb-head-dim 2 --v-head-dim 10 --mla-cp-exchange
"""


@pytest.mark.parametrize(
    ("algorithm", "exchange"),
    [*((algorithm, "latent") for algorithm in BY_ALGORITHM), ("megatron_cp_algo", "kv")],
)
def test_latent_attention_sends_what_a_plan_says(algorithm: str, exchange: str) -> None:
    """Keys of 8 features and values of 10, of 8 heads here; or 14 features of latents and rotary keys."""
    ours = context_bytes(algorithm, f"{LATENT} {exchange}")
    if algorithm == "megatron_cp_algo":
        features = 14 if exchange == "latent" else 8 * (8 + 10)
        assert ours["cp/send"] == 3 * 7 * 2 * 2 * 64 // 8 * features * (2 * 2 + 4)


def test_shared_slices_send_keys_once() -> None:
    ours = context_bytes("megatron_cp_algo", SLICES)
    keys = 2 * 2 * 2 * 64 // 8 * 4 // 2 * 4  # layers, k and v, samples, positions, own heads, their size
    assert ours["cp/send"] == 3 * 7 * keys * (2 + 4)  # there in bf16, gradients home in fp32
