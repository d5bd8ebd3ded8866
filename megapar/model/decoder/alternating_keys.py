"""config.json keys of classes whose layers have a window or not, each of the two kinds with its rotary positions.

``rope_parameters`` has an object for each kind. Before transformers 5 ``rope_theta`` and ``rope_scaling`` were those of
the layers that see all keys, and Gemma 3 had a key for the base of the others.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from megapar.model.decoder.keys import alternating, every_kind, of_both, wrong_list
from megapar.model.decoder.layer_ropes import rope_or_same, rope_text
from megapar.model.decoder.rope_keys import UNSCALED, object_of, rope_of, rope_settings
from megapar.model.decoder.windows import window_or_none
from megapar.schema.legal_values import (
    FULL,
    OPTIONAL_SIZE,
    SIZE,
    SLIDING,
    THETA,
    anything,
    rope,
    rope_by_kind,
    text,
    true_or_false,
)
from megapar.schema.published import Json, Setting, Settings


def alternating_settings(
    settings: tuple[Setting, ...], every: int, *, full: float, window: float, old_every: str = "", old_window: str = ""
) -> tuple[Setting, ...]:
    """Return ``settings``, of a class with one kind of layers, with window and rotary settings for two kinds.

    Args:
        every: The last of every this many layers sees all keys, unless ``layer_types`` says otherwise.
        full: Base of the rotary angles in layers that see all keys, if config.json does not say.
        window: Base in layers with a window.
        old_every: Old key of ``every``; "" for a class without one.
        old_window: Old key of the base in layers with a window.
    """
    sliding = partial(alternating, every, old_every)
    old = (Setting(old_every, SIZE, written=False),) if old_every else ()
    made = (
        *of_both(sliding, "sliding_window", OPTIONAL_SIZE, _window, refused=partial(_sizeless, sliding)),
        *of_both(sliding, "layer_types", anything, every_kind, refused=wrong_list),
        *old,
        *_Ropes(sliding, full, window, old_window).settings,
    )
    names = {one.name for one in made}
    return (*(one for one in settings if one.name not in names), *made)


def _sizeless(sliding: Any, config: Json) -> str:
    lacks = config["sliding_window"] is None and any(sliding(config))
    return "but layers with a window need to know of how many keys" if lacks else ""


def _window(settings: Settings) -> int:
    """Return the window; the class makes its mask also for a model without one."""
    return window_or_none(settings["window_size"]) or int(settings["max_position_embeddings"])


_OLD_SCALING = Setting("rope_scaling", rope, written=False)


class _Ropes:
    """The settings of rotary positions, made of those of a class with one rope, for each kind of layers."""

    def __init__(self, sliding: Any, full: float, window: float, old_window: str) -> None:
        self._sliding, self._bases, self._old_window = sliding, {FULL: full, SLIDING: window}, old_window
        self._main = rope_settings()[0]

    @property
    def settings(self) -> tuple[Setting, ...]:
        main, *others = (
            replace(one, legal=rope_by_kind, to_flag=partial(self._of_full, one), refused=None, retrained=False)
            for one in rope_settings()
            if one.flag
        )
        main = replace(main, from_flags=_written, refused=self._refused, retrained=self._incomplete)
        window = replace(main, flag="window_rope", to_flag=self._window_rope)
        old = (Setting(self._old_window, THETA, written=False),) if self._old_window else ()
        return (main, window, *others, Setting("rope_theta", THETA, written=False), *old, _OLD_SCALING)

    def _of(self, kind: str, config: Json) -> dict[str, Any]:
        """Return a config.json whose layers all have the rope of this kind."""
        given = dict((config.get("rope_parameters") or {}).get(kind) or {})
        given |= (config.get("rope_scaling") or {}) if kind == FULL else {}
        old = config.get("rope_theta" if kind == FULL else self._old_window)
        return {**config, "rope_parameters": given, "rope_scaling": None, "rope_theta": old or self._bases[kind]}

    def _of_full(self, one: Setting, config: Json) -> Any:
        return one.flag_value(self._of(FULL, config))

    def _window_rope(self, config: Json) -> str:
        own, others = (rope_of(self._of(kind, config)) for kind in (SLIDING, FULL))
        return rope_text(own if any(self._sliding(config)) and own != others else None)

    def _refused(self, config: Json) -> str:
        parameters, base = config.get("rope_parameters") or {}, config.get("rope_theta")
        if parameters and not parameters.keys() & {FULL, SLIDING} and not self._usual(parameters):
            return f"and only an object for each of {FULL} and {SLIDING} is supported"
        if not self._old_window and base not in (None, self._bases[SLIDING]):
            return f"but versions of transformers differ in the base of {SLIDING} beside rope_theta {base}"
        reasons = (self._main.reason(self._of(kind, config)) for kind in (FULL, SLIDING))
        return next((reason for reason in reasons if reason), "")

    def _usual(self, parameters: Json) -> bool:
        """Return True if one object for all layers equals the class's default, which other versions write."""
        base = parameters.get("rope_theta") or self._bases[FULL]
        return parameters.get("rope_type") in (None, UNSCALED) and all(base == own for own in self._bases.values())

    def _incomplete(self, config: Json) -> bool:
        retrained = self._main.retrained
        return callable(retrained) and any(retrained(self._of(kind, config)) for kind in (FULL, SLIDING))


def _uncapped(name: str) -> Setting:
    return Setting(name, anything, written=False, refused=lambda c: "but it is not capped here" if c.get(name) else "")


def _query_scale(config: Json) -> float:
    scalar = config["query_pre_attn_scalar"]
    return 0.0 if scalar == config["head_dim"] else float(scalar**-0.5)


GEMMA = (
    Setting("hidden_activation", text, only="gelu_pytorch_tanh"),
    Setting(
        "query_pre_attn_scalar",
        SIZE,
        "softmax_scale",
        to_flag=_query_scale,
        from_flags=lambda s: round(s["softmax_scale"] ** -2) if s["softmax_scale"] else s["head_dim"],
    ),
    _uncapped("attn_logit_softcapping"),
    _uncapped("final_logit_softcapping"),
    Setting(
        "use_bidirectional_attention",
        true_or_false,
        written=False,
        refused=lambda config: (
            "but attention here sees earlier positions only" if config.get("use_bidirectional_attention") else ""
        ),
    ),
)
"""Settings of Gemma 3 alone."""


def _written(settings: Settings) -> dict[str, Any]:
    """Return an object for each kind of layers."""
    full = rope_settings()[0].value(settings)
    own = rope_or_same(settings["window_rope"])
    return {FULL: full, SLIDING: full if own is None else object_of(own)}
