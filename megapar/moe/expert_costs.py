"""Cost of a mixture-of-experts layer on one rank: router, dispatch, experts, combine.

Shape letters: s positions of this rank, H hidden, F MLP width, E experts, k choices.
"""

from __future__ import annotations

from functools import cached_property

from megapar.model.cost.communication import Communication
from megapar.model.cost.model_cost import INDEX_BYTES, CommCost, OpCost, Product
from megapar.model.cost.rank_view import RankView
from megapar.moe.dispatch_bytes import (
    BETWEEN,
    EXPERT_BYTES,
    WITHIN,
    DispatchBytes,
    ExpertRows,
    node_row_bytes,
    row_columns,
)
from megapar.moe.sizes import MoeSizes


def expert_costs(view: RankView, moe: MoeSizes) -> list[OpCost]:
    """Return the operators from the router to the combined output, without the norm and the shared experts."""
    layer = _ExpertLayer(view, moe)
    return [*layer.dispatch(), *layer.experts()]


def in_flight(view: RankView, moe: MoeSizes) -> float:
    """Return the bytes of one direction's messages that are in flight at once, as sent and as received.

    With slices all of a layer's are; otherwise the layer waits for each before it continues.
    """
    if view.ampipe_degree <= 1 or view.ep == 1:
        return 0.0
    return 2.0 * view.item_bytes * _ExpertLayer(view, moe).rows.sent * moe.hidden_size


def held_bytes(view: RankView, moe: MoeSizes) -> float:
    """Return the bytes that a layer's forward holds to its end beyond what it keeps, with the residual.

    They are the messages back and the outputs of the shared experts, until slices are concatenated; without messages
    the experts' outputs and their sum.
    """
    x = view.item_bytes * view.local_tokens * moe.hidden_size
    arriving = in_flight(view, moe)
    if arriving:
        return arriving + x * (2 if moe.shared_width else 1)
    layer = _ExpertLayer(view, moe)
    return 0.0 if view.ep > 1 or layer.gathers else layer.outputs


def splits_evenly(view: RankView, moe: MoeSizes) -> bool:
    """Return True if the all-to-alls have even splits, padded to the capacity."""
    local_capacity = not view.splits_sequence or moe.capacity_scope == "rank"
    sliced = view.pipe_experts or (view.ampipe_degree > 1 and not view.slice_capacity)
    even = moe.has_capacity and local_capacity and (view.ep > 1 or (view.splits_sequence and view.emp > 1))
    if view.node_ep:  # rows per token, not per place in a capacity
        return False
    return even and not sliced


class _ExpertLayer:
    """One mixture-of-experts layer.

    Attributes:
        even: All-to-alls have even splits.
        inside: Rows that the experts of the busiest rank multiply.
        gathers: The emp ranks gather each other's rows.
    """

    def __init__(self, view: RankView, moe: MoeSizes) -> None:
        self.view, self.moe = view, moe
        self.even = splits_evenly(view, moe)
        self.gathers = view.splits_sequence and view.emp > 1
        gathered = view.emp if self.gathers else 1
        self.rows = ExpertRows.of(moe, view.local_tokens, view.ep, gathered, even=self.even)
        self.inside = self._rows_of_the_busiest()
        self._communication = Communication(view)

    def _rows_of_the_busiest(self) -> float:
        """Return the rows that its experts multiply: without a capacity, at most all that can be sent to one rank."""
        imbalance = self.view.expert_imbalance
        if imbalance == 1.0 or self.even:
            return self.rows.multiplied
        if self.moe.has_capacity:
            return self.rows.multiplied * min(imbalance, max(1.0, self.moe.capacity_factor))
        return min(self.rows.multiplied * imbalance, self.rows.most)

    @property
    def passing(self) -> float:
        """Bytes of gradients besides those of the experts: of the residual, of the shared experts' input, in flight."""
        x = self.view.item_bytes * self.view.local_tokens * self.moe.hidden_size
        return x * (2 if self.moe.shared_width else 1) + in_flight(self.view, self.moe)

    def dispatch(self) -> list[OpCost]:
        """Return the cost of the router, and of the dispatch to the experts' ranks and back."""
        view, moe, rows, inside = self.view, self.moe, self.rows.sent, self.inside
        s, e, w, k = view.local_tokens, view.item_bytes, view.wide_bytes, moe.topk
        H, E = moe.hidden_size, moe.num_experts
        # Kept: x in fp32, probabilities and logits, chosen weights. With fp32 the shared experts keep the same x.
        router = w * s * H + 2 * w * s * E + (INDEX_BYTES + 3 * w) * s * k + 3 * w * s
        moved, transient = 2 * w * s * H + 4 * w * s * E, 2 * w * s * H
        if (
            view.fused_router and not moe.linear_bias
        ):  # x as it is, and logits; of these three parts are written, and bf16 parts of gradients
            router = e * s * H + w * s * E + (INDEX_BYTES + 2 * w) * s * k + 2 * w * s
            moved, transient = e * s * H + 8 * w * s * E, e * s * H + 12 * s * E
        travels = view.ep > 1 or inside != rows
        order: float = 2 * INDEX_BYTES * s * k + (2 * INDEX_BYTES * inside if travels else 0) + (INDEX_BYTES + w) * rows
        rows_moved, temporary = 4.0 * e * rows * H, 2.0 * e * rows * H
        if view.node_ep:
            order, rows_moved, temporary = self._rows_by_node()
        return [
            OpCost("router", router, (Product(s, H, E, wide=True),), moved=moved, transient=transient + self.passing),
            OpCost("dispatch", order, moved=rows_moved, sent=tuple(self._sent()), transient=temporary + self.passing),
        ]

    def _rows_by_node(self) -> tuple[float, float, float]:
        """Return the bytes of a dispatch by node: the orders that it keeps, bytes moved, the most in its backward."""
        view, moe, layer = self.view, self.moe, self._by_node
        s, k, inside = view.local_tokens, moe.topk, self.rows.multiplied
        entered = s * layer.nodes * layer.rows_to_node()
        arrived = s * view.ep * layer.rows_to_rank()
        # Each order has an index both ways and a bit for each field; a field of a row that leaves has an expert.
        fields = (2 * INDEX_BYTES + 1) * k * (s + entered + arrived)
        row = node_row_bytes(moe.hidden_size, k, view.wide_bytes, view.item_bytes)
        token = view.item_bytes * moe.hidden_size
        kept = fields + EXPERT_BYTES * k * entered + view.wide_bytes * inside
        # Rows that leave are written from tokens, rows that are relayed from them, and copies for experts from those.
        return kept, 2 * token * (entered + arrived + inside), token * (inside + arrived) + row * arrived

    def experts(self) -> list[OpCost]:
        """Return the cost of this rank's experts, and of the weighted sum of their outputs."""
        view, moe, rows, inside = self.view, self.moe, self.rows.sent, self.inside
        e, H = view.item_bytes, moe.hidden_size
        F, local = moe.ffn_hidden_size / view.emp, max(1, moe.num_experts // view.ep)
        columns = F * (2 if moe.gated else 1)
        # Activation and weights are one kernel, which keeps its inputs, or are computed again.
        fused = moe.clamped or (moe.gated and view.fuses)
        activated = (e * inside * F if moe.gated and not fused else 0.0) + view.stored_bytes(inside * F)
        # Whole experts multiply their activation by the gate weights, others their summed outputs.
        experts_weigh = view.emp == 1
        weighed = e * inside * F if experts_weigh else e * rows * H
        unweighed = weighed if experts_weigh and not fused else 0.0
        kept = 0.0 if view.selective_recompute else activated + unweighed + (e * rows if experts_weigh else 0.0)
        # The incoming gradient takes the place of the activation. Weights need its product with what they multiply.
        inside_bytes = e * inside * F * (2 if moe.gated or experts_weigh else 1)
        inside_bytes += 0.0 if kept else activated + unweighed  # made again
        inside_bytes /= view.ampipe_degree
        # Biases are a row for each row of tokens; the second ones are kept for the gradients of the gate weights.
        up_biases, down_biases = (2 * e * inside * columns, e * inside * H) if moe.add_bias else (0.0, 0.0)
        kept_biases = (INDEX_BYTES * inside if moe.add_bias else 0.0) + (down_biases if experts_weigh else 0.0)
        messages = rows * H if view.ep > 1 else 0
        outer = 3 * e * rows * H + self.passing
        return [
            OpCost(
                "up",
                view.stored_bytes(inside * H) + view.expert_item_bytes * inside * columns,
                (Product(inside, H, round(columns), local, mlp=True, fp8="fp8_experts"),),
                moved=e * inside * (H + columns),
                sent=tuple(self._sent_over_emp()),
                transient=(e * inside * H + up_biases) / view.ampipe_degree + self.passing,
            ),
            OpCost("activation", kept, moved=e * inside * (columns + F), transient=inside_bytes + self.passing),
            OpCost(
                "down",
                kept_biases,
                (Product(inside, round(F), H, local, mlp=True, fp8="fp8_experts"),),
                moved=e * inside * (H + F) + 2 * e * rows * H + 2 * weighed + up_biases + 2 * down_biases,
                transient=(e * (inside * (F + H) + messages) + down_biases) / view.ampipe_degree + self.passing,
                working=self.outputs,
            ),
            # Their gradient in the order of the experts, weighed, and multiplied by the outputs for the weights'.
            OpCost(
                "combine",
                0.0 if experts_weigh else weighed + e * rows,
                sent=self._over_ep("combine", H * e),
                transient=0.0 if experts_weigh else outer,
            ),
        ]

    @property
    def outputs(self) -> float:
        """Most bytes of the experts' outputs on their way back, with the residual."""
        view, H, e = self.view, self.moe.hidden_size, self.view.item_bytes
        x = e * view.local_tokens * H
        if not self.gathers:
            return e * self.rows.multiplied * H + 2 * x
        # Outputs in the experts' order, in the senders' order, and received to be summed: of all slices but the first.
        outputs = e * self.rows.multiplied * H * (2 + 1 / view.ampipe_degree)
        return outputs + 2 * e * self.rows.sent * H + x

    def _sent(self) -> list[CommCost]:
        """Return the communication of rows with their weights to the experts, and of row counts."""
        view, moe = self.view, self.moe
        H, e, w, E, k = moe.hidden_size, view.item_bytes, view.wide_bytes, moe.num_experts, moe.topk
        sent = list(self._over_ep("dispatch", e * row_columns(H, w, e)))
        if view.ep > 1 and not self.even:
            sent += self._sent_counts()
        # The losses and the load need sums over the tokens of all ranks that share a sequence.
        numbers = w * (E + 1 + (k if moe.has_capacity else 1) * E + (E if moe.loss_choices else 0))
        if moe.has_capacity and moe.capacity_scope != "rank" and view.ampipe_degree > 1:
            numbers += INDEX_BYTES * k * E * view.ampipe_degree  # the queues of the experts, slice by slice
        sent += self._communication.shared_sums(numbers)
        return sent

    def _over_ep(self, name: str, size: float) -> tuple[CommCost, ...]:
        """Return the all-to-alls of ``dispatch`` or ``combine``, both ways, hop by hop. size: Bytes of a plain row."""
        view = self.view
        if view.ep == 1:
            return ()
        if not view.node_ep:
            sent = (view.ep - 1) / view.ep * self.rows.sent * size
            return tuple(CommCost("ep", "all_to_all", sent, phase) for phase in ("forward", "backward"))
        passes, hops = self._by_node.by_node(view.local_tokens), []
        for phase in ("forward", "backward"):
            sizes = ((BETWEEN, passes[name, phase].between), (WITHIN, passes[name, phase].within))
            there = (name == "dispatch") == (phase == "forward")  # otherwise on the way back to the tokens' ranks
            hops += [
                CommCost(axis, "all_to_all", sent, phase) for axis, sent in (sizes if there else sizes[::-1]) if sent
            ]
        return tuple(hops)

    @cached_property
    def _by_node(self) -> DispatchBytes:
        """Messages of a dispatch by node."""
        view, pairs = self.view, self.view.local_tokens * self.moe.topk
        return DispatchBytes.of(
            self.moe,
            ep=view.ep,
            node_ranks=view.node_ep,
            item_bytes=view.item_bytes,
            weight_bytes=view.wide_bytes,
            kept=min(1.0, self.rows.sent / pairs),
            by_expert=view.pipe_experts,
        )

    def _sent_counts(self) -> list[CommCost]:
        """Return the communication of the numbers of rows, which ranks of emp exchange first if they gather rows."""
        view, E = self.view, self.moe.num_experts
        sharers, slices = view.emp if self.gathers else 1, max(1, view.ampipe_degree)
        if view.node_ep:
            messages = E // view.ep * view.expert_parts if view.pipe_experts else 1
            pairs = messages * view.ep if view.pipe_experts else E
            numbers = messages * (view.ep // view.node_ep + view.ep) + pairs
            size = INDEX_BYTES * numbers
            counts = CommCost("ep", "all_gather", size * sharers * (view.ep - 1) * slices, "forward")
        else:
            size = INDEX_BYTES * E
            counts = CommCost("ep", "all_to_all", size * sharers * (view.ep - 1) / view.ep * slices, "forward")
        over_emp = self._communication.over_emp("all_gather", size * sharers * slices, "forward")
        return [counts, over_emp] if self.gathers else [counts]

    def _sent_over_emp(self) -> list[CommCost]:
        """Return the communication over emp, the ranks that split the width of an expert."""
        view, over_emp, both = self.view, self._communication.over_emp, ("forward", "backward")
        if self.gathers:
            size = self.inside * self.moe.hidden_size * view.item_bytes
            kinds = [(kind, phase) for kind in ("all_gather", "reduce_scatter") for phase in both]
            return [over_emp(kind, size, phase) for kind, phase in kinds]
        if view.emp > 1:
            size = self.rows.sent * self.moe.hidden_size * view.item_bytes
            return [over_emp("all_reduce", size, phase) for phase in both]
        return []
