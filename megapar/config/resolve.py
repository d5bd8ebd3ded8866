"""Values derived from other values. A derivation reads some names and sets one; a missing input leaves it missing."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from megapar.files.paths import METRICS
from megapar.files.uri import is_stored
from megapar.model.attention.latent import cheaper_exchange
from megapar.model.decoder.sizes import DENSE_BLOCK, LAYER_BLOCK
from megapar.model.rope_scaling import LLAMA3
from megapar.model.sizes import GATED
from megapar.schema.phase_plan import parse_phases


@dataclass(frozen=True)
class Derivation:
    """Derivation of ``name`` from ``reads``, applied if its value is in ``open``.

    Attributes:
        name: Field that is set.
        reads: Fields passed to ``value``.
        value: Returns the value, or None if it cannot be derived.
        open: Values that mean that the field is to be derived.
        settled: The open value is legal, and is kept if nothing can be derived.
    """

    name: str
    reads: tuple[str, ...]
    value: Callable[..., Any]
    open: tuple[Any, ...] = (None,)
    settled: bool = False


def _sharding(world: int, mp: int, pp: int, cp: int, dp: int, hybrid: bool) -> int | None:
    rest = mp * pp * cp * max(1, dp)
    return None if (hybrid and dp < 1) or world % rest else world // rest


def _replicas(world: int, sharding: int, mp: int, pp: int, cp: int) -> int | None:
    used = sharding * mp * pp * cp
    return None if used < 1 or world % used else world // used


def _quotient(whole: int, part: int) -> int | None:
    return None if part < 1 or whole % part else whole // part


def _longest(length: int, phases: str | None) -> int:
    return max([length, *(phase.seq_length or length for phase in parse_phases(phases))]) if phases else length


def _ffn(hidden: int, activation: str) -> int:
    # Megatron's rule: a gate makes three matrices of two, so 2/3 of the width costs the same.
    return 4 * hidden if activation not in GATED else max(64, int(4 * hidden * 2 / 3) // 64 * 64)


def _overlap(ampipe_degree: int, strict: bool) -> str:
    # MindSpeed does not combine AMPipe with these overlaps; an automatic choice yields to an explicit one.
    return "off" if strict and ampipe_degree != 1 else "on"


_EXCHANGE_READS = (
    "multi_latent_attention", "context_parallel_algo", "cp_degree", "mp_degree",
    "num_attention_heads", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim",
)  # fmt: skip


def _exchange(latent: bool, algorithm: str, cp: int, mp: int, heads: int, *features: int) -> str | None:
    if not latent or cp == 1:
        return None
    rank, plain, rotary, value = features
    on_rank = heads // mp * (plain + rotary + value)
    return cheaper_exchange(rank + rotary, on_rank, cp, by_heads=algorithm == "ulysses_cp_algo")


def _strategy(given: frozenset[str], anchors: tuple[str, ...]) -> str | None:
    # A size or anchors without a strategy select the matching one; rows of the matrix refuse both together.
    if anchors:
        return None if "segment_broadcast_mb" in given else "segment_anchors"
    return "segment_broadcast_MB" if "segment_broadcast_mb" in given else None


def _apart(task: str, packing: str) -> bool | None:
    # Conversations of one sample are separate documents; rows refuse these flags with --task sft.
    return True if task == "sft" and packing == "best_fit" else None


DERIVATIONS: tuple[Derivation, ...] = (
    Derivation("world_size", ("launched_size",), lambda launched: launched),
    Derivation("ranks_per_node", ("launched_node",), lambda launched: launched, settled=True),
    Derivation(
        "hybrid_dp",
        ("dp_degree", "given"),
        lambda dp, given: (dp > 1 and "hybrid_dp" not in given) or None,
        open=(False,),
        settled=True,
    ),
    Derivation(
        "sharding_degree",
        ("world_size", "mp_degree", "pp_degree", "cp_degree", "dp_degree", "hybrid_dp"),
        _sharding,
        open=(-1,),
    ),
    Derivation(
        "dp_degree", ("world_size", "sharding_degree", "mp_degree", "pp_degree", "cp_degree"), _replicas, open=(-1,)
    ),
    Derivation("data_ranks", ("dp_degree", "sharding_degree"), lambda dp, sharding: dp * sharding or None),
    Derivation("expert_mp_degree", ("mp_degree",), lambda mp: mp),
    Derivation("num_query_groups", ("num_attention_heads",), lambda heads: heads),
    Derivation(
        "head_dim",
        ("hidden_size", "num_attention_heads", "multi_latent_attention", "qk_head_dim", "qk_pos_emb_head_dim"),
        lambda hidden, heads, latent, plain, rotated: plain + rotated if latent else _quotient(hidden, heads),
    ),
    Derivation("attention_latent_norm_epsilon", ("layernorm_epsilon",), lambda epsilon: epsilon),
    Derivation("ffn_hidden_size", ("hidden_size", "activation"), _ffn),
    Derivation("moe_ffn_hidden_size", ("ffn_hidden_size",), lambda ffn: ffn),
    Derivation("moe_router_group_topk", ("moe_router_num_groups",), lambda groups: groups),
    Derivation(
        "mtp_block",
        ("num_experts", "moe_router_score_function"),
        lambda experts, score: LAYER_BLOCK if experts and score != "softmax" else DENSE_BLOCK,
    ),
    Derivation(
        "norm_topk_prob",
        ("moe_router_pre_softmax",),
        lambda before: "off" if before else None,
        open=("auto",),
        settled=True,
    ),
    Derivation("task_ffn_hidden_size", ("task_hidden_size",), lambda hidden: 4 * hidden),
    Derivation("max_position_embeddings", ("seq_length", "data_phases"), _longest),
    Derivation(
        "original_max_position_embeddings", ("rope_scaling_type",), lambda kind: 8192 if kind == LLAMA3 else 4096
    ),
    Derivation(
        "gradient_merge_acc_step",
        ("global_batch_size", "micro_batch_size", "data_ranks"),
        lambda batch, micro, data_ranks: 1 if batch is None else _quotient(batch, micro * data_ranks),
    ),
    Derivation(
        "global_batch_size",
        ("gradient_merge_acc_step", "micro_batch_size", "data_ranks"),
        lambda steps, micro, data_ranks: steps * micro * data_ranks,
    ),
    Derivation("sharding_segment_strategy", ("given", "segment_anchors"), _strategy, settled=True),
    Derivation("grad_reduce_dtype", ("main_grads_dtype",), lambda dtype: dtype),
    Derivation("gradient_merge_mode", ("sharding_stage",), lambda stage: "step" if stage == 1 else "micro_batch"),
    Derivation("overlap_grad_reduce", ("ampipe_degree", "strict_seed_rules"), _overlap, open=("auto",)),
    Derivation("overlap_param_gather", ("ampipe_degree", "strict_seed_rules"), _overlap, open=("auto",)),
    # A step waits for the slowest rank, and with many ranks the collector would run on some rank in nearly every step.
    Derivation("manual_gc", ("world_size",), lambda world: "on" if world >= 64 else "off", open=("auto",)),
    Derivation("mla_cp_exchange", _EXCHANGE_READS, _exchange, open=("auto",), settled=True),
    Derivation("reset_position_ids", ("task", "sft_packing"), _apart, open=(False,), settled=True),
    Derivation("reset_attention_mask", ("task", "sft_packing"), _apart, open=(False,), settled=True),
    Derivation(
        "metrics_jsonl",
        ("save",),
        lambda save: str(PurePath(save) / METRICS) if save and not is_stored(save) else None,
        settled=True,
    ),
    Derivation("lr_decay_iters", ("train_iters",), lambda steps: max(1, steps)),
    Derivation("lr_wsd_decay_iters", ("lr_decay_iters",), lambda steps: max(1, steps // 10)),
)


def resolve(values: MutableMapping[str, Any], origins: MutableMapping[str, str]) -> None:
    """Replace every open value in place and mark it ``derived``; remove those that cannot be derived."""
    for line in DERIVATIONS:
        if line.name in values and values[line.name] not in line.open:
            continue
        if line.name not in values and line.name != "data_ranks":
            continue  # a bad value, which has its complaint already: derive nothing from it
        result = None
        if all(name in values for name in line.reads):
            result = line.value(*(values[name] for name in line.reads))
        if result is None:
            if not line.settled:
                values.pop(line.name, None)
        else:
            values[line.name] = result
            origins[line.name] = "derived"
