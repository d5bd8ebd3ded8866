"""Reading of command lines and YAML files, which share one set of names. Errors are collected, never raised."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megapar.config.config import FLAGS, GROUPS
from megapar.config.draft import KEYS, About, Draft, is_from_file, is_given, key_form, other_script
from megapar.config.hints import near_flag, of_block
from megapar.config.report import default_text
from megapar.config.values import FALSE, TRUE, BadValue, convert, expand, expanded, shown, wanted
from megapar.config.yaml_file import MAX_BYTES, YAML_FORM, Pairs, config_path, load_pairs, near_preset, problem_of
from megapar.files.paths import near_path
from megapar.files.regular_file import not_itself, read_regular_text
from megapar.schema.flag import SCRIPTS, Flag
from megapar.schema.flag import normal as normal

NOTHING = (None, "None", "null")
_FROM_HF = "Make a configuration of it: megapar configs --from-hf {path} > my.yaml"
_DICTIONARY = ("sharding_segment_strategy", "segment_broadcast_mb", "segment_anchors", "gradient_merge_acc_step")
_SEGMENTED = ("sharding-segment-strategy", "segment-broadcast-mb", "fuse-broadcast-mb")


_PADDLE = (
    "strategy", "dist-strategy", "hybrid-configs", "sharding-configs", "mp-configs", "pp-configs",
    "tensor-parallel-configs", "pipeline-configs", "gradient-merge", "gradient-merge-configs", "recompute-configs",
)  # fmt: skip
BLOCKS = frozenset((*GROUPS, *_PADDLE))
"""Names of blocks, in their normal form. A key in a block means the same as at the left margin."""

_SHORT: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "gradient-merge": {"k-steps": "gradient-merge-acc-step"},
        "gradient-merge-configs": {"k-steps": "gradient-merge-acc-step"},
        "pipeline": {"schedule-mode": "pp-schedule"},
        "pipeline-configs": {"schedule-mode": "pp-schedule"},
        "sharding": {"degree": "sharding-degree", "stage": "sharding-stage"},
        "sharding-configs": {"stage": "sharding-stage"},
    }
)
# Keys of blocks that are accepted and ignored with these values, because they request what megapar always does.
_IGNORED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "enable": TRUE,  # the block's feature
        "avg": TRUE,  # gradients of merged micro-batches are averaged
        "sep-degree": ("1",),
        "use-calc-stream": FALSE,
        "enable-tuning": FALSE,
    }
)


@dataclass(frozen=True)
class Leaf:
    """Setting of a file. ``name`` is in its normal form, ``shown`` is the key as written, with its blocks."""

    name: str
    shown: str
    value: Any


@dataclass(frozen=True)
class Strange:
    """Block of an unknown name, which is ``shown`` as written, with the blocks that it is in."""

    shown: str
    keys: Sequence[str]


def leaves(pairs: Iterable[tuple[str, Any]], known: Mapping[str, Any], *within: str) -> Iterator[Leaf | Strange]:
    """Yield the settings of a file, including those in known blocks. ``known``: names that are settings."""
    items = list(pairs)
    blocks = {normal(key).lstrip("-") for key, value in items if isinstance(value, Pairs)}
    for key, value in items:
        name = normal(key).lstrip("-")
        shown = ".".join((*within, key))
        if isinstance(value, Pairs) and name in BLOCKS:  # optimizer is a flag, too, which takes no mapping
            yield from leaves(value, known, *within, key)
            continue
        if isinstance(value, Pairs) and name not in known:
            yield Strange(shown, [inner for inner, _ in value])
            continue
        if value in (None, "None") and name in BLOCKS:
            continue  # an empty block
        if within:
            name = _SHORT.get(normal(within[-1]), {}).get(name, name)
            if name not in known and str(value).lower() in _IGNORED.get(name, ()):
                continue
        if name not in known and f"{name}-configs" in blocks and str(value).lower() in TRUE:
            continue  # PaddlePaddle's switch for a block that the file contains
        yield Leaf(name, shown, value.plain() if isinstance(value, Pairs) else value)


@dataclass(frozen=True)
class Spelling:
    """One way to name a flag.

    Attributes:
        text: The spelling, without ``--``.
        value: Value that the bare spelling sets; None if it takes a value like the flag itself.
        note: Warning to print when the spelling is used.
    """

    flag: Flag
    text: str
    value: Any = None
    note: str = ""


@cache
def spellings() -> Mapping[str, Spelling]:
    """Return every spelling of every flag, by its normal form without leading hyphens."""
    result: dict[str, Spelling] = {}
    for flag in FLAGS.values():
        primary = flag.spelling[2:]
        result[normal(primary)] = Spelling(flag, primary)
        for alias in flag.aliases:
            result[normal(alias.name)] = Spelling(flag, alias.name, alias.value, alias.note)
        if not flag.takes_value:
            negative = flag.negation[2:]
            result[normal(negative)] = Spelling(flag, negative, False)
    return result


def complain_unknown(draft: Draft, shown: str, where: str, name: str = "") -> None:
    """Complain about an unknown name, as it is ``shown``, and suggest similar ones to ``name`` or to itself."""
    known = (key for key, spelling in spellings().items() if draft.kind in spelling.flag.models)
    hint = near_flag(normal(name or shown).lstrip("-"), known)
    if where == "setting" and hint.startswith("Did you mean "):  # names as Python has them
        asked, mark, more = hint.partition("?")
        hint = re.sub("--[a-z0-9-]+", lambda flag: flag[0][2:].replace("-", "_"), asked) + mark + more
    draft.complain("unknown-flag", f"{where} {shown} is unknown.", hint)


def assign(draft: Draft, spelling: Spelling, raw: Any, origin: str) -> None:
    """Set a field from a raw value; for a bad value, complain and leave the field unset."""
    flag = spelling.flag
    if spelling.note and spelling.note not in draft.warnings:
        draft.warnings.append(spelling.note)
    if flag.each:
        raw = [*draft.values.get(flag.name, ()), raw]
    if draft.origins.get(flag.name) != origin:
        draft.bad.discard(flag.name)
    if _is_nothing(draft, flag, raw):
        draft.forget(flag.name)
        return
    draft.origins[flag.name] = origin
    try:
        value = convert(flag, raw)
        draft.values[flag.name] = expanded(flag, value, draft.environ) if flag.path else value
    except BadValue as error:
        draft.values.pop(flag.name, None)
        draft.bad.add(flag.name)
        draft.complain(error.rule, str(error), error.fix)


def _is_nothing(draft: Draft, flag: Flag, raw: Any) -> bool:
    """Return True for YAML's null and the word None if the flag's default is empty: they leave it unset."""
    words = raw if isinstance(raw, list) and len(raw) == 1 else [raw]
    return flag.defaults[draft.kind] in (None, ()) and words[0] in NOTHING


def read_line(draft: Draft, argv: Sequence[str]) -> None:
    """Read the flags of a command line, which override the draft; the last of repeated spellings wins."""
    seen: dict[str, tuple[str, Any]] = {}
    tokens = list(argv)
    while tokens:
        token = tokens.pop(0)
        name, equals, attached = token.partition("=")
        if not name.startswith("--") or len(name) < 3:
            _complain_stray(draft, token, tokens)
            continue
        spelling = spellings().get(normal(name[2:]))
        if spelling is None:
            complain_unknown(draft, name, "flag")
            _pop_values(tokens)
            continue
        raw = _raw(draft, spelling, tokens, attached if equals else None)
        if raw is None:
            continue
        before = seen.get(spelling.flag.name)
        assign(draft, spelling, raw, "flag")
        value = draft.values.get(spelling.flag.name)
        if (
            before is not None
            and before[0] != spelling.text
            and before[1] != value
            and spelling.text not in (f"no-{before[0]}", before[0].removeprefix("no-"))
        ):
            draft.complain(
                "contradiction",
                f"--{before[0]} and --{spelling.text} set the same flag to different values.",
                "Keep one of them.",
            )
        seen[spelling.flag.name] = (spelling.text, value)


def read_mapping(draft: Draft, settings: Mapping[str, Any]) -> None:
    """Read settings of Python by the names of flags, which override the draft; those that are None are left out."""
    for name, value in settings.items():
        spelling = spellings().get(normal(name).lstrip("-"))
        if spelling is None:
            complain_unknown(draft, name, "setting")
        elif value is not None:
            raw = str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
            listed = raw if spelling.flag.each and isinstance(raw, list) else [raw]
            for one in listed:
                _assign_key(draft, spelling, Leaf(normal(name), name, one), "setting", "flag")


def _complain_stray(draft: Draft, token: str, tokens: list[str]) -> None:
    """Complain about a token that is not a flag; one that is a flag with too few hyphens also consumes its values."""
    name = normal(token.partition("=")[0].lstrip("-"))
    meant = name in spellings() and (token.startswith("-") or "=" in token)
    fix = f"Did you mean --{token.lstrip('-')}?" if meant else "Flags start with two hyphens."
    if not meant and token.endswith((".yaml", ".yml")):
        fix = f"Did you mean --config {token}?"
    draft.complain("unexpected", f"{token!r} was found where a flag was expected.", fix)
    if meant:
        _pop_values(tokens)


def _pop_values(tokens: list[str]) -> list[str]:
    """Pop the values that follow a flag from the front of ``tokens``; -1 and -1e-3 are values."""
    taken = []
    while tokens and not tokens[0].startswith("--"):
        taken.append(tokens.pop(0))
    return taken


def _raw(draft: Draft, spelling: Spelling, tokens: list[str], attached: str | None) -> Any:
    """Return the raw value of the flag whose name was just consumed, or None after a complaint."""
    flag = spelling.flag
    if spelling.value is not None:
        if attached is not None:
            fix = f"Write --{spelling.text} without a value."
            draft.complain("value", f"--{spelling.text} takes no value, got {attached!r}.", fix)
            draft.bad.add(flag.name)
            return None
        return spelling.value
    if attached is not None:
        return attached
    if not flag.takes_value:
        words = flag.choices + TRUE + FALSE if flag.type == "switch" else TRUE + FALSE
        return tokens.pop(0) if tokens and tokens[0].lower() in words else True
    if flag.takes_list:
        values = _pop_values(tokens)
        if values:
            return values
    elif tokens and not tokens[0].startswith("--"):
        return tokens.pop(0)
    draft.complain("missing-value", f"{flag.spelling} needs a value: {wanted(flag)}.")
    draft.bad.add(flag.name)
    return None


def read_files(draft: Draft, paths: Sequence[str]) -> None:
    """Read YAML files into the draft; a later file overrides the earlier ones."""
    for path in paths:
        try:
            name = expand(path, draft.environ)
        except BadValue as error:
            draft.complain(error.rule, f"--config {error}", error.fix)
        else:
            read_file(draft, name, "file" if len(paths) == 1 else f"file {name}")


def read_file(draft: Draft, path: str, origin: str = "file") -> None:
    """Read the keys of a YAML file into the draft; for a file of the other trainer, only complain."""
    loaded = _read_pairs(draft, path)
    if path.endswith(".json") and {"architectures", "model_type"} & {key for key, _ in loaded}:
        draft.complain("config-file", f"{path} is a config.json of transformers.", _FROM_HF.format(path=path))
        draft.foreign = True
        return
    draft.about = draft.about.updated(loaded)
    complaint = other_script(path, About().updated(loaded).script, draft.kind)
    if complaint is not None:
        draft.complaints.append(complaint)
        draft.foreign = True
        return
    seen: set[str] = set()
    for leaf in leaves((pair for pair in loaded if key_form(pair[0]) not in KEYS), spellings()):
        if isinstance(leaf, Strange):
            keys = ", ".join(leaf.keys) or "nothing"
            fix = f"It is not a group of flags: write the keys under it ({keys}) at the left margin."
            fix = of_block(normal(leaf.shown.rpartition(".")[2])) or fix
            draft.complain("unknown-flag", f"in {path}, key {leaf.shown} is unknown.", fix)
            continue
        spelling = spellings().get(leaf.name)
        if spelling is None:
            complain_unknown(draft, leaf.shown, f"in {path}, key", leaf.name)
        elif spelling.flag.meta:
            fix = f"Remove it from the file, and pass {spelling.flag.spelling}."
            draft.complain("config-file", f"in {path}, key {leaf.shown} is only allowed on the command line.", fix)
        elif spelling.flag.name in seen:
            message = f"in {path}, key {leaf.shown} sets {spelling.flag.spelling} a second time."
            draft.complain("duplicate-key", message, "Keep one of them.")
        else:
            seen.add(spelling.flag.name)
            draft.cuts_parameters |= leaf.name in _SEGMENTED and "sharding-configs" in normal(leaf.shown)
            _assign_key(draft, spelling, leaf, f"in {path}, key", origin)
    draft.cuts_parameters |= seen.issuperset(_DICTIONARY)


def warn_of_sharded_parameters(draft: Draft) -> None:
    """Warn if sharding_configs sets segments: in PaddlePaddle's static graphs, such a block also shards parameters."""
    if draft.cuts_parameters and not is_given(draft.origins.get("sharding_stage")):
        draft.warnings.append(
            "PaddlePaddle's sharding_configs also shards parameters in static graphs, but here --sharding-stage is 1 "
            "unless it is set; add sharding_stage: 3 if memory is short (the numbers are the same)"
        )


def about(paths: Sequence[str]) -> About:
    """Return the keys of files that are not flags; a later file overrides the earlier ones.

    Files that cannot be read are skipped: the parser complains about them.
    """
    result, draft = About(), Draft("moe")
    for path in paths:
        with contextlib.suppress(BadValue):
            result = result.updated(_read_pairs(draft, expand(path, draft.environ)))
    return result


def _read_pairs(draft: Draft, path: str) -> list[tuple[str, Any]]:
    """Return the keys and values of a YAML file, none after a complaint. Only this imports PyYAML."""
    try:
        text = read_regular_text(config_path(path), MAX_BYTES)
    except FileNotFoundError:
        preset = near_preset(path)
        hint = f" In every installation there is --config {preset}." if preset else ""
        draft.complain("config-file", f"--config {path} does not exist.", f"{near_path(path)}{hint}")
        return []
    except (OSError, UnicodeDecodeError) as error:
        draft.complain("config-file", f"--config {path} cannot be read: {error}.")
        return []
    if text and (other := not_itself(config_path(path))):
        draft.complain("config-file", f"--config {path} {other}.")
        return []
    import yaml

    try:
        return load_pairs(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        draft.complain("config-file", f"--config {path} is not a YAML mapping: {problem_of(error, text)}.", YAML_FORM)
        return []


def _assign_key(draft: Draft, spelling: Spelling, leaf: Leaf, where: str, origin: str) -> None:
    flag, value = spelling.flag, leaf.value
    if value in NOTHING and flag.defaults[draft.kind] not in (None, ()):
        fix = f"Leave the key out to get the default of {flag.spelling}, {default_text(flag, draft.kind)}."
        draft.complain("value", f"{where} {leaf.shown} takes {wanted(flag)}, got {value}.", fix)
        return
    if spelling.value is not None:
        if not isinstance(value, bool):
            draft.complain("value", f"{spelling.text} takes true or false, got {shown(value)}.")
        elif value:
            assign(draft, spelling, spelling.value, origin)
        elif not spelling.flag.takes_value:
            assign(draft, spelling, not spelling.value, origin)
        return
    assign(draft, spelling, value, origin)


def drop_replaced_data(draft: Draft) -> None:
    """Drop what a file says of its data and the command line replaces it by --data-path mock or --data-source hf."""
    given = {name: value for name, value in draft.values.items() if draft.origins[name] == "flag"}
    dropped = ["split"] if given.get("data_path") == ("mock",) else []  # mock has nothing to split
    files = ["data_path", "eval_data_path", "document_per", "on_bad_record"]
    dropped += files if given.get("data_source") == "hf" else []
    for name in dropped:
        if is_from_file(draft.origins.get(name)):
            draft.values.pop(name, None)
            draft.origins.pop(name)


def refuse_foreign(draft: Draft) -> None:
    """Complain about flags of the other trainer, which would have no effect, and reset them to their defaults."""
    for flag in FLAGS.values():
        default = flag.defaults[draft.kind]
        if draft.kind in flag.models or flag.name not in draft.values or draft.values[flag.name] == default:
            continue
        here, there = SCRIPTS[draft.kind], SCRIPTS[flag.models[0]]
        message = f"{flag.spelling} is a flag of {there} and has no effect in {here}."
        draft.complain("wrong-model", message, "Leave it out.")
        draft.values.pop(flag.name)
        draft.origins.pop(flag.name)


def fill_defaults(draft: Draft) -> None:
    """Fill in the default of every flag that is not set; None means that the value is derived later."""
    for flag in FLAGS.values():
        if flag.name not in draft.values and flag.name not in draft.bad:
            draft.values[flag.name] = flag.defaults[draft.kind]
            draft.origins[flag.name] = "default"
