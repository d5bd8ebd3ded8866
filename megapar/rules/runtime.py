"""Rows on devices, the compiler, kernels of attention, fp8, and experiment trackers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import gcd
from typing import Any

from megapar.schema.rule import NOT_BUILT, Facts, Rule, either, near_multiples, spell, unused


def _fp8(id: str, reads: tuple[str, ...], failing: str, passing: str = "", **more: Any) -> Rule:
    """Build a row on the requirements of --fp8."""
    return Rule(
        id=id,
        reads=("fp8", *reads),
        when=lambda f: f.fp8,
        passing=f"--fp8 {passing}".strip(),
        failing=f"--fp8 {failing}",
        **{"source": "--fp8", **more},
    )


_BLOCK, _EXPERT_STEP = 128, 16  # features with a common scale, as in ``core.device.fp8``; of experts a multiple of this
_DENSE = ("num_experts", "first_k_dense", "not_default", "mtp_depth")
Widths = Iterator[tuple[str, int, int]]  # (flag, its value, what legal values are multiples of)


def _fp8_widths(id: str, reads: tuple[str, ...], widths: Callable[[Facts], Widths], **more: Any) -> Rule:
    """Build a row on widths of which every rank has whole blocks."""

    def wrong(f: Facts) -> list[str]:
        return [f"{flag} {near_multiples(step, value)}" for flag, value, step in widths(f) if value % step]

    return _fp8(
        id,
        ("mp_degree", *reads),
        requires=lambda f: not wrong(f),
        message=f"--fp8 needs a multiple of {_BLOCK} features on an mp rank, of each fused part too, so that every "
        "scale belongs to one rank",
        fix=lambda f: f"Choose {', '.join(wrong(f))}, another --mp-degree, or leave --fp8 out.",
        **more,
    )


def _layer_widths(f: Facts) -> Widths:
    yield "--hidden-size", f.hidden_size, _BLOCK
    if f.num_experts == 0 or f.first_k_dense > 0 or "moe_layer_freq" in f.not_default or f.mtp_depth > 0:
        yield "--ffn-hidden-size", f.ffn_hidden_size, _BLOCK * f.mp_degree


def _head_widths(f: Facts) -> Widths:
    """Yield the size of a head: queries, keys and values of a rank's groups, and its output heads, are whole blocks."""
    heads, groups = (max(1, number // f.mp_degree) for number in (f.num_attention_heads, f.num_query_groups))
    fused = heads if f.multi_latent_attention else heads + 2 * groups
    flag, size = ("--v-head-dim", f.v_head_dim) if f.multi_latent_attention else ("--head-dim", f.head_dim)
    yield flag, size, max(_BLOCK // gcd(_BLOCK, heads), _BLOCK // gcd(_BLOCK, fused))


def _shared_widths(f: Facts) -> Widths:
    width = f.moe_shared_expert_intermediate_size or f.moe_shared_experts * f.moe_ffn_hidden_size
    yield "--moe-shared-expert-intermediate-size", width if f.num_experts else 0, _BLOCK * f.mp_degree


def _ernie_widths(f: Facts) -> Widths:
    names = ("hidden_size", "ffn_hidden_size", "task_hidden_size", "task_ffn_hidden_size")
    for name in names if f.ernie_model == "ernie3" else names[:2]:
        yield spell(name), getattr(f, name), _BLOCK * f.mp_degree


def _expert_widths(f: Facts) -> tuple[int, ...]:
    return tuple(f.moe_layer_ffn_hidden_sizes or (f.moe_ffn_hidden_size,))


def _backend(id: str, reads: tuple[str, ...], failing: str, passing: str, **more: Any) -> Rule:
    """Build a row on the requirements of --attention-backend."""
    return Rule(
        id=id,
        reads=("attention_backend", *reads),
        when=lambda f: f.attention_backend != "auto",
        passing=f"--attention-backend {passing}",
        failing=f"--attention-backend {failing}",
        source="devices",
        **more,
    )


_HEADS = "kernels of --attention-backend take heads of at most 256 features; of a multiple of 8, except flash"


def _fits(size: int, backend: str) -> bool:
    """Return True if a kernel takes heads of this size on some GPU."""
    return size <= 256 and (backend == "flash" or size % 8 == 0)


def _in_parts(f: Facts) -> bool:
    """Return True if attention never sees whole samples of one document."""
    keys_travel = f.cp_degree > 1 and f.context_parallel_algo != "ulysses_cp_algo"
    return bool(keys_travel or f.ampipe_degree > 1 or f.reset_attention_mask)


_OPTIONS = {
    "wandb_project": ("wandb_exp_name", "wandb_entity", "wandb_save_dir"),
    "mlflow_experiment": ("mlflow_run_name", "mlflow_tracking_uri"),
    "swanlab_project": ("swanlab_exp_name", "swanlab_save_dir"),
}


def _tracker(switch: str, names: tuple[str, ...]) -> Rule:
    """Build the row that refuses a tracker's options without the flag that turns it on."""
    example = f"{spell(names[0])} first"
    return unused(
        f"{switch.partition('_')[0]}-unused",
        names,
        (switch,),
        lambda f: getattr(f, switch) is None,
        f"without {spell(switch)}",
        fix=lambda f: f"Set {spell(switch)}, or leave out {either(spell(n) for n in names if n in f.not_default)}.",
        passing=f"{spell(switch)} megapar {example}",
        failing=example,
    )


TRACKERS: tuple[Rule, ...] = tuple(_tracker(switch, names) for switch, names in _OPTIONS.items())
_row = partial(Rule, source="devices")

RULES: tuple[Rule, ...] = (
    _row(
        id="fp64-device",
        reads=("dtype", "device"),
        when=lambda f: f.device == "npu",
        requires=lambda f: f.dtype != "fp64",
        message="NPUs do not support fp64",
        fix="Choose --dtype bf16 or fp32, or --device cpu.",
        passing="--device npu --dtype bf16",
        failing="--device npu --dtype fp64",
    ),
    _row(
        id="compile-device",
        reads=("compile", "device"),
        when=lambda f: f.compile == "on",
        requires=lambda f: f.device != "npu",
        message="--compile supports only CPUs and GPUs",
        fix="Leave --compile out; on an NPU, the vendor's fused operators are used.",
        passing="--compile --device cpu",
        failing="--compile --device npu",
    ),
    Rule(
        id="compile-deterministic",
        reads=("compile", "deterministic"),
        when=lambda f: f.compile == "on",
        requires=lambda f: not f.deterministic,
        message="--compile chooses kernels by timing them, so two runs may round differently",
        fix="Leave one of them out.",
        source="--deterministic",
        passing="--compile",
        failing="--compile --deterministic",
    ),
    Rule(
        id="compile-ernie3",
        reads=("compile", "ernie_model"),
        when=lambda f: f.compile == "on",
        requires=lambda f: f.ernie_model != "ernie3",
        message=(
            "--compile does not support ERNIE 3.0, whose branches attend by segments with sizes that change from step "
            "to step"
        ),
        fix="Leave --compile out.",
        source="--compile",
        passing="--compile",
        failing="--compile --ernie-model ernie3",
        models=("ernie",),
    ),
    Rule(
        id="manual-gc-interval",
        reads=("manual_gc", "manual_gc_interval", "not_default"),
        when=lambda f: "manual_gc_interval" in f.not_default,
        requires=lambda f: f.manual_gc == "on",
        message="--manual-gc-interval is the interval of --manual-gc, and has no effect without it",
        fix="Add --manual-gc, or leave the interval out.",
        source="--manual-gc",
        passing="--manual-gc --manual-gc-interval 50",
        failing="--manual-gc-interval 50",
    ),
    _backend(
        "attention-backend-device",
        ("device",),
        "cudnn --device cpu",
        "cudnn --device cuda",
        requires=lambda f: f.device in ("auto", "cuda"),
        message="--attention-backend names kernels for NVIDIA GPUs",
        fix="Leave --attention-backend out, or choose --device cuda.",
    ),
    _backend(
        "attention-backend-dtype",
        ("dtype",),
        "flash --dtype fp32",
        "flash --bf16",
        requires=lambda f: f.dtype in ("auto", "bf16", "fp16"),
        message="the kernels of --attention-backend take bf16 and fp16",
        fix="Choose --dtype bf16, or leave --attention-backend out.",
    ),
    _backend(
        "attention-backend-fused",
        ("use_flash_attn",),
        "flash --no-use-flash-attn",
        "flash",
        requires=lambda f: f.use_flash_attn,
        message="--no-use-flash-attn computes attention by plain products, which no --attention-backend can run",
        fix="Leave one of the two out.",
    ),
    _backend(
        "attention-backend-repeats",
        ("deterministic",),
        "cudnn --deterministic",
        "flash --deterministic",
        requires=lambda f: not f.deterministic or f.attention_backend == "flash",
        message=(
            "--deterministic needs a kernel whose backward repeats to the last bit: torch refuses cuDNN's, and "
            "FlashAttention-3's has not been measured"
        ),
        fix="Choose --attention-backend flash.",
    ),
    _backend(
        "attention-backend-dropout",
        ("attention_dropout",),
        "cudnn --attention-dropout 0.1",
        "cudnn --attention-dropout 0",
        requires=lambda f: f.attention_dropout == 0 or f.attention_backend == "flash",
        message="FlashAttention-3 drops no attention weights, and neither do some versions of cuDNN",
        fix="Choose --attention-dropout 0 or --attention-backend flash.",
    ),
    _backend(
        "attention-backend-heads",
        ("head_dim",),
        "cudnn --head-dim 20",
        "flash --head-dim 20",
        requires=lambda f: _fits(f.head_dim, f.attention_backend),
        message=_HEADS,
        fix=lambda f: f"Choose --head-dim {near_multiples(8, f.head_dim)}, or leave --attention-backend out.",
        models=("moe",),
    ),
    _backend(
        "attention-backend-heads-ernie",
        ("hidden_size", "num_attention_heads"),
        "flash --hidden-size 2080 --num-attention-heads 8",
        "flash --hidden-size 2048 --num-attention-heads 8",
        requires=lambda f: _fits(f.hidden_size // f.num_attention_heads, f.attention_backend),
        message=_HEADS,
        fix="Choose another --hidden-size or --num-attention-heads, or leave --attention-backend out.",
        models=("ernie",),
    ),
    _backend(
        "attention-backend-form",
        ("cp_degree", "context_parallel_algo", "ampipe_degree", "reset_attention_mask"),
        "cudnn --reset-attention-mask",
        "flash --reset-attention-mask",
        requires=lambda f: f.attention_backend != "cudnn" or not _in_parts(f),
        message=(
            "torch's call of cuDNN takes whole samples only, so no layer would use it with --reset-attention-mask, "
            "slices, or keys from other cp ranks"
        ),
        fix="Choose --attention-backend flash.",
        models=("moe",),
    ),
    _row(
        id="apex-device",
        reads=("apex", "device"),
        when=lambda f: f.apex,
        requires=lambda f: f.device in ("auto", "cuda"),
        message="--apex calls NVIDIA apex, whose kernels are for NVIDIA GPUs; Ascend's package of that name is another",
        fix="Leave --apex out, or choose --device cuda.",
        passing="--apex --device cuda",
        failing="--apex --device cpu",
    ),
    _row(
        id="apex-dtype",
        reads=("apex", "dtype"),
        when=lambda f: f.apex,
        requires=lambda f: f.dtype != "fp64",
        message="the kernels of NVIDIA apex take fp32 and 16-bit numbers",
        fix="Leave --apex out, or choose --dtype bf16.",
        passing="--apex --bf16",
        failing="--apex --dtype fp64",
    ),
    _row(
        id="apex-moments",
        reads=("apex", "exp_avg_dtype", "exp_avg_sq_dtype", "main_grads_dtype", "store_param_remainders"),
        when=lambda f: f.apex,
        requires=lambda f: (
            f.exp_avg_dtype == f.exp_avg_sq_dtype == f.main_grads_dtype == "fp32" and not f.store_param_remainders
        ),
        message=(
            "the kernels of NVIDIA apex keep moments, gradients and master weights in fp32, unlike --exp-avg-dtype "
            "bf16, --exp-avg-sq-dtype bf16, --main-grads-dtype bf16 and --store-param-remainders"
        ),
        fix="Leave --apex out, or keep all of them in fp32.",
        passing="--apex --exp-avg-dtype fp32",
        failing="--apex --exp-avg-dtype bf16",
    ),
    _fp8(
        "fp8-device",
        ("device",),
        "--device npu",
        "--device cuda",
        requires=lambda f: f.device != "npu",
        message="--fp8 needs an NVIDIA GPU of compute capability 9.0 (Hopper), or 8.9 or more with --fp8-recipe "
        "tensorwise; --device cpu emulates it",
        fix="Leave --fp8 out, or choose --device cuda or cpu.",
        source="devices",
    ),
    _fp8(
        "fp8-dtype",
        ("dtype", "device"),
        "--dtype fp32",
        "--bf16",
        requires=lambda f: f.dtype in ("auto", "bf16") or f.device == "cpu",
        message="--fp8 casts the inputs of bf16 matrix products, and everything else stays in bf16",
        fix="Choose --dtype bf16, or --device cpu, where --fp8 is emulated in any dtype.",
    ),
    unused(
        "fp8-recipe-unused",
        ("fp8_recipe",),
        ("fp8",),
        lambda f: not f.fp8,
        "without --fp8",
        passing="--fp8 --fp8-recipe tensorwise",
        failing="--fp8-recipe tensorwise",
    ),
    _fp8(
        "not-built-fp8-tensorwise",
        ("fp8_recipe", "mp_degree", "cp_degree", "ampipe_degree"),
        "--fp8-recipe tensorwise --world-size 2 --mp-degree 2",
        "--fp8-recipe tensorwise --world-size 2",
        requires=lambda f: f.fp8_recipe == "blockwise" or f.mp_degree == f.cp_degree == f.ampipe_degree == 1,
        message="--fp8-recipe tensorwise has one scale for all features and tokens of a micro-batch, which "
        "--mp-degree, --cp-degree and --ampipe-degree split",
        fix="Leave all three at 1, or choose --fp8-recipe blockwise.",
        kind=NOT_BUILT,
    ),
    _fp8(
        "not-built-fp8-fused-overlap",
        ("tp_comm_overlap", "mp_degree"),
        "--world-size 2 --mp-degree 2 --sequence-parallel --bf16 --device cuda --tp-comm-overlap fused",
        "--world-size 2 --mp-degree 2 --sequence-parallel --bf16 --device cuda --tp-comm-overlap",
        requires=lambda f: f.tp_comm_overlap != "fused" or f.mp_degree == 1,
        message="torch's operators of a product fused with its collective are not built into --fp8",
        fix="Choose --tp-comm-overlap on, or leave --fp8 out.",
        kind=NOT_BUILT,
    ),
    unused(
        "fp8-experts-unused",
        ("fp8_experts",),
        ("fp8", "num_experts"),
        lambda f: not f.fp8 or f.num_experts == 0,
        "without --fp8 and --num-experts",
        passing="--fp8 --fp8-experts",
        failing="--fp8-experts",
        models=("moe",),
    ),
    _fp8(
        "not-built-fp8-experts",
        ("fp8_experts", "fp8_recipe", "expert_mp_degree", "mp_degree", "use_pipe_experts"),
        "--fp8-experts --world-size 2 --mp-degree 2",
        "--fp8-experts --world-size 2 --mp-degree 2 --sequence-parallel --expert-mp-degree 1",
        requires=lambda f: (
            not f.fp8_experts or (f.expert_mp_degree == 1 and not f.use_pipe_experts and f.fp8_recipe == "blockwise")
        ),
        message="--fp8-experts has one scale for a whole row, which --expert-mp-degree splits, multiplies all experts "
        "of a rank together, unlike --use-pipe-experts, and works with --fp8-recipe blockwise only",
        fix="Choose --expert-mp-degree 1 with --sequence-parallel, leave --use-pipe-experts and --fp8-recipe out, or "
        "leave --fp8-experts out.",
        kind=NOT_BUILT,
        models=("moe",),
    ),
    _fp8(
        "fp8-expert-width",
        ("fp8_experts", "moe_ffn_hidden_size", "moe_layer_ffn_hidden_sizes"),
        "--fp8-experts --moe-ffn-hidden-size 40",
        "--fp8-experts --moe-ffn-hidden-size 48",
        requires=lambda f: not f.fp8_experts or not any(width % _EXPERT_STEP for width in _expert_widths(f)),
        message=f"grouped products in fp8 take experts whose features are a multiple of {_EXPERT_STEP}",
        fix=lambda f: (
            f"Choose --moe-ffn-hidden-size {near_multiples(_EXPERT_STEP, max(_expert_widths(f)))}, or leave "
            "--fp8-experts out."
        ),
        models=("moe",),
    ),
    _fp8_widths(
        "fp8-widths",
        ("hidden_size", "ffn_hidden_size", *_DENSE),
        _layer_widths,
        passing="--world-size 2 --mp-degree 2 --num-experts 0 --ffn-hidden-size 256",
        failing="--world-size 2 --mp-degree 2 --num-experts 0 --ffn-hidden-size 384",
        models=("moe",),
    ),
    _fp8_widths(
        "fp8-heads",
        ("num_attention_heads", "num_query_groups", "head_dim", "multi_latent_attention", "v_head_dim"),
        _head_widths,
        passing="--num-attention-heads 4 --head-dim 64",
        failing="--num-attention-heads 4 --head-dim 48",
        models=("moe",),
    ),
    _fp8_widths(
        "fp8-shared-experts",
        ("num_experts", "moe_shared_experts", "moe_shared_expert_intermediate_size", "moe_ffn_hidden_size"),
        _shared_widths,
        passing="--num-experts 4 --moe-shared-experts 1 --moe-ffn-hidden-size 256",
        failing="--num-experts 4 --moe-shared-experts 1 --moe-ffn-hidden-size 192",
        models=("moe",),
    ),
    _fp8_widths(
        "fp8-ernie",
        ("hidden_size", "ffn_hidden_size", "ernie_model", "task_hidden_size", "task_ffn_hidden_size"),
        _ernie_widths,
        passing="--world-size 2 --mp-degree 2 --hidden-size 512 --ffn-hidden-size 512",
        failing="--world-size 2 --mp-degree 2 --hidden-size 384 --ffn-hidden-size 512",
        models=("ernie",),
    ),
)
