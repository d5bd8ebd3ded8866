"""The flags that a Hugging Face config.json stands for, and the settings of published models that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megapar.config.config import FLAGS
from megapar.config.regular_file import read_regular
from megapar.config.shown import shown
from megapar.config.values import BadValue, convert
from megapar.model.architectures import ARCHITECTURES, model_of
from megapar.schema.published import Json, PublishedArchitecture

SHOWN = 8
"""At most so many settings of a config.json are complained about."""


class Unsupported(ValueError):
    """A published model that megapar cannot be; the message says which setting."""


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a model folder. Raises Unsupported where it is missing or not JSON."""
    path = Path(folder) / "config.json"
    if not path.exists():
        raise Unsupported(f"{folder} holds no config.json, which every published model has")
    try:
        found = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:
        raise Unsupported(f"{path} cannot be read ({error})") from error
    if not isinstance(found, dict):
        raise Unsupported(f"{path} holds no object")
    return found


def architecture_of(config: Json) -> PublishedArchitecture:
    """The class that config.json names. Raises Unsupported for one that is not known here."""
    names = config.get("architectures") or []
    listed = names if isinstance(names, list) else []
    found = next((name for name in listed if isinstance(name, str) and name in ARCHITECTURES), None)
    if found is None:
        raise Unsupported(f"architectures is {shown(names)}; known are {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[found].of_folder(config)


def flags_of(config: Json) -> tuple[str, dict[str, Any]]:
    """Model kind (moe or ernie) and flags by field name. Raises Unsupported."""
    architecture = architecture_of(config)
    name = architecture.name
    if config.get("quantization_config"):
        raise Unsupported("quantization_config is set: the weights are rounded; give the folder they were made from")
    whole = {**architecture.defaults, **config}
    if wrong := wrong_values(architecture, whole):
        raise Unsupported(f"config.json of this {name}: {'; '.join(wrong)}")
    try:
        if other := other_values(architecture, whole):
            raise Unsupported("; ".join(other))
        read = {one.flag: one.flag_value(whole) for one in architecture.settings if one.flag}
        flags = {flag: convert(FLAGS[flag], value) for flag, value in {**architecture.flags, **read}.items()}
    except Unsupported:
        raise
    except KeyError as error:
        raise Unsupported(f"config.json of this {name} lacks {error}") from error
    except BadValue as error:
        raise Unsupported(f"config.json of this {name}: {error}".rstrip(".")) from error
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise Unsupported(f"config.json of this {name} holds a value of another kind ({error})") from error
    return model_of(name).kind, flags


def wrong_values(architecture: PublishedArchitecture, config: Json) -> list[str]:
    """The illegal values of the settings that this class reads, each without a full stop."""
    present = [one for one in architecture.settings if one.name in config]
    wrong = {one.name: wanted for one in present if (wanted := one.legal(config[one.name]))}
    found = [f"{key} is {shown(config[key])}, where {wanted} is needed" for key, wanted in wrong.items()]
    more = [f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
    return [*found[:SHOWN], *more]


def other_values(architecture: PublishedArchitecture, config: Json) -> list[str]:
    """The legal values that make another model than those that are built here, each with the reason."""
    reasons = {one.name: reason for one in architecture.settings if (reason := one.reason(config))}
    return [f"{key} is {shown(config.get(key))}, {reason}" for key, reason in reasons.items()]


def remarks(config: Json) -> list[str]:
    """Return in sentences what config.json wants of training that is not done here."""
    return [
        f"{one.name} is {shown(config[one.name])}, and {one.ignored}"
        for one in architecture_of(config).settings
        if one.ignored and config.get(one.name)
    ]
