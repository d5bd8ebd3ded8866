"""Scaling of rotary frequencies, with which a model reads longer texts than it was first trained on.

``model.layers.rotary`` computes the frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from typing import Any, ClassVar

from megapar.schema import role as roles
from megapar.schema.flag import Alias, flag, to_flags
from megapar.schema.legal_values import require_choice

NONE, LINEAR, LLAMA3, YARN = "none", "linear", "llama3", "yarn"
SCALED = (LINEAR, LLAMA3, YARN)
FLAGS_OF = {
    NONE: (),
    LINEAR: ("rope_scaling_factor",),
    LLAMA3: ("rope_scaling_factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    YARN: (
        *("rope_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale"),
        *("mscale_all_dim", "rope_attention_factor", "yarn_correction_range_round_to_int"),
    ),
}
"""Flags that each type of scaling reads, besides ``rope_scaling_type`` itself."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of rotary frequencies, with the names of transformers' ``rope_parameters``.

    Sources: linear, position interpolation (arXiv 2306.15595); llama3, Llama 3.1 (arXiv 2407.21783); yarn
    (arXiv 2309.00071), with the two mscale of DeepSeek-V2 (arXiv 2405.04434).
    """

    role: ClassVar[roles.Role] = roles.MODEL
    rope_type: str = flag(
        NONE,
        "how the frequencies of rotary positions are scaled for texts longer than the original ones",
        name="rope_scaling_type",
        choices=(NONE, *SCALED),
        aliases=(Alias("use-rope-scaling", LLAMA3),),
        after="rope_theta",
        value=MISSING,
    )
    factor: float = flag(
        8.0,
        "length of the longest text over the original length",
        name="rope_scaling_factor",
        above=0,
        aliases=("rotary-scaling-factor", "yarn-scaling-factor"),
        after="rope_scaling_type",
        other=3.0,
    )
    original_max_position_embeddings: int = flag(
        None,
        "longest text before the scaling",
        unit="tokens",
        low=1,
        derived="8192 with llama3, otherwise 4096",
        aliases=("rope-scaling-original-max-position-embeddings", "yarn-original-max-position-embeddings"),
        after="rope_scaling_factor",
        value=4096,
        other=20,
    )
    low_freq_factor: float = flag(
        1.0,
        "llama3: turns within the original length up to which a frequency is divided by the factor",
        above=0,
        after="original_max_position_embeddings",
    )
    high_freq_factor: float = flag(
        4.0, "llama3: turns within the original length from which a frequency is kept", above=0, after="low_freq_factor"
    )
    beta_fast: float = flag(
        32.0,
        "yarn: turns within the original length from which a frequency is kept",
        above=0,
        aliases=("rope-scaling-beta-fast", "yarn-beta-fast"),
        after="high_freq_factor",
        other=2.0,
    )
    beta_slow: float = flag(
        1.0,
        "yarn: turns within the original length up to which a frequency is divided by the factor",
        above=0,
        aliases=("rope-scaling-beta-slow", "yarn-beta-slow"),
        after="beta_fast",
        other=4.0,
    )
    mscale: float = flag(
        0.0,
        "yarn: rotated features are multiplied by (0.1 x mscale x ln(factor) + 1) over the same of --mscale-all-dim; "
        "if one of the two is 0, by 0.1 x ln(factor) + 1",
        low=0,
        aliases=("rope-scaling-mscale",),
        after="beta_slow",
        other=2.0,
    )
    mscale_all_dim: float = flag(
        0.0,
        "yarn: see --mscale; with latent attention also the scores are multiplied, by "
        "(0.1 x mscale-all-dim x ln(factor) + 1)^2",
        low=0,
        aliases=("rope-scaling-mscale-all-dim",),
        after="mscale",
        other=2.0,
    )
    attention_factor: float = flag(
        0.0,
        "yarn: factor on rotated features in place of that of --mscale; 0: that one",
        name="rope_attention_factor",
        low=0,
        after="mscale_all_dim",
        other=2.0,
    )
    truncate: bool = flag(
        True,
        "yarn: round the limits between kept and divided frequencies to whole features",
        name="yarn_correction_range_round_to_int",
        after="rope_attention_factor",
    )

    def __post_init__(self) -> None:
        # The command line refuses wrong values with a full report. This check is for direct callers.
        require_choice("rope_type", self.rope_type, SCALED)
        if self.rope_type == LLAMA3 and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(f"low_freq_factor ({self.low_freq_factor}) is not below {self.high_freq_factor}")

    @property
    def rotated_factor(self) -> float:
        """Factor on the rotated features of queries and of keys (transformers' attention_scaling)."""
        if self.rope_type != YARN:
            return 1.0
        if self.attention_factor:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._log_factor(self.mscale) / self._log_factor(self.mscale_all_dim)
        return self._log_factor(1.0)

    @property
    def scores_factor(self) -> float:
        """Factor on the scores of latent attention, besides the ``rotated_factor`` of the features."""
        if self.rope_type != YARN or not self.mscale_all_dim:
            return 1.0
        return self._log_factor(self.mscale_all_dim) ** 2

    def kept_and_divided(self, rotary_dim: int, theta: float) -> tuple[float, float]:
        """Return the pairs of features up to which frequencies are kept and from which they are divided (yarn)."""
        limits = [
            (rotary_dim * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)))
            / (2 * math.log(theta))
            for turns in (self.beta_fast, self.beta_slow)
        ]
        low, high = (math.floor(limits[0]), math.ceil(limits[1])) if self.truncate else limits
        return max(low, 0), min(high, rotary_dim - 1)

    def _log_factor(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


def flags_of_scaling(scaling: RopeScaling | None) -> Mapping[str, Any]:
    """Return the values of the flags, by name, for a scaling or for none."""
    if scaling is None:
        return to_flags(RopeScaling(rope_type=LINEAR)) | {"rope_scaling_type": NONE}
    return to_flags(scaling)
