"""Costs of operators that models share: norms, MLPs, embeddings and vocabulary heads.

Kept bytes follow the backward formulas of the kernels that run on the device (``core/device/ops.py``: a CPU has no
fused RMS norm, for example).

Shape letters: t positions that matrix products see, s positions outside them (s = t / mp under sequence parallelism),
H hidden, F MLP width, V rows of the vocabulary.
"""

from __future__ import annotations

from math import ceil

from megapar.model.cost.communication import Communication
from megapar.model.cost.model_cost import INDEX_BYTES, CommCost, OpCost, Product, UnitCost
from megapar.model.cost.rank_view import RankView


def norm_kept(view: RankView, rows: float, width: int, normalization: str, *, wide: bool = False) -> float:
    """Return the bytes that a norm keeps in addition to its output. wide: Its scale is in max(fp32, dtype)."""
    e, w = view.wide_bytes if wide else view.item_bytes, view.wide_bytes
    if normalization == "layernorm":
        return e * rows * width + 2 * w * rows
    if view.kernels == "cuda":
        return e * rows * width + 4 * rows
    # Plain operators keep x in fp32, the scale, and the weight's factor. With fp32 the first one is x itself.
    return (2 * w if e == w else w + e) * rows * width + w * rows


class Operators:
    """Costs of operators with one hidden size on one rank.

    Attributes:
        hidden_size: Features of a token (H).
        normalization: ``layernorm`` or ``rmsnorm``.
        dropout: Hidden states have dropout.
        wide_norms: Norms run in max(fp32, dtype), where their scale, 1 + weight, is.
    """

    def __init__(
        self, view: RankView, hidden_size: int, *, normalization: str, dropout: bool, wide_norms: bool = False
    ) -> None:
        self.view, self.hidden_size, self.normalization, self.dropout = view, hidden_size, normalization, dropout
        self.wide_norms = wide_norms and view.item_bytes < view.wide_bytes
        self.communication = Communication(view)

    @property
    def hidden_bytes(self) -> float:
        """Bytes of the hidden states [s, H] of a micro-batch."""
        return self.view.item_bytes * self.view.local_tokens * self.hidden_size

    @property
    def gathered_bytes(self) -> float:
        """Bytes of the hidden states [t, H] that matrix products see."""
        return self.view.item_bytes * self.view.tokens * self.hidden_size

    @property
    def column_gathers(self) -> float:
        """Bytes of the input [t, H] of a column parallel layer and of its gradient in the backward; 0 if not split."""
        return 2 * self.gathered_bytes if self.view.splits_sequence else 0.0

    @property
    def row_gathers(self) -> float:
        """Bytes of the output's gradient [t, H] in a row parallel layer's backward, also as pieces; 0 if not split."""
        whole = self.gathered_bytes if self.view.splits_sequence else 0.0
        return whole * (2 if self.view.overlaps_mp else 1)

    def dropped(self) -> float:
        """Return the bytes of a dropout mask over hidden states; 0 without dropout."""
        return self.hidden_bytes / self.view.item_bytes * self.view.dropout_item_bytes if self.dropout else 0.0

    def embedding(self, more: float, input_bytes: float = 0.0) -> UnitCost:
        """Return the cost of the embedding.

        Args:
            more: Bytes kept for embeddings that are added to the word embedding.
            input_bytes: Bytes of the unit's input.
        """
        x = self.hidden_bytes
        kept = float(INDEX_BYTES * self.view.local_tokens) + more + self.dropped()
        operator = OpCost("embedding", kept, moved=4 * x, sent=self.from_vocabulary(), transient=2 * x)
        return UnitCost("embedding", (operator,), input_bytes)

    def from_vocabulary(self) -> tuple[CommCost, ...]:
        """Return the communication of the vocab parallel word embedding. No matrix product hides it."""
        return self.communication.row_parallel(self.gathered_bytes, hidden=False)

    def norm(self) -> OpCost:
        """Return the cost of a norm after a residual sum. It keeps the sum; the next operator keeps its output."""
        x = self.hidden_bytes
        casts = 4 * self._wide_bytes if self.wide_norms else 0.0  # input and output, each written and read
        return OpCost("norm", self.norm_kept(), moved=3 * x + casts, transient=self.norm_transient() + x)

    def norm_transient(self) -> float:
        """Return the temporary bytes of a norm's backward, without a gradient that passes it by."""
        if self.normalization == "layernorm" or self.view.kernels == "cuda":
            casts = 2 * self._wide_bytes if self.wide_norms else 0.0
            return 2 * self.hidden_bytes + casts  # the gradients of output and input
        # Plain operators: five tensors in max(fp32, dtype); what was kept of the scaled input is gone.
        return 5 * self._wide_bytes - (self._wide_bytes if self.wide_norms else self.hidden_bytes)

    @property
    def _wide_bytes(self) -> float:
        """Bytes of hidden states [s, H] in max(fp32, dtype)."""
        return self.view.wide_bytes * self.view.local_tokens * self.hidden_size

    @property
    def norm_input_kept(self) -> float:
        """Bytes of ``norm_kept`` that are the norm's input itself; plain operators keep a copy in fp32."""
        itself = (self.normalization == "layernorm" or self.view.kernels == "cuda") and not self.wide_norms
        return self.hidden_bytes if itself or self.view.item_bytes == self.view.wide_bytes else 0.0

    def norm_kept(self) -> float:
        """Return the bytes that one norm over the hidden dim keeps, without its output."""
        rows = self.view.local_tokens
        return norm_kept(self.view, rows, self.hidden_size, self.normalization, wide=self.wide_norms)

    def mlp(
        self, width: int, *, gated: bool, dropped: float = 0.0, stored: bool = True, item: int = 0, fused: bool = True
    ) -> list[OpCost]:
        """Return the operators of an MLP.

        Args:
            width: Intermediate features of the whole MLP.
            gated: The MLP has a gate.
            dropped: Bytes of the dropout mask on its output.
            stored: The MLP keeps its input; False if another operator keeps the same tensor.
            item: Bytes of an element of the inputs that its activation keeps; 0 for those of the compute dtype.
            fused: The device's kernel for swiglu computes the activation, if it has one.
        """
        view, H = self.view, self.hidden_size
        t, s, e, F = view.tokens, view.local_tokens, view.item_bytes, width / view.mp
        x, columns = e * s * H, F * (2 if gated else 1)
        halves = gated and not (fused and view.fuses)  # silu(gate) is kept
        kept = 0.0 if view.selective_recompute else (e * t * F if halves else 0.0) + view.stored_bytes(t * F)
        # The incoming gradient takes the place of the output. swiglu adds the gradients of its halves or of silu.
        inside = 2 * F if gated else F
        inside += 0 if kept else F * (2 if halves else 1)  # made again
        return [
            OpCost(
                "up",
                (view.stored_bytes(s * H) if stored else 0.0) + (item or e) * t * columns,
                (Product(t, H, round(columns), mlp=True, fp8="fp8"),),
                moved=x + e * t * columns,
                sent=self.communication.column_parallel(e * t * H),
                # The gradient of the output takes its place.
                transient=2 * x + self.column_gathers,
            ),
            OpCost("activation", kept, moved=e * t * (columns + F), transient=e * t * inside + x),
            OpCost(
                "down",
                dropped,
                (Product(t, round(F), H, mlp=True, fp8="fp8"),),
                moved=3 * x,
                sent=self.communication.row_parallel(e * t * H),
                transient=e * t * F + x + self.row_gathers,
            ),
        ]

    def leaving(self, width: int, *, scatters: bool) -> OpCost:
        """Return the all-gather of positions over mp after the last layer.

        Args:
            width: Features of a position.
            scatters: The backward runs a reduce-scatter of the gradient.
        """
        view = self.view
        if not view.splits_sequence:
            return OpCost("leaving")
        whole = view.item_bytes * view.tokens * width
        sent = [self.communication.over_mp("all_gather", whole, "forward")]
        if scatters:
            sent.append(self.communication.over_mp("reduce_scatter", whole, "backward"))
        return OpCost("leaving", whole, sent=tuple(sent))

    def masked_word_head(self, features: int, rows: float, vocab_size: int) -> tuple[OpCost, ...]:
        """Return the operators of a masked language model's head at ``rows`` positions of ``features`` features.

        They are the transform, gelu, a norm and the vocabulary.
        """
        view, H = self.view, self.hidden_size
        # Inputs of the transform, gelu and the norm, and the norm's output while the vocabulary runs.
        kept = view.item_bytes * rows * (features + 3 * H) + 2 * view.wide_bytes * rows
        transform = OpCost("transform", kept, (Product(rows, features, H),))
        return transform, *self.vocabulary(rows, vocab_size, replicated=True)

    def vocabulary(self, rows: float, vocab_size: int, *, replicated: bool) -> tuple[OpCost, ...]:
        """Return the operators of logits and loss, whose gradients are computed in the forward.

        The weight's gradient is in max(fp32, dtype).

        Args:
            rows: Positions with a loss.
            vocab_size: Tokens of the vocabulary.
            replicated: The rows are replicated over mp, so that their gradient is all-reduced over mp.
        """
        view, H, V = self.view, self.hidden_size, -(-vocab_size // self.view.mp)
        e, w, weight = view.item_bytes, view.wide_bytes, V * H
        held = rows_at_a_time(ceil(rows), w * V, view.logits_bytes)
        chunk = held * V
        widened = w * chunk if e < w else 0
        kept = e * rows * H + e * weight
        product = e * weight if e < w and view.kernels != "cuda" else 0  # without a kernel that adds to the sum
        # The logits are freed before their gradient is multiplied with the rows that have a loss.
        passing = max(e * chunk + widened, e * chunk + product + e * held * H, e * weight)
        making = e * rows * H + w * weight + passing
        transient = max(making - kept, e * rows * H + e * weight)
        sent: list[CommCost] = []
        if replicated:
            sent += self.communication.replicated(e * rows * H, "backward")
        if view.mp > 1:
            sent.append(self.communication.over_mp("all_reduce", 3 * w * rows, "forward"))
        # The forward computes two of the vocabulary's three products; all three are counted as usual.
        operator = OpCost("head", kept, (Product(rows, H, V, wide=True),), moved=4 * w * rows * V, transient=transient)
        return operator, OpCost("head messages", sent=tuple(sent))


def rows_at_a_time(rows: int, row_bytes: int, held_bytes: int) -> int:
    """Return the rows of a chunk of logits, of runs and plans: evenly many, of at most ``held_bytes``; at least 1."""
    pieces = max(1, -(-rows // max(1, held_bytes // row_bytes)))
    return max(1, -(-rows // pieces))
