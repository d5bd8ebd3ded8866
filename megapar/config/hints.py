"""Suggestions for mistakes: names that other programs use, similar names of flags and files, numbers with units."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import MappingProxyType

from megapar.schema.rule import either

TRANSLATE = (
    "--help all lists all flags; `megapar translate -- ARGUMENTS` translates those of Megatron-LM, MindSpeed, "
    "DeepSpeed and PaddlePaddle."
)


def _names(text: str) -> dict[str, str]:
    """Parse lines of the form ``names | hint``; a line ends in a backslash if it is continued."""
    pairs = (line.split("|") for line in text.replace("\\\n", "").strip().splitlines())
    return {name: hint.strip() for names, hint in pairs for name in names.split()}


ELSEWHERE: Mapping[str, str] = MappingProxyType(
    _names(Path(__file__).with_name("elsewhere.txt").read_text(encoding="utf-8").partition("\n\n")[2])
)

CHOICES: Mapping[str, str] = MappingProxyType(
    _names("""
gpu nvidia | cuda
ascend | npu
float float32 | fp32
bfloat16 | bf16
half float16 | fp16
double float64 | fp64
1-sqrt | minus_sqrt
f-then-b fthenb | gpipe
zb zb-h1 zerobubble dualpipe dualpipev zb-v | zero_bubble
cosine-with-restarts cosine_with_restarts cosine-annealing | cosine
""")
)


FEATURES = Path(__file__).with_name("features.txt")
"""Features of Megatron-LM that megapar does not have: sections ``[verdict | reason]``, each with its arguments."""


@cache
def absent_features() -> Mapping[str, str]:
    """Return the reasons why arguments of Megatron-LM have no flag here, by their names."""
    found: dict[str, str] = {}
    reason = ""
    for line in FEATURES.read_text(encoding="utf-8").partition("\n\n")[2].splitlines():
        if line.startswith("["):
            reason = line.rstrip("]").partition(" | ")[2]
        else:
            found |= {name.rstrip("="): reason for name in line.split()}
    return MappingProxyType(found)


def near_flag(name: str, known: Iterable[str]) -> str:
    """Suggest a replacement for an unknown flag; all names are in normal form, without leading hyphens.

    What other programs call it comes before names that are spelled alike.
    """
    if name in ELSEWHERE:
        hint = ELSEWHERE[name]
        return f"Did you mean {hint}?" if hint.startswith("--") else hint
    if reason := absent_features().get(name):
        return f"In Megatron-LM this is a feature that megapar does not have: {reason}."
    known = list(known)
    longer = sorted((other for other in known if f"-{name}-" in f"-{other}-"), key=len)[:3]
    close = longer or get_close_matches(name, known, 3, 0.85)
    near = close or get_close_matches(name, known, 3, 0.65)
    if not near:
        return TRANSLATE
    asked = f"Did you mean {either([f'--{other}' for other in near])}?"
    return asked if close else f"{asked} {TRANSLATE}"  # as likely another program's flag as a mistyped one


def of_block(name: str) -> str:
    """Suggest a replacement for a block of another program; "" if only a single flag is known for it."""
    hint = ELSEWHERE.get(name, "")
    return "" if hint.startswith("--") else hint


def near_choice(value: str, choices: Sequence[str]) -> str:
    """Suggest the choice most similar to a value, as a question; "" if there is none."""
    other = CHOICES.get(value.lower())
    near = [other] if other in choices else get_close_matches(value.lower(), choices, 1, 0.6)
    return f"Did you mean {near[0]}?" if near else ""


_SECONDS = {
    "ms": 0.001,
    "s": 1,
    "sec": 1,
    "second": 1,
    "m": 60,
    "min": 60,
    "minute": 60,
    "h": 3600,
    "hour": 3600,
    "d": 86400,
}
_MEGABYTES = {"m": 1, "mb": 1, "mib": 1, "g": 1024, "gb": 1024, "gib": 1024, "tb": 1 << 20, "tib": 1 << 20}
_MEASURES: Mapping[str, tuple[Mapping[str, float], float, str]] = {
    **{"seconds": (_SECONDS, 1, "seconds"), "minutes": (_SECONDS, 60, "minutes")},
    **{"MB": (_MEGABYTES, 1, "MB (2^20 bytes)"), "GiB": (_MEGABYTES, 1024, "GiB (2^30 bytes)")},
}
"""Units of flags: suffixes with their factors, the factor of the unit itself, its name."""


def plain_number(text: str, unit: str, *, whole: bool) -> str:
    """Suggest a plain number for one with a unit, commas or, if it is ``whole``, a multiplier; "" for other texts."""
    text = text.strip()
    if re.fullmatch(r"[+-]?[1-9]\d{0,2}(,\d{3})+", text):
        return f"Write it without commas: {text.replace(',', '')}."
    if not whole and re.fullmatch(r"[+-]?\d+,\d+", text):
        return f"Write it with a decimal point: {text.replace(',', '.')}."
    match = re.fullmatch(r"([+-]?\d+(?:\.\d+)?)\s*([A-Za-z]+)", text)
    if match is None:
        return ""
    number, suffix = match.groups()
    suffix = suffix.lower()
    if unit in _MEASURES:
        factors, own, name = _MEASURES[unit]
        factor = factors.get(suffix, factors.get(suffix.removesuffix("s")))
        value = "" if factor is None else f": {float(number) * factor / own:.10g}"
        return f"Write only the number, in {name}{value}."
    power = {"k": 1, "m": 2, "b": 3, "g": 3, "t": 4}.get(suffix)
    if power:
        return f"Write all digits: {float(number) * 1000**power:.0f}, or {float(number) * 1024**power:.0f}." * whole
    known = not unit or suffix.rstrip("s") == unit.rstrip("s")
    return f"Write only the number{f', in {unit}' if unit else ''}{f': {number}' if known else ''}."
