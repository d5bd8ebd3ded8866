"""The routed experts of this rank: one small MLP each, their weights stacked.

Shape letters: R rows sorted by expert, H hidden, E experts on this rank, F expert intermediate features on
this rank (E and F are global sizes divided by the ep and emp sizes).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megapar.core.comm.in_flight import CommContext
from megapar.core.device.compiled import counted, plain
from megapar.core.device.grouped import input_gradient_by_size, linear_by_size, row_ends, weight_gradient_by_size
from megapar.core.device.layer_ops import in_one_kernel
from megapar.core.device.ops import op
from megapar.core.recompute.replay import Replay, once
from megapar.core.recompute.selective import without_output
from megapar.core.tensor_parallel.execution import DEFAULT, Execution
from megapar.core.tensor_parallel.fp8 import Fp8Weight
from megapar.core.tensor_parallel.fp32_grad_sum import Fp32GradSum
from megapar.core.tensor_parallel.layers import local
from megapar.core.tensor_parallel.weight_gradients import DeferWgrad, linear
from megapar.moe.expert_order import weigh

T = TypeVar("T")
READ_SIZES = "Experts.read_sizes"  # where the host waits for the rows of experts


class Experts(nn.Module):
    """rows [R, H] -> up [R, F] -> rows [R, H], each row through its own expert. Parameters are uninitialized.

    Ledger (this rank):
        gate_up [E, 2, F, H] (gate at 0, up at 1) or up [E, F, H] (gelu)
        down [E, H, F]; with ``add_bias``: gate_up_bias [E, 2, F] or up_bias [E, F], down_bias [E, H]
        forward   grouped product, activation, grouped product; no collective
        dgrad     grouped products with the weights in their layout; no collective
        wgrad     one [out, in] product per expert over its rows, whole on its rank
    If F is sharded over emp, the result is a partial sum over emp, and so is dgrad; down_bias [E, H] is then whole on
    every rank of emp, is added on the first (``adds_down_bias``), and has the whole gradient on all.

    Attributes:
        selective: Recompute the activation in the backward instead of keeping it.
        run: Calls the activation, eager or compiled.
        up_name: Name of the first weight, ``gate_up`` or ``up``.
        weight_gradients: Defers the products of weight gradients; None: compute them at once.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_experts: int,
        *,
        gated: bool,
        clamped: bool = False,
        add_bias: bool,
        adds_down_bias: bool = True,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        execution: Execution = DEFAULT,
    ) -> None:
        super().__init__()
        self.gated, self.clamped = gated, clamped
        self.has_bias = add_bias
        self.adds_down_bias = adds_down_bias
        self.run, self.selective = execution.run, execution.selective
        self.weight_gradients = execution.weight_gradients
        fp8 = execution.fp8_experts
        self._casts = [None if fp8 is None else Fp8Weight(fp8, "fp8_experts") for _ in ("up", "down")]
        self._comm = execution.comm or CommContext()
        widths = hidden_size, ffn_hidden_size
        self._needs_host_sizes = bool(self._comm.device.grouped_lacks(dtype, widths))

        def create(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_experts, *shape, dtype=dtype, device=device))

        up = (2, ffn_hidden_size) if gated else (ffn_hidden_size,)
        self.up_name = "gate_up" if gated else "up"
        self.register_parameter(self.up_name, create(*up, hidden_size))
        self.down = create(hidden_size, ffn_hidden_size)
        self.register_parameter(f"{self.up_name}_bias", create(*up) if add_bias else None)
        self.register_parameter("down_bias", create(hidden_size) if add_bias else None)

    def forward(self, function: Callable[..., T], *entering: Any) -> T:
        """Return ``function(self, *entering)``: everything that a forward computes with these experts, in one call.

        Under FSDP, calling the module unshards the weights, and their gradients are reduced once the gradients of
        ``entering`` have been computed. So all incoming rows must be in ``entering``, and all outgoing ones in the
        result. Several slices call ``compute`` several times within one call, and unshard once.
        """
        return function(self, *entering)

    def compute(
        self,
        rows_RH: Tensor,
        counts_E: Tensor,
        sizes_E: tuple[int, ...] | None = None,
        weights_R: Tensor | None = None,
        ends_E: Tensor | None = None,
    ) -> Tensor:
        """Return the expert outputs [R, H].

        Args:
            counts_E: int64, rows of each expert; they sum to R.
            sizes_E: The same on the host, if the device's products need them (``grouped_linear``).
            weights_R: The gate weight of each output; None: the outputs are not multiplied.
            ends_E: ``row_ends`` of the counts, if they have been computed.
        """
        up = local(getattr(self, self.up_name)).flatten(1, -2)
        expert_R, up_bias, down_bias = None, None, None
        if self.has_bias:
            expert_R = torch.repeat_interleave(counts_E, output_size=rows_RH.shape[0])
            up_bias, down_bias = (
                local(getattr(self, f"{name}_bias")).flatten(1).index_select(0, expert_R)
                for name in (self.up_name, "down")
            )
        # Computed by the first product that needs it.
        ends = cache(partial(row_ends, counts_E)) if ends_E is None else partial(_identity, ends_E)
        casts = self._casts
        hidden = grouped_linear(rows_RH, up, counts_E, self._defer_wgrad(self.up_name), sizes_E, ends, casts[0])

        def down(inner: Tensor) -> Tensor:
            defer = self._defer_wgrad("down")
            return grouped_linear(inner, local(self.down), counts_E, defer, sizes_E, ends, casts[1])

        return self._finish(hidden, up_bias, down, down_bias, weights_R)

    def host_sizes(
        self, counts_E: Tensor, known: tuple[int, ...] | None, rows: int, replay: Replay | None
    ) -> tuple[int, ...] | None:
        """Return the rows of each local expert on the host, or None if the device's products do not need them.

        Args:
            known: The rows on the host, if the dispatch plan has them.
            rows: Their sum.
            replay: Of the recomputed unit; its recomputation reuses the sizes read in the forward.
        """
        if not self._needs_host_sizes or known is not None:
            return known if self._needs_host_sizes else None
        return once(replay, lambda: self.read_sizes(counts_E, rows))

    def read_sizes(self, counts_E: Tensor, rows: int) -> tuple[int, ...]:
        """Copy the counts to the host, with one host wait for all products. rows: Their sum."""
        numbers, ready = self._comm.device.host_copy(counts_E)
        ready.synchronize()
        self._comm.count_host_wait(READ_SIZES)
        sizes = tuple(numbers.tolist())
        assert sum(sizes) == rows, (sizes, rows)
        return sizes

    def per_expert(self) -> list[Callable[[Tensor, Tensor | None], Tensor]]:
        """Return a function per expert on this rank, as ``compute`` of (rows, weights), callable any number of times.

        Weight gradients of its calls are summed per expert, and concatenated with those of the other experts once.
        """
        up, down = (self._pieces(name) for name in (self.up_name, "down"))
        up_bias = self._pieces(f"{self.up_name}_bias") if self.has_bias else [None] * len(up)
        down_bias = self._pieces("down_bias") if self.has_bias else [None] * len(up)

        def make(e: int) -> Callable[[Tensor, Tensor | None], Tensor]:
            def compute(rows_RH: Tensor, weights_R: Tensor | None = None) -> Tensor:
                hidden = linear(rows_RH, up[e]().flatten(0, -2), None, self._defer_wgrad(self.up_name, e))
                biases = [None if bias is None else bias() for bias in (up_bias[e], down_bias[e])]
                return self._finish(
                    hidden,
                    None if biases[0] is None else biases[0].flatten(),
                    lambda inner: linear(inner, down[e](), None, self._defer_wgrad("down", e)),
                    None if biases[1] is None else biases[1].expand_as(rows_RH),
                    weights_R,
                )

            return compute

        return [make(e) for e in range(len(up))]

    def _pieces(self, name: str) -> list[Callable[[], Tensor]]:
        """Return each expert's part of a parameter, as a function to call at each use."""
        parts = local(getattr(self, name)).unbind(0)
        return [
            partial(Fp32GradSum().use, part) if part.dtype.itemsize < 4 else partial(_identity, part) for part in parts
        ]

    def _finish(
        self,
        hidden: Tensor,
        up_bias: Tensor | None,
        down: Callable[[Tensor], Tensor],
        down_bias: Tensor | None,
        weights_R: Tensor | None,
    ) -> Tensor:
        # W (w a) is w (W a) with fewer multiplications: an activation is narrower than an output.
        if up_bias is not None:
            hidden = hidden + up_bias
        activated = partial(self._activate, weights_R=weights_R)
        out_RH = without_output(activated, hidden, down) if self.selective else down(activated(hidden))
        if down_bias is not None:
            bias_RH = down_bias if weights_R is None else weigh(down_bias, weights_R)
            out_RH = _AddOnce.apply(out_RH, bias_RH, self.adds_down_bias)
        return out_RH

    def _defer_wgrad(self, name: str, piece: int | None = None) -> DeferWgrad | None:
        return None if self.weight_gradients is None else self.weight_gradients.of(getattr(self, name), piece)

    def _activate(self, hidden: Tensor, weights_R: Tensor | None) -> Tensor:
        # The weights are a column: a vector's length would be compiled as its number of features.
        weights_R1 = None if weights_R is None else weights_R[:, None]
        run = plain if self.gated and self.run is not plain and in_one_kernel(hidden) else self.run
        if self.clamped:
            return run(activate_clamped, hidden, weights_R1)
        return run(activate, hidden, self.gated, weights_R1)


@counted(1, 0, 1)
def activate(hidden: Tensor, gated: bool, weights_R1: Tensor | None = None) -> Tensor:
    """Apply the activation: [R, 2 F] to [R, F] if ``gated``, else the same shape; then multiply rows by their weights.

    Only this is compiled, unless it is one kernel: the products are one kernel each, compiled or not.
    """
    if gated:
        return op("swiglu", hidden)(hidden.unflatten(1, (2, -1)), weights_R1)
    activated = F.gelu(hidden)
    return activated if weights_R1 is None else activated * weights_R1.to(activated.dtype)


@counted(1, 1)
def activate_clamped(hidden: Tensor, weights_R1: Tensor | None = None) -> Tensor:
    """Apply the clamped swiglu as ``activate`` does."""
    return op("clamped_swiglu", hidden)(hidden.unflatten(1, (2, -1)), weights_R1)


def _identity(x: Tensor) -> Tensor:
    return x


def _now(product: Callable[[], Tensor]) -> Tensor:
    return product()


class _AddOnce(torch.autograd.Function):
    """x + bias on one rank and x on the other ranks, which are summed later: the bias gradient is whole on all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, adds: bool) -> Tensor:
        return x + bias if adds else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return grads[0], grads[0], None


def grouped_linear(
    rows_RI: Tensor,
    weight_EOI: Tensor,
    counts_E: Tensor,
    defer_wgrad: DeferWgrad | None = None,
    sizes_E: tuple[int, ...] | None = None,
    ends: Callable[[], Tensor] | None = None,
    fp8: Fp8Weight | None = None,
) -> Tensor:
    """Multiply each row by the transposed weight [O, I] of its expert, a grouped GEMM: [R, O].

    Uses the device's grouped product, or one product per expert if the device has none and the host has the row counts.

    Args:
        counts_E: int64, rows of each expert, possibly 0; they must sum to R, because further rows are not computed.
        defer_wgrad: Defers the product of the weight gradient (``weight_gradients``); None: the backward computes it.
        sizes_E: The counts on the host; passed if the device's product would otherwise copy them to the host.
        ends: Returns ``row_ends`` of the counts, if several products share it.
        fp8: Casts of the weights, for a forward and an input gradient in fp8.
    """
    if defer_wgrad is not None or fp8 is not None:
        return _SplitBackward.apply(rows_RI, weight_EOI, counts_E, defer_wgrad or _now, sizes_E, fp8)
    if sizes_E is not None:
        return linear_by_size(rows_RI, weight_EOI, sizes_E)
    return op("grouped_linear", rows_RI)(rows_RI, weight_EOI, counts_E, ends)


class _SplitBackward(torch.autograd.Function):
    """Backward with dx [R, I] computed at once and dw [E, O, I] deferred to ``defer_wgrad``."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        counts: Tensor,
        defer_wgrad: DeferWgrad,
        sizes: tuple[int, ...] | None,
        fp8: Fp8Weight | None,
    ) -> Tensor:
        ctx.defer_wgrad, ctx.sizes, ctx.fp8 = defer_wgrad, sizes, fp8
        ctx.save_for_backward(rows, weight, counts)
        if fp8 is not None:
            return op("fp8_grouped_product", rows)(rows, fp8.forward(weight), counts)
        return grouped_linear(rows, weight, counts, sizes_E=sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (rows, weight, counts), dy = ctx.saved_tensors, grads[0].contiguous()
        sizes, dx = ctx.sizes, None
        if ctx.needs_input_grad[0] and ctx.fp8 is not None:
            dx = op("fp8_grouped_product", dy)(dy, ctx.fp8.backward(weight), counts)
        elif ctx.needs_input_grad[0]:
            grouped = op("grouped_input_gradient", dy)
            dx = grouped(dy, weight, counts) if sizes is None else input_gradient_by_size(dy, weight, sizes)

        def product() -> Tensor:
            if sizes is not None:
                return weight_gradient_by_size(dy, rows, sizes)
            return op("grouped_weight_gradient", dy)(dy, rows, counts)

        return dx, ctx.defer_wgrad(product) if ctx.needs_input_grad[1] else None, None, None, None, None
