"""Sizes and options of a decoder and its mixture-of-experts layers.

All sizes are global and independent of the parallel layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import not_
from typing import TYPE_CHECKING, Any, ClassVar

from megapar.model.attention.latent import MULTI_LATENT, LatentAttentionSizes
from megapar.model.attention_sizes import QK_NORM_SCOPES, AttentionSizes
from megapar.model.decoder.layer_pattern import ALL, flags_of, layers_of, to_pattern, to_text
from megapar.model.decoder.layer_ropes import SAME, no_rope_text, rope_text, roped_layers, to_rope
from megapar.model.decoder.windows import NO_FULL, skip_text, to_window, window_text, windowed_layers
from megapar.model.decoder.windows import NONE as NO_WINDOW
from megapar.model.rope import Rope
from megapar.model.rope_scaling import NONE, RopeScaling
from megapar.model.sizes import ACTIVATIONS, GATED, ModelSizes, check_choices, defaults_of
from megapar.moe.sizes import MoeSizes
from megapar.schema.flag import Alias, flag, follows, from_flags

if TYPE_CHECKING:
    from typing_extensions import Self

NORMALIZATIONS = ("rmsnorm", "layernorm")
POSITION_EMBEDDINGS = ("rope", "learned")
NORM_PLACEMENTS = ("input", "output", "both")
DENSE_BLOCK = "dense"
LAYER_BLOCK = "layer"
MTP_BLOCKS = (DENSE_BLOCK, LAYER_BLOCK)


@dataclass(frozen=True, kw_only=True)
class DecoderSizes(ModelSizes):
    """A decoder: dense or with mixture-of-experts layers. The fields' flags explain them.

    Layers from ``first_k_dense`` on have experts where ``moe_pattern`` says so.

    Attributes:
        rope_scaling: Scaling of the rotary frequencies; None for none.
        tie_embeddings: The head uses the word embedding's weight.
        moe_pattern: 1 for a layer with experts and 0 for a dense one, repeated; empty: 1 for all.
        moe: Experts of a layer; None for a dense decoder.
        moe_widths: Intermediate features of an expert for each mixture-of-experts layer; empty to use ``moe``'s.
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
        other=8,
    )
    normalization: str = flag("rmsnorm", "kind of norm", ernie="layernorm", choices=NORMALIZATIONS)
    position_embedding_type: str = flag(
        "rope",
        "rotary or learned positions",
        ernie="learned",
        choices=POSITION_EMBEDDINGS,
        aliases=(Alias("use-rotary-position-embeddings", "rope"),),
    )
    activation: str = flag(
        "swiglu",
        "activation of the MLP and of the experts: silu with a gate, exact gelu without, the gate of GPT-OSS, or gelu "
        "approximated by tanh with a gate (Gemma)",
        ernie="gelu",
        choices=ACTIVATIONS,
        aliases=(Alias("swiglu", "swiglu"),),
    )
    add_bias_linear: bool = flag(
        False, "biases in linear layers", ernie=True, aliases=(Alias("disable-bias-linear", False),)
    )
    add_qkv_bias: bool = flag(False, "biases on queries, keys and values only")
    qk_norm: bool = flag(False, "RMSNorm on queries and keys", aliases=("qk-layernorm",))
    qk_norm_scope: str = flag(
        "head",
        "features that a norm of queries or keys sees: those of one head, or of all heads (OLMo 2)",
        choices=QK_NORM_SCOPES,
    )
    norm_placement: str = flag(
        "input",
        "norms on the inputs of attention and MLP (pre-norm), on their outputs before the residual sum (OLMo 2), or on "
        "both (Gemma 3)",
        choices=NORM_PLACEMENTS,
    )
    apply_layernorm_1p: bool = flag(
        False, "norms multiply by 1 + weight, computed in fp32, and their weights start at 0 (Megatron-LM, Gemma)"
    )
    scale_embedding: bool = flag(
        False, "multiply the word embedding by sqrt(hidden-size), rounded to the dtype of the weights (Gemma)"
    )
    embedding_multiplier: float = flag(
        1.0, "factor on the word embedding", above=0, aliases=("embedding-multiplier-scale",)
    )
    residual_multiplier: float = flag(
        1.0, "factor on the outputs of attention and MLP before the residual sum", above=0, other=0.5
    )
    softmax_scale: float = flag(
        0.0,
        "factor on the attention scores before the softmax; 0: head-dim^-0.5",
        low=0,
        aliases=("attention-multiplier",),
        other=2.0,
    )
    logits_scaling: float = flag(1.0, "divisor of the logits", above=0)
    window_size: int = flag(
        NO_WINDOW,
        "keys that a position attends to in layers with a window, its own and those just before; none or -1: all; "
        "Megatron-LM's L,0 (keys before and after) is L + 1",
        type="str",
        through=(to_window, window_text),
        value=0,
        other="4",
    )
    window_attn_skip_freq: str = flag(
        NO_FULL,
        "layers that see all keys in spite of --window-size: a number N for layers N, 2 N, .. from 1, or an expression "
        "of lists such as [1,1,1,0]*8, with a number for each layer, 0 for all keys; the block of multi-token "
        "prediction is like the last layer, unless a list has one number more; 0: none",
        other="2",
    )
    attention_sinks: bool = flag(
        False, "a trained score for each query head that joins the softmax of its rows, and has no value (GPT-OSS)"
    )
    rope_theta: float = flag(10000.0, "base of the rotary angles", above=0, aliases=("rotary-base",), other=100.0)
    rope_scaling: RopeScaling | None = follows(
        lambda values: from_flags(RopeScaling, values) if values["rope_scaling_type"] != NONE else None, value=None
    )
    window_rope: Rope | None = flag(
        SAME,
        "rotary positions of layers with a window: the base of their angles, without scaling, or an object as in "
        'rope_parameters of config.json, such as {"rope_type":"linear","rope_theta":10000,"factor":8}; same: those of '
        "the other layers",
        type="str",
        through=(to_rope, rope_text),
        value=None,
        after="yarn_correction_range_round_to_int",
        other="50",
    )
    no_rope_freq: str = flag(
        NO_FULL,
        "layers without rotary positions: a number N for layers N, 2 N, .. from 1, or an expression of lists such as "
        "[0,0,0,1]*9, with a number for each layer, 1 for none; the block of multi-token prediction is like the last "
        "layer, unless a list has one number more; 0: none",
        after="window_rope",
        other="2",
    )
    rotary_percent: float = flag(
        1.0,
        "share of a head's features that is rotated, the leading ones",
        above=0,
        high=1,
        aliases=("partial-rotary-factor",),
    )
    tie_embeddings: bool = flag(
        False,
        "a separate output projection",
        name="untie_embeddings_and_output_weights",
        through=(not_, not_),
        value=True,
    )
    first_k_dense: int = flag(
        0, "leading layers with a dense MLP instead of experts", group="moe", unit="layers", low=0
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
        other="2",
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
        other=(8, 12),
    )
    mtp_depth: int = flag(
        0,
        "multi-token prediction blocks, which predict the token after the next; 0: off",
        unit="blocks",
        low=0,
        high=1,
        aliases=("mtp-num-layers",),
    )
    mtp_block: str = flag(
        None,
        "block of multi-token prediction: dense, normalized by the model's final norm (ERNIE 4.5), or a layer like the "
        "last one with a separate final norm (DeepSeek-V3, GLM-4.5)",
        choices=MTP_BLOCKS,
        derived="layer for experts whose scores are not a softmax, otherwise dense",
        value=DENSE_BLOCK,
        other="layer",
    )

    multi_latent_attention: bool = flag(
        False,
        "multi-latent attention: keys and values of all heads from one latent (DeepSeek)",
        aliases=("multi-head-latent-attention",),
        after="qk_norm",
    )
    q_lora_rank: int = flag(
        0,
        "features of the queries' latent in multi-latent attention; none: queries straight from the hidden states",
        unit="features",
        low=0,
        words={"none": 0},
        after="multi_latent_attention",
        other=6,
    )
    kv_lora_rank: int = flag(
        512,
        "features of the latent of keys and values in multi-latent attention",
        unit="features",
        low=1,
        after="q_lora_rank",
        other=6,
    )
    qk_head_dim: int = flag(
        128,
        "features of a query or key head that multi-latent attention does not rotate",
        unit="features",
        low=1,
        aliases=("qk-nope-head-dim",),
        after="kv_lora_rank",
        other=6,
    )
    qk_pos_emb_head_dim: int = flag(
        64,
        "features of a query or key head that multi-latent attention rotates",
        unit="features",
        low=2,
        aliases=("qk-rope-head-dim",),
        after="qk_head_dim",
        other=4,
    )
    v_head_dim: int = flag(
        128,
        "features of a value head in multi-latent attention",
        unit="features",
        low=1,
        after="qk_pos_emb_head_dim",
        other=6,
    )
    attention_latent_norm_epsilon: float = flag(
        None,
        "added to the variance in the norms of multi-latent attention's latents",
        above=0,
        derived="layernorm-epsilon",
        after="v_head_dim",
        value=1e-5,
        other=0.01,
    )

    stored_kind: ClassVar[str] = "DecoderSizes"

    def __post_init__(self) -> None:
        check_choices(self)
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
        if self.window_size < 0:
            raise ValueError(f"window_size is {self.window_size}; it must be 0 or more")
        if self.multi_latent_attention and self.no_rope_freq != NO_FULL:
            raise ValueError("multi_latent_attention has a rotary key in every layer: no_rope_freq must be 0")
        if self.mtp_depth not in (0, 1):
            raise ValueError(f"mtp_depth is {self.mtp_depth}; it must be 0 or 1")
        if self.mtp_depth and (self.norm_placement, self.embedding_factor) != ("input", 1.0):
            raise ValueError("multi-token prediction needs norm_placement input and an embedding without a factor")
        if not self.multi_latent_attention:
            return
        if self.position_embedding_type != "rope" or self.qk_pos_emb_head_dim % 2:
            raise ValueError("multi_latent_attention rotates pairs: it needs rope and an even qk_pos_emb_head_dim")
        if self.num_query_groups != self.num_attention_heads:
            raise ValueError("in multi_latent_attention every head has its own keys: no num_query_groups")
        if self.qk_norm or self.add_qkv_bias or self.add_bias_linear:
            raise ValueError("multi_latent_attention has no qk_norm, add_qkv_bias or add_bias_linear")

    @property
    def layer_names(self) -> tuple[str, ...]:
        moe = set(self.moe_layers)
        inner = ("MoeLayer" if layer in moe else "Mlp" for layer in range(self.num_layers))
        return ("DecoderEmbedding", *(f"DecoderBlock({name})" for name in inner), "LmHead")

    @property
    def attention(self) -> AttentionSizes:
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
            sinks=self.attention_sinks,
            one_plus=self.apply_layernorm_1p,
            rope=self._rope,
        )

    def attention_at(self, layer: int) -> AttentionSizes:
        """Return the attention of layer ``layer``, as ``moe_at``: with its window and its rope."""
        return replace(self.attention, window=self.window_at(layer), rope=self.rope_at(layer))

    def rope_at(self, layer: int) -> Rope | None:
        """Return the rotary positions of layer ``layer``, as ``moe_at``; None without."""
        if not roped_layers(self.no_rope_freq, self.num_layers)[layer]:
            return None
        own = self.window_rope if self.window_at(layer) else None
        return own or self._rope

    @property
    def _rope(self) -> Rope | None:
        return Rope(self.rope_theta, self.rope_scaling) if self.position_embedding_type == "rope" else None

    def window_at(self, layer: int) -> int:
        """Return the window of layer ``layer``, as ``moe_at``, in keys of a position; 0 if it sees all."""
        windowed = self.window_size and windowed_layers(self.window_attn_skip_freq, self.num_layers)[layer]
        return self.window_size if windowed else 0

    @property
    def windows(self) -> tuple[int, ...]:
        return tuple(self.window_at(layer) for layer in range(self.num_layers + self.mtp_depth))

    @property
    def rotary_dim(self) -> int:
        """Leading features of a head that are rotated."""
        return int(self.head_dim * self.rotary_percent)

    @property
    def _latent_attention(self) -> LatentAttentionSizes:
        key_dim = self.qk_head_dim + self.qk_pos_emb_head_dim
        factor = self.rope_scaling.scores_factor if self.rope_scaling else 1.0
        return LatentAttentionSizes(
            kind=MULTI_LATENT.name,
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
            sinks=self.attention_sinks,
            one_plus=self.apply_layernorm_1p,
            rope=self._rope,
        )

    @property
    def mlp_widths(self) -> tuple[int, ...]:
        """Distinct widths of the MLPs that all tokens pass: dense MLPs and shared experts."""
        moes = (self.moe_at(layer) for layer in range(self.num_layers))  # multi-token prediction's is one of them
        return tuple(dict.fromkeys(self.ffn_hidden_size if moe is None else moe.shared_width for moe in moes))

    @property
    def gated(self) -> bool:
        return self.activation in GATED

    @property
    def embedding_factor(self) -> float:
        """Factor on the word embedding, before it is rounded."""
        return self.hidden_size**0.5 if self.scale_embedding else self.embedding_multiplier

    @property
    def moe_layers(self) -> tuple[int, ...]:
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
        """Return the experts of a layer, None if it is dense. The prediction block has the number ``num_layers``."""
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
        return () if self.moe is None else tuple(sorted({*(self.moe_widths or (self.moe.ffn_hidden_size,))}))

    @property
    def routed_experts(self) -> int:
        return 0 if self.moe is None else self.moe.num_experts

    @property
    def experts_per_token(self) -> int:
        return 0 if self.moe is None else self.moe.topk

    @property
    def drops_tokens(self) -> bool:
        return self.moe is not None and self.moe.has_capacity

    @property
    def shares_embedding(self) -> bool:
        """The head, or the multi-token prediction block, also reads the word embedding."""
        return self.tie_embeddings or self.mtp_depth > 0

    @property
    def causal(self) -> bool:
        return True

    def loss_weights(self, values: Mapping[str, Any]) -> dict[str, float]:
        return {"lm": 1.0, **({"mtp": values["mtp_loss_weight"]} if self.mtp_depth else {})}

    def with_layers(self, dense: int, moe: int) -> Self:
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
        windowed = windowed_layers(self.window_attn_skip_freq, self.num_layers)  # one spelling of them
        facts["window_attn_skip_freq"] = skip_text(windowed) if self.window_size else NO_FULL
        facts["no_rope_freq"] = no_rope_text(roped_layers(self.no_rope_freq, self.num_layers))
        if self.window_rope == self._rope:
            facts["window_rope"] = None
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
        moe, window_rope = facts.get("moe"), facts.get("window_rope")
        scaling, window_scaling = (
            RopeScaling(**scaling) if scaling else None
            for scaling in (facts.get("rope_scaling"), (window_rope or {}).get("scaling"))
        )
        parts = {
            "moe": MoeSizes(**moe) if moe else None,
            "rope_scaling": scaling,
            "window_rope": Rope(window_rope["theta"], window_scaling) if window_rope else None,
        }
        lists = {name: tuple(facts.get(name, ())) for name in ("moe_widths", "moe_pattern")}
        return super().from_facts({**facts, **parts, **lists})
