"""What may be drawn beside what has been drawn: sizes, degrees and options that no rule refuses."""

from __future__ import annotations

import math
from collections.abc import Callable

from megapar.core.grid import Grid
from megapar.model.decoder.layer_pattern import layers_of, to_pattern, to_text
from megapar.schema.rule import divisors
from tests.fuzz.option import Condition, Drawn
from tests.fuzz.texts import BYTES, CHATS, CHATTER, HELD_OUT, LONG, LONGEST_CHAT, PIECES, SHORT, SMALLEST_VOCABULARY

FEW, MANY = 36, 300  # tokens of a sample, at most about, in most cases and in some
MANY_HEADS = 18
BLOCK, EXPERT_STEP = 128, 16  # features with a scale of --fp8, and what experts of --fp8-experts are multiples of


def rest(d: Drawn) -> int:
    """Ranks that read data of their own: those that pp, mp and cp leave."""
    return max(1, int(d.world_size // (d.pp_degree * d.mp_degree * d.cp_degree)))


def sharding(d: Drawn) -> int:
    return max(1, rest(d) // max(1, int(d.dp_degree)) if d.sharding_degree == -1 else int(d.sharding_degree))


def emp(d: Drawn) -> int:
    return int(d.expert_mp_degree or d.mp_degree)


def ep_degrees(d: Drawn) -> list[int | None]:
    room = sharding(d) * d.cp_degree * (d.mp_degree if emp(d) == 1 else 1)
    replicas = max(1, rest(d) // sharding(d))
    return [None, *sorted({*divisors(room), *(room * n for n in divisors(replicas))} - {1})]


def nodes(d: Drawn) -> list[int]:
    """Ranks of a node of which ep has several, the same number on each; none beside a degree that no grid has."""
    degrees = {"pp": d.pp_degree, "cp": d.cp_degree, "mp": d.mp_degree, "ep": d.ep_degree, "emp": emp(d)}
    try:
        grid = Grid(dp=rest(d) // sharding(d), sharding=sharding(d), **degrees, order=tuple(d.rank_order))
    except ValueError:
        return []
    return [ranks for ranks in divisors(grid.world_size) if grid.ep_node_ranks(ranks) in range(1, grid.ep)]


def experts(d: Drawn) -> bool:
    return bool(d.num_experts)


def can_move_experts(d: Drawn) -> bool:
    """Several ranks have several experts each, and update them on the device, in pieces of ours.

    Where a save has put experts in order they are updated at another place, which may decide the last bit.
    """
    ours = (
        d.sharding_stage < 3 and not d.optimizer_offload and d.get("exp_avg_dtype") is d.get("exp_avg_sq_dtype") is None
    )
    by_row = d.get("optimizer") != "muon" and not d.get("store_param_remainders")
    return 1 < d.ep_degree < d.num_experts and ours and by_row and not split_dropout(d)


def drops(d: Drawn) -> bool:
    return experts(d) and d.moe_model_type == "deepspeed_moe"


def policies(d: Drawn) -> list[str | None]:
    """Texts that begin alike tie in ``probs``, and rounding breaks a tie either way: next to none may."""
    return [None, "choice", *(["probs"] if d.vocab_size > 1000 and exact(d) and not of_text(d) else [])]


def micro_batches(d: Drawn) -> list[int]:
    """With ``probs`` one sample: frequent words begin several, in the largest vocabulary too."""
    return [1] if d.moe_drop_policy == "probs" else [1, 2, 3]


def exact(d: Drawn) -> bool:
    """Runs in fp64, and is compared with one process to the last digits."""
    return d.get("dtype") is None


def optimizers(d: Drawn) -> list[str | None]:
    """Muon multiplies what is rounded of a gradient of few rows, so only fp64 tells layouts apart."""
    return [None, None, None, "sgd", *(["muon"] if exact(d) and not d.get("optimizer_offload") else [])]


def base_widths(d: Drawn) -> list[int | None]:
    """Tied logits are divided by the relative width, others by 1; updates of heads have the scale for it."""
    if d.optimizer == "muon" and d.muon_qkv_split in ("group", "head") and d.muon_scale_mode != "unit_rms_norm":
        return [None]
    if d.untie_embeddings_and_output_weights:
        return [None, None, *([d.hidden_size // 2] if d.logits_scaling == 1 and d.hidden_size % 2 == 0 else [])]
    fits = d.logits_scaling > 1 and d.hidden_size % d.logits_scaling == 0
    return [None, *([int(d.hidden_size / d.logits_scaling)] if fits else [])]


def rounds_moments(d: Drawn) -> bool:
    """Moments are AdamW's or Muon's, on the device, and belong to tensors that stay where they are."""
    return d.optimizer in ("adamw", "muon") and not d.get("optimizer_offload") and not d.get("moe_rebalance_interval")


def has_two_bytes(d: Drawn) -> bool:
    """Gradients and weights of a bf16 run in the buckets of stages 1 and 2, which AdamW updates."""
    return (
        d.get("dtype") == "bf16" and d.sharding_stage < 3 and d.optimizer == "adamw" and not d.get("optimizer_offload")
    )


def splits_masters(d: Drawn) -> bool:
    """And nothing reads master weights whole."""
    return has_two_bytes(d) and not d.get("qk_clip_threshold") and not d.get("moe_rebalance_interval")


def of_text(d: Drawn) -> bool:
    """Documents have real lengths, and end."""
    return d.get("data_path") is not None


def tunes(d: Drawn) -> bool:
    """Learns conversations, whose tokens have weights and which are packed apart."""
    return bool(d.get("task"))


def packs_text(d: Drawn) -> bool:
    """Documents follow each other in a sample, by options that conversations have not."""
    return d.packing is not False and not tunes(d)


def overlongs(d: Drawn) -> list[str | None]:
    return [*([None] if d.seq_length >= LONGEST_CHAT else []), "drop", "truncate"]


def tokenizers(d: Drawn) -> list[str | None]:
    """Given ones, or one that is trained on the data; ERNIE's has a mask, and that of conversations a template."""
    if tunes(d):
        return [CHATTER]
    return [PIECES, None] if d.kind == "ernie" else [PIECES, BYTES, None]


def evaluated(d: Drawn) -> bool:
    return bool(d.get("eval_interval"))


def held_out(d: Drawn) -> list[tuple[str, ...] | None]:
    """A few windows that no number of ranks or samples divides, in one file or a mixture of two."""
    if tunes(d):
        return [None, (CHATS,)]
    # A sentence pair needs eight tokens of a document, which a short one of whole words does not have.
    sizes = [size for size in HELD_OUT if size // 2 <= 45 * d.seq_length and (d.kind != "ernie" or size > 60)]
    if not sizes:
        return [None]
    first, last = HELD_OUT[sizes[0]], HELD_OUT[sizes[-1]]
    return [None, (last,), ("2", first, "1", last), (f"a={first}", f"b={last}")]


def split_dropout(d: Drawn) -> bool:
    """Masks are those of the layout: dropout on parts of heads, positions or samples, or in another precision."""
    whole = exact(d) and not sliced(d)
    attention, hidden = (d.attention_dropout, whole_heads(d)), (d.hidden_dropout, whole_sequences(d))
    return any(share > 0 and not (whole and entire) for share, entire in (attention, hidden))


def replicas(d: Drawn) -> list[int | None]:
    """What is left of the ranks, said or not; of ranks that nobody takes otherwise, some."""
    if d.sharding_degree > 0:
        return [None, rest(d) // d.sharding_degree, -1]
    return [None] if d.hybrid_dp else [None, *divisors(rest(d))[1:]]


def plain_block(d: Drawn) -> bool:
    """What multi-token prediction is defined for."""
    factors = (d.embedding_multiplier, d.residual_multiplier, d.softmax_scale, d.logits_scaling)
    return d.norm_placement == "input" and factors == (1.0, 1.0, 0.0, 1.0) and not d.scale_embedding


def one_of(name: str, *values: object) -> Condition:
    return lambda d: getattr(d, name) in values


def multiples_of(of: Callable[[Drawn], int], *factors: int) -> Callable[[Drawn], list[int]]:
    return lambda d: [of(d) * factor for factor in factors]


def mp(d: Drawn) -> int:
    return int(d.mp_degree)


def cp(d: Drawn) -> int:
    return int(d.cp_degree)


def algorithms(d: Drawn) -> list[str | None]:
    return [None, "ulysses_cp_algo", "allgather_cp_algo"]


def head_step(d: Drawn) -> int:
    """What divides the heads: mp deals them out, and ulysses once more."""
    return mp(d) * (cp(d) if d.context_parallel_algo == "ulysses_cp_algo" else 1)


def has_latents(d: Drawn) -> bool:
    return bool(d.multi_latent_attention)


def clips_heads(d: Drawn) -> bool:
    """Queries and keys have no norms, and their masters are on the device.

    Other precisions than fp64 are compared over steps that change nothing, and each would clip.
    """
    return exact(d) and not d.qk_norm and not d.optimizer_offload


def has_plain_heads(d: Drawn) -> bool:
    return not d.multi_latent_attention


def casts(d: Drawn) -> bool:
    """Multiplies in fp8, emulated: every rank has whole blocks of features, each of which has a scale."""
    return bool(d.get("fp8"))


def casts_rows(d: Drawn) -> bool:
    """Experts may multiply in fp8, too: whole rows have a scale."""
    return casts(d) and experts(d) and emp(d) == 1 and d.fp8_recipe == "blockwise"


def fp8_head_dim(d: Drawn) -> int:
    """Least size of a head of which a rank's queries, keys and values, together and by themselves, are whole blocks."""
    heads, groups = (n // mp(d) for n in (d.num_attention_heads, d.get("num_query_groups") or d.num_attention_heads))
    parts = (heads,) if d.multi_latent_attention else (heads, heads + 2 * groups)
    return max(BLOCK // math.gcd(BLOCK, part) for part in parts)


def value_dims(d: Drawn) -> list[int]:
    return [fp8_head_dim(d)] if casts(d) else [4, 8, 3]


def ffn_sizes(d: Drawn) -> list[int | None]:
    if casts(d):
        return [BLOCK * mp(d)]
    return [*(mp(d) * n for n in (8, 5, 3)), *([None] if 4 % mp(d) == 0 else [])]


def expert_sizes(d: Drawn) -> list[int | None]:
    step = EXPERT_STEP if d.get("fp8_experts") else 1
    return [*(emp(d) * n * step for n in (4, 7, 3)), None]


def shared_sizes(d: Drawn) -> list[int | None]:
    return [None, None, mp(d) * (BLOCK if casts(d) else 5)]


def head_dims(d: Drawn) -> list[int | None]:
    if casts(d):
        return [fp8_head_dim(d)]
    odd = [5, 3] if d.position_embedding_type == "learned" else []
    return [None, None, 6, 16, *odd]


def hidden_sizes(d: Drawn) -> list[int]:
    if casts(d):
        return [math.lcm(BLOCK * (mp(d) if d.kind == "ernie" else 1), d.num_attention_heads if not d.head_dim else 1)]
    if d.head_dim is not None:
        return [24, 17, 33]
    even = [d.num_attention_heads * size for size in (4, 8, 6)]
    return even if d.position_embedding_type == "rope" else [*even, d.num_attention_heads * 5]


def rotated_shares(d: Drawn) -> list[float | None]:
    """Shares of a head that are an even number of features."""
    size = int(d.head_dim or d.hidden_size // d.num_attention_heads)
    even = [n / size for n in (2, 4) if n < size and int(size * (n / size)) == n]
    return [None, None, *(even if d.position_embedding_type == "rope" else [])]


def plain_yarn(d: Drawn) -> bool:
    """YaRN whose factor on rotated features is not given."""
    return bool(d.rope_scaling_type == "yarn" and not d.get("rope_attention_factor"))


def mscales(value: float, other: str) -> Callable[[Drawn], list[float | None]]:
    """Both of YaRN's mscale or none; ``other``: the one drawn before, "" for the first."""
    return lambda d: [None, value] if not other else [value if d.get(other) else None]


def branched(d: Drawn) -> bool:
    return bool(d.ernie_model == "ernie3")


def lanes(d: Drawn) -> int:
    """Ranks that share a sequence."""
    return mp(d) if d.sequence_parallel else 1


def growing(d: Drawn) -> bool:
    return bool(d.progressive_iters)


def lengths(d: Drawn) -> list[int]:
    shortest = (9 if branched(d) else 6) if d.kind == "ernie" else 1
    chunks = 2 * cp(d) if cp(d) > 1 and d.kind == "moe" and d.context_parallel_algo == "megatron_cp_algo" else cp(d)
    step = math.lcm(chunks, cp(d) * (mp(d) if d.sequence_parallel else 1))
    if tunes(d):
        return [-(-length // step) * step for length in (LONGEST_CHAT, LONGEST_CHAT // 2)]
    wanted = [step * n for n in ((2, 1, 3, 4, 6) if step > 1 else (8, 6, 2, 1, 5, 7, 13, 16, 24))]
    few = [n for n in wanted if shortest <= n <= FEW] or [-(-shortest // step) * step]
    return few if branched(d) else [*few, *few, MANY // step * step]


def named(d: Drawn) -> list[tuple[str, ...]]:
    """Sources with names, in a mixture; a decoder's may be in phases."""
    names = (f"a={LONG}", f"b={SHORT}")
    mixed = ("0.7", names[0], "0.3", names[1])
    return [mixed] if d.kind == "ernie" else [mixed, names, names]


def phases(d: Drawn) -> list[str | None]:
    """Phases of other weights, or of other lengths and rates, where there are named sources without weights."""
    if (d.get("data_path") or ("",))[0] != f"a={LONG}":
        return [None]
    other = f"2 iterations: b=1 seq-length={2 * d.seq_length}; 4 iterations: b=1,a=2 lr=0.001:cosine"
    return ["0: a=1,b=1; 3 iterations: a=3,b=1", f"0: a=1,b=2; {other}"]


def longest(d: Drawn) -> int:
    """Tokens of the longest sample of all phases."""
    return int(d.seq_length) * (2 if "seq-length" in (d.get("data_phases") or "") else 1)


def has_one_rate(d: Drawn) -> bool:
    """Exact, and no phase has a learning rate, which would be that of all parameters."""
    return exact(d) and " lr=" not in (d.get("data_phases") or "")


def decays(d: Drawn) -> list[str | None]:
    """Decays of the learning rate; wsd ends it, as a phase may."""
    return [None, "constant", "linear", "inverse-square-root", *([] if longest(d) > d.seq_length else ["wsd"])]


def head_counts(d: Drawn) -> list[int]:
    few = [head_step(d) * factor for factor in (1, 2, 4, 3)]
    return [*few, *few, *([MANY_HEADS] if MANY_HEADS % head_step(d) == 0 else [])]


def vocabularies(d: Drawn) -> list[int]:
    """A rank's run is ceil(V / mp) tokens; the last rank has at least one."""
    sizes = (SMALLEST_VOCABULARY, 457, 2503) if of_text(d) else (101, 64, 33, 17, 9, 2503)
    return [n for n in sizes if (mp(d) - 1) * -(-n // mp(d)) < n]


def shared_counts(d: Drawn) -> list[int | None]:
    width = d.moe_ffn_hidden_size or d.ffn_hidden_size or mp(d)
    return [None, *(n for n in (1, 2) if n * width % (mp(d) * (BLOCK if casts(d) else 1)) == 0)]


def group_counts(d: Drawn) -> list[int | None]:
    """Numbers of groups that some of can be chosen from evenly."""
    return [None, None, *(g for g in divisors(d.num_experts)[1:] if group_choices_of(d, g))]


def group_choices_of(d: Drawn, groups: int) -> list[int]:
    size, topk = d.num_experts // groups, int(d.moe_router_topk)
    return [n for n in range(1, groups) if topk % n == 0 and topk <= n * size]


def group_choices(d: Drawn) -> list[int]:
    return group_choices_of(d, int(d.moe_router_num_groups))


def group_scores(d: Drawn) -> list[int | None]:
    """Numbers of a group's experts that its score may sum."""
    return [None, 1, d.num_experts // d.moe_router_num_groups]


def layer_patterns(d: Drawn) -> list[str | None]:
    """Every second layer from the first one, or from the second one if there is one."""
    other = [int(layer % 2 == 1 or d.num_layers == 1) for layer in range(d.num_layers)]
    return [None, None, "2", to_text(other)]


def windows(d: Drawn) -> list[str | None]:
    """Windows of which a sequence has several, one that hides one key of the last position, one that hides none."""
    if d.multi_latent_attention:
        return [None]
    hiding = [str(max(1, d.seq_length // 8)), f"{d.seq_length - 2},0"] if d.seq_length > 1 else []
    return [None, None, None, *hiding, str(longest(d))]


def windowed(d: Drawn) -> list[str | None]:
    """All layers, every second one, or the first, in whose number multi-token prediction's has no say."""
    if d.window_size is None or d.window_size == "none":
        return [None]
    return [None, *(["2", f"[1]+[0]*{d.num_layers - 1}"] if d.num_layers > 1 else [])]


def window_ropes(d: Drawn) -> list[str | None]:
    """The rope of the other layers, another base, and a scaling."""
    if d.position_embedding_type != "rope" or d.window_size in (None, "none"):
        return [None]
    return [None, "50", '{"rope_type":"linear","rope_theta":70,"factor":3}']


def unrotated(d: Drawn) -> list[str | None]:
    """Rotary positions in all layers, in every second one, or not in the first."""
    if d.position_embedding_type != "rope" or d.multi_latent_attention or d.num_layers == 1:
        return [None]
    return [None, None, "2", f"[1]+[0]*{d.num_layers - 1}"]


def activations(d: Drawn) -> list[str | None]:
    """Geglu leaves no choice of experts (``expert_counts``)."""
    return [None, "gelu", "clamped_swiglu", *(("geglu",) if d.ep_degree == 1 and not sliced(d) else ())]


def expert_counts(d: Drawn) -> list[int]:
    if d.activation == "geglu":
        return [0]
    return [d.ep_degree * n for n in (2, 1, 3, 4)] + ([0] if d.ep_degree == 1 else [])


def expert_widths(d: Drawn) -> list[tuple[int, ...] | None]:
    layers = len(layers_of(to_pattern(d.moe_layer_freq), d.num_layers, d.first_k_dense))
    step = EXPERT_STEP if d.get("fp8_experts") else mp(d)
    return [None, None, tuple(step * (3 + layer % 3) for layer in range(layers))]


def overlaps(d: Drawn) -> list[str | None]:
    """The overlap of FSDP2 cannot be switched off."""
    return [None, "on"] if d.sharding_stage == 3 else [None, "off", "on"]


def merge_modes(d: Drawn) -> list[str | None]:
    return [None, "step"] if d.sharding_stage == 1 else [None, "step", "micro_batch"]


def batch_unit(d: Drawn) -> int:
    return int(d.micro_batch_size) * rest(d)


def global_batches(d: Drawn) -> list[int | None]:
    if d.gradient_merge_acc_step is not None:
        return [None, batch_unit(d) * d.gradient_merge_acc_step]
    return [batch_unit(d) * n for n in (*step_counts(d), *([] if pipelined(d) else [4]))]


def paces(d: Drawn) -> list[int]:
    """Steps in which lengths may grow."""
    step = int(d.generation_segments or 1) * lanes(d) * cp(d)
    return [n for n in range(step, d.seq_length + 1, step) if n >= 6][:2]


def may_grow(d: Drawn) -> bool:
    """True if the batch may start with as few micro-batches as the schedule allows."""
    count = d.gradient_merge_acc_step or (d.global_batch_size or batch_unit(d)) // batch_unit(d)
    return bool(paces(d)) and count % step_counts(d)[0] == 0


def rampups(d: Drawn) -> list[tuple[int, int, int] | None]:
    unit = batch_unit(d)
    return [None, None, None, (unit, unit, 2 * unit)] if not pipelined(d) else [None]


def whole_heads(d: Drawn) -> bool:
    return mp(d) == cp(d) == 1


def whole_sequences(d: Drawn) -> bool:
    return not d.sequence_parallel and cp(d) == 1


def dropouts(d: Drawn, whole: bool) -> tuple[float, ...]:
    """More often where one process draws the same masks; what has others is compared with its own layout."""
    return (0.0, 0.0, 0.1, 0.5) if whole and exact(d) else (*(0.0,) * 9, 0.2)


def pipelined(d: Drawn) -> bool:
    return bool(d.pp_degree > 1)


def chunk_count(d: Drawn) -> int:
    """Chunks of the pipeline; every one needs a layer."""
    return int(d.pp_degree * d.vpp_degree)


def split_backward(d: Drawn) -> bool:
    return bool(d.use_nanopipe or d.pp_schedule == "zero_bubble")


def vpps(d: Drawn) -> list[int | None]:
    if d.pp_schedule == "interleaved":
        return [2, 3]
    return [None, 2, 3] if split_backward(d) else [None]


def step_counts(d: Drawn) -> list[int]:
    """Micro-batches per step, simplest first: whole multiples of the stages where the schedule wants them."""
    pp = int(d.pp_degree)
    if pp == 1 or (d.pp_schedule == "gpipe" and not d.use_nanopipe):
        return [1, 2, 3]
    multiples = d.pp_schedule == "interleaved" or split_backward(d)
    return [pp, 2 * pp] if multiples else [pp, pp + 1, 2 * pp]


def layer_counts(d: Drawn) -> list[int]:
    return [chunk_count(d) + more for more in (0, 1, 2)]


def layer_cuts(d: Drawn) -> list[str | None]:
    """Ways to cut that suit any number of layers."""
    starts = ",".join(map(str, range(chunk_count(d))))
    return [None, "balanced", starts]


def whole_units(d: Drawn) -> bool:
    return bool(d.recompute_interval or d.recompute_method)


def can_slice(d: Drawn) -> bool:
    return (
        experts(d)
        and d.norm_placement == "input"
        and not d.adaptive_recompute_device_size
        and d.ep_degree > 1
        and bool(d.use_flash_attn)
        and d.fp8_recipe == "blockwise"
    )


def slice_counts(d: Drawn) -> list[int | None]:
    """0 is ``auto``, which is 1 wherever slices would change the numbers."""
    room = d.seq_length // (lanes(d) * cp(d))
    return [None, *(n for n in (2, 3, 4, 8) if n <= room), 0]


def sliced(d: Drawn) -> bool:
    return bool(d.ampipe_degree > 1)


def capacity_scopes(d: Drawn) -> list[str | None]:
    """Who comes first in the queue of all slices is known to the policy token alone."""
    return [None, "slice"] if d.moe_drop_policy == "token" else ["slice"]


def can_pipe(d: Drawn) -> bool:
    by_itself = drops(d) and not d.get("fp8_experts")
    return by_itself and (d.ep_degree > 1 or emp(d) > 1) and (cp(d) == 1 or sliced(d))


def piece_counts(d: Drawn) -> list[int | None]:
    if not d.num_experts:
        return [None]  # asked of a dense model only where another value of a pair is forced
    even = -(-d.seq_length * d.moe_router_topk * d.moe_capacity_factor // d.num_experts)
    room = max(even, d.moe_min_capacity)
    slices = max(1, d.ampipe_degree)
    return [None, *(n for n in sorted({2, 3, max(2, slices), 2 * slices, 3 * slices}) if n <= room)]


def reduce_dtypes(d: Drawn) -> list[str | None]:
    """Gradients of fp32 and bf16 runs, unless stage 3 adds micro-batches up in it first."""
    steps = d.gradient_merge_acc_step or (d.global_batch_size or batch_unit(d)) // batch_unit(d)
    in_pieces = d.gradient_merge_mode != "step" and not d.hybrid_dp and d.dp_degree < 2
    fits = d.sharding_stage < 3 or steps == 1 or in_pieces
    return [None, "bf16"] if d.get("dtype") in ("fp32", "bf16") and fits else [None]
