"""The options that the fuzzer draws. A new feature adds its rows, or gives values to a row that was only wild before.

An option's values are those that are legal beside the rows above it; ``wild`` ones may break any rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from megapar.rules.rule import divisors
from tests.fuzz.option import Condition, Drawn, Option, degree, some

MOE = ("moe",)
ERNIE = ("ernie",)

# Set in every run. mock: no tokenizer to train. A large epsilon: a gradient that is zero in exact arithmetic is
# rounding noise, which Adam would blow up to the size of a step.
FIXED: dict[str, object] = {
    "train_iters": 10,
    "data_path": ("mock",),
    "lr": 0.01,
    "adam_eps": 1e-5,
    "eval_interval": 0,
    "dtype": "fp64",
    "replica_check_interval": 5,
}
# Other precisions are compared over steps that change nothing: what two roundings of a step make of the next is chance.
STILL: dict[str, object] = {"lr": 1e-30}

# How often each number of ranks is drawn: small ones are cheap, odd ones leave uneven pieces.
WORLD_SIZES = (2, 1, *(2,) * 5, *(4,) * 7, 3, 3, 5, 6, 6, 7, 8, 8)
FEW = 36  # tokens of a sample, at most about


def _rest(d: Drawn) -> int:
    """Ranks that read data of their own: those that pp, mp and cp leave."""
    return max(1, int(d.world_size // (d.pp_degree * d.mp_degree * d.cp_degree)))


def _sharding(d: Drawn) -> int:
    return _rest(d) if d.sharding_degree == -1 else max(1, int(d.sharding_degree))


def _emp(d: Drawn) -> int:
    return int(d.expert_mp_degree or d.mp_degree)


def _ep_degrees(d: Drawn) -> list[int | None]:
    room = _sharding(d) * d.cp_degree * (d.mp_degree if _emp(d) == 1 else 1)
    replicas = max(1, _rest(d) // _sharding(d))
    return [None, *sorted({*divisors(room), *(room * n for n in divisors(replicas))} - {1})]


def _experts(d: Drawn) -> bool:
    return bool(d.num_experts)


def _drops(d: Drawn) -> bool:
    return _experts(d) and d.moe_model_type == "deepspeed_moe"


def _policies(d: Drawn) -> list[str | None]:
    """Samples that start alike tie in ``probs``, and rounding may break the tie either way: few must start alike."""
    return [None, "choice", *(["probs"] if d.vocab_size > 100 and _exact(d) else [])]


def _exact(d: Drawn) -> bool:
    """Runs in fp64, and is compared with one process to the last digits."""
    return d.get("dtype") is None


def _is(name: str, *values: object) -> Condition:
    return lambda d: getattr(d, name) in values


def _multiples(of: Callable[[Drawn], int], *factors: int) -> Callable[[Drawn], list[int]]:
    return lambda d: [of(d) * factor for factor in factors]


def _mp(d: Drawn) -> int:
    return int(d.mp_degree)


def _cp(d: Drawn) -> int:
    return int(d.cp_degree)


def _algorithms(d: Drawn) -> list[str | None]:
    return [None, "ulysses_cp_algo", "allgather_cp_algo"]


def _head_step(d: Drawn) -> int:
    """What divides the heads: mp deals them out, and ulysses once more."""
    return _mp(d) * (_cp(d) if d.context_parallel_algo == "ulysses_cp_algo" else 1)


def _head_dims(d: Drawn) -> list[int | None]:
    odd = [5, 3] if d.position_embedding_type == "learned" else []
    return [None, None, 6, 16, *odd]


def _hidden_sizes(d: Drawn) -> list[int]:
    if d.head_dim is not None:
        return [24, 17, 33]
    even = [d.num_attention_heads * size for size in (4, 8, 6)]
    return even if d.position_embedding_type == "rope" else [*even, d.num_attention_heads * 5]


def _branched(d: Drawn) -> bool:
    return bool(d.ernie_model == "ernie3")


def _lanes(d: Drawn) -> int:
    """Ranks that share a sequence."""
    return _mp(d) if d.sequence_parallel else 1


def _growing(d: Drawn) -> bool:
    return bool(d.progressive_iters)


def _lengths(d: Drawn) -> list[int]:
    shortest = (9 if _branched(d) else 6) if d.kind == "ernie" else 1
    chunks = 2 * _cp(d) if _cp(d) > 1 and d.kind == "moe" and d.context_parallel_algo == "megatron_cp_algo" else _cp(d)
    step = math.lcm(chunks, _cp(d) * (_mp(d) if d.sequence_parallel else 1))
    wanted = [step * n for n in ((2, 1, 3, 4, 6) if step > 1 else (8, 6, 2, 1, 5, 7, 13, 16, 24))]
    return [n for n in wanted if shortest <= n <= FEW] or [-(-shortest // step) * step]


def _vocabularies(d: Drawn) -> list[int]:
    """A rank's run is ceil(V / mp) tokens; the last rank has at least one."""
    return [n for n in (101, 64, 33, 17, 9, 257) if (_mp(d) - 1) * -(-n // _mp(d)) < n]


def _shared(d: Drawn) -> list[int | None]:
    width = d.moe_ffn_hidden_size or d.ffn_hidden_size or _mp(d)
    return [None, *(n for n in (1, 2) if n * width % _mp(d) == 0)]


def _groups(d: Drawn) -> list[int | None]:
    """Numbers of groups that some of can be chosen from evenly."""
    return [None, None, *(g for g in divisors(d.num_experts)[1:] if _group_choices_of(d, g))]


def _group_choices_of(d: Drawn, groups: int) -> list[int]:
    size, topk = d.num_experts // groups, int(d.moe_router_topk)
    return [n for n in range(1, groups) if topk % n == 0 and topk <= n * size]


def _group_choices(d: Drawn) -> list[int]:
    return _group_choices_of(d, int(d.moe_router_num_groups))


def _widths(d: Drawn) -> list[tuple[int, ...] | None]:
    layers = d.num_layers - d.first_k_dense
    return [None, None, tuple(_mp(d) * (3 + layer % 3) for layer in range(layers))]


def _merged(d: Drawn) -> list[str | None]:
    return [None, "step"] if d.sharding_stage == 1 else [None, "step", "micro_batch"]


def _unit(d: Drawn) -> int:
    return int(d.micro_batch_size) * _rest(d)


def _global_batches(d: Drawn) -> list[int | None]:
    if d.gradient_merge_acc_step is not None:
        return [None, _unit(d) * d.gradient_merge_acc_step]
    return [_unit(d) * n for n in (*_steps(d), *([] if _pipelined(d) else [4]))]


def _paces(d: Drawn) -> list[int]:
    """Steps in which lengths may grow."""
    step = int(d.generation_segments or 1) * _lanes(d) * _cp(d)
    return [n for n in range(step, d.seq_length + 1, step) if n >= 6][:2]


def _rampups(d: Drawn) -> list[tuple[int, int, int] | None]:
    unit = _unit(d)
    return [None, None, None, (unit, unit, 2 * unit)] if not _pipelined(d) else [None]


def _whole_heads(d: Drawn) -> bool:
    return _mp(d) == _cp(d) == 1


def _whole_sequences(d: Drawn) -> bool:
    return not d.sequence_parallel and _cp(d) == 1


def _masked(d: Drawn, whole: bool) -> tuple[float, ...]:
    """Dropout where one process draws the same masks; those of another precision are others."""
    return (0.0, 0.0, 0.1, 0.5) if whole and _exact(d) else (0.0,)


def _pipelined(d: Drawn) -> bool:
    return bool(d.pp_degree > 1)


def _chunks(d: Drawn) -> int:
    """Chunks of the pipeline; every one needs a layer."""
    return int(d.pp_degree * d.vpp_degree)


def _split_backward(d: Drawn) -> bool:
    return bool(d.use_nanopipe or d.pp_schedule == "zero_bubble")


def _vpps(d: Drawn) -> list[int | None]:
    if d.pp_schedule == "interleaved":
        return [2, 3]
    return [None, 2, 3] if _split_backward(d) else [None]


def _steps(d: Drawn) -> list[int]:
    """Micro-batches per step, simplest first: whole multiples of the stages where the schedule wants them."""
    pp = int(d.pp_degree)
    if pp == 1 or (d.pp_schedule == "gpipe" and not d.use_nanopipe):
        return [1, 2, 3]
    multiples = d.pp_schedule == "interleaved" or _split_backward(d)
    return [pp, 2 * pp] if multiples else [pp, pp + 1, 2 * pp]


def _layer_counts(d: Drawn) -> list[int]:
    return [_chunks(d) + more for more in (0, 1, 2)]


def _cuts(d: Drawn) -> list[str | None]:
    """Ways to cut that suit any number of layers."""
    starts = ",".join(map(str, range(_chunks(d))))
    return [None, "balanced", starts]


def _whole_units(d: Drawn) -> bool:
    return bool(d.recompute_interval or d.recompute_method)


def _sliceable(d: Drawn) -> bool:
    """Masks of slices are not those of the whole."""
    return _experts(d) and not (d.attention_dropout or d.hidden_dropout)


def _can_slice(d: Drawn) -> bool:
    return _sliceable(d) and not d.adaptive_recompute_device_size and d.ep_degree > 1 and bool(d.use_flash_attn)


def _degrees(d: Drawn) -> list[int | None]:
    """0 is ``auto``, which is 1 wherever slices would change the numbers."""
    room = d.seq_length // (_lanes(d) * _cp(d))
    return [None, *(n for n in (2, 3, 4, 8) if n <= room), 0]


def _sliced(d: Drawn) -> bool:
    return bool(d.ampipe_degree > 1)


def _capacities(d: Drawn) -> list[str | None]:
    """Who comes first in the queue of all slices is known to the policy token alone."""
    return [None, "slice"] if d.moe_drop_policy == "token" else ["slice"]


def _can_pipe(d: Drawn) -> bool:
    return _sliceable(d) and _drops(d) and (d.ep_degree > 1 or _emp(d) > 1) and (_cp(d) == 1 or _sliced(d))


def _pieces(d: Drawn) -> list[int | None]:
    if not d.num_experts:
        return [None]  # asked of a dense model only where another value of a pair is forced
    even = -(-d.seq_length * d.moe_router_topk * d.moe_capacity_factor // d.num_experts)
    room = max(even, d.moe_min_capacity)
    slices = max(1, d.ampipe_degree)
    return [None, *(n for n in sorted({2, 3, 2 * slices, 3 * slices}) if n <= room)]


def _reduced(d: Drawn) -> list[str | None]:
    """Gradients of fp32 and bf16 runs, unless stage 3 adds micro-batches up in it first."""
    steps = d.gradient_merge_acc_step or (d.global_batch_size or _unit(d)) // _unit(d)
    in_pieces = d.gradient_merge_mode != "step" and not d.hybrid_dp
    fits = d.sharding_stage < 3 or steps == 1 or in_pieces
    return [None, "bf16"] if d.get("dtype") in ("fp32", "bf16") and fits else [None]


ORDERS = (
    ("dp", "pp", "sharding", "cp", "mp"),
    ("sharding", "dp", "pp", "cp", "mp"),
    ("mp", "cp", "sharding", "pp", "dp"),
    ("pp", "mp", "dp", "cp", "sharding"),
)

LAYOUT = (
    # Others than fp64 are compared by what they round away, and rarely drawn: 16-bit products are slow on many CPUs.
    Option(name="dtype", values=(*(None,) * 17, "fp32", "bf16", "fp16"), layout=False),
    Option(name="ernie_model", values=(None, "ernie3"), kinds=ERNIE),
    Option(
        name="pp_degree",
        values=lambda d: [None, None, *(n for n in divisors(d.world_size)[1:] if n <= 4)],
        wild=(2, 3),
        group=degree,
        layout=True,
    ),
    Option(
        name="pp_schedule",
        values=(None, "gpipe", "interleaved", "zero_bubble"),
        when=_pipelined,
        wild=("gpipe", "interleaved"),
        layout=True,
    ),
    Option(
        name="use_nanopipe",
        values=lambda d: [None, True] if d.pp_schedule == "1f1b" else [None],
        when=_pipelined,
        wild=(True,),
        layout=True,
    ),
    Option(name="vpp_degree", values=_vpps, when=_pipelined, wild=(2,), layout=True),
    Option(
        name="mp_degree",
        values=lambda d: [None, *divisors(max(1, d.world_size // d.pp_degree))[1:]],
        wild=(2, 3, 4, 16),
        group=degree,
        layout=True,
    ),
    Option(
        name="cp_degree",
        values=lambda d: [None, None, *divisors(max(1, d.world_size // (d.pp_degree * d.mp_degree)))[1:]],
        wild=(2, 3),
        group=degree,
        layout=True,
        when=lambda d: not _branched(d),
    ),
    Option(
        name="context_parallel_algo",
        values=_algorithms,
        when=lambda d: _cp(d) > 1,
        wild=("ulysses_cp_algo", "allgather_cp_algo"),
        layout=True,
    ),
    Option(name="hybrid_dp", values=(None, True), when=lambda d: _rest(d) > 1, wild=(True,), layout=True),
    Option(
        name="sharding_degree",
        values=lambda d: list(divisors(_rest(d))[:-1]) if d.hybrid_dp else [None, _rest(d), -1],
        wild=(0, 2, 3, 8),
        group=degree,
        layout=True,
    ),
    Option(
        name="sharding_stage",
        values=lambda d: (None, 1) if _split_backward(d) else (None, 2, 1) if _pipelined(d) else (None, 2, 3, 1),
        wild=(2, 3),
        layout=True,
    ),
    Option(name="gradient_merge_mode", values=_merged, wild=("step", "micro_batch"), layout=True),
    Option(name="sequence_parallel", values=(None, True, True), when=lambda d: _mp(d) > 1, wild=(True,), layout=True),
    Option(
        name="expert_mp_degree",
        values=lambda d: [None, _mp(d), *([1, 1] if d.sequence_parallel else [])],
        when=lambda d: _mp(d) > 1,
        wild=(1, 2, 3),
        group=degree,
        layout=True,
        kinds=MOE,
    ),
    Option(name="ep_degree", values=_ep_degrees, wild=(2, 3, 4, 16), group=degree, layout=True, kinds=MOE),
    Option(name="rank_order", values=(None, *ORDERS), wild=(("dp", "pp", "mp"), (*ORDERS[0][1:], "tp")), layout=True),
    Option(name="tp_comm_overlap", values=(None, False), when=lambda d: _mp(d) > 1, wild=(False,), layout=True),
    Option(
        name="optimizer_offload",
        values=(None, None, True),
        when=lambda d: d.sharding_stage != 3,
        wild=(True,),
        layout=True,
    ),
    Option(name="overlap_grad_reduce", values=(None, "off", "on"), layout=True),
    Option(name="overlap_param_gather", values=(None, "off", "on"), layout=True),
)

DECODER = (
    Option(name="num_layers", values=_layer_counts, wild=(1, 2), size=True),
    Option(
        name="pp_seg_method",
        values=_cuts,
        when=_pipelined,
        wild=("layer:Mlp", "layer:Conv", "0,1"),
        group=lambda value: "starts" if value[0].isdigit() else value,
        layout=True,
    ),
    Option(name="position_embedding_type", values=(None, "learned"), kinds=MOE),
    Option(name="num_attention_heads", values=_multiples(_head_step, 1, 2, 4, 3), wild=(1, 3, 5), size=True),
    Option(
        name="num_query_groups",
        values=lambda d: [None, *(n for n in divisors(d.num_attention_heads) if n % _mp(d) == 0)],
        wild=(1, 2, 3),
        size=True,
        kinds=MOE,
    ),
    Option(name="head_dim", values=_head_dims, wild=(3, 8), size=True, kinds=MOE),
    Option(name="hidden_size", values=_hidden_sizes, wild=(15, 20), size=True),
    Option(
        name="ffn_hidden_size",
        values=lambda d: [_mp(d) * n for n in (8, 5, 3)] + ([None] if 4 % _mp(d) == 0 else []),
        wild=(9, 10, 1),
        size=True,
    ),
    Option(name="seq_length", values=_lengths, wild=(1, 5, 7), size=True),
    Option(
        name="max_position_embeddings",
        values=lambda d: [None, None, d.seq_length + 3],
        when=lambda d: d.kind == "ernie" or d.position_embedding_type == "learned",
        wild=(4,),
        size=True,
    ),
    Option(name="vocab_size", values=_vocabularies, wild=(9, 10), size=True),
    Option(name="normalization", values=(None, "layernorm"), kinds=MOE),
    Option(name="activation", values=(None, "gelu"), kinds=MOE),
    Option(name="add_bias_linear", values=(None, True), kinds=MOE),
    Option(name="qk_norm", values=(None, True), kinds=MOE),
    Option(name="layernorm_epsilon", values=(None, 0.01)),
    Option(
        name="rope_theta",
        values=(None, 100.0),
        when=_is("position_embedding_type", "rope"),
        wild=(100.0,),
        kinds=MOE,
    ),
    Option(name="untie_embeddings_and_output_weights", values=(None, True), kinds=MOE),
    # At 0.5 the attention of larger models saturates, and the second step makes 1e-10 of a rounding error of the first.
    Option(name="init_std", values=(0.1, 0.02, 0.2)),
    Option(name="use_flash_attn", values=(None, False)),
    # Masks of split heads and positions are not those of one process; those of replicated activations are.
    Option(name="attention_dropout", values=lambda d: _masked(d, _whole_heads(d))),
    Option(name="hidden_dropout", values=lambda d: _masked(d, _whole_sequences(d))),
)

EXPERTS = (
    Option(
        name="num_experts",
        values=lambda d: [d.ep_degree * n for n in (2, 1, 3, 4)] + ([0] if d.ep_degree == 1 else []),
        wild=(0, 3, 5),
        size=True,
        kinds=MOE,
    ),
    Option(
        name="moe_ffn_hidden_size",
        values=lambda d: [_emp(d) * n for n in (4, 7, 3)] + [None],
        when=_experts,
        wild=(5, 6),
        size=True,
        kinds=MOE,
    ),
    Option(
        name="moe_router_topk",
        values=lambda d: [n for n in (1, 2, 3, 4) if n <= d.num_experts],
        when=_experts,
        wild=(1, 2, 9),
        kinds=MOE,
    ),
    Option(
        name="first_k_dense",
        values=lambda d: [None, *range(1, d.num_layers)],
        when=_experts,
        wild=(1, 3),
        group=some,
        kinds=MOE,
    ),
    Option(name="moe_shared_experts", values=_shared, when=_experts, wild=(1, 2), kinds=MOE),
    Option(name="moe_model_type", values=(None, "deepspeed_moe", "deepspeed_moe"), when=_experts, kinds=MOE),
    Option(name="moe_capacity_factor", values=(None, 0.5, 0.75, 1.1, 2.0, 0.01), when=_drops, wild=(0.5,), kinds=MOE),
    Option(name="moe_min_capacity", values=(None, 1, 2, 7), when=_drops, wild=(1,), kinds=MOE),
    Option(name="moe_drop_policy", values=_policies, when=_drops, wild=("choice",), kinds=MOE),
    Option(name="moe_capacity_scope", values=(None, "rank"), when=_drops, wild=("rank",), kinds=MOE),
    Option(name="moe_aux_loss_coeff", values=(None, 0.0, 0.05, 1.0), when=_experts, wild=(0.5,), kinds=MOE),
    Option(name="moe_z_loss_coeff", values=(None, 0.01), when=_experts, wild=(0.01,), kinds=MOE),
    Option(name="moe_router_score_function", values=(None, "sigmoid"), when=_experts, wild=("sigmoid",), kinds=MOE),
    Option(name="moe_router_num_groups", values=_groups, when=_experts, wild=(2, 3), group=some, kinds=MOE),
    Option(
        name="moe_router_group_topk",
        values=_group_choices,
        when=lambda d: _experts(d) and d.moe_router_num_groups > 1,
        wild=(1, 2),
        group=some,
        kinds=MOE,
    ),
    Option(name="moe_router_topk_scaling_factor", values=(None, None, 2.5), when=_experts, wild=(2.5,), kinds=MOE),
    Option(name="moe_router_lr_ratio", values=(None, None, 0.25), when=_experts, wild=(0.25,), kinds=MOE),
    Option(
        name="moe_layer_ffn_hidden_sizes",
        group=some,
        values=_widths,
        when=lambda d: _experts(d) and d.moe_ffn_hidden_size is None,
        wild=((3,), (4, 5)),
        kinds=MOE,
    ),
    Option(name="moe_seq_aux_loss_coeff", values=(None, None, 0.05), when=_experts, wild=(0.05,), kinds=MOE),
    Option(name="moe_orthogonal_loss_coeff", values=(None, None, 0.1), when=_experts, wild=(0.1,), kinds=MOE),
    Option(
        name="mtp_depth",
        values=lambda d: (None, None, 1) if d.seq_length > 1 else (None,),
        wild=(1, 2),
        kinds=MOE,
    ),
    Option(name="mtp_loss_weight", values=(None, 0.1, 0.0), when=_is("mtp_depth", 1), wild=(0.1,), kinds=MOE),
    Option(name="moe_router_bias_update_rate", values=(None, 0.01), when=_experts, wild=(0.01,), kinds=MOE),
)

SEGMENTS = (
    Option(
        name="sharding_segment_strategy",
        values=(None, None, "segment_broadcast_MB", "segment_anchors"),
        wild=("segment_anchors",),
        layout=True,
    ),
    Option(
        name="segment_broadcast_mb",
        values=(0.001, 0.01, None),
        when=_is("sharding_segment_strategy", "segment_broadcast_MB"),
        wild=(0.01,),
        layout=True,
    ),
    Option(
        name="segment_anchors",
        values=(("layers.0",), ("layers.*.attention",), ("layers.0.mlp_norm", "layers.0.attention")),
        when=_is("sharding_segment_strategy", "segment_anchors"),
        wild=(("layers.9",), ("layers.*", "layers.0")),
        layout=True,
    ),
    Option(name="sharding_prefetch_segments", values=(None, 0, 1, 9), layout=True),
)

ENCODER = (
    Option(name="type_vocab_size", values=(None, 4), wild=(1,), kinds=ERNIE),
    Option(
        name="task_type_vocab_size", values=lambda d: (5, 7) if _branched(d) else (None, 1, 5), wild=(2,), kinds=ERNIE
    ),
    Option(
        name="sop_loss_weight",
        values=(None, 0.5, 0.0),
        when=lambda d: not _branched(d),
        wild=(0.5,),
        kinds=ERNIE,
    ),
    Option(
        name="ernie_tasks",
        values=(
            "knowledge_mlm:1,document_lm:1,sentence_reorder:1,sentence_distance:1,knowledge_text:1",
            "knowledge_mlm:1,document_lm:2",
            "document_lm:1,sentence_distance:0.5",
        ),
        when=_branched,
        wild=("document_lm:1", "poetry:1"),
        kinds=ERNIE,
    ),
    Option(name="task_num_layers", values=(2, 1), when=_branched, size=True, kinds=ERNIE),
    Option(
        name="task_num_attention_heads", values=_multiples(_mp, 1, 2), when=_branched, wild=(3,), size=True, kinds=ERNIE
    ),
    Option(
        name="task_hidden_size",
        values=lambda d: [d.task_num_attention_heads * 4, d.task_num_attention_heads * 6],
        when=_branched,
        wild=(7,),
        size=True,
        kinds=ERNIE,
    ),
    Option(
        name="task_ffn_hidden_size", values=_multiples(_mp, 8, 3), when=_branched, wild=(5,), size=True, kinds=ERNIE
    ),
    Option(name="sentence_reorder_pieces", values=(None, 2), when=_branched, wild=(4,), kinds=ERNIE),
    Option(
        name="generation_segments",
        values=lambda d: [None, *(n for n in (2, 3) if d.seq_length % (n * _lanes(d)) == 0)],
        when=_branched,
        wild=(2, 5),
        kinds=ERNIE,
    ),
    Option(
        name="memory_length",
        values=lambda d: [n for n in (4, 1, 128) if n <= d.seq_length // d.generation_segments],
        when=lambda d: _branched(d) and d.generation_segments > 1,
        wild=(3,),
        kinds=ERNIE,
    ),
    Option(name="mlm_probability", values=(None, 0.5, 0.01), kinds=ERNIE),
)

TRAINING = (
    Option(name="seed", values=(7, 1, 2**40)),
    Option(name="micro_batch_size", values=(1, 2, 3)),
    Option(name="gradient_merge_acc_step", values=lambda d: [None, *_steps(d)], wild=(1, 3), group=degree, layout=True),
    Option(name="global_batch_size", values=_global_batches, wild=(7, 10), layout=True, size=True),
    Option(
        name="progressive_iters",
        values=(None, None, 2, 3),
        when=lambda d: not _pipelined(d) and bool(_paces(d)),
        wild=(2,),
        kinds=ERNIE,
    ),
    Option(name="progressive_batch_multiple", values=lambda d: [_rest(d)], when=_growing, wild=(1, 3), kinds=ERNIE),
    Option(name="progressive_length_multiple", values=_paces, when=_growing, wild=(7,), kinds=ERNIE),
    Option(
        name="rampup_batch_size",
        values=_rampups,
        when=lambda d: d.gradient_merge_acc_step is None and not _growing(d),
        wild=((2, 2, 4), (1, 3, 5)),
        size=True,
    ),
    Option(name="clip_grad", values=(None, 0.05, 0.0)),
    Option(name="weight_decay", values=(None, 0.0, 0.5)),
    Option(name="adam_beta1", values=(None, 0.5)),
    Option(name="adam_beta2", values=(None, 0.6)),
    Option(name="lr_decay_style", values=(None, "constant", "linear", "wsd")),
    Option(name="lr_warmup_iters", values=(None, 1), when=lambda d: not _growing(d), wild=(10,)),
    Option(name="lr_decay_iters", values=(None, None, 3), wild=(1,)),
    Option(
        name="lr_wsd_decay_iters",
        values=(None, 2, 1),
        when=_is("lr_decay_style", "wsd"),
        wild=(2, 20),
    ),
    Option(name="min_lr", values=(None, 0.001), when=_exact, wild=(1.0,)),
    Option(name="skip_samples", values=(None, None, ("0-1",), ("2-2", "4-9")), wild=(("3-1",),)),
)

FP16 = tuple(
    Option(name=name, values=values, when=_is("dtype", "fp16"), wild=wild)
    for name, values, wild in (
        ("initial_loss_scale", (128.0, 1.0), (2.0,)),
        ("min_loss_scale", (None, 0.5), ()),
        ("loss_scale_window", (None, 1), (1,)),
        ("loss_scale_factor", (None, 4.0), ()),
        ("hysteresis", (None, 1), ()),
    )
)

RECOMPUTE = (
    Option(
        name="recompute_granularity",
        values=lambda d: (None,) if _split_backward(d) else (None, None, None, "selective"),
        wild=("selective",),
        layout=True,
    ),
    Option(
        name="recompute_interval",
        values=(None, 1, 2, 3),
        when=lambda d: d.recompute_granularity == "full" and not _split_backward(d),
        wild=(0, 1, 5),
        layout=True,
    ),
    Option(
        name="recompute_method",
        values=lambda d: [None, "uniform", "block"] if not d.recompute_interval else [None],
        when=lambda d: d.recompute_granularity == "full" and not _split_backward(d),
        wild=("block",),
        layout=True,
    ),
    Option(
        name="recompute_num_layers",
        values=(1, 2, 3),
        when=lambda d: d.recompute_method is not None,
        wild=(1, 2),
        layout=True,
    ),
    Option(name="recompute_offload", values=(None, True), when=_whole_units, wild=(True,), layout=True),
    Option(
        name="recompute_partition",
        values=(None, True),
        when=lambda d: _whole_units(d) and _mp(d) > 1,
        wild=(True,),
        layout=True,
    ),
    Option(
        name="adaptive_recompute_device_size",
        values=(None, None, None, 1000.0),
        when=lambda d: (
            d.recompute_granularity == "full" and not _whole_units(d) and not _pipelined(d) and not _branched(d)
        ),
        wild=(1000.0,),
        layout=True,
    ),
)

PACKING = (
    Option(name="packing", values=(None, None, None, False), wild=(False,), kinds=MOE),
    *(
        Option(name=name, values=(None, True), when=lambda d: d.packing is not False, wild=(True,), kinds=MOE)
        for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    ),
)

SLICES = (
    Option(name="ampipe_degree", values=_degrees, when=_can_slice, wild=(2, 3), group=degree, layout=True, kinds=MOE),
    # What it is compared with is one process that counts slice by slice (the oracle).
    Option(
        name="ampipe_capacity",
        values=_capacities,
        when=lambda d: _sliced(d) and _drops(d),
        wild=("slice",),
        layout=True,
        kinds=MOE,
    ),
    Option(name="ampipe_slicing", values=(None, "balanced"), when=_sliced, wild=("balanced",), layout=True, kinds=MOE),
    Option(name="ampipe_cross_layer", values=(None, True), when=_sliced, wild=(True,), layout=True, kinds=MOE),
    Option(
        name="ampipe_tp_sp_comm_overlap",
        values=(None, True),
        when=lambda d: _sliced(d) and _emp(d) > 1,
        wild=(True,),
        layout=True,
        kinds=MOE,
    ),
    Option(name="use_pipe_experts", values=(None, None, True), when=_can_pipe, wild=(True,), layout=True, kinds=MOE),
    Option(
        name="pipe_experts_multi_data",
        group=degree,
        values=_pieces,
        when=lambda d: bool(d.use_pipe_experts),
        wild=(0, 2, 99),
        layout=True,
        kinds=MOE,
    ),
    Option(
        name="pipe_experts_multi_stream",
        values=(None, True),
        when=lambda d: bool(d.use_pipe_experts and d.sequence_parallel),
        wild=(True,),
        layout=True,
        kinds=MOE,
    ),
)

OTHERS = (
    Option(name="grad_reduce_dtype", values=_reduced, wild=("bf16",), layout=True),
    # Minutes of a compiler, where everything else is seconds.
    Option(
        name="compile",
        values=lambda d: (*(None,) * 60, True) if d.world_size <= 2 and not _branched(d) else (None,),
        wild=(),
        layout=True,
        rare=True,
    ),
    *(Option(name=name, wild=(True,), layout=True) for name in ("recompute_in_advance", "recompute_in_bubble")),
    Option(name="multi_latent_attention", wild=(True,), kinds=MOE),
)

OPTIONS: tuple[Option, ...] = (
    *LAYOUT,
    *DECODER,
    *EXPERTS,
    *SEGMENTS,
    *ENCODER,
    *TRAINING,
    *FP16,
    *RECOMPUTE,
    *PACKING,
    *SLICES,
    *OTHERS,
)
