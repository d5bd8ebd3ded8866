"""The job: this rank's part of the model with its sharded parameters, gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch.distributed.tensor import DTensor

from megapar.core.comm.in_flight import CommContext
from megapar.core.comm.world import World
from megapar.core.device.compiled import FunctionRunner, plain
from megapar.core.optimizer.muon import MuonOptimizer
from megapar.core.optimizer.offload import OffloadedOptimizer
from megapar.core.optimizer.optimizer import Optimizer
from megapar.core.sharding.replicas import Replica, axes_of
from megapar.core.sharding.sharding import Sharding
from megapar.model.decoder.model import Decoder
from megapar.model.ernie.model import Ernie
from megapar.model.parameter import ParameterSpec
from megapar.model.sizes import ModelSizes
from megapar.training.step.observer import StepObserver
from megapar.training.step.pipelined import PipelinedModel
from megapar.training.step.qk_clip import QkClip

Model = Decoder | Ernie


@dataclass
class Job:
    """This rank's part of the model with its parameters, gradients and optimizer state.

    Attributes:
        table: A row for every parameter and buffer of the whole model.
        sharding: Shards of the parameters and gradients.
        comm: Collectives that layers have in flight; at the end of a step all must have been waited for.
        partial: Parameters whose gradients are summed over mp.
        from_first_rank: Parameters whose gradients all mp ranks take from the first.
        pipeline: Runs the model if pp > 1, else None.
        moves_experts: True if experts change their places, which the gradient norm must not depend on.
        qk_clip: Clips heads of attention after each update; None: nothing does.
        tied: Parameter that the first and the last stage share and whose gradients they sum, or None.
    """

    world: World
    sizes: ModelSizes
    table: tuple[ParameterSpec, ...]
    model: Model
    sharding: Sharding
    optimizer: Optimizer | OffloadedOptimizer | MuonOptimizer
    comm: CommContext
    partial: tuple[str, ...]
    from_first_rank: frozenset[str] = frozenset()
    pipeline: PipelinedModel | None = None
    moves_experts: bool = False
    qk_clip: QkClip | None = None
    tied: str | None = None
    runner: FunctionRunner = plain
    observer: StepObserver = field(default_factory=StepObserver)

    @property
    def num_parameters(self) -> int:
        """Number of trainable parameters of the whole model."""
        return sum(spec.numel for spec in self.table if spec.trainable)

    @property
    def compiled(self) -> bool:
        """True if functions of layers are compiled."""
        return self.runner is not plain


def copies(job: Job) -> Iterator[Replica]:
    """Yield everything that is replicated on other ranks: master weights, whole parameters, buffers of the table."""
    for view in job.sharding.views([shard.master for shard in job.sharding.master_shards]):
        for axis in axes_of(view.spec, job.world, sharded=True):
            yield Replica(f"the master of {view.spec.name}", view.tensor, axis)
    rows = {spec.name: spec for spec in job.table}
    for name, parameter in job.model.named_parameters():
        if name in rows and not isinstance(parameter, DTensor):
            for axis in axes_of(rows[name], job.world, sharded=False):
                yield Replica(name, parameter, axis)
    for name, buffer in job.model.named_buffers():
        if name in rows:
            for axis in map(job.world.axis, ("data", "cp", "mp")):
                if axis.group is not None:
                    yield Replica(name, buffer, axis)
