"""Translation of MindSpeed's arguments that has to be computed: rows ``@mindspeed_name`` of ``mindspeed``."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from itertools import accumulate

from megapar.tools.translation.cases import Function, collected
from megapar.tools.translation.number import first, number, whole
from megapar.tools.translation.verdict import ANOTHER, LEFT, RENAMED, UNNECESSARY, UNSUPPORTED, Decided, Given


def _expert_ranks(value: str, given: Given) -> Decided:
    if "moe-tp-extend-ep" not in given:
        return RENAMED, f"--ep-degree {value}", ""
    ranks = round(number(value) * max(1, first(given, "tensor-model-parallel-size", otherwise=1)))
    return RENAMED, f"--ep-degree {ranks}", "with --moe-tp-extend-ep, mp ranks are expert ranks"


def _past(value: str, given: Given) -> Decided:
    if first(given, "sparse-mode") == 2:
        return UNNECESSARY, "", "--sparse-mode 2 is the causal mask"
    if number(value) >= first(given, "seq-length"):
        return UNNECESSARY, "", "it covers the whole sample"
    return ANOTHER, "", "attention covers all earlier tokens"


def _starts(counts: list[int]) -> Decided:
    starts = [0, *accumulate(counts)][:-1]
    return RENAMED, f"--pp-seg-method {','.join(map(str, starts))}", "the first layer of each stage"


def _layers_of_stages(value: str, given: Given) -> Decided:
    words = value.strip("'\"").split(",")
    if "noop-layers" in given:
        return UNNECESSARY, "", "MindSpeed ignores it with --noop-layers"
    counts = [layers for layers in map(whole, words) if layers is not None]
    if len(counts) < len(words):
        return LEFT, "", "not a list of layer counts: set --pp-seg-method to the first layer of each stage"
    return _starts(counts)


def _layers_of_chunks(value: str, given: Given) -> Decided:
    try:
        stages = ast.literal_eval(value.strip("'\""))
        counts = [[int(layers) for layers in stage] for stage in stages]
    except (ValueError, TypeError, SyntaxError):
        return LEFT, "", "not a literal list: set --pp-seg-method to the first layer of each stage"
    if any(len(stage) != 1 for stage in counts):
        return UNSUPPORTED, "", "--pp-seg-method uniform or balanced distributes layers over the chunks of a stage"
    return _starts([stage[0] for stage in counts])


def _output_multiplier(value: str, given: Given) -> Decided:
    if number(value) <= 0:
        return UNNECESSARY, "", "the logits have no factor"
    return RENAMED, f"--logits-scaling {1 / number(value)!r}", "divides the logits by the inverse of this factor"


def _depth(value: str, given: Given) -> Decided:
    layers = first(given, "num-layers")
    if layers <= 0 or number(value) <= 0:
        return LEFT, "", "set --residual-multiplier to this value / sqrt(--num-layers)"
    return RENAMED, f"--residual-multiplier {number(value) / layers**0.5!r}", "is this value / sqrt(--num-layers)"


def _base_width(value: str, given: Given) -> Decided:
    width = first(given, "hidden-size")
    if width <= 0 or number(value) <= 0 or "output-multiplier-scale" in given:
        return LEFT, "", "set --logits-scaling to --hidden-size / this value, divided by --output-multiplier-scale"
    return RENAMED, f"--logits-scaling {width / number(value)!r}", "is --hidden-size / this value"


FUNCTIONS: Mapping[str, Function] = collected(globals(), "mindspeed_")
