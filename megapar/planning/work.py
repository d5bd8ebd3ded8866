"""What one micro-batch asks of a rank, layer by layer: what is kept, multiplied, moved and sent.

Bytes that are kept follow the operators' own backward formulas, in the forms that run on the device
(``core/device/ops.py``: a CPU has no fused RMS norm, for example).

Shape letters: t positions that products see, s positions outside them (s = t / mp under sequence parallelism),
H hidden, N query heads, G key-value heads, D head size, F MLP width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from megapar.core.context_parallel.layout import RING, ULYSSES
from megapar.core.device.kinds import rows_at_a_time
from megapar.core.pipeline.stages import Chunk
from megapar.model.decoder.sizes import DecoderSizes, MoeSizes
from megapar.model.ernie.sizes import ErnieSizes
from megapar.planning.experts import expert_parts
from megapar.planning.layout import Layout
from megapar.planning.messages import Messages
from megapar.planning.parts import INDEX, Message, Part, Product, Unit, norm_kept


@dataclass(frozen=True)
class Span:
    """What a layer's attention sees. segments: that a sample is cut into. memory: positions before a segment."""

    causal: bool
    segments: int = 1
    memory: int = 0


@dataclass(frozen=True)
class _Heads:
    """Attention in numbers. qkv, out: features that leave and enter the two products; scored: products per pair of
    positions; kept: bytes of queries, keys and values, with what turning and normalising them keeps."""

    N: float
    G: float
    D: int
    qkv: float
    out: float
    scored: float
    kept: float
    rope: bool
    products: tuple[Product, ...]


class Work:
    """The units of a layout's model; equal layers are made once."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.messages = Messages(layout)
        self._units: dict[tuple[MoeSizes | None, frozenset[str]], Unit] = {}

    @cached_property
    def embedding(self) -> Unit:
        """Words, and what is added to them."""
        a, sizes = self.layout, self.layout.sizes
        x = a.own * sizes.hidden_size * a.item
        kept = float(INDEX * a.own)
        if isinstance(sizes, ErnieSizes):
            kept += x + 2.0 * a.wide * a.own + 3 * INDEX * a.own
        elif sizes.position_embedding_type == "learned":
            kept += INDEX * a.own
        kept += self._dropped(x)
        sent = self.messages.leave()
        return Unit("embedding", (Part("embedding", kept, moved=4 * x, messages=sent, transient=2 * x),), 0.0)

    @cached_property
    def dense(self) -> Unit:
        """A layer with a dense feed-forward."""
        return self._layer(None, self.layout.assumed.again(None))

    def layer(self, number: int) -> Unit:
        """Layer ``number``."""
        sizes = self.layout.sizes
        moe = sizes.moe_at(number) if isinstance(sizes, DecoderSizes) else None
        again = self.layout.assumed.again(number)
        if (moe, again) not in self._units:
            self._units[moe, again] = self._layer(moe, again)
        return self._units[moe, again]

    def units_of(self, chunk: Chunk) -> list[Unit]:
        """What a chunk runs, in forward order."""
        units = [self.embedding] if chunk.first else []
        units += [self.layer(number) for number in chunk.layers]
        return units + ([self.head] if chunk.last else [])

    def input_of(self, chunk: Chunk) -> float:
        """Bytes of what a chunk takes from the one before it, in one micro-batch."""
        return self.units_of(chunk)[0].input

    @cached_property
    def head(self) -> Unit:
        """Final norm, vocabulary product, loss."""
        a, sizes = self.layout, self.layout.sizes
        if isinstance(sizes, ErnieSizes):
            # At the masked positions only, 15 % unless asked otherwise.
            parts = self.word_head(sizes.hidden_size, a.tokens * a.config.data.mlm_probability)
            return Unit("head", (self.leaving(sizes.hidden_size), *parts), a.item * a.own * sizes.hidden_size)
        norm = Part("final norm", self._norm_kept() + a.item * a.own * sizes.hidden_size)
        parts = (norm, self.leaving(sizes.hidden_size), *self._vocabulary(a.tokens))
        if sizes.mtp_depth:  # one more block and head, behind a product of two joined inputs
            parts = (*parts, self._joined(), *self.dense.parts, *parts)
        return Unit("head", parts, a.item * a.own * sizes.hidden_size)

    def leaving(self, width: int) -> Part:
        """Where positions are cut, the whole sequence of so many features on every rank of mp."""
        a, sizes = self.layout, self.layout.sizes
        if not a.cut:
            return Part("leaving")
        whole = a.item * a.tokens * width
        sent = [self.messages.message("mp", "all_gather", whole, "forward")]
        if isinstance(sizes, DecoderSizes):
            sent.append(self.messages.message("mp", "reduce_scatter", whole, "backward"))
        return Part("leaving", whole, messages=tuple(sent))

    def word_head(self, features: int, rows: float) -> tuple[Part, ...]:
        """A transform of so many features, gelu, norm, and the vocabulary, at ``rows`` positions."""
        a, H = self.layout, self.layout.sizes.hidden_size
        # The transform's input, gelu's and the norm's, and what comes out of it while the vocabulary runs.
        kept = a.item * rows * (features + 3 * H) + 2 * a.wide * rows
        return Part("transform", kept, (Product(rows, features, H),)), *self._vocabulary(rows)

    def _vocabulary(self, rows: float) -> tuple[Part, ...]:
        """Logits and loss. Gradients are made in the forward: of the rows, and of the weight in max(fp32, dtype)."""
        a, H, V = self.layout, self.layout.sizes.hidden_size, self.layout.vocabulary
        e, w, weight = a.item, a.wide, V * H
        chunk = rows_at_a_time(ceil(rows), w * V, a.kind.of.logits_bytes) * V
        widened = w * chunk if e < w else 0
        kept = e * rows * H + e * weight
        product = e * weight if e < w and a.kind.kernels != "cuda" else 0  # where it does not add to the sum by itself
        making = e * rows * H + w * weight + product + e * chunk + widened
        transient = max(making - kept, e * rows * H + e * weight)
        sent: list[Message] = []
        if isinstance(a.sizes, ErnieSizes) or not a.cut:
            sent += self.messages.copied(e * rows * H, "backward")
        if a.config.grid.mp > 1:
            sent.append(self.messages.message("mp", "all_reduce", 3 * w * rows, "forward"))
        # Of the three products of the vocabulary two are made in the forward already; all three are counted as usual.
        part = Part("head", kept, (Product(rows, H, V),), moved=4 * w * rows * V, transient=transient)
        return part, Part("head messages", messages=tuple(sent))

    def _joined(self) -> Part:
        """In front of the multi-token prediction block: two inputs, normalised, and their product."""
        a, H = self.layout, self.layout.sizes.hidden_size
        x = a.item * a.own * H
        product = Product(a.own, 2 * H, H)
        return Part("join", 2 * self._norm_kept() + 2 * x, (product,), moved=8 * x, messages=self.messages.leave())

    # Layers

    def _layer(self, moe: MoeSizes | None, again: frozenset[str]) -> Unit:
        a, sizes = self.layout, self.layout.sizes
        parts = [*self.attention(Span(isinstance(sizes, DecoderSizes)))]
        if moe is not None:
            parts += [self._norm(), *expert_parts(a, moe)]
            if moe.shared_experts:
                keeps = a.item < a.wide  # otherwise the router has kept the same tensor
                parts += self._mlp(moe.shared_width, gated=moe.gated, stored=keeps)
            x = a.item * a.own * sizes.hidden_size
            parts.append(Part("residual", self._dropped(x), moved=3 * x))
        else:
            parts += self.feed_forward()
        # What an assumed recompute of operators leaves of them.
        parts = [replace(part, kept=0.0, again=True) if part.name in again else part for part in parts]
        x = a.item * a.own * sizes.hidden_size
        return Unit("moe" if moe else "dense", tuple(parts), x)

    def feed_forward(self) -> list[Part]:
        """Norm and MLP of a dense layer."""
        sizes = self.layout.sizes
        gated = isinstance(sizes, DecoderSizes) and sizes.gated
        x = self.layout.item * self.layout.own * sizes.hidden_size
        return [self._norm(), *self._mlp(sizes.ffn_hidden_size, gated=gated, dropped=self._dropped(x))]

    def _norm(self) -> Part:
        """ERNIE normalises behind the sum: its norm keeps the sum, and its output is the next half's input."""
        a, H = self.layout, self.layout.sizes.hidden_size
        return Part(
            "norm", self._norm_kept(), moved=3 * a.item * a.own * H, transient=(a.wide + a.item) * 2 * a.own * H
        )

    def _norm_kept(self) -> float:
        """What one norm over the hidden dim keeps, without its output."""
        a, sizes = self.layout, self.layout.sizes
        kind = sizes.normalization if isinstance(sizes, DecoderSizes) else "layernorm"
        return norm_kept(a, a.own, sizes.hidden_size, kind)

    def attention(self, span: Span) -> list[Part]:
        """Norm, queries, keys and values, the core, and the product behind it."""
        a, e, t, H = self.layout, self.layout.item, self.layout.tokens, self.layout.sizes.hidden_size
        heads, x = self._heads(), self.layout.item * self.layout.own * self.layout.sizes.hidden_size
        return [
            self._norm(),
            Part(
                "qkv",
                a.stored(a.own * H) + heads.kept,
                heads.products,
                moved=x + heads.kept * (3 if heads.rope else 1),
                messages=self.messages.column(e * t * H),
                transient=e * t * heads.qkv + 2 * x,
            ),
            self._core(heads, span),
            Part(
                "proj",
                self._dropped(x),
                (Product(t, round(heads.out), H),),
                moved=3 * x,
                messages=self.messages.row(e * t * H),
                transient=e * t * heads.out + 2 * x,
            ),
        ]

    def _heads(self) -> _Heads:
        a, sizes = self.layout, self.layout.sizes
        t, H, e, mp = a.tokens, sizes.hidden_size, a.item, a.config.grid.mp
        N, D = sizes.num_attention_heads / mp, sizes.head_dim
        if not isinstance(sizes, DecoderSizes):
            product = Product(t, H, round(3 * N * D))
            return _Heads(N, N, D, 3 * N * D, N * D, 2 * N * D, 3 * e * t * N * D, False, (product,))
        G, rope = sizes.num_query_groups / mp, sizes.position_embedding_type == "rope"
        qkv, out, scored = (N + 2 * G) * D, N * D, 2 * N * D
        products: tuple[Product, ...] = (Product(t, H, round(qkv)),)
        latent = a.assumed.latent
        if latent is not None:
            per = latent.plain + latent.rotated
            qkv = N * per + N * (latent.plain + latent.value) + (latent.query + latent.shared + latent.rotated)
            out, scored = N * latent.value, N * (per + latent.value)
            products = (
                Product(t, H, latent.query),
                Product(t, latent.query, round(N * per)),
                Product(t, H, latent.shared + latent.rotated),
                Product(t, latent.shared, round(N * (latent.plain + latent.value))),
            )
        kept = e * t * qkv
        if rope:
            kept += e * t * (N + G) * D  # turned queries and keys; values are a view of the product's output
            if a.kind.kernels == "cpu":  # and their angles as complex numbers, once for each
                kept += 2 * a.wide * t * D
        elif sizes.queries_per_group > 1:
            kept += e * t * N * D
        if sizes.qk_norm:
            kept += norm_kept(a, t * N, D, "rmsnorm") + norm_kept(a, t * G, D, "rmsnorm") + e * t * N * D
        return _Heads(N, G, D, qkv, out, scored, kept, rope, products)

    def _core(self, heads: _Heads, span: Span) -> Part:
        """softmax(q k^T) v."""
        a, sizes = self.layout, self.layout.sizes
        t, e, N, G, D = a.tokens, a.item, heads.N, heads.G, heads.D
        core = e * t * heads.out + 4 * t * N
        length, behind = sizes.seq_length / span.segments, span.segments - 1
        seen = length * (0.5 if span.causal else 1.0)
        if behind:  # later segments see a memory under a mask; keys and values are put together for them
            seen = (seen + behind * (length + span.memory)) / span.segments
            joined = t / span.segments * behind * (1 + span.memory / length)
            core += 2 * e * joined * N * D + e * behind * length * (length + span.memory)
        if (sizes.attention_dropout and a.kind.kernels == "cpu") or not sizes.use_flash_attn:
            core += self._scores_kept(t, N, length + (span.memory if behind else 0))
        selective = a.config.recompute.recompute_granularity == "selective"
        cp, algorithm = a.config.grid.cp, a.config.parallel.context_parallel_algo
        blockwise = cp > 1 and algorithm != ULYSSES
        kept = e * t * heads.out if selective and not blockwise else core
        transient = e * t * (heads.qkv + heads.out) + (core - kept)
        if blockwise:  # sums in fp32; columns and their gradients, of two ranks at a time or of all
            columns = 2 * t * G * D * (e + a.wide)
            transient += a.wide * t * heads.out + columns * (2 if algorithm == RING else cp + 1)
            if a.config.ampipe.ampipe_degree > 1:
                kept += 2 * e * cp * t * G * D  # later slices need the columns of all ranks
        elif cp > 1:
            kept += e * t * heads.out  # what attention keeps is not what travels
        sent = self.messages.context(t * N * D, t * G * D)
        return Part("core", kept, (), 2.0 * t * heads.scored * seen, core + heads.kept, sent, transient)

    def _scores_kept(self, t: float, N: float, length: float) -> float:
        """Without a fused kernel: softmax's output, the dropped weights with their mask."""
        kept = self.layout.item * t * N * length
        if self.layout.sizes.attention_dropout:
            kept += (self.layout.item + 1) * t * N * length
        return kept

    def _mlp(self, width: int, *, gated: bool, dropped: float = 0.0, stored: bool = True) -> list[Part]:
        a, sizes = self.layout, self.layout.sizes
        t, s, H, e, F = a.tokens, a.own, sizes.hidden_size, a.item, width / a.config.grid.mp
        x, columns = e * s * H, F * (2 if gated else 1)
        selective = a.config.recompute.recompute_granularity == "selective"
        activated = 0.0 if selective else (e * t * F if gated else 0.0) + a.stored(t * F)
        # gelu's backward adds one tensor: the incoming gradient takes the place of the output, where that was kept.
        inside = columns + 2 * F if gated else F if activated else 2 * F
        return [
            Part(
                "up",
                (a.stored(s * H) if stored else 0.0) + e * t * columns,
                (Product(t, H, round(columns), mlp=True),),
                moved=x + e * t * columns,
                messages=self.messages.column(e * t * H),
                transient=e * t * columns + 2 * x,
            ),
            Part("activation", activated, moved=e * t * (columns + F), transient=e * t * inside + x),
            Part(
                "down",
                dropped,
                (Product(t, round(F), H, mlp=True),),
                moved=3 * x,
                messages=self.messages.row(e * t * H),
                transient=e * t * F + 2 * x,
            ),
        ]

    def _dropped(self, x: float) -> float:
        """A dropout's mask, a byte per element."""
        return x / self.layout.item if self.layout.sizes.hidden_dropout else 0.0
