"""Number of kernels that an operator launches on a GPU: one, except for the operators listed here.

The numbers come from torch's CUDA sources: a row is ``estimated`` until a profiler has counted its kernels on a GPU.
Operators that allocate or only create a view launch none. Unlisted operators of torch launch one. Operators of other
libraries and of megapar must be listed in ``CUSTOM``, because their number of kernels is unknown otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megapar.errors import MegaparError

# Elements that one launch of torch's multi-tensor kernels processes: 320 blocks of 65,536.
ELEMENTS_OF_A_LIST_LAUNCH = 320 * 65_536
# Namespaces of torch and of the vendors' wheels: an unlisted operator there is one kernel.
_COUNTED_AS_ONE = frozenset({"aten", "prims", "c10d", "_c10d_functional", "fsdp", "npu"})


class UncountedOperatorError(MegaparError):
    """The number of kernels of an operator of a library or of megapar is not declared."""


@dataclass(frozen=True)
class Kernels:
    """Number of kernels of an operator.

    Attributes:
        launches: Kernels per call.
        estimated: Taken from the sources, not counted by a profiler yet.
        elements: The launches repeat for every block of this many elements; 0 if they do not repeat.
    """

    launches: int
    reason: str
    estimated: bool = True
    elements: int = 0

    def of(self, elements: int) -> int:
        """Return the launches of a call on this many elements."""
        if not self.elements:
            return self.launches
        return self.launches * max(1, -(-elements // self.elements))


_NONE = "allocates memory or creates a view"
_BY_LIST = "one per group of blocks of a list of tensors"
_FLASH_BACKWARD = "sums of gradient x output, the gradients, the cast of dq, sums over the heads of a group"
_RADIX = "histogram, sums and eight passes over 64-bit keys and their indices"

# Operator of torch, without its overload -> kernels.
KERNELS: Mapping[str, Kernels] = MappingProxyType(
    {
        **{
            name: Kernels(0, _NONE, estimated=False)
            for name in (
                *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"),
                *("detach", "alias", "lift_fresh", "set_", "resize_", "_reshape_alias", "_unsafe_view", "device"),
                *("record_stream", "is_pinned", "pin_memory", "_pin_memory", "is_same_size", "sym_size", "sym_numel"),
                *("sym_stride", "sym_storage_offset"),
            )
        },
        "sort": Kernels(10, _RADIX),
        "argsort": Kernels(10, _RADIX),
        "topk": Kernels(2, "selection, then sort"),
        "nonzero": Kernels(3, "count, then positions"),
        "masked_select": Kernels(4, "positions of nonzero elements, then values"),
        "unique_consecutive": Kernels(6, "marks, sums, copies"),
        "_unique2": Kernels(16, "a sort, marks, sums, copies"),
        "cumsum": Kernels(2, "scan of a vector: state, then sums"),
        "cumsum_": Kernels(2, "scan of a vector: state, then sums"),
        "bincount": Kernels(4, "minimum and maximum, zeros, histogram"),
        "histc": Kernels(2, "zeros, then the histogram"),
        "repeat_interleave": Kernels(3, "scan, then positions"),
        "index_put_": Kernels(2, "offsets of the indices, then the values"),
        "_index_put_impl_": Kernels(12, "with accumulation: sort of the indices, then values"),
        "embedding_dense_backward": Kernels(14, "zeros, sort of the indices, sums per index"),
        "_embedding_bag_dense_backward": Kernels(14, "zeros, sort of the indices, sums per index"),
        "_embedding_bag_backward": Kernels(14, "zeros, sort of the indices, sums per index"),
        "_scaled_dot_product_flash_attention_backward": Kernels(4, _FLASH_BACKWARD),
        "_flash_attention_backward": Kernels(4, _FLASH_BACKWARD),
        "_scaled_dot_product_efficient_attention_backward": Kernels(2, "sums of gradient x output, then the gradients"),
        "_efficient_attention_backward": Kernels(2, "sums of gradient x output, then the gradients"),
        "_scaled_dot_product_cudnn_attention_backward": Kernels(3, "sums, the gradients, the cast of dq"),
        "_grouped_mm": Kernels(2, "offsets of the groups, then the products"),
        "_scaled_grouped_mm": Kernels(2, "offsets of the groups, then the products"),
        "native_layer_norm_backward": Kernels(2, "gradient of the input, then of the weights"),
        "_fused_rms_norm_backward": Kernels(2, "gradient of the input, then of the weights"),
        "logsumexp": Kernels(7, "maximum, its infinities, difference, exponential, sum, logarithm, sum"),
        "nll_loss_backward": Kernels(2, "zeros, then the values"),
        "slice_backward": Kernels(2, "zeros, then the copy"),
        "select_backward": Kernels(2, "zeros, then the copy"),
        "slice_scatter": Kernels(2, "copy of the whole, then of the slice"),
        "constant_pad_nd": Kernels(2, "constant, then copy"),
        "_chunk_cat": Kernels(2, "copy of the table of addresses, then the tensors"),
        "split_with_sizes_copy": Kernels(2, "copy of the table of addresses, then the tensors"),
        "linalg_vector_norm": Kernels(2, "zeros for the partial sums, then the norm"),
        "_foreach_norm": Kernels(2, "norm per block, then over the blocks", elements=ELEMENTS_OF_A_LIST_LAUNCH),
        **{
            name: Kernels(1, _BY_LIST, elements=ELEMENTS_OF_A_LIST_LAUNCH)
            for name in (
                *("_foreach_add_", "_foreach_sub_", "_foreach_mul_", "_foreach_div_", "_foreach_copy_"),
                *("_foreach_zero_", "_foreach_lerp_", "_foreach_addcmul_", "_foreach_addcdiv_", "_foreach_sqrt"),
                *("_foreach_add", "_foreach_div", "_foreach_mul", "_fused_adamw_", "_fused_adam_", "_fused_sgd_"),
                *("_foreach_floor_", "_amp_foreach_non_finite_check_and_unscale_"),
            )
        },
    }
)  # fmt: skip

# "namespace::operator" -> kernels of operators that are registered with torch.library: torch's in Python, those of
# libraries and megapar's. A new operator needs a row.
CUSTOM: Mapping[str, Kernels] = MappingProxyType(
    {
        "torch_attn::_varlen_attn": Kernels(1, "FlashAttention of sequences of unequal lengths"),
        **{
            f"megapar::{name}": Kernels(1, "one kernel in Triton", estimated=False)
            for name in (
                *("rotary_heads", "rotary_heads_backward", "log_probabilities", "gradient_of_logits"),
                *("swiglu", "swiglu_backward", "cast_rows", "cast_whole_rows", "cast_weight"),
                *("swiglu_cast", "swiglu_cast_backward", "norm_cast"),
                *("split_matrix", "route", "route_backward", "add_gradient", "update_adamw"),
                *("order_runs", "copy_rows", "pack_rows", "unpack_rows", "sum_rows", "sum_message"),
            )
        },
        **{f"megapar::{name}_backward": Kernels(2, "sums of rows, then of these", False) for name in ("gelu", "norm")},
        "megapar::cast_tensor": Kernels(3, "zeros, the maximum, the cast", estimated=False),
        "megapar::sort_pairs": Kernels(2, "counts of blocks of pairs, then their rows", estimated=False),
        "torch_attn::_varlen_attn_backward": Kernels(4, _FLASH_BACKWARD),
    }
)


def kernels_of(name: str, elements: int = 0) -> int:
    """Return the number of kernels that one call launches on a GPU.

    Args:
        name: "namespace::operator", or the name of an operator of torch.
        elements: Elements of the longest list of tensors among the arguments.

    Raises UncountedOperatorError if the operator is not torch's and has no row.
    """
    space, _, operator = name.rpartition("::")
    if space == "prim":
        return 0
    row = CUSTOM.get(name) if space not in {"", *_COUNTED_AS_ONE} else KERNELS.get(operator)
    if row is not None:
        return row.of(elements)
    if space in {"", *_COUNTED_AS_ONE}:
        return 1
    raise UncountedOperatorError(
        f"operator {name} is not torch's, and its number of kernels is not declared: "
        "add a row to CUSTOM in scripts/tracing/kernels.py"
    )
