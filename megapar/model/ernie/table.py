"""Parameter table of an ERNIE encoder, and the rows that it shares with ERNIE 3.0."""

from __future__ import annotations

from dataclasses import replace

from megapar.model.attention.kinds import kind_of
from megapar.model.ernie.sizes import ErnieSizes
from megapar.model.parameter import (
    ParameterSpec,
    bias_row,
    column_parallel_rows,
    linear_rows,
    norm_rows,
    row_parallel_rows,
    weight_row,
)

HF_PARTS = {"q": "self.query", "k": "self.key", "v": "self.value", "o": "output.dense"}
"""Hugging Face names of the parts of an attention."""
SOP = ("pooler.", "sop_head.")
"""Prefixes of the sentence-order head's parameters, which a masked language model does not have."""


def ernie_table(sizes: ErnieSizes) -> tuple[ParameterSpec, ...]:
    """Return the table of an ERNIE encoder. Hugging Face names are those of ErnieForPreTraining."""
    rows = embedding_rows(sizes)
    for layer in range(sizes.num_layers):
        rows += layer_rows(sizes, f"layers.{layer}", f"ernie.encoder.layer.{layer}", f"layers.{layer}")
    return (*rows, *_ernie_head(sizes))


def embedding_rows(sizes: ErnieSizes) -> list[ParameterSpec]:
    """Return the rows of the embedding."""
    V, H, hf = sizes.vocab_size, sizes.hidden_size, "ernie.embeddings"
    rows = [weight_row("embedding.word.weight", (V, H), f"{hf}.word_embeddings.weight", "embedding", axes=(("mp", 0),))]
    for name, count in (
        ("position", sizes.max_position_embeddings),
        ("token_type", sizes.type_vocab_size),
        ("task_type", sizes.task_type_vocab_size),
    ):
        hf_name = f"{hf}.{name}_embeddings.weight"
        rows.append(weight_row(f"embedding.{name}.weight", (count, H), hf_name, "embedding", mp_partial="sp"))
    return rows + norm_rows("embedding.norm", H, f"{hf}.LayerNorm", "embedding")


def layer_rows(sizes: ErnieSizes, name: str, hf: str, unit: str) -> list[ParameterSpec]:
    """Return the rows of the layer ``name``, which has the Hugging Face name ``hf``."""
    H, F, attention = sizes.hidden_size, sizes.ffn_hidden_size, sizes.attention
    return [
        *kind_of(attention).rows(attention, f"{name}.attention", lambda part: f"{hf}.attention.{HF_PARTS[part]}", unit),
        *norm_rows(f"{name}.attention_norm", H, f"{hf}.attention.output.LayerNorm", unit),
        *column_parallel_rows(f"{name}.mlp.up", (F, H), f"{hf}.intermediate.dense", unit, bias=True),
        *row_parallel_rows(f"{name}.mlp.down", (H, F), f"{hf}.output.dense", unit, bias=True),
        *norm_rows(f"{name}.mlp_norm", H, f"{hf}.output.LayerNorm", unit),
    ]


def _ernie_head(sizes: ErnieSizes) -> list[ParameterSpec]:
    # The heads see the whole sequence on each mp rank, so their gradients are complete.
    H, rows, hf = sizes.hidden_size, [], "cls.predictions"
    if sizes.sop:
        rows += linear_rows("pooler", (H, H), "ernie.pooler.dense")
    rows += word_head_rows("lm_head", (H, H), sizes.vocab_size, hf)
    if sizes.sop:
        rows += linear_rows("sop_head", (2, H), "cls.seq_relationship")
    return rows


def word_head_rows(name: str, shape: tuple[int, int], vocab_size: int, hf: str) -> list[ParameterSpec]:
    """Return a masked-word head's rows: transform [H, features], norm, bias; the word embedding is its output layer."""
    rows = linear_rows(f"{name}.transform", shape, f"{hf}.transform.dense")
    norm = norm_rows(f"{name}.norm", shape[0], f"{hf}.transform.LayerNorm", "head")
    rows += [replace(row, mp_partial="never") for row in norm]
    rows.append(bias_row(f"{name}.bias", (vocab_size,), f"{hf}.bias", "head", axes=(("mp", 0),)))
    return rows
