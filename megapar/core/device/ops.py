"""Operators with faster forms on some devices: a table op -> device -> function, with a plain reference for each.

``op`` selects the form for the device and dtype of a tensor. Devices without an entry, and all fp64 tensors, use the
reference. One test per entry compares it with its reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megapar.core.device import (
    adamw,
    ascend,
    bucket_rows,
    dtypes,
    expert_rows,
    fp8,
    grouped,
    latent_heads,
    layer_ops,
    rotary,
    triton_operators,
)
from megapar.core.device.attention import blocks, documents, slices, whole
from megapar.core.device.routing import route_cuda, route_reference

Form = Callable[..., Any]


def op(name: str, like: Tensor) -> Callable[..., Tensor]:
    """Return the form of ``name`` for the device and dtype of ``like``. Raises KeyError for an unknown op."""
    forms = OPS[name]
    if like.dtype == torch.float64:
        return forms["reference"]
    return forms.get(like.device.type, forms["reference"])


def _forms(reference: Form, **devices: Form) -> Mapping[str, Form]:
    return {"reference": reference, **devices}


OPS: Mapping[str, Mapping[str, Form]] = MappingProxyType(
    {
        "attention": _forms(
            whole.attention_reference, cpu=whole.attention_fused, cuda=whole.attention_fused, npu=ascend.attention_npu
        ),
        "attention_flash": _forms(whole.attention_reference, cpu=whole.attention_fused, cuda=whole.attention_flash),
        "attention_cudnn": _forms(whole.attention_reference, cpu=whole.attention_fused, cuda=whole.attention_cudnn),
        "packed_attention": _forms(
            documents.packed_attention_reference,
            cpu=documents.packed_attention_by_document,
            cuda=documents.packed_attention_varlen,
            npu=ascend.packed_attention_npu,
        ),
        "attention_slice": _forms(
            slices.attention_slice_reference,
            cpu=slices.attention_slice_merged,
            cuda=slices.attention_slice_fused,
            npu=ascend.attention_slice_npu,
        ),
        "attention_block": _forms(
            blocks.block_reference, cpu=blocks.block_cpu, cuda=blocks.block_cuda, npu=ascend.block_npu
        ),
        "attention_block_backward": _forms(
            blocks.block_backward_reference,
            cpu=blocks.block_backward_cpu,
            cuda=blocks.block_backward_cuda,
            npu=ascend.block_backward_npu,
        ),
        "packed_attention_slice": _forms(
            slices.packed_attention_slice_reference,
            cpu=slices.packed_attention_slice_merged,
            cuda=slices.packed_attention_slice_varlen,
            npu=ascend.packed_attention_slice_npu,
        ),
        "rms_norm": _forms(layer_ops.rms_norm_reference, cuda=layer_ops.rms_norm_fused, npu=ascend.rms_norm_npu),
        "swiglu": _forms(layer_ops.swiglu_reference, cuda=layer_ops.swiglu_cuda, npu=ascend.swiglu_npu),
        "clamped_swiglu": _forms(layer_ops.clamped_swiglu_reference, cuda=layer_ops.clamped_swiglu_cuda),
        "rotary": _forms(
            rotary.rotary_reference, cpu=rotary.rotary_in_place, cuda=rotary.rotary_in_place, npu=ascend.rotary_npu
        ),
        "rotary_heads": _forms(
            rotary.rotary_heads_reference,
            cpu=rotary.rotary_heads_at_once,
            cuda=rotary.rotary_heads_at_once,
            npu=rotary.rotary_heads_by(ascend.rotary_npu),
        ),
        "rotate_last": _forms(
            latent_heads.rotate_last_reference,
            cpu=latent_heads.rotate_last_in_place,
            cuda=latent_heads.rotate_last_in_place,
            npu=latent_heads.rotate_last_npu,
        ),
        "join_heads": _forms(
            latent_heads.join_heads_reference,
            cpu=latent_heads.join_heads_once,
            cuda=latent_heads.join_heads_once,
            npu=latent_heads.join_heads_apart,
        ),
        "grouped_linear": _forms(
            grouped.grouped_linear_reference,
            cpu=grouped.grouped_linear_aligned,
            cuda=grouped.grouped_linear_aligned,
            npu=ascend.grouped_linear_npu,
        ),
        "grouped_input_gradient": _forms(
            grouped.grouped_input_gradient_reference,
            cpu=grouped.grouped_input_gradient_aligned,
            cuda=grouped.grouped_input_gradient_aligned,
            npu=ascend.grouped_input_gradient_npu,
        ),
        "grouped_weight_gradient": _forms(
            grouped.grouped_weight_gradient_reference,
            cpu=grouped.grouped_weight_gradient_aligned,
            cuda=grouped.grouped_weight_gradient_aligned,
            npu=ascend.grouped_weight_gradient_npu,
        ),
        "add_product": _forms(dtypes.add_product_reference, cuda=dtypes.add_product_wide),
        "wide_product": _forms(
            dtypes.wide_product_reference, cuda=dtypes.wide_product, npu=dtypes.wide_product_rounded
        ),
        "fp8_weight": _forms(fp8.cast_weight_reference, cuda=fp8.cast_weight_cuda),
        "fp8_tensor_weight": _forms(fp8.cast_tensor_weight),
        "fp8_product": _forms(fp8.product_reference, cuda=fp8.product_cuda),
        "fp8_norm": _forms(fp8.norm_cast_reference, cuda=fp8.norm_cast_cuda),
        "fp8_swiglu": _forms(fp8.swiglu_cast_reference, cuda=triton_operators.swiglu_cast),
        "fp8_swiglu_backward": _forms(fp8.swiglu_cast_backward_reference, cuda=triton_operators.swiglu_cast_backward),
        "fp8_experts": _forms(fp8.cast_experts),
        "fp8_grouped_product": _forms(fp8.grouped_product_reference, cuda=fp8.grouped_product_cuda),
        "cross_entropy": _forms(layer_ops.cross_entropy_reference, cuda=layer_ops.cross_entropy_fused),
        "small_embedding": _forms(layer_ops.small_embedding_reference, cuda=layer_ops.small_embedding_by_product),
        "adamw": _forms(adamw.adamw_reference, cuda=adamw.adamw_cuda),
        "pack_bucket": _forms(bucket_rows.pack_bucket_reference, cuda=bucket_rows.pack_bucket_cuda),
        "add_gradient": _forms(bucket_rows.add_gradient_reference, cuda=bucket_rows.add_gradient_cuda),
        "unpack_bucket": _forms(bucket_rows.unpack_bucket_reference, cuda=bucket_rows.unpack_bucket_cuda),
        "route": _forms(route_reference, cuda=route_cuda),
        "permute": _forms(expert_rows.permute_reference, cuda=expert_rows.permute_cuda, npu=ascend.permute_npu),
        "unpermute": _forms(expert_rows.unpermute_reference, cuda=expert_rows.unpermute_cuda, npu=ascend.unpermute_npu),
        "pack": _forms(expert_rows.pack_reference, cuda=expert_rows.pack_cuda),
        "unpack": _forms(expert_rows.unpack_reference, cuda=expert_rows.unpack_cuda),
        "sum_message": _forms(
            expert_rows.sum_message_reference,
            cuda=expert_rows.sum_message_cuda,
            npu=expert_rows.sum_message_by(ascend.unpermute_npu),
        ),
        "sort_pairs": _forms(expert_rows.sort_pairs_reference, cuda=expert_rows.sort_pairs_cuda),
        "spread_pairs": _forms(expert_rows.spread_pairs_reference, cuda=expert_rows.spread_pairs_cuda),
        "order_runs": _forms(expert_rows.order_runs_reference, cuda=expert_rows.order_runs_cuda),
        "order_equal_runs": _forms(expert_rows.order_equal_runs_reference, cuda=expert_rows.order_equal_runs_cuda),
    }
)
