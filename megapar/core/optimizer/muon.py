"""Muon: matrices move by their orthogonalized momentum, all other parameters by AdamW.

A matrix is orthogonalized whole, wherever its pieces lie, so that the update does not depend on the layout
(``matrix_plan``). Momentum is a running mean of gradients, with Nesterov's look-ahead, as in ``torch.optim.Muon``.

Sources: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; Liu et al. 2025, "Muon is
Scalable for LLM Training" (arXiv 2502.16982).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor

from megapar.core.comm import collectives
from megapar.core.comm.axis import Axis
from megapar.core.device.adamw import OTHER_SLAB, SLAB
from megapar.core.device.dtypes import at_least_fp32
from megapar.core.device.remainders import join_master, split_master
from megapar.core.device.stochastic_rounding import random_bits, rounded
from megapar.core.device.tensor_piece import ShardPieces
from megapar.core.optimizer.matrix_plan import Matrix, MatrixPlan, Piece, Round
from megapar.core.optimizer.optimizer import Optimizer, zeros_of
from megapar.core.optimizer.states import MOMENTUM
from megapar.core.optimizer.update_rule import CONSTANT, AdamW, StepRates
from megapar.core.sharding.master_shard import ParameterView
from megapar.core.sharding.sharding import Sharding

Coefficients = tuple[float, float, float]

# The polynomials a x + b x^3 + c x^5 of an iteration's singular values; the last one is repeated.
COEFFICIENTS: Mapping[str, tuple[Coefficients, ...]] = MappingProxyType(
    {
        # Jordan et al. 2024
        "simple": ((3.4445, -4.7750, 2.0315),),
        # Jordan's speedruns from 2025 on: another polynomial in each of five iterations
        "quintic": (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        # Amsel et al. 2025, "The Polar Express" (arXiv 2505.16932), in the rounded form of NVIDIA's optimizers
        "polar_express": (
            (7.2086, -15.5131, 9.0178),
            (3.9623, -2.5813, 0.4542),
            (3.9466, -2.5765, 0.4544),
            (3.8991, -2.5671, 0.4566),
            (3.7186, -2.5308, 0.4653),
            (3.1390, -2.3073, 0.4733),
            (2.1715, -1.5246, 0.3885),
            (1.8648, -1.2224, 0.3577),
        ),
    }
)
# Factor of an orthogonalized matrix [R, C], by which updates of matrices of all shapes are alike.
SCALES: Mapping[str, Callable[[int, int], float]] = MappingProxyType(
    {
        "spectral": lambda rows, columns: max(rows, columns) ** 0.5,  # Liu et al. 2025
        "unit_rms_norm": lambda rows, columns: (rows / columns) ** 0.5,  # Bernstein 2025, "Deriving Muon"
        "shape_scaling": lambda rows, columns: max(1.0, rows / columns) ** 0.5,  # Jordan et al. 2024
    }
)
_LEAST_NORM = 1e-7


def orthogonalize(x: Tensor, coefficients: Sequence[Coefficients], steps: int) -> Tensor:
    """Return matrices [n, R, C] with the singular vectors of x and singular values near 1. Zero stays zero."""
    wide = x if x.shape[-2] <= x.shape[-1] else x.mT
    norm = torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True, dtype=at_least_fp32(x.dtype))
    wide = wide / norm.clamp(min=_LEAST_NORM).to(x.dtype)
    for step in range(steps):
        a, b, c = coefficients[min(step, len(coefficients) - 1)]
        gram = wide @ wide.mT
        wide = torch.baddbmm(wide, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide if x.shape[-2] <= x.shape[-1] else wide.mT


@dataclass(frozen=True)
class MuonRule:
    """The options of Muon.

    Attributes:
        momentum: Decay rate of the running mean of gradients.
        steps: Newton-Schulz iterations.
        coefficients: Their polynomials, a name of ``COEFFICIENTS``.
        scale: Factor of the update by its shape, a name of ``SCALES``.
        extra_scale: A further factor.
        dtype: Dtype in which matrices are sent and orthogonalized.
    """

    momentum: float
    nesterov: bool
    steps: int
    coefficients: str
    scale: str
    extra_scale: float
    weight_decay: float
    dtype: torch.dtype

    def factor(self, matrix: Matrix) -> float:
        """Return the factor of a matrix's orthogonalized momentum."""
        return self.extra_scale * SCALES[self.scale](matrix.rows, matrix.columns) * matrix.parameter.lr_factor


class MuonOptimizer:
    """Updates the master shards of matrices by Muon, and the others by AdamW.

    Args:
        matrices: All matrices of this rank's stage, in the same order on each of its ranks.
        stage: The ranks of this rank's pipeline stage.
        pieces: For each master shard, the pieces of Hugging Face tensors; None: nothing is rounded. Momentum has the
            dtype of the first moment of AdamW, and is rounded like it.
    """

    def __init__(
        self,
        sharding: Sharding,
        matrices: Sequence[Matrix],
        plan: MatrixPlan,
        stage: Axis,
        rule: MuonRule,
        others: AdamW,
        pieces: Sequence[ShardPieces] | None = None,
    ) -> None:
        self._shards, self._sharding = sharding.master_shards, sharding
        self._matrices, self._plan, self._stage, self._rule = matrices, plan, stage, rule
        self._wide = self._shards[0].dtype  # in which gradients and momenta of two bytes are averaged
        self._matrix_shards = [shard for shard in self._shards if shard.matrix]
        self._momenta = [
            zeros_of(shard.master, others.state_dtype(others.states[0], shard.dtype)) for shard in self._matrix_shards
        ]
        numbers = [[n for n, shard in enumerate(self._shards) if shard.matrix == matrix] for matrix in (False, True)]
        apart, self._pieces = ([pieces[n] for n in each] if pieces else None for each in numbers)
        self._others = Optimizer([shard for shard in self._shards if not shard.matrix], others, apart)
        self.states = (MOMENTUM, *others.states)
        masters = self._views([shard.master for shard in self._matrix_shards])
        self._masters = {view.spec.name: view for view in masters}
        self._views_of_momenta = {view.spec.name: view for view in self._views(self._momenta)}

    def _views(self, tensors: Sequence[Tensor | None]) -> Iterator[ParameterView]:
        """Yield the pieces of matrices' parameters, given a tensor for each of their shards."""
        given = iter(tensors)
        return self._sharding.views([next(given) if shard.matrix else None for shard in self._shards])

    @torch.no_grad()
    def step(
        self, lr: float, found_inf: Tensor | None = None, grad_scale: Tensor | None = None, rates: StepRates = CONSTANT
    ) -> None:
        """Update all masters from their gradients. For ``found_inf`` and ``grad_scale`` see ``Update``."""
        update = self._others.next_update if self._pieces else None
        self._others.step(lr, found_inf, grad_scale, rates)
        decay = lr * (self._rule.weight_decay if rates.weight_decay is None else rates.weight_decay)
        gradients = self._gradients(grad_scale)
        self._average(gradients, found_inf, update)
        split = [None if shard.weights is None else shard.weights() for shard in self._matrix_shards]
        self._weights = {view.spec.name: view for view in self._views(split)}
        pieces = {view.spec.name: view for view in self._views(gradients)}
        previous: _Flight | None = None
        device = self._shards[0].master.device
        flights = [_Flight(each, self._matrices, self._stage, self._rule, device) for each in self._plan.rounds]
        for number, flight in enumerate(flights):
            if number == 0:
                flight.gather(self._looked_ahead(flight.round, pieces))
            if number + 1 < len(flights):
                flights[number + 1].gather(self._looked_ahead(flights[number + 1].round, pieces))
            flight.orthogonalize_and_scatter()
            if previous is not None:
                self._apply(previous, lr, decay, found_inf)
            previous = flight
        if previous is not None:
            self._apply(previous, lr, decay, found_inf)

    def _gradients(self, grad_scale: Tensor | None) -> list[Tensor]:
        grads = [shard.grad for shard in self._matrix_shards if shard.grad is not None]
        assert len(grads) == len(self._matrix_shards), "Sharding.finish sets every gradient"
        if grad_scale is not None and grads:
            torch._foreach_div_(grads, grad_scale)
        return grads

    def _average(self, gradients: Sequence[Tensor], found_inf: Tensor | None, update: Tensor | None) -> None:
        """Move the momenta towards the gradients, unless the step is skipped. update: Its number, for roundings."""
        share = 1 - self._rule.momentum
        if found_inf is None and self._pieces is None:
            if self._momenta:
                torch._foreach_lerp_(self._momenta, list(gradients), share)
            return
        pieces: list[ShardPieces | None] = [*self._pieces] if self._pieces else [None] * len(self._momenta)
        for momentum, gradient, of_shard in zip(self._momenta, gradients, pieces, strict=True):
            if of_shard is not None and update is not None and momentum.dtype == torch.bfloat16:
                self._round_average(momentum, gradient, of_shard, update, found_inf)
            else:
                moved = momentum.lerp(gradient.to(momentum.dtype), share)
                momentum.copy_(moved if found_inf is None else torch.where(found_inf > 0, momentum, moved))

    def _round_average(
        self, momentum: Tensor, gradient: Tensor, pieces: ShardPieces, update: Tensor, found_inf: Tensor | None
    ) -> None:
        """Move a momentum in bf16, by operations that round each element alike wherever it lies."""
        most = SLAB.get(momentum.device.type, OTHER_SLAB)
        for piece in (slab for whole in pieces.pieces for slab in whole.slabs(most)):
            old, new = piece.within(momentum), piece.within(gradient).to(self._wide)
            moved = (new * (1 - self._rule.momentum)).add_(old.to(self._wide) * self._rule.momentum)
            result = rounded(moved, random_bits(piece.key, update, piece.indices(old.device)), 0)
            old.copy_(result if found_inf is None else torch.where(found_inf > 0, old, result))

    def _looked_ahead(self, of: Round, gradients: dict[str, ParameterView]) -> list[Tensor]:
        """Return the pieces that this rank sends in a round: momenta, or gradients moved towards them (Nesterov)."""
        pieces = list(chain.from_iterable(of.sent))
        momenta = [self._part(self._views_of_momenta, piece).to(self._wide) for piece in pieces]
        if not self._rule.nesterov or not momenta:
            return momenta
        parts = [self._part(gradients, piece).to(self._wide) for piece in pieces]
        return list(torch._foreach_lerp(parts, momenta, self._rule.momentum))

    def _part(self, views: dict[str, ParameterView], piece: Piece) -> Tensor:
        view = views[self._matrices[piece.matrix].parameter.name]
        return view.tensor[piece.part.within(view.box)]

    def _apply(self, flight: _Flight, lr: float, decay: float, found_inf: Tensor | None) -> None:
        """Move this rank's pieces by the results of a round. decay: share of matrices with decay that a step takes."""
        for piece, update in flight.results():
            matrix, master = self._matrices[piece.matrix], self._part(self._masters, piece)
            split = matrix.parameter.name in self._weights
            values = join_master(self._part(self._weights, piece), master) if split else master
            step = update.to(values.dtype) * (-lr * self._rule.factor(matrix))
            step.add_(values, alpha=-decay if matrix.parameter.decay else 0.0)
            values.add_(step if found_inf is None else torch.where(found_inf > 0, 0.0, step))
            if split:
                weights, remainders = split_master(values)
                self._part(self._weights, piece).copy_(weights)
                master.copy_(remainders)

    def state(self, name: str) -> list[Tensor | None]:
        """Return a state of every shard, None of those that have no such state."""
        of_matrices, tensors = name == MOMENTUM, iter(self._momenta if name == MOMENTUM else self._others.state(name))
        return [next(tensors) if shard.matrix == of_matrices else None for shard in self._shards]

    @property
    def num_steps(self) -> int:
        """Number of updates so far."""
        return self._others.num_steps

    @num_steps.setter
    def num_steps(self, steps: int) -> None:
        self._others.num_steps = steps


class _Flight:
    """The messages of a round."""

    def __init__(
        self, of: Round, matrices: Sequence[Matrix], stage: Axis, rule: MuonRule, device: torch.device
    ) -> None:
        self.round, self._matrices, self._stage, self._rule, self._device = of, matrices, stage, rule, device
        self._arrived = torch.empty(0, dtype=rule.dtype, device=device)
        self._work: dist.Work | None = None

    def gather(self, pieces: Sequence[Tensor]) -> None:
        """Start to send this rank's pieces to the owners."""
        self._exchange(pieces, self.round.sent, self.round.received)

    def _exchange(
        self, pieces: Sequence[Tensor], sent: Sequence[Sequence[Piece]], received: Sequence[Sequence[Piece]]
    ) -> None:
        """Start to send pieces, and to receive those of other ranks; this rank alone keeps its pieces."""
        leaving = _packed(pieces, self._rule.dtype, self._device)
        if self._stage.group is None:
            self._arrived = leaving
            return
        there, here = ([sum(piece.part.numel for piece in row) for row in rows] for rows in (sent, received))
        self._arrived = torch.empty(sum(here), dtype=self._rule.dtype, device=self._device)
        self._leaving = leaving  # until the messages are sent
        self._work = collectives.all_to_all(self._arrived, leaving, self._stage, here, there, async_op=True)

    def orthogonalize_and_scatter(self) -> None:
        """Wait for the pieces of this rank's matrices, orthogonalize these, and start to send the results."""
        wholes = self._wholes()
        shapes: dict[tuple[int, int], list[int]] = {}
        for index in self.round.owned:
            shapes.setdefault((self._matrices[index].rows, self._matrices[index].columns), []).append(index)
        results: dict[int, Tensor] = {}
        for indices in shapes.values():
            stacked = torch.stack([wholes[index] for index in indices])
            made = orthogonalize(stacked, COEFFICIENTS[self._rule.coefficients], self._rule.steps)
            results |= dict(zip(indices, made, strict=True))
        pieces = []
        for piece in chain.from_iterable(self.round.given):
            box = self._matrices[piece.matrix].box
            pieces.append(results[piece.matrix].reshape(box.sizes)[piece.part.within(box)])
        self._exchange(pieces, self.round.given, self.round.returned)

    def _wholes(self) -> dict[int, Tensor]:
        """Return this rank's matrices [rows, columns], put together from their pieces."""
        arrived, wholes = self._wait(), {}
        for index in self.round.owned:
            matrix = self._matrices[index]
            wholes[index] = arrived.new_empty(matrix.rows, matrix.columns)
        for piece, values in _unpacked(arrived, self.round.received):
            box = self._matrices[piece.matrix].box
            wholes[piece.matrix].view(box.sizes)[piece.part.within(box)] = values
        return wholes

    def results(self) -> Iterator[tuple[Piece, Tensor]]:
        """Wait for the results, and yield them by piece. The round keeps nothing of them."""
        arrived = self._wait()
        self._arrived = self._leaving = arrived.new_empty(0)
        return _unpacked(arrived, self.round.returned)

    def _wait(self) -> Tensor:
        if self._work is not None:
            with self._stage.waiting("all_to_all"):
                self._work.wait()
            self._work = None
        return self._arrived


def _packed(pieces: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the pieces in one message."""
    message = torch.empty(sum(piece.numel() for piece in pieces), dtype=dtype, device=device)
    views = message.split([piece.numel() for piece in pieces])
    if pieces:
        torch._foreach_copy_([view.view(piece.shape) for view, piece in zip(views, pieces, strict=True)], list(pieces))
    return message


def _unpacked(message: Tensor, rows: Sequence[Sequence[Piece]]) -> Iterator[tuple[Piece, Tensor]]:
    """Yield each piece of a message with its values."""
    pieces = list(chain.from_iterable(rows))
    for piece, values in zip(pieces, message.split([piece.part.numel for piece in pieces]), strict=True):
        yield piece, values.view(piece.part.sizes)
