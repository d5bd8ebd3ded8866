"""The ERNIE encoder: embeddings, post-norm blocks, pooler; heads for masked words and for sentence order.

Shape letters: B batch, S sequence, H hidden, V vocabulary, M masked positions; S is cut over mp under sequence
parallelism, written S(/mp).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megapar.core.comm.autograd import copy, gather
from megapar.core.comm.axis import Axis
from megapar.core.context_parallel.method import ContextParallel
from megapar.core.device.compiled import FunctionRunner, plain
from megapar.core.device.dtypes import at_least_fp32
from megapar.core.pipeline.stages import Chunk, StageContents
from megapar.core.recompute.checkpointing import Recompute
from megapar.core.tensor_parallel.execution import DEFAULT, Execution
from megapar.core.tensor_parallel.layers import (
    SEQUENCE_DIM,
    LayerOptions,
    Linear,
    VocabularyEmbedding,
    gather_vocabulary,
    local,
    parameter,
    vocabulary_range,
)
from megapar.model.ernie.sizes import ErnieSizes
from megapar.model.layers.block import ErnieBlock, HiddenDropout
from megapar.model.layers.context import Context
from megapar.model.layers.embedding import ErnieEmbedding, TiedWord, own_sequence
from megapar.model.layers.loss import check_shard, linear_cross_entropy
from megapar.model.layers.norm import LayerNorm
from megapar.model.layers.self_attention import SelfAttention
from megapar.model.layers.stack import run_layers
from megapar.model.layers.terms import Terms, collect

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Pooler(Linear):
    """tanh(x w^T + b) of the first position: x [B, S, H] -> [B, H]. The whole weight on every mp rank."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] to [B, H]."""
        return torch.tanh(super().forward(x[:, 0]))


class SentenceOrderHead(nn.Module):
    """Cross-entropy of two classes (in order, swapped): pooled [B, H] -> scalar sum. Whole on every mp rank."""

    def __init__(self, hidden_size: int, *, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__()
        self.weight = parameter((2, hidden_size), dtype, device)
        self.bias = parameter((2,), dtype, device)

    def forward(self, pooled: Tensor, labels: Tensor) -> Tensor:
        """[B, H] and labels [B] to the sum of cross-entropies in max(fp32, dtype)."""
        return F.cross_entropy(self.logits(pooled).to(at_least_fp32(pooled.dtype)), labels, reduction="sum")

    def logits(self, pooled: Tensor) -> Tensor:
        """[B, H] to [B, 2]."""
        return F.linear(pooled, local(self.weight), local(self.bias))


class MaskedLmHead(nn.Module):
    """Cross-entropy of masked words; the decoder is the word embedding [V/mp, H], which comes with the call.

    rows [M, I] -> transform [H, I] -> gelu -> norm -> @ w [V/mp, H]^T + bias [V/mp] -> in chunks -> scalar sum
    transform and norm do the same on every mp rank; dgrad: all-reduce over mp behind the norm; wgrad: dw and dbias of
    this rank's vocabulary, whole on their rank.
    """

    def __init__(
        self,
        sizes: ErnieSizes,
        *,
        features: int | None = None,
        mp: Axis,
        dtype: torch.dtype,
        device: torch.device | str | None,
        run: FunctionRunner = plain,
    ) -> None:
        """features: I of the rows, by default H."""
        super().__init__()
        H = sizes.hidden_size
        self.vocab_size, self.mp = sizes.vocab_size, mp
        self.transform = Linear(features or H, H, dtype=dtype, device=device)
        self.norm = LayerNorm(H, sizes.layernorm_epsilon, dtype=dtype, device=device, run=run)
        self.bias = parameter((vocabulary_range(sizes.vocab_size, mp)[1],), dtype, device)

    def forward(self, rows: Tensor, labels: Tensor, word: Tensor) -> Tensor:
        """[M, I], labels [M] and the word embedding to the sum of cross-entropies in max(fp32, dtype)."""
        hidden = copy(self._transformed(rows), self.mp)
        return linear_cross_entropy(
            hidden, local(word), local(self.bias), labels, vocab_size=self.vocab_size, mp=self.mp
        )

    def logits(self, x: Tensor, word: Tensor) -> Tensor:
        """[.., H] to the whole logits [.., V]; for inspection."""
        check_shard(local(word), self.vocab_size, self.mp)
        logits = F.linear(self._transformed(x), local(word), local(self.bias))
        return gather_vocabulary(logits, self.vocab_size, self.mp)

    def _transformed(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(F.gelu(self.transform(x)))
        return normed


class Ernie(nn.Module):
    """An ERNIE encoder with its heads.

    Layers live in ``layers``, keyed by their global number. Parameters hold this rank's pieces and are uninitialised;
    names, global shapes and cuts are those of ``ernie_table(sizes)``. cp: how a sequence is shared by ranks, whose
    batches then have their positions only. holding: what of the model this rank has in a pipeline; by default all.
    recompute: which layers keep only their input; None: none of them. execution: how layers run.
    """

    embedding: ErnieEmbedding | TiedWord | None
    lm_head: MaskedLmHead | None

    def __init__(
        self,
        sizes: ErnieSizes,
        *,
        mp: Axis,
        sequence_parallel: bool = False,
        cp: ContextParallel | None = None,
        holding: StageContents | None = None,
        recompute: Recompute | None = None,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        execution: Execution = DEFAULT,
    ) -> None:
        super().__init__()
        held = holding or StageContents.whole(sizes.num_layers)
        self.sizes, self.mp, self.sequence_parallel, self.dtype = sizes, mp, sequence_parallel, dtype
        self.recompute = recompute
        self.cp = cp or ContextParallel()
        H = sizes.hidden_size
        options: LayerOptions = {
            "mp": mp,
            "sequence_parallel": sequence_parallel,
            "dtype": dtype,
            "device": device,
            "execution": execution,
        }
        self.embedding = ErnieEmbedding(sizes, cp=self.cp, **options) if held.first else None
        if held.last and not held.first:
            self.embedding = TiedWord(VocabularyEmbedding(sizes.vocab_size, H, **options))
        self.layers = nn.ModuleDict()
        for layer in held.layers:
            self.layers[str(layer)] = self._layer(layer, **options)
        self._make_heads(held, **options)

    def _layer(self, layer: int, **options: Unpack[LayerOptions]) -> nn.Module:
        return ErnieBlock(self.sizes, layer, cp=self.cp, **options)

    def _make_heads(self, held: StageContents, **options: Unpack[LayerOptions]) -> None:
        H, sop = self.sizes.hidden_size, self.sizes.sop and held.last
        dtype, device, run = options["dtype"], options["device"], options.get("execution", DEFAULT).run
        self.pooler = Pooler(H, H, dtype=dtype, device=device) if sop else None
        self.lm_head = None
        if held.last:
            self.lm_head = MaskedLmHead(self.sizes, mp=self.mp, dtype=dtype, device=device, run=run)
        self.sop_head = SentenceOrderHead(H, dtype=dtype, device=device) if sop else None

    def forward(self, batch: dict[str, Tensor], valid_tokens: int | None = None) -> Terms:
        """The loss terms of one micro-batch.

        batch: tokens, token_types, task_types, positions [B, S] int64; valid [B, S] bool where some position is
        padding; masked_index [M] (into the flattened B * S), masked_labels [M]; sop_labels [B] with ``sop``. Under
        context parallelism S is this rank's positions; with valid come lengths [B] int64 on the host, the valid
        positions of whole samples.
        valid_tokens is taken for the sake of one call for all models; nothing here depends on it.
        """
        x = self._run(batch)
        return collect(self._sums(x, batch, self.tied_weight), (), x.new_zeros((), dtype=at_least_fp32(x.dtype)))

    def run_chunk(
        self,
        chunk: Chunk,
        x: Tensor | None,
        batch: dict[str, Tensor],
        valid_tokens: int | None = None,
        tied_weight: Tensor | None = None,
    ) -> tuple[Tensor | None, Terms]:
        """One chunk of a pipeline: (x for the next one, or None behind the last; its terms).

        x: [B, S(/mp), H] of the chunk before, None for the first. batch, valid_tokens: as in ``forward``; every rank of
        a pipeline reads the same. tied_weight: what the head computes with in place of the embedding's weight.
        """
        if chunk.first:
            x = self._embed(batch)
        assert x is not None
        x = self._run_layers(x, batch, map(str, chunk.layers))
        like = x.new_zeros((), dtype=at_least_fp32(x.dtype))
        if not chunk.last:
            return x, collect({}, (), like)
        word = self.tied_weight if tied_weight is None else tied_weight
        return None, collect(self._sums(self._leave(x), batch, word), (), like)

    def logits(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """(masked-word logits [B, S, V] of every position, sentence-order logits [B, 2] or None); for inspection."""
        assert self.lm_head is not None
        x = self._run(batch)
        order = None
        if self.pooler is not None and self.sop_head is not None:
            order = self.sop_head.logits(self.pooler(x))
        return self.lm_head.logits(x, self.tied_weight), order

    def scale_dropout(self, share: float) -> None:
        """Drop with this share of all probabilities from the next forward on."""
        for module in self.modules():
            if isinstance(module, HiddenDropout | ErnieEmbedding):
                module.share = share
            elif isinstance(module, SelfAttention):
                module.dropout = module.sizes.dropout * share

    def width_into(self, chunk: Chunk) -> int:
        """Features of what a chunk takes from the one before it."""
        return self.sizes.hidden_size

    @property
    def tied_weight(self) -> Tensor:
        """The word embedding, which is the masked-word head's decoder too."""
        assert self.embedding is not None
        return self.embedding.word.weight

    def units(self) -> dict[str, tuple[nn.Module, ...]]:
        """Unit name (as in the table) -> its modules, each run by its own call, in forward order."""
        units: dict[str, tuple[nn.Module, ...]] = {}
        if isinstance(self.embedding, ErnieEmbedding):
            units["embedding"] = (self.embedding,)
        elif self.embedding is not None and self.lm_head is not None:
            units["embedding"] = (self.lm_head,)  # whose call takes the copy of the weight
        units |= {f"layers.{name}": (block,) for name, block in self.layers.items()}
        head = tuple(m for m in (self.lm_head, self.pooler, self.sop_head) if m is not None)
        return {**units, "head": head} if head else units

    def _run(self, batch: dict[str, Tensor]) -> Tensor:
        """Everything but the heads: the whole x [B, S, H] on every mp rank."""
        return self._leave(self._run_layers(self._embed(batch), batch, self.layers))

    def _embed(self, batch: dict[str, Tensor]) -> Tensor:
        assert self.embedding is not None
        x: Tensor = self.embedding(batch["tokens"], batch["token_types"], batch["task_types"], batch["positions"])
        return x

    def _run_layers(self, x: Tensor, batch: dict[str, Tensor], names: Iterable[str]) -> Tensor:
        valid = batch.get("valid")
        own_valid = None if valid is None else own_sequence(valid, self.mp, self.sequence_parallel)
        samples, length = batch["tokens"].shape
        lengths = None if batch.get("lengths") is None else batch["lengths"].tolist()
        plan = self.cp.plan(samples, length, causal=False, lengths=lengths)
        if self.cp.deals_heads and valid is not None:
            places = torch.arange(length * self.cp.axis.size, device=valid.device)
            valid = places < batch["lengths"].to(valid.device, non_blocking=True)[:, None]
        context = Context(valid, own_valid, batch["tokens"].numel(), plan=plan)
        y, _ = run_layers((self.layers[name] for name in names), x, context, self.recompute)
        assert isinstance(y, Tensor)  # nothing is cut into slices here
        return y

    def _leave(self, x: Tensor) -> Tensor:
        return gather(x, self.mp, SEQUENCE_DIM) if self.sequence_parallel else x

    def _sums(self, x: Tensor, batch: dict[str, Tensor], word: Tensor) -> dict[str, Tensor]:
        """The loss sums of the heads; word: the masked-word head's decoder."""
        assert self.lm_head is not None
        rows = x.flatten(0, 1).index_select(0, batch["masked_index"])
        sums = {"lm": self.lm_head(rows, batch["masked_labels"], word)}
        if self.pooler is not None and self.sop_head is not None:
            order = self.sop_head(self.pooler(x), batch["sop_labels"])
            # The first position of a sample is on the first rank; what others make of theirs counts for nothing.
            sums["sop"] = order if self.cp.axis.rank == 0 else 0.0 * order
        return sums
