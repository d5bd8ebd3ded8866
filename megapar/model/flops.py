"""Model FLOPs: what the mathematics of a training step asks for, as published utilisation figures count it.

A product of [m, k] and [k, n] is 2 m k n; backward is twice the forward; recomputation, norms, softmax and activations
are not counted. Of causal attention's scores only the lower half is counted. Standard library only, no torch.
Source: the appendix of "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), with the
causal half as Megatron-LM counts it since 2025.
"""

from __future__ import annotations

from dataclasses import fields, replace

from megapar.model.decoder.sizes import DecoderSizes, MoeSizes
from megapar.model.ernie.sizes import ErnieSizes
from megapar.model.ernie3.sizes import Ernie3Sizes
from megapar.model.sizes import ModelSizes

FORWARD_AND_BACKWARD = 3


def step_flops(sizes: ModelSizes, sequences: int, seq_length: int, predicted: int | None = None) -> int:
    """FLOPs of forward and backward over ``sequences`` sequences of ``seq_length`` tokens.

    predicted: masked positions in all of them, for ERNIE, whose vocabulary head runs only there (default: 15 %).
    A decoder's head runs everywhere.
    """
    if isinstance(sizes, Ernie3Sizes):
        return FORWARD_AND_BACKWARD * sequences * sum(_scaled(layer_flops(sizes), seq_length, sizes.seq_length))
    if isinstance(sizes, ErnieSizes):
        masked = sequences * seq_length * 15 // 100 if predicted is None else predicted
        return FORWARD_AND_BACKWARD * (sequences * _ernie(sizes, seq_length) + masked * _ernie_word(sizes))
    assert isinstance(sizes, DecoderSizes)
    return FORWARD_AND_BACKWARD * sequences * _decoder(sizes, seq_length)


def layer_flops(sizes: ModelSizes) -> list[int]:
    """Forward FLOPs of one sequence: of the embedding, of every layer, of the head (masked words: 15 %)."""
    length = sizes.seq_length
    if isinstance(sizes, Ernie3Sizes):
        universal, branch = (_ernie(replace(one, num_layers=1, sop=False), length) for one in modules(sizes))
        first = 2 * sizes.hidden_size * sizes.task_hidden_size * length
        blocks = [universal] * sizes.num_layers + [branch + first] + [branch] * (sizes.task_layers - 1)
        return [0, *blocks, length * 15 // 100 * _ernie_word(sizes)]
    if isinstance(sizes, ErnieSizes):
        one = replace(sizes, num_layers=1, sop=False)
        head = _ernie(replace(sizes, num_layers=0), length) + length * 15 // 100 * _ernie_word(sizes)
        return [0, *[_ernie(one, length)] * sizes.num_layers, head]
    assert isinstance(sizes, DecoderSizes)
    layers = (length * _decoder_layer(sizes, sizes.moe_at(layer), length) for layer in range(sizes.num_layers))
    return [0, *layers, length * _decoder_head(sizes, length)]


def modules(sizes: Ernie3Sizes) -> tuple[ErnieSizes, ErnieSizes]:
    """The universal module and one branch, each as an encoder."""
    kept = {item.name: getattr(sizes, item.name) for item in fields(ErnieSizes)}
    return ErnieSizes(**kept), sizes.branch


def _scaled(costs: list[int], length: int, whole: int) -> list[int]:
    """Costs of a sequence of ``whole`` tokens as those of ``length`` tokens."""
    return [cost * length // whole for cost in costs]


def flops_per_token(sizes: ModelSizes, seq_length: int) -> float:
    """FLOPs of forward and backward per token of a sequence of ``seq_length``."""
    return step_flops(sizes, 100, seq_length) / (100 * seq_length)


def _decoder(sizes: DecoderSizes, seq_length: int) -> int:
    """Forward of one sequence."""
    layers = (_decoder_layer(sizes, sizes.moe_at(layer), seq_length) for layer in range(sizes.num_layers))
    return seq_length * (sum(layers) + _decoder_head(sizes, seq_length))


def _decoder_layer(sizes: DecoderSizes, moe: MoeSizes | None, seq_length: int) -> int:
    """Forward of one layer per token."""
    H, attention_width = sizes.hidden_size, sizes.num_attention_heads * sizes.head_dim
    qkv_width = attention_width + 2 * sizes.num_query_groups * sizes.head_dim
    scores = 2 * 2 * attention_width * seq_length // 2
    attention = 2 * H * (qkv_width + attention_width) + scores
    if moe is None:
        return attention + 2 * _mlp(H, sizes.ffn_hidden_size, sizes.gated)
    passed = moe.topk + moe.shared_experts
    return attention + 2 * (passed * _mlp(H, moe.ffn_hidden_size, moe.gated) + H * moe.num_experts)


def _decoder_head(sizes: DecoderSizes, seq_length: int) -> int:
    """Forward behind the last layer per token; multi-token prediction runs a block and the head once more."""
    H = sizes.hidden_size
    head = 2 * H * sizes.vocab_size
    return head + sizes.mtp_depth * (2 * 2 * H * H + _decoder_layer(sizes, None, seq_length) + head)


def _ernie(sizes: ErnieSizes, seq_length: int) -> int:
    """Forward of one sequence, without the masked-word head."""
    H = sizes.hidden_size
    per_token = sizes.num_layers * (2 * 4 * H * H + 2 * 2 * H * seq_length + 2 * _mlp(H, sizes.ffn_hidden_size, False))
    pooled = 2 * H * (H + 2) if sizes.sop else 0
    return seq_length * per_token + pooled


def _ernie_word(sizes: ErnieSizes) -> int:
    """Forward of the masked-word head at one position."""
    return 2 * sizes.hidden_size * (sizes.hidden_size + sizes.vocab_size)


def _mlp(hidden: int, width: int, gated: bool) -> int:
    """Weights of one feed-forward layer."""
    return hidden * width * (3 if gated else 2)
