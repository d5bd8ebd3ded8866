"""Stage 3: parameters are cut too, by torch's FSDP2, one group per unit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from megapar.core.comm import collectives as transport
from megapar.core.comm.axis import Axis
from megapar.core.comm.world import World
from megapar.core.health.trail import DigestTrail
from megapar.core.sharding.bucket_plan import PlannedBucket
from megapar.core.sharding.cut import ParameterInfo, is_primary, master_box, shard_dim
from megapar.core.sharding.master_shard import MasterShard, ParameterView

_READ_BY_ATTENTION = (".q_norm", ".k_norm")


class FullSharding:
    """Parameters, gradients and optimizer state sharded over the shard axis, replicated over dp (hybrid sharding).

    FSDP2 unshards a unit before its forward and backward and reshards it after each.

    model: built on the meta device in the master dtype; its parameters become DTensors whose memory is allocated
    here, uninitialised. units: in forward order, each with its modules; ``together`` names units that share
    parameters (a tied embedding and its head) and form one group. Gradients are sums over data ranks, never means.

    plan: the segments, each of whole modules, that form one group; None: one group per unit. prefetch: groups gathered
    ahead of use, in forward and backward. reduce_every_micro_batch: False keeps whole gradients until the last one.

    shard: makes a group, as torch's ``fully_shard``.

    Experts that are cut over other ranks than the rest form groups of their own. Where each is whole on one rank there
    is nothing to cut: those of ``whole_experts(world, specs)`` stay plain parameters in the compute dtype, left to
    somebody else.
    """

    full = True

    def __init__(
        self,
        world: World,
        model: nn.Module,
        units: Mapping[str, Sequence[nn.Module]],
        specs: Sequence[ParameterInfo],
        compute_dtype: torch.dtype,
        master_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        *,
        together: Sequence[str] = (),
        plan: Sequence[PlannedBucket] | None = None,
        prefetch: int = 1,
        reduce_every_micro_batch: bool = True,
        shard: Callable[..., Any] = fully_shard,
    ) -> None:
        # A segment may end inside a layer, at a linear whose output is a view; nothing here changes one in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        self._model, self._shard = model, shard
        self._reduce_every = reduce_every_micro_batch
        self._dtypes = (compute_dtype, master_dtype, reduce_dtype)
        left = whole_experts(world, specs)
        self._unit_of = {spec.name: spec.unit for spec in specs}
        self._reductions: list[_ReduceScatter] = []
        self._ignored = {model.get_parameter(spec.name) for spec in left}
        self._wrap_apart(world, model, specs)
        groups = _by_units(units, together) if plan is None else _by_plan(model, units, specs, together, plan)
        # What the forward uses last (tied, also first) the backward uses at once: it stays gathered in between.
        last = groups[0] if "head" in together else groups[-1]
        for modules in groups:
            self._wrap(modules if len(modules) > 1 else modules[0], world, stays=modules is last)
        self._wrap(model, world)
        _prefetch(groups, prefetch)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # Sums, never means, on every backend: the loss carries its own denominators.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        names = {spec.name for spec in left}
        _allocate(model, names, compute_dtype, world.device.torch_device)
        named = dict(model.named_parameters())
        mine = [spec for spec in specs if spec.name not in names]
        self._entries = [(spec, named[spec.name], master_box(spec, world.grid, world.rank, full=True)) for spec in mine]
        self.parts = [
            MasterShard(_local(parameter), None, spec.decay, is_primary(spec, world.grid, world.rank), spec.router)
            for spec, parameter, _ in self._entries
        ]

    def _wrap_apart(self, world: World, model: nn.Module, specs: Sequence[ParameterInfo]) -> None:
        """Modules whose parameters travel otherwise than their unit's: experts over edp, fp32 ones in fp32."""
        if world.axis("expert_shard").size > 1 and _apart(world):
            for name in _modules(spec for spec in specs if spec.expert):
                self._wrap(model.get_submodule(name), world, expert=True)
        if self._dtypes[0] != self._dtypes[1]:
            for name in _modules(spec for spec in specs if spec.fp32):
                self._wrap(model.get_submodule(name), world, fp32=True)

    def _wrap(
        self,
        module: nn.Module | list[nn.Module],
        world: World,
        *,
        expert: bool = False,
        fp32: bool = False,
        stays: bool = False,
    ) -> None:
        """Make one group of a module or several: gathered, reduced and counted together.

        stays: gathered once per micro-batch, not again for the backward.
        """
        compute, master, reduce = self._dtypes
        policy = MixedPrecisionPolicy(
            param_dtype=None if fp32 or compute == master else compute,
            reduce_dtype=master if fp32 else reduce,
            cast_forward_inputs=False,
        )
        names = ("expert_shard", "expert_replica") if expert else ("shard", "replica")
        shard, replica = (world.axis(name) for name in names)

        def place(parameter: nn.Parameter) -> Shard:
            return Shard(shard_dim(tuple(parameter.shape), shard.size, full=True))

        self._shard(
            module,
            mesh=_mesh(world, *names),
            mp_policy=policy,
            shard_placement_fn=place,
            ignored_params=self._ignored,
            reshard_after_forward=not stays,
        )
        first = module[0] if isinstance(module, list) else module
        names_here = {id(parameter): name for name, parameter in self._model.named_parameters()}
        member = next((names_here[id(p)] for p in first.parameters() if id(p) in names_here), "")
        self._reductions.append(_ReduceScatter(shard, self._unit_of.get(member, ""), member))
        assert isinstance(first, FSDPModule)
        first.set_custom_all_gather(_AllGather(shard))  # type: ignore[arg-type]
        first.set_custom_reduce_scatter(self._reductions[-1])  # type: ignore[arg-type]
        if replica.size > 1:
            first.set_all_reduce_hook(_counts(replica))

    def begin_step(self) -> None:
        """Forget the last step's gradients."""
        for part, (_, parameter, _) in zip(self.parts, self._entries, strict=True):
            part.grad = None
            parameter.grad = None

    def begin_micro_batch(self, *, last: bool) -> None:
        """Every micro-batch (or the last one) reduces over the shard axis; the sum over replicas is the last one's."""
        assert isinstance(self._model, FSDPModule)
        self._model.set_requires_gradient_sync(last or self._reduce_every)
        self._model.set_is_last_backward(last)
        self._model.set_requires_all_reduce(last)

    def finish(self) -> None:
        """FSDP2 has waited at the end of the backward; a parameter without gradient has gradient zero."""
        for part, (_, parameter, _) in zip(self.parts, self._entries, strict=True):
            part.grad = torch.zeros_like(part.master) if parameter.grad is None else _local(parameter.grad)

    def publish(self) -> None:
        """Nothing to do: masters are the parameters, gathered where they are used."""

    def wait(self) -> None:
        """Nothing is in flight between steps."""

    def watch(self, trail: DigestTrail | None) -> None:
        """Note what each group of parameters gives to its reduction, or no longer."""
        for reduction in self._reductions:
            reduction.trail = trail

    def views(self, tensors: Sequence[Tensor]) -> Iterator[ParameterView]:
        """Each parameter's piece; parts are parameters here."""
        for (spec, _, box), tensor in zip(self._entries, tensors, strict=True):
            yield ParameterView(spec, box, tensor)


class _Comm:
    """What FSDP2 asks of a collective: where its buffers come from, and the call."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of this size."""
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Comm):
    """FSDP2's gather through our transport, which counts it."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        return transport.all_gather(output_tensor, input_tensor, self._axis, async_op=async_op)


class _ReduceScatter(_Comm):
    """FSDP2's reduction through our transport, which counts it and sends half of what gloo's own would.

    unit, member: of what it reduces, the first parameter's. trail: notes what this rank brings; None: nobody does.
    """

    def __init__(self, axis: Axis, unit: str, member: str) -> None:
        super().__init__(axis)
        self._unit, self._member = unit, member
        self.trail: DigestTrail | None = None

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        assert op == dist.ReduceOp.SUM, op
        if self.trail is not None:
            self.trail.gradient(self._unit, f"the segment of {self._member}", input_tensor)
        return transport.reduce_scatter(output_tensor, input_tensor, self._axis, async_op=async_op)


def _counts(replica: Axis) -> Callable[[Tensor], None]:
    """FSDP2 sums over the replicas itself and calls this with the result."""

    def summed(gradient: Tensor) -> None:
        transport.count_all_reduce(gradient, replica)

    return summed


def _by_units(units: Mapping[str, Sequence[nn.Module]], together: Sequence[str]) -> list[list[nn.Module]]:
    groups = [[module for name in units if name in together for module in units[name]]]
    groups += [list(modules) for name, modules in units.items() if name not in together]
    return [modules for modules in groups if modules]


def _by_plan(
    model: nn.Module,
    units: Mapping[str, Sequence[nn.Module]],
    specs: Sequence[ParameterInfo],
    together: Sequence[str],
    plan: Sequence[PlannedBucket],
) -> list[list[nn.Module]]:
    """The modules whose calls need each segment's parameters: whole units, and what owns the rest of them.

    Segments of units that share parameters become one group.
    """
    shared = {id(m) for name in together for unit in units[name] for m in unit.modules()}
    joint = [module for name in units if name in together for module in units[name]]
    groups: list[list[nn.Module]] = []
    for planned in plan:
        modules = _called(model, units, specs, planned)
        modules = [module for module in modules if not isinstance(module, FSDPModule)]  # those kept apart
        others = [module for module in modules if id(module) not in shared]
        if len(others) < len(modules):
            joint += others
        else:
            groups.append(others)
    return [modules for modules in (joint, *groups) if modules]


def _called(
    model: nn.Module, units: Mapping[str, Sequence[nn.Module]], specs: Sequence[ParameterInfo], planned: PlannedBucket
) -> list[nn.Module]:
    """What is called for a segment's parameters: the unit where the segment has it whole, else each owner.

    Nobody calls the norms of queries and keys, which the attention reads: in a part of a unit they are left to the
    root, which is gathered through the whole forward and backward.
    """
    names = set(planned.names)
    modules: dict[int, nn.Module] = {}
    for spec in specs:
        if spec.name in names:
            rest = {other.name for other in specs if other.unit == spec.unit} - names
            path = spec.name.rpartition(".")[0]
            owners = [model.get_submodule(path)] if rest else units[spec.unit]
            if not (rest and path.endswith(_READ_BY_ATTENTION)):
                modules |= {id(owner): owner for owner in owners}
    return list(modules.values())


def _prefetch(groups: Sequence[Sequence[nn.Module]], depth: int) -> None:
    """Ask for the ``depth`` groups after each (before each in the backward) while it computes."""
    first: list[FSDPModule] = [modules[0] for modules in groups if isinstance(modules[0], FSDPModule)]
    for number, module in enumerate(first):
        module.set_modules_to_forward_prefetch(first[number + 1 : number + 1 + depth])
        module.set_modules_to_backward_prefetch(first[max(0, number - depth) : number][::-1])


def whole_experts(world: World, specs: Sequence[ParameterInfo]) -> list[ParameterInfo]:
    """Expert parameters that sharding does not cut although it cuts the others: each is whole on its rank."""
    return [spec for spec in specs if spec.expert] if world.axis("expert_shard").size == 1 else []


def _apart(world: World) -> bool:
    return world.axis("expert_shard").ranks != world.axis("shard").ranks


def _mesh(world: World, shard: str, replica: str) -> DeviceMesh:
    return world.mesh(replica, shard) if world.axis(replica).size > 1 else world.mesh(shard)


def _modules(specs: Iterable[ParameterInfo]) -> list[str]:
    """Paths of the modules that hold these parameters, each once."""
    return sorted({spec.name.rpartition(".")[0] for spec in specs})


def _allocate(model: nn.Module, plain: Iterable[str], dtype: torch.dtype, device: torch.device) -> None:
    """Give every parameter memory on the device, uninitialised; those named ``plain`` in this dtype.

    Those are made anew: torch does not swap a parameter that somebody refers to weakly, as fake tensors' mode does.
    """
    places = [name.rpartition(".") for name in plain]
    shapes = [model.get_parameter(name).shape for name in plain]
    for path, _, name in places:
        model.get_submodule(path).register_parameter(name, None)
    model.to_empty(device=device)
    for (path, _, name), shape in zip(places, shapes, strict=True):
        new = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        model.get_submodule(path).register_parameter(name, new)


def _local(tensor: Tensor) -> Tensor:
    """The storage behind a DTensor on this rank."""
    assert isinstance(tensor, DTensor)
    return tensor.to_local().detach()
