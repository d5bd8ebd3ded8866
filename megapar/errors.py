"""Typed errors a caller may want to catch. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Complaint:
    """One thing that is wrong with a configuration.

    rule: the id of the rule or check that was broken.
    message: what is wrong, with the values.
    fix: what to do, with the nearest legal values; may be empty.
    """

    rule: str
    message: str
    fix: str = ""

    def __str__(self) -> str:
        return f"[{self.rule}] {self.message}" + (f" {self.fix}" if self.fix else "")


class MegaparError(Exception):
    """Base of all errors that megapar raises on purpose."""

    exit_status = 1


class ConfigError(MegaparError):
    """The configuration is refused before any process group exists; carries every complaint at once."""

    exit_status = 2

    def __init__(self, complaints: Sequence[Complaint]) -> None:
        self.complaints = tuple(complaints)
        super().__init__("\n".join(str(complaint) for complaint in self.complaints))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Complaint, ...]]]:
        return type(self), (self.complaints,)


class DataError(MegaparError):
    """A corpus, a tokenizer or a sample cannot be used."""


class CheckpointError(MegaparError):
    """A checkpoint is missing, damaged, incomplete, or of another model."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint that is sound, but of another model or schedule: an older one would fit no better."""

    exit_status = 2


class FolderOwnedError(CheckpointError):
    """The folder of ``--save`` belongs to another run that is alive."""

    exit_status = 2


class FolderLostError(CheckpointError):
    """Another run has become the owner of the folder of ``--save``; this one must not go on."""


class DistributedError(MegaparError):
    """A process group could not be made or a rank did not answer."""


class TrainingError(MegaparError):
    """Training cannot go on, for example because the loss is not finite.

    samples: that it comes from, A-B, where that is known.
    """

    def __init__(self, message: str, samples: str = "") -> None:
        super().__init__(message)
        self.samples = samples


class CorruptionError(TrainingError):
    """A rank holds or computes wrong numbers.

    ranks: those to blame, or those among which nobody can say who it is; () where not even that is known. parameters:
    names of what is wrong.
    """

    def __init__(self, message: str, ranks: Sequence[int] = (), parameters: Sequence[str] = ()) -> None:
        self.ranks = tuple(ranks)
        self.parameters = tuple(parameters)
        super().__init__(message)
