"""The attention mask of a micro-batch: which positions attend to which, as a value on the host.

It is made once per micro-batch, and says what attention inside documents and the tiles of context parallelism compute.
Tensors that kernels need stand beside it (``device.attention.documents``). A compiled function must not take it,
because each new value would compile the function again.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionMask:
    """The pairs of positions that may attend to each other, each within its sequence.

    Attributes:
        samples: Sequences of the micro-batch.
        length: Positions per sequence, on all ranks together.
        causal: A position attends to itself and the positions before it; False: also to those after it.
        ends: Per sample, the position after each document, beyond which no position attends; the last is ``length``.
            None: a sample is one document.
        lengths: Per sample, positions before the padding; all of them if None. Read only if not causal: padding is
            after the text, whose positions do not attend to it.
    """

    samples: int
    length: int
    causal: bool
    ends: tuple[tuple[int, ...], ...] | None = None
    lengths: tuple[int, ...] | None = None

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
        """Make the mask of a micro-batch. ends: indices into samples * length, as in micro-batches."""
        own = None
        if ends is not None:
            cut = [bisect.bisect_right(ends, sample * length) for sample in range(samples + 1)]
            own = tuple(
                tuple(end - sample * length for end in ends[cut[sample] : cut[sample + 1]]) for sample in range(samples)
            )
        return cls(samples, length, causal, own, None if lengths is None else tuple(lengths))

    @classmethod
    def of_documents(cls, ends: Sequence[int], samples: int = 1, *, causal: bool = True) -> AttentionMask:
        """Make the mask of documents that fill ``samples`` sequences of one length. ends: as in ``of``."""
        return cls.of(samples, ends[-1] // samples, causal=causal, ends=ends)

    @property
    def flat_ends(self) -> tuple[int, ...]:
        """The position after each document in samples * length, ascending."""
        ends = self.ends or ((self.length,),) * self.samples
        return tuple(sample * self.length + end for sample, own in enumerate(ends) for end in own)

    def groups(self) -> list[tuple[int | None, tuple[int, ...], int]]:
        """Return (sample, document ends, visible keys) per sample; one group (sample None) if all are equal."""
        ends = self.ends or ((self.length,),) * self.samples
        lengths = self.lengths or (self.length,) * self.samples
        if len(set(ends)) == len(set(lengths)) == 1:
            return [(None, ends[0], lengths[0])]
        return [(sample, *both) for sample, both in enumerate(zip(ends, lengths, strict=True))]
