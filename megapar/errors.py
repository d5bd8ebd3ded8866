"""Typed errors that callers may want to catch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def listed(texts: Sequence[str], most: int, separator: str = ", ") -> str:
    """Join the first ``most`` texts for a message, and count the others."""
    left = len(texts) - most
    shown = separator.join(texts[:most])
    return f"{shown}{separator.strip(', ')} and {left} more" if left > 0 else shown


@dataclass(frozen=True)
class Complaint:
    """One problem with a configuration.

    Attributes:
        rule: Id of the rule or check that failed.
        message: The problem, with the values.
        fix: The action to take, with the nearest legal values; may be empty.
    """

    rule: str
    message: str
    fix: str = ""

    def __str__(self) -> str:
        return f"[{self.rule}] {self.message}" + (f" {self.fix}" if self.fix else "")


class MegaparError(Exception):
    """Base class of all errors that megapar raises deliberately."""

    exit_status = 1


class ConfigError(MegaparError):
    """The configuration is refused before any process group exists, for all ``complaints`` about it."""

    exit_status = 2

    def __init__(self, complaints: Sequence[Complaint]) -> None:
        self.complaints = tuple(complaints)
        super().__init__("\n".join(str(complaint) for complaint in self.complaints))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Complaint, ...]]]:
        return type(self), (self.complaints,)


class DataError(MegaparError):
    """A corpus, a tokenizer or a sample cannot be used."""


class CheckpointError(MegaparError):
    """A checkpoint is missing, damaged, incomplete, or for a different model."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint is valid, but for a different model or schedule, so that an older one would not fit either."""

    exit_status = 2


class FolderOwnedError(CheckpointError):
    """The folder of ``--save`` belongs to another run, which is still alive."""

    exit_status = 2


class FolderLostError(CheckpointError):
    """Another run has taken over the folder of ``--save``, so this run must stop."""


_WRONG_PATHS = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)


def input_status(error: MegaparError | OSError) -> int:
    """Return the exit status of an error in what a command reads before its work: 2, like a refusal.

    It is 1 if a disk, a network or a process failed under it, which a restart may cure.
    """
    if isinstance(error, MegaparError) and not isinstance(error.__cause__, OSError):
        return 2 if isinstance(error, DataError | CheckpointError) else error.exit_status
    return 2 if isinstance(error, _WRONG_PATHS) or isinstance(error.__cause__, _WRONG_PATHS) else 1


class DistributedError(MegaparError):
    """A process group could not be created, or a rank did not respond."""


class TrainingError(MegaparError):
    """Training cannot continue, for example because the loss is not finite.

    Attributes:
        samples: Range ``A-B`` of the samples that cause it; "" if unknown.
    """

    def __init__(self, message: str, samples: str = "") -> None:
        super().__init__(message)
        self.samples = samples


class CorruptionError(TrainingError):
    """A rank stores or computes wrong numbers.

    Attributes:
        ranks: The faulty ranks, or the candidates if the faulty one cannot be identified; () if unknown.
        parameters: Names of the wrong parameters.
    """

    def __init__(self, message: str, ranks: Sequence[int] = (), parameters: Sequence[str] = ()) -> None:
        self.ranks = tuple(ranks)
        self.parameters = tuple(parameters)
        super().__init__(message)


class UnverifiedError(CheckpointError):
    """A run found wrong numbers, and no remaining checkpoint is known to precede them."""

    exit_status = 2
