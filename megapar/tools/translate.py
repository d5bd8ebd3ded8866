"""``megapar translate -- ARGUMENTS``: what a Megatron-LM, MindSpeed or Megatron-DeepSpeed script says, in our flags.

Every argument is accounted for: the same here, renamed, implied by others, unnecessary, or unsupported with the reason.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches

from megapar.compatibility import NOT_BUILT, RULES
from megapar.config.flag import Flag
from megapar.config.read import normal, spellings
from megapar.config.values import BadValue, convert
from megapar.tools.foreign import FOREIGN, IMPLIED, RENAMED, SAME, UNNECESSARY, UNSUPPORTED, VERDICTS

# What scripts of Megatron-LM mean where they do not say it, and trainers here do not.
DEFAULTS: Mapping[str, str] = {
    "normalization": "--normalization layernorm",
    "position-embedding-type": "--position-embedding-type learned",
    "activation": "--activation gelu",
    "add-bias-linear": "--add-bias-linear",
    "attention-dropout": "--attention-dropout 0.1",
    "hidden-dropout": "--hidden-dropout 0.1",
    "num-experts": "--num-experts 0",
}
_ALSO = {
    "activation": ("swiglu",),
    "add-bias-linear": ("disable-bias-linear", "no-add-bias-linear"),
    "position-embedding-type": ("use-rotary-position-embeddings",),
    "num-experts": ("num-moe-experts",),
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
    parser = argparse.ArgumentParser(prog="megapar translate", description=__doc__)
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
    more = [text for name, text in DEFAULTS.items() if not names & {name, *(_ALSO.get(name, ()))}]
    return list(dict.fromkeys(launcher)), list(trainer), more


def describe(found: Sequence[Translated]) -> str:
    """The command, then every argument by verdict."""
    launcher, trainer, more = equivalent(found)
    lines = ["megapar launch " + " ".join([*launcher, "pretrain_moe.py"]) + " \\"]
    lines += [f"    {flags} \\" for flags in trainer]
    lines += [f"    {flags} \\  # the default there" for flags in more]
    lines[-1] = lines[-1].replace(" \\", "", 1)
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
        verdict, ours, reason = _DECIDED[row.ours[1:]](value, given)
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
        ours = f"{flag.spelling} {meaning}"
    else:
        ours = flag.spelling if meaning else "--no-" + flag.spelling[2:]
    if flag.name == "eval_iters" and value.startswith("-"):
        return Translated(written, value, RENAMED, "--eval-interval 0", "no evaluation")
    same = written == flag.spelling or (meaning is False and text == written[2:])
    reason = "" if same or meaning is None else f"means {flag.spelling}"
    return Translated(written, value, SAME if same else RENAMED, ours, reason)


_CHOICES = {
    ("position_embedding_type", "learned_absolute"): "learned",
    ("lr_decay_style", "wsd"): "wsd",
}
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
    if text.startswith("([0]*") and "+[1]*" in text:
        return RENAMED, f"--first-k-dense {text[5:].partition('+')[0]}", ""
    return UNSUPPORTED, "", "only leading layers may be dense (--first-k-dense)"


def _balancing(value: str, given: Mapping[str, str]) -> Decided:
    if value == "aux_loss":
        return IMPLIED, "", "--moe-aux-loss-coeff says it"
    if value == "seq_aux_loss":
        coefficient = given.get("moe-aux-loss-coeff", "COEFFICIENT")
        return RENAMED, f"--moe-seq-aux-loss-coeff {coefficient} --moe-aux-loss-coeff 0", "a loss per sample"
    if value == "none":
        return RENAMED, "--moe-aux-loss-coeff 0", ""
    return UNSUPPORTED, "", "balancing is by auxiliary losses or by the correction bias"


def _strategy(value: str, given: Mapping[str, str]) -> Decided:
    stage = {"no_shard": "1", "optim": "1", "optim_grads": "2", "optim_grads_params": "3"}.get(value)
    if stage is None:
        return UNSUPPORTED, "", "stages are 1, 2 and 3"
    return RENAMED, f"--sharding-stage {stage}", ""


def _positions(value: str, given: Mapping[str, str]) -> Decided:
    if given.get("position-embedding-type") == "rope" or "use-rotary-position-embeddings" in given:
        return IMPLIED, "", "rope learns no positions"
    return UNSUPPORTED, "", "positions are rope or learned"


_DECIDED: Mapping[str, Callable[[str, Mapping[str, str]], Decided]] = {
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
    "positions": _positions,
}
