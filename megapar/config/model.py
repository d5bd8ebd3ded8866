"""Sizes of the models, the mixture of experts, and the hiding of its communication."""

from __future__ import annotations

from dataclasses import dataclass

from megapar.schema.flag import Alias, flag

MOE = ("moe",)
ERNIE = ("ernie",)


@dataclass(frozen=True, kw_only=True)
class Model:
    """The transformer. pretrain_ernie.py builds an encoder; its norm, positions and activation are fixed."""

    num_layers: int = flag(4, "transformer layers", unit="layers", low=1)
    hidden_size: int = flag(256, "features of a token", unit="features", low=1)
    num_attention_heads: int = flag(4, "query heads", unit="heads", low=1)
    num_query_groups: int = flag(
        None,
        "key/value heads (grouped-query attention)",
        unit="heads",
        low=1,
        models=MOE,
        derived="num-attention-heads",
        aliases=("num-key-value-heads",),
    )
    head_dim: int = flag(
        None,
        "features of one head",
        unit="features",
        low=1,
        models=MOE,
        derived="hidden-size / num-attention-heads",
        aliases=("kv-channels",),
    )
    ffn_hidden_size: int = flag(
        None,
        "intermediate features of the dense MLP",
        unit="features",
        low=1,
        derived="4 x hidden-size; with swiglu 2/3 of it in whole 64s",
    )
    seq_length: int = flag(256, "tokens of a sample", unit="tokens", low=1, ernie=128)
    max_position_embeddings: int = flag(None, "positions the model knows", unit="tokens", low=1, derived="seq-length")
    vocab_size: int = flag(
        None,
        "rows of the embedding; a trained tokenizer gets as many ids",
        unit="tokens",
        low=8,
        derived="the tokenizer's size, or the checkpoint's rows; 4096 where one is trained",
    )
    normalization: str = flag(
        "rmsnorm", "kind of norm", ernie="layernorm", choices=("rmsnorm", "layernorm"), models=MOE
    )
    position_embedding_type: str = flag(
        "rope",
        "rotary or learned positions",
        ernie="learned",
        choices=("rope", "learned"),
        models=MOE,
        aliases=(Alias("use-rotary-position-embeddings", "rope"),),
    )
    activation: str = flag(
        "swiglu",
        "activation of the MLP and of the experts",
        ernie="gelu",
        choices=("swiglu", "gelu"),
        models=MOE,
        aliases=(Alias("swiglu", "swiglu"),),
    )
    add_bias_linear: bool = flag(
        False, "biases in linear layers", ernie=True, models=MOE, aliases=(Alias("disable-bias-linear", False),)
    )
    qk_norm: bool = flag(False, "RMSNorm on queries and keys of each head", models=MOE, aliases=("qk-layernorm",))
    layernorm_epsilon: float = flag(
        1e-5, "added to the variance in norms", ernie=1e-12, above=0, aliases=("norm-epsilon",)
    )
    rope_theta: float = flag(10000.0, "base of the rotary angles", above=0, models=MOE, aliases=("rotary-base",))
    untie_embeddings_and_output_weights: bool = flag(False, "an output projection of its own", models=MOE)
    attention_dropout: float = flag(0.0, "dropout on attention weights", ernie=0.1, low=0, high=0.99)
    hidden_dropout: float = flag(0.0, "dropout on the outputs of attention and MLP", ernie=0.1, low=0, high=0.99)
    init_std: float = flag(0.02, "standard deviation of initial weights", above=0, aliases=("init-method-std",))
    depth_scaled_init: bool = flag(
        False,
        "weights whose products are added to the residual stream start at init-std / sqrt(2 x layers) (Megatron-LM)",
    )
    use_flash_attn: bool = flag(
        True, "attention by the device's fused kernel; off: the plain reference", aliases=("use-fused-attn",)
    )
    ernie_model: str = flag(
        "ernie", "the encoder, or ERNIE 3.0 with its task branches", choices=("ernie", "ernie3"), models=ERNIE
    )
    type_vocab_size: int = flag(2, "rows of the token type embedding", low=1, models=ERNIE)
    task_type_vocab_size: int = flag(3, "rows of the task type embedding", low=1, models=ERNIE)
    sop_loss_weight: float = flag(1.0, "weight of the sentence order loss", low=0, models=ERNIE)
    task_num_layers: int = flag(12, "layers of each task branch of ERNIE 3.0", unit="layers", low=1, models=ERNIE)
    task_hidden_size: int = flag(768, "features of a token in the task branches", unit="features", low=1, models=ERNIE)
    task_num_attention_heads: int = flag(12, "heads of the task branches", unit="heads", low=1, models=ERNIE)
    task_ffn_hidden_size: int = flag(
        None,
        "intermediate features of the task branches' MLPs",
        unit="features",
        low=1,
        models=ERNIE,
        derived="4 x task-hidden-size",
    )
    generation_segments: int = flag(
        1, "segments of a generation sample, each with a memory of the one before", unit="segments", low=1, models=ERNIE
    )
    memory_length: int = flag(
        128, "positions of the segment before that a segment sees", unit="tokens", low=1, models=ERNIE
    )
    mtp_depth: int = flag(
        0,
        "multi-token prediction blocks, which predict the token after the next; 0: off",
        unit="blocks",
        low=0,
        high=1,
        models=MOE,
        aliases=("mtp-num-layers",),
    )
    mtp_loss_weight: float = flag(
        0.3, "weight of the multi-token prediction loss", low=0, models=MOE, aliases=("mtp-loss-scaling-factor",)
    )
    multi_latent_attention: bool = flag(False, "keys and values from a compressed latent (DeepSeek)", models=MOE)


@dataclass(frozen=True, kw_only=True)
class Moe:
    """The mixture of experts of pretrain_moe.py."""

    num_experts: int = flag(
        8,
        "routed experts; 0: a dense decoder",
        unit="experts",
        ernie=0,
        low=0,
        models=MOE,
        aliases=("num-moe-experts",),
    )
    moe_model_type: str = flag(
        "megatron_moe",
        "megatron_moe drops no token; deepspeed_moe has a capacity per expert",
        choices=("megatron_moe", "deepspeed_moe"),
        models=MOE,
    )
    moe_ffn_hidden_size: int = flag(
        None, "intermediate features of one expert", unit="features", low=1, models=MOE, derived="ffn-hidden-size"
    )
    moe_layer_ffn_hidden_sizes: tuple[int, ...] | None = flag(
        None,
        "intermediate features of one expert, one number for every layer with experts",
        unit="features",
        low=1,
        models=MOE,
        derived="moe-ffn-hidden-size everywhere",
    )
    moe_router_score_function: str = flag(
        "softmax", "what makes scores of router logits", choices=("softmax", "sigmoid"), models=MOE
    )
    moe_router_num_groups: int = flag(
        1, "equal groups of experts that choices are limited to some of", unit="groups", low=1, models=MOE
    )
    moe_router_group_topk: int = flag(
        None, "groups a token's choices come from", unit="groups", low=1, models=MOE, derived="moe-router-num-groups"
    )
    moe_router_topk_scaling_factor: float = flag(1.0, "factor on the weights of expert outputs", above=0, models=MOE)
    moe_router_lr_ratio: float = flag(
        1.0, "learning rate of the routers' weights over that of all others", above=0, models=MOE
    )
    moe_router_topk: int = flag(2, "experts a token is sent to", unit="experts", low=1, models=MOE)
    first_k_dense: int = flag(0, "leading layers with a dense MLP instead of experts", unit="layers", low=0, models=MOE)
    moe_shared_experts: int = flag(0, "experts that every token passes", unit="experts", low=0, models=MOE)
    moe_capacity_factor: float = flag(
        1.0,
        "capacity of an expert over an even share of the (token, choice) pairs",
        above=0,
        models=MOE,
        aliases=("moe-expert-capacity-factor", "moe-train-capacity-factor"),
    )
    moe_min_capacity: int = flag(4, "least capacity of an expert", unit="tokens", low=1, models=MOE)
    moe_drop_policy: str = flag(
        "token",
        "who is kept when an expert is full: earlier tokens, earlier choices, or higher probabilities",
        choices=("token", "choice", "probs"),
        models=MOE,
    )
    moe_capacity_scope: str = flag(
        "micro_batch",
        "tokens that capacity is counted over: the whole micro-batch, or each rank's own part (DeepSpeed)",
        choices=("micro_batch", "rank"),
        models=MOE,
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
class Ampipe:
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
