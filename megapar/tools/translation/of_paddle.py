"""What becomes of Paddle's arguments whose meaning hangs on their value or on others: ``@name`` in ``paddle``.

Sources: paddlenlp/trainer/training_args.py and llm/run_pretrain.py of PaddleNLP, the trainer of PaddleFormers, the
trainer and the schedules of ERNIE 4.5's examples/pre-training, Fleet's DistributedStrategy.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping

from megapar.tools.translation.decided import Decided
from megapar.tools.translation.given import by_ernie_4_5, first, is_on, number
from megapar.tools.translation.neutral import Function, off
from megapar.tools.translation.verdict import (
    IMPLIED,
    LEFT,
    OTHER,
    RENAMED,
    UNNECESSARY,
    UNSUPPORTED,
)


def _degree(flag: str, value: str, alone: str) -> Decided:
    if number(value) <= 1:
        return UNNECESSARY, "", alone
    return RENAMED, f"{flag} {value}", ""


def _mp(value: str, given: Mapping[str, str]) -> Decided:
    return _degree("--mp-degree", value, "one mp rank")


def _pp(value: str, given: Mapping[str, str]) -> Decided:
    return _degree("--pp-degree", value, "one stage")


def _ep(value: str, given: Mapping[str, str]) -> Decided:
    return _degree("--ep-degree", value, "one ep rank")


def _expert_mp(value: str, given: Mapping[str, str]) -> Decided:
    return _degree("--expert-mp-degree", value, "experts are whole")


def _cp(value: str, given: Mapping[str, str]) -> Decided:
    return _degree("--cp-degree", value, "one cp rank has the whole sequence")


def _sep(value: str, given: Mapping[str, str]) -> Decided:
    verdict, ours, reason = _degree("--cp-degree", value, "one rank has the whole sequence")
    return verdict, f"{ours} --context-parallel-algo ulysses_cp_algo" if ours else "", reason


def _dp(value: str, given: Mapping[str, str]) -> Decided:
    if number(value) <= 1:
        return UNNECESSARY, "", "replicas follow from the number of ranks"
    return RENAMED, "--hybrid-dp", "how many replicas follows from the number of ranks"


def _hybrid_dp(value: str, given: Mapping[str, str]) -> Decided:
    if off(value):
        return UNNECESSARY, "", "no replicas"
    return RENAMED, "--hybrid-dp", ""


def _virtual(value: str, given: Mapping[str, str]) -> Decided:
    if number(value) <= 1:
        return UNNECESSARY, "", "one chunk per stage"
    return RENAMED, f"--vpp-degree {value} --pp-schedule interleaved", ""


def _cut(value: str, given: Mapping[str, str]) -> Decided:
    if off(value):
        return UNNECESSARY, "", "it is off"
    if first(given, "tensor-parallel-degree", "tensor-model-parallel-size", "mp-degree", otherwise=1) <= 1:
        return UNNECESSARY, "", "one mp rank has the whole sequence"
    return RENAMED, "--sequence-parallel", ""


_STAGES = ("stage1", "stage2", "stage3")


def _words(value: str) -> list[str]:
    """The words of a list, however they are put together."""
    return [word for part in shlex.split(value) for word in part.replace(",", " ").split()]


def _sharding(value: str, given: Mapping[str, str]) -> Decided:
    words = _words(value)
    if len(words) == 1 and words[0].lower() in ("true", "1"):
        return RENAMED, "--sharding-stage 3", "Fleet's sharding optimizer shards parameters, too"
    if not words or off(value):
        return _unsharded("", given)
    unknown = [word for word in words if word not in (*_STAGES, "offload")]
    if unknown:
        return LEFT, "", f"stage1, stage2 or stage3, with offload or without it; not {' '.join(unknown)}"
    flags = [f"--sharding-stage {stage[-1]}" for stage in _STAGES if stage in words]
    return RENAMED, " ".join([*flags, *(["--optimizer-offload"] if "offload" in words else [])]), ""


def _unsharded(value: str, given: Mapping[str, str]) -> Decided:
    if any("sharding" in name for name in given):
        return IMPLIED, "", "said by the other sharding arguments"
    if first(given, "data-parallel-degree", "dp-degree") > 1:
        return RENAMED, "--sharding-degree 1 --hybrid-dp", "no sharding: every data rank is a replica"
    return IMPLIED, "", "no replicas that keep all: optimizer state is cut over data ranks, with the same numbers"


def _sharding_degree(value: str, given: Mapping[str, str]) -> Decided:
    if number(value) < 0:
        return UNNECESSARY, "", "all data ranks, as here"
    if number(value) <= 1:
        return UNNECESSARY, "", "one rank shards nothing"
    return RENAMED, f"--sharding-degree {value}", "with more ranks than that, also --hybrid-dp"


def _usual_degree(value: str, given: Mapping[str, str]) -> Decided:
    if given.get("sharding", "").lower() in ("true", "1"):
        return RENAMED, "--sharding-degree 8", "Fleet's sharding optimizer"
    return UNNECESSARY, "", "all data ranks, as here"


def _anchors(value: str, given: Mapping[str, str]) -> Decided:
    if value in ("", "[]"):
        return UNNECESSARY, "", "no anchors"
    return LEFT, "", "anchors are names of a program's variables there, of modules here: --segment-anchors"


def _micro(value: str, given: Mapping[str, str]) -> Decided:
    if number(value) <= 0:
        return UNNECESSARY, "", "said elsewhere"
    return RENAMED, f"--micro-batch-size {value}", ""


def _batch(value: str, given: Mapping[str, str]) -> Decided:
    if number(value) <= 0:
        return UNNECESSARY, "", "micro-batches x accumulation x data ranks, as here"
    return RENAMED, f"--global-batch-size {value}", ""


def _steps(value: str, given: Mapping[str, str]) -> Decided:
    if number(value) <= 0:
        return LEFT, "", "runs are counted in steps: --train-iters"
    return RENAMED, f"--train-iters {value}", ""


def _epochs(value: str, given: Mapping[str, str]) -> Decided:
    if first(given, "max-steps") > 0:
        return UNNECESSARY, "", "--max_steps counts"
    return LEFT, "", "runs are counted in steps: --train-iters"


def _length(value: str, given: Mapping[str, str]) -> Decided:
    return RENAMED, f"--seq-length {value}", ""


def _base_length(value: str, given: Mapping[str, str]) -> Decided:
    if number(value) == first(given, "max-seq-length", "max-seq-len", otherwise=number(value)):
        return UNNECESSARY, "", "samples are that long"
    return OTHER, "", "samples are cut to one length"


def _stops(given: Mapping[str, str]) -> float:
    """The step where ERNIE 4.5's steady phase ends; 0 where it does not say it."""
    return number(given.get("lr-scheduler", "").partition(":")[2])


def _style(value: str, given: Mapping[str, str]) -> Decided:
    kind, _, stop = value.partition(":")
    steps = first(given, "max-steps")
    if kind == "wsd":
        if not steps:
            return LEFT, "", "wsd decays behind step N until --max_steps, which is not said"
        steady = number(stop) if stop else round(0.9 * steps)
        if steady >= steps:
            return RENAMED, "--lr-decay-style constant", f"the rate stays until step {steady:g}, the run ends before"
        return RENAMED, f"--lr-decay-style wsd --lr-wsd-decay-iters {round(steps - steady)}", ""
    if kind in ("linear", "cosine", "constant"):
        return RENAMED, f"--lr-decay-style {kind}", ""
    if kind == "constant_with_warmup":
        return RENAMED, "--lr-decay-style constant", ""
    return OTHER, "", "the learning rate is constant, or falls in a line, a cosine or at the end (wsd)"


def _usual_style(value: str, given: Mapping[str, str]) -> Decided:
    return RENAMED, f"--lr-decay-style {'cosine' if by_ernie_4_5(given) else 'linear'}", ""


def _fall(value: str, given: Mapping[str, str]) -> Decided:
    """The shape of wsd's decay."""
    steps = first(given, "max-steps")
    if not given.get("lr-scheduler", "").startswith("wsd") or (steps and _stops(given) >= steps):
        return UNNECESSARY, "", "nothing decays in this run"
    if value == "1-sqrt":
        return RENAMED, "--lr-wsd-decay-style minus_sqrt", ""
    return OTHER, "", f"{value or 'half_life'} is another curve than those here"


def _usual_fall(value: str, given: Mapping[str, str]) -> Decided:
    return _fall("half_life", given)


_AHEAD = "its first step has a part of the rate here, none there: the ramp is one step ahead"


def _warmup(value: str, given: Mapping[str, str]) -> Decided:
    if number(value) <= 0:
        return UNNECESSARY, "", "no warm-up"
    return RENAMED, f"--lr-warmup-iters {value}", _AHEAD


def _warmup_share(value: str, given: Mapping[str, str]) -> Decided:
    if first(given, "warmup-steps") > 0:
        return UNNECESSARY, "", "--warmup_steps counts"
    if number(value) <= 0:
        return UNNECESSARY, "", "no warm-up"
    steps = first(given, "max-steps")
    if not steps:
        return LEFT, "", "a share of --max_steps, which is not said: --lr-warmup-iters"
    return RENAMED, f"--lr-warmup-iters {int(number(value) * steps)}", _AHEAD


def _floor(value: str, given: Mapping[str, str]) -> Decided:
    """PaddleNLP's pre-training has min_learning_rate, the others min_lr."""
    if number(value) <= 0:
        return UNNECESSARY, "", "the rate falls to 0"
    return RENAMED, f"--min-lr {value}", ""


def _usual_floor(value: str, given: Mapping[str, str]) -> Decided:
    if by_ernie_4_5(given) or "constant" in given.get("lr-scheduler-type", ""):
        return UNNECESSARY, "", "the rate falls to 0"
    return RENAMED, "--min-lr 1e-05", "what PaddleNLP's run_pretrain.py ends at"


def _level(value: str, given: Mapping[str, str]) -> Decided:
    if not is_on(given, "bf16", "fp16"):
        return UNNECESSARY, "", "fp32 throughout"
    if value.upper() == "O2":
        return IMPLIED, "", "weights in 16 bits, with fp32 masters"
    return OTHER, "", f"{value} keeps weights and norms in fp32; here all but masters is in 16 bits (O2)"


def _usual_level(value: str, given: Mapping[str, str]) -> Decided:
    return _level("O1", given)


def _precision(kind: str, value: str) -> Decided:
    if off(value):
        return UNNECESSARY, "", "it is off"
    return RENAMED, f"--dtype {kind}", ""


def _bf16(value: str, given: Mapping[str, str]) -> Decided:
    return _precision("bf16", value)


def _fp16(value: str, given: Mapping[str, str]) -> Decided:
    return _precision("fp16", value)


def _usual_precision(value: str, given: Mapping[str, str]) -> Decided:
    return RENAMED, "--dtype fp32", "neither bf16 nor fp16"


def _master_gradients(value: str, given: Mapping[str, str]) -> Decided:
    if off(value) and is_on(given, "bf16", "fp16"):
        return OTHER, "", "gradients are summed in fp32 here, in 16 bits there"
    return IMPLIED, "", "gradients are summed in fp32"


def _loss_scale(value: str, given: Mapping[str, str]) -> Decided:
    if not is_on(given, "fp16", "amp", "use-pure-fp16"):
        return UNNECESSARY, "", "the loss is scaled in fp16 only"
    return RENAMED, f"--initial-loss-scale {value}", ""


def _usual_loss_scale(value: str, given: Mapping[str, str]) -> Decided:
    return _loss_scale("32768", given)


def _usual_window(value: str, given: Mapping[str, str]) -> Decided:
    if not is_on(given, "fp16"):
        return UNNECESSARY, "", "the loss is scaled in fp16 only"
    return RENAMED, "--loss-scale-window 2000 --hysteresis 1", "what paddle.amp.GradScaler does"


def _shrink(value: str, given: Mapping[str, str]) -> Decided:
    grows = first(given, "incr-ratio", "amp-configs.incr-ratio", otherwise=2.0)
    if number(value) and math.isclose(1 / number(value), grows):
        return IMPLIED, "", "the scale shrinks by the factor it grows by"
    return OTHER, "", "the scale shrinks by the factor it grows by (--loss-scale-factor)"


def _recomputed(value: str, given: Mapping[str, str]) -> Decided:
    if off(value):
        return UNNECESSARY, "", "it is off"
    kind = given.get("recompute-granularity", "full")
    if kind == "core_attn":
        return RENAMED, "--recompute-granularity selective --recompute-method uniform --recompute-num-layers 1", ""
    return RENAMED, "--recompute-interval 1", "" if kind == "full" else f"whole layers for {kind}: more is recomputed"


def _granularity(value: str, given: Mapping[str, str]) -> Decided:
    if "recompute-method" in given or value == "selective":  # PaddleFormers, in Megatron's words
        return RENAMED, f"--recompute-granularity {value}", ""
    if not is_on(given, "recompute", "use-recompute"):
        return UNNECESSARY, "", "nothing is recomputed"
    return IMPLIED, "", "said with recompute"


def _flash(value: str, given: Mapping[str, str]) -> Decided:
    if off(value):
        return RENAMED, "--no-use-flash-attn", ""
    return IMPLIED, "", "fused attention is the default"


def _data(value: str, given: Mapping[str, str]) -> Decided:
    words = _words(value)
    if not words:
        return LEFT, "", "no data are named: --data-path"
    reason = "all its files, with the same weight" if len(words) == 1 else "weights and paths in turn"
    return RENAMED, f"--data-path {shlex.join(words)}", reason


def _usual_split(value: str, given: Mapping[str, str]) -> Decided:
    if "input-dir" not in given:
        return UNNECESSARY, "", "no data are named"
    return RENAMED, "--split 949,50,1", ""


def _evaluates(given: Mapping[str, str]) -> bool:
    return is_on(given, "do-eval") or given.get("evaluation-strategy", "no") == "steps"


def _evaluated(value: str, given: Mapping[str, str]) -> Decided:
    if not _evaluates(given):
        return RENAMED, "--eval-interval 0", "nothing is evaluated without do_eval"
    return RENAMED, f"--eval-interval {value}", ""


def _usual_evaluated(value: str, given: Mapping[str, str]) -> Decided:
    if _evaluates(given):
        return LEFT, "", "how often is not said: --eval-interval"
    return RENAMED, "--eval-interval 0", "nothing is evaluated without do_eval"


def _evaluations(value: str, given: Mapping[str, str]) -> Decided:
    if not _evaluates(given):
        return UNNECESSARY, "", "nothing is evaluated without do_eval"
    return RENAMED, "--eval-iters 10", "its trainers put 10 in the place of what is said"


def _held_out(value: str, given: Mapping[str, str]) -> Decided:
    if not _evaluates(given):
        return UNNECESSARY, "", "nothing is evaluated without do_eval"
    return RENAMED, f"--eval-data-path {value}", ""


def _saved(value: str, given: Mapping[str, str]) -> Decided:
    if "output-dir" not in given:
        return UNNECESSARY, "", "nothing is saved without output_dir"
    return RENAMED, f"--save-interval {value}", ""


def _usual_saved(value: str, given: Mapping[str, str]) -> Decided:
    return _saved("500", given)


def _rhythm(value: str, given: Mapping[str, str]) -> Decided:
    if value == "epoch":
        return LEFT, "", "an epoch is no unit here: steps"
    if value == "no":
        return UNNECESSARY, "", "it is off"
    return IMPLIED, "", "by steps"


def _resumed(value: str, given: Mapping[str, str]) -> Decided:
    if value.lower() in ("", "true", "false", "0"):
        return UNNECESSARY, "", "--load is the folder of checkpoints to go on from"
    return LEFT, "", "a checkpoint of Paddle's is not read: export it to Hugging Face's form for --load-hf"


def _model(value: str, given: Mapping[str, str]) -> Decided:
    if "hidden-size" in given or "hidden-size" in {name.rpartition(".")[2] for name in given}:
        return IMPLIED, "", "its sizes are given"
    dropout = "; of GPT also --hidden-dropout 0.1 --attention-dropout 0.1" if "gpt" in value.lower() else ""
    return LEFT, "", f"its configuration has the sizes: translate that file, too, or --load-hf its folder{dropout}"


def _continued(value: str, given: Mapping[str, str]) -> Decided:
    if off(value):
        return UNNECESSARY, "", "weights are drawn"
    return LEFT, "", "weights to start from: --load-hf is their folder, in Hugging Face's form"


def _optimizer(value: str, given: Mapping[str, str]) -> Decided:
    if value in ("adamw", "adamw_mini", "adamw_apex", "adamw_custom"):
        return (OTHER, "", "AdamW with whole moments") if value == "adamw_mini" else (IMPLIED, "", "AdamW")
    return OTHER, "", "the optimizer here is AdamW"


def _muon(value: str, given: Mapping[str, str]) -> Decided:
    if "muon" in given.get("optim", ""):
        return OTHER, "", "the optimizer here is AdamW"
    return UNNECESSARY, "", "of Muon, which is not chosen"


def _preferred(value: str, given: Mapping[str, str]) -> Decided:
    if given.get("stage", "").upper() in ("DPO", "KTO", "VL-DPO"):
        return OTHER, "", "trainers here pre-train, without pairs"
    return UNNECESSARY, "", "of training on preferences, which is not chosen"


def _logged(value: str, given: Mapping[str, str]) -> Decided:
    if value in ("none", "[]", "") or off(value):
        return UNNECESSARY, "", "it is off"
    return UNSUPPORTED, "", "--tensorboard-dir and --metrics-jsonl have the numbers"


def _worded(known: tuple[str, ...], reason: str) -> Function:
    """A list of words, each of which changes how fast something is done."""

    def decide(value: str, given: Mapping[str, str]) -> Decided:
        words = _words(value)
        if not words:
            return UNNECESSARY, "", "nothing is set"
        other = [word for word in words if word not in known]
        if other:
            return OTHER, "", f"nothing is known of {' '.join(other)}"
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
    "paddle_mp": _mp,
    "paddle_pp": _pp,
    "paddle_ep": _ep,
    "paddle_expert_mp": _expert_mp,
    "paddle_cp": _cp,
    "paddle_sep": _sep,
    "paddle_dp": _dp,
    "paddle_hybrid_dp": _hybrid_dp,
    "paddle_virtual": _virtual,
    "paddle_cut": _cut,
    "paddle_sharding": _sharding,
    "paddle_unsharded": _unsharded,
    "paddle_sharding_degree": _sharding_degree,
    "paddle_usual_degree": _usual_degree,
    "paddle_anchors": _anchors,
    "paddle_micro": _micro,
    "paddle_batch": _batch,
    "paddle_steps": _steps,
    "paddle_epochs": _epochs,
    "paddle_length": _length,
    "paddle_base_length": _base_length,
    "paddle_style": _style,
    "paddle_usual_style": _usual_style,
    "paddle_fall": _fall,
    "paddle_usual_fall": _usual_fall,
    "paddle_warmup": _warmup,
    "paddle_warmup_share": _warmup_share,
    "paddle_floor": _floor,
    "paddle_usual_floor": _usual_floor,
    "paddle_level": _level,
    "paddle_usual_level": _usual_level,
    "paddle_bf16": _bf16,
    "paddle_fp16": _fp16,
    "paddle_usual_precision": _usual_precision,
    "paddle_master_gradients": _master_gradients,
    "paddle_loss_scale": _loss_scale,
    "paddle_usual_loss_scale": _usual_loss_scale,
    "paddle_usual_window": _usual_window,
    "paddle_shrink": _shrink,
    "paddle_recomputed": _recomputed,
    "paddle_granularity": _granularity,
    "paddle_flash": _flash,
    "paddle_data": _data,
    "paddle_usual_split": _usual_split,
    "paddle_evaluated": _evaluated,
    "paddle_usual_evaluated": _usual_evaluated,
    "paddle_evaluations": _evaluations,
    "paddle_held_out": _held_out,
    "paddle_saved": _saved,
    "paddle_usual_saved": _usual_saved,
    "paddle_rhythm": _rhythm,
    "paddle_resumed": _resumed,
    "paddle_model": _model,
    "paddle_continued": _continued,
    "paddle_optimizer": _optimizer,
    "paddle_muon": _muon,
    "paddle_preferred": _preferred,
    "paddle_logged": _logged,
    "paddle_sharding_words": _worded(_SHARDING_WORDS, "what travels does so under computation; nothing else is meant"),
    "paddle_pipeline_words": _worded(_PIPELINE_WORDS, "sends never block here; the order of a stage is --pp-schedule"),
    "paddle_tensor_words": _worded(_TENSOR_WORDS, "mp ranks have the same values; --tp-comm-overlap hides messages"),
    "paddle_replica_words": _worded(_REPLICA_WORDS, "gradients are sums over all tokens, reduced once a step"),
}
# Of layout, memory, speed and files: whatever their value, the numbers are the same.
HARMLESS = frozenset(
    {
        "paddle_mp",
        "paddle_pp",
        "paddle_ep",
        "paddle_expert_mp",
        "paddle_cp",
        "paddle_sep",
        "paddle_dp",
        "paddle_hybrid_dp",
        "paddle_virtual",
        "paddle_cut",
        "paddle_sharding",
        "paddle_sharding_degree",
        "paddle_anchors",
        "paddle_recomputed",
        "paddle_granularity",
        "paddle_flash",
        "paddle_group",
        "paddle_data",
        "paddle_evaluated",
        "paddle_evaluations",
        "paddle_saved",
        "paddle_held_out",
        "paddle_rhythm",
        "paddle_logged",
        "paddle_sharding_words",
        "paddle_pipeline_words",
        "paddle_tensor_words",
        "paddle_replica_words",
    }
)
