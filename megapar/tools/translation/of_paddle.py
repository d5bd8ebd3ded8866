"""Translation of Paddle's arguments that has to be computed: rows ``@paddle_name`` of ``paddle``.

Sources: paddlenlp/trainer/training_args.py and llm/run_pretrain.py of PaddleNLP, the trainer of PaddleFormers, the
trainer, the schedules and the model of ERNIE 4.5's examples/pre-training, Fleet's DistributedStrategy, the
configurations of PaddleNLP's and PaddleFormers' models.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping

from megapar.tools.translation.cases import Function, by_ernie_4_5, collected, first, is_on, number, off, whole
from megapar.tools.translation.verdict import ANOTHER, IMPLIED, LEFT, OTHER, RENAMED, UNNECESSARY, Decided, Given

_STAGES = ("stage1", "stage2", "stage3")
# Parts of the names of models for which megapar has no trainer.
_OTHERS = ("bert", "t5", "bart", "-vl", "vit", "mamba", "rwkv", "chatglm")


def trainer_kind(given: Mapping[str, str]) -> str:
    """Return the kind of trainer for a script with these arguments, "moe" or "ernie"; "" if there is none."""
    plain = {name.rpartition(".")[2]: value for name, value in given.items()}
    if any(name in plain for name in ("moe-num-experts", "moe-group", "moe-k", "use-moe")):
        return "moe"
    name = " ".join(plain.get(key, "") for key in ("model-type", "model-name-or-path", "architecture")).lower()
    if "ernie" in name:
        return "moe" if any(mark in name for mark in ("4.5", "4_5", "4p5", "45")) else "ernie"
    return "" if any(mark in name for mark in _OTHERS) else "moe"


def _words(value: str) -> list[str]:
    """Split a list, separated by spaces or commas, into words."""
    return [word for part in shlex.split(value) for word in part.replace(",", " ").split()]


def _sharding(value: str, given: Given) -> Decided:
    words = _words(value)
    if len(words) == 1 and words[0].lower() in ("true", "1"):
        return RENAMED, "--sharding-stage 3", "Fleet's sharding optimizer also shards parameters"
    if not words or off(value):
        return _unsharded("", given)
    unknown = [word for word in words if word not in (*_STAGES, "offload")]
    if unknown:
        return LEFT, "", f"stage1, stage2 or stage3, with or without offload; not {' '.join(unknown)}"
    flags = [f"--sharding-stage {stage[-1]}" for stage in _STAGES if stage in words]
    return RENAMED, " ".join([*flags, *(["--optimizer-offload"] if "offload" in words else [])]), ""


def _unsharded(value: str, given: Given) -> Decided:
    if "sharding" not in given and {"segment-broadcast-mb", "sharding-segment-strategy"} & set(given):
        return RENAMED, "--sharding-stage 3", "Fleet's sharding optimizer also shards parameters"
    if any("sharding" in name for name in given):
        return IMPLIED, "", "set by the other sharding arguments"
    if first(given, "data-parallel-degree", "dp-degree") > 1:
        return RENAMED, "--sharding-degree 1 --hybrid-dp", "no sharding: every data rank is a replica"
    return IMPLIED, "", "optimizer state is always sharded over data ranks, with the same numbers"


def _base_length(value: str, given: Given) -> Decided:
    if number(value) == first(given, "max-seq-length", "max-seq-len", otherwise=number(value)):
        return UNNECESSARY, "", "samples have this length"
    return OTHER, "", "all samples have the same length"


def _style(value: str, given: Given) -> Decided:
    kind, _, stop = value.partition(":")
    steps = first(given, "max-steps")
    if kind == "wsd":
        if not steps:
            return LEFT, "", "WSD decays from step N to --max_steps, which is not set"
        steady = number(stop) if stop else round(0.9 * steps)
        if steady >= steps:
            reason = f"the rate is constant until step {steady:g}, after the end of the run"
            return RENAMED, "--lr-decay-style constant", reason
        return RENAMED, f"--lr-decay-style wsd --lr-wsd-decay-iters {round(steps - steady)}", ""
    if kind in ("linear", "cosine", "constant"):
        return RENAMED, f"--lr-decay-style {kind}", ""
    if kind == "constant_with_warmup":
        return RENAMED, "--lr-decay-style constant", ""
    return OTHER, "", "the learning rate schedule is constant, linear, cosine or WSD"


def _fall(value: str, given: Given) -> Decided:
    """Translate the shape of the WSD decay."""
    steps = first(given, "max-steps")
    kind, _, stop = given.get("lr-scheduler", "").partition(":")  # the stable phase ends at step ``stop``
    if not kind.startswith("wsd") or (steps and number(stop) >= steps):
        return UNNECESSARY, "", "the learning rate does not decay in this run"
    if value == "1-sqrt":
        return RENAMED, "--lr-wsd-decay-style minus_sqrt", ""
    return OTHER, "", f"the curve {value or 'half_life'} is not supported"


def _warmup_share(value: str, given: Given) -> Decided:
    if first(given, "warmup-steps") > 0:
        return UNNECESSARY, "", "--warmup_steps takes precedence"
    if number(value) <= 0:
        return UNNECESSARY, "", "warmup is off"
    steps = first(given, "max-steps")
    if not steps:
        return LEFT, "", "a fraction of --max_steps, which is not set: --lr-warmup-iters"
    reason = "megapar's warmup is one step ahead: the rate of its first step is above 0, in Paddle it is 0"
    return RENAMED, f"--lr-warmup-iters {int(number(value) * steps)}", reason


def _shrink(value: str, given: Given) -> Decided:
    grows = first(given, "incr-ratio", "amp-configs.incr-ratio", otherwise=2.0)
    if number(value) and math.isclose(1 / number(value), grows):
        return IMPLIED, "", "the loss scale shrinks by the same factor by which it grows"
    return OTHER, "", "the loss scale shrinks by the same factor by which it grows (--loss-scale-factor)"


def _data(value: str, given: Given) -> Decided:
    words = _words(value)
    if not words:
        return LEFT, "", "no data are set: --data-path"
    reason = "all files of the folder, with equal weight" if len(words) == 1 else "alternating weights and paths"
    return RENAMED, f"--data-path {shlex.join(words)}", reason


def _worded(known: str, reason: str) -> Function:
    """Return the function for an argument that lists words of ``known``, none of which changes the numbers."""

    def decide(value: str, given: Given) -> Decided:
        words = _words(value)
        if not words:
            return UNNECESSARY, "", "it is not set"
        other = [word for word in words if word not in known.split()]
        if other:
            return OTHER, "", f"unknown words: {' '.join(other)}"
        return IMPLIED, "", reason

    return decide


def _layers(value: str, given: Given) -> Decided:
    tail = int(first(given, "remove-tail-layer"))
    layers = whole(value)
    if layers is None or not tail:
        return RENAMED, f"--num-layers {value}", ""
    return RENAMED, f"--num-layers {layers - tail}", f"without the {tail} that remove_tail_layer removes"


def _std(value: str, given: Given) -> Decided:
    hidden = first(given, "hidden-size")
    if _is_ernie(given) and hidden:
        return RENAMED, f"--init-std {math.sqrt(0.3333 / hidden):.6g}", "always sqrt(0.3333 / hidden size) in ERNIE 4.5"
    return RENAMED, f"--init-std {value}", ""


def _is_ernie(given: Given) -> bool:
    """Return True for ERNIE 4.5's decoder, identified by its configuration or its trainer."""
    return by_ernie_4_5(given) or any(name in given for name in ("moe-layer-start-index", "moe-num-experts"))


def _usual_std(value: str, given: Given) -> Decided:
    if "hidden-size" not in given:
        return UNNECESSARY, "", "no model sizes are given"
    return _std("0.02", given)


def _has_experts(given: Given) -> bool:
    names = ("moe-num-experts", "n-routed-experts", "num-experts")  # of text and image, one word each
    return any(number(given[name].partition(" ")[0]) > 0 for name in names if name in given)


def _first_dense(value: str, given: Given) -> Decided:
    if len(set(value.split())) > 1:
        return ANOTHER, "", "all layers have the same experts, for one type of token"
    if number(value.split()[0] if value else "0") <= 0:
        return UNNECESSARY, "", "the first layer also has experts"
    return RENAMED, f"--first-k-dense {value.split()[0]}", ""


def _capacity(value: str, given: Given) -> Decided:
    choices = first(given, "moe-k", "num-experts-per-tok")
    factor = number(value.split()[0]) if value else 0.0
    if not factor:
        return UNNECESSARY, "", "the capacity is unlimited"
    share = f"{factor / choices:g} of a balanced load" if choices else "the capacity divided by the number of choices"
    reason = f"{share} per expert in Paddle; megapar drops tokens only with --moe-model-type deepspeed_moe"
    return OTHER, "", reason


def _aux_of_all_choices(value: str, given: Given) -> Decided:
    """Scale the coefficient: ERNIE 4.5 counts the tokens of each of the k choices, so its balanced loss is k, not 1."""
    choices = first(given, "moe-k", otherwise=2)
    if is_on(given, "moe-group-experts") or choices == 1:
        return RENAMED, f"--moe-aux-loss-coeff {value}", ""
    ours = f"--moe-aux-loss-coeff {number(value) * choices:g}"
    reason = f"multiplied by {choices:g}: a balanced load has a loss of {choices:g} in Paddle, 1 in megapar"
    return RENAMED, ours, reason


def _usual_aux(value: str, given: Given) -> Decided:
    if not _has_experts(given):
        return UNNECESSARY, "", "the model has no experts"
    if _is_ernie(given):
        return _aux_of_all_choices("0.01", given)
    return RENAMED, "--moe-aux-loss-coeff 0.01", ""


_SHARDING_WORDS = """
    enable_stage1_tensor_fusion enable_tensor_fusion enable_stage1_overlap enable_overlap enable_stage2_overlap
    enable_stage1_broadcast_overlap enable_stage1_allgather_overlap disable_stage1_reduce_avg
    enable_fuse_optimizer_states enable_release_grads split_param shardingv1_comm_overlap sharding_comm_overlap
"""
_PIPELINE_WORDS = """
    disable_p2p_cache_shape disable_partial_send_recv enable_delay_scale_loss enable_dp_comm_overlap
    enable_sharding_comm_overlap enable_timer enable_overlap_p2p_comm enable_clear_every_step_cache
    disable_batch_p2p_comm disable_non_batch_p2p_comm enable_split_backward enable_send_recv_overlap
    enable_dualpipev enable_offload_queue enable_release_grads best_unbalanced_scheduler
    forward_backward_overlap_scheduler auto_parallel_sync_shared_params
"""
_TENSOR_WORDS = """
    enable_mp_async_allreduce enable_mp_skip_c_identity enable_mp_fused_linear_param_grad_add
    enable_delay_scale_loss enable_sp_async_reduce_scatter replace_with_c_embedding
    replace_with_parallel_cross_entropy sync_param sync_grad sync_moment
"""
_REPLICA_WORDS = "enable_allreduce_avg_in_gradinent_scale gradient_sync_after_accumulate"

_sharding_words = _worded(
    _SHARDING_WORDS, "communication overlaps computation by default; the numbers do not depend on these words"
)
_pipeline_words = _worded(_PIPELINE_WORDS, "sends never block; --pp-schedule sets the order of a stage")
_tensor_words = _worded(_TENSOR_WORDS, "mp ranks always have the same values; --tp-comm-overlap hides communication")
_replica_words = _worded(_REPLICA_WORDS, "gradients are sums over all tokens, reduced once per step")

FUNCTIONS: Mapping[str, Function] = collected(globals(), "paddle_")
