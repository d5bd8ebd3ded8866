"""Published architectures as data: the settings of their config.json, their tensors, their limits.

Each class of transformers that megapar reads or writes is one ``PublishedArchitecture``, listed in ``published.py`` of
the model that implements it. The reader and the writer of config.json, the rows that refuse ``--save-hf``, the
conversion of tensors and docs/architectures.md are all driven by this list.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from megapar.schema.legal_values import Check

Json = Mapping[str, Any]
Settings = Mapping[str, Any]
"""Numbers of a model, by the field names of the flags that set them."""

ANY: Any = object()  # placeholder in ``only`` and ``implied`` for a setting that has no such value


@dataclass(frozen=True)
class Setting:
    """One key of config.json, in both directions.

    Attributes:
        name: The key. A key that sets two flags has two settings of its name.
        legal: Check of its type and bounds, see ``legal_values``.
        flag: Field name of the flag that it sets; "" if it sets none.
        only: The only supported value; any other one is refused, and this one is written.
        implied: Value that readers assume if the key is missing; it is therefore not written.
        written: megapar writes the key.
        retrained: Training may change it, so that the file of a trained model contains the model's value; or a function
            that says so for a whole config.json.
        to_flag: Returns the flag's value for a whole config.json; by default the key's own value.
        from_flags: Returns the key's value for a model's settings; by default ``only``, or the flag's value.
        refused: Returns the reason why the value in a config.json is not supported, "" if it is; printed after "KEY is
            VALUE, ".
        ignored: Consequence, for a warning, of a value other than zero and null if training ignores the key.
    """

    name: str
    legal: Check
    flag: str = ""
    only: Any = ANY
    implied: Any = ANY
    written: bool = True
    retrained: bool | Callable[[Json], bool] = False
    to_flag: Callable[[Json], Any] | None = None
    from_flags: Callable[[Settings], Any] | None = None
    refused: Callable[[Json], str] | None = None
    ignored: str = ""

    def flag_value(self, config: Json) -> Any:
        """Return the flag's value. Raises KeyError if a required key is missing."""
        return config[self.name] if self.to_flag is None else self.to_flag(config)

    def value(self, settings: Settings) -> Any:
        """Return the key's value for a model with these settings."""
        if self.from_flags is not None:
            return self.from_flags(settings)
        return settings[self.flag] if self.only is ANY else self.only

    def reason(self, config: Json) -> str:
        """Return the reason why this key's value is not supported, or "" if it is."""
        if self.refused is not None:
            return self.refused(config)
        if self.only is ANY or config.get(self.name, self.only) == self.only:
            return ""
        return f"and only {self.only!r} is supported"


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Restriction of some classes; each class lists its limits.

    Attributes:
        id: Name of the row that refuses a model beyond the limit.
        reads: Settings that it depends on, by the names of their flags.
        within: Returns True if a model's settings, the attributes of its argument, satisfy the limit.
        message: The limit in words.
        instead: Alternative that could be trained.
        way: Way to export a trained model nevertheless, if there is one.
        passing: Flags that satisfy the limit, as in a row.
        failing: Flags that violate it; "" if other rows refuse all flags that would.
    """

    id: str
    reads: tuple[str, ...]
    within: Callable[[Any], bool]
    message: str
    instead: str = ""
    way: str = ""
    passing: str = ""
    failing: str = ""


@dataclass(frozen=True, kw_only=True)
class PublishedArchitecture:
    """A class of transformers.

    Attributes:
        model_type: Name of its configuration in transformers.
        settings: Keys of config.json that are read or written, in the order in which they are written.
        defaults: Values that the class assumes for keys missing in config.json. Sizes (layers, widths, heads,
            vocabulary, experts) have no default: a folder without one of them is refused.
        flags: Flags that the class fixes without a key.
        fixed_sizes: Fields of the model's sizes that the class fixes and no flag sets.
        limits: Restrictions of the class.
        specific: Limits within which a model of megapar is saved as this class (``first_within``).
        renames: (pattern, replacement) pairs applied to the Hugging Face names of the parameter table.
        vectors: Patterns of the table's names of tensors that are [n] in the class and [1, n] in the table.
        whole: (pattern, replacement) pairs from names of parameters to names of tensors that the class stores in one,
            and the table in pieces: a layer's experts [E, .., I], whose middle dims are one dim in the file.
        inputs_first: These tensors have the dims of an expert in reverse order, inputs before outputs, and gate and up
            of a feature in pairs: [E, H, F, 2], whose last dims are one dim in the file. They may be in MXFP4.
        absent: Patterns of the names that its folders do not contain; these tensors are zero here.
        absent_without: More such patterns, by the key of config.json; a pattern applies if its key is false.
        fp32: Patterns of the names that its folders contain in fp32 whatever the dtype of the others.
        tied: Copies of tied tensors that some writers store, with the original of each.
        copies: Returns, for a config.json, more tensors that its folders store twice, with the original of each.
        shared: These tensors of one folder.
        rotary_halves: The class pairs features (i, i + D / 2) of a head for rotary positions and megapar pairs
            (2i, 2i + 1), so that the rows of queries and keys are stored in a different order.
        trained_as: Class that a model is saved as after training; "" for the same class.
        remark: Peculiarities, for the documentation.
    """

    name: str
    model_type: str
    settings: tuple[Setting, ...]
    defaults: Mapping[str, Any]
    flags: Mapping[str, Any] = field(default_factory=dict)
    fixed_sizes: Mapping[str, Any] = field(default_factory=dict)
    limits: tuple[Limit, ...] = ()
    specific: tuple[Limit, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    vectors: tuple[str, ...] = ()
    whole: tuple[tuple[str, str], ...] = ()
    inputs_first: bool = False
    absent: tuple[str, ...] = ()
    absent_without: Mapping[str, str] = field(default_factory=dict)
    fp32: tuple[str, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    copies: Callable[[Json], Mapping[str, str]] | None = None
    shared: Mapping[str, str] = field(default_factory=dict)
    rotary_halves: bool = False
    trained_as: str = ""
    remark: str = ""

    def hf_name(self, name: str) -> str | None:
        """Return the name of a parameter table's tensor in the class's folders, or None if they do not contain it."""
        if any(re.search(pattern, name) for pattern in self.absent):
            return None
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name

    def hf_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape in the class's folders of a tensor of the parameter table."""
        return shape[1:] if any(re.search(pattern, name) for pattern in self.vectors) else shape

    def is_fp32(self, hf_name: str) -> bool:
        """Return True if the class's folders contain the tensor in fp32 whatever the dtype of the others."""
        return any(re.search(pattern, hf_name) for pattern in self.fp32)

    def of_folder(self, config: Json) -> PublishedArchitecture:
        """Return this class as stored by a folder with this config.json."""
        absent = tuple(pattern for key, pattern in self.absent_without.items() if not config.get(key, False))
        stored = replace(self, absent=(*self.absent, *absent)) if absent else self
        return stored if self.copies is None else replace(stored, shared=self.copies(config))

    @property
    def doubled(self) -> dict[str, str]:
        """Names of all tensors that a folder may store twice, with the original of each."""
        return {**self.tied, **self.shared}

    def config(self, settings: Settings) -> dict[str, Any]:
        """Return the content of config.json for a model with these settings, its ``dtype`` as a string included."""
        content: dict[str, Any] = {"architectures": [self.name], "model_type": self.model_type}
        for setting in self.settings:
            if setting.written and (value := setting.value(settings)) != setting.implied:
                content[setting.name] = value
        return content

    def continued(self, published: Json, settings: Settings) -> dict[str, Any]:
        """Return the content of config.json for a model with these settings that was loaded from a published folder.

        A key keeps the folder's value, also where megapar does not read it, unless its flag has been changed since.

        Args:
            published: The folder's config.json, perhaps of another class that is trained as this one.
            settings: The model's settings, its ``dtype`` included.
        """
        whole = {**self.defaults, **published}
        content = {**self.without_code(published), "architectures": [self.name]}
        content |= self.retrained(published, settings)
        for setting in self.settings:
            if setting.flag and setting.written and setting.flag_value(whole) != settings[setting.flag]:
                content[setting.name] = setting.value(settings)
        if content.get("quantization_config"):
            del content["quantization_config"]  # the weights are written as numbers
        names = [name for name in ("dtype", "torch_dtype") if name in published]
        return content | dict.fromkeys(names or ["dtype"], settings["dtype"])

    def without_code(self, config: Json) -> dict[str, Any]:
        """Return config.json without references to code of its folder, which is not copied.

        Its ``model_type`` may be one that only this code defines; transformers' own name of the class takes its place.
        """
        if "auto_map" not in config:
            return dict(config)
        return {**{key: value for key, value in config.items() if key != "auto_map"}, "model_type": self.model_type}

    def retrained(self, config: Json, settings: Settings) -> dict[str, Any]:
        """Return the keys that training may have changed, with the model's values."""
        changed = {}
        for setting in self.settings:
            if setting.retrained(config) if callable(setting.retrained) else setting.retrained:
                value = setting.value(settings)
                if setting.name in config or value != setting.implied:
                    changed[setting.name] = value
        return changed

    def sets(self, flag: str) -> bool:
        """Return True if a key of config.json sets the flag."""
        return any(setting.flag == flag for setting in self.settings)


def first_within(architectures: Iterable[PublishedArchitecture], settings: Settings) -> str | None:
    """Return the name of the first class whose ``specific`` limits a model is within; None if one needs more settings.

    Args:
        architectures: Classes, the more specific ones first.
        settings: The model's settings, of which those with a mistake are missing.
    """
    model = SimpleNamespace(**settings)
    for architecture in architectures:
        for limit in architecture.specific:
            if any(read not in settings for read in limit.reads):
                return None
            if not limit.within(model):
                break
        else:
            return architecture.name
    return None


@dataclass(frozen=True, kw_only=True)
class PublishedForms:
    """Published architectures that a model of megapar can be loaded from or saved as.

    Attributes:
        architectures: The classes; empty if the model has no Hugging Face form.
        settings: Returns a model's numbers by flag name, given its sizes.
        own: Returns the name of the class that a model with these settings is saved as, unless it was loaded from a
            published folder; None if a setting that decides is missing.
    """

    architectures: tuple[PublishedArchitecture, ...] = ()
    settings: Callable[[Any], Settings] = lambda sizes: {}
    own: Callable[[Settings], str | None] = lambda settings: None
