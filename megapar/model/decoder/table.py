"""Parameter table of a decoder. Shape letters as in ``model.parameter``."""

from __future__ import annotations

import re
from dataclasses import replace

from megapar.model.attention.kinds import kind_of
from megapar.model.decoder.sizes import DecoderSizes
from megapar.model.parameter import ALL, HfPiece, ParameterSpec, bias_row, fused_row, mlp_rows, norm_rows, weight_row
from megapar.moe.sizes import MoeSizes

_OUTPUTS = ("post_attention_layernorm", "post_feedforward_layernorm")
_FIRST_NORMS = {  # of attention and of the MLP; those of outputs are ``_OUTPUTS``
    "input": ("input_layernorm", "post_attention_layernorm"),
    "output": _OUTPUTS,
    "both": ("input_layernorm", "pre_feedforward_layernorm"),
}
_HF_NAMES = {"kv_a": "kv_a_proj_with_mqa", "q_a_norm": "q_a_layernorm", "kv_a_norm": "kv_a_layernorm", "sinks": "sinks"}


def decoder_table(sizes: DecoderSizes) -> tuple[ParameterSpec, ...]:
    """Return the table of a decoder, in forward order. Hugging Face names are those of Ernie4_5(_Moe)."""
    V, H = sizes.vocab_size, sizes.hidden_size
    rows = [weight_row("embedding.word.weight", (V, H), "model.embed_tokens.weight", "embedding", axes=(("mp", 0),))]
    if sizes.position_embedding_type == "learned":
        shape = (sizes.max_position_embeddings, H)
        rows.append(weight_row("embedding.position.weight", shape, "", "embedding", mp_partial="sp"))
    for layer in range(sizes.num_layers):
        name = f"layers.{layer}"
        rows += _block(sizes, layer, name, f"model.{name}", name)
    if sizes.mtp_depth:
        rows += _mtp(sizes)
    rows += norm_rows("final_norm", H, "model.norm", "head", biased=sizes.normalization == "layernorm")
    if not sizes.tie_embeddings:
        rows.append(weight_row("lm_head.weight", (V, H), "lm_head.weight", "head", axes=(("mp", 0),)))
    if sizes.apply_layernorm_1p:
        rows = [replace(row, init="zeros") if row.init == "ones" else row for row in rows]
    return tuple(rows)


def _block(sizes: DecoderSizes, layer: int, name: str, hf: str, unit: str) -> list[ParameterSpec]:
    """Return the rows of a block that is like layer ``layer``."""
    rows, bias = _decoder_attention(sizes, name, hf, unit), sizes.add_bias_linear
    moe = sizes.moe_at(layer)
    if moe is not None:
        rows += _moe(f"{name}.moe", moe, bias, f"{hf}.mlp", unit)
    else:
        shape = (sizes.ffn_hidden_size, sizes.hidden_size)
        rows += mlp_rows(f"{name}.mlp", shape, sizes.gated, bias, f"{hf}.mlp", unit)
    if sizes.norm_placement != "both":
        return rows
    biased = sizes.normalization == "layernorm"
    return rows + norm_rows(f"{name}.mlp_output_norm", sizes.hidden_size, f"{hf}.{_OUTPUTS[1]}", unit, biased)


def _decoder_attention(sizes: DecoderSizes, name: str, hf: str, unit: str) -> list[ParameterSpec]:
    """Return the rows of attention and of the norms up to the MLP of the block ``name``."""
    H, attention, biased = sizes.hidden_size, sizes.attention, sizes.normalization == "layernorm"
    first, second = _FIRST_NORMS[sizes.norm_placement]
    rows = norm_rows(f"{name}.attention_norm", H, f"{hf}.{first}", unit, biased)
    rows += kind_of(attention).rows(
        attention, f"{name}.attention", lambda part: f"{hf}.self_attn.{_HF_NAMES.get(part, f'{part}_proj')}", unit
    )
    if sizes.norm_placement == "both":
        rows += norm_rows(f"{name}.attention_output_norm", H, f"{hf}.{_OUTPUTS[0]}", unit, biased)
    return rows + norm_rows(f"{name}.mlp_norm", H, f"{hf}.{second}", unit, biased)


def _mtp(sizes: DecoderSizes) -> list[ParameterSpec]:
    """Return the rows of the multi-token prediction block, part of the head.

    Names are those of ERNIE 4.5 folders, or of DeepSeek-V3's, where the block is the layer after the last one.
    """
    H, biased, number = sizes.hidden_size, sizes.normalization == "layernorm", sizes.num_layers
    layer = f"layers.{number}"
    parts = {"embedding_norm": "mtp_emb_norm.0", "hidden_norm": "mtp_hidden_norm.0", "proj": "mtp_linear_proj.0"}
    hf = "model.mtp_block.0"
    if sizes.ends_as_layer:
        parts = {"embedding_norm": f"{layer}.enorm", "hidden_norm": f"{layer}.hnorm", "proj": f"{layer}.eh_proj"}
        hf = f"model.{layer}"
    rows = [
        *norm_rows("mtp.embedding_norm", H, f"model.{parts['embedding_norm']}", "head", biased),
        *norm_rows("mtp.hidden_norm", H, f"model.{parts['hidden_norm']}", "head", biased),
        weight_row("mtp.proj.weight", (H, 2 * H), f"model.{parts['proj']}.weight", "head", mp_partial="sp"),
    ]
    block = _block(sizes, number, "mtp.block", hf, "head")
    if not sizes.ends_as_layer:
        return rows + block
    rows += [_named_as_layer(row, layer) for row in block]
    return rows + norm_rows("mtp.final_norm", H, f"{hf}.shared_head.norm", "head", biased)


def _named_as_layer(row: ParameterSpec, layer: str) -> ParameterSpec:
    """Return a row of the block whose pieces without a Hugging Face name are called as those of a layer."""
    names = [re.sub(r"^mtp\.block", layer, piece.hf_name) for piece in row.pieces]
    return replace(
        row, pieces=tuple(replace(piece, hf_name=name) for piece, name in zip(row.pieces, names, strict=True))
    )


def _moe(name: str, moe: MoeSizes, bias: bool, hf: str, unit: str) -> list[ParameterSpec]:
    E, H, F = moe.num_experts, moe.hidden_size, moe.ffn_hidden_size
    router = weight_row(f"{name}.router.weight", (E, H), f"{hf}.gate.weight", unit, mp_partial="sp")
    correction = bias_row(f"{name}.router.correction_bias", (E,), "", unit)
    piece = HfPiece(f"{hf}.moe_statics.e_score_correction_bias", (1, E), (ALL,))
    rows = [replace(router, fp32=True, router=True)]
    if moe.linear_bias:
        bias_of_logits = bias_row(f"{name}.router.bias", (E,), f"{hf}.gate.bias", unit, mp_partial="sp")
        rows.append(replace(bias_of_logits, fp32=True, router=True))
    rows.append(replace(correction, fp32=True, trainable=False, pieces=(piece,)))
    parts = ("gate", "up") if moe.gated else ("up",)
    fused, lead = ("gate_up", (E, 2, F)) if moe.gated else ("up", (E, F))
    split = (("ep", 0), ("emp", len(lead) - 1))
    rows.append(_experts(f"{name}.experts.{fused}", (*lead, H), hf, parts, split, unit))
    down = _experts(f"{name}.experts.down", (E, H, F), hf, ("down",), (("ep", 0), ("emp", 2)), unit)
    rows.append(replace(down, residual=True))
    if moe.add_bias:
        rows.append(_experts(f"{name}.experts.{fused}_bias", lead, hf, parts, split, unit))
        rows.append(_experts(f"{name}.experts.down_bias", (E, H), hf, ("down",), (("ep", 0),), unit))
    if moe.shared_width:
        rows += mlp_rows(f"{name}.shared", (moe.shared_width, H), moe.gated, bias, f"{hf}.shared_experts", unit)
    if moe.shared_gate:
        gate = f"{hf}.shared_expert_gate.weight"
        rows.append(weight_row(f"{name}.shared.token_gate", (1, H), gate, unit, mp_partial="sp"))
    return rows


def _experts(
    name: str, shape: tuple[int, ...], hf: str, parts: tuple[str, ...], axes: tuple[tuple[str, int], ...], unit: str
) -> ParameterSpec:
    kind = "bias" if name.endswith("_bias") else "weight"
    pieces = []
    for expert in range(shape[0]):
        for i, part in enumerate(parts):
            index: tuple[int | slice, ...] = (expert, i) if len(parts) > 1 else (expert,)
            pieces.append(HfPiece(f"{hf}.experts.{expert}.{part}_proj.{kind}", shape[len(index) :], index))
    return replace(fused_row(name, shape, pieces, unit, axes), expert=True)
