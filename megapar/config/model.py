"""Options of the models beside the numbers that their layers take, which ``model/`` declares with their flags."""

from __future__ import annotations

from dataclasses import dataclass

from megapar.model.spec import MODELS
from megapar.schema.flag import flag

MOE = ("moe",)
ERNIE = ("ernie",)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model that is trained, and the weights of its losses."""

    ernie_model: str = flag(
        "ernie",
        "the encoder, or ERNIE 3.0 with its task branches",
        choices=tuple(spec.name for spec in MODELS.values() if spec.kind == "ernie"),
        models=ERNIE,
        after="use_flash_attn",
    )
    sop_loss_weight: float = flag(
        1.0, "weight of the sentence order loss", low=0, models=ERNIE, after="task_type_vocab_size"
    )
    mtp_loss_weight: float = flag(
        0.3,
        "weight of the multi-token prediction loss",
        low=0,
        models=MOE,
        aliases=("mtp-loss-scaling-factor",),
        after="mtp_depth",
    )
    multi_latent_attention: bool = flag(False, "keys and values from a compressed latent (DeepSeek)", models=MOE)


@dataclass(frozen=True, kw_only=True)
class MoeOptions:
    """The training of routers: their losses, their learning rate, their correction bias."""

    moe_router_lr_ratio: float = flag(
        1.0, "learning rate of the routers' weights over that of all others", above=0, models=MOE
    )
    moe_aux_loss_coeff: float = flag(0.001, "weight of the load balance loss", low=0, models=MOE)
    moe_seq_aux_loss_coeff: float = flag(
        0.0, "weight of the load balance loss of each sample by itself", low=0, models=MOE
    )
    moe_orthogonal_loss_coeff: float = flag(
        0.0, "weight of the loss that keeps the router's rows orthogonal (ERNIE 4.5)", low=0, models=MOE
    )
    moe_z_loss_coeff: float = flag(0.0, "weight of the router z-loss", low=0, models=MOE)
    moe_router_bias_update_rate: float = flag(
        0.0, "step of the router's correction bias after each optimizer step", low=0, models=MOE
    )


@dataclass(frozen=True, kw_only=True)
class AmpipeOptions:
    """Communication hiding inside and between MoE layers."""

    ampipe_degree: int = flag(
        1, "slices of the sequence that attention to experts are pipelined over", low=0, words={"auto": 0}, models=MOE
    )
    ampipe_tp_sp_comm_overlap: bool = flag(False, "hide the mp collectives of experts and attention too", models=MOE)
    ampipe_capacity: str = flag(
        "global", "capacity counted over the micro-batch, or per slice", choices=("global", "slice"), models=MOE
    )
    ampipe_slicing: str = flag(
        "equal", "slices of equal length, or of equal attention work", choices=("equal", "balanced"), models=MOE
    )
    ampipe_cross_layer: bool = flag(False, "slices go on into the next layer without being put together", models=MOE)
    use_pipe_experts: bool = flag(False, "pipeline the collectives and the computation of local experts", models=MOE)
    pipe_experts_multi_data: int = flag(1, "pieces each expert's kept rows are cut into", unit="pieces", models=MOE)
    pipe_experts_multi_stream: bool = flag(
        False, "chain ep and mp collectives so that they never share the link", models=MOE
    )
