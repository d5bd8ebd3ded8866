"""The slices of a sequence, which are pipelined from attention to experts. Standard library only, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from megapar.core.context_parallel.positions import cut_sequence

CAPACITIES = ("global", "slice")


@dataclass(frozen=True)
class Slicing:
    """The options of AMPipe and pipe-experts for one model.

    Attributes:
        degree: slices (d).
        balanced: slices have equal work in causal attention, instead of equal lengths.
        capacity: ``global``, an expert's capacity is that of the micro-batch, whose earlier slices come first;
            ``slice``, every slice has a separate capacity.
        cross_layer: slices go on into the next layer one by one.
        overlap_mp: collectives of the experts over their mp axis are hidden under other slices' experts.
        expert_pieces: pieces that each expert's rows of a slice are sent in; 0: all experts' rows of a slice are one
            message.
        chained: a piece is sent when the experts' mp collective before it has been launched, for links that ep and mp
            must not use at once (``CommContext.chained``).
    """

    degree: int = 1
    balanced: bool = False
    capacity: str = "global"
    cross_layer: bool = False
    overlap_mp: bool = False
    expert_pieces: int = 0
    chained: bool = False

    def __post_init__(self) -> None:
        # The command line has refused wrong values with a full report; this guards direct users.
        if self.degree < 1 or self.expert_pieces < 0 or self.capacity not in CAPACITIES:
            raise ValueError(
                f"degree {self.degree} (at least 1), expert_pieces {self.expert_pieces} (at least 0), capacity "
                f"{self.capacity!r} ({' or '.join(CAPACITIES)})"
            )

    @property
    def active(self) -> bool:
        """Layers run slice by slice: there are several slices, or pieces of them."""
        return self.degree > 1 or self.expert_pieces > 0

    def cut(self, length: int, parts: int = 1) -> tuple[slice, ...]:
        """The slices of a sequence of ``length`` positions, each a multiple of ``parts`` (ranks that share it).

        The rule and its errors are those of ``cut_sequence``.
        """
        return cut_sequence(length, parts, self.degree, balanced=self.balanced)

    def order(self, length: int, parts: int) -> list[int]:
        """The source of each position of the data, such that a rank's chunk holds its part of every slice.

        With parts ranks of sequence parallelism, rank r's chunk is the r-th parts-th of slice 0, then of slice 1, ...
        """
        slices = self.cut(length, parts)
        chosen: list[int] = []
        for rank in range(parts):
            for s in slices:
                own = (s.stop - s.start) // parts
                chosen += range(s.start + rank * own, s.start + (rank + 1) * own)
        return chosen
