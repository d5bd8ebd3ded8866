"""What one micro-batch asks of a rank, layer by layer: what is kept, multiplied, moved and sent.

Every operator of the model is one ``Part``; the memory, the traffic and the time of a plan are sums over parts, so that
they cannot disagree about the model. Bytes that are kept follow the operators' own backward formulas, in the forms that
run on the device (``core/device/ops.py``: a CPU has no fused RMS norm, for example).

Shape letters: t positions that products see, s positions outside them (s = t / mp under sequence parallelism),
H hidden, N query heads, G key-value heads, D head size, F MLP width, E experts, k choices, R rows of a rank's experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megapar.core.context_parallel.layout import RING, ULYSSES
from megapar.model.sizes import DecoderSizes, ErnieSizes
from megapar.moe.sizes import MoeSizes
from megapar.planning.layout import Layout

INDEX = 8  # bytes of an int64
LOGITS_PER_CHUNK = 1 << 24  # of model/loss.py


@dataclass(frozen=True)
class Product:
    """A matrix product [rows, inner] x [inner, columns] in the forward; groups of them run as one kernel. fp8: may."""

    rows: float
    inner: int
    columns: int
    groups: int = 1
    mlp: bool = False

    @property
    def flops(self) -> float:
        """Of the forward."""
        return 2.0 * self.rows * self.inner * self.columns


@dataclass(frozen=True)
class Message:
    """What a rank sends in one micro-batch. axis, kind: as the ledger of a run names them. phase: forward or backward.
    hidden: travels under a product of the same layer."""

    axis: str
    kind: str
    bytes: float
    phase: str
    hidden: bool = False


@dataclass(frozen=True)
class Part:
    """One operator. kept: bytes that live until its backward. moved: bytes that it reads and writes in the forward.
    scores: FLOPs of attention's core. transient: bytes that live only while its backward runs."""

    name: str
    kept: float = 0.0
    products: tuple[Product, ...] = ()
    scores: float = 0.0
    moved: float = 0.0
    messages: tuple[Message, ...] = ()
    transient: float = 0.0


@dataclass(frozen=True)
class Unit:
    """A layer, the embedding or the head. moe: with experts. input: bytes of what comes in."""

    name: str
    parts: tuple[Part, ...]
    input: float
    moe: bool = False

    @cached_property
    def kept(self) -> float:
        """Bytes that live from the forward to the backward."""
        return sum(part.kept for part in self.parts)

    @cached_property
    def transient(self) -> float:
        """The most that the backward of one part needs beside what is kept."""
        return max((part.transient for part in self.parts), default=0.0)

    def messages(self) -> list[Message]:
        """Of all parts."""
        return [message for part in self.parts for message in part.messages]


class Work:
    """The units of a layout's model; equal layers are made once."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._routed: dict[MoeSizes, Unit] = {}

    @cached_property
    def embedding(self) -> Unit:
        """Words, and what is added to them."""
        a, sizes = self.layout, self.layout.sizes
        x = a.own * sizes.hidden_size * a.item
        kept, sent = float(INDEX * a.own), self._leave()
        if isinstance(sizes, ErnieSizes):
            kept += x + _statistics(a) + 3 * INDEX * a.own
        elif sizes.position_embedding_type == "learned":
            kept += INDEX * a.own
        kept += self._dropped(x)
        return Unit("embedding", (Part("embedding", kept, moved=4 * x, messages=sent, transient=2 * x),), 0.0)

    @cached_property
    def dense(self) -> Unit:
        """A layer with a dense feed-forward."""
        return self._layer(None)

    @cached_property
    def branches(self) -> Unit:
        """A layer behind the universal ones of ERNIE 3.0: one of each of its two branches."""
        branch = self.layout.sizes.branch  # type: ignore[union-attr]
        unit = Work(replace(self.layout, of=branch, _cuts={}, _rows={})).dense
        return Unit(unit.name, (*unit.parts, *unit.parts), unit.input)

    def layer(self, number: int) -> Unit:
        """Layer ``number``."""
        sizes = self.layout.sizes
        if number >= sizes.num_layers:
            return self.branches
        moe = sizes.moe_at(number) if isinstance(sizes, DecoderSizes) else None
        if moe is None:
            return self.dense
        if moe not in self._routed:
            self._routed[moe] = self._layer(moe)
        return self._routed[moe]

    @cached_property
    def head(self) -> Unit:
        """Final norm, vocabulary product, loss."""
        a, sizes = self.layout, self.layout.sizes
        H, V, e, w = sizes.hidden_size, self.layout.vocabulary, a.item, a.wide
        ernie = isinstance(sizes, ErnieSizes)
        # A decoder's head runs everywhere; ERNIE's at the masked positions, 15 % unless asked otherwise.
        rows = a.tokens * self.layout.config.data.mlm_probability if ernie else a.tokens
        weight = V * H
        chunk = min(rows, max(1, LOGITS_PER_CHUNK // V)) * V
        widened = w * chunk if e < w else 0
        # The gradients are made in the forward: of the rows, and of the weight in max(fp32, dtype).
        kept = e * rows * H + e * weight
        making = e * rows * H + w * weight + max(e * weight + e * chunk + widened, e * chunk + widened)
        transient = max(making - kept, e * rows * H + e * weight)
        norm = 0.0 if ernie else self._norm_kept() + e * a.own * H
        messages: list[Message] = []
        if ernie:
            norm = rows * H * e * 4 + 2 * w * rows  # transform's input and output, gelu's, the norm's input
            if a.cut:
                norm += e * a.tokens * H
                messages += [self._message("mp", "all_gather", e * a.tokens * H, phase) for phase in ("forward",)]
            messages += self._copied(e * rows * H, "backward")
        elif a.cut:
            norm += e * a.tokens * H
            messages.append(self._message("mp", "all_gather", e * a.tokens * H, "forward"))
            messages.append(self._message("mp", "reduce_scatter", e * a.tokens * H, "backward"))
        else:
            messages += self._copied(e * rows * H, "backward")
        if self._mp > 1:
            messages.append(self._message("mp", "all_reduce", 3 * w * rows, "forward"))
        products = [Product(rows, H, V)]
        if ernie:
            products.append(Product(rows, H, H))
        # Of the three products of the vocabulary two are made in the forward already; all three are counted as usual.
        part = Part("head", norm + kept, tuple(products), moved=4 * w * rows * V, transient=transient)
        sent = Part("head messages", messages=tuple(messages))
        parts: tuple[Part, ...] = (part, sent)
        if (
            isinstance(sizes, DecoderSizes) and sizes.mtp_depth
        ):  # one more block and head, behind a product of two joined inputs
            join = Part(
                "join",
                2 * self._norm_kept() + 2 * e * a.own * H,
                (Product(a.own, 2 * H, H),),
                moved=8 * e * a.own * H,
                messages=self._leave(),
            )
            parts = (part, sent, join, *self.dense.parts, part, sent)
        return Unit("head", parts, e * a.own * H)

    # Layers

    @property
    def _mp(self) -> int:
        return self.layout.config.grid.mp

    def _layer(self, moe: MoeSizes | None) -> Unit:
        a, sizes = self.layout, self.layout.sizes
        parts = [*self._attention()]
        if moe is not None:
            parts += self._experts(moe)
        else:
            gated = isinstance(sizes, DecoderSizes) and sizes.gated
            parts += self._mlp(sizes.ffn_hidden_size, gated=gated)
        if a.assumed.operators:
            parts = [self._again(part) for part in parts]
        x = a.item * a.own * sizes.hidden_size
        return Unit("moe" if moe else "dense", tuple(parts), x, moe is not None)

    def _again(self, part: Part) -> Part:
        """What an assumed recompute of operators leaves of it."""
        names = self.layout.assumed.operators
        if part.name not in names:
            return part
        return Part(part.name, 0.0, part.products, part.scores, 2 * part.moved, part.messages, part.transient)

    def _stored(self, elements: float) -> float:
        """Bytes of an input that a product keeps."""
        return elements * (1 if self.layout.assumed.fp8_activations else self.layout.item)

    def _norm_kept(self) -> float:
        """What one norm over the hidden dim keeps, without its output."""
        a, sizes = self.layout, self.layout.sizes
        return norm_kept(a, a.own, sizes.hidden_size, _normalization(sizes))

    def _attention(self) -> list[Part]:
        a, sizes = self.layout, self.layout.sizes
        t, s, H, e, mp = a.tokens, a.own, sizes.hidden_size, a.item, self._mp
        x = e * s * H
        N, D = sizes.num_attention_heads / mp, sizes.head_dim
        G = (sizes.num_query_groups if isinstance(sizes, DecoderSizes) else sizes.num_attention_heads) / mp
        rope = isinstance(sizes, DecoderSizes) and sizes.position_embedding_type == "rope"
        causal = isinstance(sizes, DecoderSizes)
        latent = a.assumed.latent
        width_qkv, width_out, scored = (N + 2 * G) * D, N * D, 2 * N * D
        products = [Product(t, H, round(width_qkv))]
        if latent is not None:
            per = latent.plain + latent.rotated
            width_qkv = N * per + N * (latent.plain + latent.value) + (latent.query + latent.shared + latent.rotated)
            width_out, scored = N * latent.value, N * (per + latent.value)
            products = [
                Product(t, H, latent.query),
                Product(t, latent.query, round(N * per)),
                Product(t, H, latent.shared + latent.rotated),
                Product(t, latent.shared, round(N * (latent.plain + latent.value))),
            ]
        kept_qkv = e * t * width_qkv
        if rope:
            kept_qkv += e * t * (N + G) * D  # turned queries and keys; values are a view of the product's output
        elif isinstance(sizes, DecoderSizes) and sizes.queries_per_group > 1:
            kept_qkv += e * t * N * D
        if isinstance(sizes, DecoderSizes) and sizes.qk_norm:
            kept_qkv += norm_kept(a, t * N, D, "rmsnorm") + norm_kept(a, t * G, D, "rmsnorm") + e * t * N * D
        length = sizes.seq_length
        core = e * t * width_out + 4 * t * N
        if (sizes.attention_dropout and a.kind.kernels == "cpu") or not sizes.use_flash_attn:
            core += self._scores_kept(t, N, G, D, length, rope)
        scores = 2.0 * t * scored * length * (0.5 if causal else 1.0)
        selective = a.config.recompute.recompute_granularity == "selective"
        cp, algorithm = a.config.grid.cp, a.config.parallel.context_parallel_algo
        blockwise = cp > 1 and algorithm != ULYSSES
        kept_core = e * t * width_out if selective and not blockwise else core
        backward_core = e * t * (width_qkv + width_out) + (core - kept_core)
        if blockwise:  # sums in fp32; columns and their gradients, of two ranks at a time or of all
            columns = 2 * t * G * D * (e + a.wide)
            backward_core += a.wide * t * width_out + columns * (2 if algorithm == RING else cp + 1)
            if a.config.ampipe.ampipe_degree > 1:
                kept_core += 2 * e * cp * t * G * D  # later slices need the columns of all ranks
        elif cp > 1:
            kept_core += e * t * width_out  # what attention keeps is not what travels
        # ERNIE normalises behind the sum: its norm keeps the sum, and its output is the next half's input.
        norm = Part("norm", self._norm_kept(), moved=3 * x, transient=(a.wide + e) * 2 * s * H)
        return [
            norm,
            Part(
                "qkv",
                self._stored(s * H) + kept_qkv,
                tuple(products),
                moved=x + kept_qkv * (3 if rope else 1),
                messages=self._column(e * t * H),
                transient=e * t * width_qkv + 2 * x,
            ),
            Part(
                "core",
                kept_core,
                scores=scores,
                moved=core + kept_qkv,
                messages=self._context(t * N * D, t * G * D),
                transient=backward_core,
            ),
            Part(
                "proj",
                self._dropped(x),
                (Product(t, round(width_out), H),),
                moved=3 * x,
                messages=self._row(e * t * H),
                transient=e * t * width_out + 2 * x,
            ),
        ]

    def _scores_kept(self, t: float, N: float, G: float, D: int, length: int, rope: bool) -> float:
        """Without a fused kernel: softmax's output, the dropped weights with their mask, repeated keys and values."""
        a = self.layout
        square = t * N * length
        kept = a.item * square
        if a.sizes.attention_dropout:
            kept += (a.item + 1) * square
        return kept

    def _mlp(self, width: int, *, gated: bool, norm: bool = True, stored: bool = True) -> list[Part]:
        a, sizes = self.layout, self.layout.sizes
        t, s, H, e, F = a.tokens, a.own, sizes.hidden_size, a.item, width / self._mp
        x, columns = e * s * H, F * (2 if gated else 1)
        selective = a.config.recompute.recompute_granularity == "selective"
        activated = 0.0 if selective else (e * t * F if gated else 0.0) + self._stored(t * F)
        parts = [Part("norm", self._norm_kept(), moved=3 * x, transient=(a.wide + e) * 2 * s * H)] if norm else []
        return [
            *parts,
            Part(
                "up",
                (self._stored(s * H) if stored else 0.0) + e * t * columns,
                (Product(t, H, round(columns), mlp=True),),
                moved=x + e * t * columns,
                messages=self._column(e * t * H),
                transient=e * t * columns + 2 * x,
            ),
            Part("activation", activated, moved=e * t * (columns + F), transient=e * t * (columns + 2 * F) + x),
            Part(
                "down",
                self._dropped(x) if norm else 0.0,
                (Product(t, round(F), H, mlp=True),),
                moved=3 * x,
                messages=self._row(e * t * H),
                transient=e * t * F + 2 * x,
            ),
        ]

    def _experts(self, moe: MoeSizes) -> list[Part]:
        """Norm, router, dispatch, experts, combine, shared experts."""
        a, grid = self.layout, self.layout.config.grid
        s, H, e, w, E, k = a.own, moe.hidden_size, a.item, a.wide, moe.num_experts, moe.topk
        x = e * s * H
        rows, pairs = self.rows(moe), s * k
        F = moe.ffn_hidden_size / grid.emp
        columns = F * (2 if moe.gated else 1)
        gathers = a.cut and grid.emp > 1
        inside = rows * grid.emp if gathers else rows
        # x in fp32, probabilities and logits, chosen weights; with fp32 x itself is what the shared experts keep.
        router = w * s * H + 2 * w * s * E + (INDEX + 3 * w) * s * k + 3 * w * s
        order = 2 * INDEX * pairs + (2 * INDEX * inside if grid.ep > 1 or gathers else 0) + (INDEX + w) * rows
        message = H * e + w
        share = (grid.ep - 1) / grid.ep
        ways = [
            Message("ep", "all_to_all", share * pairs_sent * size, phase)
            for phase in ("forward", "backward")
            for pairs_sent, size in ((rows, message), (rows, H * e))
        ]
        counted = grid.ep > 1 and not self.even(moe)
        exchanged = [Message("ep", "all_to_all", INDEX * E * share, "forward")] if counted else []
        if counted and gathers:
            exchanged.append(self._message("emp", "all_gather", INDEX * E * grid.emp, "forward"))
        if a.cut:  # what the losses and the load need of every rank's tokens
            exchanged.append(self._message("mp", "all_gather", w * (E + 1 + k * E) * grid.mp, "forward"))
        inner: list[Message] = []
        if gathers:
            inner += [self._message("emp", "all_gather", inside * H * e, phase) for phase in ("forward", "backward")]
            inner += [self._message("emp", "reduce_scatter", inside * H * e, p) for p in ("forward", "backward")]
        elif grid.emp > 1:
            inner += [self._message("emp", "all_reduce", rows * H * e, phase) for phase in ("forward", "backward")]
        selective = a.config.recompute.recompute_granularity == "selective"
        activated = 0.0 if selective else (e * inside * F if moe.gated else 0.0) + self._stored(inside * F)
        local = max(1, E // grid.ep)
        out = e * rows * H + e * rows
        parts = [
            Part("norm", self._norm_kept(), moved=3 * x, transient=(w + e) * 2 * s * H),
            Part("router", router, (Product(s, H, E),), moved=2 * w * s * H + 4 * w * s * E, transient=2 * w * s * H),
            Part(
                "dispatch",
                order,
                moved=4 * e * rows * H,
                messages=tuple((ways if grid.ep > 1 else []) + exchanged),
                transient=2 * e * rows * H,
            ),
            Part(
                "up",
                self._stored(inside * H) + e * inside * columns,
                (Product(inside, H, round(columns), local, mlp=True),),
                moved=e * inside * (H + columns),
                messages=tuple(inner),
                transient=e * inside * (columns + H),
            ),
            Part("activation", activated, moved=e * inside * (columns + F), transient=e * inside * (columns + 2 * F)),
            Part(
                "down",
                out,
                (Product(inside, round(F), H, local, mlp=True),),
                moved=e * inside * (H + F) + 4 * e * rows * H,
                transient=e * inside * (F + 2 * H),
            ),
        ]
        if moe.shared_experts:
            keeps = e < w  # otherwise the router has kept the same tensor
            parts += self._mlp(moe.shared_width, gated=moe.gated, norm=False, stored=keeps)
        parts.append(Part("residual", self._dropped(x), moved=3 * x))
        return parts

    def even(self, moe: MoeSizes) -> bool:
        """Messages of even splits, padded to the capacity."""
        grid, ampipe = self.layout.config.grid, self.layout.config.ampipe
        alone = not self.layout.cut or moe.capacity_scope == "rank"
        sliced = ampipe.ampipe_degree > 1 or ampipe.use_pipe_experts
        even = moe.has_capacity and alone and (grid.ep > 1 or (self.layout.cut and grid.emp > 1))
        return even and not sliced

    def rows(self, moe: MoeSizes) -> float:
        """Rows that this rank sends and, under a balanced load, receives."""
        tokens = self.layout.own
        if self.even(moe):
            return moe.num_experts * moe.capacity(tokens)
        pairs = tokens * moe.topk
        return min(pairs, moe.num_experts * moe.capacity(tokens)) if moe.has_capacity else pairs

    def _dropped(self, x: float) -> float:
        """A dropout's mask, a byte per element."""
        return x / self.layout.item if self.layout.sizes.hidden_dropout else 0.0

    # Messages

    def _message(self, axis: str, kind: str, whole: float, phase: str, *, hidden: bool = False) -> Message:
        """What one rank sends of a collective over ``whole`` bytes."""
        n = self.layout.config.grid.size(axis)
        factor = {"all_reduce": 2.0, "all_to_all": 1.0}.get(kind, 1.0) * (n - 1) / n
        return Message(axis, kind, whole * factor, phase, hidden)

    def _context(self, queries: float, keys: float) -> tuple[Message, ...]:
        """Of attention whose sequences cp ranks share; queries, keys: elements of them on this rank."""
        cp, e, w = self.layout.config.grid.cp, self.layout.item, self.layout.wide
        if cp == 1:
            return ()
        algorithm = self.layout.config.parallel.context_parallel_algo
        if algorithm == ULYSSES:
            groups = keys / queries * self.layout.sizes.num_attention_heads / self._mp
            copies = cp // math.gcd(cp, round(groups))
            heads = e * (2 * queries + 2 * keys * copies)
            return tuple(self._message("cp", "all_to_all", heads, phase) for phase in ("forward", "backward"))
        both, others = 2 * keys, cp - 1
        again = self.layout.config.ampipe.ampipe_degree <= 1  # with slices keys are kept, and do not come again
        if algorithm == RING:
            sent = ((e, "forward"), *([(e, "backward")] if again else []), (w, "backward"))
            return tuple(Message("cp", "send", others * both * size, phase, True) for size, phase in sent)
        keys_again = [self._message("cp", "all_gather", cp * both * e, "backward", hidden=True)] if again else []
        return (
            self._message("cp", "all_gather", cp * both * e, "forward", hidden=True),
            *keys_again,
            self._message("cp", "reduce_scatter", cp * both * w, "backward", hidden=True),
        )

    def _column(self, whole: float) -> tuple[Message, ...]:
        """Of a layer cut along its out features, ``whole``: its input [t, H]."""
        if self._mp == 1:
            return ()
        if not self.layout.cut:
            return (self._message("mp", "all_reduce", whole, "backward", hidden=True),)
        return (
            self._message("mp", "all_gather", whole, "forward", hidden=True),
            self._message("mp", "all_gather", whole, "backward", hidden=True),
            self._message("mp", "reduce_scatter", whole, "backward", hidden=True),
        )

    def _row(self, whole: float) -> tuple[Message, ...]:
        """Of a layer cut along its in features, ``whole``: its output [t, H]."""
        if self._mp == 1:
            return ()
        if not self.layout.cut:
            return (self._message("mp", "all_reduce", whole, "forward", hidden=True),)
        return (
            self._message("mp", "reduce_scatter", whole, "forward", hidden=True),
            self._message("mp", "all_gather", whole, "backward", hidden=True),
        )

    def _leave(self) -> tuple[Message, ...]:
        """Of the word embedding's output."""
        whole = self.layout.item * self.layout.tokens * self.layout.sizes.hidden_size
        if self._mp == 1:
            return ()
        if not self.layout.cut:
            return (self._message("mp", "all_reduce", whole, "forward"),)
        return (
            self._message("mp", "reduce_scatter", whole, "forward"),
            self._message("mp", "all_gather", whole, "backward"),
        )

    def _copied(self, whole: float, phase: str) -> list[Message]:
        """An input that all mp ranks hold alike: its gradient is summed."""
        return [self._message("mp", "all_reduce", whole, phase)] if self._mp > 1 else []


def norm_kept(layout: Layout, rows: float, width: int, normalization: str) -> float:
    """Bytes that a norm keeps beside its output."""
    e, w = layout.item, layout.wide
    if normalization == "layernorm":
        return e * rows * width + 2 * w * rows
    if layout.kind.kernels == "cuda":
        return e * rows * width + 4 * rows
    # Plain products: x in fp32, the scale, and what the weight multiplies; in fp32 the first is x itself.
    return (2 * w if e == w else w + e) * rows * width + w * rows


def _statistics(layout: Layout) -> float:
    return 2.0 * layout.wide * layout.own


def _normalization(sizes: DecoderSizes | ErnieSizes) -> str:
    return sizes.normalization if isinstance(sizes, DecoderSizes) else "layernorm"


def total(parts: Sequence[Part]) -> float:
    """Bytes kept by several parts."""
    return sum(part.kept for part in parts)
