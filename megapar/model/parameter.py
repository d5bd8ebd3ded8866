"""Rows of a model's parameter table: parameters and checkpointed buffers, and rows that several tables share. No torch.

Names and shapes are global and do not depend on the layout. Buckets, memory, counts, checkpoints, initialization and
export are computed from the table. A test compares it with the module tree.

Shape letters: V vocabulary, H hidden, P positions, G key-value heads (groups), D head size, F MLP width, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

ALL = slice(None)
_IN_FP8 = ("qkv", "proj", "gate_up", "up", "down")


@dataclass(frozen=True)
class HfPiece:
    """One Hugging Face tensor inside a parameter: ``parameter[index].reshape(hf_shape)``."""

    hf_name: str
    hf_shape: tuple[int, ...]
    index: tuple[int | slice, ...]


@dataclass(frozen=True)
class ParameterSpec:
    """One row of a model's table.

    Attributes:
        name: Dotted path in the module tree.
        axes: (mesh axis, dim it splits) pairs, outermost split first.
        unit: The layer that contains it: "embedding", "layers.N" or "head".
        init: "normal", "ones" or "zeros".
        decay: Weight decay applies.
        fp32: Stored in max(fp32, dtype) regardless of the compute dtype.
        trainable: False for a buffer, which has no gradient.
        expert: Sharded over edp instead of (sharding, cp).
        router: A router's weight, which may have its own learning rate.
        decoupled: It has the rates of --decoupled-lr.
        lr_factor: Factor of its learning rate by muP.
        init_factor: Factor of its initial standard deviation by muP.
        matrix: Muon updates it, as the matrices that its pieces are.
        residual: A weight of attention, an MLP or an expert whose products are added to the residual stream.
        mp_partial: When each mp rank's gradient is a partial sum: "never", "sp" (under sequence parallelism), "always".
        rotated: Leading features of a head that rope rotates, for queries, keys and their norms; 0 for other rows.
        pieces: The Hugging Face tensors it consists of; models without a Hugging Face form use the parameter's name.
        stage: Coordinate on pp of the stage that owns it.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[tuple[str, int], ...]
    unit: str
    init: str
    decay: bool
    fp32: bool = False
    trainable: bool = True
    expert: bool = False
    router: bool = False
    decoupled: bool = False
    lr_factor: float = 1.0
    init_factor: float = 1.0
    matrix: bool = False
    residual: bool = False
    mp_partial: str = "never"
    rotated: int = 0
    pieces: tuple[HfPiece, ...] = ()
    stage: int = 0

    @property
    def numel(self) -> int:
        """Elements of the global parameter."""
        return prod(self.shape)


def fp8_flag(row: ParameterSpec) -> str:
    """Return the flag that computes the products of a weight in fp8, as ``Product.fp8`` names it.

    Up projections of latents are not among them (``model.attention.latent_layer``).
    """
    layer, _, kind = row.name.rpartition(".")
    if row.expert:
        return "" if kind.endswith("bias") else "fp8_experts"
    return "fp8" if kind == "weight" and layer.rpartition(".")[2] in _IN_FP8 and "mp" in dict(row.axes) else ""


def names_from_first_rank(table: Sequence[ParameterSpec], mp: int, partial: Sequence[str]) -> frozenset[str]:
    """Return the parameters whose gradients all mp ranks take from the first one at sharding stage 3.

    If mp cuts a parameter unevenly (the vocabulary), groups of FSDP2 have messages of unequal lengths, in which sums of
    the same numbers have different last bits. partial: values of ``mp_partial`` whose gradients are summed anyway.
    """
    if not any(row.shape[dim] % mp for row in table for axis, dim in row.axes if axis == "mp"):
        return frozenset()
    rows = (row for row in table if row.trainable and not row.expert and row.mp_partial not in partial)
    return frozenset(row.name for row in rows if "mp" not in dict(row.axes))


def attention_rows(
    name: str, shape: tuple[int, int, int, int], parts: Mapping[str, int | slice], unit: str, bias: bool
) -> list[ParameterSpec]:
    """Return the rows of a projection that makes all heads of a group at once: queries, key, value.

    Args:
        shape: (G, heads of a group, D, H).
        parts: Heads of a group that each Hugging Face tensor makes; its name lacks the ending.
    """
    G, _, D, H = shape
    rows = []
    for kind, tail in (("weight", (H,)), ("bias", ()))[: 1 + bias]:
        pieces = []
        for hf, heads in parts.items():
            count = heads.stop - heads.start if isinstance(heads, slice) else 1
            pieces.append(HfPiece(f"{hf}.{kind}", (G * count * D, *tail), (ALL, heads)))
        rows.append(fused_row(f"{name}.{kind}", (*shape[:3], *tail), pieces, unit, (("mp", 0),)))
    return rows


def mlp_rows(name: str, shape: tuple[int, int], gated: bool, bias: bool, hf: str, unit: str) -> list[ParameterSpec]:
    """Return the rows of a layer's MLP, with or without a gate. shape: (F, H)."""
    F, H = shape
    if gated:
        rows = [_gate_up(f"{name}.gate_up.weight", (2, F, H), hf, unit)]
        if bias:
            rows.append(_gate_up(f"{name}.gate_up.bias", (2, F), hf, unit))
    else:
        rows = column_parallel_rows(f"{name}.up", (F, H), f"{hf}.up_proj", unit, bias)
    return rows + row_parallel_rows(f"{name}.down", (H, F), f"{hf}.down_proj", unit, bias)


def _gate_up(name: str, shape: tuple[int, ...], hf: str, unit: str) -> ParameterSpec:
    kind = name.rsplit(".", 1)[1]
    pieces = tuple(HfPiece(f"{hf}.{part}_proj.{kind}", shape[1:], (i,)) for i, part in enumerate(("gate", "up")))
    return fused_row(name, shape, pieces, unit, (("mp", 1),))


def column_parallel_rows(name: str, shape: tuple[int, int], hf: str, unit: str, bias: bool) -> list[ParameterSpec]:
    """Return the rows of a linear layer whose output features are split over mp. shape: (out, in)."""
    rows = [weight_row(f"{name}.weight", shape, f"{hf}.weight", unit, axes=(("mp", 0),))]
    return rows + [bias_row(f"{name}.bias", shape[:1], f"{hf}.bias", unit, axes=(("mp", 0),))] * bias


def row_parallel_rows(name: str, shape: tuple[int, int], hf: str, unit: str, bias: bool) -> list[ParameterSpec]:
    """Return the rows of a linear layer whose input features are split over mp. shape: (out, in)."""
    weight = weight_row(f"{name}.weight", shape, f"{hf}.weight", unit, axes=(("mp", 1),))
    rows = [replace(weight, residual=True)]
    return rows + [bias_row(f"{name}.bias", shape[:1], f"{hf}.bias", unit, mp_partial="sp")] * bias


def linear_rows(name: str, shape: tuple[int, int], hf: str) -> list[ParameterSpec]:
    """Return the rows of a linear layer of the head that is replicated over mp. shape: (out, in)."""
    weight = weight_row(f"{name}.weight", shape, f"{hf}.weight", "head")
    return [weight, bias_row(f"{name}.bias", shape[:1], f"{hf}.bias", "head")]


def norm_rows(name: str, size: int, hf: str, unit: str, biased: bool = True) -> list[ParameterSpec]:
    """Return the rows of a norm over ``size`` features. biased: True for a layernorm."""
    rows = [scale_row(f"{name}.weight", size, f"{hf}.weight", unit)]
    return rows + [bias_row(f"{name}.bias", (size,), f"{hf}.bias", unit, mp_partial="sp")] * biased


def weight_row(
    name: str,
    shape: tuple[int, ...],
    hf: str,
    unit: str,
    axes: tuple[tuple[str, int], ...] = (),
    mp_partial: str = "never",
    init: str = "normal",
) -> ParameterSpec:
    """Return the row of a parameter that is one Hugging Face tensor, named ``hf``; "" to use the parameter's name."""
    pieces = (HfPiece(hf or name, shape, ()),)
    return ParameterSpec(name, shape, axes, unit, init, decay=init == "normal", mp_partial=mp_partial, pieces=pieces)


bias_row = partial(weight_row, init="zeros")
"""Return the row of a bias, which starts at zero. Arguments as for ``weight_row``."""


def scale_row(name: str, size: int, hf: str, unit: str, mp_partial: str = "sp") -> ParameterSpec:
    """Return the row of a norm's scale, which starts at one."""
    return weight_row(name, (size,), hf, unit, mp_partial=mp_partial, init="ones")


def fused_row(
    name: str, shape: tuple[int, ...], pieces: Iterable[HfPiece], unit: str, axes: tuple[tuple[str, int], ...]
) -> ParameterSpec:
    """Return the row of a parameter that fuses several Hugging Face tensors."""
    biased = name.endswith("bias")
    init = "zeros" if biased else "normal"
    return ParameterSpec(name, shape, axes, unit, init, decay=not biased, pieces=tuple(pieces))
