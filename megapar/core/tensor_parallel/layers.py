"""Tensor parallel layers, sharded over the axis ``mp``: linear, embedding, and vocab parallel cross-entropy.

Weights are plain parameters that contain this rank's shard (or, under FSDP, DTensors whose local tensor is the shard).
They are created uninitialized. A fused weight has its real dims, [out dims.., in], and is cut along one of them.
With sequence parallelism, activations outside the layers are cut along the sequence: [B, S/mp, H].

Shape letters: B batch, S sequence, H hidden, O out features (the product of out dims), I in features, V vocabulary,
N rows (tokens). A letter is the global size; /mp marks the cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megapar.core.box import Box
from megapar.core.comm.async_pairs import Ticket, copy_gradient, start, wait
from megapar.core.comm.autograd import all_gather, all_reduce_, reduce, reduce_scatter
from megapar.core.comm.axis import Axis
from megapar.core.comm.exchange import AllGather, Reduce, ReduceScatter
from megapar.core.comm.in_flight import CommContext
from megapar.core.device.kinds import device_class
from megapar.core.device.layer_ops import in_one_kernel
from megapar.core.device.ops import op
from megapar.core.recompute.replay import Replay
from megapar.core.tensor_parallel.collective_product import SEQUENCE_DIM
from megapar.core.tensor_parallel.execution import DEFAULT, Execution
from megapar.core.tensor_parallel.fp8 import Fp8Weight
from megapar.core.tensor_parallel.fp32_grad_sum import with_fp32_grad_sum
from megapar.core.tensor_parallel.overlapped_linear import (
    ArrivedColumn,
    CopiedColumn,
    GatheredColumn,
    LinearComm,
    ReducedRow,
    ScatteredRow,
)
from megapar.core.tensor_parallel.weight_gradients import DeferWgrad, defer_wgrad_of, linear, linear_onto

if TYPE_CHECKING:
    from typing_extensions import NotRequired, Unpack


class LayerOptions(TypedDict):
    """Arguments of every layer that is sharded over mp.

    Attributes:
        sequence_parallel: Activations outside the layers are cut over ``mp`` too.
    """

    mp: Axis
    sequence_parallel: bool
    dtype: torch.dtype
    device: torch.device | str | None
    execution: NotRequired[Execution]


def local(weight: Tensor) -> Tensor:
    """Return this rank's shard of a weight for one use, whose gradient ``fp32_grad_sums`` sums in fp32."""
    return with_fp32_grad_sum(weight, weight.to_local() if isinstance(weight, DTensor) else weight)


def piece_shape(shape: Sequence[int], dim: int, axis: Axis) -> tuple[int, ...]:
    """Return the shape of this rank's piece of a tensor cut along ``dim``. Raises ValueError if it is uneven."""
    if shape[dim] % axis.size:
        raise ValueError(f"dim {dim} of {tuple(shape)} is not divisible by the {axis.size} ranks of {axis.name}")
    return Box.whole(shape).cut(dim, axis.size, axis.rank).sizes


def parameter(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str | None) -> nn.Parameter:
    """Return an uninitialized parameter: building a model draws no random numbers and works on the meta device."""
    return nn.Parameter(torch.empty(tuple(shape), dtype=dtype, device=device))


class Linear(nn.Module):
    """A linear layer y = x w^T + b with the whole weight on every rank: x [.., I] @ w [O, I]^T -> y [.., O]."""

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.weight = parameter((out_features, in_features), dtype, device)
        self.bias = parameter((out_features,), dtype, device) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Multiply [.., I] to [.., O]."""
        return F.linear(x, local(self.weight), None if self.bias is None else local(self.bias))


class ReplicatedLinear(nn.Module):
    """A linear layer y = x w^T of a transformer layer, with the whole weight on every rank of mp.

    x [.., I] @ w [O, I]^T -> y [.., O]. Every rank multiplies the positions that it has, so the weight's gradient is a
    partial sum over mp under sequence parallelism.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str | None,
        execution: Execution = DEFAULT,
    ) -> None:
        super().__init__()
        self.weight = parameter((out_features, in_features), dtype, device)
        self.weight_gradients = execution.weight_gradients

    def forward(self, x: Tensor) -> Tensor:
        """Multiply [.., I] to [.., O]."""
        return linear(x, local(self.weight), None, defer_wgrad_of(self.weight, self.weight_gradients))


class Started(NamedTuple):
    """A layer sharded over mp, between ``start`` and ``finish``.

    Attributes:
        x: The input of a column parallel layer; the products of a row parallel one.
    """

    x: Tensor
    handle: Tensor | None = None
    ticket: Ticket | None = None


class _SplitLinear(nn.Module):
    """Parameters of a linear layer that is cut over mp, and the options of its execution.

    Attributes:
        leaves_bias: What takes the output makes the bias's gradient, if it is ``in_one_kernel``.
    """

    leaves_bias = False

    def __init__(
        self, weight_shape: Sequence[int], bias_shape: Sequence[int], *, bias: bool, **options: Unpack[LayerOptions]
    ) -> None:
        super().__init__()
        dtype, device, execution = options["dtype"], options["device"], options.get("execution", DEFAULT)
        self.mp, self.sequence_parallel = options["mp"], options["sequence_parallel"]
        self.weight = parameter(weight_shape, dtype, device)
        self.bias = parameter(bias_shape, dtype, device) if bias else None
        self.overlap, self.comm = execution.overlap, execution.comm or CommContext()
        self.weight_gradients = execution.weight_gradients
        self.fp8 = None if execution.fp8 is None else Fp8Weight(execution.fp8)

    def _bias(self, x: Tensor) -> Tensor | None:
        """Return the bias for one use with the input x."""
        bias = None if self.bias is None else local(self.bias)
        return bias.detach() if bias is not None and self.leaves_bias and in_one_kernel(x) else bias


class ColumnLinear(_SplitLinear):
    """A column parallel linear layer: its out features are cut over mp, along the out dim ``split``.

    Forward: x [B, S, I] (sequence parallel: [B, S/mp, I] -> all-gather) @ w [O/mp, I]^T -> y [B, S, O/mp]
    dgrad:   dy [B, S, O/mp] @ w [O/mp, I] -> all-reduce (reduce-scatter) over mp -> dx [B, S, I] ([B, S/mp, I])
    wgrad:   dy^T [O/mp, B S] @ x [B S, I] -> dw [O/mp, I], complete on its rank; bias [O/mp] likewise.
    The collectives are in flight under the products as drawn in ``core.tensor_parallel.overlapped_linear``.
    """

    def __init__(
        self, in_features: int, out_dims: Sequence[int], *, split: int, bias: bool, **options: Unpack[LayerOptions]
    ) -> None:
        out = piece_shape(out_dims, split, options["mp"])
        super().__init__((*out, in_features), out, bias=bias, **options)
        self.out_dims = out
        self.product = GatheredColumn if self.sequence_parallel else CopiedColumn

    def forward(self, x: Tensor) -> Tensor:
        """Multiply [B, S(/mp), I] to [B, S, *out dims], one of them cut over mp."""
        weight, bias, defer_wgrad = self._operands(x)
        if self.mp.size == 1:
            y = linear(x, weight, bias, defer_wgrad, fp8=self.fp8)
        else:
            y = self.product.apply(x, weight, bias, self._communication(defer_wgrad))
        return y.view(*y.shape[:-1], *self.out_dims)

    def start(self, x: Tensor) -> Started:
        """Launch the all-gather of ``forward``, if any. ``finish`` computes the product."""
        if self.mp.size == 1 or not self.sequence_parallel:
            return Started(x)
        # A copy is sent, because x is kept for the backward and a buffer in flight must not be shared.
        return Started(x, *start(AllGather(self.mp), x.clone(), self.comm))

    def finish(self, started: Started) -> Tensor:
        """Wait for the all-gather and return the output of ``forward``."""
        if started.handle is None or started.ticket is None:
            return self(started.x)
        weight, bias, defer_wgrad = self._operands(started.x)
        gathered = wait(started.handle, started.ticket)
        y = ArrivedColumn.apply(gathered, started.x.detach(), weight, bias, self._communication(defer_wgrad))
        return y.view(*y.shape[:-1], *self.out_dims)

    def _operands(self, x: Tensor) -> tuple[Tensor, Tensor | None, DeferWgrad | None]:
        """Return weight [O/mp, I], bias [O/mp], and what takes the product of the weight's gradient, for one use."""
        bias, weight = self._bias(x), self.weight
        defer_wgrad = defer_wgrad_of(weight, self.weight_gradients)
        return local(weight).flatten(0, -2), None if bias is None else bias.flatten(), defer_wgrad

    def _communication(self, defer_wgrad: DeferWgrad | None) -> LinearComm:
        return LinearComm(self.mp, self.overlap, self.comm, defer_wgrad, fp8=self.fp8)


class RowLinear(_SplitLinear):
    """A row parallel linear layer: its in features are cut over mp.

    Forward: x [B, S, I/mp] @ w [O, I/mp]^T -> partial sums [B, S, O] -> all-reduce (sequence parallel: reduce-scatter)
             -> + b [O] -> y [B, S, O] ([B, S/mp, O])
    dgrad:   dy [B, S, O] (all-gather of [B, S/mp, O]) @ w [O, I/mp] -> dx [B, S, I/mp]
    wgrad:   dy^T [O, B S] @ x [B S, I/mp] -> dw [O, I/mp], complete on its rank; db [O] is the same on every rank,
             but a partial sum with sequence parallelism.
    The collectives are in flight under the products as drawn in ``core.tensor_parallel.overlapped_linear``.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool, **options: Unpack[LayerOptions]) -> None:
        shape = piece_shape((out_features, in_features), 1, options["mp"])
        super().__init__(shape, (out_features,), bias=bias, **options)
        self.product = ScatteredRow if self.sequence_parallel else ReducedRow

    def forward(self, x: Tensor, ends_unit: Replay | None = None, onto: Tensor | None = None) -> Tensor:
        """Multiply [B, S, I/mp] to [B, S(/mp), O].

        Args:
            ends_unit: The recomputed unit whose output this is.
            onto: A sum [B S(/mp), O] to add the output to, which is returned in its place. No backward may read it: on
                one rank and without a bias the product adds to it in place, unless it is a view, as FSDP makes of the
                inputs of its groups.
        """
        plain = self.mp.size == 1 and self.fp8 is None and self.bias is None
        if onto is not None and (not plain or onto._is_view()):
            return onto + self.forward(x, ends_unit).flatten(0, -2)
        weight, bias = local(self.weight), self._bias(x)
        defer_wgrad = defer_wgrad_of(self.weight, self.weight_gradients)
        if onto is not None:
            return linear_onto(onto, x, weight, defer_wgrad, ends_unit)
        if self.mp.size == 1:
            return linear(x, weight, bias, defer_wgrad, ends_unit, self.fp8)
        if self.sequence_parallel and self.weight_gradients is None:
            defer_wgrad = None  # the product of this rank's rows runs under the gathers of the others'
        linear_comm = LinearComm(self.mp, self.overlap, self.comm, defer_wgrad, ends_unit, self.fp8)
        return self.product.apply(x, weight, bias, linear_comm)

    def start(self, x: Tensor) -> Started:
        """Compute the product and launch its sum over the ranks. ``finish`` waits for the sum."""
        defer_wgrad = defer_wgrad_of(self.weight, self.weight_gradients)
        y = linear(x, local(self.weight), None, defer_wgrad, fp8=self.fp8)
        if self.mp.size == 1:
            return Started(y)
        if not self.sequence_parallel:
            return Started(y, *start(Reduce(self.mp), y, self.comm))
        by_rank = y.unflatten(1, (self.mp.size, -1)).transpose(0, 1).flatten(0, 1)
        return Started(by_rank, *start(ReduceScatter(self.mp), by_rank, self.comm))

    def finish(self, started: Started) -> Tensor:
        """Wait for the sum and return the output of ``forward``."""
        y = started.x
        if started.handle is not None and started.ticket is not None:
            y = copy_gradient(wait(started.handle, started.ticket))
        return y if self.bias is None else y + local(self.bias)


class VocabularyEmbedding(nn.Module):
    """A vocab parallel embedding: its rows are sharded over mp in chunks of ceil(V / mp); the last ones are shorter.

    Forward: tokens [B, S] -> rows of w [V/mp, H], zeros for tokens of other ranks -> all-reduce (sequence parallel:
             reduce-scatter) -> x [B, S, H] ([B, S/mp, H])
    wgrad:   dx [B, S, H] (all-gather of [B, S/mp, H]) is added to the rows on this rank: dw [V/mp, H].
    """

    def __init__(self, vocab_size: int, hidden_size: int, **options: Unpack[LayerOptions]) -> None:
        super().__init__()
        self.mp, self.sequence_parallel = options["mp"], options["sequence_parallel"]
        self.first_token, rows = vocabulary_range(vocab_size, self.mp)
        self.weight = parameter((rows, hidden_size), options["dtype"], options["device"])

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up [B, S] int64 to [B, S(/mp), H]."""
        return look_up(tokens, self.weight, self.first_token, self.mp, sequence_parallel=self.sequence_parallel)


def look_up(tokens: Tensor, word: Tensor, first_token: int, mp: Axis, *, sequence_parallel: bool) -> Tensor:
    """Look up tokens [B, S] in ``word`` [V/mp, H], whose first row is ``first_token``. Returns [B, S(/mp), H]."""
    weight = local(word)
    if mp.size == 1:
        return F.embedding(tokens, weight)
    is_local = (tokens >= first_token) & (tokens < first_token + weight.shape[0])
    rows = F.embedding(torch.where(is_local, tokens - first_token, 0), weight)
    rows = rows * is_local.unsqueeze(-1).to(rows.dtype)
    return reduce_scatter(rows, mp, SEQUENCE_DIM) if sequence_parallel else reduce(rows, mp)


class Embedding(nn.Module):
    """A small embedding with the whole weight w [count, H] on every rank. Its gradient covers this rank's tokens."""

    def __init__(self, count: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__()
        self.weight = parameter((count, hidden_size), dtype, device)

    def forward(self, indices: Tensor) -> Tensor:
        """Look up [..] int64 to [.., H]."""
        weight = local(self.weight)
        if weight.shape[0] > device_class(weight.device.type).one_hot_rows:
            return F.embedding(indices, weight)
        return op("small_embedding", weight)(weight, indices=indices)


def vocabulary_range(vocab_size: int, mp: Axis) -> tuple[int, int]:
    """Return (first token, number of tokens) of the vocabulary on this rank. Raises ValueError if a rank has none."""
    box = Box.whole((vocab_size,)).cut(0, mp.size, mp.rank)
    if not box.sizes[0]:
        raise ValueError(f"a vocabulary of {vocab_size} leaves rank {mp.rank} of {mp.size} on {mp.name} without tokens")
    return box.offsets[0], box.sizes[0]


def vocab_parallel_cross_entropy_(
    logits: Tensor, labels: Tensor, first_token: int, mp: Axis, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Compute vocab parallel cross-entropy and the gradient of the sum of the losses. Overwrites ``logits``.

    Only three numbers per row are sent.

    Args:
        logits: [N, V/mp] in max(fp32, dtype), this rank's part of the vocabulary.
        labels: [N] int64 over the whole vocabulary.

    Returns:
        The log-probabilities of the labels [N], the same on every rank, and the gradient [N, V/mp].
    """
    if mp.size == 1:
        form: Callable[..., Any] = op("cross_entropy", logits)
        log_probs, gradient = form(logits, labels, dtype)
        return log_probs, gradient
    peak = all_reduce_(logits.amax(-1), mp, dist.ReduceOp.MAX)
    logits.sub_(peak.unsqueeze(-1))
    place = labels - first_token
    column = place.clamp(0, logits.shape[-1] - 1)
    is_local = column == place
    target = logits.gather(-1, column.unsqueeze(-1)).squeeze(-1) * is_local
    total = logits.exp_().sum(-1)
    total, target = all_reduce_(torch.stack((total, target)), mp).unbind()
    logits.scatter_add_(-1, column.unsqueeze(-1), (is_local * -total).unsqueeze(-1))
    scale = total.reciprocal().unsqueeze(-1)
    same = dtype == logits.dtype
    gradient = logits.mul_(scale) if same else torch.mul(logits, scale, out=torch.empty_like(logits, dtype=dtype))
    return target - total.log(), gradient


def gather_vocabulary(logits: Tensor, vocab_size: int, mp: Axis) -> Tensor:
    """Gather [.., V/mp] to the whole [.., V], without gradients. For inspection, never for a loss."""
    if mp.size == 1:
        return logits
    length = -(-vocab_size // mp.size)
    padded = F.pad(logits.detach(), (0, length - logits.shape[-1]))
    # Only the last pieces are shorter than the others, so all padding is after the vocabulary.
    return all_gather(padded, mp, logits.dim() - 1)[..., :vocab_size]
