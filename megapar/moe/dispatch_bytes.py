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

from megapar.moe.row_counts import ALIGNED_BYTES, row_columns
from megapar.moe.sizes import MoeSizes

BETWEEN, WITHIN = "ep_between", "ep_within"  # the axes of the two hops
EXPERT_BYTES = 2  # of an expert's number in a field
NO_EXPERT = 0xFFFF  # the number in an empty field
MOST_EXPERTS = 2**15  # whose numbers are not negative as int16
PASSES = (("dispatch", "forward"), ("combine", "forward"), ("combine", "backward"), ("dispatch", "backward"))


def node_row_bytes(hidden: int, topk: int, weight_bytes: int, item_bytes: int) -> int:
    """Return the bytes of a row of the dispatch by node: ``hidden`` elements, ``topk`` fields, padding to 16 bytes."""
    size = hidden * item_bytes + topk * (EXPERT_BYTES + weight_bytes)
    return -(-size // ALIGNED_BYTES) * ALIGNED_BYTES


@dataclass(frozen=True)
class Sent:
    """Numbers that one rank sends.

    Attributes:
        between: Rows, or bytes, to ranks of other nodes.
        within: Rows, or bytes, to other ranks of its node.
    """

    between: float
    within: float

    def times(self, factor: float) -> Sent:
        """Return both, multiplied."""
        return Sent(self.between * factor, self.within * factor)


@dataclass(frozen=True)
class DispatchBytes:
    """The messages of one layer's experts under balanced routing.

    Attributes:
        hidden: Features of a token.
        topk: Experts of a token, k.
        num_experts: E.
        ep: Expert parallel degree, N x L.
        node_ranks: Ranks of ep on each node, L; ``ep`` if all are on one node.
        item_bytes: Bytes of an element of a token.
        weight_bytes: Bytes of a gate weight.
        kept: Share of the pairs that reach their expert.
        groups: Groups of experts, of which a token chooses some first; 1: a token chooses among all experts.
        chosen_groups: Number of groups that a token chooses.
        by_expert: Each of a rank's experts has separate messages, as with pipe-experts; a token then travels once for
            each of them.
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
    def of(
        cls,
        moe: MoeSizes,
        *,
        ep: int,
        node_ranks: int,
        item_bytes: int,
        weight_bytes: int,
        kept: float = 1.0,
        by_expert: bool = False,
    ) -> DispatchBytes:
        """Return the messages of a layer of these sizes; the other arguments are the attributes."""
        return cls(
            hidden=moe.hidden_size,
            topk=moe.topk,
            num_experts=moe.num_experts,
            ep=ep,
            node_ranks=node_ranks,
            item_bytes=item_bytes,
            weight_bytes=weight_bytes,
            kept=kept,
            groups=moe.groups,
            chosen_groups=moe.group_topk,
            by_expert=by_expert,
        )

    @property
    def nodes(self) -> int:
        """Number of nodes, N."""
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
        """Return the rows of a token that a rank receives: at most one, or one for each message."""
        messages = self._messages
        return messages * self.reached(self.num_experts // self.ep // messages)

    @property
    def _messages(self) -> int:
        return self.num_experts // self.ep if self.by_expert else 1

    def plain(self, tokens: float) -> dict[tuple[str, str], Sent]:
        """Return the bytes that a rank with ``tokens`` tokens sends in each of the four passes, by (pass, phase)."""
        row = row_columns(self.hidden, self.weight_bytes, self.item_bytes) * self.item_bytes
        sizes = {"dispatch": row, "combine": self.hidden * self.item_bytes}
        return {(name, phase): self.plain_rows().times(tokens * sizes[name]) for name, phase in PASSES}

    def by_node(self, tokens: float) -> dict[tuple[str, str], Sent]:
        """Return the bytes of each of the four passes of the dispatch by node, as ``plain``."""
        sizes = {
            "dispatch": node_row_bytes(self.hidden, self.topk, self.weight_bytes, self.item_bytes),
            "combine": self.hidden * self.item_bytes,
        }
        return {(name, phase): self.node_rows().times(tokens * sizes[name]) for name, phase in PASSES}

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
