"""megapar's model of a published folder, built as a run on one process builds it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor

from megapar.arguments import parse
from megapar.checkpoints.export.export import collect_all
from megapar.checkpoints.export.from_hf import load_hf
from megapar.config.published import architecture_of, read_config
from megapar.core.comm.world import World
from megapar.core.device.accelerators import pick
from megapar.model.hugging_face.tensors import export_piece
from megapar.model.published_tensors import stored_pieces
from megapar.training.building.parallelize import parallelize
from megapar.training.step.observer import StepObserver
from tests.model.conformance.answer import IGNORED, LENGTHS, Answer, Batch
from tests.model.conformance.exact import NarrowMade
from tests.model.conformance.rows import Row

Routing = dict[tuple[int, int], Tensor]
"""(batch, layer) -> the experts of every token, [T, k]."""


class Routes(StepObserver):
    """Records the experts that routers choose, or repeats recorded ones.

    Attributes:
        chosen: The record.
        batch: Number of the batch.
    """

    def __init__(self, replayed: Routing | None) -> None:
        self.chosen: Routing = {}
        self.batch = 0
        self._replayed = replayed

    def experts_chosen(self, layer: int, experts_Tk: Tensor) -> Tensor:
        """Record the choice, or return the recorded one."""
        self.chosen[self.batch, layer] = experts_Tk
        return experts_Tk if self._replayed is None else self._replayed[self.batch, layer]


class Ours:
    """A run's model of a folder.

    Attributes:
        config: The run's configuration.
        job: The run's model, sharding and optimizer.
        routes: Its routers' choices.
    """

    def __init__(self, row: Row, folder: Path, dtype: str, replayed: Routing | None = None) -> None:
        """replayed: Routes to repeat."""
        sizes = ["--load-hf", str(folder), "--seq-length", str(max(LENGTHS)), "--dtype", dtype]
        self.config = parse(row.kind, [*sizes, "--data-path", "mock", "--device", "cpu"], {})
        self.routes = Routes(replayed)
        world = World.start(self.config.grid, pick("cpu"), timedelta(seconds=60))
        self.job = parallelize(self.config, world, observer=self.routes)
        load_hf(folder, self.job)
        self.job.sharding.wait()
        self._labels = "masked_labels" if row.encoder else "labels"
        self._row, self._orders = row, row.architecture == "ErnieForPreTraining"
        self._class = architecture_of(read_config(folder))

    def answer(self, number: int, batch: Batch, watch: NarrowMade | None = None) -> Answer:
        """Run forward and backward of the batch of this number. watch: Sees every operator."""
        with watch or nullcontext():
            loss = self._backward(number, batch)
        with torch.no_grad(), watch or nullcontext():
            logits = self._logits(batch)
        return Answer(logits, loss, self._folded([s.grad for s in self.job.sharding.master_shards]))

    def routes_of(self, batches: Sequence[Batch]) -> Routing:
        """Return the experts that the routers choose in these batches."""
        with torch.no_grad():
            for self.routes.batch, batch in enumerate(batches):
                self._logits(batch)
        return self.routes.chosen

    def balance(self, number: int, batch: Batch) -> tuple[float, dict[str, Tensor]]:
        """The load balancing loss of the batch of this number, summed over the layers, and its gradients."""
        self.routes.batch = number
        self.job.sharding.begin_step()
        self.job.sharding.begin_micro_batch(last=True)
        loss = self.job.model(self._tensors(batch), int(batch.valid.sum())).aux
        loss.backward()
        self.job.sharding.finish()
        return float(loss.detach()), self._folded([shard.grad for shard in self.job.sharding.master_shards])

    def step(self, batch: Batch, lr: float) -> float:
        """Train on a batch; the loss before the step."""
        loss = self._backward(0, batch)
        self.job.optimizer.step(lr)
        self.job.sharding.start_param_gather()
        return loss

    def weights(self) -> dict[str, Tensor]:
        """The trainable parameters, by the names of the class's folders."""
        return self._folded([shard.master for shard in self.job.sharding.master_shards])

    def decays(self) -> dict[str, bool]:
        """Whether a tensor of the class's folders decays."""
        pieces = [(spec, piece) for spec in self.job.table for piece in stored_pieces(spec, self._class)]
        return {self._class.hf_name(piece.hf_name) or "": spec.decay for spec, piece in pieces}

    def _backward(self, number: int, batch: Batch) -> float:
        self.routes.batch = number
        self.job.sharding.begin_step()
        self.job.sharding.begin_micro_batch(last=True)
        terms = self.job.model(self._tensors(batch), int(batch.valid.sum()))
        loss = terms.sums["lm"] / int((self._tensors(batch)[self._labels] != IGNORED).sum())
        if self._orders:
            loss = loss + terms.sums["sop"] / len(batch.tokens)
        loss.backward()
        self.job.sharding.finish()
        return float(loss.detach())

    def _folded(self, tensors: list[Tensor | None]) -> dict[str, Tensor]:
        """Tensors of the master shards by the names of the class's folders, in its order of rows."""
        job, found = self.job, {}
        rows = {spec.name: spec for spec in job.table}
        assert all(tensor is not None for tensor in tensors)
        for name, whole in collect_all(job.world, job.table, job.sharding, [t for t in tensors if t is not None]):
            for piece in stored_pieces(rows[name], self._class):
                hf_name, part = export_piece(self._class, rows[name], piece, whole)
                assert hf_name is not None
                if self._row.initialized and hf_name.startswith(self._row.initialized):
                    continue
                found[hf_name] = part.reshape(piece.hf_shape).clone()
        return found

    def _logits(self, batch: Batch) -> Tensor:
        found = self.job.model.logits(self._tensors(batch))
        words, orders = found if isinstance(found, tuple) else (found, None)
        flat = words[batch.valid].flatten()
        return torch.cat([flat, orders.flatten()]) if self._orders and orders is not None else flat

    def _tensors(self, batch: Batch) -> dict[str, Tensor]:
        places = torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens)
        tensors = {"tokens": batch.tokens, "positions": places, "valid": batch.valid}
        if not self._row.encoder:
            return tensors | {"labels": batch.next_labels}
        return tensors | {
            "token_types": batch.token_types,
            "task_types": torch.zeros_like(batch.tokens),
            "masked_index": batch.valid.flatten().nonzero().flatten(),
            "masked_labels": batch.labels[batch.valid],
            "sop_labels": batch.orders,
        }
