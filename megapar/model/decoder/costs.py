"""Costs of a decoder on a rank: blocks with a dense MLP or experts, multi-token prediction, head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from megapar.core.attention_mask import AttentionMask
from megapar.model.attention.kind import AttentionShape
from megapar.model.attention.kinds import kind_of
from megapar.model.cost.model_cost import INDEX_BYTES, ModelCost, OpCost, Product, UnitCost
from megapar.model.cost.operators import Operators
from megapar.model.cost.rank_view import RankView
from megapar.model.decoder.sizes import DecoderSizes
from megapar.model.sizes import GEGLU
from megapar.moe.expert_costs import expert_costs, held_bytes, in_flight
from megapar.moe.sizes import MEGATRON_MOE, MoeSizes


class DecoderCost(ModelCost):
    """Costs of a decoder's units."""

    sizes: DecoderSizes

    def __init__(self, sizes: DecoderSizes, view: RankView) -> None:
        super().__init__(sizes, view)
        self._operators = Operators(
            *(view, sizes.hidden_size),
            normalization=sizes.normalization,
            dropout=bool(sizes.hidden_dropout),
            wide_norms=sizes.apply_layernorm_1p,
        )
        self._kinds: dict[tuple[MoeSizes | None, int, bool, frozenset[str]], UnitCost] = {}
        self._layers: dict[int, UnitCost] = {}

    @property
    def tied(self) -> bool:
        return self.sizes.tie_embeddings

    @property
    def context(self) -> float:
        """See ``ModelCost``: sine and cosine of each rope, half of a head's features each."""
        blocks = range(self.sizes.num_layers + self.sizes.mtp_depth)
        ropes = len({self.sizes.rope_at(layer) for layer in blocks} - {None})
        return self.view.wide_bytes * self.view.tokens * self.sizes.attention.angles_dim * ropes

    @cached_property
    def embedding(self) -> UnitCost:
        """Cost of the word embedding, and of the position embedding if positions are learned."""
        learned = self.sizes.position_embedding_type == "learned"
        embedding = self._operators.embedding(INDEX_BYTES * self.view.local_tokens if learned else 0)
        if self.sizes.embedding_factor == 1.0:
            return embedding
        multiplier = OpCost("multiplier", moved=2 * self._operators.hidden_bytes)
        return replace(embedding, operators=(*embedding.operators, multiplier))

    def layer(self, number: int) -> UnitCost:
        """Return the cost of layer ``number``."""
        if number not in self._layers:
            key = *self._kind(number), self.view.recomputed(number)
            if key not in self._kinds:
                self._kinds[key] = self._layer(*key)
            self._layers[number] = self._kinds[key]
        return self._layers[number]

    @property
    def attention(self) -> Sequence[OpCost]:
        return self._attention(0, self.sizes.position_embedding_type == "rope")

    @cached_property
    def head(self) -> UnitCost:
        """Cost of final norm, vocabulary, losses and multi-token prediction."""
        operators, view, x = self._operators, self.view, self._operators.hidden_bytes
        head = (
            OpCost(
                "final norm",
                operators.norm_kept() + x,
                moved=0.0 if self.sizes.logits_scaling == 1.0 else 2 * x,
                transient=operators.norm_transient() - x,  # its output is gone
            ),
            operators.leaving(self.sizes.hidden_size, scatters=True),
            *operators.vocabulary(view.tokens, self.sizes.vocab_size, replicated=not view.splits_sequence),
        )
        if self.sizes.mtp_depth:  # one more block and head, after a projection of two concatenated inputs
            last = self.sizes.num_layers
            block = self._layer(*self._kind(last), view.recomputed(None))
            head = (*head, self._join(), *block.operators, *head)
        return UnitCost("head", head, x)

    @classmethod
    def forward_flops(cls, sizes: DecoderSizes, seq_length: int) -> list[int]:
        """See ``ModelCost``. No token is dropped."""
        if sizes.moe is not None:
            sizes = replace(sizes, moe=replace(sizes.moe, kind=MEGATRON_MOE))
        return super().forward_flops(sizes, seq_length)

    def _kind(self, number: int) -> tuple[MoeSizes | None, int, bool]:
        """Return what the costs of a layer depend on: its experts, its window, and whether it has rotary positions."""
        return self.sizes.moe_at(number), self.sizes.window_at(number), self.sizes.rope_at(number) is not None

    def _attention(self, window: int, rotary: bool) -> list[OpCost]:
        """Return the operators of attention in a window of this many keys; 0: of all."""
        mask = AttentionMask(1, self.view.seq_length, self.sizes.attention.causal).within(window)
        shape = AttentionShape(self.sizes.attention, (mask,), rotary)
        return kind_of(shape.sizes).costs(self._operators, shape)

    def _layer(self, moe: MoeSizes | None, window: int, rotary: bool, recomputed: frozenset[str]) -> UnitCost:
        sizes, ops = self.sizes, self._operators
        placement, arriving = sizes.norm_placement, 0.0
        norm, *parts = self._attention(window, rotary)
        inputs, outputs = ([norm] if placement in kinds else [] for kinds in (("input", "both"), ("output", "both")))
        parts = [*inputs, *parts, *outputs, *inputs]
        if moe is not None:
            parts += expert_costs(self.view, moe)
            if moe.shared_width:
                # Otherwise the router keeps the same tensor.
                fused = self.view.fused_router and not moe.linear_bias
                stored = self.view.item_bytes < self.view.wide_bytes and not fused
                parts += ops.mlp(moe.shared_width, gated=moe.gated, stored=stored, item=self.view.expert_item_bytes)
            if moe.shared_gate:
                parts.append(self._shared_gate())
            arriving = in_flight(self.view, moe)
            parts.append(
                OpCost("residual", ops.dropped(), moved=3 * ops.hidden_bytes, working=held_bytes(self.view, moe))
            )
        else:
            fused = sizes.activation != GEGLU
            parts += ops.mlp(sizes.ffn_hidden_size, gated=sizes.gated, dropped=ops.dropped(), fused=fused)
        parts += outputs
        if sizes.residual_multiplier != 1.0:
            parts.append(OpCost("multiplier", moved=4 * ops.hidden_bytes))
        # Operators that the plan assumes to be recomputed keep nothing.
        parts = [replace(part, kept=0.0, recomputed=True) if part.name in recomputed else part for part in parts]
        itself = ops.norm_input_kept if inputs else ops.hidden_bytes
        return UnitCost("moe" if moe else "dense", tuple(parts), ops.hidden_bytes, itself, arriving)

    def _shared_gate(self) -> OpCost:
        """Return the cost of the gate of the shared experts, whose output its backward needs."""
        s, e, x = self.view.local_tokens, self.view.item_bytes, self._operators.hidden_bytes
        gate = Product(s, self.sizes.hidden_size, 1, wide=True)
        return OpCost("shared gate", x + e * s, (gate,), moved=3 * x, transient=x)

    def _join(self) -> OpCost:
        """Return the cost of the multi-token prediction block's input: two norms and a projection."""
        ops, view, H = self._operators, self.view, self.sizes.hidden_size
        product = Product(view.local_tokens, 2 * H, H)
        kept = 2 * ops.norm_kept() + 2 * ops.hidden_bytes
        return OpCost("join", kept, (product,), moved=8 * ops.hidden_bytes, sent=ops.from_vocabulary())
