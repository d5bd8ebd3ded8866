"""Statistic of the scores of attention for QK-clip: the largest value of a row's statistic, for each query head.

The statistic of a row is the log-sum-exp of its scores, which kernels compute for their backward, or their maximum,
which only plain products give (``table.KernelRow.statistics``). A row's log-sum-exp is above its maximum by at most the
logarithm of the number of its keys.

Shape letters: B batch, N query heads, S queries, L keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from megapar.core.device.attention.table import LSE, MAXIMUM


@dataclass(frozen=True)
class RowStatistic:
    """The rows that forms of attention have seen, as one number for each query head.

    Attributes:
        largest: [N], the largest statistic so far; -inf before the first row.
        kind: ``LSE`` or ``MAXIMUM``.
        counted: [B, S] bool, rows that count; None: all.
    """

    largest: Tensor
    kind: str
    counted: Tensor | None = None

    def run(self, first: int, count: int, length: int) -> RowStatistic:
        """Return the statistic for ``count`` samples of ``length`` rows each, from row ``first`` of all B S rows."""
        if self.counted is None:
            return self
        return replace(self, counted=self.counted.reshape(-1)[first : first + count * length].view(count, length))

    def at(self, samples: slice, positions: slice) -> RowStatistic:
        """Return the statistic for some positions of some samples."""
        return self if self.counted is None else replace(self, counted=self.counted[samples, positions])

    def see_scores(self, scores: Tensor) -> None:
        """Count the rows of scores [B, N, S, L], which are -inf or very small at keys that a row does not see."""
        scores = scores.detach()
        self._see(scores.amax(-1) if self.kind == MAXIMUM else scores.logsumexp(-1))

    def see_lse(self, lse: Tensor) -> None:
        """Count rows by their log-sum-exps [B, N, S]. Raises ValueError if the statistic is the maximum."""
        if self.kind != LSE:
            raise ValueError("this form of attention gives log-sum-exps only, and the statistic is the maximum")
        self._see(lse.detach())

    def softmax(self, scores: Tensor) -> Tensor:
        """See ``RowEnd``."""
        self.see_scores(scores)
        return scores.softmax(-1)

    def weigh(self, y: Tensor, lse: Tensor) -> Tensor:
        """See ``RowEnd``: nothing is changed."""
        return y

    def end(self, y: Tensor, lse: Tensor) -> Tensor:
        """See ``RowEnd``."""
        self.see_lse(lse)
        return y

    def _see(self, rows: Tensor) -> None:
        if self.counted is not None:
            rows = rows.masked_fill(~self.counted[:, None], -torch.inf)
        torch.maximum(self.largest, rows.amax((0, 2)).to(self.largest.dtype), out=self.largest)


class RowEnd(Protocol):
    """The end of the rows of a form of attention: a statistic that counts them, or sinks (``sinks.SinkRows``)."""

    @property
    def kind(self) -> str:
        """``LSE`` or ``MAXIMUM``: what the form must give."""

    def run(self, first: int, count: int, length: int) -> RowEnd:
        """Return the end for ``count`` samples of ``length`` rows each, from row ``first`` of all B S rows."""

    def at(self, samples: slice, positions: slice) -> RowEnd:
        """Return the end for some positions of some samples."""

    def see_scores(self, scores: Tensor) -> None:
        """Count the rows of scores [B, N, S, L]."""

    def see_lse(self, lse: Tensor) -> None:
        """Count rows by their log-sum-exps [B, N, S]."""

    def softmax(self, scores: Tensor) -> Tensor:
        """Count the rows of scores [B, N, S, L] and return the weights of their keys."""

    def weigh(self, y: Tensor, lse: Tensor) -> Tensor:
        """Return outputs y [B, N, S, V] as they are with sinks. y must be the output that the kernel saved."""

    def end(self, y: Tensor, lse: Tensor) -> Tensor:
        """Count rows, and return ``weigh`` of their outputs."""


Rows = RowEnd | None
"""The end of the rows of a call of attention; None: nothing is done with them."""
