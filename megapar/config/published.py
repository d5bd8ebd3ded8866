"""Flags that a Hugging Face config.json determines, and settings of published models that are refused."""

from __future__ import annotations

from typing import Any

from megapar.config.config import FLAGS
from megapar.config.shown import shown
from megapar.config.values import BadValue, convert
from megapar.files.location import Place, at
from megapar.files.regular_file import HEAD_BYTES, json_object, not_this
from megapar.files.tensor_file import CONFIG_FILE
from megapar.model.architectures import ARCHITECTURES, model_of_architecture
from megapar.schema.published import Json, PublishedArchitecture

SHOWN = 8
"""Maximum number of a config.json's settings to complain about."""


_LACKING = {
    "KimiLinear": ", whose linear attention is not built",
    "DeepseekV32": ", whose sparse attention is not built",
    "Phimoe": ", whose router masks other experts for each choice and samples them in training (SparseMixer)",
    "Ernie4_5_VL": ", which reads images",
}
"""What is missing for classes that are named like supported ones, by the beginning of their names."""


class Unsupported(ValueError):
    """A published model that megapar does not support; the message names the setting."""


def read_config(folder: Place) -> dict[str, Any]:
    """Read config.json of a model folder. Raises Unsupported if it is missing or not JSON."""
    path = at(folder) / CONFIG_FILE
    try:
        content = path.content()
        other = not_this(content[:HEAD_BYTES])
        config = {} if other else json_object(content)
    except (FileNotFoundError, NotADirectoryError) as error:
        if (at(folder) / "adapter_config.json").is_file():
            fix = "merge it into its model with merge_and_unload of peft, and pass the folder of the result"
            raise Unsupported(f"{folder} is an adapter (LoRA), not a model: {fix}") from error
        raise Unsupported(f"{folder} contains no config.json, which every published model has") from error
    except (OSError, ValueError) as error:
        raise Unsupported(f"{path} cannot be read ({error})") from error
    if other:
        raise Unsupported(f"{path} {other}")
    return config


def architecture_of(config: Json) -> PublishedArchitecture:
    """Return the class that config.json names. Raises Unsupported if it is not a supported one."""
    names = config.get("architectures") or []
    listed = names if isinstance(names, list) else []
    supported = next((name for name in listed if isinstance(name, str) and name in ARCHITECTURES), None)
    if supported is None:
        lacking = next((text for name, text in _LACKING.items() if str(next(iter(listed), "")).startswith(name)), "")
        raise Unsupported(f"architectures is {shown(names)}{lacking}; supported are {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[supported].of_folder(config)


def flags_of(config: Json) -> tuple[str, dict[str, Any]]:
    """Return the model kind (moe or ernie) and the flags by field name. Raises Unsupported."""
    architecture = architecture_of(config)
    name = architecture.name
    if reason := _other_quantization(config.get("quantization_config")):
        raise Unsupported(f"quantization_config {reason}; pass the folder of the weights that are not quantized")
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
        raise Unsupported(f"config.json of this {name} contains a value of the wrong type ({error})") from error
    return model_of_architecture(name).kind, flags


def _other_quantization(quantization: Any) -> str:
    """Return what is quantized otherwise than in FP8 (e4m3) by blocks of 128 x 128, "" for nothing."""
    if not quantization:
        return ""
    if not isinstance(quantization, dict):
        return f"is {shown(quantization)}, where an object or null is needed"
    for key, only, implied in (
        ("quant_method", "fp8", None),
        ("fmt", "e4m3", "e4m3"),
        ("weight_block_size", [128] * 2, None),
    ):
        if (value := quantization.get(key, implied)) != only:
            return f"has the {key} {shown(value)}, and only FP8 (e4m3) by blocks of 128 x 128 is read"
    return ""


def wrong_values(architecture: PublishedArchitecture, config: Json) -> list[str]:
    """Describe the illegal values of the settings that this class reads, each without a full stop."""
    present = [one for one in architecture.settings if one.name in config]
    wrong = {one.name: wanted for one in present if (wanted := one.legal(config[one.name]))}
    texts = [f"{key} is {shown(config[key])}, where {wanted} is needed" for key, wanted in wrong.items()]
    more = [f"and {len(texts) - SHOWN} more"] if len(texts) > SHOWN else []
    return [*texts[:SHOWN], *more]


def other_values(architecture: PublishedArchitecture, config: Json) -> list[str]:
    """Describe the legal values that megapar does not support, each with the reason."""
    reasons = {one.name: reason for one in architecture.settings if (reason := one.reason(config))}
    return [f"{key} is {shown(config.get(key))}, {reason}" for key, reason in reasons.items()]


def remarks(config: Json) -> list[str]:
    """Describe the settings of config.json that training ignores, one sentence each."""
    return [
        f"{one.name} is {shown(config[one.name])}, and {one.ignored}"
        for one in architecture_of(config).settings
        if one.ignored and config.get(one.name)
    ]
