"""The parameter table: every parameter and checkpointed buffer of a model, without torch.

Names and shapes are global and do not depend on the layout. Segments, memory, counts, checkpoints, initialisation and
export are computed from the table; a test holds it equal to the module tree.

Shape letters: V vocabulary, H hidden, P positions, G key-value heads (groups), D head size, F MLP width, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

from megapar.core.box import Box
from megapar.core.pipeline.stages import Stages
from megapar.model.sizes import DecoderSizes, Ernie3Sizes, ErnieSizes
from megapar.moe.sizes import MoeSizes
from megapar.rules.tasks import CLASSES

ALL = slice(None)
BRANCHES = ("understanding", "generation")  # of ERNIE 3.0


SOP = ("pooler.", "sop_head.")
"""How the names of an encoder's sentence-order head begin, which a masked language model does not have."""


@dataclass(frozen=True)
class Piece:
    """One Hugging Face tensor inside a parameter: ``parameter[index].reshape(hf_shape)`` (names as on disk)."""

    hf_name: str
    hf_shape: tuple[int, ...]
    index: tuple[int | slice, ...]


@dataclass(frozen=True)
class ParameterSpec:
    """One row of the table.

    name: dotted path in the module tree. shape: global. axes: (mesh axis, dim it splits), outermost cut first.
    unit: the layer it lives in, "embedding" | "layers.N" | "head". init: "normal" | "ones" | "zeros".
    decay: weight decay applies. fp32: kept in max(fp32, dtype) whatever the compute dtype is.
    trainable: False for a buffer that no gradient moves. expert: sharded over edp, not over (sharding, cp). router: a
    router's weight, which may have a learning rate of its own. residual: the weight whose products are added to the
    residual stream, of attention, an MLP or an expert.
    mp_partial: each mp rank's gradient is a partial sum: "never" | "sp" (under sequence parallelism) | "always".
    pieces: the Hugging Face tensors it consists of; where there is no such form, names in the same manner.
    stage: the coordinate on pp that answers for it.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[tuple[str, int], ...]
    unit: str
    init: str
    decay: bool
    fp32: bool = False
    trainable: bool = True
    expert: bool = False
    router: bool = False
    residual: bool = False
    mp_partial: str = "never"
    pieces: tuple[Piece, ...] = ()
    stage: int = 0

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return prod(self.shape)

    def box(self, places: dict[str, tuple[int, int]]) -> Box:
        """What the rank at ``places`` holds: axis -> (size, this rank's coordinate); an axis not named is not cut."""
        box = Box.whole(self.shape)
        for axis, dim in self.axes:
            size, rank = places.get(axis, (1, 0))
            box = box.cut(dim, size, rank)
        return box


def table_of(sizes: DecoderSizes | ErnieSizes) -> tuple[ParameterSpec, ...]:
    """The table of either model."""
    if isinstance(sizes, Ernie3Sizes):
        return ernie3_table(sizes)
    return ernie_table(sizes) if isinstance(sizes, ErnieSizes) else decoder_table(sizes)


def placed(table: Iterable[ParameterSpec], stages: Stages) -> tuple[ParameterSpec, ...]:
    """The table with each row's stage."""
    return tuple(replace(spec, stage=stages.rank_of_unit(spec.unit)) for spec in table)


def decoder_table(sizes: DecoderSizes) -> tuple[ParameterSpec, ...]:
    """The table of a decoder, in the order of its forward; Hugging Face names are those of Ernie4_5(_Moe)."""
    V, H = sizes.vocab_size, sizes.hidden_size
    rows = [_weight("embedding.word.weight", (V, H), "model.embed_tokens.weight", "embedding", axes=(("mp", 0),))]
    if sizes.position_embedding_type == "learned":
        shape = (sizes.max_position_embeddings, H)
        rows.append(_weight("embedding.position.weight", shape, "", "embedding", mp_partial="sp"))
    for layer in range(sizes.num_layers):
        rows += _decoder_layer(sizes, layer)
    if sizes.mtp_depth:
        rows += _mtp(sizes)
    rows += _norm("final_norm", H, "model.norm", "head", biased=sizes.normalization == "layernorm")
    if not sizes.tie_embeddings:
        rows.append(_weight("lm_head.weight", (V, H), "lm_head.weight", "head", axes=(("mp", 0),)))
    return tuple(rows)


def ernie_table(sizes: ErnieSizes) -> tuple[ParameterSpec, ...]:
    """The table of an ERNIE encoder; Hugging Face names are those of ErnieForPreTraining."""
    rows = _ernie_embedding(sizes)
    for layer in range(sizes.num_layers):
        rows += _ernie_layer(sizes, f"layers.{layer}", f"ernie.encoder.layer.{layer}", f"layers.{layer}")
    return (*rows, *_ernie_head(sizes))


def ernie3_table(sizes: Ernie3Sizes) -> tuple[ParameterSpec, ...]:
    """The table of ERNIE 3.0, which has no Hugging Face form."""
    H, h, rows = sizes.hidden_size, sizes.task_hidden_size, _ernie_embedding(sizes)
    for layer in range(sizes.num_blocks):
        unit = f"layers.{layer}"
        if layer < sizes.num_layers:
            rows += _ernie_layer(sizes, unit, unit, unit)
            continue
        for branch in BRANCHES:
            if layer == sizes.num_layers:
                name = f"{unit}.{branch}_proj"
                rows.append(_weight(f"{name}.weight", (h, H), "", unit, mp_partial="sp"))
                rows.append(_offset(f"{name}.bias", (h,), "", unit, mp_partial="sp"))
            rows += _ernie_layer(sizes.branch, f"{unit}.{branch}", f"{unit}.{branch}", unit)
    for branch in sizes.word_branches:
        rows += _word_head(f"heads.{branch}", (H, h), sizes.vocab_size, f"heads.{branch}")
    asked = [task for task in CLASSES if task in sizes.tasks]
    if asked:
        rows += _plain("heads.pooler", (h, h), "heads.pooler")
    for task in asked:
        rows += _plain(f"heads.{task}", (sizes.classes(task), h), f"heads.{task}")
    return tuple(rows)


def _ernie_embedding(sizes: ErnieSizes) -> list[ParameterSpec]:
    V, H, hf = sizes.vocab_size, sizes.hidden_size, "ernie.embeddings"
    rows = [_weight("embedding.word.weight", (V, H), f"{hf}.word_embeddings.weight", "embedding", axes=(("mp", 0),))]
    for name, count in (
        ("position", sizes.max_position_embeddings),
        ("token_type", sizes.type_vocab_size),
        ("task_type", sizes.task_type_vocab_size),
    ):
        hf_name = f"{hf}.{name}_embeddings.weight"
        rows.append(_weight(f"embedding.{name}.weight", (count, H), hf_name, "embedding", mp_partial="sp"))
    return rows + _norm("embedding.norm", H, f"{hf}.LayerNorm", "embedding")


def parameter_counts(sizes: DecoderSizes | ErnieSizes) -> tuple[int, int]:
    """(all parameters, those that one token passes: top-k of the routed experts); buffers are not counted.

    Published counts leave multi-token prediction out, which only training runs; so do these.
    """
    if isinstance(sizes, DecoderSizes):
        sizes = replace(sizes, mtp_depth=0)
    total = active = 0
    moe = sizes.moe if isinstance(sizes, DecoderSizes) else None
    for row in table_of(sizes):
        if row.trainable:
            total += row.numel
            active += row.numel * moe.topk // moe.num_experts if moe is not None and row.expert else row.numel
    return total, active


def _decoder_layer(sizes: DecoderSizes, layer: int) -> list[ParameterSpec]:
    unit, hf, bias = f"layers.{layer}", f"model.layers.{layer}", sizes.add_bias_linear
    rows = _decoder_attention(sizes, unit, hf, unit)
    moe = sizes.moe_at(layer)
    if moe is not None:
        return rows + _moe(f"{unit}.moe", moe, bias, f"{hf}.mlp", unit)
    shape = (sizes.ffn_hidden_size, sizes.hidden_size)
    return rows + _mlp(f"{unit}.mlp", shape, sizes.gated, bias, f"{hf}.mlp", unit)


def _decoder_attention(sizes: DecoderSizes, name: str, hf: str, unit: str) -> list[ParameterSpec]:
    """Of a block called ``name``, with both norms."""
    H, D, bias, biased = sizes.hidden_size, sizes.head_dim, sizes.add_bias_linear, sizes.normalization == "layernorm"
    rows = _norm(f"{name}.attention_norm", H, f"{hf}.input_layernorm", unit, biased)
    names = tuple(f"{hf}.self_attn.{kind}_proj" for kind in "qkv")
    G, Q = sizes.num_query_groups, sizes.queries_per_group
    rows += _qkv(f"{name}.attention.qkv", (G, Q, D, H), names, unit, bias)
    rows += _row(f"{name}.attention.proj", (H, G * Q * D), f"{hf}.self_attn.o_proj", unit, bias)
    if sizes.qk_norm:
        for kind in "qk":
            rows.append(_scale(f"{name}.attention.{kind}_norm.weight", D, "", unit, mp_partial="always"))
    return rows + _norm(f"{name}.mlp_norm", H, f"{hf}.post_attention_layernorm", unit, biased)


def _mtp(sizes: DecoderSizes) -> list[ParameterSpec]:
    """The multi-token prediction block, part of the head; Hugging Face names are those of the ERNIE 4.5 folders."""
    H, biased, hf = sizes.hidden_size, sizes.normalization == "layernorm", "model.mtp_block.0"
    proj = _weight("mtp.proj.weight", (H, 2 * H), "model.mtp_linear_proj.0.weight", "head", mp_partial="sp")
    return [
        *_norm("mtp.embedding_norm", H, "model.mtp_emb_norm.0", "head", biased),
        *_norm("mtp.hidden_norm", H, "model.mtp_hidden_norm.0", "head", biased),
        proj,
        *_decoder_attention(sizes, "mtp.block", hf, "head"),
        *_mlp(
            "mtp.block.mlp",
            (sizes.ffn_hidden_size, H),
            sizes.gated,
            sizes.add_bias_linear,
            f"{hf}.mlp",
            "head",
        ),
    ]


def _ernie_layer(sizes: ErnieSizes, name: str, hf: str, unit: str) -> list[ParameterSpec]:
    H, D, F, heads = sizes.hidden_size, sizes.head_dim, sizes.ffn_hidden_size, sizes.num_attention_heads
    names = tuple(f"{hf}.attention.self.{kind}" for kind in ("query", "key", "value"))
    return [
        *_qkv(f"{name}.attention.qkv", (heads, 1, D, H), names, unit, bias=True),
        *_row(f"{name}.attention.proj", (H, heads * D), f"{hf}.attention.output.dense", unit, bias=True),
        *_norm(f"{name}.attention_norm", H, f"{hf}.attention.output.LayerNorm", unit),
        *_column(f"{name}.mlp.up", (F, H), f"{hf}.intermediate.dense", unit, bias=True),
        *_row(f"{name}.mlp.down", (H, F), f"{hf}.output.dense", unit, bias=True),
        *_norm(f"{name}.mlp_norm", H, f"{hf}.output.LayerNorm", unit),
    ]


def _ernie_head(sizes: ErnieSizes) -> list[ParameterSpec]:
    # The heads see the whole sequence on every mp rank, so their gradients are whole too.
    H, rows, hf = sizes.hidden_size, [], "cls.predictions"
    if sizes.sop:
        rows += _plain("pooler", (H, H), "ernie.pooler.dense")
    rows += _word_head("lm_head", (H, H), sizes.vocab_size, hf)
    if sizes.sop:
        rows += _plain("sop_head", (2, H), "cls.seq_relationship")
    return rows


def _word_head(name: str, shape: tuple[int, int], vocab_size: int, hf: str) -> list[ParameterSpec]:
    """A transform of shape [H, features], a norm and the vocabulary's bias; the decoder is the word embedding."""
    rows = _plain(f"{name}.transform", shape, f"{hf}.transform.dense")
    norm = _norm(f"{name}.norm", shape[0], f"{hf}.transform.LayerNorm", "head")
    rows += [replace(row, mp_partial="never") for row in norm]
    rows.append(_offset(f"{name}.bias", (vocab_size,), f"{hf}.bias", "head", axes=(("mp", 0),)))
    return rows


def _qkv(name: str, shape: tuple[int, int, int, int], hf: Sequence[str], unit: str, bias: bool) -> list[ParameterSpec]:
    G, Q, D, H = shape
    rows = []
    for kind, tail in (("weight", (H,)), ("bias", ()))[: 1 + bias]:
        pieces = (
            Piece(f"{hf[0]}.{kind}", (G * Q * D, *tail), (ALL, slice(0, Q))),
            Piece(f"{hf[1]}.{kind}", (G * D, *tail), (ALL, Q)),
            Piece(f"{hf[2]}.{kind}", (G * D, *tail), (ALL, Q + 1)),
        )
        rows.append(_fused(f"{name}.{kind}", (G, Q + 2, D, *tail), pieces, unit, (("mp", 0),)))
    return rows


def _mlp(name: str, shape: tuple[int, int], gated: bool, bias: bool, hf: str, unit: str) -> list[ParameterSpec]:
    F, H = shape
    if gated:
        rows = [_gate_up(f"{name}.gate_up.weight", (2, F, H), hf, unit)]
        if bias:
            rows.append(_gate_up(f"{name}.gate_up.bias", (2, F), hf, unit))
    else:
        rows = _column(f"{name}.up", (F, H), f"{hf}.up_proj", unit, bias)
    return rows + _row(f"{name}.down", (H, F), f"{hf}.down_proj", unit, bias)


def _gate_up(name: str, shape: tuple[int, ...], hf: str, unit: str) -> ParameterSpec:
    kind = name.rsplit(".", 1)[1]
    pieces = tuple(Piece(f"{hf}.{part}_proj.{kind}", shape[1:], (i,)) for i, part in enumerate(("gate", "up")))
    return _fused(name, shape, pieces, unit, (("mp", 1),))


def _moe(name: str, moe: MoeSizes, bias: bool, hf: str, unit: str) -> list[ParameterSpec]:
    E, H, F = moe.num_experts, moe.hidden_size, moe.ffn_hidden_size
    router = _weight(f"{name}.router.weight", (E, H), f"{hf}.gate.weight", unit, mp_partial="sp")
    correction = _offset(f"{name}.router.correction_bias", (E,), "", unit)
    piece = Piece(f"{hf}.moe_statics.e_score_correction_bias", (1, E), (ALL,))
    rows = [replace(router, fp32=True, router=True), replace(correction, fp32=True, trainable=False, pieces=(piece,))]
    parts = ("gate", "up") if moe.gated else ("up",)
    fused, lead = ("gate_up", (E, 2, F)) if moe.gated else ("up", (E, F))
    split = (("ep", 0), ("emp", len(lead) - 1))
    rows.append(_experts(f"{name}.experts.{fused}", (*lead, H), hf, parts, split, unit))
    down = _experts(f"{name}.experts.down", (E, H, F), hf, ("down",), (("ep", 0), ("emp", 2)), unit)
    rows.append(replace(down, residual=True))
    if moe.add_bias:
        rows.append(_experts(f"{name}.experts.{fused}_bias", lead, hf, parts, split, unit))
        rows.append(_experts(f"{name}.experts.down_bias", (E, H), hf, ("down",), (("ep", 0),), unit))
    if moe.shared_experts:
        rows += _mlp(f"{name}.shared", (moe.shared_width, H), moe.gated, bias, f"{hf}.shared_experts", unit)
    return rows


def _experts(
    name: str,
    shape: tuple[int, ...],
    hf: str,
    parts: tuple[str, ...],
    axes: tuple[tuple[str, int], ...],
    unit: str,
) -> ParameterSpec:
    kind = "bias" if name.endswith("_bias") else "weight"
    pieces = []
    for expert in range(shape[0]):
        for i, part in enumerate(parts):
            index: tuple[int | slice, ...] = (expert, i) if len(parts) > 1 else (expert,)
            pieces.append(Piece(f"{hf}.experts.{expert}.{part}_proj.{kind}", shape[len(index) :], index))
    return replace(_fused(name, shape, pieces, unit, axes), expert=True)


def _column(name: str, shape: tuple[int, int], hf: str, unit: str, bias: bool) -> list[ParameterSpec]:
    rows = [_weight(f"{name}.weight", shape, f"{hf}.weight", unit, axes=(("mp", 0),))]
    return rows + [_offset(f"{name}.bias", shape[:1], f"{hf}.bias", unit, axes=(("mp", 0),))] * bias


def _row(name: str, shape: tuple[int, int], hf: str, unit: str, bias: bool) -> list[ParameterSpec]:
    weight = _weight(f"{name}.weight", shape, f"{hf}.weight", unit, axes=(("mp", 1),))
    rows = [replace(weight, residual=True)]
    return rows + [_offset(f"{name}.bias", shape[:1], f"{hf}.bias", unit, mp_partial="sp")] * bias


def _plain(name: str, shape: tuple[int, int], hf: str) -> list[ParameterSpec]:
    weight = _weight(f"{name}.weight", shape, f"{hf}.weight", "head")
    return [weight, _offset(f"{name}.bias", shape[:1], f"{hf}.bias", "head")]


def _norm(name: str, size: int, hf: str, unit: str, biased: bool = True) -> list[ParameterSpec]:
    rows = [_scale(f"{name}.weight", size, f"{hf}.weight", unit)]
    return rows + [_offset(f"{name}.bias", (size,), f"{hf}.bias", unit, mp_partial="sp")] * biased


def _weight(
    name: str,
    shape: tuple[int, ...],
    hf: str,
    unit: str,
    axes: tuple[tuple[str, int], ...] = (),
    mp_partial: str = "never",
    init: str = "normal",
) -> ParameterSpec:
    pieces = (Piece(hf or name, shape, ()),)
    return ParameterSpec(name, shape, axes, unit, init, decay=init == "normal", mp_partial=mp_partial, pieces=pieces)


_offset = partial(_weight, init="zeros")


def _scale(name: str, size: int, hf: str, unit: str, mp_partial: str = "sp") -> ParameterSpec:
    return _weight(name, (size,), hf, unit, mp_partial=mp_partial, init="ones")


def _fused(
    name: str, shape: tuple[int, ...], pieces: Iterable[Piece], unit: str, axes: tuple[tuple[str, int], ...]
) -> ParameterSpec:
    biased = name.endswith("bias")
    init = "zeros" if biased else "normal"
    return ParameterSpec(name, shape, axes, unit, init, decay=not biased, pieces=tuple(pieces))
