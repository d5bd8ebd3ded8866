"""ERNIE 3.0: a universal module shared by two task branches, understanding and generation.

    embedding -> universal layers -> understanding layers -> masked words, classes
                                  \\> generation layers    -> next words

A sample belongs to one task. It runs the universal layers with that task's attention, then only the task's branch. The
layers of both branches at the same depth form one module, ``layers.N``, numbered after the universal layers.
Source: ERNIE 3.0 (arXiv 2107.02137), sections 3.1 and 3.2.

Shape letters: B samples, S sequence, H hidden of the universal module, h of the branches, V vocabulary, M positions;
S is split over mp under sequence parallelism, written S(/mp).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megapar.core.attention_mask import AttentionMask
from megapar.core.comm.autograd import all_gather_replicated
from megapar.core.comm.axis import Axis
from megapar.core.context_parallel.method import ContextParallel
from megapar.core.device.attention.mask import DeviceMask
from megapar.core.device.dtypes import at_least_fp32
from megapar.core.pipeline.stages import Chunk, RankLayers
from megapar.core.tensor_parallel.collective_product import SEQUENCE_DIM
from megapar.core.tensor_parallel.execution import DEFAULT
from megapar.core.tensor_parallel.layers import LayerOptions, Linear
from megapar.model.attention.slices import Arrangement
from megapar.model.ernie.block import ErnieBlock, ErnieEmbedding
from megapar.model.ernie.model import Ernie, MaskedLmHead, Pooler
from megapar.model.ernie3.recurrence import Branch, BranchContext, generate, understand
from megapar.model.ernie3.sizes import CLASSES, GENERATION, Ernie3Sizes, accuracy_of
from megapar.model.layers.context import Context
from megapar.moe.slicing import Slicing
from megapar.moe.stats import MoeStats

if TYPE_CHECKING:
    from typing_extensions import Unpack


class UniversalBlock(ErnieBlock):
    """Layer of the universal module. Each sample has the attention of its task. x is [B, S(/mp), H] throughout."""

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, MoeStats | None]:
        """Return [B, S(/mp), H] for x [B, S(/mp), H], and None: the layer has no routing statistics."""
        assert isinstance(context, BranchContext)
        outputs = []
        for branch, run in ((context.understanding, understand), (context.generation, generate)):
            if branch is not None and len(branch.rows):
                outputs.append(run(self, x.index_select(0, branch.rows), branch, context))
        return _merge(outputs, context), None


class BranchLayer(nn.Module):
    """One layer of each branch. Each sample passes its own. x is [B, S(/mp), h], for the first layer [B, S(/mp), H].

    Ledger: understanding.*, generation.* as in ``ErnieBlock``; in the first layer also understanding_proj,
    generation_proj [h, H], replicated over mp, with partial gradients under sequence parallelism.
    """

    def __init__(self, sizes: Ernie3Sizes, layer: int, *, cp: ContextParallel, **options: Unpack[LayerOptions]) -> None:
        super().__init__()
        self.understanding = ErnieBlock(sizes.branch, layer, cp=cp, **options)
        self.generation = ErnieBlock(sizes.branch, layer, cp=cp, **options)
        make = partial(
            Linear, sizes.hidden_size, sizes.task_hidden_size, dtype=options["dtype"], device=options["device"]
        )
        first = layer == sizes.num_layers
        self.understanding_proj = make() if first else None
        self.generation_proj = make() if first else None

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, MoeStats | None]:
        """Return [B, S(/mp), h] for x [B, S(/mp), H or h], and None: the layer has no routing statistics."""
        assert isinstance(context, BranchContext)
        outputs: list[Tensor] = []
        idle: list[Tensor] = []
        branches = (
            (context.understanding, understand, self.understanding, self.understanding_proj),
            (context.generation, generate, self.generation, self.generation_proj),
        )
        for branch, run, block, proj in branches:
            assert branch is not None
            selected = x.index_select(0, branch.samples)
            y = run(block, selected if proj is None else proj(selected), branch, context)
            (outputs if len(branch.rows) else idle).append(y)
        out = _merge(outputs, context)
        for y in idle:
            out = out + 0.0 * y.sum()
        return out, None


class ClassHead(Linear):
    """Cross-entropy and correct predictions of one class per sample: pooled [M, h] -> two sums. Replicated over mp."""

    def forward(self, pooled: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return (sum of cross-entropies, correct predictions) in max(fp32, dtype) for pooled [M, h] and labels [M]."""
        logits = super().forward(pooled).to(at_least_fp32(pooled.dtype))
        right = (logits.detach().argmax(1) == labels).sum().to(logits.dtype)
        return F.cross_entropy(logits, labels, reduction="sum"), right


class TaskHeads(nn.Module):
    """Heads of all tasks of the run. The caller passes the word embedding as the output layer."""

    def __init__(self, sizes: Ernie3Sizes, **options: Unpack[LayerOptions]) -> None:
        super().__init__()
        self.tasks = sizes.tasks
        h, dtype, device = sizes.task_hidden_size, options["dtype"], options["device"]
        mp, run = options["mp"], options.get("execution", DEFAULT).run
        for branch in sizes.word_branches:
            self.add_module(branch, MaskedLmHead(sizes, features=h, mp=mp, dtype=dtype, device=device, run=run))
        self.pooler = Pooler(h, h, dtype=dtype, device=device) if set(CLASSES) & set(sizes.tasks) else None
        for task in CLASSES:
            if task in sizes.tasks:
                self.add_module(task, ClassHead(h, sizes.classes(task), dtype=dtype, device=device))

    def forward(self, x: Tensor, batch: dict[str, Tensor], word: Tensor) -> dict[str, Tensor]:
        """Return the loss sums of all tasks, and the correct predictions of classification tasks.

        x is [B, S, h], whole on all mp ranks, and word the weight of the word embedding, [V/mp, H].
        """
        rows, sums = x.flatten(0, 1), {}
        for task in self.tasks:
            index, labels = batch[f"{task}_index"], batch[f"{task}_labels"]
            if task in CLASSES:
                assert self.pooler is not None
                pooled = self.pooler(x.index_select(0, index))
                sums[task], sums[accuracy_of(task)] = self.get_submodule(task)(pooled, labels)
            else:
                branch = "generation" if task in GENERATION else "understanding"
                sums[task] = self.get_submodule(branch)(rows.index_select(0, index), labels, word)
        return sums


class Ernie3(Ernie):
    """ERNIE 3.0 with the heads of its tasks.

    ``layers`` contains the layers by their number: universal layers, then those of the branches. Names, global shapes
    and splits are those of ``ernie3_table(sizes)``. The arguments are those of ``Ernie``.
    """

    sizes: Ernie3Sizes

    def __init__(self, sizes: Ernie3Sizes, *, mp: Axis, rank_layers: RankLayers | None = None, **common: Any) -> None:
        held = rank_layers or RankLayers.whole(sizes.num_blocks)
        super().__init__(sizes, mp=mp, rank_layers=held, **common)
        self.segments = Slicing(degree=sizes.segments)
        self._arrangement = Arrangement(self.segments, mp, sequence_parallel=self.sequence_parallel)

    def _layer(self, layer: int, **options: Unpack[LayerOptions]) -> nn.Module:
        if layer < self.sizes.num_layers:
            return UniversalBlock(self.sizes, layer, cp=self.cp, **options)
        return BranchLayer(self.sizes, layer, cp=self.cp, **options)

    def _make_heads(self, held: RankLayers, **options: Unpack[LayerOptions]) -> None:
        self.lm_head = self.pooler = self.sop_head = None
        self.heads = TaskHeads(self.sizes, **options) if held.last else None

    def units(self) -> dict[str, tuple[nn.Module, ...]]:
        """See ``Ernie.units``."""
        units: dict[str, tuple[nn.Module, ...]] = {}
        if isinstance(self.embedding, ErnieEmbedding):
            units["embedding"] = (self.embedding,)
        elif self.embedding is not None and self.heads is not None:
            units["embedding"] = (self.heads,)  # the module whose call takes the copy of the weight
        units |= {f"layers.{name}": (layer,) for name, layer in self.layers.items()}
        return units if self.heads is None else {**units, "head": (self.heads,)}

    def width_into(self, chunk: Chunk) -> int:
        """Return the features of a chunk's input."""
        return self.sizes.hidden_size if chunk.layers.start <= self.sizes.num_layers else self.sizes.task_hidden_size

    def _embed(self, batch: dict[str, Tensor]) -> Tensor:
        assert self.embedding is not None
        names = ("tokens", "token_types", "task_types", "positions")
        return self.embedding(*(self._arrange(batch[name]) for name in names))

    def _context(self, batch: dict[str, Tensor]) -> BranchContext:
        (samples, length), parts = batch["tokens"].shape, self.mp.size if self.sequence_parallel else 1
        slices = self.segments.cut(length, parts)
        text = batch.get("valid")
        valid = None if text is None else self._arrange(text)
        mask = AttentionMask(samples, length, causal=False, padded=valid is not None)
        understanding, generation = batch["understanding"], batch["generation"]
        return BranchContext(
            DeviceMask(mask, valid),
            None,
            batch["tokens"].numel(),
            slices=slices,
            own_slices=tuple(slice(s.start // parts, s.stop // parts) for s in slices),
            understanding=Branch.understanding(understanding, valid, length),
            generation=Branch.generation(generation, text, slices, min(self.sizes.memory, slices[0].stop)),
            back=torch.cat((understanding, generation)).argsort(),
        )

    def _arrange(self, x_BS: Tensor) -> Tensor:
        """Reorder positions so that each mp rank's chunk holds its part of every segment."""
        return self._arrangement.arrange(x_BS)

    def _leave(self, x: Tensor) -> Tensor:
        if not self.sequence_parallel:
            return x
        x = all_gather_replicated(x, self.mp, SEQUENCE_DIM)
        return self._arrangement.restore(x)

    def _sums(self, x: Tensor, batch: dict[str, Tensor], word: Tensor) -> dict[str, Tensor]:
        assert self.heads is not None
        return self.heads(x, batch, word)


def _merge(outputs: list[Tensor], context: BranchContext) -> Tensor:
    """Concatenate the outputs of both kinds of samples and restore the order of the samples."""
    assert context.back is not None
    return torch.cat(outputs).index_select(0, context.back)
