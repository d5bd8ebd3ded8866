"""Rows and bytes of the two dispatches of experts: plain, or by node.

    plain      a row per (token, expert): all-to-all over ep
    by node    a row per (token, node): from its rank to the rank at the same place of the node    ``ep_between``
               a row per (token, rank): from there to the ranks of the node                        ``ep_within``

Experts' outputs return, and gradients move, the same way. A row of the dispatch is the token and its weight, or by node
k fields with an expert's number (2 bytes) and its weight each, padded to 16 bytes; a row of the combine is an output.

Expected numbers are those of balanced routing: all sets of k of the E experts are equally likely, so the number of a
token's experts on a node is hypergeometric. Plans and the choice of a dispatch use them.

E experts, k choices, N nodes of L ranks of ep.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from typing import Any

from megapar.moe.sizes import MoeSizes

ALIGNED_BYTES = 16  # NCCL copies whole vectors of aligned rows
BETWEEN, WITHIN = "ep_between", "ep_within"  # the axes of the two hops
EXPERT_BYTES = 2  # of an expert's number in a field
NO_EXPERT = 0xFFFF  # the number in an empty field
MOST_EXPERTS = 2**15  # whose numbers are not negative as int16
PASSES = (("dispatch", "forward"), ("combine", "forward"), ("combine", "backward"), ("dispatch", "backward"))


@dataclass(frozen=True)
class ExpertRows:
    """Rows of one layer and one micro-batch on one rank.

    Attributes:
        sent: Rows of this rank's tokens.
        multiplied: Rows that this rank's experts multiply if the load is balanced.
        most: Rows that they multiply if all tokens of all ep ranks choose experts of this rank.
    """

    sent: int
    multiplied: int
    most: int

    @classmethod
    def of(cls, moe: MoeSizes, positions: int, ep: int, gathered: int, *, even: bool) -> ExpertRows:
        """Return the rows of a rank's positions. gathered: Number of emp ranks that gather each other's rows, or 1."""
        sent = dispatched_rows(moe, positions, positions, even=even)
        local_experts = moe.num_experts // ep
        return cls(sent, sent * gathered, positions * gathered * ep * min(moe.topk, local_experts))


def dispatched_rows(moe: MoeSizes, positions: int, tokens: int, *, even: bool) -> int:
    """Return the rows of ``positions`` positions: all pairs without a capacity, else at most that of ``tokens`` tokens.

    even: Messages have even splits, padded to the capacity.
    """
    if even:
        return moe.num_experts * moe.capacity(tokens)
    pairs = positions * moe.topk
    return min(pairs, moe.num_experts * moe.capacity(tokens)) if moe.has_capacity else pairs


def row_columns(hidden: int, weight_bytes: int, item_bytes: int) -> int:
    """Return the elements of a row: ``hidden`` elements, the bits of its weight, and padding to 16 bytes."""
    unit = max(1, ALIGNED_BYTES // item_bytes)
    wanted = hidden + weight_bytes // item_bytes
    return -(-wanted // unit) * unit


def node_row_bytes(hidden: int, topk: int, weight_bytes: int, item_bytes: int) -> int:
    """Return the bytes of a row of the dispatch by node: ``hidden`` elements, ``topk`` fields, padding to 16 bytes."""
    size = hidden * item_bytes + topk * (EXPERT_BYTES + weight_bytes)
    return -(-size // ALIGNED_BYTES) * ALIGNED_BYTES


@dataclass(frozen=True)
class Sent:
    """Rows, or bytes, that one rank sends: between nodes, and to other ranks within its node."""

    between: float
    within: float


@dataclass(frozen=True)
class DispatchBytes:
    """The messages of one layer's experts under balanced routing.

    Attributes:
        node_ranks: Ranks of ep on each node, L; ``ep`` if all are on one node.
        item_bytes: Bytes of an element of a token.
        kept: Share of the pairs that reach their expert.
        groups: Groups of experts, of which a token chooses some first; 1: a token chooses among all experts.
        by_expert: Each of a rank's experts has separate messages, as with pipe-experts; a token then travels for each.
    """

    hidden: int
    topk: int
    num_experts: int
    ep: int
    node_ranks: int
    item_bytes: int
    weight_bytes: int
    kept: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    by_expert: bool = False

    @classmethod
    def of(cls, moe: MoeSizes, **others: Any) -> DispatchBytes:
        """Return the messages of a layer of these sizes. others: The other attributes."""
        return cls(
            hidden=moe.hidden_size,
            topk=moe.topk,
            num_experts=moe.num_experts,
            groups=moe.groups,
            chosen_groups=moe.group_topk,
            **others,
        )

    @property
    def nodes(self) -> int:
        return self.ep // self.node_ranks

    def plain_rows(self) -> Sent:
        """Return the rows per token of a pass of the plain dispatch."""
        pairs = self.topk * self.kept / self.ep
        return Sent(pairs * (self.ep - self.node_ranks), pairs * (self.node_ranks - 1))

    def node_rows(self) -> Sent:
        """Return the rows per token of a pass of the dispatch by node: of its first hop, and of its second."""
        # A token enters a node at one of its L ranks. The others need a row from there.
        within = self.nodes * (self.node_ranks - 1) * self.rows_to_rank()
        return Sent((self.nodes - 1) * self.rows_to_node(), within)

    def rows_to_node(self) -> float:
        """Return the rows of a token that enter a node: at most one, or one for each message."""
        messages = self._messages
        return messages * self.reached(self.num_experts // self.nodes // messages)

    def rows_to_rank(self) -> float:
        """Return the rows of a token that a rank receives, as ``rows_to_node``."""
        messages = self._messages
        return messages * self.reached(self.num_experts // self.ep // messages)

    @property
    def _messages(self) -> int:
        return self.num_experts // self.ep if self.by_expert else 1

    def plain(self, tokens: float) -> dict[tuple[str, str], Sent]:
        """Return the bytes that a rank with ``tokens`` tokens sends in each of the four passes, by (pass, phase)."""
        row = row_columns(self.hidden, self.weight_bytes, self.item_bytes) * self.item_bytes
        return self._passes(self.plain_rows(), tokens, row)

    def by_node(self, tokens: float) -> dict[tuple[str, str], Sent]:
        """Return the bytes of each of the four passes of the dispatch by node, as ``plain``."""
        row = node_row_bytes(self.hidden, self.topk, self.weight_bytes, self.item_bytes)
        return self._passes(self.node_rows(), tokens, row)

    def _passes(self, rows: Sent, tokens: float, row_bytes: int) -> dict[tuple[str, str], Sent]:
        sizes = {"dispatch": tokens * row_bytes, "combine": tokens * (self.hidden * self.item_bytes)}
        return {(name, phase): Sent(rows.between * sizes[name], rows.within * sizes[name]) for name, phase in PASSES}

    def reached(self, experts: int) -> float:
        """Return the share of tokens that have a kept pair at one of ``experts`` consecutive experts.

        With groups this is exact if the experts are whole groups or lie in one.
        """
        if self.groups == 1:
            return 1.0 - self._missed(self.num_experts, experts)
        size = self.num_experts // self.groups
        pool = self.chosen_groups * size
        if experts <= size:  # in one group, which a token chooses or not
            chosen = self.chosen_groups / self.groups
            return chosen * (1.0 - self._missed(pool, experts))
        whole = experts // size
        ways = comb(self.groups, self.chosen_groups)
        among = range(min(whole, self.chosen_groups) + 1)
        likely = ((n, comb(whole, n) * comb(self.groups - whole, self.chosen_groups - n) / ways) for n in among)
        return sum(share * (1.0 - self._missed(pool, n * size)) for n, share in likely)

    def _missed(self, pool: int, experts: int) -> float:
        """Return the chance that no pair of k of ``pool`` experts is kept at ``experts`` of them."""
        lost, ways = 1.0 - self.kept, comb(pool, self.topk)
        return sum(
            comb(experts, n) * comb(pool - experts, self.topk - n) / ways * lost**n
            for n in range(min(experts, self.topk) + 1)
            if lost or n == 0
        )
