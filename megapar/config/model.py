"""Options of the models other than the numbers that their layers take; ``model/`` declares those with their flags."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megapar.model.spec import MODELS
from megapar.schema import role as roles
from megapar.schema.flag import ERNIE, MOE, flag


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model that is trained, and the weights of its losses."""

    role: ClassVar[roles.Role] = roles.LOSS
    ernie_model: str = flag(
        "ernie",
        "model: the ERNIE encoder, or ERNIE 3.0 with its task branches",
        choices=tuple(spec.name for spec in MODELS.values() if spec.kind == "ernie"),
        models=ERNIE,
        after="use_flash_attn",
        role=roles.MODEL,
    )
    sop_loss_weight: float = flag(
        1.0,
        "weight of the sentence order prediction loss",
        low=0,
        models=ERNIE,
        after="task_type_vocab_size",
        other=0.5,
    )
    mtp_loss_weight: float = flag(
        0.3,
        "weight of the multi-token prediction loss",
        low=0,
        models=MOE,
        aliases=("mtp-loss-scaling-factor",),
        after="mtp_depth",
        other=0.1,
    )


@dataclass(frozen=True, kw_only=True)
class MoeOptions:
    """The dispatch, and the training of routers: losses, learning rate, correction bias, and unnormalized weights."""

    role: ClassVar[roles.Role] = roles.LOSS
    moe_router_pre_softmax: bool = flag(
        False,
        "the weights of a token's experts are their probabilities by a softmax over all experts, not divided by their "
        "sum: --no-norm-topk-prob",
        after="moe_router_score_function",
        role=roles.MODEL,
    )

    moe_dispatch: str = flag(
        "auto",
        "how tokens reach experts on other nodes; plain: a row for each of a token's experts; node: a row for each "
        "node, which passes it on to its ranks",
        choices=("plain", "node", "auto"),
        derived="node where ep spans several nodes and the estimated time is at least 1.1 times less, else plain",
        role=roles.KNOB,
        other="node",
    )
    moe_rebalance_interval: int = flag(
        0,
        "steps after which experts move between the ranks of ep so that their measured load is even; 0: they stay",
        unit="steps",
        low=0,
        role=roles.MOVES_EXPERTS,
    )
    moe_router_lr_ratio: float = flag(
        1.0, "learning rate of the routers' weights, as a multiple of --lr", above=0, role=roles.OPTIMIZER, other=0.5
    )
    moe_aux_loss_coeff: float = flag(0.001, "weight of the load balancing loss", low=0, other=0.1)
    moe_seq_aux_loss_coeff: float = flag(
        0.0, "weight of the load balancing loss computed for each sample separately", low=0
    )
    moe_orthogonal_loss_coeff: float = flag(
        0.0, "weight of the loss that keeps the rows of the router's weight orthogonal (ERNIE 4.5)", low=0
    )
    moe_z_loss_coeff: float = flag(0.0, "weight of the router z-loss", low=0)
    moe_router_bias_update_rate: float = flag(
        0.0,
        "amount by which the router's correction bias changes after each optimizer step",
        low=0,
        role=roles.OPTIMIZER,
    )


@dataclass(frozen=True, kw_only=True)
class AmpipeOptions:
    """Overlap of communication with computation within and between MoE layers."""

    role: ClassVar[roles.Role] = roles.KNOB
    ampipe_degree: int = flag(
        1,
        "number of sequence slices in which a layer, from attention to experts, is pipelined; 1: off; auto: the "
        "trainer chooses",
        low=0,
        words={"auto": 0},
    )
    ampipe_tp_sp_comm_overlap: bool = flag(False, "also overlap the mp collectives of experts and attention")
    ampipe_capacity: str = flag(
        "global",
        "expert capacity is counted over the micro-batch (global) or per slice",
        choices=("global", "slice"),
        role=roles.TOKENS,
    )
    ampipe_slicing: str = flag(
        "equal", "slices have equal length, or balanced attention work", choices=("equal", "balanced")
    )
    ampipe_cross_layer: bool = flag(False, "pass slices on to the next layer without concatenating them in between")
    use_pipe_experts: bool = flag(False, "overlap the collectives of one local expert with the computation of another")
    pipe_experts_multi_data: int = flag(1, "chunks that the rows of each expert are split into", unit="chunks")
    pipe_experts_multi_stream: bool = flag(
        False, "run ep and mp collectives one at a time, so that they do not compete for the link"
    )
