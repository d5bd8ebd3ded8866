"""Translation of arguments of Megatron-LM, Megatron-DeepSpeed and MindSpeed that has to be computed.

Rows ``@name`` of the tables; a row whose conditions suffice has cases instead (``cases``). Sources: NVIDIA/Megatron-LM
(megatron/training/arguments.py, megatron/core/transformer) and deepspeedai/Megatron-DeepSpeed (megatron/arguments.py),
as in tests/tools/translation/tables.
"""

from __future__ import annotations

import ast
import math
import shlex
from collections.abc import Callable, Mapping
from itertools import accumulate

from megapar.config.read import spellings
from megapar.model.decoder.layer_pattern import listed, to_pattern
from megapar.model.decoder.layer_ropes import roped_layers
from megapar.model.decoder.windows import NONE as NO_WINDOW
from megapar.model.decoder.windows import to_window, window_or_none, windowed_layers
from megapar.schema.batch_size import BatchSize
from megapar.tools.translation import open_values
from megapar.tools.translation.cases import (
    Function,
    NotANumberError,
    collected,
    first,
    number,
    scaling,
    scaling_factor,
    whole,
)
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


def _chunks(value: str, given: Given) -> Decided:
    layers = first(given, "num-layers")
    stages = max(1, first(given, "pipeline-model-parallel-size", otherwise=first(given, "pp-degree", otherwise=1)))
    per_chunk = number(value)
    chunks = round(layers / stages / per_chunk) if per_chunk else 0
    if chunks < 1:
        reason = "chunks per stage = layers / stages / layers per chunk: --vpp-degree, --pp-schedule interleaved"
        return LEFT, "", reason
    if chunks == 1:
        return UNNECESSARY, "", "one chunk per stage"
    return RENAMED, f"--vpp-degree {chunks} --pp-schedule interleaved", ""


def _ramp(given: Given) -> BatchSize | None:
    """Return the global batch size as a function of consumed samples; None if the script does not set it."""
    final = int(first(given, "global-batch-size"))
    ramp = given.get("rampup-batch-size", "")
    if final < 1 or open_values.is_open(ramp):
        return None
    if not ramp:
        return BatchSize(final)
    if len(ramp.split()) != 3:
        raise NotANumberError(f"--rampup-batch-size has three numbers; {ramp} is not a number each")
    start, increment, samples = (int(number(word)) for word in ramp.split())
    return BatchSize(final, start, increment, samples) if increment and final > start else BatchSize(final)


def _steps(samples: float, given: Given, whole: Callable[[float], int] = round) -> int | None:
    """Return the number of optimizer steps for a number of samples; None if the global batch size is not set."""
    batch = _ramp(given)
    if batch is None:
        return None
    consumed = steps = 0
    while consumed < min(samples, batch.ramp_samples):
        consumed += batch.at(consumed)
        steps += 1
    return steps + max(0, whole((samples - consumed) / batch.final))


def _counted(ours: str, whole: Callable[[float], int] = round) -> Function:
    """Return the function that translates a number of samples to steps; ``whole`` rounds the last one."""

    def decide(value: str, given: Given) -> Decided:
        samples = number(value, -1)
        steps = _steps(samples, given, whole) if samples >= 0 else None
        if steps is None:
            return OTHER, "", f"left to you: {ours} = samples / --global-batch-size, which is not set"
        return RENAMED, f"{ours} {steps}", ""

    return decide


def _from_tokens(ours: str) -> Function:
    """Return the function that translates a number of tokens to steps."""

    def decide(value: str, given: Given) -> Decided:
        per_step = first(given, "global-batch-size") * first(given, "seq-length")
        if not per_step:
            return OTHER, "", f"left to you: {ours} = tokens / (--global-batch-size x --seq-length)"
        reason = "counts steps instead of tokens: equal if all steps have the same number of tokens"
        return RENAMED, f"{ours} {round(number(value) / per_step)}", reason

    return decide


_samples = _counted("--train-iters", math.floor)  # an incomplete last batch is not used
_decay_samples = _counted("--lr-decay-iters", math.floor)  # as --train-samples, which it often equals
_wsd_samples = _counted("--lr-wsd-decay-iters")
_decay_tokens = _from_tokens("--lr-decay-iters")


def _warmup(unit: str) -> Callable[[Function], Function]:
    """Decorate the function of ``--lr-warmup-UNIT``, which has no effect if it is 0 and another unit sets a warmup."""
    names = [f"lr-warmup-{other}" for other in ("fraction", "iters", "samples", "tokens") if other != unit]

    def decorate(function: Function) -> Function:
        def decide(value: str, given: Given) -> Decided:
            if number(value, 1) == 0 and any(number(given[name], 1) != 0 for name in names if name in given):
                return UNNECESSARY, "", "another argument sets the warmup"
            return function(value, given)

        return decide

    return decorate


@_warmup("fraction")
def _warmup_fraction(value: str, given: Given) -> Decided:
    steps = first(given, "lr-decay-iters", otherwise=first(given, "train-iters"))
    samples = first(given, "lr-decay-samples", otherwise=first(given, "train-samples"))
    if samples and not steps:
        steps = _steps(samples, given) or 0
    if not steps:
        return OTHER, "", "left to you: --lr-warmup-iters is a fraction of --lr-decay-iters, which is not set"
    return RENAMED, f"--lr-warmup-iters {round(number(value) * steps)}", ""


@_warmup("iters")
def _warmup_steps(value: str, given: Given) -> Decided:
    reason = "" if value == "0" else f"warmup step i has i / {value} of the rate, (i - 1) / {value} in Megatron-LM"
    return SAME, f"--lr-warmup-iters {value}", reason


_warmup_samples = _warmup("samples")(_counted("--lr-warmup-iters"))
_warmup_tokens = _warmup("tokens")(_from_tokens("--lr-warmup-iters"))


def _ramped(value: str, given: Given) -> Decided:
    _ramp(given)  # says what it cannot read
    warmed = any(name.startswith("lr-warmup-") for name in given)
    if not warmed and given.get("lr-decay-style") == "constant":
        return SAME, f"--rampup-batch-size {value}", ""
    reason = "the batch size grows equally, but the learning rate follows steps in megapar, samples in Megatron-LM"
    return OTHER, f"--rampup-batch-size {value}", reason


def _tokens(value: str, given: Given) -> Decided:
    length = first(given, "seq-length")
    if not length:
        return OTHER, "", "left to you: --train-iters = tokens / (--global-batch-size x --seq-length)"
    verdict, ours, reason = _counted("--train-iters", math.ceil)(str(number(value) / length), given)
    steps = int(first(given, "train-iters"))
    if ours and 0 < steps < int(ours.split()[1]):
        return verdict, f"--train-iters {steps}", "the earlier of both ends"
    return verdict, ours, reason


def _iterations(value: str, given: Given) -> Decided:
    if not value:
        return LEFT, "", "it has no value"
    if first(given, "train-tokens") > 0 and _tokens(given["train-tokens"], given)[1]:
        return IMPLIED, "", "--train-tokens ends the run earlier"
    return SAME, f"--train-iters {value}", ""


def _decay_style(value: str, given: Given) -> Decided:
    kind = value.lower()
    if kind in _choices("lr-decay-style"):
        return SAME if kind == value else RENAMED, f"--lr-decay-style {kind}", ""
    return OTHER, "", f"the learning rate decay is one of {', '.join(_choices('lr-decay-style'))}"


def _choices(name: str) -> tuple[str, ...]:
    """Return the choices of a megapar flag."""
    return tuple(str(choice) for choice in spellings()[name].flag.choices)


def _wsd_style(value: str, given: Given) -> Decided:
    if given.get("lr-decay-style", "").lower() != "wsd":
        return UNNECESSARY, "", "no effect without --lr-decay-style WSD"
    if not value:
        return RENAMED, "--lr-wsd-decay-style exponential", ""
    if value in _choices("lr-wsd-decay-style"):
        return SAME, f"--lr-wsd-decay-style {value}", ""
    return OTHER, "", f"the WSD decay is one of {', '.join(_choices('lr-wsd-decay-style'))}"


def _layers(value: str, given: Given) -> Decided:
    skipped = len([layer for layer in given.get("noop-layers", "").split(",") if layer])
    layers = whole(value)
    if not skipped or layers is None:
        return SAME, f"--num-layers {value}", ""
    return RENAMED, f"--num-layers {layers - skipped}", f"without {skipped} empty layers"


def _profile(value: str, given: Given) -> Decided:
    if ":" in value:
        return SAME, f"--profile {value}", ""
    start, end = given.get("profile-step-start", "10"), given.get("profile-step-end", "12")
    return RENAMED, f"--profile {start}:{end}", ""


def _vocabulary(value: str, given: Given) -> Decided:
    """Translate to the padded vocabulary size: Megatron's embedding and softmax include the padded rows."""
    size, multiple = int(number(value)), int(first(given, "make-vocab-size-divisible-by", otherwise=128))
    counted = size + (given.get("tokenizer-type") == "NullTokenizer")  # which adds an end-of-document id
    multiple *= int(first(given, "tensor-model-parallel-size", "model-parallel-size", "mp-degree", otherwise=1))
    if "padded-vocab-size" in given:
        return IMPLIED, "", "set by --padded-vocab-size"
    if size < 1 or multiple < 1 or {"no-pad-vocab-size", "disable-pad-vocab-size"} & set(given):
        multiple = 1
    if counted % multiple:
        padded = math.ceil(counted / multiple) * multiple
        with_end = f"{counted} with the end-of-document id, " * (counted != size)
        return RENAMED, f"--vocab-size {padded}", f"{with_end}padded to a multiple of {multiple}"
    if counted != size and size > 0:
        return RENAMED, f"--vocab-size {counted}", "includes the end-of-document id"
    return SAME, f"--vocab-size {value}", ""


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


def _shared_width(value: str, given: Given) -> Decided:
    names = ("moe-ffn-hidden-size", "moe-intermediate-size", "ffn-hidden-size")
    width, total = first(given, *names), number(value)
    if width and total % width == 0:
        return RENAMED, f"--moe-shared-experts {round(total / width)}", "counted in widths of one routed expert"
    return SAME, f"--moe-shared-expert-intermediate-size {value}", ""


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


def _window(value: str, given: Given) -> Decided:
    try:
        window = to_window(value.strip("'\""))
    except ValueError as error:
        return ANOTHER, "", f"a window ends at its position: {error}"
    if not window or given.get("window-attn-skip-freq") == "1":
        return UNNECESSARY, "", "no layer has a window"
    return RENAMED, f"--window-size {window}", "counts the position itself, too"


def _windowed_layers(value: str, given: Given) -> Decided:
    text = value.strip("'\"").replace(" ", "")
    if text == "1" or not window_or_none(given.get("window-size", NO_WINDOW).strip("'\"")):
        return UNNECESSARY, "", "no layer has a window"
    try:
        windowed_layers(text, 1)
    except ValueError as error:
        return ANOTHER, "", f"not a number, or lists of 0 and 1: {error}"
    return SAME, f"--window-attn-skip-freq {shlex.quote(text)}", ""


def _layers_without_rope(value: str, given: Given) -> Decided:
    text = value.strip("'\"").replace(" ", "")
    if given.get("position-embedding-type") not in ("rope", "yarn") and "use-rotary-position-embeddings" not in given:
        return UNNECESSARY, "", "no layer has rotary positions"
    try:
        layers = roped_layers(text, int(first(given, "num-layers", otherwise=1)))
    except ValueError as error:
        return ANOTHER, "", f"not a number, or lists of 0 and 1: {error}"
    if not any(layers[:-1]):
        return ANOTHER, "", "no layer has rotary positions"
    return SAME, f"--no-rope-freq {shlex.quote(text)}", ""


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


def _deepspeed_experts(value: str, given: Given) -> Decided:
    counts = set(value.split())
    if len(counts) != 1:
        return ANOTHER, "", "all layers have the same number of experts"
    count = counts.pop()
    if count == "1":
        return RENAMED, "--num-experts 0", "one expert is a dense layer"
    return SAME, f"--num-experts {count}", ""


def _load_tag(value: str, given: Given) -> Decided:
    step = whole(value.removeprefix("global_step"))
    if step is not None:
        return RENAMED, f"--ckpt-step {step}", ""
    return LEFT, "", "set --ckpt-step to the number of a step"


def _rope_mscale(value: str, given: Given) -> Decided:
    """Translate the numerator of YaRN's factor on rotated features; without a denominator that is 1 in Megatron-LM."""
    if scaling(given) != "yarn":
        return UNNECESSARY, "", "no effect without scaling by yarn"
    names = ("rope-scaling-mscale-all-dim", "mscale-all-dim")
    if any(first(given, name) for name in names) and number(value, 1.0):
        return SAME, f"--mscale {value}", ""
    if number(value, 1.0) == 1:
        return UNNECESSARY, "", "one, as without --mscale"
    return RENAMED, f"--rope-attention-factor {0.1 * number(value, 1.0) * math.log(scaling_factor(given)) + 1}", ""


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


FUNCTIONS: Mapping[str, Function] = collected(globals())
