"""The rates and initial scales of each parameter: --decoupled-lr, and muP by --mup-base-hidden-size. No torch.

muP makes the best learning rate of a narrow model that of a wide one, m times as wide. It is written here without
factors in the forward (Yang et al. 2022, "Tensor Programs V", arXiv 2203.03466, table 3), so that a trained model is a
plain one. Widths other than the hidden size grow in proportion, by more heads of the same size; the numbers of layers,
experts and tokens stay. The factors are powers of m:

    exponents of m             initial scale   AdamW   SGD    source
    input weights                    0            0      1    table 3: word and position embeddings
    vectors                          -            0      1    table 3: biases; norms are alike
    hidden weights                 -1/2          -1      0    table 3: from features to features
    output weights                  -1           -1     -1    table 3: from features to logits of a fixed number

Muon moves a hidden weight [R, C] by a matrix whose singular values are all the factor of ``--muon-scale-mode``.
Activations change alike if that is proportional to sqrt(R / C) (Yang, Simon and Bernstein 2023, "A Spectral Condition
for Feature Learning", arXiv 2310.17813, condition 1). With R and C in proportion to m the exponent is therefore

    unit_rms_norm     0        sqrt(R / C) itself
    shape_scaling     0        sqrt(max(1, R / C)), which does not depend on m either
    spectral        -1/2       sqrt(max(R, C)), which grows by sqrt(m)

Weight decay is that of --lr whatever the factor. What Muon leaves to AdamW has AdamW's factors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from megapar.arguments import Config
from megapar.model.parameter import ParameterSpec
from megapar.training.building.matrices import marked

DECOUPLED = ("embedding.word.weight", "lm_head.weight")  # those of --decoupled-lr, as in Megatron-LM


@dataclass(frozen=True)
class WidthRow:
    """A row of the table of muP, in exponents of m.

    Attributes:
        what: Its parameters, in words.
        init: Of the initial standard deviation.
        rates: Of the learning rate, by optimizer.
    """

    what: str
    init: float
    rates: Mapping[str, float]
    source: str


_TABLE_3 = "Tensor Programs V, table 3, {} weights"
ROWS: Mapping[str, WidthRow] = MappingProxyType(
    {
        "input": WidthRow("embeddings", 0, {"adamw": 0, "sgd": 1}, _TABLE_3.format("input")),
        "vector": WidthRow("norms, biases, sinks", 0, {"adamw": 0, "sgd": 1}, "Tensor Programs V, table 3, biases"),
        "hidden": WidthRow("matrices", -0.5, {"adamw": -1, "sgd": 0}, _TABLE_3.format("hidden")),
        "output": WidthRow("head, routers", -1, {"adamw": -1, "sgd": -1}, _TABLE_3.format("output")),
    }
)
MUON: Mapping[str, float] = MappingProxyType({"unit_rms_norm": 0, "shape_scaling": 0, "spectral": -0.5})
_MUON_SOURCE = "A Spectral Condition for Feature Learning, condition 1"


def with_rates(config: Config, table: Sequence[ParameterSpec]) -> tuple[ParameterSpec, ...]:
    """Return the table with marks at the matrices of Muon, and with the rates and initial scale of each parameter."""
    if config.optimizer.optimizer == "muon":
        table = marked(table)
    apart, width = config.optimizer.decoupled_lr is not None, relative_width(config)
    return tuple(_with_rates(config, spec, width, apart=apart and spec.name in DECOUPLED) for spec in table)


def _with_rates(config: Config, spec: ParameterSpec, width: float, *, apart: bool) -> ParameterSpec:
    if width == 1.0:
        return replace(spec, decoupled=True) if apart else spec
    rate = 0.0 if apart else _exponent(config, spec)
    return replace(spec, decoupled=apart, lr_factor=width**rate, init_factor=width ** ROWS[_kind(spec)].init)


def relative_width(config: Config) -> float:
    """Return m, the hidden size relative to that of the base model; 1 without --mup-base-hidden-size."""
    base = config.optimizer.mup_base_hidden_size
    return config.model.hidden_size / base if base else 1.0


def _exponent(config: Config, spec: ParameterSpec) -> float:
    optimizer = config.optimizer.optimizer
    if spec.matrix:
        return MUON[config.optimizer.muon_scale_mode]
    return ROWS[_kind(spec)].rates["adamw" if optimizer == "muon" else optimizer]


def _kind(spec: ParameterSpec) -> str:
    """Return the row of ``ROWS`` of a decoder's parameter."""
    if spec.init != "normal" or len(spec.pieces[0].hf_shape) == 1:
        return "vector"
    if spec.unit == "embedding":
        return "input"
    to_few = spec.router or min(spec.pieces[0].hf_shape) == 1  # the gate of shared experts has one feature
    return "output" if to_few or spec.name == "lm_head.weight" else "hidden"


def width_lines(config: Config, table: Sequence[ParameterSpec]) -> Iterator[str]:
    """Yield muP's table, a line per row of ``with_rates`` with parameters; none without --mup-base-hidden-size."""
    base = config.optimizer.mup_base_hidden_size
    if not base:
        return
    yield (
        f"muP: {relative_width(config):g} times the width of a model with --hidden-size {base}, the same --head-dim "
        "and other widths in proportion; --adam-eps as given, weight decay that of --lr"
    )
    found: dict[tuple[str, float, float, str], None] = {}
    for spec in (spec for spec in table if spec.trainable):
        row = ROWS[_kind(spec)]
        what, source = row.what, row.source
        if spec.decoupled:
            what, source = f"{what} by --decoupled-lr", "the rate as given"
        elif spec.matrix:
            what, source = f"{what} (Muon, {config.optimizer.muon_scale_mode})", _MUON_SOURCE
        found[what, spec.init_factor, spec.lr_factor, source] = None
    for what, init, rate, source in found:
        yield f"  {what:36} initial scale x {init:<8.4g} learning rate x {rate:<8.4g} {source}"
    if not config.value("untie_embeddings_and_output_weights"):
        yield f"  {'tied head':36} logits / {config.value('logits_scaling'):g} by --logits-scaling"
