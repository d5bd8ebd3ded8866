"""Attention sinks: a trained score for each query head that joins the softmax of each row, and has no value.

    out' = out sigmoid(lse - sink)        lse' = logaddexp(lse, sink)        a row that sees no key is 0

This is the end of any form of attention, once, after the last merge of tiles. With s = sigmoid(lse - sink) its backward
is, since P' = exp(scores - lse') = P s,

    dscores = P' (dout' v^T - dout' . out') = P (dout v^T - dout . out')      dout = s dout'
    dsink = -sum over rows of exp(sink - lse') (dout' . out')

A kernel's backward is the first line with the output that it saved in the place of out', and reads it nowhere else.
Therefore the factor is multiplied into the saved tensor, and the kernel's backward is that of attention with sinks.

Source: GPT-OSS (arXiv 2508.10925, section 2.1). Shape letters: B batch, N query heads, S queries, L keys, V features of
values and outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar.core.device.attention.row_statistic import RowStatistic
from megapar.core.device.attention.table import LSE


@dataclass(frozen=True)
class SinkRows:
    """Rows whose softmax has a sink. A statistic counts them as they are without it.

    Attributes:
        sinks: [N], in any dtype.
        statistic: Counts the rows; None: nothing does.
    """

    sinks: Tensor
    statistic: RowStatistic | None = None

    @property
    def kind(self) -> str:
        """See ``RowEnd``."""
        return LSE if self.statistic is None else self.statistic.kind

    def run(self, first: int, count: int, length: int) -> SinkRows:
        """See ``RowEnd``."""
        return self if self.statistic is None else replace(self, statistic=self.statistic.run(first, count, length))

    def at(self, samples: slice, positions: slice) -> SinkRows:
        """See ``RowEnd``."""
        return self if self.statistic is None else replace(self, statistic=self.statistic.at(samples, positions))

    def see_scores(self, scores: Tensor) -> None:
        """See ``RowEnd``."""
        if self.statistic is not None:
            self.statistic.see_scores(scores)

    def see_lse(self, lse: Tensor) -> None:
        """See ``RowEnd``."""
        if self.statistic is not None:
            self.statistic.see_lse(lse)

    def softmax(self, scores: Tensor) -> Tensor:
        """See ``RowEnd``: the weights of keys add up to less than one."""
        self.see_scores(scores)
        sinks = self.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        return torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]

    def weigh(self, y: Tensor, lse: Tensor) -> Tensor:
        """See ``RowEnd``."""
        return _Sink.apply(y, lse.detach(), self.sinks)

    def end(self, y: Tensor, lse: Tensor) -> Tensor:
        """See ``RowEnd``."""
        self.see_lse(lse)
        return self.weigh(y, lse)


class _Sink(torch.autograd.Function):
    """Rows y [B, N, S, V] weighed in place of what a kernel saved: its backward reads them as its output."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
        # ``data`` has a separate version counter, so autograd still accepts the output that the kernel saved.
        out = y.data
        out.mul_(torch.sigmoid(_above(lse, sinks)).unsqueeze(-1))
        ctx.save_for_backward(out, lse, sinks)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor | None]:
        (out, lse, sinks), grad = ctx.saved_tensors, grads[0]
        above, dsinks = _above(lse, sinks), None
        if ctx.needs_input_grad[2]:
            products = (grad.to(lse.dtype) * out).sum(-1)
            dsinks = -(torch.sigmoid(-above) * products).sum((0, 2)).to(sinks.dtype)
        return (grad * torch.sigmoid(above).unsqueeze(-1)).to(grad.dtype), None, dsinks


def _above(lse: Tensor, sinks: Tensor) -> Tensor:
    """Return by how much log-sum-exps [B, N, S] exceed the sinks [N], in their dtype; -inf where no key is seen."""
    return lse - sinks.to(lse.dtype)[:, None]
