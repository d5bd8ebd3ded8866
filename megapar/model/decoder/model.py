"""The decoder: embedding, blocks (dense or mixture of experts), final norm, vocabulary head.

Shape letters: B batch, S sequence, H hidden, V vocabulary, L mixture-of-experts layers, E experts; S is split over mp
under sequence parallelism, written S(/mp).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megapar.core.attention_mask import AttentionMask
from megapar.core.comm.autograd import all_gather, copy
from megapar.core.comm.axis import Axis
from megapar.core.context_parallel.method import ContextParallel
from megapar.core.device.attention.mask import DeviceMask
from megapar.core.device.dtypes import at_least_fp32
from megapar.core.pipeline.stages import Chunk, RankLayers
from megapar.core.recompute.checkpointing import Recompute
from megapar.core.tensor_parallel.collective_product import SEQUENCE_DIM
from megapar.core.tensor_parallel.execution import DEFAULT, Execution
from megapar.core.tensor_parallel.layers import (
    Embedding,
    LayerOptions,
    VocabularyEmbedding,
    gather_vocabulary,
    local,
    parameter,
    vocabulary_range,
)
from megapar.model.ampipe import Sliced, join
from megapar.model.attention.self_attention import SelfAttention
from megapar.model.attention.slices import Arrangement
from megapar.model.decoder.block import DecoderBlock
from megapar.model.decoder.mtp import Mtp, following, of_next
from megapar.model.decoder.sizes import DecoderSizes
from megapar.model.layers.context import Context
from megapar.model.layers.embedding import TiedWord, drop, own_sequence
from megapar.model.layers.loss import (
    Terms,
    check_shard,
    collect,
    vocab_parallel_label_scores,
    vocab_parallel_linear_cross_entropy,
)
from megapar.model.layers.norm import make_norm
from megapar.model.layers.rotary import RotaryEmbedding
from megapar.model.stack import run_layers
from megapar.moe.layer import MoeLayer, MoeParts
from megapar.moe.router import move_correction_bias
from megapar.moe.slicing import Slicing
from megapar.moe.stats import MoeStats

if TYPE_CHECKING:
    from typing_extensions import Unpack


class DecoderEmbedding(nn.Module):
    """Vocab parallel word embedding, plus position embedding if positions are learned.

    tokens [B, S] -> word [V/mp, H]: vocabulary embedding -> [B, S(/mp), H] * multiplier + position [P, H][positions]
      -> dropout
    Under sequence parallelism a rank looks up only its own positions, so their gradient is a partial sum over mp.
    """

    def __init__(self, sizes: DecoderSizes, *, cp: ContextParallel, **options: Unpack[LayerOptions]) -> None:
        super().__init__()
        self.mp, self.sequence_parallel = options["mp"], options["sequence_parallel"]
        self.dropout, self.multiplier = sizes.hidden_dropout, sizes.embedding_factor
        if sizes.scale_embedding:
            self.multiplier = torch.tensor(self.multiplier, dtype=options["dtype"]).item()
        self.stream = cp.share(self.mp, sequence_parallel=self.sequence_parallel).rank
        H, dtype, device = sizes.hidden_size, options["dtype"], options["device"]
        self.word = VocabularyEmbedding(sizes.vocab_size, H, **options)
        learned = sizes.position_embedding_type == "learned"
        rows = sizes.max_position_embeddings
        self.position = Embedding(rows, H, dtype=dtype, device=device) if learned else None

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return [B, S(/mp), H] for tokens and positions, [B, S] int64 each."""
        x = self.word(tokens)
        if self.multiplier != 1.0:
            x = x * self.multiplier
        if self.position is not None:
            x = x + self.position(own_sequence(positions, self.mp, self.sequence_parallel))
        return drop(x, self.dropout if self.training else 0.0, self.stream)


class LmHead(nn.Module):
    """Vocab parallel cross-entropy. A tied head has no weight; its caller passes the embedding's.

    x [B, S(/mp), H] / scaling (-> all-gather) @ w [V/mp, H]^T -> logits, in chunks of rows, never kept -> scalar sum
    dgrad: all-reduce (reduce-scatter) over mp of the partial dx; wgrad: dw [V/mp, H], complete on its rank.

    Attributes:
        scores: None, or a list that the next forward fills with those of the labels, in place of their losses: the
            log-probabilities, and 1 where another token is likelier, [B, S] each.
    """

    scores: list[Tensor] | None = None

    def __init__(self, sizes: DecoderSizes, **options: Unpack[LayerOptions]) -> None:
        super().__init__()
        self.vocab_size, self.scaling = sizes.vocab_size, sizes.logits_scaling
        self.mp, self.sequence_parallel = options["mp"], options["sequence_parallel"]
        shape = (vocabulary_range(sizes.vocab_size, self.mp)[1], sizes.hidden_size)
        self.weight = None if sizes.tie_embeddings else parameter(shape, options["dtype"], options["device"])

    def forward(self, *inputs: tuple[Tensor, Tensor, Tensor | None], tied: Tensor | None) -> list[Tensor]:
        """Return the sum of cross-entropies for each (x [B, S(/mp), H], labels, weights [B, S]), in max(fp32, dtype).

        Label -100 means no loss, and None a weight of 1. One call takes all inputs, because sharding reshards the
        weight after it.
        """
        weight = self._weight(tied)
        if self.scores is not None:
            x, labels, _ = inputs[0]
            found = vocab_parallel_label_scores(
                self._enter(x).flatten(0, 1), weight, labels.flatten(), vocab_size=self.vocab_size, mp=self.mp
            )
            self.scores = [values.view_as(labels) for values in found]
            return [found[0].new_zeros(()) for _ in inputs]
        return [
            vocab_parallel_linear_cross_entropy(
                self._enter(x).flatten(0, 1),
                *(weight, None, labels.flatten(), None if weights is None else weights.flatten()),
                vocab_size=self.vocab_size,
                mp=self.mp,
            )
            for x, labels, weights in inputs
        ]

    def logits(self, x: Tensor, tied: Tensor | None) -> Tensor:
        """Return the whole logits [B, S, V] for x [B, S(/mp), H]; for inspection."""
        weight = self._weight(tied)
        check_shard(weight, self.vocab_size, self.mp)
        return gather_vocabulary(F.linear(self._enter(x), weight), self.vocab_size, self.mp)

    def _enter(self, x: Tensor) -> Tensor:
        """Return the input of the product with the whole vocabulary, divided so that the logits need not be."""
        if self.scaling != 1.0:
            x = x / self.scaling
        return all_gather(x, self.mp, SEQUENCE_DIM) if self.sequence_parallel else copy(x, self.mp)

    def _weight(self, tied: Tensor | None) -> Tensor:
        weight = tied if self.weight is None else self.weight
        if weight is None:
            raise ValueError("the head is tied to the embedding: pass the embedding's weight to the call")
        return local(weight)


class Decoder(nn.Module):
    """A decoder language model, dense or mixture of experts.

    ``layers`` contains the layers by their global number. Parameters are this rank's uninitialized shards; their names,
    global shapes and splits are those of ``decoder_table(sizes)``.

    Args:
        emp: Axis over which the width of experts is split.
        sequence_parallel: Split positions over mp outside the matrix products.
        cp: Method and axis of context parallelism; batches then have this rank's positions only.
        rank_layers: Part of the model on this pipeline stage; None for all.
        slicing: Slices of the sequence, run as drawn in ``model.ampipe``.
        recompute: Activation checkpointing; None to keep all activations.
    """

    embedding: DecoderEmbedding | TiedWord | None
    mtp: Mtp | None
    lm_head: LmHead | None

    def __init__(
        self,
        sizes: DecoderSizes,
        *,
        mp: Axis,
        ep: Axis,
        emp: Axis,
        sequence_parallel: bool = False,
        cp: ContextParallel | None = None,
        rank_layers: RankLayers | None = None,
        slicing: Slicing | None = None,
        recompute: Recompute | None = None,
        moe_parts: MoeParts | None = None,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        execution: Execution = DEFAULT,
    ) -> None:
        super().__init__()
        rank_layers = rank_layers or RankLayers.whole(sizes.num_layers)
        self.sizes, self.mp, self.sequence_parallel, self.dtype = sizes, mp, sequence_parallel, dtype
        self.cp = cp or ContextParallel()
        self._arrangement = Arrangement(slicing or Slicing(), mp, sequence_parallel=sequence_parallel)
        blocks = (*rank_layers.layers, *((sizes.num_layers,) if rank_layers.last and sizes.mtp_depth else ()))
        dims = sizes.attention.rotary_dim, sizes.attention.angles_dim
        ropes = {rope for layer in blocks if (rope := sizes.rope_at(layer)) is not None}
        self._ropes = {rope: RotaryEmbedding(dims[0], rope.theta, dtype, rope.scaling, dims[1]) for rope in ropes}
        options: LayerOptions = {
            "mp": mp,
            "sequence_parallel": sequence_parallel,
            "dtype": dtype,
            "device": device,
            "execution": execution,
        }
        self.embedding = DecoderEmbedding(sizes, cp=self.cp, **options) if rank_layers.first else None
        if rank_layers.last and not rank_layers.first and (sizes.tie_embeddings or sizes.mtp_depth):
            self.embedding = TiedWord(VocabularyEmbedding(sizes.vocab_size, sizes.hidden_size, **options))
        self.recompute = recompute
        self.layers = nn.ModuleDict()
        for layer in rank_layers.layers:
            self.layers[str(layer)] = DecoderBlock(
                sizes, layer, ep=ep, emp=emp, cp=self.cp, moe_parts=moe_parts, **options
            )
        self.mtp = None
        if rank_layers.last and sizes.mtp_depth:
            self.mtp = Mtp(sizes, ep=ep, emp=emp, cp=self.cp, moe_parts=moe_parts, **options)
        self.final_norm: nn.Module | None = None
        if rank_layers.last:
            self.final_norm = make_norm(
                *(sizes.normalization, sizes.hidden_size, sizes.layernorm_epsilon),
                dtype=dtype,
                device=device,
                run=execution.run,
                one_plus=sizes.apply_layernorm_1p,
            )
        self.lm_head = LmHead(sizes, **options) if rank_layers.last else None

    def forward(self, batch: dict[str, Tensor], valid_tokens: int | None = None) -> Terms:
        """Return the loss terms of one micro-batch.

        ``batch`` contains:
            tokens, labels (-100: no loss), positions: [B, S] int64.
            weights: [B, S] fp32, those of the labels, if they are not all 1.
            valid: [B, S] bool, if there is padding, which must come after the text of its sample.
            lengths: [B] int64 on the host, if there is padding under context parallelism: valid positions of whole
                samples.
            ends: [documents] int64 on the host, if attention does not cross documents: the end of each in B * S.
            tokens_ahead, labels_ahead, weights_ahead: [B, S], for multi-token prediction under context parallelism
                (``model.decoder.mtp.following``).
        Under context parallelism S is this rank's positions, but ``ends`` are those of whole samples.

        Args:
            valid_tokens: Valid positions of whole samples. None to count them, which waits for the device; required
                under context parallelism.
        """
        x, stats, context = self._run(batch, valid_tokens)
        sums, ahead = self._sums(x, batch, context, self.tied_weight)
        return collect(sums, [*stats, *ahead])

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
        context = self._context(batch, valid_tokens)
        if chunk.first:
            x = self._embed(batch)
        assert x is not None
        x, stats = self._run_layers(x, context, map(str, chunk.layers))
        like = x.new_zeros((), dtype=at_least_fp32(x.dtype))
        if not chunk.last:
            return x, collect({}, stats, like)
        assert self.final_norm is not None
        word = self.tied_weight if tied_weight is None else tied_weight
        sums, ahead = self._sums(self.final_norm(x), batch, context, word)
        return None, collect(sums, [*stats, *ahead])

    def width_into(self, chunk: Chunk) -> int:
        """Return the features of a chunk's input."""
        return self.sizes.hidden_size

    @property
    def load_rows(self) -> list[int]:
        """Rows of the whole model's load [L, E] that belong to this rank's layers."""
        return [self.sizes.routed_layers.index(number) for number in self.expert_layers()]

    def expert_layers(self) -> dict[int, MoeLayer]:
        """Return this rank's layers of experts by block number, ascending; the prediction block's is after the last."""
        blocks = {int(name): self.layers[name] for name in sorted(self.layers, key=int)}
        if self.mtp is not None:
            blocks[self.sizes.num_layers] = self.mtp.block
        experts = {number: block.moe for number, block in blocks.items() if isinstance(block, DecoderBlock)}
        return {number: moe for number, moe in experts.items() if moe is not None}

    def logits(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the whole logits [B, S, V] of ``batch``, for inspection and comparison."""
        assert self.lm_head is not None
        logits = self.lm_head.logits(self._run(batch, None)[0], self.tied_weight)
        return self._arrangement.restore(logits)

    @property
    def tied_weight(self) -> Tensor | None:
        """The embedding's weight if the head or multi-token prediction also uses it; otherwise None."""
        used = self.sizes.tie_embeddings or self.sizes.mtp_depth
        return self.embedding.word.weight if used and self.embedding is not None else None

    def units(self) -> dict[str, tuple[nn.Module, ...]]:
        """Return the modules of each unit, by the unit's name in the table, in forward order. Each is called once."""
        units: dict[str, tuple[nn.Module, ...]] = {}
        if isinstance(self.embedding, DecoderEmbedding):
            units["embedding"] = (self.embedding,)
        elif self.embedding is not None and self.lm_head is not None:
            # The modules whose calls take the copy of the weight.
            units["embedding"] = (self.lm_head,) if self.mtp is None else (self.mtp, self.lm_head)
        units |= {f"layers.{name}": (block,) for name, block in self.layers.items()}
        if self.final_norm is not None and self.lm_head is not None:
            ends = (self.final_norm, self.mtp, self.lm_head)
            units["head"] = tuple(module for module in ends if module is not None)
        return units

    def slice_by(self, slicing: Slicing) -> None:
        """Run layers in other slices from the next forward on."""
        self._arrangement.slicing = slicing

    @property
    def slicing(self) -> Slicing:
        """The slices of the sequence. Layers learn them from their context."""
        return self._arrangement.slicing

    def attentions(self) -> dict[str, SelfAttention]:
        """Return the attention of this rank's layers, that of multi-token prediction last, by its name in the model."""
        blocks = {f"layers.{name}": self.layers[name] for name in sorted(self.layers, key=int)}
        if self.mtp is not None:
            blocks["mtp.block"] = self.mtp.block
        return {f"{name}.attention": b.attention for name, b in blocks.items() if isinstance(b, DecoderBlock)}

    def correction_biases(self) -> list[Tensor]:
        """Return the routers' correction biases, one [E] buffer per mixture-of-experts layer, in layer order."""
        return [moe.router.correction_bias for moe in self.expert_layers().values()]

    def update_router_bias(self, load: Tensor | Sequence[Tensor], rate: float, keep: Tensor | None = None) -> None:
        """Update all correction biases in favor of less loaded experts (``move_correction_bias``).

        load: [E] counts of each layer over the global batch.
        """
        for bias, counts in zip(self.correction_biases(), load, strict=True):
            move_correction_bias(bias, counts, rate, keep)

    def _run(self, batch: dict[str, Tensor], valid_tokens: int | None) -> tuple[Tensor, list[MoeStats], Context]:
        """Run everything except the head. Return x [B, S(/mp), H] after the final norm, the statistics, the context."""
        assert self.final_norm is not None
        context = self._context(batch, valid_tokens)
        x, stats = self._run_layers(self._embed(batch), context, self.layers)
        return self.final_norm(x), stats, context

    def _sums(
        self, x: Tensor, batch: dict[str, Tensor], context: Context, word: Tensor | None
    ) -> tuple[dict[str, Tensor], list[MoeStats]]:
        """Return the loss sums for the final norm's output, and the statistics of multi-token prediction with experts.

        word: The embedding's weight if the head or multi-token prediction uses it.
        """
        assert self.lm_head is not None
        labels, weights = batch["labels"], batch.get("weights")
        targets = self._arrange(labels), None if weights is None else self._arrange(weights)
        if self.mtp is None:
            return {"lm": self.lm_head((x, *targets), tied=word)[0]}, []
        assert word is not None
        assert self.final_norm is not None
        # Under context parallelism the next token may be on another rank, so the data loader provides it.
        if self.cp.active:
            tokens, labels, weights = batch["tokens_ahead"], batch["labels_ahead"], batch.get("weights_ahead")
        else:
            tokens, labels = following(batch["tokens"], labels)
            weights = None if weights is None else of_next(weights)
        ahead = self._arrange(labels), None if weights is None else self._arrange(weights)
        mtp_hidden, stats = self.mtp(x, self._arrange(tokens), word, context)
        if self.mtp.final_norm is None:
            mtp_hidden = self.final_norm(mtp_hidden)
        lm, mtp = self.lm_head((x, *targets), (mtp_hidden, *ahead), tied=word)
        return {"lm": lm, "mtp": mtp}, [] if stats is None else [stats]

    def _embed(self, batch: dict[str, Tensor]) -> Tensor:
        assert self.embedding is not None
        return self.embedding(self._arrange(batch["tokens"]), self._arrange(batch["positions"]))

    def _run_layers(self, x: Tensor, context: Context, names: Iterable[str]) -> tuple[Tensor, list[MoeStats]]:
        y, stats = run_layers((self.layers[name] for name in names), x, context, self.recompute)
        return (join(y, context) if isinstance(y, Sliced) else y), stats

    def _arrange(self, x_BS: Tensor) -> Tensor:
        """Reorder positions so that each mp rank's chunk holds its part of every slice."""
        return self._arrangement.arrange(x_BS)

    def _context(self, batch: dict[str, Tensor], valid_tokens: int | None) -> Context:
        angles = {rope: embedding.angles(batch["positions"]) for rope, embedding in self._ropes.items()}
        valid = batch.get("valid")
        if valid_tokens is None:
            if self.cp.active:
                raise ValueError("valid_tokens is None: pass the number of valid tokens under context parallelism")
            valid_tokens = batch["tokens"].numel() if valid is None else int(valid.sum())
        own_valid = None if valid is None else own_sequence(self._arrange(valid), self.mp, self.sequence_parallel)
        places = batch.get("ends")
        samples, length = batch["tokens"].shape
        ranks, ends = self.cp.axis.size, None if places is None else places.tolist()
        mask = AttentionMask.of(samples, length * ranks, causal=True, ends=ends)
        plan, plans = (None, self.cp.slice_plans(mask)) if self.slicing.active else (self.cp.plan(mask), None)
        # Tiles need no tensors. Padding is after the text, which does not attend to it.
        tiled = (plan or plans) is not None and all(mask.within(window) is mask for window in self.sizes.windows)
        device_mask = DeviceMask(mask) if tiled else DeviceMask.of(mask, batch["tokens"].device, places)
        text = valid
        if valid is not None and self.cp.deals_heads:
            text = self._text(batch, length * ranks)
        if not self.slicing.active:
            return Context(device_mask, own_valid, valid_tokens, angles, plan=plan, text=text)
        parts = self.mp.size if self.sequence_parallel else 1
        slices = self.slicing.cut(length, parts)
        return Context(
            device_mask,
            own_valid,
            valid_tokens,
            angles,
            slicing=self.slicing,
            slices=slices,
            own_slices=tuple(slice(s.start // parts, s.stop // parts) for s in slices),
            whole_slices=tuple(slice(s.start * ranks, s.stop * ranks) for s in slices),
            slice_plans=plans,
            text=text,
        )

    def _text(self, batch: dict[str, Tensor], length: int) -> Tensor | None:
        """Return the positions that are not padding, [B, length] bool on all cp ranks, if attention counts its rows."""
        if not any(attention.row_statistic for attention in self.attentions().values()):
            return None
        places = torch.arange(length, device=batch["tokens"].device)
        return places < batch["lengths"].to(places.device, non_blocking=True)[:, None]
