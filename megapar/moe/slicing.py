"""The slices of a sequence, which are pipelined from attention to experts (AMPipe)."""

from __future__ import annotations

from dataclasses import dataclass

from megapar.core.context_parallel.positions import cut_sequence

CAPACITIES = ("global", "slice")


@dataclass(frozen=True)
class Slicing:
    """The options of AMPipe and pipe-experts for one model.

    Attributes:
        balanced: Slices have equal work in causal attention, instead of equal lengths.
        capacity: ``global``: an expert has one capacity for the micro-batch, filled by earlier slices first;
            ``slice``: a separate capacity for every slice.
        cross_layer: Each slice continues into the next layer without waiting for the others.
        overlap_mp: Hide the experts' collectives over their mp axis under other slices' experts.
        expert_pieces: Number of messages for each expert's rows of a slice; 0: one message for all experts' rows.
        chained: Launch a piece only after the preceding mp collective of the experts, for links that ep and mp must not
            use at once (``CommContext.chained``).
    """

    degree: int = 1
    balanced: bool = False
    capacity: str = "global"
    cross_layer: bool = False
    overlap_mp: bool = False
    expert_pieces: int = 0
    chained: bool = False

    def __post_init__(self) -> None:
        # The command line refuses wrong values with a full report; this is for direct callers.
        if self.degree < 1 or self.expert_pieces < 0 or self.capacity not in CAPACITIES:
            raise ValueError(
                f"degree {self.degree} (at least 1), expert_pieces {self.expert_pieces} (at least 0), capacity "
                f"{self.capacity!r} ({' or '.join(CAPACITIES)})"
            )

    @property
    def active(self) -> bool:
        """True if layers run slice by slice: there are several slices, or pieces of them."""
        return self.degree > 1 or self.expert_pieces > 0

    def cut(self, length: int, parts: int = 1) -> tuple[slice, ...]:
        """Cut a sequence of ``length`` positions into slices, each a multiple of ``parts`` (``cut_sequence``)."""
        return cut_sequence(length, parts, self.degree, balanced=self.balanced)

    def order(self, length: int, parts: int) -> list[int]:
        """Return the source of each position of the data, such that a rank's chunk holds its part of every slice.

        With ``parts`` ranks of sequence parallelism, rank r's chunk is part r of slice 0, then part r of slice 1, ...
        """
        slices = self.cut(length, parts)
        chosen: list[int] = []
        for rank in range(parts):
            for s in slices:
                part = (s.stop - s.start) // parts
                chosen += range(s.start + rank * part, s.start + (rank + 1) * part)
        return chosen
