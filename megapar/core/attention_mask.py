"""The attention mask of a micro-batch: which positions attend to which, as a value on the host.

It is made once per micro-batch. The kernel of attention (``device.attention.table``), the tiles of context parallelism,
and the cost and FLOPs of a layer follow from it. ``device.attention.mask`` has the tensors that kernels need. A
compiled function must not take it, because each new value would compile the function again.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property


@dataclass(frozen=True)
class AttentionMask:
    """The pairs of positions that may attend to each other, each within its sequence.

    Attributes:
        samples: Sequences of the micro-batch.
        length: Positions per sequence, on all ranks together.
        causal: A position attends to itself and the positions before it; False: also to those after it.
        ends: Per sample, the position after each document, beyond which no position attends; the last is ``length``.
            None: a sample is one document.
        padded: No position attends to padding. False if there is none, or if it comes after causal text.
        lengths: Per sample, positions before the padding, which is at the end; None if only the device knows them.
        memory: Keys before the first position, to which all positions attend (ERNIE 3.0's earlier segment).
        window: The most keys that a position of a causal mask attends to, itself included; None for any number.
    """

    samples: int
    length: int
    causal: bool
    ends: tuple[tuple[int, ...], ...] | None = None
    padded: bool = False
    lengths: tuple[int, ...] | None = None
    memory: int = 0
    window: int | None = None

    @classmethod
    def of(
        cls,
        samples: int,
        length: int,
        *,
        causal: bool,
        ends: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
    ) -> AttentionMask:
        """Make a mask of documents or padding. ends: indices into samples * length, as in micro-batches."""
        by_sample = None
        if ends is not None:
            cut = [bisect.bisect_right(ends, sample * length) for sample in range(samples + 1)]
            by_sample = tuple(
                tuple(end - sample * length for end in ends[cut[sample] : cut[sample + 1]]) for sample in range(samples)
            )
        text = None if lengths is None else tuple(lengths)
        return cls(samples, length, causal, by_sample, lengths is not None, text)

    @classmethod
    def of_documents(cls, ends: Sequence[int], samples: int = 1, *, causal: bool = True) -> AttentionMask:
        """Make the mask of documents that fill ``samples`` sequences of one length. ends: as in ``of``."""
        return cls.of(samples, ends[-1] // samples, causal=causal, ends=ends)

    @cached_property
    def flat_ends(self) -> tuple[int, ...]:
        """The position after each document in samples * length, ascending."""
        ends = self.ends or ((self.length,),) * self.samples
        return tuple(sample * self.length + end for sample, own in enumerate(ends) for end in own)

    @cached_property
    def document_lengths(self) -> tuple[int, ...]:
        """Positions of each document."""
        return tuple(end - start for start, end in zip((0, *self.flat_ends), self.flat_ends, strict=False))

    def within(self, window: int) -> AttentionMask:
        """Return the mask of a layer whose positions attend to at most ``window`` keys; 0 for any number.

        It is this mask where the window hides nothing. Raises ValueError if a position also attends to later ones, or
        to a memory.
        """
        if not window:
            return self
        if not self.causal or self.memory:
            raise ValueError(f"a window of {window} keys ends at its position: pass a causal mask without a memory")
        longest = self.length if self.ends is None else max(self.document_lengths)
        return self if window >= longest else replace(self, window=window)

    def first_key(self, position: int) -> int:
        """Return the first key that a position of a causal mask attends to, in any sample, after those of a memory."""
        first = 0 if self.window is None else max(0, position + 1 - self.window)
        if self.ends is None:
            return first
        starts = ((0, *ends)[bisect.bisect_right(ends, position)] for ends in self.ends)
        return max(first, min(starts))

    @property
    def mean_keys(self) -> float:
        """Keys per position whose scores kernels compute, without regard to documents; all of them with a memory."""
        if self.memory:
            return float(self.memory + self.length)
        if self.window is not None:  # the first positions have fewer: half of a window, as of a whole causal sample
            return self.window * (1 - 0.5 * self.window / self.length)
        return self.length * (0.5 if self.causal else 1.0)

    def groups(self) -> list[tuple[int | None, tuple[int, ...], int]]:
        """Return (sample, document ends, visible keys) per sample; one group (sample None) if all are equal."""
        if self.window is not None or self.memory:
            raise NotImplementedError("tiles have neither windows nor a memory")
        ends = self.ends or ((self.length,),) * self.samples
        lengths = self.lengths or (self.length,) * self.samples
        if len(set(ends)) == len(set(lengths)) == 1:
            return [(None, ends[0], lengths[0])]
        return [(sample, *both) for sample, both in enumerate(zip(ends, lengths, strict=True))]
