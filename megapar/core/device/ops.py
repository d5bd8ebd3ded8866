"""Operators with faster forms on some devices: a table op -> device -> function, with a plain reference for each.

``op`` selects the form for the device and dtype of a tensor. Devices without an entry, and all fp64 tensors, use the
reference. One test per entry compares it with its reference.

Shape letters: B batch, S sequence, N query heads, G key-value heads, D head size of queries and keys, V of values and
outputs, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megapar.core.device import ascend
from megapar.core.device.accumulate import (
    add_product_reference,
    add_product_wide,
    wide_product,
    wide_product_reference,
    wide_product_rounded,
)
from megapar.core.device.attention.blocks import (
    block_backward_cpu,
    block_backward_cuda,
    block_backward_reference,
    block_cpu,
    block_cuda,
    block_reference,
)
from megapar.core.device.attention.documents import (
    packed_attention_by_document,
    packed_attention_reference,
    packed_attention_varlen,
)
from megapar.core.device.attention.slices import (
    attention_slice_fused,
    attention_slice_merged,
    attention_slice_reference,
    packed_attention_slice_merged,
    packed_attention_slice_reference,
    packed_attention_slice_varlen,
)
from megapar.core.device.attention.whole import attention_cudnn, attention_flash, attention_fused, attention_reference
from megapar.core.device.cross_entropy import cross_entropy_fused, cross_entropy_reference
from megapar.core.device.dtypes import at_least_fp32
from megapar.core.device.grouped import (
    grouped_input_gradient_aligned,
    grouped_input_gradient_reference,
    grouped_linear_aligned,
    grouped_linear_reference,
    grouped_weight_gradient_aligned,
    grouped_weight_gradient_reference,
)
from megapar.core.device.latent_heads import (
    join_heads_apart,
    join_heads_once,
    join_heads_reference,
    rotate_last_in_place,
    rotate_last_npu,
    rotate_last_reference,
)
from megapar.core.device.rotary import (
    rotary_complex,
    rotary_cuda,
    rotary_heads_by,
    rotary_heads_cuda,
    rotary_heads_reference,
    rotary_reference,
)
from megapar.core.device.rows.bucket_rows import (
    pack_bucket_cuda,
    pack_bucket_reference,
    unpack_bucket_cuda,
    unpack_bucket_reference,
)
from megapar.core.device.rows.expert_rows import (
    pack_cuda,
    pack_reference,
    permute_cuda,
    permute_reference,
    sum_message_by,
    sum_message_cuda,
    sum_message_reference,
    unpack_cuda,
    unpack_reference,
    unpermute_cuda,
    unpermute_reference,
)
from megapar.core.device.rows.row_order import (
    order_equal_runs_cuda,
    order_equal_runs_reference,
    order_runs_cuda,
    order_runs_reference,
    sort_pairs_cuda,
    sort_pairs_reference,
    spread_pairs_cuda,
    spread_pairs_reference,
)
from megapar.core.device.small_embedding import small_embedding_by_product, small_embedding_reference
from megapar.core.device.swiglu import swiglu_cuda, swiglu_reference


def op(name: str, like: Tensor) -> Callable[..., Tensor]:
    """Return the form of ``name`` for the device and dtype of ``like``. Raises KeyError for an unknown op."""
    forms = OPS[name]
    if like.dtype == torch.float64:
        return forms["reference"]
    return forms.get(like.device.type, forms["reference"])


def rms_norm_reference(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Compute x / sqrt(mean(x^2) + epsilon) * weight over the last dim, in max(fp32, dtype)."""
    x_wide = x.to(at_least_fp32(x.dtype))
    scale = torch.rsqrt(x_wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * (x_wide * scale).to(x.dtype)


def rms_norm_fused(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Compute ``rms_norm_reference`` by one kernel, which rounds once, after the weight."""
    return F.rms_norm(x, (x.shape[-1],), weight, epsilon)


OPS: Mapping[str, Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {
        "attention": {
            "reference": attention_reference,
            "cpu": attention_fused,
            "cuda": attention_fused,
            "npu": ascend.attention_npu,
        },
        "attention_flash": {
            "reference": attention_reference,
            "cpu": attention_fused,
            "cuda": attention_flash,
            "npu": attention_reference,
        },
        "attention_cudnn": {
            "reference": attention_reference,
            "cpu": attention_fused,
            "cuda": attention_cudnn,
            "npu": attention_reference,
        },
        "packed_attention": {
            "reference": packed_attention_reference,
            "cpu": packed_attention_by_document,
            "cuda": packed_attention_varlen,
            "npu": ascend.packed_attention_npu,
        },
        "attention_slice": {
            "reference": attention_slice_reference,
            "cpu": attention_slice_merged,
            "cuda": attention_slice_fused,
            "npu": ascend.attention_slice_npu,
        },
        "attention_block": {
            "reference": block_reference,
            "cpu": block_cpu,
            "cuda": block_cuda,
            "npu": ascend.block_npu,
        },
        "attention_block_backward": {
            "reference": block_backward_reference,
            "cpu": block_backward_cpu,
            "cuda": block_backward_cuda,
            "npu": ascend.block_backward_npu,
        },
        "packed_attention_slice": {
            "reference": packed_attention_slice_reference,
            "cpu": packed_attention_slice_merged,
            "cuda": packed_attention_slice_varlen,
            "npu": ascend.packed_attention_slice_npu,
        },
        "rms_norm": {"reference": rms_norm_reference, "cuda": rms_norm_fused, "npu": ascend.rms_norm_npu},
        "swiglu": {"reference": swiglu_reference, "cuda": swiglu_cuda, "npu": ascend.swiglu_npu},
        "rotary": {
            "reference": rotary_reference,
            "cpu": rotary_complex,
            "cuda": rotary_cuda,
            "npu": ascend.rotary_npu,
        },
        "rotary_heads": {
            "reference": rotary_heads_reference,
            "cpu": rotary_heads_by(rotary_complex),
            "cuda": rotary_heads_cuda,
            "npu": rotary_heads_by(ascend.rotary_npu),
        },
        "rotate_last": {
            "reference": rotate_last_reference,
            "cpu": rotate_last_in_place,
            "cuda": rotate_last_in_place,
            "npu": rotate_last_npu,
        },
        "join_heads": {
            "reference": join_heads_reference,
            "cpu": join_heads_once,
            "cuda": join_heads_once,
            "npu": join_heads_apart,
        },
        "grouped_linear": {
            "reference": grouped_linear_reference,
            "cpu": grouped_linear_aligned,
            "cuda": grouped_linear_aligned,
            "npu": ascend.grouped_linear_npu,
        },
        "grouped_input_gradient": {
            "reference": grouped_input_gradient_reference,
            "cpu": grouped_input_gradient_aligned,
            "cuda": grouped_input_gradient_aligned,
            "npu": ascend.grouped_input_gradient_npu,
        },
        "grouped_weight_gradient": {
            "reference": grouped_weight_gradient_reference,
            "cpu": grouped_weight_gradient_aligned,
            "cuda": grouped_weight_gradient_aligned,
            "npu": ascend.grouped_weight_gradient_npu,
        },
        "add_product": {"reference": add_product_reference, "cuda": add_product_wide, "npu": add_product_reference},
        "wide_product": {"reference": wide_product_reference, "cuda": wide_product, "npu": wide_product_rounded},
        "cross_entropy": {
            "reference": cross_entropy_reference,
            "cuda": cross_entropy_fused,
            "npu": cross_entropy_reference,
        },
        "small_embedding": {
            "reference": small_embedding_reference,
            "cuda": small_embedding_by_product,
            "npu": small_embedding_reference,
        },
        "pack_bucket": {"reference": pack_bucket_reference, "cuda": pack_bucket_cuda, "npu": pack_bucket_reference},
        "unpack_bucket": {
            "reference": unpack_bucket_reference,
            "cuda": unpack_bucket_cuda,
            "npu": unpack_bucket_reference,
        },
        "permute": {"reference": permute_reference, "cuda": permute_cuda, "npu": ascend.permute_npu},
        "unpermute": {"reference": unpermute_reference, "cuda": unpermute_cuda, "npu": ascend.unpermute_npu},
        "pack": {"reference": pack_reference, "cuda": pack_cuda, "npu": pack_reference},
        "unpack": {"reference": unpack_reference, "cuda": unpack_cuda, "npu": unpack_reference},
        "sum_message": {
            "reference": sum_message_reference,
            "cuda": sum_message_cuda,
            "npu": sum_message_by(ascend.unpermute_npu),
        },
        "sort_pairs": {"reference": sort_pairs_reference, "cuda": sort_pairs_cuda, "npu": sort_pairs_reference},
        "spread_pairs": {
            "reference": spread_pairs_reference,
            "cuda": spread_pairs_cuda,
            "npu": spread_pairs_reference,
        },
        "order_runs": {"reference": order_runs_reference, "cuda": order_runs_cuda, "npu": order_runs_reference},
        "order_equal_runs": {
            "reference": order_equal_runs_reference,
            "cuda": order_equal_runs_cuda,
            "npu": order_equal_runs_reference,
        },
    }
)
