"""Self-attention: the part that all kinds share, and the methods that define a kind.

    x -> project -> q, k, v -> core -> y -> output        forward = output(core(project(x)))

``project`` may return more tensors [B, S, ..] after v, such as gates, which go past the core to ``output``. A kind that
can make k and v again from them (``remade``) does not keep k and v for the core's backward.

A kind is a subclass of ``SelfAttention``, named by its ``AttentionKind``. It owns the weights, computes queries, keys
and values of this rank's positions (``project``) and projects heads to hidden features (``output``). The core is the
same for all kinds: softmax(q k^T / sqrt(D)) v with dropout, documents and padding, over all keys or those of a window,
whole or slice by slice (``slices``), with or without context parallelism (``core.context_parallel``), kept or
recomputed, and with or without sinks. A kind whose scores have another scale multiplies its queries by the ratio.

Shape letters: B batch, S sequence (under context parallelism, this rank's part of it), H hidden, N query heads and G
key-value heads of this rank, D head size of queries and keys, V head size of values; /mp marks dims that are split over
the tensor parallel axis.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megapar.core.context_parallel.blockwise import attend_blockwise
from megapar.core.context_parallel.columns import Expansion
from megapar.core.context_parallel.halo import Halo
from megapar.core.context_parallel.heads import to_heads, to_positions
from megapar.core.context_parallel.method import ContextParallel
from megapar.core.device.attention.documents import packed_attention_reference
from megapar.core.device.attention.mask import DeviceMask
from megapar.core.device.attention.row_statistic import Rows, RowStatistic
from megapar.core.device.attention.sinks import SinkRows
from megapar.core.device.attention.slices import packed_attention_slice_reference
from megapar.core.device.attention.table import DOCUMENTS, WINDOW
from megapar.core.device.attention.whole import attention_reference
from megapar.core.device.compiled import counted
from megapar.core.device.dtypes import at_least_fp32
from megapar.core.device.ops import op
from megapar.core.recompute.selective import Rematerialized, consume
from megapar.core.tensor_parallel.execution import DEFAULT
from megapar.core.tensor_parallel.layers import LayerOptions, Started, local, parameter, piece_shape
from megapar.model.attention.kinds import kind_of
from megapar.model.attention_sizes import AttentionSizes
from megapar.model.layers.context import Context

if TYPE_CHECKING:
    from typing_extensions import Unpack

Angles = tuple[Tensor, Tensor]  # cos and sin of rope, [B, S, angles_dim / 2] each


class SelfAttention(nn.Module, ABC):
    """Attention over the whole sequence of each sample, with heads split over mp. Base class of all kinds.

    x [B, S(/mp), H] -> project -> q [B, S, N, D], k [B, S, G, D], v [B, S, G, V] -> core: softmax(q k^T) v
      -> [B, S, N, V] -> output -> y [B, S(/mp), H]
    Under context parallelism the core attends to all positions, by the method of ``cp``.

    Attributes:
        stream: Number of this rank's random stream; each mp rank has other heads, each cp rank other positions or
            heads.
        place: Name of the random stream of the weights' dropout.
        dropout: Dropout probability of the weights; training may change it.
        operator: Operator of attention over whole samples.
        run: Runner of pure functions, which may compile them.
        selective: Recompute the core in the backward instead of keeping its intermediate results.
        row_statistic: Counts the rows of the scores of this rank's heads; None: nothing does.
        sinks: [N], a score of each query head in the softmax of its rows; None for a plain softmax.
    """

    sinks: nn.Parameter | None

    def __init__(
        self, sizes: AttentionSizes, layer: int, *, cp: ContextParallel | None = None, **options: Unpack[LayerOptions]
    ) -> None:
        super().__init__()
        self.sizes, self.mp, self.cp = sizes, options["mp"], cp or ContextParallel()
        self.stream = self.cp.axis.rank * self.mp.size + self.mp.rank
        self.place = f"layers.{layer}.attention.weights"
        self.dropout = sizes.dropout
        self.row_statistic: RowStatistic | None = None
        own = piece_shape((sizes.num_heads,), 0, self.mp)
        self.register_parameter("sinks", parameter(own, options["dtype"], options["device"]) if sizes.sinks else None)
        execution = options.get("execution", DEFAULT)
        self.run, self.selective, self.operator = execution.run, execution.selective, execution.attention

    @abstractmethod
    def project(self, x: Tensor, angles: Angles | None) -> tuple[Tensor, ...]:
        """Return q [B, S, N, D], k [B, S, G, D] and v [B, S, G, V] for x [B, S(/mp), H] and the positions' angles.

        A kind whose output depends on more of x returns that too, [B, S, ..] each.
        """

    @abstractmethod
    def output(self, y: Tensor, *more: Tensor) -> Tensor:
        """Project output heads [B, S, N, V] to [B, S(/mp), H]. more: Tensors that ``project`` returned after v."""

    def start_project(self, x: Tensor) -> Started:
        """Launch the communication of ``project`` over mp. The default launches nothing."""
        return Started(x)

    def finish_project(self, started: Started, angles: Angles | None) -> tuple[Tensor, ...]:
        """Wait for the communication that ``start_project`` launched and return the result of ``project``."""
        return self.project(started.x, angles)

    def start_output(self, y: Tensor, *more: Tensor) -> Started:
        """Launch the sum over mp of ``output``. The default runs ``output`` and launches nothing."""
        return Started(self.output(y, *more))

    def finish_output(self, started: Started) -> Tensor:
        """Wait for the sum that ``start_output`` launched and return the result of ``output``."""
        return started.x

    def project_memory(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys [B, M, G, D] and values [B, M, G, V] of earlier positions (ERNIE 3.0's recurrence).

        memory: hidden states [B, M, H], without gradient, whole on all mp ranks. Raises NotImplementedError for kinds
        without a memory.
        """
        raise NotImplementedError(f"{type(self).__name__} has no memory of earlier segments. Define project_memory.")

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Return [B, S(/mp), H] for x [B, S(/mp), H]."""
        q, k, v, *more = self.project(x, self.angles_of(context))
        y = self.core(q, k, v, context, more)
        del q, k, v  # without a backward nothing else holds them
        return self.output(y, *more)

    def angles_of(self, context: Context) -> Angles | None:
        """Return the angles of this layer's rope; None without."""
        return None if self.sizes.rope is None else context.angles[self.sizes.rope]

    def remaker(self) -> Callable[..., tuple[Tensor, Tensor]] | None:
        """Return what makes k and v from the results of ``project`` after them; None, the default: they are kept."""
        return None

    def remade(self, context: Context, more: Callable[[], Sequence[Tensor]]) -> Rematerialized | None:
        """Return what makes k and v again in the core's backward; None to keep them.

        They are kept if they come from other ranks, and in a recomputed unit, which drops all that it saves.
        more: returns what ``project`` returned after v, for all positions.
        """
        foreign = self.cp.deals_heads and not self.cp.latents
        kept = context.replay is not None or foreign or not torch.is_grad_enabled()
        make = None if kept else self.remaker()
        return None if make is None else Rematerialized(lambda: make(*more()))

    def expansion(self) -> Expansion | None:
        """Return the weight that makes keys and values of ``project``'s k and v; None, the default: they are these."""
        return None

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Trade this cp rank's positions of all heads for all positions of its heads (Ulysses).

        After v, a kind returns what ``remaker`` needs, if it is not what ``project`` returned.
        """
        return to_heads(q, k, v, self.cp.axis, self.cp.comm)

    def to_positions(self, y: Tensor) -> Tensor:
        """Undo ``to_heads`` for the output heads [B, S, N, V]."""
        return to_positions(y, self.cp.axis, self.cp.comm)

    def core(self, q: Tensor, k: Tensor, v: Tensor, context: Context, more: Sequence[Tensor] = ()) -> Tensor:
        """Return [B, S, N, V] for q [B, S, N, D], k [B, S, G, D], v [B, S, G, V].

        more: what ``project`` returned after v, from which k and v can be made again.
        """
        if self.cp.deals_heads:
            q, k, v, *dealt = self.to_heads(q, k, v)
            more = dealt or more
        remade, halos = self.remade(context, lambda: more), self.halos(context)
        if halos:
            k, v = self.cp.window_keys.fetch(k, v, halos[0])
        # Blocks of keys from other ranks are never kept, and recomputation would send them again.
        selective = self.selective and (context.plan is None or bool(halos))
        attend = partial(self._attend, context=context, rows=self.rows(context))
        y = consume(attend, q, (k, v), remade, selective=selective)
        return self.to_positions(y) if self.cp.deals_heads else y

    def rows(self, context: Context, place: slice | None = None) -> Rows:
        """Return the end of the rows of a forward, or of its slice at ``place``; None: nothing is done with them.

        A statistic counts them without padding. A recomputation calls the same kernels and sees the same rows again,
        which changes no maximum.
        """
        counted = None if self.row_statistic is None else replace(self.row_statistic, counted=context.text)
        if counted is not None and place is not None:
            counted = counted.at(slice(None), place)
        return counted if self.sinks is None else SinkRows(self._own_sinks(self.sinks), counted)

    def _own_sinks(self, sinks: Tensor) -> Tensor:
        """Return the sinks of the heads of the core: all of this rank, or those that it has among cp ranks."""
        cp, own = self.cp, local(sinks)
        own = own.to(at_least_fp32(own.dtype))  # gradients of several calls are summed so
        return own.chunk(cp.axis.size)[cp.axis.rank] if cp.deals_heads else own

    def clip_factors(self, factors: Tensor) -> dict[str, Tensor]:
        """Return factors that multiply the scores of this rank's heads by ``factors`` [N], by name of the parameter.

        They are those of the first two dims of the parameter. Raises NotImplementedError for kinds without QK-clip.
        """
        raise NotImplementedError(f"{type(self).__name__} has no QK-clip. Define clip_factors.")

    def drawing(self, context: Context, place: str, device: torch.device) -> AbstractContextManager[float]:
        """Draw from the random stream ``place``. Yields the weights' dropout probability, 0 outside training."""
        if not self.training or not self.dropout:
            return nullcontext(0.0)
        return self._drawing(context, place, device)

    @contextmanager
    def _drawing(self, context: Context, place: str, device: torch.device) -> Iterator[float]:
        with context.streams.drawing(device, place, self.stream):
            yield self.dropout

    def mask_of(self, context: Context) -> DeviceMask:
        """Return the mask of this layer: that of the context, in the layer's window."""
        return context.mask.within(self.sizes.window)

    def halos(self, context: Context) -> tuple[Halo, ...]:
        """Return what cp ranks exchange for this layer's window; empty if it hides nothing, or keys of all come."""
        own = self.mask_of(context)
        return self.cp.halos(own.host) if own is not context.mask else ()

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context, rows: Rows) -> Tensor:
        """Run the core on this rank's heads or blocks, to [B, S, N, V]. Shapes as in ``core``."""
        flash, mask, halos = self.sizes.flash, self.mask_of(context), self.halos(context)
        with self.drawing(context, self.place, q.device) as dropout:
            exchanges = bool(halos) or context.plan is not None
            if not (exchanges or dropout or mask.form in (DOCUMENTS, WINDOW) or rows is not None):
                return self.run(attend, q, k, v, mask.valid, mask.form, self.operator if flash else None)
            heads = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
            if halos:
                y = self._attend_runs(*heads, mask, halos[0], dropout, rows)
            elif context.plan is not None:
                y = attend_blockwise(
                    *(*heads, self.cp.transport, context.plan),
                    flash=flash,
                    dropout=dropout,
                    expansion=self.expansion(),
                    seen_by=rows,
                )
            else:
                y = self.attend(*heads, mask, dropout, rows)
        return y.transpose(1, 2)

    def _attend_runs(
        self, q: Tensor, k: Tensor, v: Tensor, mask: DeviceMask, halo: Halo, dropout: float, rows: Rows
    ) -> Tensor:
        """Attend from each run of this rank's rows to the keys that it sees; [B, heads, any, any], as ``attend``."""
        packed = op("packed_attention_slice", q) if self.sizes.flash else packed_attention_slice_reference
        parts: list[Tensor] = []
        for run, own, keys in zip(halo.runs, halo.queries, halo.rows, strict=True):
            cut = mask.cut(slice(run.start, run.stop), q.device)
            seen = None if rows is None else rows.at(slice(None), own)
            heads = (q[:, :, own], k[:, :, keys], v[:, :, keys])
            parts.append(packed(*heads, documents=cut, dropout=dropout, rows=seen))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: DeviceMask, dropout: float, rows: Rows = None) -> Tensor:
        """Attend from q [B, N, S, D] to k [B, G, L, D] and v [B, G, L, V], uncompiled; returns [B, N, S, V]."""
        if mask.form in (DOCUMENTS, WINDOW):
            packed = op("packed_attention", q) if self.sizes.flash else packed_attention_reference
            return packed(q, k, v, mask=mask, dropout=dropout, rows=rows)
        attention = op(self.operator, q) if self.sizes.flash else attention_reference
        return attention(q, k, v, form=mask.form, valid=mask.valid, dropout=dropout, rows=rows)


def make_attention(
    sizes: AttentionSizes, layer: int, *, cp: ContextParallel, **options: Unpack[LayerOptions]
) -> SelfAttention:
    """Build the attention of layer ``layer``. Raises KeyError for a kind that is not registered."""
    return kind_of(sizes).load_parts()(sizes, layer, cp=cp, **options)


@counted(2, 2, 2, 2)
def attend(q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, form: str, operator: str | None) -> Tensor:
    """Compute attention without dropout: q [B, S, N, D], k [B, S, G, D], v [B, S, G, V] to [B, S, N, V].

    It takes the form and the tensor of a mask, because a mask that differs in each micro-batch would compile it again.
    The result is contiguous, because compiled code of dynamic shapes copies a gradient that is not. ``operator`` is its
    name in the table of operators; None for the reference.
    """
    attention = attention_reference if operator is None else op(operator, q)
    return attention(*(x.transpose(1, 2) for x in (q, k, v)), form=form, valid=valid).transpose(1, 2)
