"""Translation of each argument of another framework's command line, driven by the tables."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from megapar.compatibility import NOT_BUILT, RULES
from megapar.config.read import Spelling, normal, spellings
from megapar.config.values import FALSE, TRUE, BadValue, convert
from megapar.tools.translation import launchers, of_megatron, of_paddle, open_values
from megapar.tools.translation.cases import Function, NotANumberError, cases
from megapar.tools.translation.launchers import LAUNCHERS
from megapar.tools.translation.source import WRAPPERS, Line
from megapar.tools.translation.table import DEFAULTS, DISTINCTIVE, FOREIGN, SIGNS
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
_HARMLESS = ("data", "checkpoint", "logging", "runtime")  # groups of flags that do not change the training
_PLACEHOLDER = re.compile(r"\byour\b|<[^<>]+>|\bpath/to\b|\bxxx+\b", re.IGNORECASE)
_OFF, _UNSET = "switched off", "it is not set"
_NOTHING = ("null", "none", "~")
_NONE_IS_ONE = ("moe-router-load-balancing-type", "position-embedding-type")  # none is a regular choice
_FILE_OF_MEGATRON = ("language-model.", "model-parallel.")  # sections of Megatron-LM's YAML
_OF_PADDLE = re.compile("degree|sharding|parallel|moe|amp|segment|pipeline")
_SWITCHED_OFF = tuple(word for word in FALSE if word != "0")  # 0 may also be a number
_OF_THE_LAUNCHER = {
    **{"@~node_rank": "--node-rank", "@~rendezvous": "--rdzv-endpoint", "@~ranks_here": "--nproc-per-node"},
    **{"@~worker_num": "--nnodes", "@~hosts": "--nnodes", "@~num_processes": "--nproc-per-node"},
}
_WORDS = {("position_embedding_type", "learned_absolute"): "learned"}


@dataclass(frozen=True)
class Translated:
    """Translation of one argument.

    Attributes:
        flag: Argument as the script has it; empty for a word that belongs to no argument.
        verdict: One of ``verdict.VERDICTS``.
        ours: megapar flags to write; empty if none are needed.
        default: The script does not set it; the framework's default differs from megapar's.
        decides: The script leaves the value open, and it affects the training.
        here: The megapar flag of a value that is left open; empty if there is none.
    """

    flag: str
    value: str
    verdict: str
    ours: str
    reason: str
    default: bool = False
    decides: bool = False
    here: str = ""


def translate(
    arguments: Sequence[str], framework: str = "", launcher: Sequence[tuple[str, str]] = ()
) -> list[Translated]:
    """Translate all arguments in order, the launcher's first, without implicit defaults (``implicit_defaults``).

    Args:
        framework: Key of ``FOREIGN``; detected from the arguments if empty.
        launcher: (launcher, word) pairs.
    """
    framework = framework or detect([name for name, _ in _pairs(arguments)])
    pairs = _pairs(arguments, FOREIGN[framework])
    starting = {tool: _arguments_of(tool, launcher) for tool, _ in launcher}
    before = [pair for tool in starting if tool in LAUNCHERS for pair in starting[tool]]
    given = {normal(name): value for name, value in (*before, *pairs)}
    given = _effective({name: value for name, value in given.items() if not _unset(name, value)}, framework)
    items = [item for tool, its_pairs in starting.items() for item in _translate_program(tool, its_pairs, given)]
    items += [_translate_argument(name, value, given, FOREIGN[framework]) for name, value in pairs]
    return [_as_written(item) for item in items]


def _as_written(item: Translated) -> Translated:
    """Return a translation with the expressions of the script in place of their marks."""
    flag, value, ours, reason = map(open_values.as_written, (item.flag, item.value, item.ours, item.reason))
    return replace(item, flag=flag, value=value, ours=ours, reason=reason)


def _unset(name: str, value: str) -> bool:
    """Return True if the value means "not set"."""
    return value.lower() in _NOTHING and not (value == "none" and name.rpartition(".")[2] in _NONE_IS_ONE)


def _effective(given: Mapping[str, str], framework: str) -> dict[str, str]:
    """Return the arguments that others may depend on. For Megatron, a switch that is false in a file is absent."""
    if framework == "paddle":
        return _with_last_parts(given)
    return _with_last_parts({name: value for name, value in given.items() if value.lower() not in _SWITCHED_OFF})


def _with_last_parts(given: Mapping[str, str]) -> dict[str, str]:
    """Add the last parts of nested names as keys, unless an argument has that name."""
    return {**{name.rpartition(".")[2]: value for name, value in given.items()}, **given}


def _arguments_of(tool: str, launcher: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    words = [word for of, word in launcher if of == tool and word]
    return [("", shlex.join(words))] if tool in WRAPPERS else _pairs(words, LAUNCHERS.get(tool, {}), single=True)


def _translate_program(tool: str, pairs: Sequence[tuple[str, str]], given: Mapping[str, str]) -> list[Translated]:
    """Translate a launcher's arguments; a program in front of it is one item, as is a program that is not known."""
    if tool in WRAPPERS:
        written = f"{tool} {pairs[0][1]}".strip()
        reason = "megapar launch starts Python itself" if tool == "python" else "keep it in front of megapar launch"
        return [Translated("", written, UNNECESSARY, "", reason)] if written != "python" else []
    table, items = LAUNCHERS.get(tool, {}), []
    if tool not in LAUNCHERS:
        is_open, reason = (
            open_values.is_open(tool),
            "it may start the ranks: set --nproc-per-node, --nnodes, --rdzv-endpoint",
        )
        items.append(Translated("", tool, LEFT if is_open else UNKNOWN, "", reason, decides=is_open))
    for name, value in pairs:
        if name and _find(normal(name), table) is None:
            items.append(Translated(f"--{name}", value, UNKNOWN, "", f"no known argument of {tool}"))
        else:
            items.append(_translate_argument(name, value, given, table))
    return items


def framework_of(line: Line) -> str:
    """Return the framework of a line, identified by its script, its launcher or its arguments."""
    if line.entry is not None and line.entry.framework:
        return line.entry.framework
    if "paddle.distributed.launch" in line.starters:
        return "paddle"
    names = [name for name, _ in _pairs(line.arguments)]
    found = detect(names)
    if line.entry is not None and found == "paddle":
        return "megatron"  # whose entry scripts they are
    return "deepspeed" if "deepspeed" in line.starters and found == "megatron" else found


def guess(line: Line, framework: str) -> str:
    """Return "" if a known script, launcher or section of a file names the framework, else how sure the guess is.

    A guess is "likely" if at most a tenth of the arguments are unknown to the framework, otherwise "open". Most names
    of Paddle's trainer are Hugging Face's, too: one of Paddle's own features has to be among them.
    """
    keys = {normal(name) for name, _ in _pairs(line.arguments) if name}
    named = {"paddle.distributed.launch", "deepspeed"} & set(line.starters)
    if line.entry is not None or named or any(key.startswith(_FILE_OF_MEGATRON) for key in keys):
        return ""
    unknown = [key for key in keys if not _find(key, FOREIGN[framework]) and not _find(key, frozenset(spellings()))]
    has_paddles = framework != "paddle" or any(map(_OF_PADDLE.search, keys))
    return "likely" if has_paddles and 10 * len(unknown) <= len(keys) else "open"


def detect(names: Sequence[str]) -> str:
    """Return the framework with the most arguments that only it has; megatron if there are none."""
    if any(normal(name).startswith(_FILE_OF_MEGATRON) for name in names):
        return "megatron"
    ours = frozenset(spellings()) - SIGNS
    keys = {key for key in map(normal, names) if _find(key, ours) is None}
    counts = {framework: sum(_find(key, signs) is not None for key in keys) for framework, signs in DISTINCTIVE.items()}
    best = max(counts, key=lambda framework: counts[framework])
    return best if counts[best] else "megatron"


def implicit_defaults(found: Sequence[Translated], framework: str) -> list[Translated]:
    """Return the framework's defaults that the script does not override and that differ from megapar's."""
    given = {normal(item.flag.lstrip("-")): item.value for item in found if item.verdict != LEFT}
    given = _effective(given, framework)
    in_script = set(_with_last_parts({normal(item.flag.lstrip("-")): item.value for item in found}))
    written = {flag for item in found for flag in _flags(item.ours)}
    items = []
    for names, row in DEFAULTS[framework].items():
        if in_script.isdisjoint(names.split()) or _off(found, names.split()):
            value = row.ours.removeprefix("= ")  # of an argument, translated by its row
            if value != row.ours:
                row = replace(FOREIGN[framework][names.split()[0]], reason=row.reason)
            verdict, ours, reason = _apply(row, "" if value == row.ours else value, given)
            if ours and written.issuperset(_flags(ours)):
                continue  # set by megapar's own spelling
            if ours or verdict in (*CHANGING, LEFT):
                items.append(Translated("--" + names.split()[0], "", verdict, ours, reason, default=True))
    return items


def _flags(ours: str) -> tuple[str, ...]:
    return tuple(word for word in ours.split() if word.startswith("--"))


def _off(found: Sequence[Translated], names: Sequence[str]) -> bool:
    """Return True if all arguments with these names are switched off or not set, as if they were absent."""
    items = [item for item in found if normal(item.flag.lstrip("-")).rpartition(".")[2] in names]
    return all(item.reason in (_OFF, _UNSET) for item in items)


def equivalent(found: Sequence[Translated]) -> tuple[list[str], list[str]]:
    """Return (flags of the launcher, flags of the trainer), each once. The last occurrence wins, as in argparse."""
    launcher: dict[str, str] = {}
    trainer: dict[tuple[str, ...], str] = {}
    for item in found:
        if item.ours.startswith(LAUNCH):
            flag = item.ours.removeprefix(LAUNCH)
            launcher[flag.split()[0]] = flag  # torchrun's count comes after srun's and wins
        elif item.ours:
            key = _flags(item.ours)
            if any(one is not None and one.flag.each for one in (spellings().get(normal(flag[2:])) for flag in key)):
                key = (item.ours,)  # repeatable: every occurrence counts
            trainer.pop(key, None)
            trainer[key] = item.ours
    return list(launcher.values()), list(trainer.values())


def left_paths(found: Sequence[Translated]) -> list[str]:
    """Return the megapar flags of paths that the script leaves open."""
    keys = [normal(item.here.lstrip("-")) for item in found if item.verdict == LEFT and not item.decides]
    flags = [spellings()[key].flag for key in keys if key in spellings()]
    return [flag.spelling for flag in flags if flag.group in _HARMLESS and flag.type in ("str", "strings")]


def changing(found: Sequence[Translated]) -> list[Translated]:
    """Return the arguments that make the megapar training differ from the script's."""
    return [item for item in found if item.verdict in CHANGING or item.decides]


def _pairs(
    arguments: Sequence[str], table: Mapping[str, Foreign] | None = None, single: bool = False
) -> list[tuple[str, str]]:
    """Return (name without hyphens, joined values) pairs; the name is empty for a word that belongs to no argument.

    With ``single``, an argument has one value at most.
    """
    found: list[tuple[str, list[str]]] = []
    for word in arguments:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            found.append((name, [value] if equals else []))
        elif (
            found
            and not (single and found[-1][1] and found[-1][0] != "mca")
            and _belongs(word, *found[-1], table or {})
        ):
            found[-1][1].append(word)
        else:
            found.append(("", [word]))
    return [(name, shlex.join(_unquoted(value) for value in values)) for name, values in found]


def _belongs(word: str, name: str, values: Sequence[str], table: Mapping[str, Foreign]) -> bool:
    """Return True if a word is a value of the argument before it.

    An unset variable may hold further arguments: it is a value only of an argument that surely takes one.
    """
    key, is_open = normal(name), word.startswith(open_values.BEGIN)
    row = table.get(_find(key, table) or "")
    spelling = spellings().get(key) or spellings().get(key.rpartition(".")[2])
    valued = spelling is not None and spelling.value is None and spelling.flag.takes_value
    if values or not name:
        listed = key.endswith("data-path") or (spelling is not None and spelling.flag.takes_list)
        return bool(name and listed) or not is_open
    if row.takes_value if row is not None else valued:
        return True
    of_paddle = table is FOREIGN["paddle"]  # its switches may have values
    if is_open:
        return of_paddle and _decides(key, row)
    return row is None or valued or of_paddle or word.lower() in (*TRUE, *FALSE, *_NOTHING)


def _unquoted(value: str) -> str:
    """Strip quotes that a script passes on, as in "--split '99,1,0'" within an array."""
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def _find(key: str, table: Mapping[str, Foreign] | frozenset[str]) -> str | None:
    """Return the key of an argument in a table: its whole name or the last part of a nested name."""
    return next((name for name in (key, key.rpartition(".")[2]) if name in table), None)


def _translate_argument(name: str, value: str, given: Mapping[str, str], table: Mapping[str, Foreign]) -> Translated:
    written = f"--{name}" if name else ""
    if not name and open_values.is_open(value):
        return Translated("", " ".join(shlex.split(value)), LEFT, "", "further arguments", decides=True)
    if not name:
        return Translated("", value, UNKNOWN, "", "belongs to no argument")
    key = normal(name)
    if _unset(key, value):
        return Translated(written, value, UNNECESSARY, "", _UNSET)
    row = _find(key, table)
    if value.lower() in _SWITCHED_OFF and key not in given and row is not None and table[row].ours.startswith("@"):
        return Translated(written, value, UNNECESSARY, "", _OFF)
    reason = _missing_reason(value)
    if reason and not (row is not None and "@" not in table[row].ours and "{value}" not in table[row].ours):
        foreign = table[row] if row is not None else None
        decides, here = _decides(key, foreign), _here(key, foreign)
        return Translated(written, value, LEFT, "", reason, decides=decides, here=here)
    if row is not None:
        verdict, ours, why = _apply(table[row], value, given, row)
        decides = verdict == LEFT and table[row].ours.startswith("@") and _decides(key, table[row])
        here = _here(key, table[row]) if verdict == LEFT else ""
        return Translated(written, value, verdict, ours, why, decides=decides, here=here)
    found = spellings().get(key) or spellings().get(key.rpartition(".")[2])
    if found is not None:
        return _translate_flag(written, value, found)
    near = get_close_matches(key, [*spellings(), *table], 2, 0.75)
    hint = f"; near: {', '.join('--' + word for word in near)}" if near else ""
    return Translated(written, value, UNKNOWN, "", f"in no table{hint}")


def _missing_reason(value: str) -> str:
    """Return the reason why the script does not contain a value; "" if it does."""
    if open_values.is_open(value):
        return f"the script takes it from {', '.join(dict.fromkeys(open_values.names(value)))}"
    return "the script contains only a placeholder" if _PLACEHOLDER.search(value) else ""


def _decides(key: str, row: Foreign | None) -> bool:
    """Return True if an argument's value affects the training, unlike paths and the placement of ranks."""
    if row is not None and row.ours.startswith("@"):
        return not row.ours.startswith("@~")
    name = row.ours.split()[0] if row is not None and row.ours else f"--{key}"
    spelling = spellings().get(normal(name.lstrip("-")))
    return spelling is not None and spelling.flag.group not in _HARMLESS


def _here(key: str, row: Foreign | None) -> str:
    """Return the megapar flag, without "megapar launch", that takes an argument's value; "" if there is none."""
    if row is not None and row.ours in _OF_THE_LAUNCHER:
        return _OF_THE_LAUNCHER[row.ours]
    if row is not None and not row.ours.startswith("@"):  # a row without a flag names it in its reason
        return next(iter(_flags(row.ours.replace("{name}", key) or row.reason)), "")
    spelling = spellings().get(key) or spellings().get(key.rpartition(".")[2])
    return spelling.flag.spelling if spelling is not None else ""


def _apply(row: Foreign, value: str, given: Mapping[str, str], key: str = "") -> tuple[str, str, str]:
    """Return (verdict, ours, reason) of a row for this value."""
    if row.ours.startswith("@"):
        try:
            verdict, ours, reason = function(row.ours)(value, given)
        except NotANumberError as error:
            return OTHER, "", str(error)
        return verdict, ours.replace("{name}", key), reason or row.reason
    if value.lower() == "false" and "{value}" not in row.ours:
        return UNNECESSARY, "", _OFF
    if row.verdict == RENAMED and not row.ours:
        return UNSUPPORTED, "", row.reason
    if "{value}" in row.ours and not value:
        return LEFT, "", "it has no value"
    return row.verdict, row.ours.format(name=key, value=value).strip(), row.reason


def _translate_flag(written: str, value: str, spelling: Spelling) -> Translated:
    """Translate a flag or an alias of the trainers."""
    flag = spelling.flag
    for rule in RULES:
        if rule.kind == NOT_BUILT and rule.reads[0] == flag.name and "not_default" in rule.reads:
            verdict = UNSUPPORTED if flag.group in _HARMLESS else OTHER
            return Translated(written, value, verdict, "", f"{rule.message}")
    if flag.name == "recompute_num_layers" and value == "0":
        return Translated(written, value, UNNECESSARY, "", "no layer is recomputed")
    if spelling.value is not None or not flag.takes_value:
        return _translate_switch(written, value, spelling)
    if not value:
        return Translated(written, value, LEFT, "", "it has no value")
    value_here = _WORDS.get((flag.name, value.lower()), value)
    try:
        converted = convert(flag, shlex.split(value_here) if flag.takes_list else value_here)
    except BadValue as error:
        return Translated(written, value, OTHER, "", str(error))
    ours = f"{flag.spelling} {converted if flag.choices else value_here}"
    same = written == flag.spelling
    return Translated(written, value, SAME if same else RENAMED, ours, "")


def _translate_switch(written: str, value: str, spelling: Spelling) -> Translated:
    """Translate a switch: a spelling without a value, or with true or false."""
    flag, meaning = spelling.flag, spelling.value
    if value.lower() in FALSE and meaning is not None and flag.takes_value:
        return Translated(written, value, UNNECESSARY, "", _OFF)
    if flag.takes_value:
        ours = f"{flag.spelling} {' '.join(meaning) if isinstance(meaning, tuple) else meaning}"
        return Translated(written, value, RENAMED, ours, "")
    if value.lower() not in ("", *TRUE, *FALSE):
        if flag.type == "switch" and value.lower() in (flag.choices or ()):
            return Translated(written, value, SAME, f"{flag.spelling} {value.lower()}", "")
        return Translated(written, value, UNKNOWN, "", f"{flag.spelling} takes no value")
    on = (meaning is not False) == (value.lower() not in FALSE)
    ours = flag.spelling if on else "--no-" + flag.spelling[2:]
    same = written == flag.spelling or spelling.text == written[2:]
    return Translated(written, value, SAME if same else RENAMED, ours, "")


FUNCTIONS: Mapping[str, Function] = {**of_megatron.FUNCTIONS, **of_paddle.FUNCTIONS, **launchers.FUNCTIONS}


def function(ours: str) -> Function:
    """Return the function of a row: the one that it names, or that of its cases."""
    name = ours.lstrip("@~")
    return FUNCTIONS[name] if name in FUNCTIONS else cases(name)
