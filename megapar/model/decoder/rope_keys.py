"""Keys of config.json on rotary positions, in the form of transformers 5 and in that before it.

transformers 5 has one object ``rope_parameters``. Before, ``rope_theta`` and ``partial_rotary_factor`` were separate
keys and the scaling was ``rope_scaling``, whose ``type`` is now ``rope_type``. As in transformers,
``rope_scaling`` takes precedence, and a value inside the object over one outside of it.

Classes with rope by kind of layer have one such object for each kind in ``rope_parameters``; ``rope_scaling`` is then
of the layers that see all keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megapar.model.rope import Rope
from megapar.model.rope_scaling import FLAGS_OF, LINEAR, LLAMA3, NONE, SCALED, YARN, RopeScaling, flags_of_scaling
from megapar.schema.flag import from_flags
from megapar.schema.legal_values import ROPE_PARTS, THETA, rope
from megapar.schema.published import Json, Setting, Settings

UNSCALED = "default"
_KEYS = {
    "factor": "rope_scaling_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "attention_factor": "rope_attention_factor",
    "truncate": "yarn_correction_range_round_to_int",
}
_NEEDED = {UNSCALED: (), LINEAR: ("factor",), LLAMA3: ("factor", "low_freq_factor", "high_freq_factor"), YARN: ()}
_ALWAYS = ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
_DEFAULTS = flags_of_scaling(None)
_WHOLE = "but this class rotates whole heads: partial_rotary_factor must be 1"


def rope_settings(partial: float | None = None) -> tuple[Setting, ...]:
    """Return the settings of rotary positions.

    ``partial``: Share of a head that the class rotates if config.json does not say; None: always whole heads.
    """
    main = Setting(
        "rope_parameters",
        rope,
        "rope_theta",
        to_flag=_theta,
        from_flags=_written if partial is None else _written_with_share,
        refused=lambda config: "" if config.get("rope_scaling") else _reason(config, partial),
        retrained=lambda config: not config.get("rope_scaling") and _incomplete(config),
    )
    old = Setting(
        "rope_scaling",
        rope,
        written=False,
        from_flags=_written if partial is None else _written_with_share,
        refused=lambda config: _reason(config, partial) if config.get("rope_scaling") else "",
        retrained=lambda config: bool(config.get("rope_scaling")) and _incomplete(config),
    )
    share = Setting(
        "partial_rotary_factor",
        ROPE_PARTS["partial_rotary_factor"],
        written=False,
        refused=lambda config: "" if "partial_rotary_factor" in _object(config) or _share(config, 1.0) == 1 else _WHOLE,
    )
    if partial is not None:
        share = Setting(
            "rope_parameters", rope, "rotary_percent", written=False, to_flag=lambda config: _share(config, partial)
        )
    scaling = (_one("rope_scaling_type", _type), *(_one(flag, _value(key, flag)) for key, flag in _KEYS.items()))
    return (main, *scaling, share, Setting("rope_theta", THETA, written=False), old)


def rope_of(config: Json) -> Rope:
    """Return the rope of a config.json."""
    values = {flag: _value(key, flag)(config) for key, flag in _KEYS.items()} | {"rope_scaling_type": _type(config)}
    return Rope(_theta(config), None if _type(config) == NONE else from_flags(RopeScaling, values))


def object_of(value: Rope) -> dict[str, Any]:
    """Return the object of transformers 5 for a rope."""
    return _written({"rope_theta": value.theta, **flags_of_scaling(value.scaling)})


def lacking(parameters: Json) -> str:
    """Return why an object of transformers 5 does not say all of a rope by itself, "" if it does."""
    config = {"rope_parameters": parameters, "rope_theta": parameters.get("rope_theta") or 1.0}
    if reason := _reason(config, None):
        return reason
    needed = ("rope_theta", *(key for key in _ALWAYS if _KEYS[key] in FLAGS_OF[_type(config)]))
    if absent := [key for key in needed if parameters.get(key) is None]:
        return f"it lacks {', '.join(absent)}"
    read = {"rope_theta", "rope_type", "type", *(key for key, flag in _KEYS.items() if flag in FLAGS_OF[_type(config)])}
    unread = sorted(parameters.keys() - read)
    return f"it has {', '.join(unread)[:60]}, which rope of the type {_named(config)} does not read" if unread else ""


def _one(flag: str, to_flag: Callable[[Json], Any]) -> Setting:
    return Setting("rope_parameters", rope, flag, written=False, to_flag=to_flag)


def _object(config: Json) -> Json:
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def _theta(config: Json) -> float:
    return float(_object(config).get("rope_theta") or config["rope_theta"])


def _share(config: Json, default: float) -> float:
    share = _object(config).get("partial_rotary_factor")
    return float(share or config.get("partial_rotary_factor") or default)


def _named(config: Json) -> str:
    """Return the type of rope by its name in config.json."""
    parameters = _object(config)
    return str(parameters.get("rope_type") or parameters.get("type") or UNSCALED)


def _type(config: Json) -> str:
    return NONE if _named(config) == UNSCALED else _named(config)


def _value(key: str, flag: str) -> Callable[[Json], Any]:
    """Return the function that reads one number of the scaling; a type that does not use it has the flag's default."""

    def value(config: Json) -> Any:
        given = _object(config).get(key)
        if flag not in FLAGS_OF.get(_type(config), ()):
            return _DEFAULTS[flag]
        if given is None and flag == "original_max_position_embeddings":
            return config["max_position_embeddings"]
        if given is None and key == "factor":  # of yarn
            original = _object(config).get("original_max_position_embeddings") or config["max_position_embeddings"]
            return config["max_position_embeddings"] / original
        if not given and key in ("beta_fast", "beta_slow"):
            return _DEFAULTS[flag]
        return _DEFAULTS[flag] if given is None else given

    return value


def _reason(config: Json, partial: float | None) -> str:
    """Return why this scaling is not supported, "" if it is."""
    parameters, name = _object(config), _named(config)
    if any(isinstance(value, dict) for value in parameters.values()):
        return "but all layers have the same rotary positions here"
    if name not in (UNSCALED, *SCALED):
        return f"but rope of the type {name[:40]} is not supported; types are {', '.join((UNSCALED, *SCALED))}"
    if lacking := [key for key in _NEEDED[name] if parameters.get(key) is None]:
        return f"but rope of the type {name} needs {', '.join(lacking)}"
    if name == LLAMA3 and parameters["low_freq_factor"] >= parameters["high_freq_factor"]:
        return "but low_freq_factor must be below high_freq_factor"
    if name == YARN and _theta(config) <= 1:
        return "but yarn needs a rope_theta above 1"
    if name == YARN and _value("beta_slow", "beta_slow")(config) > _value("beta_fast", "beta_fast")(config):
        return "but beta_slow must be at most beta_fast"
    if name != YARN and parameters.get("mscale_all_dim"):
        return "but mscale_all_dim is of the type yarn only"
    if partial is None and (parameters.get("partial_rotary_factor") or 1) != 1:
        return _WHOLE
    return ""


def _incomplete(config: Json) -> bool:
    """Return True if the scaling depends on ``max_position_embeddings``, which training may change."""
    lacking = [key for key in ("factor", "original_max_position_embeddings") if _object(config).get(key) is None]
    return _named(config) in (LLAMA3, YARN) and bool(lacking)


def _written(settings: Settings) -> dict[str, Any]:
    """Return the object of transformers 5, without the keys that have their default."""
    kind = settings["rope_scaling_type"]
    written = {"rope_type": UNSCALED if kind == NONE else kind, "rope_theta": settings["rope_theta"]}
    for key, flag in _KEYS.items():
        if flag in FLAGS_OF[kind] and (key in _ALWAYS or settings[flag] != _DEFAULTS[flag]):
            written[key] = settings[flag]
    return written


def _written_with_share(settings: Settings) -> dict[str, Any]:
    return {**_written(settings), "partial_rotary_factor": settings["rotary_percent"]}
