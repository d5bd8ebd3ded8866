"""Bytes that a layer keeps for its backward, in the plan and as autograd saves them in a step on a fake GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, UntypedStorage

from megapar.arguments import parse
from megapar.core.device.attention import whole as attention
from megapar.planning.assume import Assumed
from megapar.planning.devices import device_kind
from megapar.planning.planned_run import PlannedRun
from megapar.tools.tracing.pretend import pretend
from megapar.tools.tracing.trace import traceable
from scripts.tracing.gpu import FakeGpu, as_on_a_gpu
from tests.support.ranks import run_ranks

COMMON = "--data-path mock --hidden-size 512 --vocab-size 4096 --seq-length 512 --micro-batch-size 2 --clip-grad 0"
DENSE = f"{COMMON} --num-experts 0 --ffn-hidden-size 1536 --num-attention-heads 8"
MOE = f"{COMMON} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 256 --first-k-dense 0"
MOE += " --num-attention-heads 8 --moe-model-type megatron_moe --moe-aux-loss-coeff 0 --moe-z-loss-coeff 0"
GEMMA = "--activation geglu --norm-placement both --apply-layernorm-1p --qk-norm --scale-embedding"
PLAIN = "--position-embedding-type learned --activation gelu --normalization layernorm --add-bias-linear"


GPT_OSS = "--attention-sinks --activation clamped_swiglu --moe-router-linear-bias --add-bias-linear"


def saved(flags: str, layers: int, capability: tuple[int, int]) -> int:
    """Bytes of all storages that autograd saves in a step, without the parameters."""
    config = traceable(parse("moe", [*flags.split(), "--num-layers", str(layers)], {}), 0)
    device = FakeGpu(torch.device("cpu"))
    storages: dict[int, UntypedStorage] = {}  # held, so that no address is used twice

    def save(x: Tensor) -> Tensor:
        storages[x.untyped_storage()._cdata] = x.untyped_storage()
        return x

    with as_on_a_gpu(device), pretend(config, 0, None, device) as trainer, pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "capability_of", lambda like: capability)
        with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
            trainer.step()
        own = {x.untyped_storage()._cdata for x in trainer.job.model.parameters()}
    return sum(storage.nbytes() for address, storage in storages.items() if address not in own)


def saved_by_a_layer(rank: int, world_size: int, rendezvous: str, flags: str, capability: tuple[int, int]) -> int:
    return saved(flags, 3, capability) - saved(flags, 2, capability)


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        (f"{DENSE} --bf16", "h200-141g"),
        (f"{DENSE} --bf16 --num-query-groups 2", "h200-141g"),
        (f"{DENSE} --bf16 --num-query-groups 2", "a100-80g"),
        (f"{DENSE} --bf16 --num-query-groups 2 --qk-norm", "h200-141g"),
        (f"{DENSE} --bf16 --qk-norm", "h200-141g"),
        (f"{DENSE} --bf16 --num-query-groups 2 --qk-norm --qk-norm-scope width --norm-placement output", "h200-141g"),
        (f"{DENSE} --bf16 --num-query-groups 2 {GEMMA}", "h200-141g"),
        (f"{DENSE} --bf16 {GEMMA}", "h200-141g"),
        (f"{DENSE} --dtype fp32 --num-query-groups 2", "h200-141g"),
        (f"{DENSE} --fp16 --num-query-groups 2", "v100-32g"),
        (f"{DENSE} --bf16 --recompute-granularity selective", "h200-141g"),
        (f"{DENSE} --bf16 {PLAIN}", "h200-141g"),
        (f"{MOE} --bf16 --num-query-groups 2", "h200-141g"),
        (f"{DENSE} --bf16 --num-query-groups 2 --attention-sinks", "h200-141g"),
        (f"{DENSE} --bf16 --activation clamped_swiglu", "h200-141g"),
        (f"{MOE} --bf16 --activation clamped_swiglu --moe-router-linear-bias", "h200-141g"),
        (f"{MOE} --bf16 {GPT_OSS}", "h200-141g"),
    ],
)
def test_a_layer_keeps_what_autograd_saves(flags: str, kind: str) -> None:
    planned = device_kind(kind)
    config = traceable(parse("moe", [*flags.split(), "--num-layers", "2"], {}), 0)
    kept = PlannedRun(config, planned, Assumed()).costs.layer(1).kept
    found = run_ranks(1, saved_by_a_layer, flags, planned.capability, group=False, timeout=120)[0]
    assert kept == pytest.approx(found, rel=0.01)
