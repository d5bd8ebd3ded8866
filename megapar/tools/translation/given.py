"""Facts about a script that follow from its arguments, by the names that conditions of rows have for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megapar.config.values import FALSE
from megapar.tools.translation.number import first, number
from megapar.tools.translation.verdict import Given

# Arguments that only ERNIE 4.5's trainer has. Its schedule and defaults differ from PaddleNLP's.
ERNIE_4_5 = ("moe-group", "base-seq-length", "moe-gate-lr-ratio", "moe-use-aux-free-update-coef", "use-sp-callback")


def off(value: str) -> bool:
    """Return True if a switch with this value is off. A switch without a value is on."""
    return value.lower() in (*FALSE, "none", "null")


def is_on(given: Given, *names: str) -> bool:
    """Return True if one of these arguments is given and not off."""
    return any(name in given and not off(given[name]) for name in names)


# Megatron-LM and its extensions.


def is_latent(given: Given) -> bool:
    """Return True if the command's attention is multi-latent attention."""
    names = ("multi-latent-attention", "multi-head-latent-attention")
    return any(name in given and given[name].lower() not in ("false", "off", "0") for name in names)


def scaling(given: Given) -> str:
    """Return the formula by which a script scales RoPE, "" for none."""
    if "rope-scaling-type" in given:
        return given["rope-scaling-type"]
    if is_latent(given):
        return "yarn" if given.get("rope-type", "yarn") == "yarn" and scaling_factor(given) != 1 else ""
    if "use-rope-scaling" in given:
        return "llama3"
    return "linear" if first(given, "rotary-seq-len-interpolation-factor", otherwise=1.0) not in (0.0, 1.0) else ""


def scaling_factor(given: Given) -> float:
    """Return the factor of RoPE's scaling, 1 if it is not set."""
    names = (
        ("rope-scaling-factor", "yarn-scaling-factor") if "rope-scaling-type" in given else ("rotary-scaling-factor",)
    )
    return next((first(given, name, otherwise=1.0) for name in names if name in given), 1.0)


def _has_experts(given: Given) -> bool:
    counts = given.get("num-experts", given.get("num-moe-experts", "")).split()
    return bool(counts) and counts != ["1"]


def _per_sample(given: Given) -> bool:
    return "seq-aux" in given or given.get("moe-router-load-balancing-type") == "seq_aux_loss"


def _holds_out(given: Given) -> bool:
    """Return True if some data are held out for evaluation."""
    if "mock-data" in given or "split" not in given:
        return True
    return sum([number(word) for word in given["split"].strip("'\"").split(",")][1:2]) > 0


def _evaluates(given: Given) -> bool:
    return first(given, "eval-iters", otherwise=100) > 0 and "eval-interval" in given and _holds_out(given)


# Paddle.


def by_ernie_4_5(given: Given) -> bool:
    """Return True if the arguments are for ERNIE 4.5's trainer."""
    return any(name in given for name in ERNIE_4_5)


def _evaluates_in_paddle(given: Given) -> bool:
    return is_on(given, "do-eval") or given.get("evaluation-strategy", "no") == "steps"


FACTS: Mapping[str, Callable[[Given], bool]] = {
    "latent": is_latent,
    "scaled": lambda given: scaling(given) in ("llama3", "yarn"),
    "scaled by linear": lambda given: scaling(given) == "linear",
    "scaled by llama3": lambda given: scaling(given) == "llama3",
    "scaled by yarn": lambda given: scaling(given) == "yarn",
    "experts": _has_experts,
    "balanced per sample": _per_sample,
    "limited": lambda given: any(name.endswith("capacity-factor") for name in given),
    "loss scaled": lambda given: given.get("fp16", "false").lower() not in ("false", "0"),
    "held out": _holds_out,
    "evaluated": _evaluates,
    "ernie 4.5": by_ernie_4_5,
    "evaluated in paddle": _evaluates_in_paddle,
}
