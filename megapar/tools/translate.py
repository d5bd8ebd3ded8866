"""``megapar translate -- ARGUMENTS``: what a Megatron-LM, MindSpeed or Megatron-DeepSpeed script says, in our flags.

Every argument is accounted for: the same here, renamed, implied by others, unnecessary, or unsupported with the reason.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches

from megapar.compatibility import NOT_BUILT, RULES
from megapar.config.flag import Flag
from megapar.config.read import normal, spellings
from megapar.config.values import BadValue, convert
from megapar.tools.parser import Parser
from megapar.tools.translation.decided import DECIDED
from megapar.tools.translation.table import ALL as FOREIGN
from megapar.tools.translation.verdict import RENAMED, SAME, UNNECESSARY, UNSUPPORTED, VERDICTS

# What scripts of Megatron-LM mean where they do not say it, and trainers here do not.
DEFAULTS: Mapping[str, str] = {
    "normalization": "--normalization layernorm",
    "position-embedding-type": "--position-embedding-type learned",
    "activation": "--activation gelu",
    "add-bias-linear": "--add-bias-linear",
    "attention-dropout": "--attention-dropout 0.1",
    "hidden-dropout": "--hidden-dropout 0.1",
    "num-experts": "--num-experts 0",
    "moe-aux-loss-coeff": "--moe-aux-loss-coeff 0",
}
_OF_EXPERTS = ("moe-aux-loss-coeff",)
_ALSO = {
    "activation": ("swiglu",),
    "add-bias-linear": ("disable-bias-linear", "no-add-bias-linear"),
    "position-embedding-type": ("use-rotary-position-embeddings",),
    "num-experts": ("num-moe-experts",),
    "moe-aux-loss-coeff": ("moe-loss-coeff",),
}


@dataclass(frozen=True)
class Translated:
    """One argument. ours: what to write here, empty where nothing has to be."""

    flag: str
    value: str
    verdict: str
    ours: str
    reason: str


def main(argv: Sequence[str]) -> int:
    """0 translated, whatever was found; 2 where there is nothing to translate."""
    parser = Parser(prog="megapar translate", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print a list of objects")
    own, arguments = _cut(argv)
    asked = parser.parse_args(own)
    found = translate(arguments)
    if not found:
        parser.error("nothing to translate: megapar translate -- --num-layers 96 ...")
    if asked.json:
        print(json.dumps([asdict(item) for item in found]))
    else:
        sys.stdout.write(describe(found))
    return 0


def _cut(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Own options in front of ``--``, arguments behind it."""
    words = list(argv)
    if "--" in words:
        place = words.index("--")
        return words[:place], words[place + 1 :]
    own = [word for word in words if word in ("--json", "-h", "--help")]
    return own, [word for word in words if word not in own]


def translate(arguments: Sequence[str]) -> list[Translated]:
    """Every argument in its order."""
    pairs = list(_pairs(arguments))
    given = {normal(name): value for name, value in pairs}
    return [_one(name, value, given) for name, value in pairs]


def equivalent(found: Sequence[Translated]) -> tuple[list[str], list[str], list[str]]:
    """(flags of the launcher, flags of the trainer, defaults of those scripts that differ from those here)."""
    launcher: list[str] = []
    trainer: dict[str, str] = {}
    for item in found:
        if item.ours.startswith("megapar launch "):
            launcher.append(item.ours.removeprefix("megapar launch "))
        elif item.ours:
            trainer.setdefault(item.ours, item.ours)
    names = {normal(item.flag.lstrip("-")) for item in found}
    missing = [name for name in DEFAULTS if not names & {name, *(_ALSO.get(name, ()))}]
    more = [DEFAULTS[name] for name in missing if name not in _OF_EXPERTS or "num-experts" not in missing]
    return list(dict.fromkeys(launcher)), list(trainer), more


def describe(found: Sequence[Translated]) -> str:
    """The command, then every argument by verdict."""
    launcher, trainer, more = equivalent(found)
    lines = ["megapar launch " + " ".join([*launcher, "pretrain_moe.py"]) + " \\"]
    lines += [f"    {flags} \\" for flags in [*trainer, *more]]  # no comments: it is there to be pasted
    lines[-1] = lines[-1].removesuffix(" \\")
    lines += (
        ["", f"added ({len(more)}): defaults there, and others here", *(f"  {flags}" for flags in more)] if more else []
    )
    for verdict in VERDICTS:
        rows = [item for item in found if item.verdict == verdict]
        lines += ["", f"{verdict} ({len(rows)})"] if rows else []
        for item in rows:
            said = f"{item.flag} {item.value}".strip()
            arrow = f" -> {item.ours}" if item.ours and item.ours != said else ""
            lines.append(f"  {said}{arrow}" + (f": {item.reason}" if item.reason else ""))
    return "\n".join(lines) + "\n"


def _pairs(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """(name without hyphens, values joined); a word that belongs to no argument has an empty name."""
    found: list[tuple[str, list[str]]] = []
    for word in arguments:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            found.append((name, [value] if equals else []))
        elif found:
            found[-1][1].append(word)
        else:
            found.append(("", [word]))
    return [(name, shlex.join(values)) for name, values in found]


def _one(name: str, value: str, given: Mapping[str, str]) -> Translated:
    written = f"--{name}" if name else ""
    if not name:
        return Translated("", value, UNSUPPORTED, "", "stands in front of every argument")
    key = normal(name)
    row = FOREIGN.get(key)
    if row is not None:
        if not row.ours.startswith("@"):
            verdict = row.verdict if row.ours or row.verdict != RENAMED else UNSUPPORTED
            return Translated(written, value, verdict, row.ours.format(name=key, value=value).strip(), row.reason)
        verdict, ours, reason = DECIDED[row.ours[1:]](value, given)
        return Translated(written, value, verdict, ours, reason or row.reason)
    spelling = spellings().get(key)
    if spelling is None:
        near = get_close_matches(key, [*spellings(), *FOREIGN], 2, 0.75)
        hint = f"; near: {', '.join('--' + word for word in near)}" if near else ""
        return Translated(written, value, UNSUPPORTED, "", f"no such flag here{hint}")
    return _known(written, value, spelling.flag, spelling.value, spelling.text)


def _known(written: str, value: str, flag: Flag, meaning: object, text: str) -> Translated:
    """A flag or an alias of the trainers."""
    for rule in RULES:
        if rule.kind == NOT_BUILT and rule.reads[0] == flag.name and "changed" in rule.reads:
            return Translated(written, value, UNSUPPORTED, "", f"{rule.message}")
    if flag.name == "recompute_num_layers" and value == "0":
        return Translated(written, value, UNNECESSARY, "", "no layer is recomputed")
    if flag.choices and value:
        value_here = _CHOICES.get((flag.name, value.lower()), value)
        try:
            value_here = str(convert(flag, value_here))
        except BadValue as error:
            return Translated(written, value, UNSUPPORTED, "", str(error))
        ours = f"{flag.spelling} {value_here}"
    elif meaning is None:
        ours = f"{flag.spelling} {value}".strip()
    elif flag.takes_value:
        ours = f"{flag.spelling} {' '.join(meaning) if isinstance(meaning, tuple) else meaning}"
    else:
        ours = flag.spelling if meaning else "--no-" + flag.spelling[2:]
    same = written == flag.spelling or (meaning is False and text == written[2:])
    reason = "" if same or meaning is None else f"means {flag.spelling}"
    return Translated(written, value, SAME if same else RENAMED, ours, reason)


_CHOICES = {
    ("position_embedding_type", "learned_absolute"): "learned",
    ("lr_decay_style", "wsd"): "wsd",
}
