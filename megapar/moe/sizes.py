"""The numbers one mixture-of-experts layer is built from. Standard library only, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

MEGATRON_MOE = "megatron_moe"
DEEPSPEED_MOE = "deepspeed_moe"
KINDS = (MEGATRON_MOE, DEEPSPEED_MOE)
DROP_POLICIES = ("token", "choice", "probs")
CAPACITY_SCOPES = ("micro_batch", "rank")
ACTIVATIONS = ("swiglu", "gelu")
SCORES = ("softmax", "sigmoid")


@dataclass(frozen=True)
class MoeSizes:
    """Sizes and routing options of one MoE layer; every size is global, whatever the layout.

    hidden_size: features of a token (H). ffn_hidden_size: intermediate features of one expert (F).
    num_experts: routed experts (E). topk: experts each token is sent to (k), 1 <= k <= E.
    shared_experts: experts every token passes; they are one MLP of width ``shared_width``. 0: none.
    kind: ``megatron_moe`` (dropless) or ``deepspeed_moe`` (a capacity, tokens dropped).
    capacity_factor, min_capacity, drop_policy: deepspeed_moe only; see ``capacity``.
    capacity_scope: the tokens that share a capacity: those of the ``micro_batch``, or of one ``rank``.
    activation: ``swiglu`` (gate and up) or ``gelu`` (up only). add_bias: experts have biases.
    score: what makes scores of router logits. groups, group_topk: experts in equal groups, of which a token's choices
    stay in the best ``group_topk``. scaling: factor on the weights of expert outputs.
    sequence_aux, orthogonal: whether these losses are computed. biased: whether a correction bias may be other than 0.
    """

    hidden_size: int
    ffn_hidden_size: int
    num_experts: int
    topk: int
    shared_experts: int = 0
    kind: str = MEGATRON_MOE
    capacity_factor: float = 1.0
    min_capacity: int = 4
    drop_policy: str = "token"
    capacity_scope: str = "micro_batch"
    activation: str = "swiglu"
    add_bias: bool = False
    score: str = "softmax"
    groups: int = 1
    group_topk: int = 1
    scaling: float = 1.0
    sequence_aux: bool = False
    orthogonal: bool = False
    biased: bool = True

    def __post_init__(self) -> None:
        # The command line has refused wrong values with a full report; this guards direct users.
        for field, legal in (
            ("kind", KINDS),
            ("drop_policy", DROP_POLICIES),
            ("capacity_scope", CAPACITY_SCOPES),
            ("activation", ACTIVATIONS),
            ("score", SCORES),
        ):
            value = getattr(self, field)
            if value not in legal:
                raise ValueError(f"{field} is {value!r}; choose one of {', '.join(legal)}")
        if not 1 <= self.topk <= self.num_experts:
            raise ValueError(f"topk is {self.topk}; it must be 1 to num_experts ({self.num_experts})")
        if self.num_experts % self.groups or not 1 <= self.group_topk <= self.groups:
            raise ValueError(
                f"{self.num_experts} experts in {self.groups} groups, of which {self.group_topk} are chosen"
            )
        if self.topk % self.group_topk or self.topk > self.group_topk * (self.num_experts // self.groups):
            raise ValueError(f"{self.topk} choices do not come evenly from {self.group_topk} groups")

    @property
    def has_capacity(self) -> bool:
        """Tokens may be dropped."""
        return self.kind == DEEPSPEED_MOE

    @property
    def loss_choices(self) -> int:
        """Of a token's experts in order of score, those that the balance losses count; 0 where its choices are these.

        Biases and groups may choose others: the losses of DeepSeek-V3 (arXiv 2412.19437, equation 18) count by score.
        """
        if not self.biased and self.group_topk == self.groups:
            return 0
        return 1 if self.has_capacity and self.drop_policy == "choice" else self.topk

    @property
    def gated(self) -> bool:
        """The experts have a gate beside the up projection."""
        return self.activation == "swiglu"

    @property
    def shared_width(self) -> int:
        """Intermediate features of the shared MLP; 0 without shared experts."""
        return self.shared_experts * self.ffn_hidden_size

    def capacity(self, tokens: int) -> int:
        """(token, choice) pairs one expert may keep of ``tokens`` non-padding tokens (C).

        ceil(tokens / E · factor · k), at least ``min_capacity``. Computed in fractions from the factor as it
        was written, so that 1.1 times 10 is 11 and not 12.
        """
        return max(math.ceil(tokens * self.capacity_per_token), self.min_capacity)

    @property
    def capacity_per_token(self) -> Fraction:
        """factor · k / E, exactly."""
        return Fraction(self.topk, self.num_experts) * Fraction(str(self.capacity_factor))
