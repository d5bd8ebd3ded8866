"""Flags of the model other than the numbers that its layers take (``model/`` declares those), and of its training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megapar.model.spec import MODELS
from megapar.schema import role as roles
from megapar.schema.flag import ERNIE, MOE, Alias, flag


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


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Batches, steps and precision."""

    role: ClassVar[roles.Role] = roles.OPTIMIZER
    micro_batch_size: int = flag(
        4, "sequences per forward pass on each data rank", unit="sequences", low=1, role=roles.KNOB, other=2
    )
    global_batch_size: int = flag(
        None,
        "sequences per optimizer step",
        unit="sequences",
        low=1,
        derived="micro-batch-size x gradient-merge-acc-step x data ranks",
    )
    rampup_batch_size: tuple[int, ...] | None = flag(
        None,
        "START INCREMENT SAMPLES: increase the global batch size from START, by INCREMENT at a time, over the first "
        "SAMPLES samples",
        count=3,
        low=1,
        other=(1, 1, 2),
    )
    train_iters: int = flag(100, "number of optimizer steps", unit="steps", low=0, other=3)
    train_epochs: int = flag(
        0,
        "sft: passes over the conversations, whose whole global batches are the steps of the run, in place of "
        "--train-iters, which --validate-only and megapar plan, without reading the data, assume; 0: off",
        unit="epochs",
        low=0,
        models=MOE,
        other=2,
        undrawn="it needs --task sft",
    )
    seed: int = flag(1234, "seed of weights, data order and dropout", low=0, high=2**63 - 1, other=7)
    dtype: str = flag(
        "auto",
        "compute precision; auto: bf16 on accelerators, fp16 on those without bf16 (V100), fp32 on CPUs",
        choices=("auto", "fp32", "bf16", "fp16", "fp64"),
        aliases=(Alias("bf16", "bf16"), Alias("fp16", "fp16")),
        role=roles.PRECISION,
    )
    deterministic: bool = flag(
        False,
        "use only kernels whose results are reproducible bit for bit",
        aliases=("deterministic-mode",),
        role=roles.PRECISION,
    )
    eval_interval: int = flag(100, "steps between evaluations; 0: never", unit="steps", low=0, role=roles.EVALUATES)
    eval_iters: int = flag(10, "global batches per evaluation", unit="batches", low=1, role=roles.EVALUATES, other=2)
    initial_loss_scale: float = flag(65536.0, "fp16: initial loss scale", above=0, other=1024.0)
    min_loss_scale: float = flag(1.0, "fp16: minimum loss scale", above=0)
    loss_scale_window: int = flag(1000, "fp16: steps without overflow before the scale grows", unit="steps", low=1)
    loss_scale_factor: float = flag(2.0, "fp16: factor by which the scale grows and shrinks", above=1)
    hysteresis: int = flag(2, "fp16: overflows before the scale shrinks", unit="steps", low=1)
    progressive_iters: int = flag(
        0,
        "progressive training: steps over which sequence length, batch size, learning rate and dropout increase; "
        "0: off",
        unit="steps",
        low=0,
        models=ERNIE,
        other=2,
    )
    progressive_batch_multiple: int = flag(
        1,
        "progressive training: increment of the batch, in micro-batches of all data ranks together",
        unit="micro-batches",
        low=1,
        models=ERNIE,
    )
    progressive_length_multiple: int = flag(
        8, "progressive training: increment of the sequence length", unit="tokens", low=6, models=ERNIE, other=16
    )
    fp8: bool = flag(
        False,
        "compute the products of linear layers and their input gradients in fp8 (e4m3, scales by "
        "--fp8-recipe), except for routed experts, latents, routers, embeddings and heads; --device cpu emulates it",
        role=roles.PRECISION,
    )
    fp8_recipe: str = flag(
        "blockwise",
        "scales of --fp8; blockwise: one for 128 features, or 128 x 128 of a weight (Hopper); tensorwise: one for a "
        "whole input, gradient or weight (compute capability 8.9 or more)",
        choices=("blockwise", "tensorwise"),
        role=roles.PRECISION,
    )
    fp8_experts: bool = flag(
        False,
        "with fp8, compute the products of routed experts and their input gradients in fp8 too, with a scale per row",
        role=roles.PRECISION,
        models=MOE,
    )
    apex: bool = flag(
        False,
        "compute norms, sums of weight gradients in fp32 and AdamW by the kernels of NVIDIA apex",
        role=roles.by_hand("has not been measured, so no figures"),
        undrawn="needs a GPU and apex; tests/training/test_apex.py runs it with a stand-in",
    )
    attention_backend: str = flag(
        "auto",
        "kernel of attention on an NVIDIA GPU; auto: the default until a measurement on a GPU has confirmed another",
        choices=("auto", "flash", "cudnn", "flash3"),
        role=roles.by_hand("has no confirmed kernel but the default's, so no figures"),
        undrawn="needs a GPU; scripts/gpu_day.sh compares the kernels",
        other="cudnn",
    )
    compile: str = flag(
        "auto",
        "compile the functions between collectives with torch.compile",
        type="switch",
        derived="off until measured on GPUs",
        role=roles.by_hand("has no measured gain on any accelerator, so no figures"),
        other="on",
    )
    manual_gc: str = flag(
        "auto",
        "run Python's garbage collector only at fixed steps, the same on all ranks",
        type="switch",
        derived="on from 64 ranks",
        role=roles.COLLECTS,
        other="on",
    )
    manual_gc_interval: int = flag(
        100, "steps between garbage collections with --manual-gc", unit="steps", low=1, role=roles.COLLECTS
    )


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """The optimizer and its learning rate schedule."""

    role: ClassVar[roles.Role] = roles.OPTIMIZER
    optimizer: str = flag(
        "adamw",
        "adamw: decoupled weight decay; muon: matrices move by their orthogonalized momentum, and the rest by AdamW; "
        "sgd: with momentum, and weight decay added to the gradient",
        choices=("adamw", "muon", "sgd"),
    )
    muon_momentum: float = flag(0.95, "muon: decay rate of the mean of gradients", low=0, high=0.999999)
    muon_use_nesterov: bool = flag(True, "muon: look ahead from the mean of gradients, as Nesterov's momentum does")
    muon_num_ns_steps: int = flag(5, "muon: Newton-Schulz iterations of an orthogonalization", low=1, high=99)
    muon_coefficient_type: str = flag(
        "quintic",
        "muon: polynomials of the iterations. simple: (3.4445, -4.7750, 2.0315) in each; quintic: another in each of "
        "five; polar_express: those of The Polar Express",
        choices=("simple", "quintic", "polar_express"),
    )
    muon_scale_mode: str = flag(
        "spectral",
        "muon: factor of the update of a matrix [R, C]. spectral: sqrt(max(R, C)); unit_rms_norm: sqrt(R / C); "
        "shape_scaling: sqrt(max(1, R / C))",
        choices=("spectral", "unit_rms_norm", "shape_scaling"),
    )
    muon_extra_scale_factor: float = flag(1.0, "muon: a further factor of it (Moonlight: 0.2)", above=0)
    muon_qkv_split: str = flag(
        "tensor",
        "muon: what is orthogonalized of projections to heads. tensor: queries, keys and values, each whole; fused: "
        "all of a layer together; group: those of each group of queries; head: those of each head",
        choices=("tensor", "fused", "group", "head"),
    )
    muon_ns_dtype: str = flag(
        "auto",
        "muon: dtype of messages and iterations",
        choices=("auto", "bf16", "fp32", "fp64"),
        derived="bf16 on an accelerator; on a CPU, and in fp64, that of the master weights",
        other="fp32",
        undrawn="in fp64, in which cases are compared, it has one value",
    )
    sgd_momentum: float = flag(0.9, "sgd: decay rate of the momentum; 0: none", low=0, high=0.999999)
    lr: float = flag(1e-3, "maximum learning rate", above=0, other=0.02)
    min_lr: float = flag(0.0, "learning rate after the decay", low=0, other=0.001)
    mup_base_hidden_size: int = flag(
        0,
        "muP: initial scales and learning rates by which --lr of a model with this hidden size, and otherwise the same "
        "proportions, suits this one; 0: off",
        unit="features",
        low=0,
        models=MOE,
        other=8,
    )
    decoupled_lr: float | None = flag(
        None, "maximum learning rate of the word embedding and the head, if not --lr", above=0, other=0.05
    )
    decoupled_min_lr: float | None = flag(
        None, "with --decoupled-lr: their learning rate after the decay, if not --min-lr", low=0, other=0.001
    )
    lr_decay_style: str = flag(
        "cosine",
        "shape of the learning rate decay after warmup; wsd (warmup-stable-decay): constant, then a decay over the "
        "last --lr-wsd-decay-iters",
        choices=("constant", "linear", "cosine", "inverse-square-root", "wsd"),
    )
    lr_warmup_iters: int = flag(0, "steps of linear learning rate warmup", unit="steps", low=0)
    lr_decay_iters: int = flag(
        None, "step at which the decay ends", unit="steps", low=1, derived="train-iters", other=4
    )
    lr_wsd_decay_iters: int = flag(
        None, "wsd: steps of the final decay", unit="steps", low=1, derived="a tenth of lr-decay-iters", other=3
    )
    lr_wsd_decay_style: str = flag(
        "linear",
        "wsd: shape of the final decay",
        choices=("linear", "cosine", "exponential", "minus_sqrt"),
        other="exponential",
    )
    weight_decay: float = flag(0.1, "weight decay (not applied to biases and norms)", ernie=0.01, low=0, other=0.5)
    weight_decay_incr_style: str = flag(
        "constant",
        "weight decay over the steps of a run; linear, cosine: from --start-weight-decay to --end-weight-decay",
        choices=("constant", "linear", "cosine"),
        other="linear",
    )
    start_weight_decay: float | None = flag(None, "weight decay of the first step", low=0, other=0.5)
    end_weight_decay: float | None = flag(None, "weight decay after the last step", low=0, other=0.5)
    clip_grad: float = flag(1.0, "gradient clipping: maximum global gradient norm; 0: off", low=0, other=0.01)
    qk_clip_threshold: float = flag(
        0.0,
        "QK-clip (Kimi K2: 100): after an update, scale queries and keys of each head of attention whose scores were "
        "above it, by threshold / --qk-clip-statistic of the global batch. A query head alone; with "
        "--multi-latent-attention the root on plain queries and keys, and rotary queries whole. 0: off",
        low=0,
        models=MOE,
        other=1.0,
    )
    qk_clip_statistic: str = flag(
        "lse",
        "qk-clip: largest value over all rows of a head. lse: a row's log-sum-exp, at most ln(keys) above its maximum, "
        "which every kernel gives; max: its maximum, which only plain products give",
        choices=("lse", "max"),
        models=MOE,
    )
    adam_beta1: float = flag(0.9, "AdamW beta 1", low=0, high=0.999999)
    adam_beta2: float = flag(0.95, "AdamW beta 2", ernie=0.999, low=0, high=0.999999)
    adam_eps: float = flag(1e-8, "AdamW epsilon", above=0, other=0.001)
    exp_avg_dtype: str = flag(
        "fp32",
        "AdamW: dtype of the first moment, and of Muon's momentum; fp32: that of the master weights; bf16: rounded "
        "stochastically, alike on every layout",
        choices=("fp32", "bf16"),
    )
    exp_avg_sq_dtype: str = flag(
        "fp32", "AdamW: dtype of the second moment, as --exp-avg-dtype", choices=("fp32", "bf16")
    )
    main_grads_dtype: str = flag(
        "fp32",
        "AdamW, Muon: dtype in which gradients are summed and kept until the update; fp32: that of the master weights",
        choices=("fp32", "bf16"),
        role=roles.PRECISION,
    )
    store_param_remainders: bool = flag(
        False,
        "AdamW, Muon: keep master weights as bf16 weights, rounded half up, and the 16 bits that these lack",
        role=roles.PRECISION,
    )
    override_opt_param_scheduler: bool = flag(
        False, "use the learning rate schedule of the flags instead of the checkpoint's", undrawn="is about checkpoints"
    )
