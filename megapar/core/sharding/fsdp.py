"""Stage 3: parameters are sharded too, by torch's FSDP2, in one group per unit."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from megapar.core.comm import collectives
from megapar.core.comm.axis import Axis
from megapar.core.comm.world import World
from megapar.core.device.base import Device, Event
from megapar.core.sharding.bucket_plan import PlannedBucket
from megapar.core.sharding.cut import ParameterInfo, is_primary, master_box, shard_dim
from megapar.core.sharding.master_shard import MasterShard, ParameterView, Treatment
from megapar.health.corruption.step_digest import StepDigest

_READ_BY_ATTENTION = (".q_norm", ".k_norm")


class FullSharding:
    """Parameters, gradients and optimizer state sharded over the shard axis, replicated over dp (hybrid sharding).

    FSDP2 unshards a group before its forward and backward and reshards it after each. The group that the forward uses
    last stays unsharded until its backward. Gradients are sums over data ranks, never means. Experts that are sharded
    over different ranks than the other parameters form separate groups. If each expert is whole on one rank there is
    nothing to shard: the parameters that ``whole_experts`` returns stay plain parameters in the compute dtype, for
    another ``Sharding``.

    Args:
        model: Built on the meta device in the master dtype; its parameters become DTensors whose memory is allocated
            here, uninitialized.
        compute_dtype: dtype of unsharded parameters.
        master_dtype: dtype of sharded parameters.
        reduce_dtype: dtype of gradients in messages.
        together: Units that share parameters (a tied embedding and its head) and form one group.
        plan: Buckets of whole modules, each of which becomes a group; None: one group per unit.
        prefetch: Groups gathered ahead of use, in forward and backward.
        reduce_every_micro_batch: False: keep unsharded gradients until the last micro-batch.
        shard: Makes a group, as torch's ``fully_shard`` does.
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
        together: Sequence[str],
        plan: Sequence[PlannedBucket] | None,
        prefetch: int,
        reduce_every_micro_batch: bool,
        shard: Callable[..., Any],
    ) -> None:
        # A bucket may end inside a layer, at a linear whose output is a view; no view is changed in place here.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        self._model, self._shard = model, shard
        self._reduce_every = reduce_every_micro_batch
        self._dtypes = (compute_dtype, master_dtype, reduce_dtype)
        unsharded = whole_experts(world, specs)
        self._unit_of = {spec.name: spec.unit for spec in specs}
        self._waits = FsdpWaits(world.device)
        self._reductions: list[GroupReduction] = []
        self._ignored = {model.get_parameter(spec.name) for spec in unsharded}
        for module in model.modules():
            if getattr(module, "leaves_bias", False):  # a group may end before what takes the layer's output
                module.leaves_bias = False  # type: ignore[assignment]
        self._wrap_apart(world, model, specs)
        groups = _by_units(units, together) if plan is None else _by_plan(model, units, specs, together, plan)
        # The backward begins with the group that the forward uses last (if tied, also first): it stays unsharded.
        last = groups[0] if "head" in together else groups[-1]
        for modules in _inner_first(groups):
            self._wrap(modules if len(modules) > 1 else modules[0], world, keep_unsharded=modules is last)
        self._wrap(model, world)
        _prefetch(groups, prefetch)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # Sums, never means, on every backend: the loss carries its own denominators.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        names = {spec.name for spec in unsharded}
        _allocate(model, names, compute_dtype, world.device.torch_device)
        named = dict(model.named_parameters())
        grid, rank = world.grid, world.rank
        sharded = [spec for spec in specs if spec.name not in names]
        self._entries = [(spec, named[spec.name], master_box(spec, grid, rank, full=True)) for spec in sharded]
        self.master_shards = [
            MasterShard(_local(parameter), None, counted=is_primary(spec, grid, rank), **Treatment.of(spec)._asdict())
            for spec, parameter, _ in self._entries
        ]

    def _wrap_apart(self, world: World, model: nn.Module, specs: Sequence[ParameterInfo]) -> None:
        """Wrap modules that need a group apart from their unit: experts over edp, fp32 parameters in fp32."""
        expert = world.axis("expert_shard")
        if expert.size > 1 and expert.ranks != world.axis("shard").ranks:
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
        keep_unsharded: bool = False,
    ) -> None:
        """Make one group of one or several modules, which are unsharded and reduced together.

        keep_unsharded: do not reshard the group between forward and backward.
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
            mesh=world.mesh(*reversed(names)) if replica.size > 1 else world.mesh(names[0]),
            mp_policy=policy,
            shard_placement_fn=place,
            ignored_params=self._ignored,
            reshard_after_forward=not keep_unsharded,
        )
        first = module[0] if isinstance(module, list) else module
        name_of = {id(parameter): name for name, parameter in self._model.named_parameters()}
        member = next((name_of[id(p)] for p in first.parameters() if id(p) in name_of), "")
        self._reductions.append(GroupReduction(shard, self._waits, self._unit_of.get(member, ""), member))
        assert isinstance(first, FSDPModule)
        gather = GroupGather(shard, self._waits)
        first.set_custom_all_gather(gather)  # type: ignore[arg-type]
        first.set_custom_reduce_scatter(self._reductions[-1])  # type: ignore[arg-type]
        if replica.size > 1:
            first.set_all_reduce_hook(replica_hook(replica, self._waits))
        self._waits.watch(first, gather)

    def begin_step(self) -> None:
        for shard, (_, parameter, _) in zip(self.master_shards, self._entries, strict=True):
            shard.grad = None
            parameter.grad = None

    def begin_micro_batch(self, *, last: bool) -> None:
        """Reduce over the shard axis in every micro-batch or only in the last, and over replicas in the last."""
        assert isinstance(self._model, FSDPModule)
        self._model.set_requires_gradient_sync(last or self._reduce_every)
        self._model.set_is_last_backward(last)
        self._model.set_requires_all_reduce(last)

    def finish(self) -> None:
        """Collect the gradients, zero for a parameter without one. FSDP2 waited at the end of the backward."""
        for shard, (_, parameter, _) in zip(self.master_shards, self._entries, strict=True):
            shard.grad = torch.zeros_like(shard.master) if parameter.grad is None else _local(parameter.grad)

    def start_param_gather(self) -> None:
        """Do nothing: masters are the parameters, unsharded when they are used."""

    def wait(self) -> None:
        """Do nothing: nothing is in flight between steps."""

    def cut_rows(self, moves: Callable[[ParameterInfo], bool]) -> None:
        """Do nothing: rows of FSDP2's parameters do not move."""

    def watch(self, step_digest: StepDigest | None) -> None:
        """Record in ``step_digest`` what this rank contributes to each group's reduction; None: stop."""
        for reduction in self._reductions:
            reduction.step_digest = step_digest

    def views(self, tensors: Sequence[Tensor | None]) -> Iterator[ParameterView]:
        """Yield each parameter's piece of ``tensors``; each master shard is one parameter here."""
        for (spec, _, box), tensor in zip(self._entries, tensors, strict=True):
            if tensor is not None:
                yield ParameterView(spec, box, tensor)


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
    """Return the groups of a plan: each bucket's modules, and one group for buckets whose units share parameters."""
    shared = {id(m) for name in together for unit in units[name] for m in unit.modules()}
    joint = [module for name in units if name in together for module in units[name]]
    groups: list[list[nn.Module]] = []
    for planned in plan:
        modules = _called(model, units, specs, planned)
        modules = [module for module in modules if not isinstance(module, FSDPModule)]  # without those wrapped apart
        others = [module for module in modules if id(module) not in shared]
        if len(others) < len(modules):
            joint += others
        else:
            groups.append(others)
    return [_outermost(modules) for modules in (joint, *groups) if modules]


def _outermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules without those that another of them contains, whose call needs their parameters, too."""
    nested = {id(inner) for module in modules for inner in module.modules() if inner is not module}
    return [module for module in modules if id(module) not in nested]


def _inner_first(groups: Sequence[list[nn.Module]]) -> list[list[nn.Module]]:
    """Return the groups, inner modules first: a wrapped module takes all parameters below it that no group has."""
    inside = {id(modules): {id(m) for module in modules for m in module.modules()} for modules in groups}
    left, ordered = list(groups), []
    while left:
        ready = next(
            modules
            for modules in left
            if not any(id(m) in inside[id(modules)] for others in left if others is not modules for m in others)
        )
        left.remove(ready)
        ordered.append(ready)
    return ordered


def _called(
    model: nn.Module, units: Mapping[str, Sequence[nn.Module]], specs: Sequence[ParameterInfo], planned: PlannedBucket
) -> list[nn.Module]:
    """Return the modules that are called for a bucket's parameters.

    A unit that is entirely in the bucket is returned whole; otherwise the module of each parameter is. The norms of
    queries and keys are read by the attention and never called. If their unit is split, they are left to the root
    group, which stays unsharded through the whole forward and backward.
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
    """Prefetch the ``depth`` groups after each (in the backward, before each) while it computes."""
    first: list[FSDPModule] = [modules[0] for modules in groups if isinstance(modules[0], FSDPModule)]
    for number, module in enumerate(first):
        module.set_modules_to_forward_prefetch(first[number + 1 : number + 1 + depth])
        module.set_modules_to_backward_prefetch(first[max(0, number - depth) : number][::-1])


def whole_experts(world: World, specs: Sequence[ParameterInfo]) -> list[ParameterInfo]:
    """Return the expert parameters if each expert is whole on one rank, so that sharding does not cut them."""
    return [spec for spec in specs if spec.expert] if world.axis("expert_shard").size == 1 else []


def _modules(specs: Iterable[ParameterInfo]) -> list[str]:
    """Return the paths of the modules that hold these parameters, each once."""
    return sorted({spec.name.rpartition(".")[0] for spec in specs})


def _allocate(model: nn.Module, plain: Iterable[str], dtype: torch.dtype, device: torch.device) -> None:
    """Allocate uninitialized memory on the device for every parameter; those named ``plain`` have this dtype.

    The plain ones are replaced: torch does not swap a parameter that has weak references, as under fake tensor mode.
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
    """Return the local shard of a DTensor, detached."""
    assert isinstance(tensor, DTensor)
    return tensor.to_local().detach()


class FsdpWaits:
    """Measures the waits for the collectives of FSDP2's groups, which torch launches and waits for itself.

    On a CPU a collective blocks the host where it is launched. On an accelerator torch lets the stream that computes
    wait, within three methods of a group. In steps that are timed, that stream waits for the same collectives
    immediately before those methods, between two events.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._reduced = 0.0
        self._ended: dict[tuple[str, object], tuple[Axis, Event]] = {}

    def launch(self, axis: Axis, kind: str, op: Callable[[bool], dist.Work | None], group: object = None) -> None:
        """Launch a collective.

        Args:
            kind: Its kind, as for the byte counts.
            op: Launches it; asynchronously if called with True.
            group: The owner of a gather, which only this group waits for.
        """
        if self._device.is_async:
            op(False)
            self.ended(axis, kind, group)
        elif (work := op(True)) is not None:
            axis.meter.wait(work, f"{axis.name}/{kind}")
            self._reduced = time.perf_counter()

    def ended(self, axis: Axis, kind: str, group: object = None) -> None:
        """Mark the end of a collective that was launched on the current stream of an accelerator."""
        if self._device.is_async and axis.meter.on:
            self._ended[kind, group] = axis, self._device.event()

    def replicas_summed(self, replica: Axis) -> None:
        """Count the sum over replicas that torch has launched right after a reduce-scatter."""
        self.ended(replica, "all_reduce")
        if not self._device.is_async:
            replica.meter.add(f"{replica.name}/all_reduce", time.perf_counter() - self._reduced)

    def watch(self, module: FSDPModule, gather: object) -> None:
        """Time the waits of a module's group on an accelerator. ``gather``: the owner of its gathers."""
        group = module._get_fsdp_state()._fsdp_param_group
        if group is not None and self._device.is_async:
            self._before(group, "wait_for_unshard", ("all_gather", gather))
            self._before(group, "post_backward", ("reduce_scatter", None))
            self._before(group, "finalize_backward", ("reduce_scatter", None), ("all_reduce", None))

    def _before(self, group: Any, name: str, *collectives: tuple[str, object]) -> None:
        """Let the current stream wait for the collectives, if they have been launched, before each call of a method."""
        method = getattr(group, name)

        def timed(*args: Any) -> None:
            for key in collectives:
                if key in self._ended:
                    axis, event = self._ended.pop(key)
                    with axis.waiting(key[0]):
                        self._device.current_stream().wait_event(event)
            method(*args)

        setattr(group, name, timed)


class _Comm:
    """A custom collective of FSDP2: allocates its buffers; subclasses are callable."""

    def __init__(self, axis: Axis, waits: FsdpWaits) -> None:
        self._axis, self._waits = axis, waits

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a buffer of this size."""
        return torch.empty(*size, dtype=dtype, device=device)


class GroupGather(_Comm):
    """FSDP2's all-gather, routed through ``core.comm.collectives``, which counts its bytes."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        def gather(async_op: bool) -> dist.Work | None:
            return collectives.all_gather(output_tensor, input_tensor, self._axis, async_op=async_op)

        assert not async_op
        self._waits.launch(self._axis, "all_gather", gather, self)


class GroupReduction(_Comm):
    """FSDP2's reduce-scatter, routed through ``core.comm.collectives``.

    That counts its bytes, and on gloo sends half of what gloo's reduce-scatter would.

    Attributes:
        step_digest: Records what this rank contributes; None: no recording.
    """

    def __init__(self, axis: Axis, waits: FsdpWaits, unit: str, member: str) -> None:
        super().__init__(axis, waits)
        self._unit, self._member = unit, member
        self.step_digest: StepDigest | None = None

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        def reduce(async_op: bool) -> dist.Work | None:
            return collectives.reduce_scatter(output_tensor, input_tensor, self._axis, async_op=async_op)

        assert op == dist.ReduceOp.SUM, op
        assert not async_op
        if self.step_digest is not None:
            self.step_digest.gradient(self._unit, f"the segment of {self._member}", input_tensor)
        self._waits.launch(self._axis, "reduce_scatter", reduce)


def replica_hook(replica: Axis, waits: FsdpWaits) -> Callable[[Tensor], None]:
    """Return a hook that counts the bytes and the wait of the replica sum, which FSDP2 runs itself."""

    def count(gradient: Tensor) -> None:
        collectives.count_all_reduce(gradient, replica)
        waits.replicas_summed(replica)

    return count
