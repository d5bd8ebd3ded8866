"""Buckets: parameters that are gathered and reduced together in one flat buffer (``--segment-*`` flags plan them).

flat [n, P]: row r contains the master shard of rank r of the shard axis: the pieces of all parameters of the bucket,
concatenated, those with weight decay first, and parameters that the same axes split next to each other.

    parameter a, cut along dim 0     parameter b, cut along dim 1          row 0 | a0 b0 |
        [ a0 ]                            [ b0 | b1 ]                      row 1 | a1 b1 |
        [ a1 ]

Rows of large messages are padded to a multiple of 16 bytes, so that every rank's part of a collective is aligned: NCCL
copies byte by byte otherwise. That padding is never read, nor is the room behind a piece that is shorter than another
mp rank's (``bucket_row``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megapar.core.comm import collectives
from megapar.core.comm.axis import Axis
from megapar.core.comm.buffers import BufferPool
from megapar.core.device.dtypes import WeightProduct
from megapar.core.device.kinds import device_class
from megapar.core.device.ops import op
from megapar.core.sharding.bucket_row import BucketParameter, Entry, make_members, make_ranges, row_length
from megapar.core.sharding.cut import keeps_aligned

SMALL_ELEMENTS = 1 << 13  # of a gradient, such as a bias: below this, a launch takes longer than the copy


class BucketDtypes(NamedTuple):
    """Dtypes of what buckets keep and send.

    Attributes:
        master: dtype of master weights.
        reduce: dtype of gradients in messages.
        main: dtype of the main gradients of 16-bit parameters; None, and of others: that of the masters.
        splits: Masters of bf16 parameters are split.
    """

    master: torch.dtype
    reduce: torch.dtype
    main: torch.dtype | None = None
    splits: bool = False


class Bucket:
    """Master weights, gradients and collectives of one bucket on this rank.

    Gradients travel in the reduce dtype and are accumulated in the main dtype. On an axis of one rank, parameters
    are views: of the master if they have its dtype, else of a row in the compute dtype, into which the master is cast.

    If the master is split, it is made up of this rank's pieces of the parameters and of remainders, which the master
    shards keep. An update changes ``weights``, the pieces in a row, which the next gather sends.

    Args:
        accumulates_unsharded: Keep unsharded gradients over the micro-batches, and reduce once per step (stage 1).
        new_master: Allocates the master (elements, dtype), for example in pinned memory; None: on the device.

    Attributes:
        members: The parameters, in row order.
        row: P, elements of a row including padding.
        ranges: The row, cut where the optimizer or the norm treats elements differently.
        master: [P], this rank's master weights; None if they are split.
        gradient: [P], this rank's main gradient; None until the first reduction.
        aliased: True if the parameters are views of the master.
        parameter_row: [P], the row in the compute dtype of which the parameters are views; None if there is none.
    """

    def __init__(
        self,
        parameters: Sequence[Entry],
        shard: Axis,
        replica: Axis,
        dtypes: BucketDtypes,
        *,
        accumulates_unsharded: bool,
        pool: BufferPool,
        new_master: Callable[[int, torch.dtype], Tensor] | None = None,
        add_product: Callable[..., Tensor] | None = None,
    ) -> None:
        self.units = frozenset(spec.unit for spec, *_ in parameters)
        self._pool, self._add_product = pool, add_product
        self.shard = shard
        self.replica = replica
        self.members = make_members(parameters, shard.size)
        first = parameters[0][1]
        self.dtype = first.dtype
        self.row = self.members[-1].offset + self.members[-1].room
        if shard.size > 1:
            self.row = row_length(self.row, min(self.dtype.itemsize, dtypes.reduce.itemsize))
        self.master: Tensor | None = None
        if new_master is not None:
            self.master = new_master(self.row, dtypes.master)
        elif not dtypes.splits or self.dtype != torch.bfloat16:
            self.master = torch.zeros(self.row, dtype=dtypes.master, device=first.device)
        self._weights: Tensor | None = None  # [P], which the optimizer may have updated since the last gather
        self._main_dtype = dtypes.main if dtypes.main is not None and self.dtype.itemsize == 2 else dtypes.master
        self._reduce_dtype = dtypes.reduce
        self.gradient: Tensor | None = None
        self.accumulates_unsharded = accumulates_unsharded or shard.size == 1
        self._flat: Tensor | None = None
        self._accumulated: set[int] = set()  # members with a gradient in the buffer
        self._added_products: set[int] = set()  # members with products that ``add`` has not counted
        self._pending_count = len(self.members)  # gradients to come before the reduction
        self._reduced: Tensor | None = None
        self._replica_sum: Tensor | None = None
        self._borrowed: list[Tensor] = []  # buffers that the collective in flight reads and writes
        self._works: list[tuple[dist.Work, str]] = []  # the reductions in flight, each with the kind of its bytes
        self._gather: tuple[Tensor, Tensor, dist.Work | None] | None = None
        self.aliased = shard.size == 1 and self.dtype == dtypes.master and new_master is None
        self.parameter_row: Tensor | None = None
        self._is_even = not any(member.padded or member.room > member.numel for member in self.members)
        self._dims = [member.dim for member in self.members]
        self.ranges = make_ranges(self.members)
        self._packs = self._is_even and shard.size > 1 and device_class(first.device.type).packs_rows
        # Members whose gradients are copied together, once the bucket is complete: those that may be, and that are due.
        self._copies_late = [self._packs or (shard.size == 1 and m.numel <= SMALL_ELEMENTS) for m in self.members]
        self._defers_copies, self._copy_later = False, list[int]()
        if shard.size == 1:
            self._view_parameters()

    def _view_parameters(self) -> None:
        """Make the parameters views of the master or, if that leaves all of them aligned, of ``parameter_row``."""
        if not self.aliased:
            if not all(keeps_aligned(member.room, self.dtype.itemsize) for member in self.members):
                return
            device = self.members[0].parameter.device
            self.parameter_row = torch.empty(self.row, dtype=self.dtype, device=device)
        viewed = self.master if self.parameter_row is None else self.parameter_row
        assert viewed is not None
        for member in self.members:
            member.parameter.data = self.piece(viewed, member)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows of gradients, in the reduce dtype."""
        return self.shard.size * self.row * self._reduce_dtype.itemsize

    def piece(self, flat: Tensor, member: BucketParameter) -> Tensor:
        """Return a member's piece, without padding, as a view of a row-shaped tensor [P]."""
        padded = flat[member.offset : member.offset + member.numel].view(member.piece)
        return padded.narrow(member.dim, 0, member.box.sizes[member.dim])

    def _columns(self, flat: Tensor, member: BucketParameter) -> Tensor:
        return flat[:, member.offset : member.offset + member.numel].unflatten(1, member.piece)

    # Gradients: add (each backward) -> start_grad_reduce (once complete) -> finish_grad_reduce -> shard's gradient

    def begin_step(self) -> None:
        """Forget the gradients of the last step."""
        gradient, self.gradient = self.gradient, None
        if self.shard.size > 1 or not self._pool.keep:  # one rank would take the same buffer from a pool again
            if gradient is not None:
                self._pool.give(gradient)  # on an axis of one rank it is a view of the whole flat buffer
            self._flat = None
        self._accumulated.clear()

    def begin_micro_batch(self, gradients: int = 1) -> None:
        """Expect ``gradients`` gradients from each member before the reduction."""
        self._accumulate_all()
        self._pending_count = len(self.members) * gradients
        # Gradients of a second micro-batch are added one by one: autograd would add them in the compute dtype.
        self._defers_copies = self.accumulates_unsharded and gradients == 1 and not self._accumulated

    def add(self, index: int) -> bool:
        """Accumulate a gradient of member ``index``; return True if it was the last one that the bucket waited for."""
        if self._defers_copies and self._copies_late[index]:
            self._copy_later.append(index)
        elif self.accumulates_unsharded:
            self._accumulate(index)
        self._pending_count -= 1
        if self._pending_count:
            return False
        self._accumulate_all()
        return True

    def add_product(self, index: int, product: WeightProduct) -> None:
        """Add a product to the gradient of member ``index`` in the main dtype; ``add`` then counts it.

        Only for an axis of one rank, where a gradient is contiguous in the buffer.
        """
        member = self.members[index]
        left, right = product.left, product.right
        shape = left.shape[0], right.shape[1]
        target = self._of_one_rank(member, shape, (shape[1], 1))
        add = self._add_product or op("add_product", left)
        add(target, left, right, begins=index not in self._accumulated)
        self._accumulated.add(index)
        self._added_products.add(index)

    def has_gradient(self, index: int) -> bool:
        """Return whether member ``index`` has a gradient to ``add``, or autograd made none."""
        return index in self._added_products or self.members[index].parameter.grad is not None

    def _main(self, dtype: torch.dtype) -> Tensor:
        """Return the buffer of gradients [n, P]; it has ``dtype`` if it is new."""
        if self._flat is None:
            self._flat = self._pool.take((self.shard.size, self.row), dtype)
        return self._flat

    def _of_one_rank(self, member: BucketParameter, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
        """Return a member's gradient in the buffer of an axis of one rank: by one view, not three."""
        flat = self._main(self._main_dtype)
        return flat.as_strided(shape, strides, flat.storage_offset() + member.offset)

    def _accumulate(self, index: int) -> None:
        member = self.members[index]
        grad = member.parameter.grad
        self._added_products.discard(index)
        if grad is None:
            return
        if self.shard.size == 1:
            target = self._of_one_rank(member, (1, *member.piece), (member.numel, *member.strides))
            pieces = grad.unsqueeze(0)
        else:
            target = self._columns(self._main(self._main_dtype), member)
            pieces = member.rows(grad)
        op("add_gradient", target)(target, pieces, begins=index not in self._accumulated)
        self._accumulated.add(index)
        member.parameter.grad = None

    def _accumulate_all(self) -> None:
        """Accumulate the gradients whose copies were deferred until the bucket is complete."""
        if not self._copy_later:
            return
        deferred, self._copy_later = self._copy_later, []
        if len(deferred) == len(self.members) and self._pack_at_once(self._main_dtype):
            self._accumulated.update(deferred)
            return
        if self.shard.size == 1 and len(first := [i for i in deferred if i not in self._accumulated]) > 1:
            deferred = [index for index in deferred if index in self._accumulated]
            self._copy_together(first)
        for index in deferred:
            self._accumulate(index)

    def _copy_together(self, indices: Sequence[int]) -> None:
        """Copy small gradients to a buffer in which they are contiguous, in one call."""
        members = [self.members[index] for index in indices]
        targets = [self._of_one_rank(member, member.piece, member.strides) for member in members]
        grads = [member.parameter.grad for member in members if member.parameter.grad is not None]
        assert len(grads) == len(targets)
        torch._foreach_copy_(targets, grads)
        for member in members:
            member.parameter.grad = None
        self._accumulated.update(indices)

    def _pack_at_once(self, dtype: torch.dtype) -> bool:
        """Copy all members' gradients to a new buffer in one call; return False if that is impossible."""
        grads = [member.parameter.grad for member in self.members]
        if not self._packs or self._accumulated or any(grad is None for grad in grads):
            return False
        flat = self._main(dtype)
        op("pack_bucket", flat)(flat, grads, self._dims)
        for member in self.members:
            member.parameter.grad = None
        return True

    def _pack(self) -> Tensor:
        """Return all members' gradients as [n, P]; zero for a member without a gradient."""
        self._accumulate_all()
        # If each micro-batch is reduced, nothing accumulates here, so the buffer can have the reduce dtype.
        flat = self._main(self._main_dtype if self.accumulates_unsharded else self._reduce_dtype)
        if not self.accumulates_unsharded and self._pack_at_once(flat.dtype):
            return flat
        for index, member in enumerate(self.members):
            if not self.accumulates_unsharded and member.parameter.grad is not None:
                self._columns(flat, member).copy_(member.rows(member.parameter.grad))
                member.parameter.grad = None
            elif index not in self._accumulated:
                self._columns(flat, member).zero_()
        return flat

    def start_grad_reduce(self, *, overlap: bool) -> None:
        """Launch the reduction of the gradients accumulated since the last one."""
        flat = self._pack()
        if self.shard.group is None:
            self._reduced = flat[0]
            return
        message = flat if flat.dtype == self._reduce_dtype else self._take_buffer(flat.shape).copy_(flat)
        # On a CPU the reduce-scatter is an exchange of pieces, which needs a buffer for those that arrive.
        scratch = self._take_buffer(flat.shape) if flat.device.type == "cpu" else None
        self._reduced = self._pool.take((self.row,), self._reduce_dtype)
        work = collectives.reduce_scatter(
            self._reduced, message.view(-1), self.shard, async_op=overlap, scratch=scratch
        )
        if work is not None:
            self._works.append((work, f"{self.shard.name}/reduce_scatter"))

    def finish_grad_reduce(self, *, last: bool, overlap: bool) -> None:
        """Wait for the reduce-scatter and accumulate its result; after the step's last one launch the replica sum."""
        if self._reduced is None:
            return
        self._wait()
        self._release_buffers()
        if self.shard.group is not None and self._flat is not None:
            self._pool.give(self._flat)
            self._flat = None
        self._accumulate_reduced(self._reduced)
        self._reduced = None
        if last and self.replica.group is not None:
            assert self.gradient is not None
            same = self.gradient.dtype == self._reduce_dtype
            self._replica_sum = self.gradient if same else self._take_buffer((self.row,)).copy_(self.gradient)
            work = collectives.all_reduce(self._replica_sum, self.replica, async_op=overlap)
            if work is not None:
                self._works.append((work, f"{self.replica.name}/all_reduce"))

    def _accumulate_reduced(self, reduced: Tensor) -> None:
        """Add to the main gradient, in the main dtype."""
        if self.shard.group is None or (self.gradient is None and reduced.dtype == self._main_dtype):
            # A single rank accumulates in place: ``reduced`` already is the sum over the micro-batches.
            self.gradient = reduced
            return
        if self.gradient is None:
            self.gradient = self._pool.take((self.row,), self._main_dtype).copy_(reduced)
        else:
            self.gradient.add_(reduced)
        self._pool.give(reduced)

    def finish(self) -> None:
        """Wait for the replica sum; the main gradient is then complete."""
        self._wait()
        if self._replica_sum is not None and self._replica_sum is not self.gradient:
            assert self.gradient is not None
            self.gradient.copy_(self._replica_sum)
        self._replica_sum = None
        self._release_buffers()

    def _wait(self) -> None:
        for work, kind in self._works:
            self.shard.meter.wait(work, kind)
        self._works.clear()

    def _take_buffer(self, shape: Sequence[int]) -> Tensor:
        """Return a buffer in the reduce dtype, valid until ``_release_buffers``."""
        buffer = self._pool.take(shape, self._reduce_dtype)
        self._borrowed.append(buffer)
        return buffer

    def _release_buffers(self) -> None:
        for buffer in self._borrowed:
            self._pool.give(buffer)
        self._borrowed.clear()

    # Parameters: start_param_gather (after the optimizer) -> finish_param_gather (before the forward)

    @property
    def weights(self) -> Tensor:
        """This rank's pieces of the parameters in a row [P], of a split master. The next gather sends what it holds."""
        if self._weights is None and self.parameter_row is not None:
            return self.parameter_row
        if self._weights is None:
            self.finish_param_gather()
            self._weights = self._pool.take((self.row,), self.dtype)
            for member in self.members:
                dim, length = member.dim, member.box.sizes[member.dim]
                start = min(self.shard.rank * member.piece[dim], member.parameter.shape[dim])
                own = member.parameter.detach().narrow(dim, start, length)
                self.piece(self._weights, member).copy_(own)
        return self._weights

    def forget_weights(self) -> None:
        """Free the row of weights, which has not changed since the last gather."""
        if self._weights is not None:
            self._pool.give(self._weights)
            self._weights = None

    def start_param_gather(self, *, overlap: bool) -> None:
        """Launch the all-gather of rows in the compute dtype (unshard).

        ``finish_param_gather`` copies them to the parameters. On an axis of one rank they are cast where they lie.
        """
        if self.aliased:
            return
        # A gather still in flight must complete: its messages would be mistaken for the next gather's.
        self.finish_param_gather()
        if self.master is not None:
            # A copy even if the dtypes agree: the optimizer may step while the row is in flight. From host memory it
            # is copied first and cast on the device: a cast on the host would not wait for the values.
            master = self.master.to(self.members[0].parameter.device, non_blocking=True)
            if self.parameter_row is not None:
                self.parameter_row.copy_(master)
                return
            row = self._pool.take((self.row,), self.dtype).copy_(master)
        elif self.parameter_row is not None:
            return  # the optimizer has updated it
        else:
            row, self._weights = self.weights, None
        if self.shard.group is None:
            self._fill(row.unsqueeze(0))
            self._pool.give(row)
            return
        flat = self._pool.take((self.shard.size, self.row), self.dtype)
        work = collectives.all_gather(flat.view(-1), row, self.shard, async_op=overlap)
        self._gather = (flat, row, work)
        if work is None:
            self.finish_param_gather()

    def finish_param_gather(self) -> None:
        """Wait for the gather in flight, if any, and fill the parameters."""
        if self._gather is not None:
            flat, row, work = self._gather
            self._gather = None
            if work is not None:
                self.shard.meter.wait(work, f"{self.shard.name}/all_gather")
            self._fill(flat)
            self._pool.give(flat)
            self._pool.give(row)

    @torch.no_grad()
    def _fill(self, flat: Tensor) -> None:
        if self._is_even:
            tensors = [member.parameter for member in self.members]
            op("unpack_bucket", flat)(flat, tensors, self._dims)
            return
        for member in self.members:
            columns = self._columns(flat, member)
            if member.padded:
                whole = columns.movedim(0, member.dim).flatten(member.dim, member.dim + 1)
                member.parameter.copy_(whole.narrow(member.dim, 0, member.parameter.shape[member.dim]))
            else:
                member.rows(member.parameter).copy_(columns)
