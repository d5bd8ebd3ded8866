"""Whole models cut over ranks before an independent referee, spmd-types: which tensors are the same on which ranks.

On an axis of the mesh a tensor varies (V), is a part of a sum (P) or the same on all ranks, and then its gradient is
still to be summed (R) or the same, too (I). spmd-types infers this operator by operator and refuses what does not fit.
Here it also runs inside our Functions that communicate, in the backward on gradients of the types that belong to those
of the outputs. What a Function does is written nowhere. Given are the types of the batch and of parameters, by their
rows of the table. What is wrong between tensors that vary before and after it is not seen, such as a missing sum over
cp of the gradients of keys, and neither is a wrong value.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from math import prod
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.overrides import _len_torch_function_stack

from megapar.core.comm import collectives
from megapar.core.comm.autograd import all_gather_replicated
from megapar.core.comm.axis import Axis
from megapar.core.context_parallel.method import ContextParallel
from megapar.core.context_parallel.positions import GATHERED, RING, ULYSSES, choose_layout
from megapar.core.tensor_parallel.overlapped_linear import CopiedColumn, ReducedRow
from megapar.model.decoder import model as decoder
from megapar.model.spec import table_of
from tests.model.small import DENSE, MOE, batch_for, build, total
from tests.support.ranks import run_ranks

spmd = pytest.importorskip("spmd_types")
checker = pytest.importorskip("spmd_types._checker")
V, P, R, I = spmd.V, spmd.P, spmd.R, spmd.I  # noqa: E741

# Functions of all other modules are local. If one of them communicates, its collective finds the referee absent.
SEEN = ("comm.autograd", "comm.async_pairs", "overlapped_linear", "layers.loss", "blockwise")
checker._DETERMINISTIC_FACTORIES.update((torch.empty, torch.empty_like))  # the same on all ranks until written to
checker._DETERMINISTIC_NEW_FACTORIES.add(torch.Tensor.new_empty)
GRADIENT = {V: V, P: R, R: P, I: I}  # of an output of this type
LEGAL = {V: (V, R, I), P: (R, I), R: (V, P), I: (R, I)}  # what a backward may return for an input of this type


def types(x):
    return dict(spmd.get_local_type(x)) if isinstance(x, torch.Tensor) else {}


def set_types(x, new):
    """Type a tensor, and the buffer that it is a view of, which varies if one of its parts does."""
    spmd.runtime._set_local_type(x, new)
    if (base := x._base) is not None:
        old = types(base) if base.numel() > x.numel() else {}
        spmd.runtime._set_local_type(base, {axis: V if old.get(axis) is V else t for axis, t in new.items()})


def seen(cls, forward, backward):
    """The forward and the backward of a Function, before the referee."""

    def typed_forward(ctx, *args):
        inputs, sums_over = [types(x) for x in args], None
        with checker._current_mode():
            result = forward(ctx, *args)
        if cls.__name__ in ("_Run", "_Wait"):  # copies and gathers for work that differs by rank are not I but R
            exchange = getattr(args[1], "exchange", args[1])
            if exchange.conjugate().kind in ("all_reduce", "reduce_scatter"):
                sums_over = spmd.normalize_axis(exchange.axis.group)
        outputs = result if isinstance(result, tuple) else (result,)
        for y in outputs:
            new = {axis: t if t in (V, P) else R if axis == sums_over else I for axis, t in types(y).items()}
            set_types(y, dict.fromkeys(new, V) if cls.__name__ == "_Start" else new)  # it returns a handle
        ctx.types = inputs, [types(x) for x in ctx.to_save or ()], [types(y) for y in outputs]
        return result

    def typed_backward(ctx, *grads):
        saved, (inputs, kept, outputs) = ctx.saved_tensors, ctx.types
        gradients = [{axis: GRADIENT[t] for axis, t in made.items()} for made in outputs]
        for x, new in zip((*saved, *grads), (*kept, *gradients), strict=True):
            if x is not None:
                set_types(x, new)
        context = SimpleNamespace(**vars(ctx), saved_tensors=saved, needs_input_grad=ctx.needs_input_grad)
        with checker._current_mode():
            result = backward(context, *grads)
        for x, taken in zip(result if isinstance(result, tuple) else (result,), inputs, strict=True):
            for axis, t in taken.items() if x is not None else ():
                if (found := types(x).get(axis)) not in LEGAL[t]:
                    raise spmd.SpmdTypeError(f"{cls.__name__}: {found!r} is no gradient of an input {t!r}")
        return result

    return {"forward": typed_forward, "backward": typed_backward}


def judged(run, received, sent):
    """A collective ([out], in, axis) that torch's own function runs, which spmd-types judges once buffers are typed."""

    def collective(*args, **kwargs):
        assert _len_torch_function_stack(), f"{run.__name__} in a Function of a module that is not in SEEN"
        *out, x, axis = args[: next(at for at, arg in enumerate(args) if isinstance(arg, Axis)) + 1]
        on, before = spmd.normalize_axis(axis.group), types(x)
        if sent is None:  # there is no rule for messages between two ranks
            spmd.assert_type(x, {on: V})
        if sent is P and before[on] is V:  # a part of a sum, because it is summed
            set_types(x, {**before, on: P})
        for y in out:
            set_types(y, {**before, on: received})
        work = run(*args, **kwargs)
        set_types(x, before if out else types(x))
        return work

    return collective


def reduce_scatter(piece, whole, axis, *, async_op=False, scratch=None):
    return dist.reduce_scatter_tensor(piece, whole, group=axis.group, async_op=async_op)


def functions(cls):
    for sub in cls.__subclasses__():
        yield from (sub, *functions(sub))


@contextmanager
def referee(mesh):
    """Judge what runs inside."""
    mutated, validate = checker._get_mutated_tensors, checker._validate_mutation_types

    def written(func, args, kwargs, result):
        return [args[0]] if func is torch.Tensor.__setitem__ else mutated(func, args, kwargs, result)

    def validate_and_set(func, tensors, output_type, no_grads):
        validate(func, tensors, output_type, no_grads)
        for x in tensors:
            set_types(x, output_type)

    by_torch = {
        "all_gather": judged(collectives.all_gather, R, V),
        "all_reduce": judged(collectives.all_reduce, R, P),
        "all_to_all": judged(collectives.all_to_all, V, V),
        "reduce_scatter": judged(reduce_scatter, V, P),
        "send_receive": judged(spmd.no_typecheck(collectives.send_receive), V, None),
    }
    mutation = {"_get_mutated_tensors": written, "_validate_mutation_types": validate_and_set}
    with ExitStack() as stack:
        stack.enter_context(patch.multiple(collectives, **by_torch, _by_pieces=lambda axis: False))
        stack.enter_context(patch.multiple(checker, **mutation))
        for cls in functions(torch.autograd.Function):
            if cls.__module__.endswith(SEEN):
                stack.enter_context(patch.multiple(cls, **seen(cls, cls.forward, cls.backward)))
                cls.typecheck_forward = cls.apply
                spmd.register_autograd_function(cls)
            elif cls.__module__.startswith("megapar"):
                spmd.register_local_autograd_function(cls)
        stack.enter_context(spmd.set_current_mesh(mesh))
        stack.enter_context(checker.typecheck())
        yield


def verdict(rank, world_size, plant, sizes, shape, sequence_parallel=False, algorithm=RING):
    """What is refused of the forward and backward of a model; "" for nothing. shape: Ranks of cp, ep and mp."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("cp", "ep", "mp"))
    groups = {name: mesh.get_group(name) for name in ("cp", "ep", "mp")}
    ranks = {name: tuple(dist.get_process_group_ranks(group)) for name, group in groups.items()}
    axes = {name: Axis(name, len(ranks[name]), group.rank(), group, ranks[name]) for name, group in groups.items()}
    layout = choose_layout(algorithm, axes["cp"].size, causal=True, length=16)
    cp, mp = ContextParallel(axes["cp"], algorithm, layout), axes["mp"]
    with PLANTS[plant][1] if plant else nullcontext():
        more = {"sequence_parallel": sequence_parallel, "dtype": torch.float64}
        model = build(sizes, cp=cp, ep=axes[AXES["ep"]], emp=mp, mp=mp, **more)
        batch = {name: x[:, layout.positions(16, axes["cp"].rank)] for name, x in batch_for(sizes).items()}
        for x in (*batch.values(), *model.buffers()):
            spmd.assert_type(x, {groups["cp"]: V, groups["ep"]: V, groups["mp"]: R})
        for row in table_of(sizes):
            later = row.mp_partial in ("always", "sp" if sequence_parallel else "always")
            names = {"cp": R, "ep": R, "mp": R if later else I}
            names |= {"mp" if name == "emp" else name: V for name, _ in row.axes}
            if row.trainable:
                spmd.assert_type(model.get_parameter(row.name), {groups[name]: t for name, t in names.items()})
        try:
            with referee(mesh):
                loss = total(lambda batch: model(batch, valid_tokens=32), batch)
                for name in ("cp", "ep"):
                    loss = spmd.reinterpret(loss, groups[name], src=V, dst=P)
                loss.backward()
        except spmd.SpmdTypeError as error:
            return str(error)
    return ""


BIASED = replace(DENSE, normalization="layernorm", qk_norm=True, add_bias_linear=True)
LAYOUTS = {
    "mp": (BIASED, (1, 1, 2)),
    "mp, sp": (BIASED, (1, 1, 2), True),
    "ep": (MOE, (1, 2, 1)),
    "ep, mp": (MOE, (1, 2, 2)),
    "ep, mp, sp": (MOE, (1, 2, 2), True),
    "ring, mp, sp": (DENSE, (2, 1, 2), True, RING),
    "heads": (DENSE, (2, 1, 1), False, ULYSSES),
    "gathered": (DENSE, (2, 1, 1), False, GATHERED),
}
AXES = {"ep": "ep"}
NORM_WHOLE = [replace(r, mp_partial="never") if r.name == "final_norm.weight" else r for r in table_of(BIASED)]
PLANTS = {
    "row without sum": ("mp", patch.object(ReducedRow, "forward", CopiedColumn.forward), "cannot mix"),
    "column without sum": ("mp", patch.object(CopiedColumn, "backward", ReducedRow.backward), "CopiedColumn: V is no"),
    "own piece": ("mp, sp", patch.object(decoder, "all_gather", all_gather_replicated), "cannot mix"),
    "norm without sum": ("mp, sp", patch(f"{__name__}.table_of", lambda sizes: NORM_WHOLE), "cannot mix"),
    "experts over mp": ("ep, mp", patch.dict(AXES, ep="mp"), "all_to_all_single: expected input type"),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_right(layout):
    assert set(run_ranks(prod(layout[1]), verdict, "", *layout)) == {""}


@pytest.mark.parametrize("plant", PLANTS)
def test_planted(plant):
    layout, _, message = PLANTS[plant]
    assert all(message in found for found in run_ranks(prod(LAYOUTS[layout][1]), verdict, plant, *LAYOUTS[layout]))
