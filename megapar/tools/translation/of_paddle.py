"""Value-dependent translation of Paddle's arguments: rows ``@name`` of ``paddle``.

Sources: paddlenlp/trainer/training_args.py and llm/run_pretrain.py of PaddleNLP, the trainer of PaddleFormers, the
trainer and the schedules of ERNIE 4.5's examples/pre-training, Fleet's DistributedStrategy.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping

from megapar.tools.translation.given import by_ernie_4_5, is_on
from megapar.tools.translation.neutral import Function, collected, off
from megapar.tools.translation.number import first, number
from megapar.tools.translation.verdict import (
    IMPLIED,
    LEFT,
    OTHER,
    RENAMED,
    UNNECESSARY,
    UNSUPPORTED,
    Decided,
)


def _cut(value: str, given: Mapping[str, str]) -> Decided:
    if off(value):
        return UNNECESSARY, "", "switched off"
    if first(given, "tensor-parallel-degree", "tensor-model-parallel-size", "mp-degree", otherwise=1) <= 1:
        return UNNECESSARY, "", "a single mp rank has the whole sequence"
    return RENAMED, "--sequence-parallel", ""


_STAGES = ("stage1", "stage2", "stage3")


def _words(value: str) -> list[str]:
    """Split a list, separated by spaces or commas, into words."""
    return [word for part in shlex.split(value) for word in part.replace(",", " ").split()]


def _sharding(value: str, given: Mapping[str, str]) -> Decided:
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


def _unsharded(value: str, given: Mapping[str, str]) -> Decided:
    if "sharding" not in given and {"segment-broadcast-mb", "sharding-segment-strategy"} & set(given):
        return RENAMED, "--sharding-stage 3", "Fleet's sharding optimizer also shards parameters"
    if any("sharding" in name for name in given):
        return IMPLIED, "", "set by the other sharding arguments"
    if first(given, "data-parallel-degree", "dp-degree") > 1:
        return RENAMED, "--sharding-degree 1 --hybrid-dp", "no sharding: every data rank is a replica"
    return IMPLIED, "", "optimizer state is always sharded over data ranks, with the same numbers"


def _sharding_degree(value: str, given: Mapping[str, str]) -> Decided:
    if number(value) < 0:
        return UNNECESSARY, "", "all data ranks, the same default"
    if number(value) <= 1:
        return UNNECESSARY, "", "a single rank shards nothing"
    return RENAMED, f"--sharding-degree {value}", "with more ranks, also set --hybrid-dp"


def _usual_degree(value: str, given: Mapping[str, str]) -> Decided:
    if given.get("sharding", "").lower() in ("true", "1"):
        return RENAMED, "--sharding-degree 8", "Fleet's sharding optimizer"
    return UNNECESSARY, "", "all data ranks, the same default"


def _anchors(value: str, given: Mapping[str, str]) -> Decided:
    if value in ("", "[]"):
        return UNNECESSARY, "", "no anchors"
    return LEFT, "", "anchors are names of modules, of program variables in Paddle: --segment-anchors"


def _steps(value: str, given: Mapping[str, str]) -> Decided:
    if number(value) <= 0:
        return LEFT, "", "run lengths are given in steps: --train-iters"
    return RENAMED, f"--train-iters {value}", ""


def _epochs(value: str, given: Mapping[str, str]) -> Decided:
    if first(given, "max-steps") > 0:
        return UNNECESSARY, "", "--max_steps takes precedence"
    return LEFT, "", "run lengths are given in steps: --train-iters"


def _length(value: str, given: Mapping[str, str]) -> Decided:
    return RENAMED, f"--seq-length {value}", ""


def _base_length(value: str, given: Mapping[str, str]) -> Decided:
    if number(value) == first(given, "max-seq-length", "max-seq-len", otherwise=number(value)):
        return UNNECESSARY, "", "samples have this length"
    return OTHER, "", "all samples have the same length"


def _stops(given: Mapping[str, str]) -> float:
    """Return the step at which ERNIE 4.5's stable phase ends; 0 if it is not set."""
    return number(given.get("lr-scheduler", "").partition(":")[2])


def _style(value: str, given: Mapping[str, str]) -> Decided:
    kind, _, stop = value.partition(":")
    steps = first(given, "max-steps")
    if kind == "wsd":
        if not steps:
            return LEFT, "", "WSD decays from step N to --max_steps, which is not set"
        steady = number(stop) if stop else round(0.9 * steps)
        if steady >= steps:
            return (
                RENAMED,
                "--lr-decay-style constant",
                f"the rate is constant until step {steady:g}, after the end of the run",
            )
        return RENAMED, f"--lr-decay-style wsd --lr-wsd-decay-iters {round(steps - steady)}", ""
    if kind in ("linear", "cosine", "constant"):
        return RENAMED, f"--lr-decay-style {kind}", ""
    if kind == "constant_with_warmup":
        return RENAMED, "--lr-decay-style constant", ""
    return OTHER, "", "the learning rate schedule is constant, linear, cosine or WSD"


def _usual_style(value: str, given: Mapping[str, str]) -> Decided:
    return RENAMED, f"--lr-decay-style {'cosine' if by_ernie_4_5(given) else 'linear'}", ""


def _fall(value: str, given: Mapping[str, str]) -> Decided:
    """Translate the shape of the WSD decay."""
    steps = first(given, "max-steps")
    if not given.get("lr-scheduler", "").startswith("wsd") or (steps and _stops(given) >= steps):
        return UNNECESSARY, "", "the learning rate does not decay in this run"
    if value == "1-sqrt":
        return RENAMED, "--lr-wsd-decay-style minus_sqrt", ""
    return OTHER, "", f"the curve {value or 'half_life'} is not supported"


def _usual_fall(value: str, given: Mapping[str, str]) -> Decided:
    return _fall("half_life", given)


_AHEAD = "the warmup is one step ahead: its first step has a part of the rate, 0 in Paddle"


def _warmup(value: str, given: Mapping[str, str]) -> Decided:
    if number(value) <= 0:
        return UNNECESSARY, "", "warmup is off"
    return RENAMED, f"--lr-warmup-iters {value}", _AHEAD


def _warmup_share(value: str, given: Mapping[str, str]) -> Decided:
    if first(given, "warmup-steps") > 0:
        return UNNECESSARY, "", "--warmup_steps takes precedence"
    if number(value) <= 0:
        return UNNECESSARY, "", "warmup is off"
    steps = first(given, "max-steps")
    if not steps:
        return LEFT, "", "a fraction of --max_steps, which is not set: --lr-warmup-iters"
    return RENAMED, f"--lr-warmup-iters {int(number(value) * steps)}", _AHEAD


def _usual_floor(value: str, given: Mapping[str, str]) -> Decided:
    if by_ernie_4_5(given) or "constant" in given.get("lr-scheduler-type", ""):
        return UNNECESSARY, "", "the learning rate decays to 0"
    return RENAMED, "--min-lr 1e-05", "the minimum in PaddleNLP's run_pretrain.py"


def _level(value: str, given: Mapping[str, str]) -> Decided:
    if not is_on(given, "bf16", "fp16"):
        return UNNECESSARY, "", "fp32 throughout"
    if value.upper() == "O2":
        return IMPLIED, "", "16-bit weights with fp32 master weights"
    return OTHER, "", f"{value} keeps weights and norms in fp32; megapar keeps only master weights in fp32 (O2)"


def _usual_level(value: str, given: Mapping[str, str]) -> Decided:
    return _level("O1", given)


def _usual_precision(value: str, given: Mapping[str, str]) -> Decided:
    return RENAMED, "--dtype fp32", "neither bf16 nor fp16"


def _master_gradients(value: str, given: Mapping[str, str]) -> Decided:
    if off(value) and is_on(given, "bf16", "fp16"):
        return OTHER, "", "gradients are accumulated in fp32, in 16 bits in Paddle"
    return IMPLIED, "", "gradients are accumulated in fp32"


def _loss_scale(value: str, given: Mapping[str, str]) -> Decided:
    if not is_on(given, "fp16", "amp", "use-pure-fp16"):
        return UNNECESSARY, "", "the loss is scaled only with fp16"
    return RENAMED, f"--initial-loss-scale {value}", ""


def _usual_loss_scale(value: str, given: Mapping[str, str]) -> Decided:
    return _loss_scale("32768", given)


def _usual_window(value: str, given: Mapping[str, str]) -> Decided:
    if not is_on(given, "fp16"):
        return UNNECESSARY, "", "the loss is scaled only with fp16"
    return RENAMED, "--loss-scale-window 2000 --hysteresis 1", "the defaults of paddle.amp.GradScaler"


def _shrink(value: str, given: Mapping[str, str]) -> Decided:
    grows = first(given, "incr-ratio", "amp-configs.incr-ratio", otherwise=2.0)
    if number(value) and math.isclose(1 / number(value), grows):
        return IMPLIED, "", "the loss scale shrinks by the same factor by which it grows"
    return OTHER, "", "the loss scale shrinks by the same factor by which it grows (--loss-scale-factor)"


def _recomputed(value: str, given: Mapping[str, str]) -> Decided:
    if off(value):
        return UNNECESSARY, "", "switched off"
    kind = given.get("recompute-granularity", "full")
    if kind == "core_attn":
        return RENAMED, "--recompute-granularity selective --recompute-method uniform --recompute-num-layers 1", ""
    return (
        RENAMED,
        "--recompute-interval 1",
        "" if kind == "full" else f"whole layers instead of {kind}: recomputes more",
    )


def _granularity(value: str, given: Mapping[str, str]) -> Decided:
    if "recompute-method" in given or value == "selective":  # PaddleFormers, with Megatron's values
        return RENAMED, f"--recompute-granularity {value}", ""
    if not is_on(given, "recompute", "use-recompute"):
        return UNNECESSARY, "", "nothing is recomputed"
    return IMPLIED, "", "set with recompute"


def _flash(value: str, given: Mapping[str, str]) -> Decided:
    if off(value):
        return RENAMED, "--no-use-flash-attn", ""
    return IMPLIED, "", "fused attention is the default"


def _data(value: str, given: Mapping[str, str]) -> Decided:
    words = _words(value)
    if not words:
        return LEFT, "", "no data are set: --data-path"
    reason = "all files of the folder, with equal weight" if len(words) == 1 else "alternating weights and paths"
    return RENAMED, f"--data-path {shlex.join(words)}", reason


def _evaluates(given: Mapping[str, str]) -> bool:
    return is_on(given, "do-eval") or given.get("evaluation-strategy", "no") == "steps"


def _evaluated(value: str, given: Mapping[str, str]) -> Decided:
    if not _evaluates(given):
        return RENAMED, "--eval-interval 0", "evaluation is off without do_eval"
    return RENAMED, f"--eval-interval {value}", ""


def _usual_evaluated(value: str, given: Mapping[str, str]) -> Decided:
    if _evaluates(given):
        return LEFT, "", "the interval is not set: --eval-interval"
    return RENAMED, "--eval-interval 0", "evaluation is off without do_eval"


def _evaluations(value: str, given: Mapping[str, str]) -> Decided:
    if not _evaluates(given):
        return UNNECESSARY, "", "evaluation is off without do_eval"
    return RENAMED, "--eval-iters 10", "Paddle's trainers override it with 10"


def _held_out(value: str, given: Mapping[str, str]) -> Decided:
    if not _evaluates(given):
        return UNNECESSARY, "", "evaluation is off without do_eval"
    return RENAMED, f"--eval-data-path {value}", ""


def _rhythm(value: str, given: Mapping[str, str]) -> Decided:
    if value == "epoch":
        return LEFT, "", "intervals are given in steps, not epochs"
    if value == "no":
        return UNNECESSARY, "", "switched off"
    return IMPLIED, "", "in steps"


def _resumed(value: str, given: Mapping[str, str]) -> Decided:
    if value.lower() in ("", "true", "false", "0"):
        return UNNECESSARY, "", "set --load to the folder of checkpoints to resume from"
    return LEFT, "", "Paddle checkpoints are not supported: export to Hugging Face format for --load-hf"


def _model(value: str, given: Mapping[str, str]) -> Decided:
    if "hidden-size" in given or "hidden-size" in {name.rpartition(".")[2] for name in given}:
        return IMPLIED, "", "the sizes are given"
    dropout = "; for GPT, also --hidden-dropout 0.1 --attention-dropout 0.1" if "gpt" in value.lower() else ""
    return (
        LEFT,
        "",
        f"its configuration contains the sizes: also translate that file, or set --load-hf to its folder{dropout}",
    )


def _continued(value: str, given: Mapping[str, str]) -> Decided:
    if off(value):
        return UNNECESSARY, "", "weights are initialized randomly"
    return LEFT, "", "initial weights: set --load-hf to their folder in Hugging Face format"


def _optimizer(value: str, given: Mapping[str, str]) -> Decided:
    if value in ("adamw", "adamw_mini", "adamw_apex", "adamw_custom"):
        return (OTHER, "", "AdamW with full moments") if value == "adamw_mini" else (IMPLIED, "", "AdamW")
    return OTHER, "", "the optimizer is AdamW"


def _muon(value: str, given: Mapping[str, str]) -> Decided:
    if "muon" in given.get("optim", ""):
        return OTHER, "", "the optimizer is AdamW"
    return UNNECESSARY, "", "an option of Muon, which is not selected"


def _preferred(value: str, given: Mapping[str, str]) -> Decided:
    if given.get("stage", "").upper() in ("DPO", "KTO", "VL-DPO"):
        return OTHER, "", "megapar only pre-trains, without preference pairs"
    return UNNECESSARY, "", "an option of preference training, which is not selected"


def _logged(value: str, given: Mapping[str, str]) -> Decided:
    if value in ("none", "[]", "") or off(value):
        return UNNECESSARY, "", "switched off"
    return UNSUPPORTED, "", "--tensorboard-dir, --wandb-project or --swanlab-project log the numbers"


def _worded(known: tuple[str, ...], reason: str) -> Function:
    """Return the function for a list of words of which each only affects speed."""

    def decide(value: str, given: Mapping[str, str]) -> Decided:
        words = _words(value)
        if not words:
            return UNNECESSARY, "", "it is not set"
        other = [word for word in words if word not in known]
        if other:
            return OTHER, "", f"unknown words: {' '.join(other)}"
        return IMPLIED, "", reason

    return decide


_SHARDING_WORDS = (
    "enable_stage1_tensor_fusion",
    "enable_tensor_fusion",
    "enable_stage1_overlap",
    "enable_overlap",
    "enable_stage2_overlap",
    "enable_stage1_broadcast_overlap",
    "enable_stage1_allgather_overlap",
    "disable_stage1_reduce_avg",
    "enable_fuse_optimizer_states",
    "enable_release_grads",
    "split_param",
    "shardingv1_comm_overlap",
    "sharding_comm_overlap",
)
_PIPELINE_WORDS = (
    "disable_p2p_cache_shape",
    "disable_partial_send_recv",
    "enable_delay_scale_loss",
    "enable_dp_comm_overlap",
    "enable_sharding_comm_overlap",
    "enable_timer",
    "enable_overlap_p2p_comm",
    "enable_clear_every_step_cache",
    "disable_batch_p2p_comm",
    "disable_non_batch_p2p_comm",
    "enable_split_backward",
    "enable_send_recv_overlap",
    "enable_dualpipev",
    "enable_offload_queue",
    "enable_release_grads",
    "best_unbalanced_scheduler",
    "forward_backward_overlap_scheduler",
    "auto_parallel_sync_shared_params",
)
_TENSOR_WORDS = (
    "enable_mp_async_allreduce",
    "enable_mp_skip_c_identity",
    "enable_mp_fused_linear_param_grad_add",
    "enable_delay_scale_loss",
    "enable_sp_async_reduce_scatter",
    "replace_with_c_embedding",
    "replace_with_parallel_cross_entropy",
    "sync_param",
    "sync_grad",
    "sync_moment",
)
_REPLICA_WORDS = ("enable_allreduce_avg_in_gradinent_scale", "gradient_sync_after_accumulate")

FUNCTIONS: Mapping[str, Function] = {
    **collected(globals(), "paddle_"),
    "paddle_sharding_words": _worded(
        _SHARDING_WORDS, "communication always overlaps computation; these words have no other effect"
    ),
    "paddle_pipeline_words": _worded(_PIPELINE_WORDS, "sends never block; --pp-schedule sets the order of a stage"),
    "paddle_tensor_words": _worded(
        _TENSOR_WORDS, "mp ranks always have the same values; --tp-comm-overlap hides communication"
    ),
    "paddle_replica_words": _worded(_REPLICA_WORDS, "gradients are sums over all tokens, reduced once per step"),
}
# Functions for layout, memory, speed and files: the numbers do not depend on their arguments.
_HARMLESS = """
    paddle_cut paddle_sharding paddle_sharding_degree paddle_anchors paddle_recomputed paddle_granularity
    paddle_flash paddle_group paddle_data paddle_evaluated paddle_evaluations paddle_held_out paddle_rhythm
    paddle_logged paddle_sharding_words paddle_pipeline_words paddle_tensor_words paddle_replica_words
"""
HARMLESS = frozenset(_HARMLESS.split())
