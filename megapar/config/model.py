"""Options of the models other than the numbers that their layers take; ``model/`` declares those with their flags."""

from __future__ import annotations

from dataclasses import dataclass

from megapar.model.spec import MODELS
from megapar.schema.flag import ERNIE, MOE, flag


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model that is trained, and the weights of its losses."""

    ernie_model: str = flag(
        "ernie",
        "model: the ERNIE encoder, or ERNIE 3.0 with its task branches",
        choices=tuple(spec.name for spec in MODELS.values() if spec.kind == "ernie"),
        models=ERNIE,
        after="use_flash_attn",
    )
    sop_loss_weight: float = flag(
        1.0, "weight of the sentence order prediction loss", low=0, models=ERNIE, after="task_type_vocab_size"
    )
    mtp_loss_weight: float = flag(
        0.3,
        "weight of the multi-token prediction loss",
        low=0,
        models=MOE,
        aliases=("mtp-loss-scaling-factor",),
        after="mtp_depth",
    )


@dataclass(frozen=True, kw_only=True)
class MoeOptions:
    """The dispatch, and the training of routers: losses, learning rate, correction bias, and unnormalized weights."""

    moe_router_pre_softmax: bool = flag(
        False,
        "the weights of a token's experts are their probabilities by a softmax over all experts, not divided by their "
        "sum: --no-norm-topk-prob",
        models=MOE,
        after="moe_router_score_function",
    )

    moe_dispatch: str = flag(
        "auto",
        "how tokens reach experts on other nodes; plain: a row for each of a token's experts; node: a row for each "
        "node, which passes it on to its ranks",
        choices=("plain", "node", "auto"),
        models=MOE,
        derived="node where ep spans several nodes and the estimated time is at least 1.1 times less, else plain",
    )
    moe_rebalance_interval: int = flag(
        0,
        "steps after which experts move between the ranks of ep so that their measured load is even; 0: they stay",
        unit="steps",
        low=0,
        models=MOE,
    )
    moe_router_lr_ratio: float = flag(
        1.0, "learning rate of the routers' weights, as a multiple of --lr", above=0, models=MOE
    )
    moe_aux_loss_coeff: float = flag(0.001, "weight of the load balancing loss", low=0, models=MOE)
    moe_seq_aux_loss_coeff: float = flag(
        0.0, "weight of the load balancing loss computed for each sample separately", low=0, models=MOE
    )
    moe_orthogonal_loss_coeff: float = flag(
        0.0, "weight of the loss that keeps the rows of the router's weight orthogonal (ERNIE 4.5)", low=0, models=MOE
    )
    moe_z_loss_coeff: float = flag(0.0, "weight of the router z-loss", low=0, models=MOE)
    moe_router_bias_update_rate: float = flag(
        0.0, "amount by which the router's correction bias changes after each optimizer step", low=0, models=MOE
    )


@dataclass(frozen=True, kw_only=True)
class AmpipeOptions:
    """Overlap of communication with computation within and between MoE layers."""

    ampipe_degree: int = flag(
        1,
        "number of sequence slices in which a layer, from attention to experts, is pipelined; 1: off; auto: the "
        "trainer chooses",
        low=0,
        words={"auto": 0},
        models=MOE,
    )
    ampipe_tp_sp_comm_overlap: bool = flag(
        False, "also overlap the mp collectives of experts and attention", models=MOE
    )
    ampipe_capacity: str = flag(
        "global",
        "expert capacity is counted over the micro-batch (global) or per slice",
        choices=("global", "slice"),
        models=MOE,
    )
    ampipe_slicing: str = flag(
        "equal",
        "slices have equal length, or balanced attention work",
        choices=("equal", "balanced"),
        models=MOE,
    )
    ampipe_cross_layer: bool = flag(
        False, "pass slices on to the next layer without concatenating them in between", models=MOE
    )
    use_pipe_experts: bool = flag(
        False, "overlap the collectives of one local expert with the computation of another", models=MOE
    )
    pipe_experts_multi_data: int = flag(
        1, "chunks that the rows of each expert are split into", unit="chunks", models=MOE
    )
    pipe_experts_multi_stream: bool = flag(
        False, "run ep and mp collectives one at a time, so that they do not compete for the link", models=MOE
    )
