"""Sizes and routing options of a layer of experts, each with its flag."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from fractions import Fraction
from functools import cached_property
from typing import ClassVar

from megapar.model.sizes import GATED, check_choices
from megapar.schema import role as roles
from megapar.schema.flag import SWITCH, flag, follows
from megapar.schema.legal_values import require_choice

MEGATRON_MOE = "megatron_moe"
DEEPSPEED_MOE = "deepspeed_moe"
KINDS = (MEGATRON_MOE, DEEPSPEED_MOE)
DROP_POLICIES = ("token", "choice", "probs")
CAPACITY_SCOPES = ("micro_batch", "rank")
SCORES = ("softmax", "sigmoid")
ACTIVATIONS = ("swiglu", "gelu", "clamped_swiglu")


@dataclass(frozen=True)
class MoeSizes:
    """Sizes and routing options of one mixture-of-experts layer. All sizes are global; their flags explain them.

    Attributes:
        sequence_aux: Compute the load balancing loss of each sample.
        orthogonal: Compute the loss that keeps the router's rows orthogonal.
        biased: The correction bias may differ from 0.
    """

    hidden_size: int = follows(lambda values: values["hidden_size"])
    role: ClassVar[roles.Role] = roles.MODEL
    ffn_hidden_size: int = flag(
        None,
        "intermediate features of one expert",
        name="moe_ffn_hidden_size",
        unit="features",
        low=1,
        derived="ffn-hidden-size",
        after="moe_model_type",
        other=16,
    )
    num_experts: int = flag(
        8,
        "routed experts; 0: a dense decoder",
        unit="experts",
        ernie=0,
        low=0,
        aliases=("num-moe-experts",),
        other=8,
        value=MISSING,
    )
    topk: int = flag(2, "experts a token is sent to", name="moe_router_topk", unit="experts", low=1, value=MISSING)
    shared_experts: int = flag(
        0, "experts that every token passes through", name="moe_shared_experts", unit="experts", low=0
    )
    shared_ffn: int = flag(
        0,
        "intermediate features of the shared experts, in place of a number of experts; 0: moe-shared-experts x "
        "moe-ffn-hidden-size",
        name="moe_shared_expert_intermediate_size",
        unit="features",
        low=0,
        other=12,
    )
    shared_gate: bool = flag(
        False,
        "multiply each token's output of the shared experts by a sigmoid (Qwen2-MoE)",
        name="moe_shared_expert_gate",
    )
    kind: str = flag(
        MEGATRON_MOE,
        "megatron_moe drops no token; deepspeed_moe has a capacity per expert",
        name="moe_model_type",
        choices=KINDS,
        after="num_experts",
        role=roles.TOKENS,
    )
    capacity_factor: float = flag(
        1.0,
        "capacity of an expert over an even share of the (token, choice) pairs",
        name="moe_capacity_factor",
        above=0,
        aliases=("moe-expert-capacity-factor", "moe-train-capacity-factor"),
        role=roles.TOKENS,
    )
    min_capacity: int = flag(
        4, "minimum capacity of an expert", name="moe_min_capacity", unit="tokens", low=1, role=roles.TOKENS, other=16
    )
    drop_policy: str = flag(
        "token",
        "what is kept when an expert is full: earlier tokens, earlier choices, or higher probabilities",
        name="moe_drop_policy",
        choices=DROP_POLICIES,
        role=roles.TOKENS,
        other="probs",
    )
    capacity_scope: str = flag(
        "micro_batch",
        "tokens that share a capacity: those of the whole micro-batch, or of each rank (DeepSpeed)",
        name="moe_capacity_scope",
        choices=CAPACITY_SCOPES,
        role=roles.TOKENS,
    )
    activation: str = follows(lambda values: values["activation"], value="swiglu")
    add_bias: bool = follows(lambda values: values["add_bias_linear"], value=False)
    score: str = flag(
        "softmax", "function from router logits to scores", name="moe_router_score_function", choices=SCORES
    )
    groups: int = flag(
        1,
        "equal groups of experts; a token's choices come from some of the groups",
        name="moe_router_num_groups",
        unit="groups",
        low=1,
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
    )
    norm_topk_prob: str = flag(
        "auto",
        "divide the scores of a token's experts by their sum; auto: if they are several",
        type="switch",
        choices=SWITCH,
    )
    scaling: float = flag(
        1.0, "factor on the weights of expert outputs", name="moe_router_topk_scaling_factor", above=0, other=2.5
    )
    linear_bias: bool = flag(
        False, "a trained bias on the router's logits (GPT-OSS)", name="moe_router_linear_bias", after="moe_router_topk"
    )
    sequence_aux: bool = follows(lambda values: values["moe_seq_aux_loss_coeff"] > 0, value=False)
    orthogonal: bool = follows(lambda values: values["moe_orthogonal_loss_coeff"] > 0, value=False)
    biased: bool = follows(
        lambda values: values["moe_router_bias_update_rate"] > 0 or bool(values["load"] or values["load_hf"]),
        value=True,
    )

    def __post_init__(self) -> None:
        check_choices(self)
        require_choice("activation", self.activation, ACTIVATIONS)
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
        return self.activation in GATED

    @property
    def clamped(self) -> bool:
        """The activation is the clamped swiglu."""
        return self.activation == "clamped_swiglu"

    @property
    def shared_width(self) -> int:
        """Intermediate features of the shared MLP; 0 without shared experts."""
        return self.shared_ffn or self.shared_experts * self.ffn_hidden_size

    def capacity(self, tokens: int) -> int:
        """Return the capacity C: (token, choice) pairs that one expert keeps of ``tokens`` non-padding tokens.

        It is ceil(tokens / E · factor · k), at least ``min_capacity``. Fractions make it exact for a factor of up to
        six decimals: 1.1 times 10 is 11, not 12.
        """
        ratio = self.capacity_per_token
        return max(-(-tokens * ratio.numerator // ratio.denominator), self.min_capacity)

    @cached_property
    def capacity_per_token(self) -> Fraction:
        """Factor · k / E, with the factor as the nearest fraction of a denominator up to a million."""
        # Digits of the factor beyond these would exceed int64 on the device, times the tokens of a micro-batch.
        factor = Fraction(str(self.capacity_factor)).limit_denominator(10**6)
        return Fraction(self.topk, self.num_experts) * factor
