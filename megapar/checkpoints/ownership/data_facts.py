"""The data of a run, as its checkpoints record it, and the differences between the data of two runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from megapar.arguments import FLAGS, Config
from megapar.data.corpus import DEFAULT_SPLIT
from megapar.data.fingerprint import Fingerprint, fingerprint_of_dataset, fingerprint_of_file, fingerprints_of
from megapar.data.tokens.split import Split
from megapar.errors import DataError
from megapar.schema.phase_plan import PhaseSpan

KNOWLEDGE = ("phrase_file", "entity_file", "triples_file")  # flags of the files that are read next to the sources
_LONGEST = 300  # maximum characters of a source's name
PACKS = "packs"  # the fact of conversations that follows from all others, and decides the samples
SEPARATE = "apart"  # replaces the split if held-out documents have files of theirs


class Difference(NamedTuple):
    """A difference between the data of two runs. ``field`` is its name in --override-data."""

    field: str
    text: str


@dataclass(frozen=True)
class DataFacts:
    """Facts about the data of a run.

    Attributes:
        sources: Sources of the mixture, in order.
        split: Shares as in --split, or SEPARATE.
        seed: Seed of the order of samples.
        seq_length: Tokens per sample.
        knowledge: Files of the flags of KNOWLEDGE. None for a checkpoint that does not record them.
        chat: Facts of conversations and their packs, {} for text. None if they are not known, in a checkpoint for text.
    """

    sources: tuple[Fingerprint, ...]
    split: str
    seed: int
    seq_length: int
    knowledge: tuple[Fingerprint, ...] | None = None
    chat: Mapping[str, str] | None = None

    @classmethod
    def of(cls, config: Config, *, may_read: bool = True) -> DataFacts:
        """Return the facts of a configuration; without ``may_read``, only cached fingerprints. Raises DataError."""
        data = config.data
        if data.data_source == "hf":
            sources: tuple[Fingerprint, ...] = (fingerprint_of_dataset(str(data.hf_dataset), data.text_field),)
        else:
            sources = fingerprints_of(data.data_path, data.text_field, per=data.document_per, may_read=may_read)
        split = SEPARATE if data.eval_data_path else data.split or DEFAULT_SPLIT
        knowledge = knowledge_of(config, may_read=may_read)
        return cls(sources, split, config.training.seed, config.model.seq_length, knowledge)

    @property
    def weights(self) -> tuple[Fraction, ...] | None:
        """Weights of the sources. None for a single source."""
        weights = tuple(source.weight for source in self.sources if source.weight is not None)
        return weights if len(weights) > 1 else None

    @property
    def unread(self) -> int:
        """Number of bytes that must be read to know all fingerprints."""
        return sum(item.unread for item in (*self.sources, *(self.knowledge or ())))

    def of_phase(self, span: PhaseSpan) -> DataFacts:
        """Return the facts of a phase of the run."""
        known = {source.name: source for source in self.sources}
        sources = tuple(replace(known[name], weight=weight) for name, weight in span.weights)
        return replace(self, sources=sources or self.sources, seq_length=span.seq_length)

    def to_json(self) -> dict[str, Any]:
        """Return the facts as JSON values."""
        sources = []
        for source in self.sources:
            weight = None if source.weight is None else str(source.weight)
            name = source.name[:_LONGEST]
            facts = {"name": name, "fingerprint": source.value, "weight": weight, "cut": source.cut}
            sources.append(facts | ({"named": True} if source.named else {}))
        order = {"sources": sources, "split": self.split, "seed": self.seed, "seq_length": self.seq_length}
        knowledge = {} if self.knowledge is None else {"knowledge": {file.name: file.value for file in self.knowledge}}
        return order | knowledge | ({"chat": dict(self.chat)} if self.chat else {})

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> DataFacts:
        """Return the facts from the output of ``to_json``. Raises ValueError, KeyError or TypeError otherwise."""
        keys = itemgetter("name", "fingerprint", "weight", "cut")
        sources = tuple(
            Fingerprint(str(name)[:_LONGEST], str(content), _fraction(weight), str(cut), named=named)
            for (name, content, weight, cut), named in (
                (keys(source), source.get("named") is True) for source in value["sources"]
            )
        )
        split, seed, seq_length = value["split"], value["seed"], value["seq_length"]
        if not sources or not isinstance(seed, int) or not isinstance(seq_length, int) or seq_length < 1:
            raise ValueError(f"{len(sources)} sources, seed {seed!r}, sequence length {seq_length!r}")
        if len(sources) > 1 and any(source.weight is None for source in sources):
            raise ValueError("a mixture without weights")
        if split != SEPARATE:
            try:
                Split.parse(split)
            except (DataError, AttributeError) as error:
                raise ValueError(str(error)) from error
        chat = {str(name): str(fact)[:_LONGEST] for name, fact in dict(value.get("chat") or {}).items()}
        return cls(sources, split, seed, seq_length, _knowledge(value.get("knowledge")), chat)

    def matched(self, later: DataFacts) -> list[int | None]:
        """Return the index of each source of ``later`` among these sources, or None.

        Sources are compared by their content, or by their name if the content is not known; two that --data-path names
        have the same name, too.
        """
        matches: list[int | None] = []
        for source in later.sources:
            same = (
                number for number, saved in enumerate(self.sources) if number not in matches and _is_same(saved, source)
            )
            matches.append(next(same, None))
        return matches

    def differences(self, later: DataFacts) -> list[Difference]:
        """Return the differences between this data and that of a run that resumes from it."""
        pairs = self.matched(later)
        differences = [*self._sources(later, pairs), *self._weights(later, pairs), *self._split(later, pairs)]
        if self.seed != later.seed:
            differences.append(Difference("seed", f"--seed is {self.seed} there and {later.seed} here"))
        if self.seq_length != later.seq_length:
            text = f"--seq-length is {self.seq_length} there and {later.seq_length} here"
            differences.append(Difference("seq-length", text))
        return [*differences, *self._knowledge(later), *self._chat(later)]

    def _sources(self, later: DataFacts, pairs: list[int | None]) -> list[Difference]:
        removed = [source for number, source in enumerate(self.sources) if number not in pairs]
        new = [
            source for source, number in zip(later.sources, pairs, strict=True) if number is None and not source.unread
        ]
        if not new and (not removed or any(source.unread for source in later.sources)):
            return []
        names = {source.name for source in removed} & {source.name for source in new}
        changed = [f"{name} has different content here than there" for name in sorted(names)]
        only = [
            f"{', '.join(unmatched)} {'is' if len(unmatched) == 1 else 'are'} read {where} only"
            for side, where in ((removed, "there"), (new, "here"))
            if (unmatched := [source.name for source in side if source.name not in names])
        ]
        return [Difference("sources", ", ".join([*changed, *only]))]

    def _chat(self, later: DataFacts) -> list[Difference]:
        there, here = self.chat or {}, later.chat
        if here is None or there == here:
            return []
        if not there or not here:
            what = ["conversations" if facts else "text" for facts in (there, here)]
            return [Difference("chat", f"the data is {what[0]} there and {what[1]} here (--task)")]
        if there.get(PACKS) == here[PACKS]:
            return []
        changed = [name for name in here if there.get(name) != here[name]]
        named = [name for name in changed if name != PACKS] or changed
        texts = [f"{name} is {there.get(name, 'unknown')} there and {here[name]} here" for name in named]
        return [Difference("chat", f"conversations become other samples: {', '.join(texts)}")]

    def _knowledge(self, later: DataFacts) -> list[Difference]:
        if self.knowledge is None or later.knowledge is None:
            return []
        there = {file.name: file.value for file in self.knowledge}
        here = {file.name: file.value for file in later.knowledge}
        unread = {file.name for file in later.knowledge if file.unread}
        texts = [f"{name} is given there only" for name in there if name not in here]
        texts += [f"{name} is given here only" for name in here if name not in there]
        both = [name for name in here if name in there and name not in unread]
        texts += [f"{name} has different content here than there" for name in both if there[name] != here[name]]
        return [Difference("knowledge", ", ".join(texts))] if texts else []

    def _weights(self, later: DataFacts, pairs: list[int | None]) -> list[Difference]:
        """Compare the weights of the sources in both. Adding or removing a source scales their shares equally."""
        both = [(self.sources[n], source) for n, source in zip(pairs, later.sources, strict=True) if n is not None]
        shares = [_shares([pair[side].weight for pair in both]) for side in (0, 1)]
        if shares[0] == shares[1]:
            return []
        texts = [", ".join(f"{pair[side].name} {float(pair[side].weight or 1):g}" for pair in both) for side in (0, 1)]
        return [Difference("weights", f"weights are {texts[0]} there and {texts[1]} here")]

    def _split(self, later: DataFacts, pairs: list[int | None]) -> list[Difference]:
        cuts = [
            (self.sources[n].cut, source.cut) for n, source in zip(pairs, later.sources, strict=True) if n is not None
        ]
        if not any(there or here for there, here in cuts):
            return []  # random tokens have no documents
        if _parsed(self.split) != _parsed(later.split):
            here, there = _held_out(later.split), _held_out(self.split)
            return [Difference("split", f"held-out documents are given by {there} there and by {here} here")]
        other = [pair for pair in cuts if pair[0] != pair[1]]
        if other and self.split != SEPARATE:
            text = f"documents are split by their {other[0][0]} there and by their {other[0][1]} here"
            return [Difference("split", text)]
        return []


def _is_same(saved: Fingerprint, source: Fingerprint) -> bool:
    if saved.named and source.named and saved.name != source.name:
        return False
    return source.value == saved.value or (source.value is None and source.name == saved.name)


def knowledge_of(config: Config, *, may_read: bool) -> tuple[Fingerprint, ...]:
    """Return fingerprints of the files of KNOWLEDGE. For ``may_read``, see ``DataFacts.of``. Raises DataError."""
    paths = {FLAGS[name].spelling: getattr(config.data, name) for name in KNOWLEDGE}
    given = ((spelling, Path(path)) for spelling, path in paths.items() if path is not None)
    return tuple(fingerprint_of_file(spelling, path, may_read=may_read) for spelling, path in given)


def _knowledge(value: Any) -> tuple[Fingerprint, ...] | None:
    if value is None:
        return None
    contents = {str(name)[:_LONGEST]: str(content) for name, content in dict(value).items()}
    return tuple(Fingerprint(name, content, None, "") for name, content in contents.items())


def _shares(weights: list[Fraction | None]) -> list[Fraction]:
    known = [Fraction(1) if weight is None else weight for weight in weights]
    return [weight / sum(known) for weight in known]


def _held_out(split: str) -> str:
    return "--eval-data-path" if split == SEPARATE else f"--split {split}"


def _parsed(split: str) -> object:
    return split if split == SEPARATE else Split.parse(split)


def _fraction(text: Any) -> Fraction | None:
    if text is None:
        return None
    if not isinstance(text, str) or not re.fullmatch(r"[1-9][0-9]{0,99}(/[1-9][0-9]{0,99})?", text):
        raise ValueError(f"the weight {text!r:.100}")
    return Fraction(text)
