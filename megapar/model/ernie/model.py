"""The ERNIE encoder: embeddings, post-norm blocks, pooler, and heads for masked words and for sentence order.

Shape letters: B batch, S sequence, H hidden, V vocabulary, M masked positions; S is split over mp under sequence
parallelism, written S(/mp).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megapar.core.attention_mask import AttentionMask
from megapar.core.comm.autograd import all_gather_replicated, copy
from megapar.core.comm.axis import Axis
from megapar.core.context_parallel.method import ContextParallel
from megapar.core.device.attention.mask import DeviceMask
from megapar.core.device.compiled import FunctionRunner, plain
from megapar.core.device.dtypes import at_least_fp32
from megapar.core.pipeline.stages import Chunk, RankLayers
from megapar.core.recompute.checkpointing import Recompute
from megapar.core.tensor_parallel.collective_product import SEQUENCE_DIM
from megapar.core.tensor_parallel.execution import DEFAULT, Execution
from megapar.core.tensor_parallel.layers import (
    LayerOptions,
    Linear,
    VocabularyEmbedding,
    gather_vocabulary,
    local,
    parameter,
    vocabulary_range,
)
from megapar.model.attention.self_attention import SelfAttention
from megapar.model.ernie.block import ErnieBlock, ErnieEmbedding
from megapar.model.ernie.sizes import ErnieSizes
from megapar.model.layers.context import Context
from megapar.model.layers.embedding import TiedWord, own_sequence
from megapar.model.layers.loss import Terms, check_shard, collect, vocab_parallel_linear_cross_entropy
from megapar.model.layers.norm import LayerNorm
from megapar.model.layers.residual import HiddenDropout
from megapar.model.stack import run_layers

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Pooler(Linear):
    """Pooler: tanh(x w^T + b) of the first position, x [B, S, H] -> [B, H]. The weight is replicated over mp."""

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, H] for x [B, S, H], or for the first positions alone, [B, H]."""
        return torch.tanh(super().forward(x[:, 0] if x.dim() > 2 else x))


class SentenceOrderHead(Linear):
    """Cross-entropy of two classes (in order, swapped): pooled [B, H] -> scalar sum. Replicated over mp."""

    def forward(self, pooled: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        """Return the sum of cross-entropies in max(fp32, dtype) for pooled [B, H] and labels [B]."""
        return F.cross_entropy(self.logits(pooled).to(at_least_fp32(pooled.dtype)), labels, reduction="sum")

    def logits(self, pooled: Tensor) -> Tensor:
        """Return the logits [B, 2] for pooled [B, H]."""
        return super().forward(pooled)


class MaskedLmHead(nn.Module):
    """Vocab parallel cross-entropy of masked words. The caller passes the word embedding [V/mp, H] as the output layer.

    rows [M, I] -> transform [H, I] -> gelu -> norm -> @ w [V/mp, H]^T + bias [V/mp] -> in chunks -> scalar sum
    transform and norm are replicated over mp; dgrad: all-reduce over mp after the norm; wgrad: dw and dbias of this
    rank's vocabulary, complete on their rank. features: I; None for H.
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
        super().__init__()
        H = sizes.hidden_size
        self.vocab_size, self.mp = sizes.vocab_size, mp
        self.transform = Linear(features or H, H, dtype=dtype, device=device)
        self.norm = LayerNorm(H, sizes.layernorm_epsilon, dtype=dtype, device=device, run=run)
        self.bias = parameter((vocabulary_range(sizes.vocab_size, mp)[1],), dtype, device)

    def forward(self, rows: Tensor, labels: Tensor, word: Tensor) -> Tensor:
        """Return the sum of cross-entropies in max(fp32, dtype) for rows [M, I], labels [M], word [V/mp, H]."""
        hidden = copy(self._transformed(rows), self.mp)
        return vocab_parallel_linear_cross_entropy(
            hidden, local(word), local(self.bias), labels, vocab_size=self.vocab_size, mp=self.mp
        )

    def logits(self, x: Tensor, word: Tensor) -> Tensor:
        """Return the whole logits [.., V] for x [.., H]; for inspection."""
        check_shard(local(word), self.vocab_size, self.mp)
        logits = F.linear(self._transformed(x), local(word), local(self.bias))
        return gather_vocabulary(logits, self.vocab_size, self.mp)

    def _transformed(self, x: Tensor) -> Tensor:
        return self.norm(F.gelu(self.transform(x)))


class Ernie(nn.Module):
    """An ERNIE encoder with its heads.

    ``layers`` contains the layers by their global number. Parameters are this rank's uninitialized shards; their names,
    global shapes and splits are those of ``ernie_table(sizes)``. The arguments are those of ``Decoder``.
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
        rank_layers: RankLayers | None = None,
        recompute: Recompute | None = None,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        execution: Execution = DEFAULT,
    ) -> None:
        super().__init__()
        held = rank_layers or RankLayers.whole(sizes.num_layers)
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

    def _make_heads(self, held: RankLayers, **options: Unpack[LayerOptions]) -> None:
        H, sop = self.sizes.hidden_size, self.sizes.sop and held.last
        dtype, device, run = options["dtype"], options["device"], options.get("execution", DEFAULT).run
        self.pooler = Pooler(H, H, dtype=dtype, device=device) if sop else None
        self.lm_head = None
        if held.last:
            self.lm_head = MaskedLmHead(self.sizes, mp=self.mp, dtype=dtype, device=device, run=run)
        self.sop_head = SentenceOrderHead(H, 2, dtype=dtype, device=device) if sop else None

    def forward(self, batch: dict[str, Tensor], valid_tokens: int | None = None) -> Terms:
        """Return the loss terms of one micro-batch.

        ``batch`` contains:
            tokens, token_types, task_types, positions: [B, S] int64.
            valid: [B, S] bool, if there is padding.
            masked_index: [M] positions in the flattened B * S.
            masked_labels: [M] int64.
            sop_labels: [B], with ``sop``.
            lengths: [B] int64 on the host, if there is padding under context parallelism: valid positions of whole
                samples.
        Under context parallelism S is this rank's positions. A micro-batch whose padding was removed
        (``data.reduced_batch``) is one sample of all its positions, with:
            ends: Position after each sample in it, on the host; filler at the end is one more.
            starts: 0 and the same ends, int32.

        Args:
            valid_tokens: Unused; all models have the same signature.
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
        """Run one chunk of a pipeline. Return (input of the next chunk or None after the last, terms of this chunk).

        Args:
            x: Output of the previous chunk, [B, S(/mp), H]; None for the first.
            batch: As in ``forward``; all stages of a pipeline read the same batch.
            tied_weight: Weight that the head uses instead of this rank's embedding weight.
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
        """Return (masked-word logits [B, S, V], sentence-order logits [B, 2] or None); for inspection."""
        assert self.lm_head is not None
        x = self._run(batch)
        order = None
        if self.pooler is not None and self.sop_head is not None:
            order = self.sop_head.logits(self.pooler(x))
        return self.lm_head.logits(x, self.tied_weight), order

    def scale_dropout(self, share: float) -> None:
        """Multiply all dropout probabilities by ``share`` from the next forward on."""
        for module in self.modules():
            if isinstance(module, HiddenDropout | ErnieEmbedding):
                module.share = share
            elif isinstance(module, SelfAttention):
                module.dropout = module.sizes.dropout * share

    def width_into(self, chunk: Chunk) -> int:
        """Return the features of a chunk's input."""
        return self.sizes.hidden_size

    @property
    def tied_weight(self) -> Tensor:
        """The word embedding's weight, which is also the masked-word head's output layer."""
        assert self.embedding is not None
        return self.embedding.word.weight

    def units(self) -> dict[str, tuple[nn.Module, ...]]:
        """Return the modules of each unit, by the unit's name in the table, in forward order. Each is called once."""
        units: dict[str, tuple[nn.Module, ...]] = {}
        if isinstance(self.embedding, ErnieEmbedding):
            units["embedding"] = (self.embedding,)
        elif self.embedding is not None and self.lm_head is not None:
            units["embedding"] = (self.lm_head,)  # the module whose call takes the copy of the weight
        units |= {f"layers.{name}": (block,) for name, block in self.layers.items()}
        head = tuple(m for m in (self.lm_head, self.pooler, self.sop_head) if m is not None)
        return {**units, "head": head} if head else units

    def _run(self, batch: dict[str, Tensor]) -> Tensor:
        """Run everything except the heads. Return x [B, S, H], whole on all mp ranks."""
        return self._leave(self._run_layers(self._embed(batch), batch, self.layers))

    def _embed(self, batch: dict[str, Tensor]) -> Tensor:
        assert self.embedding is not None
        return self.embedding(batch["tokens"], batch["token_types"], batch["task_types"], batch["positions"])

    def _run_layers(self, x: Tensor, batch: dict[str, Tensor], names: Iterable[str]) -> Tensor:
        y, _ = run_layers((self.layers[name] for name in names), x, self._context(batch), self.recompute)
        assert isinstance(y, Tensor)  # ERNIE does not run in slices
        return y

    def _context(self, batch: dict[str, Tensor]) -> Context:
        if "ends" in batch:  # no position is padding, and samples attend to themselves only
            mask = AttentionMask.of_documents(batch["ends"].tolist(), causal=False)
            return Context(DeviceMask(mask, starts=batch["starts"]), None, batch["tokens"].numel())
        valid = batch.get("valid")
        own_valid = None if valid is None else own_sequence(valid, self.mp, self.sequence_parallel)
        samples, length = batch["tokens"].shape
        length *= self.cp.axis.size
        lengths = None if batch.get("lengths") is None else tuple(batch["lengths"].tolist())
        mask = AttentionMask(samples, length, causal=False, padded=valid is not None, lengths=lengths)
        if self.cp.deals_heads and valid is not None:
            places = torch.arange(length, device=valid.device)
            valid = places < batch["lengths"].to(valid.device, non_blocking=True)[:, None]
        return Context(DeviceMask(mask, valid), own_valid, batch["tokens"].numel(), plan=self.cp.plan(mask))

    def _leave(self, x: Tensor) -> Tensor:
        return all_gather_replicated(x, self.mp, SEQUENCE_DIM) if self.sequence_parallel else x

    def _sums(self, x: Tensor, batch: dict[str, Tensor], word: Tensor) -> dict[str, Tensor]:
        """Return the loss sums of the heads. word: Weight of the masked-word head's output layer."""
        assert self.lm_head is not None
        rows = x.flatten(0, 1).index_select(0, batch["masked_index"])
        sums = {"lm": self.lm_head(rows, batch["masked_labels"], word)}
        if self.pooler is not None and self.sop_head is not None:
            labels = batch["sop_labels"]
            starts = batch.get("starts")
            pooled = self.pooler(x if starts is None else x.flatten(0, 1).index_select(0, starts[: len(labels)]))
            order = self.sop_head(pooled, labels)
            # The first position of a sample is on cp rank 0. The result of the other ranks is multiplied by 0.
            sums["sop"] = order if self.cp.axis.rank == 0 else 0.0 * order
        return sums
