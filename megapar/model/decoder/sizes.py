"""Sizes and options of a decoder and its mixture-of-experts layers. Standard library only, no torch.

All sizes are global and independent of the parallel layout.

Tested in ``tests/model/test_table.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from operator import not_
from typing import TYPE_CHECKING, Any, ClassVar

from megapar.model.attention.latent import LATENT, LatentAttentionSizes
from megapar.model.attention_sizes import QK_NORM_SCOPES, AttentionSizes
from megapar.model.decoder.layer_pattern import ALL, flags_of, layers_of, to_pattern, to_text
from megapar.model.rope_scaling import NONE, RopeScaling
from megapar.model.sizes import ModelSizes, defaults_of, require_choice
from megapar.schema.flag import SWITCH, Alias, flag, follows, from_flags

if TYPE_CHECKING:
    from typing_extensions import Self

NORMALIZATIONS = ("rmsnorm", "layernorm")
POSITION_EMBEDDINGS = ("rope", "learned")
MEGATRON_MOE = "megatron_moe"
DEEPSPEED_MOE = "deepspeed_moe"
KINDS = (MEGATRON_MOE, DEEPSPEED_MOE)
DROP_POLICIES = ("token", "choice", "probs")
CAPACITY_SCOPES = ("micro_batch", "rank")
ACTIVATIONS = ("swiglu", "gelu")
SCORES = ("softmax", "sigmoid")
NORM_PLACEMENTS = ("input", "output")
DENSE_BLOCK = "dense"
LAYER_BLOCK = "layer"
MTP_BLOCKS = (DENSE_BLOCK, LAYER_BLOCK)


@dataclass(frozen=True)
class MoeSizes:
    """Sizes and routing options of one mixture-of-experts layer. All sizes are global.

    Attributes:
        hidden_size: Features of a token (H).
        ffn_hidden_size: Intermediate features of one expert (F).
        num_experts: Routed experts (E).
        topk: Experts per token (k), 1 <= k <= E.
        shared_experts: Experts that all tokens pass, built as one MLP of width ``shared_width``. 0 for none.
        shared_ffn: Intermediate features of the shared MLP; 0: ``shared_experts`` times those of an expert.
        shared_gate: The shared MLP's output is multiplied by a sigmoid of a product of each token and a weight.
        kind: ``megatron_moe`` (dropless) or ``deepspeed_moe`` (has a capacity and drops tokens).
        capacity_factor: Capacity factor, for deepspeed_moe only; see ``capacity``.
        min_capacity: Least capacity of an expert, for deepspeed_moe only.
        drop_policy: Choices to keep when an expert is full, for deepspeed_moe only.
        capacity_scope: Tokens that share a capacity: those of the ``micro_batch``, or of one ``rank``.
        activation: ``swiglu`` (gate and up) or ``gelu`` (up only).
        add_bias: Experts have biases.
        score: Function from router logits to scores: ``softmax`` or ``sigmoid``.
        groups: Equal groups of experts; a token's choices come from the best ``group_topk`` of them.
        group_topk: Groups that a token's choices come from.
        group_score_topk: Best experts of a group whose scores are summed as the group's score; 0: ``topk`` /
            ``group_topk``.
        norm_topk_prob: ``on``: the chosen scores are divided by their sum; ``off``: they are weights as they are;
            ``auto``: divided if ``topk`` > 1.
        scaling: Factor on the weights of expert outputs.
        sequence_aux: Compute the load balancing loss of each sample.
        orthogonal: Compute the loss that keeps the router's rows orthogonal.
        biased: The correction bias may differ from 0.
    """

    hidden_size: int = follows(lambda values: values["hidden_size"])
    ffn_hidden_size: int = flag(
        None,
        "intermediate features of one expert",
        name="moe_ffn_hidden_size",
        unit="features",
        low=1,
        derived="ffn-hidden-size",
        after="moe_model_type",
    )
    num_experts: int = flag(
        8, "routed experts; 0: a dense decoder", unit="experts", ernie=0, low=0, aliases=("num-moe-experts",)
    )
    topk: int = flag(2, "experts a token is sent to", name="moe_router_topk", unit="experts", low=1)
    shared_experts: int = flag(
        0, "experts that every token passes through", name="moe_shared_experts", unit="experts", low=0, value=0
    )
    shared_ffn: int = flag(
        0,
        "intermediate features of the shared experts, in place of a number of experts; 0: moe-shared-experts x "
        "moe-ffn-hidden-size",
        name="moe_shared_expert_intermediate_size",
        unit="features",
        low=0,
        value=0,
    )
    shared_gate: bool = flag(
        False,
        "multiply each token's output of the shared experts by a sigmoid (Qwen2-MoE)",
        name="moe_shared_expert_gate",
        value=False,
    )
    kind: str = flag(
        MEGATRON_MOE,
        "megatron_moe drops no token; deepspeed_moe has a capacity per expert",
        name="moe_model_type",
        choices=KINDS,
        after="num_experts",
        value=MEGATRON_MOE,
    )
    capacity_factor: float = flag(
        1.0,
        "capacity of an expert over an even share of the (token, choice) pairs",
        name="moe_capacity_factor",
        above=0,
        aliases=("moe-expert-capacity-factor", "moe-train-capacity-factor"),
        value=1.0,
    )
    min_capacity: int = flag(4, "minimum capacity of an expert", name="moe_min_capacity", unit="tokens", low=1, value=4)
    drop_policy: str = flag(
        "token",
        "what is kept when an expert is full: earlier tokens, earlier choices, or higher probabilities",
        name="moe_drop_policy",
        choices=DROP_POLICIES,
        value="token",
    )
    capacity_scope: str = flag(
        "micro_batch",
        "tokens that share a capacity: those of the whole micro-batch, or of each rank (DeepSpeed)",
        name="moe_capacity_scope",
        choices=CAPACITY_SCOPES,
        value="micro_batch",
    )
    activation: str = follows(lambda values: values["activation"], value="swiglu")
    add_bias: bool = follows(lambda values: values["add_bias_linear"], value=False)
    score: str = flag(
        "softmax",
        "function from router logits to scores",
        name="moe_router_score_function",
        choices=SCORES,
        value="softmax",
    )
    groups: int = flag(
        1,
        "equal groups of experts; a token's choices come from some of the groups",
        name="moe_router_num_groups",
        unit="groups",
        low=1,
        value=1,
    )
    group_topk: int = flag(
        None,
        "groups a token's choices come from",
        name="moe_router_group_topk",
        unit="groups",
        low=1,
        derived="moe-router-num-groups",
        value=1,
    )
    group_score_topk: int = flag(
        0,
        "best experts of a group whose scores are summed as the group's score; auto: moe-router-topk / "
        "moe-router-group-topk",
        name="moe_router_group_score_topk",
        unit="experts",
        low=0,
        words={"auto": 0},
        value=0,
    )
    norm_topk_prob: str = flag(
        "auto",
        "divide the scores of a token's experts by their sum; auto: if they are several",
        type="switch",
        choices=SWITCH,
        value="auto",
    )
    scaling: float = flag(
        1.0, "factor on the weights of expert outputs", name="moe_router_topk_scaling_factor", above=0, value=1.0
    )
    sequence_aux: bool = follows(lambda values: values["moe_seq_aux_loss_coeff"] > 0, value=False)
    orthogonal: bool = follows(lambda values: values["moe_orthogonal_loss_coeff"] > 0, value=False)
    biased: bool = follows(
        lambda values: values["moe_router_bias_update_rate"] > 0 or bool(values["load"] or values["load_hf"]),
        value=True,
    )

    def __post_init__(self) -> None:
        # The command line refuses wrong values with a full report. This check is for direct callers.
        for field, legal in (
            ("kind", KINDS),
            ("drop_policy", DROP_POLICIES),
            ("capacity_scope", CAPACITY_SCOPES),
            ("activation", ACTIVATIONS),
            ("score", SCORES),
            ("norm_topk_prob", SWITCH),
        ):
            require_choice(field, getattr(self, field), legal)
        if not 1 <= self.topk <= self.num_experts:
            raise ValueError(f"topk is {self.topk}; it must be 1 to num_experts ({self.num_experts})")
        if self.shared_gate and not self.shared_width:
            raise ValueError("shared_gate is set, but there are no shared experts")
        if self.num_experts % self.groups or not 1 <= self.group_topk <= self.groups:
            raise ValueError(
                f"{self.num_experts} experts in {self.groups} groups, of which {self.group_topk} are chosen"
            )
        size = self.num_experts // self.groups
        if self.group_score_topk > size:
            raise ValueError(f"the score of a group sums {self.group_score_topk} experts of its {size}")
        if (self.topk % self.group_topk and not self.group_score_topk) or self.topk > self.group_topk * size:
            raise ValueError(f"{self.topk} choices do not come evenly from {self.group_topk} groups")

    @property
    def has_capacity(self) -> bool:
        """Experts have a capacity, so tokens may be dropped."""
        return self.kind == DEEPSPEED_MOE

    @property
    def scored_of_group(self) -> int:
        """Number of a group's best experts whose scores are summed as the group's score."""
        return self.group_score_topk or self.topk // self.group_topk

    @property
    def renormalizes(self) -> bool:
        """The scores of a token's experts are divided by their sum."""
        return self.topk > 1 if self.norm_topk_prob == "auto" else self.norm_topk_prob == "on"

    @property
    def loss_choices(self) -> int:
        """Number of a token's best experts by score that the load balancing losses count; 0 if they are its choices.

        With biases or groups the choices may differ from the best experts by score, which the losses of DeepSeek-V3
        count (arXiv 2412.19437, equation 18).
        """
        if not self.biased and self.group_topk == self.groups:
            return 0
        return 1 if self.has_capacity and self.drop_policy == "choice" else self.topk

    @property
    def gated(self) -> bool:
        """The experts have a gate in addition to the up projection."""
        return self.activation == "swiglu"

    @property
    def shared_width(self) -> int:
        """Intermediate features of the shared MLP; 0 without shared experts."""
        return self.shared_ffn or self.shared_experts * self.ffn_hidden_size

    def capacity(self, tokens: int) -> int:
        """Return the capacity C: (token, choice) pairs that one expert keeps of ``tokens`` non-padding tokens.

        It is ceil(tokens / E · factor · k), at least ``min_capacity``. Decimal fractions make it exact: 1.1 times 10 is
        11, not 12.
        """
        ratio = self.capacity_per_token
        return max(-(-tokens * ratio.numerator // ratio.denominator), self.min_capacity)

    @cached_property
    def capacity_per_token(self) -> Fraction:
        """Exact value of factor · k / E."""
        return Fraction(self.topk, self.num_experts) * Fraction(str(self.capacity_factor))


@dataclass(frozen=True, kw_only=True)
class DecoderSizes(ModelSizes):
    """A decoder: dense (``moe`` is None) or with mixture-of-experts layers.

    Layers from ``first_k_dense`` on have experts where ``moe_pattern`` says so.

    Attributes:
        num_query_groups: Key-value heads (G).
        head_dim: Features of a head (D), not necessarily hidden / heads.
        normalization: ``rmsnorm`` or ``layernorm``.
        position_embedding_type: ``rope`` or ``learned``.
        activation: ``swiglu`` or ``gelu``, of MLPs and experts.
        add_bias_linear: Linear layers have biases.
        add_qkv_bias: The projections of queries, keys and values have biases, whatever the other linear layers have.
        qk_norm: RMSNorm on queries and keys.
        qk_norm_scope: Features that a norm of queries or keys sees: those of one ``head``, or the whole ``width``.
        norm_placement: Norms are on the ``input`` of attention and MLP, or on their ``output`` before the residual sum.
        embedding_multiplier: Factor on the word embedding.
        residual_multiplier: Factor on the outputs of attention and MLP before the residual sum.
        softmax_scale: Factor on the attention scores before the softmax; 0 for head_dim^-0.5.
        logits_scaling: Divisor of the logits.
        rope_theta: Base of the rotary angles.
        rope_scaling: Scaling of the rotary frequencies; None for none.
        rotary_percent: Share of a head's features that is rotated, the leading ones.
        tie_embeddings: The head uses the word embedding's weight.
        first_k_dense: Leading layers without experts.
        moe_pattern: 1 for a layer with experts and 0 for a dense one, repeated; empty: 1 for all.
        moe: Experts of a layer; None for a dense decoder.
        moe_widths: Intermediate features of an expert for each mixture-of-experts layer; empty to use ``moe``'s.
        mtp_depth: Multi-token prediction blocks after the last layer, 0 or 1.
        mtp_block: What such a block is: ``dense``, with the model's final norm (ERNIE 4.5); or a ``layer`` like the
            last one, with a separate norm at the end (DeepSeek-V3).
        multi_latent_attention: Keys and values come from a latent (``model.attention.latent``); heads then have the
            sizes of the fields below instead of ``head_dim``.
        q_lora_rank: Features of the queries' latent; 0 for queries straight from the hidden states.
        kv_lora_rank: Features of the latent of keys and values.
        qk_head_dim: Features of a query or key head that are not rotated.
        qk_pos_emb_head_dim: Rotated features of a query or key head, after the others.
        v_head_dim: Features of a value head.
        attention_latent_norm_epsilon: Added to the variance in the norms of the latents.
    """

    num_query_groups: int = flag(
        None,
        "key/value heads (grouped-query attention)",
        unit="heads",
        low=1,
        derived="num-attention-heads",
        aliases=("num-key-value-heads",),
        after="num_attention_heads",
    )
    head_dim: int = flag(
        None,
        "features of one head",
        unit="features",
        low=1,
        derived="hidden-size / num-attention-heads; with multi-latent attention qk-head-dim + qk-pos-emb-head-dim",
        aliases=("kv-channels",),
        after="num_query_groups",
    )
    normalization: str = flag("rmsnorm", "kind of norm", ernie="layernorm", choices=NORMALIZATIONS, value="rmsnorm")
    position_embedding_type: str = flag(
        "rope",
        "rotary or learned positions",
        ernie="learned",
        choices=POSITION_EMBEDDINGS,
        aliases=(Alias("use-rotary-position-embeddings", "rope"),),
        value="rope",
    )
    activation: str = flag(
        "swiglu",
        "activation of the MLP and of the experts",
        ernie="gelu",
        choices=ACTIVATIONS,
        aliases=(Alias("swiglu", "swiglu"),),
        value="swiglu",
    )
    add_bias_linear: bool = flag(
        False, "biases in linear layers", ernie=True, aliases=(Alias("disable-bias-linear", False),), value=False
    )
    add_qkv_bias: bool = flag(False, "biases on queries, keys and values only", value=False)
    qk_norm: bool = flag(False, "RMSNorm on queries and keys", aliases=("qk-layernorm",), value=False)
    qk_norm_scope: str = flag(
        "head",
        "features that a norm of queries or keys sees: those of one head, or of all heads (OLMo 2)",
        choices=QK_NORM_SCOPES,
        value="head",
    )
    norm_placement: str = flag(
        "input",
        "norms on the inputs of attention and MLP (pre-norm), or on their outputs before the residual sum (OLMo 2)",
        choices=NORM_PLACEMENTS,
        value="input",
    )
    embedding_multiplier: float = flag(
        1.0, "factor on the word embedding", above=0, aliases=("embedding-multiplier-scale",), value=1.0
    )
    residual_multiplier: float = flag(
        1.0, "factor on the outputs of attention and MLP before the residual sum", above=0, value=1.0
    )
    softmax_scale: float = flag(
        0.0,
        "factor on the attention scores before the softmax; 0: head-dim^-0.5",
        low=0,
        aliases=("attention-multiplier",),
        value=0.0,
    )
    logits_scaling: float = flag(1.0, "divisor of the logits", above=0, value=1.0)
    rope_theta: float = flag(10000.0, "base of the rotary angles", above=0, aliases=("rotary-base",), value=10000.0)
    rope_scaling: RopeScaling | None = follows(
        lambda values: from_flags(RopeScaling, values) if values["rope_scaling_type"] != NONE else None, value=None
    )
    rotary_percent: float = flag(
        1.0,
        "share of a head's features that is rotated, the leading ones",
        above=0,
        high=1,
        aliases=("partial-rotary-factor",),
        value=1.0,
    )
    tie_embeddings: bool = flag(
        False,
        "a separate output projection",
        name="untie_embeddings_and_output_weights",
        through=(not_, not_),
        value=True,
    )
    first_k_dense: int = flag(
        0, "leading layers with a dense MLP instead of experts", group="moe", unit="layers", low=0, value=0
    )
    moe_pattern: tuple[int, ...] = flag(
        ALL,
        "layers with experts: a number N for layers 0, N, 2 N, .., or an expression of lists such as ([0]*3+[1]*58), "
        "with a number for each layer, 0 for a dense MLP",
        name="moe_layer_freq",
        type="str",
        group="moe",
        after="first_k_dense",
        through=(to_pattern, to_text),
        value=(),
    )
    moe: MoeSizes | None = follows(
        lambda values: from_flags(MoeSizes, values) if values["num_experts"] else None, value=None
    )
    moe_widths: tuple[int, ...] = flag(
        None,
        "intermediate features of one expert, one number for each layer with experts",
        name="moe_layer_ffn_hidden_sizes",
        group="moe",
        unit="features",
        low=1,
        derived="moe-ffn-hidden-size everywhere",
        after="moe_ffn_hidden_size",
        through=(lambda given: given or (), lambda widths: widths or None),
        value=(),
    )
    mtp_depth: int = flag(
        0,
        "multi-token prediction blocks, which predict the token after the next; 0: off",
        unit="blocks",
        low=0,
        high=1,
        aliases=("mtp-num-layers",),
        value=0,
    )
    mtp_block: str = flag(
        None,
        "block of multi-token prediction: dense, normalized by the model's final norm (ERNIE 4.5), or a layer like the "
        "last one with a separate final norm (DeepSeek-V3, GLM-4.5)",
        choices=MTP_BLOCKS,
        derived="layer for experts with sigmoid scores, otherwise dense",
        value=DENSE_BLOCK,
    )

    multi_latent_attention: bool = flag(
        False,
        "multi-latent attention: keys and values of all heads from one latent (DeepSeek)",
        aliases=("multi-head-latent-attention",),
        after="qk_norm",
        value=False,
    )
    q_lora_rank: int = flag(
        0,
        "features of the queries' latent in multi-latent attention; none: queries straight from the hidden states",
        unit="features",
        low=0,
        words={"none": 0},
        after="multi_latent_attention",
        value=0,
    )
    kv_lora_rank: int = flag(
        512,
        "features of the latent of keys and values in multi-latent attention",
        unit="features",
        low=1,
        after="q_lora_rank",
        value=512,
    )
    qk_head_dim: int = flag(
        128,
        "features of a query or key head that multi-latent attention does not rotate",
        unit="features",
        low=1,
        aliases=("qk-nope-head-dim",),
        after="kv_lora_rank",
        value=128,
    )
    qk_pos_emb_head_dim: int = flag(
        64,
        "features of a query or key head that multi-latent attention rotates",
        unit="features",
        low=2,
        aliases=("qk-rope-head-dim",),
        after="qk_head_dim",
        value=64,
    )
    v_head_dim: int = flag(
        128,
        "features of a value head in multi-latent attention",
        unit="features",
        low=1,
        after="qk_pos_emb_head_dim",
        value=128,
    )
    attention_latent_norm_epsilon: float = flag(
        None,
        "added to the variance in the norms of multi-latent attention's latents",
        above=0,
        derived="layernorm-epsilon",
        after="v_head_dim",
        value=1e-5,
    )

    stored_kind: ClassVar[str] = "DecoderSizes"

    def __post_init__(self) -> None:
        # The command line refuses wrong values with a full report. This check is for direct callers.
        require_choice("normalization", self.normalization, NORMALIZATIONS)
        require_choice("position_embedding_type", self.position_embedding_type, POSITION_EMBEDDINGS)
        require_choice("activation", self.activation, ACTIVATIONS)
        require_choice("qk_norm_scope", self.qk_norm_scope, QK_NORM_SCOPES)
        require_choice("norm_placement", self.norm_placement, NORM_PLACEMENTS)
        require_choice("mtp_block", self.mtp_block, MTP_BLOCKS)
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) is not a multiple of "
                f"num_query_groups ({self.num_query_groups})"
            )
        rotated = self.position_embedding_type == "rope" and not self.multi_latent_attention
        if rotated and (self.head_dim % 2 or self.rotary_dim % 2 or not self.rotary_dim):
            sizes = f"head_dim is {self.head_dim}, of which {self.rotary_dim} are rotated"
            raise ValueError(f"{sizes}; rope rotates pairs, so both must be even")
        if self.moe is not None and self.moe.hidden_size != self.hidden_size:
            raise ValueError(f"moe.hidden_size ({self.moe.hidden_size}) is not hidden_size ({self.hidden_size})")
        if self.moe_widths and len(self.moe_widths) != len(self.moe_layers):
            raise ValueError(f"{len(self.moe_widths)} moe_widths for {len(self.moe_layers)} layers with experts")
        if self.mtp_depth not in (0, 1):
            raise ValueError(f"mtp_depth is {self.mtp_depth}; it must be 0 or 1")
        if self.mtp_depth and (self.norm_placement, self.embedding_multiplier) != ("input", 1.0):
            raise ValueError("multi-token prediction needs norm_placement input and embedding_multiplier 1")
        if self.multi_latent_attention:
            self._check_latent()

    def _check_latent(self) -> None:
        """Raise ValueError for what multi-latent attention cannot be together with."""
        if self.position_embedding_type != "rope" or self.qk_pos_emb_head_dim % 2:
            raise ValueError("multi_latent_attention rotates pairs: it needs rope and an even qk_pos_emb_head_dim")
        if self.num_query_groups != self.num_attention_heads:
            raise ValueError("in multi_latent_attention every head has its own keys: no num_query_groups")
        if self.qk_norm or self.add_qkv_bias or self.add_bias_linear:
            raise ValueError("multi_latent_attention has no qk_norm, add_qkv_bias or add_bias_linear")

    @property
    def layer_names(self) -> tuple[str, ...]:
        """See ``ModelSizes``."""
        moe = set(self.moe_layers)
        inner = ("MoeLayer" if layer in moe else "Mlp" for layer in range(self.num_layers))
        return ("DecoderEmbedding", *(f"DecoderBlock({name})" for name in inner), "LmHead")

    @property
    def attention(self) -> AttentionSizes:
        """See ``ModelSizes``."""
        if self.multi_latent_attention:
            return self._latent_attention
        return AttentionSizes(
            kind="grouped_query",
            hidden_size=self.hidden_size,
            num_groups=self.num_query_groups,
            queries_per_group=self.num_attention_heads // self.num_query_groups,
            key_dim=self.head_dim,
            value_dim=self.head_dim,
            rotary_dim=self.rotary_dim,
            softmax_scale=self.softmax_scale or self.head_dim**-0.5,
            causal=True,
            qkv_bias=self.add_bias_linear or self.add_qkv_bias,
            output_bias=self.add_bias_linear,
            qk_norm=self.qk_norm,
            qk_norm_scope=self.qk_norm_scope,
            epsilon=self.layernorm_epsilon,
            dropout=self.attention_dropout,
            flash=self.use_flash_attn,
        )

    @property
    def rotary_dim(self) -> int:
        """Leading features of a head that are rotated."""
        return int(self.head_dim * self.rotary_percent)

    @property
    def _latent_attention(self) -> LatentAttentionSizes:
        key_dim = self.qk_head_dim + self.qk_pos_emb_head_dim
        factor = self.rope_scaling.scores_factor if self.rope_scaling else 1.0
        return LatentAttentionSizes(
            kind=LATENT.name,
            hidden_size=self.hidden_size,
            num_groups=self.num_attention_heads,
            queries_per_group=1,
            key_dim=key_dim,
            value_dim=self.v_head_dim,
            rotary_dim=self.qk_pos_emb_head_dim,
            softmax_scale=(self.softmax_scale or key_dim**-0.5) * factor,
            causal=True,
            qkv_bias=False,
            output_bias=False,
            qk_norm=False,
            qk_norm_scope="head",
            epsilon=self.attention_latent_norm_epsilon,
            dropout=self.attention_dropout,
            flash=self.use_flash_attn,
            query_rank=self.q_lora_rank,
            latent_rank=self.kv_lora_rank,
        )

    @property
    def mlp_widths(self) -> tuple[int, ...]:
        """Distinct widths of the MLPs that all tokens pass: dense MLPs and shared experts."""
        moes = (self.moe_at(layer) for layer in range(self.num_layers))  # multi-token prediction's is one of them
        return tuple(dict.fromkeys(self.ffn_hidden_size if moe is None else moe.shared_width for moe in moes))

    @property
    def gated(self) -> bool:
        """The MLP has a gate in addition to the up projection."""
        return self.activation == "swiglu"

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Global numbers of the mixture-of-experts layers."""
        return () if self.moe is None else layers_of(self.moe_pattern, self.num_layers, self.first_k_dense)

    @property
    def ends_as_layer(self) -> bool:
        """A multi-token prediction block like the last layer follows it."""
        return self.mtp_depth > 0 and self.mtp_block == LAYER_BLOCK

    @property
    def routed_layers(self) -> tuple[int, ...]:
        """Numbers of the blocks with experts: those of layers, and ``num_layers`` for multi-token prediction's."""
        return (*self.moe_layers, *((self.num_layers,) if self.moe_at(self.num_layers) is not None else ()))

    def moe_at(self, layer: int) -> MoeSizes | None:
        """Return the experts of layer ``layer``; None for a dense layer.

        The multi-token prediction block has the number ``num_layers``.
        """
        if layer == self.num_layers and self.ends_as_layer:
            return self.moe_at(layer - 1)
        if self.moe is None or not self.first_k_dense <= layer < self.num_layers:
            return None
        if self.moe_pattern and not self.moe_pattern[layer % len(self.moe_pattern)]:
            return None
        if not self.moe_widths:
            return self.moe
        return replace(self.moe, ffn_hidden_size=self.moe_widths[self.moe_layers.index(layer)])

    @property
    def expert_widths(self) -> tuple[int, ...]:
        """Distinct intermediate widths of routed experts, in ascending order."""
        return () if self.moe is None else tuple(sorted({*(self.moe_widths or (self.moe.ffn_hidden_size,))}))

    @property
    def routed_experts(self) -> int:
        """Routed experts of a layer; 0 without mixture-of-experts layers."""
        return 0 if self.moe is None else self.moe.num_experts

    @property
    def experts_per_token(self) -> int:
        """Routed experts per token (top-k); 0 without mixture-of-experts layers."""
        return 0 if self.moe is None else self.moe.topk

    @property
    def drops_tokens(self) -> bool:
        """Experts have a capacity and drop the tokens that exceed it."""
        return self.moe is not None and self.moe.has_capacity

    @property
    def shares_embedding(self) -> bool:
        """The head, or the multi-token prediction block, also reads the word embedding."""
        return self.tie_embeddings or self.mtp_depth > 0

    @property
    def causal(self) -> bool:
        """Tokens attend only to themselves and earlier tokens."""
        return True

    def loss_weights(self, values: Mapping[str, Any]) -> dict[str, float]:
        """See ``ModelSizes``."""
        return {"lm": 1.0, **({"mtp": values["mtp_loss_weight"]} if self.mtp_depth else {})}

    def with_layers(self, dense: int, moe: int) -> Self:
        """See ``ModelSizes``."""
        widths = self.moe_widths[:moe]
        first = self.first_k_dense if self.moe is None else dense
        return replace(self, num_layers=dense + moe, first_k_dense=first, moe_pattern=(), moe_widths=widths)

    def without_training_blocks(self) -> Self:
        """Return the decoder without multi-token prediction."""
        return replace(self, mtp_depth=0)

    def facts(self) -> dict[str, Any]:
        """See ``ModelSizes``. Options on dropped tokens are left out, because weights do not depend on them."""
        facts = super().facts()
        facts["mtp_block"] = self.mtp_block if self.mtp_depth else DENSE_BLOCK
        if facts["moe"]:
            for name in ("capacity_factor", "min_capacity", "drop_policy", "capacity_scope", "kind", "biased"):
                facts["moe"].pop(name)
            facts["moe"] |= self._moe_facts(self.moe) if self.moe else {}
            first, text = flags_of(self.moe_layers, self.num_layers)  # one spelling of the layers with experts
            facts |= {"first_k_dense": first, "moe_pattern": to_pattern(text)}
        return facts

    def _moe_facts(self, moe: MoeSizes) -> dict[str, Any]:
        """Return the facts that flags spell in two ways, in one of them: the one with defaults."""
        apart = bool(moe.shared_width % moe.ffn_hidden_size or (self.moe_widths and moe.shared_ffn))
        normalized = "on" if moe.renormalizes else "off"
        usual = moe.group_topk == moe.groups or moe.group_score_topk * moe.group_topk == moe.topk
        return {
            "norm_topk_prob": "auto" if moe.renormalizes == (moe.topk > 1) else normalized,
            "group_score_topk": 0 if usual else moe.group_score_topk,
            "shared_experts": moe.shared_experts if apart else moe.shared_width // moe.ffn_hidden_size,
            "shared_ffn": moe.shared_ffn if apart else 0,
        }

    @classmethod
    def fact_defaults(cls) -> dict[str, Any]:
        """See ``ModelSizes``. Experts have a dictionary of their defaults."""
        return {**super().fact_defaults(), "moe": defaults_of(MoeSizes)}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Self:
        """See ``ModelSizes``."""
        moe, scaling = facts.get("moe"), facts.get("rope_scaling")
        parts = {"moe": MoeSizes(**moe) if moe else None, "rope_scaling": RopeScaling(**scaling) if scaling else None}
        lists = {name: tuple(facts.get(name, ())) for name in ("moe_widths", "moe_pattern")}
        return super().from_facts({**facts, **parts, **lists})
