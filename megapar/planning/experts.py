"""What a layer of experts asks of a rank: router, dispatch, experts, combine.

Shape letters: s positions of this rank, H hidden, F MLP width, E experts, k choices, R rows of a rank's experts.
"""

from __future__ import annotations

from megapar.model.decoder.sizes import MoeSizes
from megapar.moe.row import row_columns
from megapar.planning.layout import Layout
from megapar.planning.messages import Messages
from megapar.planning.parts import INDEX, Message, Part, Product


def expert_parts(layout: Layout, moe: MoeSizes) -> list[Part]:
    """From the router to the combined output, without the norm before it and the shared experts beside it."""
    grid = layout.config.grid
    rows = rows_of(layout, moe)
    gathers = layout.cut and grid.emp > 1
    inside = rows * grid.emp if gathers else rows
    return [*_dispatch(layout, moe, rows, inside), *_experts(layout, moe, rows, inside)]


def even(layout: Layout, moe: MoeSizes) -> bool:
    """Messages of even splits, padded to the capacity."""
    grid, ampipe = layout.config.grid, layout.config.ampipe
    alone = not layout.cut or moe.capacity_scope == "rank"
    sliced = ampipe.ampipe_degree > 1 or ampipe.use_pipe_experts
    found = moe.has_capacity and alone and (grid.ep > 1 or (layout.cut and grid.emp > 1))
    return found and not sliced


def rows_of(layout: Layout, moe: MoeSizes) -> float:
    """Rows that this rank sends and, under a balanced load, receives."""
    tokens = layout.own
    if even(layout, moe):
        return moe.num_experts * moe.capacity(tokens)
    pairs = tokens * moe.topk
    return min(pairs, moe.num_experts * moe.capacity(tokens)) if moe.has_capacity else pairs


def _dispatch(layout: Layout, moe: MoeSizes, rows: float, inside: float) -> list[Part]:
    """The router, and the way to the experts' ranks and back. inside: rows that a rank's experts multiply."""
    grid, s, H = layout.config.grid, layout.own, moe.hidden_size
    e, w, E, k = layout.item, layout.wide, moe.num_experts, moe.topk
    # x in fp32, probabilities and logits, chosen weights; with fp32 x itself is what the shared experts keep.
    router = w * s * H + 2 * w * s * E + (INDEX + 3 * w) * s * k + 3 * w * s
    travels = grid.ep > 1 or inside != rows
    order = 2 * INDEX * s * k + (2 * INDEX * inside if travels else 0) + (INDEX + w) * rows
    return [
        Part("router", router, (Product(s, H, E),), moved=2 * w * s * H + 4 * w * s * E, transient=2 * w * s * H),
        Part(
            "dispatch",
            order,
            moved=4 * e * rows * H,
            messages=tuple(_sent(layout, moe, rows, gathers=inside != rows)),
            transient=2 * e * rows * H,
        ),
    ]


def _sent(layout: Layout, moe: MoeSizes, rows: float, *, gathers: bool) -> list[Message]:
    """Rows with their weights to the experts, outputs back, and the counts that say how many."""
    grid, messages = layout.config.grid, Messages(layout)
    H, e, w, E, k = moe.hidden_size, layout.item, layout.wide, moe.num_experts, moe.topk
    share, row = (grid.ep - 1) / grid.ep, e * row_columns(H, w, e)
    found = []
    if grid.ep > 1:
        for phase in ("forward", "backward"):
            found += [Message("ep", "all_to_all", share * rows * size, phase) for size in (row, H * e)]
    counted = grid.ep > 1 and not even(layout, moe)
    if counted:
        found.append(Message("ep", "all_to_all", INDEX * E * share * (grid.emp if gathers else 1), "forward"))
    if counted and gathers:
        found.append(messages.message("emp", "all_gather", INDEX * E * grid.emp, "forward"))
    if layout.cut:  # what the losses and the load need of every rank's tokens
        numbers = E + 1 + k * E + (E if moe.loss_choices else 0)
        found.append(messages.message("mp", "all_gather", w * numbers * grid.mp, "forward"))
    return found


def _experts(layout: Layout, moe: MoeSizes, rows: float, inside: float) -> list[Part]:
    grid, e, H = layout.config.grid, layout.item, moe.hidden_size
    F, local = moe.ffn_hidden_size / grid.emp, max(1, moe.num_experts // grid.ep)
    columns = F * (2 if moe.gated else 1)
    selective = layout.config.recompute.recompute_granularity == "selective"
    activated = 0.0 if selective else (e * inside * F if moe.gated else 0.0) + layout.stored(inside * F)
    return [
        Part(
            "up",
            layout.stored(inside * H) + e * inside * columns,
            (Product(inside, H, round(columns), local, mlp=True),),
            moved=e * inside * (H + columns),
            messages=tuple(_inner(layout, rows, inside, H)),
            transient=e * inside * (columns + H),
        ),
        Part("activation", activated, moved=e * inside * (columns + F), transient=e * inside * (columns + 2 * F)),
        Part(
            "down",
            0.0,
            (Product(inside, round(F), H, local, mlp=True),),
            moved=e * inside * (H + F) + 4 * e * rows * H,
            transient=e * inside * (F + 2 * H),
        ),
        Part("combine", e * rows * H + e * rows),
    ]


def _inner(layout: Layout, rows: float, inside: float, H: int) -> list[Message]:
    """Inside the group that shares an expert's width."""
    messages, both = Messages(layout), ("forward", "backward")
    if inside != rows:
        size = inside * H * layout.item
        kinds = [(kind, phase) for kind in ("all_gather", "reduce_scatter") for phase in both]
        return [messages.message("emp", kind, size, phase) for kind, phase in kinds]
    if layout.config.grid.emp > 1:
        return [messages.message("emp", "all_reduce", rows * H * layout.item, phase) for phase in both]
    return []
