"""What becomes of every argument of another framework's line: the engine over the tables."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from megapar.compatibility import NOT_BUILT, RULES
from megapar.config.read import Spelling, normal, spellings
from megapar.config.values import FALSE, TRUE, BadValue, convert
from megapar.tools.translation import open_values
from megapar.tools.translation.functions import DECIDING, FUNCTIONS
from megapar.tools.translation.launchers import LAUNCHERS
from megapar.tools.translation.line import Line
from megapar.tools.translation.table import DEFAULTS, FOREIGN, OWN
from megapar.tools.translation.verdict import (
    CHANGING,
    LEFT,
    OTHER,
    RENAMED,
    SAME,
    UNKNOWN,
    UNNECESSARY,
    UNSUPPORTED,
    Foreign,
)

LAUNCH = "megapar launch "
_HARMLESS = ("data", "checkpoint", "logging", "runtime")  # groups of flags that change nothing of a given training
_PLACEHOLDER = re.compile(r"\byour\b|<[^<>]+>|\bpath/to\b|\bxxx+\b", re.IGNORECASE)
_MEGATRON_YAML = ("language-model.", "model-parallel.")  # of its own YAML, as examples/gpt3/gpt_config.yaml
_OFF, _UNSET = "it is off", "nothing is set"
_NOTHING = ("null", "none", "~")
_WORDS = {("position_embedding_type", "learned_absolute"): "learned"}


@dataclass(frozen=True)
class Translated:
    """One argument. ours: what to write here, empty where nothing has to be.

    default: the script does not say it. decides: a value that is left open, and decides what is trained.
    """

    flag: str
    value: str
    verdict: str
    ours: str
    reason: str
    default: bool = False
    decides: bool = False


def translate(
    arguments: Sequence[str], framework: str = "", launcher: Sequence[tuple[str, str]] = ()
) -> list[Translated]:
    """Every argument in its order, launcher's first, without what is meant but not said (``meant``).

    framework: a key of ``FOREIGN``; found by the arguments where it is empty. launcher: (launcher, word) pairs.
    """
    pairs = _pairs(arguments)
    starting = [(tool, *pair) for tool in dict.fromkeys(tool for tool, _ in launcher) for pair in _of(tool, launcher)]
    given = {normal(name): value for _, name, value in starting} | {normal(name): value for name, value in pairs}
    given = _named({name: value for name, value in given.items() if value.lower() not in _NOTHING})
    framework = framework or detect([name for name, _ in pairs])
    items = [_one(name, value, given, LAUNCHERS[tool]) for tool, name, value in starting]
    return items + [_one(name, value, given, FOREIGN[framework]) for name, value in pairs]


def _named(given: Mapping[str, str]) -> dict[str, str]:
    """Also by the last parts of nested names, where no whole name is the same."""
    return {**{name.rpartition(".")[2]: value for name, value in given.items()}, **given}


def _of(tool: str, launcher: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    return _pairs([word for of, word in launcher if of == tool and word])


def framework_of(line: Line) -> str:
    """The framework of a line: by its script, by what starts it, by its arguments."""
    if line.entry is not None and line.entry.framework:
        return line.entry.framework
    if "paddle.distributed.launch" in line.starters:
        return "paddle"
    names = [name for name, _ in _pairs(line.arguments)]
    return "deepspeed" if "deepspeed" in line.starters and detect(names) == "megatron" else detect(names)


def detect(names: Sequence[str]) -> str:
    """The framework whose own arguments are used most; megatron where none is."""
    if any(normal(name).startswith(_MEGATRON_YAML) for name in names):
        return "megatron"
    keys = {key for key in map(normal, names) if key.rpartition(".")[2] not in spellings()}
    counts = {framework: sum(_find(key, own) is not None for key in keys) for framework, own in OWN.items()}
    best = max(counts, key=lambda framework: counts[framework])
    return best if counts[best] else "megatron"


def meant(found: Sequence[Translated], framework: str) -> list[Translated]:
    """What the framework means where the script says nothing, and trainers here mean something else."""
    given = _named({normal(item.flag.lstrip("-")): item.value for item in found if item.verdict != LEFT})
    said = set(_named({normal(item.flag.lstrip("-")): item.value for item in found}))
    items = []
    for names, row in DEFAULTS[framework].items():
        if said.isdisjoint(names.split()) or _off(found, names.split()):
            verdict, ours, reason = _decided(row, "", given)
            if ours or verdict in (*CHANGING, LEFT):
                items.append(Translated("--" + names.split()[0], "", verdict, ours, reason, default=True))
    return items


def _off(found: Sequence[Translated], names: Sequence[str]) -> bool:
    """Those of the names that are there are switched off or have no value: the script says nothing by them."""
    items = [item for item in found if normal(item.flag.lstrip("-")).rpartition(".")[2] in names]
    return all(item.reason in (_OFF, _UNSET) for item in items)


def equivalent(found: Sequence[Translated]) -> tuple[list[str], list[str]]:
    """(flags of the launcher, flags of the trainer), each once: the last one counts, here as there."""
    launcher: dict[str, str] = {}
    trainer: dict[str, None] = {}
    for item in found:
        if item.ours.startswith(LAUNCH):
            flag = item.ours.removeprefix(LAUNCH)
            launcher[flag.split()[0]] = flag  # torchrun's own count stands behind srun's
        elif item.ours:
            trainer.pop(item.ours, None)
            trainer[item.ours] = None
    return list(launcher.values()), list(trainer)


def left_paths(found: Sequence[Translated]) -> list[str]:
    """Our flags for files whose places the script leaves open."""
    keys = [normal(item.flag.lstrip("-")) for item in found if item.verdict == LEFT and not item.decides]
    flags = [spellings()[key].flag for key in keys if key in spellings()]
    return [flag.spelling for flag in flags if flag.group in _HARMLESS and flag.type in ("str", "strings")]


def changing(found: Sequence[Translated]) -> list[Translated]:
    """What makes the run here another training than the script's."""
    return [item for item in found if item.verdict in CHANGING or item.decides]


def _pairs(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """(name without hyphens, values joined); a word that belongs to no argument has an empty name."""
    found: list[tuple[str, list[str]]] = []
    for word in arguments:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            found.append((name, [value] if equals else []))
        elif open_values.is_variable(word) and found and _complete(*found[-1]):
            found.append(("", [word]))
        elif found:
            found[-1][1].append(word)
        else:
            found.append(("", [word]))
    return [(name, shlex.join(_bare(value) for value in values)) for name, values in found]


def _complete(name: str, values: Sequence[str]) -> bool:
    """An argument takes no further value: it is a switch, or has the one that it takes."""
    spelling = spellings().get(normal(name))
    if spelling is not None and (spelling.value is not None or not spelling.flag.takes_value):
        return True
    many = spelling.flag.takes_list if spelling is not None else normal(name).endswith("data-path")
    return not name or (bool(values) and not many)


def _bare(value: str) -> str:
    """Without quotes that a script passes on, as in "--split '99,1,0'" within an array."""
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def _find(key: str, table: Mapping[str, Foreign] | frozenset[str]) -> str | None:
    """The key of a table that an argument goes by: its whole name, or the last part of a nested one."""
    return next((name for name in (key, key.rpartition(".")[2]) if name in table), None)


def _one(name: str, value: str, given: Mapping[str, str], table: Mapping[str, Foreign]) -> Translated:
    written = f"--{name}" if name else ""
    if not name and open_values.is_open(value):
        return Translated("", open_values.said(value), LEFT, "", "further arguments", decides=True)
    if not name:
        return Translated("", value, UNKNOWN, "", "belongs to no argument")
    if value.lower() in _NOTHING:
        return Translated(written, value, UNNECESSARY, "", _UNSET)
    key = normal(name)
    row = _find(key, table)
    reason = _open(value)
    if reason and not (row is not None and "@" not in table[row].ours and "{value}" not in table[row].ours):
        decides = _decides(key, table[row] if row is not None else None)
        return Translated(written, open_values.said(value), LEFT, "", reason, decides=decides)
    if row is not None:
        verdict, ours, why = _decided(table[row], value, given, key)
        decides = verdict == LEFT and table[row].ours[1:] in DECIDING
        return Translated(written, value, verdict, ours, why, decides=decides)
    found = spellings().get(key) or spellings().get(key.rpartition(".")[2])
    if found is not None:
        return _known(written, value, found)
    near = get_close_matches(key, [*spellings(), *table], 2, 0.75)
    hint = f"; near: {', '.join('--' + word for word in near)}" if near else ""
    return Translated(written, value, UNKNOWN, "", f"in no table{hint}")


def _open(value: str) -> str:
    """Why a value is not to be had from the script; empty where it is."""
    if open_values.is_open(value):
        return f"the script takes it from {', '.join(dict.fromkeys(open_values.names(value)))}"
    return "the script has no more than a placeholder" if _PLACEHOLDER.search(value) else ""


def _decides(key: str, row: Foreign | None) -> bool:
    """Whether an argument's value decides what is trained: not where files lie, nor where ranks start."""
    if row is not None and row.ours.startswith("@"):
        return row.ours[1:] in DECIDING
    name = row.ours.split()[0] if row is not None and row.ours else f"--{key}"
    spelling = spellings().get(normal(name.lstrip("-")))
    return spelling is not None and spelling.flag.group not in _HARMLESS


def _decided(row: Foreign, value: str, given: Mapping[str, str], key: str = "") -> tuple[str, str, str]:
    """(verdict, ours, reason) of a row for this value."""
    if row.ours.startswith("@"):
        verdict, ours, reason = FUNCTIONS[row.ours[1:]](value, given)
        return verdict, ours.replace("{name}", key), reason or row.reason
    if value.lower() == "false" and "{value}" not in row.ours:
        return UNNECESSARY, "", _OFF
    if row.verdict == RENAMED and not row.ours:
        return UNSUPPORTED, "", row.reason
    if "{value}" in row.ours and not value:
        return LEFT, "", "no value is given"
    return row.verdict, row.ours.format(name=key, value=value).strip(), row.reason


def _known(written: str, value: str, spelling: Spelling) -> Translated:
    """A flag or an alias of the trainers."""
    flag = spelling.flag
    for rule in RULES:
        if rule.kind == NOT_BUILT and rule.reads[0] == flag.name and "changed" in rule.reads:
            verdict = UNSUPPORTED if flag.group in _HARMLESS else OTHER
            return Translated(written, value, verdict, "", f"{rule.message}")
    if flag.name == "recompute_num_layers" and value == "0":
        return Translated(written, value, UNNECESSARY, "", "no layer is recomputed")
    if spelling.value is not None or not flag.takes_value:
        return _switched(written, value, spelling)
    if not value:
        return Translated(written, value, LEFT, "", "no value is given")
    value_here = _WORDS.get((flag.name, value.lower()), value)
    try:
        converted = convert(flag, shlex.split(value_here) if flag.takes_list else value_here)
    except BadValue as error:
        return Translated(written, value, OTHER, "", str(error))
    ours = f"{flag.spelling} {converted if flag.choices else value_here}"
    same = written == flag.spelling
    return Translated(written, value, SAME if same else RENAMED, ours, "" if same else f"means {flag.spelling}")


def _switched(written: str, value: str, spelling: Spelling) -> Translated:
    """A spelling that stands alone, or in front of true or false."""
    flag, meaning = spelling.flag, spelling.value
    if value.lower() in FALSE and meaning is not None and flag.takes_value:
        return Translated(written, value, UNNECESSARY, "", _OFF)
    if flag.takes_value:
        ours = f"{flag.spelling} {' '.join(meaning) if isinstance(meaning, tuple) else meaning}"
        return Translated(written, value, RENAMED, ours, f"means {flag.spelling}")
    if value.lower() not in ("", *TRUE, *FALSE):
        if flag.type == "switch" and value.lower() in (flag.choices or ()):
            return Translated(written, value, SAME, f"{flag.spelling} {value.lower()}", "")
        return Translated(written, value, UNKNOWN, "", f"{flag.spelling} takes no value")
    on = (meaning is not False) == (value.lower() not in FALSE)
    ours = flag.spelling if on else "--no-" + flag.spelling[2:]
    same = written == flag.spelling or spelling.text == written[2:]
    return Translated(written, value, SAME if same else RENAMED, ours, "" if same else f"means {flag.spelling}")
