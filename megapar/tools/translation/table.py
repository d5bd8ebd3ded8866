"""Tables of arguments and of implicit defaults for each framework, read from the files of ``tables/``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from megapar.config.hints import FEATURES
from megapar.tools.translation import of_paddle
from megapar.tools.translation.verdict import Foreign, defaults, table

NAMES: Mapping[str, str] = {
    "megatron": "Megatron-LM",
    "mindspeed": "MindSpeed",
    "deepspeed": "Megatron-DeepSpeed",
    "paddle": "Paddle",
}


class TableFile(NamedTuple):
    """A file of ``tables/``.

    Attributes:
        rows: Argument -> translation.
        defaults: Implicit defaults, by the arguments that override each.
    """

    rows: Mapping[str, Foreign]
    defaults: Mapping[str, Foreign]


def read_table(path: Path) -> TableFile:
    """Read a file: comments up to an empty line, a table of arguments, and perhaps the framework's ``[defaults]``.

    The forms are those of ``verdict.table`` and ``verdict.defaults``; a line ends in a backslash if it is continued.
    """
    text = path.read_text(encoding="utf-8")
    rows, _, implicit = text.partition("\n\n")[2].replace("\\\n", "").partition("\n[defaults]\n")
    return TableFile(table(rows), defaults(implicit) if implicit else {})


_TABLES = Path(__file__).parent / "tables"
MEGATRON, MINDSPEED, DEEPSPEED, PADDLE = (read_table(_TABLES / f"{name}.txt") for name in NAMES)
_OF_MEGATRON = {**read_table(FEATURES).rows, **MEGATRON.rows}
# Extensions of Megatron-LM also accept its arguments. If several tables have a row, the framework's own row wins.
FOREIGN: Mapping[str, Mapping[str, Foreign]] = {
    "megatron": {**DEEPSPEED.rows, **MINDSPEED.rows, **_OF_MEGATRON},
    "mindspeed": {**DEEPSPEED.rows, **_OF_MEGATRON, **MINDSPEED.rows},
    "deepspeed": {**MINDSPEED.rows, **_OF_MEGATRON, **DEEPSPEED.rows},
    "paddle": PADDLE.rows,
}
DEFAULTS: Mapping[str, Mapping[str, Foreign]] = {
    "megatron": MEGATRON.defaults,
    "mindspeed": {**MEGATRON.defaults, **MINDSPEED.defaults},
    "deepspeed": {**MEGATRON.defaults, **DEEPSPEED.defaults},
    "paddle": PADDLE.defaults,
}
_ROWS = {"mindspeed": MINDSPEED.rows, "deepspeed": DEEPSPEED.rows, "paddle": PADDLE.rows}
# Arguments of Megatron-LM's extensions whose rows are in its table, because the answer is the same for all; of Paddle,
# those that megapar also has.
_SIGNS = {
    "mindspeed": """
        adaptive-recompute-device-swap coc-fused-kernel coc-parallel-num enable-recompute-layers-per-pp-rank
        enable-token-rearrange-opt first-k-dense-replace gemm-gradient-accumulation-fusion mla-fa-without-pad
        moe-fb-overlap moe-intermediate-size moe-permutation-async-comm moe-tp-extend-ep mtp-mem-efficient-logits
        multi-head-latent-attention n-group n-shared-experts no-shared-storage noop-layers norm-topk-prob
        qk-nope-head-dim qk-rope-head-dim recompute-activation-function reuse-fp32-param routed-scaling-factor
        router-gating-in-fp32 schedules-method seq-aux swap-attention swap-optimizer swap-optimizer-times topk-group
        tp-2d tp-x tp-y use-ascend-coc use-ascend-mc2 use-cp-send-recv-overlap use-fused-moe-token-permute-and-unpermute
        use-fused-ring-attention-update use-fused-rmsnorm use-fused-rotary-pos-emb use-fused-swiglu
    """,
    "deepspeed": "deepspeed deepspeed-config deepspeed-mpi zero-stage deepspeed-activation-checkpointing",
    "paddle": """
        sharding-segment-strategy segment-broadcast-mb segment-anchors sharding-degree mp-degree hybrid-dp
        gradient-merge-acc-step
    """,
}
# Arguments that only one framework has. They identify the framework of a line.
SIGNS = frozenset(word for words in _SIGNS.values() for word in words.split())
DISTINCTIVE: Mapping[str, frozenset[str]] = {
    name: frozenset(rows).difference(_OF_MEGATRON, *(theirs for other, theirs in _ROWS.items() if other != name))
    | frozenset(_SIGNS[name].split())
    for name, rows in _ROWS.items()
}


def trainer_kind(framework: str, given: Mapping[str, str]) -> str:
    """Return the kind of trainer for a script with these arguments, "moe" or "ernie"; "" if there is none."""
    return of_paddle.trainer_kind(given) if framework == "paddle" else "moe"
