"""Value-dependent translation of Megatron's arguments: rows ``@name`` of models, experts and Megatron-DeepSpeed.

Sources: NVIDIA/Megatron-LM (megatron/training/arguments.py, megatron/core/transformer) and
deepspeedai/Megatron-DeepSpeed (megatron/arguments.py), as in tests/tools/translation/tables.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping

from megapar.model.decoder.layer_pattern import listed, to_pattern
from megapar.tools.translation import latent_values, rope_values
from megapar.tools.translation.latent_values import is_latent
from megapar.tools.translation.neutral import Function, collected
from megapar.tools.translation.number import first, number, whole
from megapar.tools.translation.verdict import (
    ANOTHER,
    IMPLIED,
    LEFT,
    OTHER,
    RENAMED,
    SAME,
    UNNECESSARY,
    UNSUPPORTED,
    Decided,
    Given,
)

WARMUPS = ("lr-warmup-fraction", "lr-warmup-iters", "lr-warmup-samples", "lr-warmup-tokens")
SET_ELSEWHERE = "another argument sets the warmup"


def mp_ranks(given: Given) -> float:
    """Return the tensor parallel degree, also by its old name and megapar's name; 1 if it is not set."""
    names = ("tensor-model-parallel-size", "model-parallel-size", "mp-degree")
    return first(given, *names, otherwise=1)


def _has_experts(given: Given) -> bool:
    counts = given.get("num-experts", given.get("num-moe-experts", "")).split()
    return bool(counts) and counts != ["1"]


# The transformer.


def _grouped(value: str, given: Given) -> Decided:
    if "num-query-groups" in given:
        return IMPLIED, "", "set by --num-query-groups"
    return RENAMED, "--num-query-groups 1", "one group by default"


def _position_type(value: str, given: Given) -> Decided:
    ours = {"learned_absolute": "learned", "learned": "learned", "rope": "rope"}.get(value)
    if ours is None:
        return ANOTHER, "", "position embeddings are RoPE or learned"
    return SAME if ours == value else RENAMED, f"--position-embedding-type {ours}", ""


def _sink(value: str, given: Given) -> Decided:
    if value == "vanilla":
        return IMPLIED, "", "a softmax without a sink"
    return ANOTHER, "", "attention sinks (off-by-one, learnable) are not supported"


def _query_norm(value: str, given: Given) -> Decided:
    if is_latent(given):
        return IMPLIED, "", "the latents of multi-latent attention are normalized"
    if given.get("normalization", "").lower() != "rmsnorm":
        return ANOTHER, "", "--qk-norm is an RMSNorm, a LayerNorm in Megatron-LM with this --normalization"
    return RENAMED, "--qk-norm", "means --qk-norm"


def _query_bias(value: str, given: Given) -> Decided:
    if not {"disable-bias-linear", "no-add-bias-linear"} & set(given):
        return IMPLIED, "", "all linear layers have biases"
    return SAME, "--add-qkv-bias", ""


def _gelu(value: str, given: Given) -> Decided:
    return OTHER, "", "GELU is exact (erf); Megatron-LM's fusion with biases uses the tanh approximation"


def _blocks_after(value: str, given: Given) -> Decided:
    if number(value) < 1:
        return UNNECESSARY, "", "multi-token prediction is off"
    if number(value) > 1:
        return ANOTHER, "", "multi-token prediction has a single block"
    return RENAMED, "--mtp-depth 1 --mtp-block layer", "the block is like the last layer, with a separate norm"


def _specification(value: str, given: Given) -> Decided:
    if value.strip("'\"") == "local":
        return IMPLIED, "", "there is one implementation"
    return ANOTHER, "", "flags define the layers; a layer specification in code is not read"


def _vocabulary(value: str, given: Given) -> Decided:
    """Translate to the padded vocabulary size: Megatron's embedding and softmax include the padded rows."""
    size, multiple = int(number(value)), int(first(given, "make-vocab-size-divisible-by", otherwise=128))
    counted = size + (given.get("tokenizer-type") == "NullTokenizer")  # which adds an end-of-document id
    multiple *= int(mp_ranks(given))
    if "padded-vocab-size" in given:
        return IMPLIED, "", "set by --padded-vocab-size"
    if size < 1 or multiple < 1 or {"no-pad-vocab-size", "disable-pad-vocab-size"} & set(given):
        multiple = 1
    if counted % multiple:
        return (
            RENAMED,
            f"--vocab-size {math.ceil(counted / multiple) * multiple}",
            f"padded to a multiple of {multiple}",
        )
    if counted != size and size > 0:
        return RENAMED, f"--vocab-size {counted}", "includes the end-of-document id"
    return SAME, f"--vocab-size {value}", ""


def _padding(value: str, given: Given) -> Decided:
    if "vocab-size" in given or "padded-vocab-size" in given:
        return IMPLIED, "", "--vocab-size counts the padded rows"
    reason = "set --vocab-size to the tokenizer's size, padded to a multiple of this x mp ranks"
    return LEFT, "", reason


def _zero_centred(value: str, given: Given) -> Decided:
    return UNNECESSARY, "", "norm weights are 1 + w instead of w: the same steps, because norms have no weight decay"


# Experts.


def _bias_rate(value: str, given: Given) -> Decided:
    without_loss = given.get("moe-router-load-balancing-type") == "noaux_tc"
    if "moe-router-enable-expert-bias" not in given and not without_loss:
        return UNNECESSARY, "", "no effect in Megatron-LM without --moe-router-enable-expert-bias"
    return SAME, f"--moe-router-bias-update-rate {value}", ""


def _bias(value: str, given: Given) -> Decided:
    if "moe-router-bias-update-rate" in given:
        return IMPLIED, "", "set by --moe-router-bias-update-rate"
    return RENAMED, "--moe-router-bias-update-rate 1e-3", "the default rate"


def _router_groups(value: str, given: Given) -> Decided:
    if number(value, 2) <= 1:
        return UNNECESSARY, "", "a single group is not a limit"
    per_group = first(given, "moe-router-topk", otherwise=2) / max(
        1.0, first(given, "moe-router-group-topk", otherwise=1)
    )
    scores = given.get("moe-router-score-function", "softmax")
    if scores != "softmax" or per_group <= 1 or "moe-router-pre-softmax" in given:
        return SAME, f"--moe-router-num-groups {value}", ""
    reason = "groups are compared by sums of probabilities, of logits in Megatron-LM"
    return OTHER, f"--moe-router-num-groups {value}", reason


def _chosen_groups(value: str, given: Given) -> Decided:
    if first(given, "moe-router-num-groups", otherwise=2) <= 1:
        return UNNECESSARY, "", "a single group is not a limit"
    return SAME, f"--moe-router-group-topk {value}", ""


def _score_function(value: str, given: Given) -> Decided:
    if value in ("softmax", "sigmoid"):
        return SAME, f"--moe-router-score-function {value}", ""
    return ANOTHER, "", "router scores are softmax or sigmoid"


def _shared_width(value: str, given: Given) -> Decided:
    names = ("moe-ffn-hidden-size", "moe-intermediate-size", "ffn-hidden-size")
    width, total = first(given, *names), number(value)
    if width and total % width == 0:
        return RENAMED, f"--moe-shared-experts {round(total / width)}", "counted in widths of one routed expert"
    return SAME, f"--moe-shared-expert-intermediate-size {value}", ""


def _heads_sent(value: str, given: Given) -> Decided:
    if value == "1":
        return UNNECESSARY, "", "a single rank has the whole sequence"
    return RENAMED, f"--cp-degree {value} --context-parallel-algo ulysses_cp_algo", ""


def _layers_with_experts(value: str, given: Given) -> Decided:
    text = value.strip("'\"").replace(" ", "")
    if text == "-1":  # MindSpeed-LLM's
        return IMPLIED, "", "all layers have experts"
    try:
        pattern, layers = to_pattern(text), listed(text)
    except ValueError as error:
        return ANOTHER, "", f"not a number, or lists of 0 and 1: {error}"
    if not pattern:
        return IMPLIED, "", "all layers have experts"
    if layers is not None and 1 in layers and all(layers[layers.index(1) :]):
        return RENAMED, f"--first-k-dense {layers.index(1)}", ""
    return SAME, f"--moe-layer-freq {shlex.quote(text)}", ""


def _balanced_by(value: str, given: Given) -> Decided:
    if value in ("", "aux_loss"):
        return IMPLIED, "", "set by --moe-aux-loss-coeff"
    if value == "seq_aux_loss":
        return IMPLIED, "", "set by --moe-seq-aux-loss-coeff"
    if value == "none":
        return RENAMED, "--moe-aux-loss-coeff 0", ""
    if value == "noaux_tc" and "moe-router-bias-update-rate" in given:
        return IMPLIED, "", "set by --moe-router-bias-update-rate"
    if value == "noaux_tc":
        return RENAMED, "--moe-router-bias-update-rate 1e-3", "the expert bias is updated if its rate is not 0"
    return OTHER, "", "experts are balanced by a loss per micro-batch or per sample, or by the expert bias"


def _sharding(value: str, given: Given) -> Decided:
    if "use-megatron-fsdp" not in given and "use-custom-fsdp" not in given:
        return UNNECESSARY, "", "no effect in Megatron-LM without --use-megatron-fsdp"
    stage = {"no_shard": "1", "optim": "1", "optim_grads": "2", "optim_grads_params": "3"}.get(value)
    if stage is None:
        return UNSUPPORTED, "", "sharding stages are 1, 2 and 3"
    return RENAMED, f"--sharding-stage {stage}", ""


def _own_fsdp(value: str, given: Given) -> Decided:
    if "data-parallel-sharding-strategy" in given:
        return IMPLIED, "", "--data-parallel-sharding-strategy sets the stage"
    return RENAMED, "--sharding-stage 3", ""


def _communication(value: str, given: Given) -> Decided:
    if first(given, "context-parallel-size", otherwise=1) == 1:
        return UNNECESSARY, "", "a single cp rank has the whole sequence"
    ours = {"p2p": "megatron", "a2a": "ulysses", "allgather": "allgather", "all_gather": "allgather"}
    if value not in ours:
        return (
            UNSUPPORTED,
            "",
            "one algorithm for all layers: ring (p2p), Ulysses (a2a) or all-gather of keys and values (allgather)",
        )
    return RENAMED, f"--context-parallel-algo {ours[value]}_cp_algo", ""


# Training.


def _warmup_start(value: str, given: Given) -> Decided:
    if number(value) == 0:
        return UNNECESSARY, "", "warmup starts at 0"
    return OTHER, "", "warmup always starts at 0"


def warmed_otherwise(name: str, value: str, given: Given) -> bool:
    """Return True if this argument sets no warmup, but another one does."""
    others = [given[other] for other in WARMUPS if other != name and other in given]
    return number(value, 1) == 0 and any(number(other, 1) != 0 for other in others)


def _warmup_steps(value: str, given: Given) -> Decided:
    if warmed_otherwise("lr-warmup-iters", value, given):
        return UNNECESSARY, "", SET_ELSEWHERE
    reason = "" if value == "0" else f"warmup step i has (i + 1) / {value} of the rate, i / {value} in Megatron-LM"
    return SAME, f"--lr-warmup-iters {value}", reason


def _kept_in(value: str, given: Given) -> Decided:
    if value == "fp32" or (value == "auto" and "bf16" not in given):
        return IMPLIED, "", "master weights, gradients and moments are fp32"
    return OTHER, "", "master weights, gradients and moments are always fp32"


def _loader(value: str, given: Given) -> Decided:
    if value == "external":
        return OTHER, "", "data are only read from --data-path"
    return IMPLIED, "", "samples are shuffled once per epoch, identically on every layout"


def _document_masks(value: str, given: Given) -> Decided:
    if "reset-attention-mask" in given:
        return IMPLIED, "", "set by --reset-attention-mask"
    return RENAMED, "--reset-attention-mask", "attention does not cross documents"


def _extra_ids(value: str, given: Given) -> Decided:
    if number(value) == 0:
        return UNNECESSARY, "", "no extra ids"
    return OTHER, "", "extra ids are not supported: add them to the tokenizer"


def _stages(value: str, given: Given) -> Decided:
    """Translate layer counts of the first or last stage; the other layers are distributed evenly."""
    layers, stages = int(first(given, "num-layers")), int(first(given, "pipeline-model-parallel-size", otherwise=1))
    head = int(first(given, "decoder-first-pipeline-num-layers"))
    tail = int(first(given, "decoder-last-pipeline-num-layers"))
    inner, rest = stages - bool(head) - bool(tail), layers - head - tail
    virtual = any(name.startswith(("num-layers-per-virtual", "num-virtual-stages")) for name in given)
    if inner < 1 or rest < inner or rest % inner or virtual:
        return LEFT, "", "set --pp-seg-method to the first layer of every stage, such as 0,3,7"
    lengths = [*([head] if head else []), *[rest // inner] * inner, *([tail] if tail else [])]
    starts = [sum(lengths[:stage]) for stage in range(len(lengths))]
    return RENAMED, f"--pp-seg-method {','.join(map(str, starts))}", ""


# Megatron-DeepSpeed.


def _deepspeed_experts(value: str, given: Given) -> Decided:
    counts = set(value.split())
    if len(counts) != 1:
        return ANOTHER, "", "all layers have the same number of experts"
    count = counts.pop()
    if count == "1":
        return RENAMED, "--num-experts 0", "one expert is a dense layer"
    return SAME, f"--num-experts {count}", ""


def _experts_over_mp(value: str, given: Given) -> Decided:
    return IMPLIED, "", "mp ranks shard experts like other layers (--expert-mp-degree)"


def _expert_interval(value: str, given: Given) -> Decided:
    if not _has_experts(given):
        return UNNECESSARY, "", "the model has no experts"
    if value == "1":
        return IMPLIED, "", "all layers have experts"
    return ANOTHER, "", f"all layers have experts, every {value} layers in the script"


def _usual_expert_interval(value: str, given: Given) -> Decided:
    if not _has_experts(given):
        return UNNECESSARY, "", "the model has no experts"
    return ANOTHER, "", "all layers have experts, every second layer by default in Megatron-DeepSpeed"


def _mlp_type(value: str, given: Given) -> Decided:
    if value == "standard":
        return IMPLIED, "", "experts replace the MLP"
    return ANOTHER, "", "residual experts (in addition to a dense MLP) are not supported"


def _deepspeed_topk(value: str, given: Given) -> Decided:
    if not _has_experts(given):
        return UNNECESSARY, "", "the model has no experts"
    return RENAMED, "--moe-router-topk 1", ""


def _deepspeed_balance(value: str, given: Given) -> Decided:
    if not _has_experts(given):
        return UNNECESSARY, "", "the model has no experts"
    return RENAMED, "--moe-aux-loss-coeff 0.1", ""


def _deepspeed_capacity(value: str, given: Given) -> Decided:
    if not _has_experts(given):
        return UNNECESSARY, "", "the model has no experts"
    return RENAMED, "--moe-model-type deepspeed_moe --moe-capacity-factor 1", ""


def _sampling(value: str, given: Given) -> Decided:
    if not _has_experts(given) or given.get("topk") != "2":
        return UNNECESSARY, "", "a single expert is never sampled"
    return (
        OTHER,
        "",
        "the second expert has the second-highest score; Megatron-DeepSpeed samples it with noise by default",
    )


def _no_sampling(value: str, given: Given) -> Decided:
    return IMPLIED, "", "the second expert has the second-highest score"


def _one_layer(value: str, given: Given) -> Decided:
    if "recompute-method" not in given:
        return UNNECESSARY, "", "nothing is recomputed"
    return RENAMED, "--recompute-num-layers 1", ""


def _load_tag(value: str, given: Given) -> Decided:
    step = whole(value.removeprefix("global_step"))
    if step is not None:
        return RENAMED, f"--ckpt-step {step}", ""
    return LEFT, "", "set --ckpt-step to the number of a step"


def _from_tokens(ours: str, value: str, given: Given) -> Decided:
    per_step = first(given, "global-batch-size") * first(given, "seq-length")
    if not per_step:
        return OTHER, "", f"left to you: {ours} = tokens / (--global-batch-size x --seq-length)"
    reason = "counts steps instead of tokens: equal if all steps have the same number of tokens"
    return RENAMED, f"{ours} {round(number(value) / per_step)}", reason


def _warmup_tokens(value: str, given: Given) -> Decided:
    if warmed_otherwise("lr-warmup-tokens", value, given):
        return UNNECESSARY, "", SET_ELSEWHERE
    return _from_tokens("--lr-warmup-iters", value, given)


def _decay_tokens(value: str, given: Given) -> Decided:
    return _from_tokens("--lr-decay-iters", value, given)


DECIDED: Mapping[str, Function] = {
    **collected(globals()),
    **rope_values.DECIDED,
    **latent_values.DECIDED,
}
# Functions whose argument does not affect the training.
_HARMLESS = """
    heads_sent padding sharding own_fsdp communication stages load_tag one_layer experts_over_mp
"""
HARMLESS = frozenset(_HARMLESS.split())
