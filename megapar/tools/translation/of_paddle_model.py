"""Value-dependent translation of Paddle's arguments for the model and its experts: rows ``@name`` of ``paddle``.

Sources: the model and the trainer of ERNIE 4.5's examples/pre-training, the configurations of PaddleNLP's and
PaddleFormers' models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from megapar.tools.translation.given import by_ernie_4_5, is_on
from megapar.tools.translation.neutral import Function, collected, off
from megapar.tools.translation.number import first, number, whole
from megapar.tools.translation.verdict import ANOTHER, IMPLIED, OTHER, RENAMED, UNNECESSARY, UNSUPPORTED, Decided


def _layers(value: str, given: Mapping[str, str]) -> Decided:
    tail = int(first(given, "remove-tail-layer"))
    layers = whole(value)
    if layers is None or not tail:
        return RENAMED, f"--num-layers {value}", ""
    return RENAMED, f"--num-layers {layers - tail}", f"without the {tail} that remove_tail_layer removes"


def _tail(value: str, given: Mapping[str, str]) -> Decided:
    return IMPLIED, "", "--num-layers counts the remaining layers"


def _std(value: str, given: Mapping[str, str]) -> Decided:
    hidden = first(given, "hidden-size")
    if _is_ernie(given) and hidden:
        return RENAMED, f"--init-std {math.sqrt(0.3333 / hidden):.6g}", "always sqrt(0.3333 / hidden size) in ERNIE 4.5"
    return RENAMED, f"--init-std {value}", ""


def _is_ernie(given: Mapping[str, str]) -> bool:
    """Return True for ERNIE 4.5's decoder, identified by its configuration or its trainer."""
    return by_ernie_4_5(given) or any(name in given for name in ("moe-layer-start-index", "moe-num-experts"))


def _usual_std(value: str, given: Mapping[str, str]) -> Decided:
    if "hidden-size" not in given:
        return UNNECESSARY, "", "no model sizes are given"
    return _std("0.02", given)


def _usual_model(flags: str) -> Function:
    """Return the function for a default of the model, which applies if its sizes are given."""

    def decide(value: str, given: Mapping[str, str]) -> Decided:
        if "hidden-size" not in given:
            return UNNECESSARY, "", "no model sizes are given"
        return RENAMED, flags, ""

    return decide


def _tied(value: str, given: Mapping[str, str]) -> Decided:
    if off(value):
        return RENAMED, "--untie-embeddings-and-output-weights", ""
    return IMPLIED, "", "the output projection and the embedding are tied"


def _norm(value: str, given: Mapping[str, str]) -> Decided:
    if off(value):
        return RENAMED, "--normalization layernorm", ""
    return IMPLIED, "", "RMSNorm is the default"


def _activation(value: str, given: Mapping[str, str]) -> Decided:
    if value in ("silu", "swish"):
        return IMPLIED, "", "SwiGLU is the default"
    if value == "gelu":
        return RENAMED, "--activation gelu", ""
    return ANOTHER, "", "activation functions are SwiGLU and GELU"


def _has_experts(given: Mapping[str, str]) -> bool:
    return first(given, "moe-num-experts", "n-routed-experts", "num-experts") > 0


def _experts(value: str, given: Mapping[str, str]) -> Decided:
    counts = set(value.split())
    if len(counts) == 1:
        return RENAMED, f"--num-experts {counts.pop()}", ""
    return ANOTHER, "", "all layers have the same experts, for one type of token"


def _expert_width(value: str, given: Mapping[str, str]) -> Decided:
    if len(set(value.split())) > 1:
        return ANOTHER, "", "all layers have the same experts, for one type of token"
    if number(value) <= 0:
        return UNNECESSARY, "", "experts are as wide as the dense layers"
    return RENAMED, f"--moe-ffn-hidden-size {value}", ""


def _first_dense(value: str, given: Mapping[str, str]) -> Decided:
    if len(set(value.split())) > 1:
        return ANOTHER, "", "all layers have the same experts, for one type of token"
    if number(value.split()[0] if value else "0") <= 0:
        return UNNECESSARY, "", "the first layer also has experts"
    return RENAMED, f"--first-k-dense {value}", ""


def _choices(value: str, given: Mapping[str, str]) -> Decided:
    if "moe-k" in given:
        return UNNECESSARY, "", "set by moe_k"
    return RENAMED, f"--moe-router-topk {value}", ""


def _capacity(value: str, given: Mapping[str, str]) -> Decided:
    choices = first(given, "moe-k", "num-experts-per-tok")
    factor = number(value.split()[0]) if value else 0.0
    if not factor:
        return UNNECESSARY, "", "the capacity is unlimited"
    share = f"{factor / choices:g} of a balanced load" if choices else "the capacity divided by the number of choices"
    reason = f"{share} per expert in Paddle; megapar drops tokens only with --moe-model-type deepspeed_moe"
    return OTHER, "", reason


def _bias_rate(value: str, given: Mapping[str, str]) -> Decided:
    if "moe-use-aux-free" in given and not is_on(given, "moe-use-aux-free"):
        return UNNECESSARY, "", "the model has no expert bias"
    if number(value) <= 0:
        return UNNECESSARY, "", "the expert bias is constant"
    reason = "" if "moe-use-aux-free" in given else "applies if moe_use_aux_free of the model is on"
    return RENAMED, f"--moe-router-bias-update-rate {value}", reason


def _bias(value: str, given: Mapping[str, str]) -> Decided:
    if off(value):
        return UNNECESSARY, "", "the model has no expert bias"
    if "moe-use-aux-free-update-coef" in given or "moe-router-bias-update-rate" in given:
        return IMPLIED, "", "set with its rate"
    return RENAMED, "--moe-router-bias-update-rate 0.001", ""


def _gate_rate(value: str, given: Mapping[str, str]) -> Decided:
    if first(given, "moe-layer-start-index") > 0:
        return UNNECESSARY, "", "no effect: ERNIE's trainer applies it to layer 0 only, which is dense"
    ours = f"--moe-router-lr-ratio {value}"
    return OTHER, ours, "applies to all routers; ERNIE's trainer applies it to layer 0 only"


def _aux(value: str, given: Mapping[str, str]) -> Decided:
    if given.get("moe-router-load-balancing-type", given.get("aux-loss-type", "")) == "seq_aux_loss":
        return RENAMED, f"--moe-seq-aux-loss-coeff {value} --moe-aux-loss-coeff 0", "load balancing loss per sample"
    return RENAMED, f"--moe-aux-loss-coeff {value}", ""


def _aux_of_all_choices(value: str, given: Mapping[str, str]) -> Decided:
    """Scale the coefficient: ERNIE 4.5 counts the tokens of each of the k choices, so its balanced loss is k, not 1."""
    choices = first(given, "moe-k", otherwise=2)
    if is_on(given, "moe-group-experts") or choices == 1:
        return RENAMED, f"--moe-aux-loss-coeff {value}", ""
    ours = f"--moe-aux-loss-coeff {number(value) * choices:g}"
    return (
        RENAMED,
        ours,
        f"multiplied by {choices:g}: a balanced load has a loss of {choices:g} in Paddle, 1 in megapar",
    )


def _usual_aux(value: str, given: Mapping[str, str]) -> Decided:
    if not _has_experts(given):
        return UNNECESSARY, "", "the model has no experts"
    if _is_ernie(given):
        return _aux_of_all_choices("0.01", given)
    return RENAMED, "--moe-aux-loss-coeff 0.01", ""


def _usual_experts(value: str, given: Mapping[str, str]) -> Decided:
    if "hidden-size" not in given:
        return UNNECESSARY, "", "no model sizes are given"
    return RENAMED, "--num-experts 0", "a dense model"


def _group(value: str, given: Mapping[str, str]) -> Decided:
    if value in ("ep", "expert"):
        return IMPLIED, "", "expert ranks are --ep-degree"
    return UNSUPPORTED, "", "layout: experts are distributed over expert ranks, --ep-degree"


def _gate(value: str, given: Mapping[str, str]) -> Decided:
    if value.startswith("top2"):
        return IMPLIED, "", "top-k of --moe-router-topk; the weights of the selected experts sum to one"
    return OTHER, "", "the router is a softmax or sigmoid with top-k"


def _score(value: str, given: Mapping[str, str]) -> Decided:
    if value in ("softmax", "sigmoid"):
        return RENAMED, f"--moe-router-score-function {value}", ""
    return OTHER, "", "router scores are softmax or sigmoid"


def _weights(value: str, given: Mapping[str, str]) -> Decided:
    if off(value):
        return OTHER, "", "the weights of the selected experts sum to one; in the script they keep their scores"
    return IMPLIED, "", "the weights of the selected experts sum to one"


def _groups(flag: str, value: str) -> Decided:
    if number(value) <= 1:
        return UNNECESSARY, "", "experts have no groups"
    return RENAMED, f"{flag} {value}", ""


def _expert_groups(value: str, given: Mapping[str, str]) -> Decided:
    return _groups("--moe-router-num-groups", value)


def _chosen_groups(value: str, given: Mapping[str, str]) -> Decided:
    if first(given, "n-group", "moe-router-num-groups") <= 1:
        return UNNECESSARY, "", "experts have no groups"
    return RENAMED, f"--moe-router-group-topk {value}", ""


def _ahead(value: str, given: Mapping[str, str]) -> Decided:
    if number(value) <= 0:
        return UNNECESSARY, "", "multi-token prediction is off"
    if number(value) > 1:
        return ANOTHER, "", "multi-token prediction has a single block"
    return RENAMED, f"--mtp-depth {value}", ""


def _ahead_weight(value: str, given: Mapping[str, str]) -> Decided:
    if first(given, "multi-token-pred-depth", "num-nextn-predict-layers", "mtp-num-layers") <= 0:
        return UNNECESSARY, "", "multi-token prediction is off"
    return RENAMED, f"--mtp-loss-weight {value}", ""


FUNCTIONS: Mapping[str, Function] = {
    **collected(globals(), "paddle_"),
    "paddle_usual_eps": _usual_model("--layernorm-epsilon 1e-06"),
    "paddle_usual_tie": _usual_model("--untie-embeddings-and-output-weights"),
}
