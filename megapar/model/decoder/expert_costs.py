"""Cost of a mixture-of-experts layer on one rank: router, dispatch, experts, combine. Standard library only.

Shape letters: s positions of this rank, H hidden, F MLP width, E experts, k choices.

Tested in ``tests/model/cost/test_model_cost.py``.
"""

from __future__ import annotations

from megapar.model.cost.communication import Communication
from megapar.model.cost.model_cost import INDEX_BYTES, CommCost, OpCost, Product
from megapar.model.cost.rank_view import RankView
from megapar.model.decoder.expert_rows import ExpertRows, row_columns
from megapar.model.decoder.sizes import MoeSizes


def expert_costs(view: RankView, moe: MoeSizes) -> list[OpCost]:
    """Return the operators from the router to the combined output, without the norm and the shared experts."""
    layer = _ExpertLayer(view, moe)
    return [*layer.dispatch(), *layer.experts()]


def splits_evenly(view: RankView, moe: MoeSizes) -> bool:
    """Return True if the all-to-alls have even splits, padded to the capacity."""
    local_capacity = not view.splits_sequence or moe.capacity_scope == "rank"
    sliced = view.ampipe_degree > 1 or view.pipe_experts
    even = moe.has_capacity and local_capacity and (view.ep > 1 or (view.splits_sequence and view.emp > 1))
    return even and not sliced


class _ExpertLayer:
    """One mixture-of-experts layer.

    Attributes:
        view: The rank.
        moe: Sizes of the layer.
        even: All-to-alls have even splits.
        gathers: The emp ranks gather each other's rows.
        rows: Number of rows of the dispatch.
    """

    def __init__(self, view: RankView, moe: MoeSizes) -> None:
        self.view, self.moe = view, moe
        self.even = splits_evenly(view, moe)
        self.gathers = view.splits_sequence and view.emp > 1
        gathered = view.emp if self.gathers else 1
        self.rows = ExpertRows.of(moe, view.local_tokens, view.ep, gathered, even=self.even)
        self._communication = Communication(view)

    def dispatch(self) -> list[OpCost]:
        """Return the cost of the router, and of the dispatch to the experts' ranks and back."""
        view, moe, rows, inside = self.view, self.moe, self.rows.sent, self.rows.multiplied
        s, e, w, k = view.local_tokens, view.item_bytes, view.wide_bytes, moe.topk
        H, E = moe.hidden_size, moe.num_experts
        # Kept: x in fp32, probabilities and logits, chosen weights. With fp32 the shared experts keep the same x.
        router = w * s * H + 2 * w * s * E + (INDEX_BYTES + 3 * w) * s * k + 3 * w * s
        travels = view.ep > 1 or inside != rows
        order = 2 * INDEX_BYTES * s * k + (2 * INDEX_BYTES * inside if travels else 0) + (INDEX_BYTES + w) * rows
        return [
            OpCost("router", router, (Product(s, H, E),), moved=2 * w * s * H + 4 * w * s * E, transient=2 * w * s * H),
            OpCost("dispatch", order, moved=4 * e * rows * H, sent=tuple(self._sent()), transient=2 * e * rows * H),
        ]

    def experts(self) -> list[OpCost]:
        """Return the cost of this rank's experts, and of the weighted sum of their outputs."""
        view, moe, rows, inside = self.view, self.moe, self.rows.sent, self.rows.multiplied
        e, H = view.item_bytes, moe.hidden_size
        F, local = moe.ffn_hidden_size / view.emp, max(1, moe.num_experts // view.ep)
        columns = F * (2 if moe.gated else 1)
        activated = (e * inside * F if moe.gated else 0.0) + view.stored_bytes(inside * F)
        # Whole experts multiply their activation by the gate weights, others their summed outputs.
        weighs_inside = view.emp == 1
        weighed = e * inside * F if weighs_inside else e * rows * H
        kept = 0.0 if view.selective_recompute else activated + (weighed + e * rows if weighs_inside else 0.0)
        return [
            OpCost(
                "up",
                view.stored_bytes(inside * H) + e * inside * columns,
                (Product(inside, H, round(columns), local, mlp=True),),
                moved=e * inside * (H + columns),
                sent=tuple(self._sent_over_emp()),
                transient=e * inside * (columns + H),
            ),
            OpCost("activation", kept, moved=e * inside * (columns + F), transient=e * inside * (columns + 2 * F)),
            OpCost(
                "down",
                0.0,
                (Product(inside, round(F), H, local, mlp=True),),
                moved=e * inside * (H + F) + 2 * e * rows * H + 2 * weighed,
                transient=e * inside * (F + 2 * H),
            ),
            OpCost("combine", 0.0 if weighs_inside else weighed + e * rows),
        ]

    def _sent(self) -> list[CommCost]:
        """Return the communication of rows with their weights to the experts, outputs back, and row counts."""
        view, moe = self.view, self.moe
        H, e, w, E, k = moe.hidden_size, view.item_bytes, view.wide_bytes, moe.num_experts, moe.topk
        share, row = (view.ep - 1) / view.ep, e * row_columns(H, w, e)
        sent = []
        if view.ep > 1:
            for phase in ("forward", "backward"):
                sent += [CommCost("ep", "all_to_all", share * self.rows.sent * size, phase) for size in (row, H * e)]
        counted = view.ep > 1 and not self.even
        if counted:
            counts = INDEX_BYTES * E * share * (view.emp if self.gathers else 1)
            sent.append(CommCost("ep", "all_to_all", counts, "forward"))
        if counted and self.gathers:
            sent.append(self._communication.over_emp("all_gather", INDEX_BYTES * E * view.emp, "forward"))
        if view.splits_sequence:  # the losses and the load need sums over the tokens of all ranks
            numbers = E + 1 + (k if moe.has_capacity else 1) * E + (E if moe.loss_choices else 0)
            sent.append(self._communication.over_mp("all_gather", w * numbers * view.mp, "forward"))
        return sent

    def _sent_over_emp(self) -> list[CommCost]:
        """Return the communication over emp, the ranks that split the width of an expert."""
        view, over_emp, both = self.view, self._communication.over_emp, ("forward", "backward")
        if self.gathers:
            size = self.rows.multiplied * self.moe.hidden_size * view.item_bytes
            kinds = [(kind, phase) for kind in ("all_gather", "reduce_scatter") for phase in both]
            return [over_emp(kind, size, phase) for kind, phase in kinds]
        if view.emp > 1:
            size = self.rows.sent * self.moe.hidden_size * view.item_bytes
            return [over_emp("all_reduce", size, phase) for phase in both]
        return []
