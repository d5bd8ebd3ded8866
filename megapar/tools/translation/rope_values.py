"""Value-dependent translation of rotary positions and their scaling, of Megatron-LM, MindSpeed and MindSpeed-LLM.

Megatron-LM scales by Llama 3's formula with --use-rope-scaling, by a constant with
--rotary-seq-len-interpolation-factor, and in multi-latent attention by YaRN with --rotary-scaling-factor. MindSpeed
names the formula in --rope-scaling-type. Sources: megatron/core/models/common/embeddings of NVIDIA/Megatron-LM, and
mindspeed/core/models/common/embeddings of MindSpeed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from megapar.tools.translation.latent_values import is_latent
from megapar.tools.translation.number import first, number
from megapar.tools.translation.verdict import ANOTHER, IMPLIED, RENAMED, SAME, UNNECESSARY, Decided, Given

_KNOWN = ("llama3", "yarn")


def _factor(given: Given) -> float:
    names = (
        ("rope-scaling-factor", "yarn-scaling-factor") if "rope-scaling-type" in given else ("rotary-scaling-factor",)
    )
    return next((first(given, name, otherwise=1.0) for name in names if name in given), 1.0)


def _scaling(given: Given) -> str:
    """Return the formula that a script scales by, "" for none."""
    if "rope-scaling-type" in given:
        return given["rope-scaling-type"]
    if is_latent(given):
        return "yarn" if given.get("rope-type", "yarn") == "yarn" and _factor(given) != 1 else ""
    if "use-rope-scaling" in given:
        return "llama3"
    return "linear" if first(given, "rotary-seq-len-interpolation-factor", otherwise=1.0) not in (0.0, 1.0) else ""


def _only(kind: str, flag: str) -> Callable[[str, Given], Decided]:
    """Return the function of an argument that one formula reads."""

    def decide(value: str, given: Given) -> Decided:
        if _scaling(given) != kind:
            return UNNECESSARY, "", f"no effect without scaling by {kind}"
        return RENAMED, f"{flag} {value}", ""

    return decide


def _type(value: str, given: Given) -> Decided:
    if value in _KNOWN:
        return SAME, f"--rope-scaling-type {value}", ""
    return ANOTHER, "", f"RoPE is scaled by linear, llama3 or yarn, not by {value}"


def _rope_type(value: str, given: Given) -> Decided:
    if value == "rope":
        return IMPLIED, "", "RoPE is scaled by other arguments only"
    if not is_latent(given):
        return UNNECESSARY, "", "no effect in Megatron-LM without --multi-latent-attention"
    if _scaling(given) == "yarn":
        return IMPLIED, "", "set by --rotary-scaling-factor"
    return UNNECESSARY, "", "without --rotary-scaling-factor YaRN's factor is one"


def _llama3(value: str, given: Given) -> Decided:
    if is_latent(given):
        return UNNECESSARY, "", "no effect in Megatron-LM with --multi-latent-attention"
    return RENAMED, "--rope-scaling-type llama3", ""


def _rope_factor(value: str, given: Given) -> Decided:
    if _scaling(given) not in _KNOWN or ("rope-scaling-type" not in given and is_latent(given)):
        return UNNECESSARY, "", "no effect without RoPE scaling"
    return SAME, f"--rope-scaling-factor {value}", ""


def _latent_factor(value: str, given: Given) -> Decided:
    if "rope-scaling-type" in given or _scaling(given) != "yarn":
        reason = "the factor is one" if number(value, 1.0) == 1 else "no effect without YaRN in multi-latent attention"
        return UNNECESSARY, "", reason
    return RENAMED, f"--rope-scaling-type yarn --rope-scaling-factor {value}", ""


def _interpolated(value: str, given: Given) -> Decided:
    if number(value, 1.0) in (0.0, 1.0):
        return UNNECESSARY, "", "the factor is one"
    if _scaling(given) != "linear":
        return ANOTHER, "", "RoPE is scaled by one formula: linear, llama3 or yarn"
    return RENAMED, f"--rope-scaling-type linear --rope-scaling-factor {value}", ""


def _original(value: str, given: Given) -> Decided:
    if _scaling(given) not in _KNOWN or "use-rope-scaling" in given:
        return UNNECESSARY, "", "no effect without scaling by YaRN"
    return SAME, f"--original-max-position-embeddings {value}", ""


def _mscale(value: str, given: Given) -> Decided:
    """Translate the numerator of YaRN's factor on rotated features; without a denominator that is 1 in Megatron-LM."""
    if _scaling(given) != "yarn":
        return UNNECESSARY, "", "no effect without scaling by yarn"
    names = ("rope-scaling-mscale-all-dim", "mscale-all-dim")
    if any(first(given, name) for name in names) and number(value, 1.0):
        return SAME, f"--mscale {value}", ""
    if number(value, 1.0) == 1:
        return UNNECESSARY, "", "one, as without --mscale"
    return RENAMED, f"--rope-attention-factor {0.1 * number(value, 1.0) * math.log(_factor(given)) + 1}", ""


def _mscale_all_dim(value: str, given: Given) -> Decided:
    if _scaling(given) != "yarn":
        return UNNECESSARY, "", "no effect without scaling by yarn"
    if number(value, 0.0) == 0:
        return UNNECESSARY, "", "off"
    if "mscale" in given or "rope-scaling-mscale" in given:
        return SAME, f"--mscale-all-dim {value}", ""
    return RENAMED, f"--mscale 1.0 --mscale-all-dim {value}", "--mscale is 1 by default"


def _share(value: str, given: Given) -> Decided:
    if number(value, 1.0) in (0.0, 1.0):
        return UNNECESSARY, "", "RoPE rotates all features of a head"
    if is_latent(given):
        return ANOTHER, "", "in multi-latent attention all features of --qk-pos-emb-head-dim are rotated"
    return SAME, f"--rotary-percent {value}", ""


DECIDED: Mapping[str, Callable[[str, Given], Decided]] = {
    "rope_scaling_type": _type,
    "rope_type": _rope_type,
    "rope_llama3": _llama3,
    "rope_factor": _rope_factor,
    "rope_latent_factor": _latent_factor,
    "rope_interpolated": _interpolated,
    "rope_original": _original,
    "rope_beta_fast": _only("yarn", "--beta-fast"),
    "rope_beta_slow": _only("yarn", "--beta-slow"),
    "rope_low_freq": _only("llama3", "--low-freq-factor"),
    "rope_high_freq": _only("llama3", "--high-freq-factor"),
    "rope_mscale": _mscale,
    "rope_mscale_all_dim": _mscale_all_dim,
    "rotary_share": _share,
}
