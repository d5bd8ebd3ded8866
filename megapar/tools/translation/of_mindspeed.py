"""Value-dependent translation of MindSpeed's arguments: rows ``@name`` of ``mindspeed``."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from itertools import accumulate

from megapar.tools.translation.decided import DECIDED
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
)

_INERT = "MindSpeed parses it but does nothing since core_r0.12.1; megapar supports it, with the same numbers"


def _adaptive(value: str, given: Mapping[str, str]) -> Decided:
    if first(given, "adaptive-recompute-device-size") > 0:
        return IMPLIED, "", "set by --adaptive-recompute-device-size"
    return (
        LEFT,
        "",
        "set --adaptive-recompute-device-size to the memory it may use, in MB; MindSpeed uses the whole device",
    )


def _slices(value: str, given: Mapping[str, str]) -> Decided:
    if number(value) <= 1:
        return UNNECESSARY, "", "one slice"
    return SAME, f"--ampipe-degree {value}", _INERT


def _slices_overlap(value: str, given: Mapping[str, str]) -> Decided:
    if first(given, "ampipe-degree") <= 1:
        return UNNECESSARY, "", "no effect without --ampipe-degree"
    return SAME, "--ampipe-tp-sp-comm-overlap", _INERT


def _kind(value: str, given: Mapping[str, str]) -> Decided:
    if "moe-no-drop" in given:
        return RENAMED, "--moe-model-type megatron_moe", "no tokens are dropped"
    return SAME, f"--moe-model-type {value}", ""


def _capacity(value: str, given: Mapping[str, str]) -> Decided:
    if "moe-no-drop" in given:
        return UNNECESSARY, "", "no tokens are dropped (--moe-no-drop)"
    if given.get("moe-model-type") != "deepspeed_moe":
        return UNNECESSARY, "", "the capacity of deepspeed_moe, which is not selected"
    return RENAMED, f"--moe-capacity-factor {value}", ""


def _undropped(value: str, given: Mapping[str, str]) -> Decided:
    if "moe-model-type" in given:
        return IMPLIED, "", "megatron_moe drops no tokens"
    return RENAMED, "--moe-model-type megatron_moe", "drops no tokens"


def _expert_ranks(value: str, given: Mapping[str, str]) -> Decided:
    if "moe-tp-extend-ep" not in given:
        return RENAMED, f"--ep-degree {value}", ""
    ranks = round(number(value) * max(1, first(given, "tensor-model-parallel-size", otherwise=1)))
    return RENAMED, f"--ep-degree {ranks}", "with --moe-tp-extend-ep, mp ranks are expert ranks"


_SHARED = {"megatron_cp_algo": "megatron_cp_algo", "ulysses_cp_algo": "ulysses_cp_algo"}


def _algorithm(value: str, given: Mapping[str, str]) -> Decided:
    if first(given, "context-parallel-size", "cp-degree", otherwise=1) <= 1:
        return UNNECESSARY, "", "a single cp rank has the whole sequence"
    if value in _SHARED:
        return SAME, f"--context-parallel-algo {value}", ""
    if value == "kvallgather_cp_algo":
        return RENAMED, "--context-parallel-algo allgather_cp_algo", ""
    return RENAMED, "--context-parallel-algo megatron_cp_algo", "ring or Ulysses, not both: the numbers are the same"


def _balancing(value: str, given: Mapping[str, str]) -> Decided:
    if value == "softmax_topk":
        if "norm-topk-prob" in given:
            return RENAMED, "--moe-aux-loss-coeff 0", "no load balancing loss"
        reason = "no load balancing loss, and weights that keep their scores"
        return RENAMED, "--moe-aux-loss-coeff 0 --no-norm-topk-prob", reason
    if value in ("group_limited_greedy", "pai_megatron_aux_loss", "sparsemixer_topk", "sinkhorn"):
        return OTHER, "", f"the routing {value} is not supported"
    return DECIDED["balancing"](value, given)


def _placement(value: str, given: Mapping[str, str]) -> Decided:
    if first(given, "expert-model-parallel-size", otherwise=1) <= 1:
        return UNNECESSARY, "", "a single ep rank has all experts"
    steps = given.get("expert-placement-freq", "50")
    return RENAMED, f"--moe-rebalance-interval {steps}", "moves experts by the load since the last move"


def _placement_steps(value: str, given: Mapping[str, str]) -> Decided:
    if "enable-expert-placement" not in given:
        return UNNECESSARY, "", "no effect without --enable-expert-placement"
    return IMPLIED, "", "set by --moe-rebalance-interval"


def _biases(value: str, given: Mapping[str, str]) -> Decided:
    if not {"disable-bias-linear", "no-add-bias-linear"} & set(given):
        return IMPLIED, "", "--add-bias-linear adds them to all linear layers"
    return (
        ANOTHER,
        "",
        "biases are in all linear layers, in those of queries, keys and values (--add-qkv-bias), or in none",
    )


def _optimizer(value: str, given: Mapping[str, str]) -> Decided:
    if value == "fused_ema_adamw":
        return UNSUPPORTED, "", "AdamW is the same; an exponential moving average of the weights is not kept"
    return IMPLIED, "", "AdamW, fused if the device supports it"


def _mask(value: str, given: Mapping[str, str]) -> Decided:
    return IMPLIED, "", "attention is causal, within documents with --reset-attention-mask"


def _past(value: str, given: Mapping[str, str]) -> Decided:
    if first(given, "sparse-mode") == 2:
        return UNNECESSARY, "", "--sparse-mode 2 is the causal mask"
    if number(value) >= first(given, "seq-length"):
        return UNNECESSARY, "", "it covers the whole sample"
    return ANOTHER, "", "attention covers all earlier tokens"


def _starts(counts: list[int]) -> Decided:
    starts = [0, *accumulate(counts)][:-1]
    return RENAMED, f"--pp-seg-method {','.join(map(str, starts))}", "the first layer of each stage"


def _layers_of_stages(value: str, given: Mapping[str, str]) -> Decided:
    words = value.strip("'\"").split(",")
    if "noop-layers" in given:
        return UNNECESSARY, "", "MindSpeed ignores it with --noop-layers"
    counts = [layers for layers in map(whole, words) if layers is not None]
    if len(counts) < len(words):
        return LEFT, "", "not a list of layer counts: set --pp-seg-method to the first layer of each stage"
    return _starts(counts)


def _layers_of_chunks(value: str, given: Mapping[str, str]) -> Decided:
    try:
        stages = ast.literal_eval(value.strip("'\""))
        counts = [[int(layers) for layers in stage] for stage in stages]
    except (ValueError, TypeError, SyntaxError):
        return LEFT, "", "not a literal list: set --pp-seg-method to the first layer of each stage"
    if any(len(stage) != 1 for stage in counts):
        return UNSUPPORTED, "", "--pp-seg-method uniform or balanced distributes layers over the chunks of a stage"
    return _starts([stage[0] for stage in counts])


def _output_multiplier(value: str, given: Mapping[str, str]) -> Decided:
    if number(value) <= 0:
        return UNNECESSARY, "", "the logits have no factor"
    return RENAMED, f"--logits-scaling {1 / number(value)!r}", "divides the logits by the inverse of this factor"


def _depth(value: str, given: Mapping[str, str]) -> Decided:
    layers = first(given, "num-layers")
    if layers <= 0 or number(value) <= 0:
        return LEFT, "", "set --residual-multiplier to this value / sqrt(--num-layers)"
    return RENAMED, f"--residual-multiplier {number(value) / layers**0.5!r}", "is this value / sqrt(--num-layers)"


def _base_width(value: str, given: Mapping[str, str]) -> Decided:
    width = first(given, "hidden-size")
    if width <= 0 or number(value) <= 0 or "output-multiplier-scale" in given:
        return LEFT, "", "set --logits-scaling to --hidden-size / this value, divided by --output-multiplier-scale"
    return RENAMED, f"--logits-scaling {width / number(value)!r}", "is --hidden-size / this value"


FUNCTIONS: Mapping[str, Function] = collected(globals(), "mindspeed_")
# Functions for layout, memory and speed: the numbers do not depend on their arguments.
_HARMLESS = """
    mindspeed_adaptive mindspeed_slices mindspeed_slices_overlap mindspeed_expert_ranks mindspeed_algorithm
    mindspeed_placement mindspeed_placement_steps mindspeed_optimizer mindspeed_mask mindspeed_layers_of_stages
    mindspeed_layers_of_chunks
"""
HARMLESS = frozenset(_HARMLESS.split())
