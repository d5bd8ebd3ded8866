"""Published models: flags that a config.json determines, which settings are refused, and what --load-hf sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megapar.checkpoints.format.names import names_in
from megapar.config.config import FLAGS
from megapar.config.draft import Draft
from megapar.config.values import BadValue, convert, shown
from megapar.files.location import Place, at
from megapar.files.regular_file import HEAD_BYTES, json_object, not_this
from megapar.files.tensor_file import CONFIG_FILE
from megapar.files.uri import is_stored, wrong_uri
from megapar.model.architectures import ARCHITECTURES, model_of_architecture
from megapar.schema.flag import SCRIPTS
from megapar.schema.published import Json, PublishedArchitecture

SHOWN = 8  # maximum number of a config.json's settings to complain about


_LACKING = {
    "KimiLinear": ", whose linear attention is not built",
    "DeepseekV32": ", whose sparse attention is not built",
    "Phimoe": ", whose router masks other experts for each choice and samples them in training (SparseMixer)",
    "Ernie4_5_VL": ", which reads images",
    "Gemma3ForConditionalGeneration": ", which reads images: save its text model as a Gemma3ForCausalLM",
    "Gemma2": ", which caps scores and logits",
}
"""What is missing for classes that are named like supported ones, by the beginning of their names."""


class Unsupported(ValueError):
    """A published model that megapar does not support; the message names the setting."""


def read_config(folder: Place) -> dict[str, Any]:
    """Read config.json of a model folder, or a file ``*.json``. Raises Unsupported if it is missing or not JSON."""
    is_file = str(folder).endswith(".json")
    path = at(folder) if is_file else at(folder) / CONFIG_FILE
    try:
        content = path.content()
        other = not_this(content[:HEAD_BYTES])
        config = {} if other else json_object(content)
    except (FileNotFoundError, NotADirectoryError) as error:
        if (at(folder) / "adapter_config.json").is_file():
            fix = "merge it into its model with merge_and_unload of peft, and pass the folder of the result"
            raise Unsupported(f"{folder} is an adapter (LoRA), not a model: {fix}") from error
        lacks = "contains no config.json, which every published model has"
        if is_file or not at(folder).exists():
            lacks = "does not exist; `hf download` fetches a published model"
        raise Unsupported(f"{folder} {lacks}") from error
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
    if reason := _other_quantization(config.get("quantization_config"), architecture):
        raise Unsupported(f"quantization_config {reason}; pass the folder of the weights that are not quantized")
    whole = {**architecture.defaults, **config}
    if wrong := wrong_values(architecture, whole):
        raise Unsupported(f"config.json of this {name}: {'; '.join(wrong)}")
    try:
        if other := other_values(architecture, whole):
            raise Unsupported("; ".join(other))
        read = {setting.flag: setting.flag_value(whole) for setting in architecture.settings if setting.flag}
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


def _other_quantization(quantization: Any, architecture: PublishedArchitecture) -> str:
    """Say why a quantization is not read; "" for FP8 (e4m3) by blocks of 128 x 128, and for experts in MXFP4."""
    if not quantization:
        return ""
    if not isinstance(quantization, dict):
        return f"is {shown(quantization)}, where an object or null is needed"
    if architecture.inputs_first and quantization.get("quant_method") == "mxfp4":
        return ""
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
    present = [setting for setting in architecture.settings if setting.name in config]
    wrong = {setting.name: wanted for setting in present if (wanted := setting.legal(config[setting.name]))}
    texts = [f"{key} is {shown(config[key])}, where {wanted} is needed" for key, wanted in wrong.items()]
    more = [f"and {len(texts) - SHOWN} more"] if len(texts) > SHOWN else []
    return [*texts[:SHOWN], *more]


def other_values(architecture: PublishedArchitecture, config: Json) -> list[str]:
    """Describe the legal values that megapar does not support, each with the reason."""
    reasons = {setting.name: reason for setting in architecture.settings if (reason := setting.reason(config))}
    return [f"{key} is {shown(config.get(key))}, {reason}" for key, reason in reasons.items()]


def remarks(config: Json) -> list[str]:
    """Describe the settings of config.json that training ignores, one sentence each."""
    return [
        f"{setting.name} is {shown(config[setting.name])}, and {setting.ignored}"
        for setting in architecture_of(config).settings
        if setting.ignored and config.get(setting.name)
    ]


BESIDE = "hf"
"""Subfolder of a converted checkpoint's folder, for the published model's files that a checkpoint cannot store."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
_FREE = ("hidden_dropout", "attention_dropout")  # properties of training, not of the model


def has_tokenizer(folder: Place) -> bool:
    """Return True if a published folder has a tokenizer."""
    return not {*TOKENIZER_FILES}.isdisjoint(names_in(folder))


def published_folder(load_hf: str | None, load: str | None) -> str | None:
    """Return the Hugging Face folder of a run's model: --load-hf, or the one inside a converted checkpoint's folder."""
    if load_hf or not load or is_stored(load):  # of a store, a start reads nothing but the checkpoint
        return load_hf
    beside = at(load) / BESIDE
    return str(beside) if (beside / CONFIG_FILE).is_file() else None


def apply_published(draft: Draft) -> str | None:
    """Fill in the flags that the folder's config.json determines, and complain about flags that contradict it.

    Returns the folder's class, or None if there is no readable folder. ``check_files`` complains about a missing one.
    """
    load_hf, load = (draft.values.get(name) for name in ("load_hf", "load"))
    name = published_folder(load_hf, load)
    if not name or (not is_stored(name) and not Path(name).is_dir()) or any(wrong_uri(name) if "://" in name else ()):
        return None
    if is_stored(name) and draft.values.get("validate_only"):
        message = f"The sizes of the model are in --load-hf {name}, and --validate-only asks no store."
        draft.complain("load-hf", message, "Pass a local folder with its config.json and weights.")
        return None
    source = f"--load-hf {name}" if load_hf else f"--load {load} (its {BESIDE}/config.json)"
    try:
        config = read_config(name)
        kind, flags = flags_of(config)
    except Unsupported as error:
        draft.complain("load-hf", f"{source}: {error}.")
        return None
    if kind != draft.kind:
        message = f"{source} is a model for {SCRIPTS[kind]}, not for {SCRIPTS[draft.kind]}."
        draft.complain("load-hf", message, f"Start {SCRIPTS[kind]}, or megapar pretrain {kind}.")
        return None
    draft.warnings += [f"{source}: {remark}" for remark in remarks(config)]
    architecture = architecture_of(config)
    _apply_sizes(draft, source, flags, free_depth=architecture.sets("mtp_depth"))
    if draft.origins.get("tokenizer_model") == "default" and not is_stored(name) and has_tokenizer(name):
        draft.values["tokenizer_model"] = name
        draft.origins["tokenizer_model"] = "derived"
    return architecture.name


def _apply_sizes(draft: Draft, source: str, flags: dict[str, Any], free_depth: bool) -> None:
    """Set the flags that config.json determines.

    With ``free_depth``, --mtp-depth may differ: a block that the folder lacks is initialized, a surplus one is dropped.
    """
    for flag, value in flags.items():
        if draft.origins.get(flag) == "default":
            draft.values[flag] = value
            draft.origins[flag] = "derived"
        elif flag in draft.values and draft.values[flag] != value:
            if flag == "max_position_embeddings" and flags.get("position_embedding_type") == "rope":
                continue  # rotary positions have no table
            if flag in _FREE:
                continue
            if flag == "mtp_depth" and free_depth:
                continue
            spelled = FLAGS[flag].spelling
            fix = f"Leave {spelled} out."
            draft.complain("load-hf", f"{spelled} {draft.values[flag]} contradicts {source}: {value}.", fix)
