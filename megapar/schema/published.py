"""The form of a published architecture: the settings of its config.json, its tensors, its limits, all as data.

Each class of transformers that megapar reads or writes is one ``PublishedArchitecture``, listed in ``published.py`` of
the model that it is an instance of. The reader of config.json, the writer, the rows that refuse ``--save-hf``, the
conversion of tensors and docs/architectures.md all follow this list.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megapar.schema.legal_values import Check

Json = Mapping[str, Any]
Settings = Mapping[str, Any]
"""The numbers of a model by the field names of the flags that set them."""

ANY: Any = object()
"""Stands for no particular value: ``only`` and ``implied`` of a setting that has neither."""


@dataclass(frozen=True)
class Setting:
    """One key of config.json, in both directions.

    Attributes:
        name: The key. Where one key stands for two flags, two settings have its name.
        legal: The check of its type and bounds, see ``legal_values``.
        flag: Field name of the flag that it stands for; "" for a key that stands for none.
        only: The one value that is built here; another one is refused, and this one is written.
        implied: The value that readers assume for a missing key, which is therefore not written.
        written: Files written here have the key.
        retrained: Training may change it, so that the file of a trained model gets the model's value.
        to_flag: The flag's value from a whole config.json; by default the key's own value.
        from_flags: The key's value from a model's settings; by default ``only``, or the flag's value.
        refused: The reason why the value in a config.json is not built, "" where it is; read after "KEY is VALUE, ".
        ignored: The consequence of a value that is neither zero nor null, for a warning, where training ignores it.
    """

    name: str
    legal: Check
    flag: str = ""
    only: Any = ANY
    implied: Any = ANY
    written: bool = True
    retrained: bool = False
    to_flag: Callable[[Json], Any] | None = None
    from_flags: Callable[[Settings], Any] | None = None
    refused: Callable[[Json], str] | None = None
    ignored: str = ""

    def flag_value(self, config: Json) -> Any:
        """The flag's value. Raises KeyError for a key that is needed and missing."""
        return config[self.name] if self.to_flag is None else self.to_flag(config)

    def value(self, settings: Settings) -> Any:
        """The key's value for a model with these settings."""
        if self.from_flags is not None:
            return self.from_flags(settings)
        return settings[self.flag] if self.only is ANY else self.only

    def reason(self, config: Json) -> str:
        """The reason why this config.json cannot be a model here; "" where it can, as far as this key decides."""
        if self.refused is not None:
            return self.refused(config)
        if self.only is ANY or config.get(self.name, self.only) == self.only:
            return ""
        return f"where {self.only!r} is built"


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Something that some classes cannot be; each class lists its limits.

    Attributes:
        id: The name of the row that refuses it.
        reads: Settings, by the names of their flags.
        within: True where a model's settings, its argument's attributes, keep the limit.
        message: The limit in words.
        instead: What else could be trained.
        way: How a trained model can be exported all the same, where it can.
        passing: Flags that keep the limit, as in a row.
        failing: Flags that break it; "" where no flags reach the limit, because others are refused before.
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
        name: The name of the class.
        model_type: The name of its configuration in transformers.
        settings: The keys of config.json that are read or written, in the order in which they are written.
        defaults: The values that the class assumes for keys that config.json leaves out. Sizes (layers, widths, heads,
            vocabulary, experts) have none: a folder that leaves one out is refused.
        flags: Flags that the class fixes without a key.
        fixed_sizes: Fields of the model's sizes that the class fixes and no flag sets.
        limits: What the class cannot be.
        renames: (pattern, replacement) over the Hugging Face names of the parameter table.
        absent: Patterns of those names that its folders do not hold; these tensors are zero here.
        absent_without: More such patterns, each by the key of config.json that is false where it applies.
        tied: Copies of tied tensors that some writers store, each with its original.
        rotary_halves: Rotary pairs are features (i, i + D / 2) of a head, where they are (2i, 2i + 1) here, so that
            rows of queries and keys are stored in another order.
        trained_as: The class that a model is written as once a run has trained it; "" for the same.
        remark: What is special, for the documentation.
    """

    name: str
    model_type: str
    settings: tuple[Setting, ...]
    defaults: Mapping[str, Any]
    flags: Mapping[str, Any] = field(default_factory=dict)
    fixed_sizes: Mapping[str, Any] = field(default_factory=dict)
    limits: tuple[Limit, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    absent: tuple[str, ...] = ()
    absent_without: Mapping[str, str] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    rotary_halves: bool = False
    trained_as: str = ""
    remark: str = ""

    def hf_name(self, name: str) -> str | None:
        """The name in the class's folders of a tensor of the parameter table; None for one that they do not hold."""
        if any(re.search(pattern, name) for pattern in self.absent):
            return None
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name

    def of_folder(self, config: Json) -> PublishedArchitecture:
        """This class as a folder with this config.json stores it."""
        absent = tuple(pattern for key, pattern in self.absent_without.items() if not config.get(key, False))
        return replace(self, absent=(*self.absent, *absent)) if absent else self

    def config(self, settings: Settings) -> dict[str, Any]:
        """The content of config.json for a model with these settings, which includes its ``dtype`` as a text."""
        found: dict[str, Any] = {"architectures": [self.name], "model_type": self.model_type}
        for setting in self.settings:
            if setting.written and (value := setting.value(settings)) != setting.implied:
                found[setting.name] = value
        return found

    def retrained(self, config: Json, settings: Settings) -> dict[str, Any]:
        """The keys that training may have changed, with the model's values."""
        changed = {}
        for setting in self.settings:
            if setting.retrained:
                value = setting.value(settings)
                if setting.name in config or value != setting.implied:
                    changed[setting.name] = value
        return changed

    def sets(self, flag: str) -> bool:
        """A key of config.json stands for the flag."""
        return any(setting.flag == flag for setting in self.settings)


@dataclass(frozen=True, kw_only=True)
class PublishedForms:
    """The published architectures that a model of megapar can be.

    Attributes:
        architectures: The classes; empty for a model without a Hugging Face form.
        settings: A model's numbers by the names of flags, from its sizes.
        own: The name of the class that a model with these settings is written as where it is not from a published
            folder; None where a setting that decides is missing.
    """

    architectures: tuple[PublishedArchitecture, ...] = ()
    settings: Callable[[Any], Settings] = lambda sizes: {}
    own: Callable[[Settings], str | None] = lambda settings: None
