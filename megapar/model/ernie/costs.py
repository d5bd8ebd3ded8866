"""Costs of an ERNIE encoder on a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from megapar.core.attention_mask import AttentionMask
from megapar.model.attention.kind import AttentionShape
from megapar.model.attention.kinds import kind_of
from megapar.model.cost.model_cost import FORWARD_AND_BACKWARD, INDEX_BYTES, MASKED_PERCENT, ModelCost, OpCost, UnitCost
from megapar.model.cost.operators import Operators
from megapar.model.cost.rank_view import RankView
from megapar.model.ernie.sizes import ErnieSizes


class ErnieCost(ModelCost):
    """Costs of an encoder's units."""

    sizes: ErnieSizes

    def __init__(self, sizes: ErnieSizes, view: RankView) -> None:
        super().__init__(sizes, view)
        self._operators = Operators(
            view, sizes.hidden_size, normalization="layernorm", dropout=bool(sizes.hidden_dropout)
        )
        self._layers: dict[frozenset[str], UnitCost] = {}

    @cached_property
    def embedding(self) -> UnitCost:
        """Cost of the word, position, sentence and task embeddings, and a norm."""
        return self._operators.embedding(self._embedding_kept)

    @property
    def _embedding_kept(self) -> float:
        """Bytes that positions, sentences, tasks and the norm keep."""
        s, w = self.view.local_tokens, self.view.wide_bytes
        return self._operators.hidden_bytes + 2.0 * w * s + 3 * INDEX_BYTES * s

    def layer(self, number: int) -> UnitCost:
        """Return the cost of layer ``number``."""
        recomputed = self.view.recomputed(number)
        if recomputed not in self._layers:
            parts = [
                replace(part, kept=0.0, recomputed=True) if part.name in recomputed else part for part in self.block()
            ]
            x = self._operators.hidden_bytes
            self._layers[recomputed] = UnitCost("dense", tuple(parts), x, x)
        return self._layers[recomputed]

    @cached_property
    def attention(self) -> Sequence[OpCost]:
        """See ``ModelCost``."""
        return self._attention()

    @cached_property
    def head(self) -> UnitCost:
        """Cost of the masked language model's head at the masked positions. The sentence-order head is negligible."""
        ops, sizes = self._operators, self.sizes
        words = self.masked_word_head(sizes.hidden_size, self.view.tokens * self.view.masked_share)
        return UnitCost("head", (ops.leaving(sizes.hidden_size, scatters=False), *words), ops.hidden_bytes)

    def masked_word_head(self, features: int, rows: float) -> tuple[OpCost, ...]:
        """Return the operators of a vocabulary head at ``rows`` positions of ``features`` features."""
        return self._operators.masked_word_head(features, rows, self.sizes.vocab_size)

    def block(self, masks: tuple[AttentionMask, ...] = ()) -> list[OpCost]:
        """Return the operators of a layer. masks: of each segment of a sample; none: all positions attend to all."""
        ops, sizes = self._operators, self.sizes
        mlp = ops.mlp(sizes.ffn_hidden_size, gated=False, dropped=ops.dropped())
        return [*self._attention(masks), ops.norm(), *mlp]

    @classmethod
    def forward_flops(cls, sizes: ErnieSizes, seq_length: int) -> list[int]:
        """See ``ModelCost``. 15 % of the positions are masked."""
        layers = cls.layer_flops(sizes, seq_length)
        masked = seq_length * MASKED_PERCENT // 100
        return [0, *layers, cls._pooled_flops(sizes) + masked * cls.word_flops(sizes)]

    @classmethod
    def step_flops(cls, sizes: ErnieSizes, sequences: int, seq_length: int, predicted: int | None = None) -> int:
        """See ``ModelCost``. Without ``predicted``, 15 % of all positions are masked."""
        masked = sequences * seq_length * MASKED_PERCENT // 100 if predicted is None else predicted
        sequence = sum(cls.layer_flops(sizes, seq_length)) + cls._pooled_flops(sizes)
        return FORWARD_AND_BACKWARD * (sequences * sequence + masked * cls.word_flops(sizes))

    @staticmethod
    def layer_flops(sizes: ErnieSizes, seq_length: int) -> list[int]:
        """Return the forward FLOPs of one sequence for each layer."""
        cost = ErnieCost(replace(sizes, seq_length=seq_length), RankView.alone(seq_length))
        return [cost.layer(number).flops for number in range(sizes.num_layers)]

    @staticmethod
    def word_flops(sizes: ErnieSizes) -> int:
        """Return the forward FLOPs of the masked-word head at one position."""
        cost = ErnieCost(sizes, RankView.alone(1))
        return round(sum(operator.flops for operator in cost.masked_word_head(sizes.hidden_size, 1)))

    @staticmethod
    def _pooled_flops(sizes: ErnieSizes) -> int:
        """Return the forward FLOPs of the sentence-order head for one sequence: a pooler and two classes."""
        return 2 * sizes.hidden_size * (sizes.hidden_size + 2) if sizes.sop else 0

    def _attention(self, masks: tuple[AttentionMask, ...] = ()) -> list[OpCost]:
        sizes = self.sizes.attention
        masks = masks or (AttentionMask(1, self.view.seq_length, causal=False),)
        return kind_of(sizes).costs(self._operators, AttentionShape(sizes, masks))
