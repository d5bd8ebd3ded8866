"""Stage 3: parameters are cut too, by torch's FSDP2, one group per unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from megapar.core.sharding.cut import Described, is_primary, master_box, shard_dim
from megapar.core.sharding.part import Part, View
from megapar.core.world import World


class FullSharding:
    """Parameters, gradients and optimizer state cut over the shard axis, replicated over dp.

    model: built on the meta device in the master dtype; its parameters become DTensors whose memory is allocated
    here, uninitialised. units: in forward order, each with its modules; ``together`` names units that share
    parameters (a tied embedding and its head) and form one group. Gradients are sums over data ranks, never means.
    """

    def __init__(
        self,
        world: World,
        model: nn.Module,
        units: Mapping[str, Sequence[nn.Module]],
        specs: Sequence[Described],
        compute_dtype: torch.dtype,
        master_dtype: torch.dtype,
        *,
        together: Sequence[str] = (),
    ) -> None:
        replicas = world.axis("replica").size
        self._mesh = world.mesh("replica", "shard") if replicas > 1 else world.mesh("shard")
        self._model = model
        mixed = compute_dtype != master_dtype
        policy = _policy(compute_dtype if mixed else None, master_dtype)
        if mixed:
            # Parameters that compute in fp32 keep a group, and a gather, of their own.
            for name in sorted({spec.name.rpartition(".")[0] for spec in specs if spec.fp32}):
                self._wrap(model.get_submodule(name), _policy(None, master_dtype))
        groups = [modules for name, modules in units.items() if name not in together]
        groups.append([module for name in units if name in together for module in units[name]])
        for modules in groups:
            if modules:
                self._wrap(list(modules) if len(modules) > 1 else modules[0], policy)
        self._wrap(model, policy)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                if world.device.type == "cpu":
                    module.set_force_sum_reduction_for_comms(True)
        model.to_empty(device=world.device.torch_device)
        named = dict(model.named_parameters())
        self._entries = [(spec, named[spec.name], master_box(spec, world.grid, world.rank)) for spec in specs]
        self.parts = [
            Part(_local(parameter), None, spec.decay, is_primary(spec, world.grid, world.rank))
            for spec, parameter, _ in self._entries
        ]

    def _wrap(self, module: nn.Module | list[nn.Module], policy: MixedPrecisionPolicy) -> None:
        fully_shard(module, mesh=self._mesh, mp_policy=policy, shard_placement_fn=self._placement())

    def _placement(self) -> Callable[[nn.Parameter], Shard | None]:
        parts = self._mesh.size(-1)
        return lambda parameter: Shard(shard_dim(tuple(parameter.shape), parts))

    def begin_step(self) -> None:
        """Forget the last step's gradients."""
        for part, (_, parameter, _) in zip(self.parts, self._entries, strict=True):
            part.grad = None
            parameter.grad = None

    def begin_micro_batch(self, *, last: bool) -> None:
        """Every micro-batch reduces over the shard axis; the sum over replicas waits for the last one."""
        assert isinstance(self._model, FSDPModule)
        self._model.set_is_last_backward(last)
        self._model.set_requires_all_reduce(last)

    def finish(self) -> None:
        """FSDP2 has waited at the end of the backward; a parameter without gradient has gradient zero."""
        for part, (_, parameter, _) in zip(self.parts, self._entries, strict=True):
            part.grad = torch.zeros_like(part.master) if parameter.grad is None else _local(parameter.grad)

    def publish(self) -> None:
        """Nothing to do: masters are the parameters, gathered where they are used."""

    def views(self, tensors: Sequence[Tensor]) -> Iterator[View]:
        """Each parameter's piece; parts are parameters here."""
        for (spec, _, box), tensor in zip(self._entries, tensors, strict=True):
            yield View(spec, box, tensor)


def _policy(param_dtype: torch.dtype | None, reduce_dtype: torch.dtype) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)


def _local(tensor: Tensor) -> Tensor:
    """The storage behind a DTensor on this rank."""
    assert isinstance(tensor, DTensor)
    return tensor.to_local().detach()
