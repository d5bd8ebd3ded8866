"""What becomes of arguments whose meaning hangs on their value or on other arguments: rows ``@name`` of the tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from megapar.tools.translation.verdict import IMPLIED, RENAMED, SAME, UNNECESSARY, UNSUPPORTED

# verdict, what to write here, reason
Decided = tuple[str, str, str]


def _number(given: Mapping[str, str], name: str, default: float = 1.0) -> float:
    try:
        return float(given[name])
    except (KeyError, ValueError):
        return default


def _chunks(value: str, given: Mapping[str, str]) -> Decided:
    layers, stages = _number(given, "num-layers", 0), _number(given, "pipeline-model-parallel-size")
    chunks = round(layers / stages / float(value)) if layers else 0
    if chunks < 1:
        return RENAMED, "--vpp-degree N --pp-schedule interleaved", "N = layers / stages / layers per chunk"
    if chunks == 1:
        return UNNECESSARY, "", "one chunk per stage"
    return RENAMED, f"--vpp-degree {chunks} --pp-schedule interleaved", ""


def _warmup(value: str, given: Mapping[str, str]) -> Decided:
    steps = _number(given, "lr-decay-iters", _number(given, "train-iters", 0))
    if not steps:
        return RENAMED, "--lr-warmup-iters STEPS", "a share of --lr-decay-iters"
    return RENAMED, f"--lr-warmup-iters {round(float(value) * steps)}", ""


def _samples(value: str, given: Mapping[str, str]) -> Decided:
    batch = _number(given, "global-batch-size", 0)
    flag = next((n for n in ("lr-warmup-samples", "lr-decay-samples", "train-samples") if given.get(n) == value), "")
    ours = "--" + flag.replace("samples", "iters")
    if not batch:
        return RENAMED, f"{ours} STEPS", "samples / --global-batch-size"
    return RENAMED, f"{ours} {round(float(value) / batch)}", ""


def _tokens(value: str, given: Mapping[str, str]) -> Decided:
    per_step = _number(given, "global-batch-size", 0) * _number(given, "seq-length", 0)
    steps = str(round(float(value) / per_step)) if per_step else "STEPS"
    return RENAMED, f"--train-iters {steps}", ""


def _zero(value: str, given: Mapping[str, str]) -> Decided:
    if value == "0":
        return RENAMED, "--sharding-degree 1 --hybrid-dp", "no sharding: every data rank is a replica"
    return RENAMED, f"--sharding-stage {value}", ""


def _attention(value: str, given: Mapping[str, str]) -> Decided:
    if value in ("unfused", "local"):
        return RENAMED, "--no-use-flash-attn", ""
    return IMPLIED, "", "fused attention is the default"


def _implementation(value: str, given: Mapping[str, str]) -> Decided:
    return UNNECESSARY, "", "there is one implementation, which takes the device's fused kernels where they are"


def _shared(value: str, given: Mapping[str, str]) -> Decided:
    width = _number(given, "moe-ffn-hidden-size", _number(given, "ffn-hidden-size", 0))
    if width and float(value) % width == 0:
        return RENAMED, f"--moe-shared-experts {round(float(value) / width)}", ""
    return UNSUPPORTED, "", "shared experts are whole widths of one expert"


def _frequency(value: str, given: Mapping[str, str]) -> Decided:
    text = value.strip("'\"").replace(" ", "")
    if text == "1":
        return IMPLIED, "", "every layer has experts"
    leading = re.fullmatch(r"\(?\[0\](?:\*(\d+))?\+\[1\](?:\*\d+)?\)?", text)
    if leading is not None:
        return RENAMED, f"--first-k-dense {leading[1] or 1}", ""
    return UNSUPPORTED, "", "only leading layers may be dense (--first-k-dense)"


def _balancing(value: str, given: Mapping[str, str]) -> Decided:
    if value == "aux_loss":
        return IMPLIED, "", "--moe-aux-loss-coeff says it"
    if value == "seq_aux_loss":
        return _sequence(value, given)
    if value == "noaux_tc":
        return RENAMED, "--moe-router-bias-update-rate 1e-3", "the correction bias moves where its rate is not 0"
    if value == "none":
        return RENAMED, "--moe-aux-loss-coeff 0", ""
    return UNSUPPORTED, "", "balancing is by auxiliary losses or by the correction bias"


def _per_sample(given: Mapping[str, str]) -> bool:
    return "seq-aux" in given or given.get("moe-router-load-balancing-type") == "seq_aux_loss"


def _sequence(value: str, given: Mapping[str, str]) -> Decided:
    if "moe-aux-loss-coeff" in given:
        return IMPLIED, "", "--moe-seq-aux-loss-coeff says it"
    return RENAMED, "--moe-seq-aux-loss-coeff COEFFICIENT --moe-aux-loss-coeff 0", "a loss per sample"


def _coefficient(value: str, given: Mapping[str, str]) -> Decided:
    if _per_sample(given):
        return RENAMED, f"--moe-seq-aux-loss-coeff {value} --moe-aux-loss-coeff 0", "a loss per sample"
    return SAME, f"--moe-aux-loss-coeff {value}", ""


def _drops(value: str, given: Mapping[str, str]) -> Decided:
    ours = {"probs": "probs", "position": "token"}.get(value)
    if ours is None:
        return UNSUPPORTED, "", "kept are earlier tokens, earlier choices, or higher probabilities"
    return RENAMED, f"--moe-drop-policy {ours}", ""


def _skipped(given: Mapping[str, str]) -> int:
    """Layers that a script counts and leaves empty."""
    return len([layer for layer in given.get("noop-layers", "").split(",") if layer])


def _noop(value: str, given: Mapping[str, str]) -> Decided:
    return IMPLIED, "--pp-seg-method balanced", "--num-layers counts layers that are there, shared out over the stages"


def _layers(value: str, given: Mapping[str, str]) -> Decided:
    skipped = _skipped(given)
    if not skipped or not value.isdigit():
        return SAME, f"--num-layers {value}", ""
    return RENAMED, f"--num-layers {int(value) - skipped}", f"without {skipped} empty ones"


def _rotated(value: str, given: Mapping[str, str]) -> Decided:
    if _number({"": value}, "", 0) == 1:
        return UNNECESSARY, "", "all features of a head are turned"
    return UNSUPPORTED, "", "all features of a head are turned"


def _cut(value: str, given: Mapping[str, str]) -> Decided:
    if _number(given, "tensor-model-parallel-size", _number(given, "mp-degree")) == 1:
        return UNNECESSARY, "", "one mp rank has the whole sequence"
    return SAME, "--sequence-parallel", ""


def _algorithm(value: str, given: Mapping[str, str]) -> Decided:
    if _number(given, "context-parallel-size", _number(given, "cp-degree")) == 1:
        return UNNECESSARY, "", "one cp rank has the whole sequence"
    return SAME, f"--context-parallel-algo {value}", ""


def _split(value: str, given: Mapping[str, str]) -> Decided:
    if "mock-data" in given:
        return UNNECESSARY, "", "random tokens are held out on their own"
    return SAME, f"--split {value}", ""


def _evaluates(given: Mapping[str, str]) -> bool:
    return _number(given, "eval-iters") > 0


def _evaluations(value: str, given: Mapping[str, str]) -> Decided:
    if not _evaluates(given):
        return RENAMED, "--eval-interval 0", "no evaluation"
    return SAME, f"--eval-iters {value}", ""


def _evaluated(value: str, given: Mapping[str, str]) -> Decided:
    if not _evaluates(given):
        return RENAMED, "--eval-interval 0", "no evaluation"
    return SAME, f"--eval-interval {value}", ""


def _saved(value: str, given: Mapping[str, str]) -> Decided:
    if "save" not in given:
        return UNNECESSARY, "", "nothing is saved without --save"
    return SAME, f"--save-interval {value}", ""


def _profile(value: str, given: Mapping[str, str]) -> Decided:
    if ":" in value:
        return SAME, f"--profile {value}", ""
    start, end = given.get("profile-step-start", "10"), given.get("profile-step-end", "12")
    return RENAMED, f"--profile {start}:{end}", ""


def _rendezvous(value: str, given: Mapping[str, str]) -> Decided:
    address, port = given.get("master-addr", "HOST"), given.get("master-port", "PORT")
    return RENAMED, f"megapar launch --rdzv-endpoint {address}:{port}", ""


def _strategy(value: str, given: Mapping[str, str]) -> Decided:
    stage = {"no_shard": "1", "optim": "1", "optim_grads": "2", "optim_grads_params": "3"}.get(value)
    if stage is None:
        return UNSUPPORTED, "", "stages are 1, 2 and 3"
    return RENAMED, f"--sharding-stage {stage}", ""


def _positions(value: str, given: Mapping[str, str]) -> Decided:
    if given.get("position-embedding-type") == "rope" or "use-rotary-position-embeddings" in given:
        return IMPLIED, "", "rope learns no positions"
    return UNSUPPORTED, "", "positions are rope or learned"


DECIDED: Mapping[str, Callable[[str, Mapping[str, str]], Decided]] = {
    "chunks": _chunks,
    "warmup": _warmup,
    "samples": _samples,
    "tokens": _tokens,
    "zero": _zero,
    "attention": _attention,
    "implementation": _implementation,
    "shared": _shared,
    "frequency": _frequency,
    "balancing": _balancing,
    "strategy": _strategy,
    "coefficient": _coefficient,
    "sequence": _sequence,
    "drops": _drops,
    "noop": _noop,
    "layers": _layers,
    "rotated": _rotated,
    "cut": _cut,
    "algorithm": _algorithm,
    "split": _split,
    "evaluations": _evaluations,
    "evaluated": _evaluated,
    "saved": _saved,
    "profile": _profile,
    "rendezvous": _rendezvous,
    "positions": _positions,
}
