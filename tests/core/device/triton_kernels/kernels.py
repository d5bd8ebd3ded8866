"""The package's Triton kernels as models launch them: the types of their arguments, and constants of real sizes."""

from __future__ import annotations

from collections.abc import Mapping

from megapar.core.device.tensor_piece import PROGRAM
from megapar.core.device.triton_kernels import (
    adamw,
    block_casts,
    cross_entropy,
    expert_rows,
    gradients,
    rotary_heads,
    router,
    swiglu,
)
from megapar.core.device.triton_operators import router_tile
from tests.support.built_kernel import BuiltKernel


def _built(function: object, types: Mapping[str, str], warps: int, **constants: float | None) -> BuiltKernel:
    """A kernel; ``types`` has the arguments of each type as one string."""
    signature = {argument: kind for kind, arguments in types.items() for argument in arguments.split()}
    return BuiltKernel(function, signature, constants, warps, fuses=function is not adamw._update)


_LOGITS = {"*fp32": "logits lse", "*i64": "labels", "i32": "stride"}
_VOCABULARY = {"V": 103_424, "BLOCK": cross_entropy.BLOCK}

_HEADS = {"*bf16": "fused q k v", "*fp32": "cos sin", "i32": "S stride"}
_GROUPS = {"G": 8, "Q": 4, "D": 128, "ROWS": 8, "WIDTH": 128}

_MLP = {"F": 1536, "BLOCK": swiglu.LARGEST_BLOCK, "CLAMPED": 0}
_NO_CAST = dict.fromkeys(("values", "scales", "R"))
_CAST_MLP = {**_MLP, "F": 12_288, "weights": None}
_OUTPUT_CAST = {"*fp8e4nv": "values", "*fp32": "scales", "i32": "R"}
_MLP |= _NO_CAST
_CLAMPED_MLP = {**_MLP, "F": 2880, "CLAMPED": 1}
_MLP_WARPS = swiglu.LARGEST_BLOCK // swiglu.ELEMENTS_OF_A_WARP

_NORMED = {"*bf16": "gradient x weight result dropped", "*fp32": "mean rstd parts", "i32": "R", "fp32": "scale"}

_WARPS = expert_rows.WARPS
_COUNTED = {"*i64": "experts", "*u8": "kept", "*i32": "counts", "i32": "N steps K by_token by_choice"}
_PLACED = {
    "*i64": "experts pair_of row_of counts",
    "*u8": "kept row_kept",
    "*i32": "counts_by_block ends",
    "i32": "N R steps row_steps capacity K by_token by_choice",
}
_RUNS = {"*i64": "counts pair_of row_of totals", "*u8": "real", "*i32": "ends", "i32": "room length"}
_COPIED = {"*i16": "rows weights out out_weights", "*i64": "index", "i32": "given"}
_SUMMED = {"*bf16": "rows out", "*i64": "row_of", "*i16": "weights out_weights", "i32": "by_token by_choice"}
_ROW = {"H": 2560, "K": 6, "W": 2, "kept": None}
_COPIED_ROW = {**_ROW, "STRIDE": 2560, "OUT_STRIDE": 2568, "W_STRIDE": 2, "OUT_W_STRIDE": 2568, "BY_INDEX": 1}
_SUMMED_ROW = {**_ROW, "STRIDE": 2568, "W_STRIDE": 2568, "CHOICES": 8}
_ROWS_CAST = {"*bf16": "x", "*fp8e4nv": "result", "*fp32": "scales", "i32": "R filled stride K"}
_WEIGHT_CAST = {"*bf16": "weight", "*fp8e4nv": "values turned", "*fp32": "scales turned_scales"}
_WEIGHT_CAST["i32"] = "rows_of width scales_width turned_width"
_RUN_ROWS = expert_rows.ROWS_AT_ONCE

_SHARD = {"*fp32": "master grad numbers found_inf grad_scale", "*i64": "update pieces", "*i32": "owners"}
_ROUTED = {"*fp32": "parts bias logits scores lse weights sums", "*u8": "valid", "*i64": "given experts", "i32": "T"}
_SENT_BACK = {
    "*fp32": "logits lse weights d_scores d_weights d_total d_squares",
    "*i64": "experts",
    "*u8": "valid",
    "*bf16": "parts",
    "i32": "T",
}


def _tile(experts: int) -> dict[str, int]:
    tokens, columns = router_tile(experts)
    return {"E": experts, "TOKENS": tokens, "COLUMNS": columns, "LANES": 8}


_SOFTMAX = {**_tile(64), "K": 6, "SIGMOID": 0, "DIVIDES": 1, "SCALE": 1.0}
_SIGMOID = {**_tile(256), "K": 8, "SIGMOID": 1, "DIVIDES": 1, "SCALE": 2.5}
_MANY = {**_SIGMOID, **_tile(512)}
_ONE_GROUP = {"G": 1, "GROUP_TOPK": 1, "SCORED": 2, "GROUP_LANES": 1, "given": None}
_EIGHT_GROUPS = {"G": 8, "GROUP_TOPK": 4, "SCORED": 2, "GROUP_LANES": 8, "given": None}

KERNELS: dict[str, dict[str, BuiltKernel]] = {
    "adamw": {
        "moments in bf16": _built(
            adamw._update,
            {**_SHARD, "*i16": "exp_avg exp_avg_sq"},
            adamw.WARPS,
            weights=None,
            GRADIENT=0,
            FIRST=1,
            SECOND=1,
            BLOCK=PROGRAM,
        ),
        "second moment in bf16": _built(
            adamw._update,
            {**_SHARD, "*fp32": f"{_SHARD['*fp32']} exp_avg", "*i16": "exp_avg_sq"},
            adamw.WARPS,
            **{"weights": None, "GRADIENT": 0, "FIRST": 0, "SECOND": 1, "BLOCK": PROGRAM},
        ),
        "two bytes of everything": _built(
            adamw._update,
            {**_SHARD, "*fp32": "numbers found_inf grad_scale", "*i16": "master grad exp_avg exp_avg_sq weights"},
            adamw.WARPS,
            **{"GRADIENT": 1, "FIRST": 1, "SECOND": 1, "BLOCK": PROGRAM},
        ),
    },
    "cross_entropy": {
        "log-probabilities": _built(
            cross_entropy._log_probability, {**_LOGITS, "*fp32": "logits lse log_p"}, cross_entropy.WARPS, **_VOCABULARY
        ),
        "gradient of logits": _built(
            cross_entropy._gradient, {**_LOGITS, "*bf16": "gradient"}, cross_entropy.WARPS, **_VOCABULARY
        ),
    },
    "expert_rows": {
        "pairs of experts": _built(expert_rows._count, _COUNTED, _WARPS, PAIRS=32, BINS=64),
        "pairs of 512 experts": _built(expert_rows._count, _COUNTED, _WARPS, PAIRS=8, BINS=512),
        "rows of pairs": _built(expert_rows._place, _PLACED, _WARPS, E=64, PAIRS=32, BINS=64, SPREAD=0, FILL=0),
        "rows of pairs of 512 experts": _built(
            expert_rows._place, _PLACED, _WARPS, E=512, PAIRS=8, BINS=512, SPREAD=1, FILL=0
        ),
        "received rows": _built(
            expert_rows._order_runs, _RUNS, _WARPS, BLOCKS=1, SOURCES=8, EXPERTS=8, RUNS=64, SIZE=_RUN_ROWS
        ),
        "gathered rows": _built(
            expert_rows._order_runs, _RUNS, _WARPS, BLOCKS=8, SOURCES=64, EXPERTS=8, RUNS=4096, SIZE=_RUN_ROWS
        ),
        "message": _built(expert_rows._copy, _COPIED, _WARPS, WIDTH=expert_rows.WIDEST, **_COPIED_ROW),
        "sums of rows": _built(expert_rows._sum, _SUMMED, _WARPS, WIDTH=expert_rows.WIDEST // 2, **_SUMMED_ROW),
    },
    "block_casts": {
        "rows": _built(
            block_casts._rows, _ROWS_CAST, block_casts.WARPS, ROWS=block_casts.ROWS, BLOCK=block_casts.BLOCK
        ),
        "weight": _built(
            block_casts._weight, _WEIGHT_CAST, block_casts.WARPS, ROWS=block_casts.ROWS, BLOCK=block_casts.BLOCK
        ),
        "maximum of a tensor": _built(
            block_casts._maximum,
            {"*bf16": "x", "*i32": "numbers", "i32": "N"},
            block_casts.WARPS,
            BLOCK=block_casts.TENSOR_BLOCK,
        ),
        "tensor": _built(
            block_casts._tensor,
            {"*bf16": "x", "*fp8e4nv": "values", "*i32": "numbers", "i32": "N"},
            block_casts.WARPS,
            BLOCK=block_casts.TENSOR_BLOCK,
        ),
        "norm": _built(
            block_casts._norm,
            {"*bf16": "x weight y", "*fp32": "root scales", "*fp8e4nv": "values", "i32": "R", "fp32": "epsilon"},
            block_casts.WARPS,
            H=4096,
            WIDTH=block_casts.NORM_WIDTH,
        ),
        "swiglu": _built(swiglu._forward, {"*bf16": "rows result", **_OUTPUT_CAST}, _MLP_WARPS, **_CAST_MLP),
        "backward of swiglu": _built(
            swiglu._backward,
            {"*bf16": "dy rows d_rows d_weights", **_OUTPUT_CAST},
            _MLP_WARPS,
            **_CAST_MLP,
        ),
        "backward of clamped swiglu": _built(
            swiglu._backward,
            {"*bf16": "dy rows d_rows d_weights", **_OUTPUT_CAST},
            _MLP_WARPS,
            **{**_CAST_MLP, "F": 2944, "CLAMPED": 1},
        ),
    },
    "gradients": {
        "gelu": _built(
            gradients._gelu, {"*bf16": "gradient x result", "*fp32": "parts", "i32": "R F"}, gradients.TILE_WARPS
        ),
        **{
            name: _built(
                gradients._norm,
                {**_NORMED, **masks},
                2048 // gradients.ELEMENTS_OF_A_WARP,
                **{"H": 2048, "BLOCK": 2048, **({} if masks else {"kept": None})},
            )
            for name, masks in (("norm", {}), ("norm after dropout", {"*u8": "kept"}))
        },
        "sums of parts": _built(
            gradients._sum, {"*fp32": "parts", "*bf16": "result", "i32": "P C"}, gradients.TILE_WARPS
        ),
    }
    | {
        name: _built(
            gradients._add,
            {"*fp32": "total", "*bf16": "gradient", "i32": "N total_stride stride"},
            gradients.WARPS,
            BEGINS=begins,
            BLOCK=gradients.BLOCK,
        )
        for name, begins in (("first", 1), ("others", 0))
    },
    "rotary_heads": {
        "split": _built(rotary_heads._heads, _HEADS, 2, **_GROUPS, SPLIT=1),
        "merged": _built(rotary_heads._heads, _HEADS, 2, **_GROUPS, SPLIT=0),
    },
    "router": {
        "parts of a matrix": _built(
            router._split, {"*fp32": "matrix", "*bf16": "parts", "i32": "N"}, router.WARPS, BLOCK=router.SPLIT
        ),
        "softmax of 64 experts": _built(
            router._route, _ROUTED, router.WARPS, **_SOFTMAX, **_ONE_GROUP, BEST=0, bias=None, valid=None
        ),
        "biased sigmoids of 256 experts in groups": _built(
            router._route, _ROUTED, router.WARPS, **_SIGMOID, **_EIGHT_GROUPS, BEST=8
        ),
        "biased sigmoids of 512 experts": _built(router._route, _ROUTED, router.WARPS, **_MANY, **_ONE_GROUP, BEST=8),
        "backward of 64 experts": _built(
            router._route_backward, _SENT_BACK, router.WARPS, **_SOFTMAX, valid=None, d_scores=None, d_squares=None
        ),
        "backward of 256 experts": _built(router._route_backward, _SENT_BACK, router.WARPS, **_SIGMOID),
        "backward of 512 experts": _built(router._route_backward, _SENT_BACK, router.WARPS, **_MANY),
    },
    "swiglu": {
        "forward": _built(swiglu._forward, {"*bf16": "rows result", "*fp32": "weights"}, _MLP_WARPS, **_MLP),
        "backward": _built(
            swiglu._backward,
            {"*bf16": "dy rows d_rows", "*fp32": "weights d_weights"},
            _MLP_WARPS,
            **_MLP,
        ),
        "clamped forward": _built(
            swiglu._forward, {"*bf16": "rows result", "*fp32": "weights"}, _MLP_WARPS, **_CLAMPED_MLP
        ),
        "clamped backward": _built(
            swiglu._backward,
            {"*bf16": "dy rows d_rows", "*fp32": "weights d_weights"},
            _MLP_WARPS,
            **_CLAMPED_MLP,
        ),
    },
}
