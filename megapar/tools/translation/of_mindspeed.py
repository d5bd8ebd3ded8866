"""What becomes of MindSpeed's arguments whose meaning hangs on their value or on others: ``@name`` in ``mindspeed``."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from itertools import accumulate

from megapar.tools.translation.decided import DECIDED, Decided
from megapar.tools.translation.neutral import Function
from megapar.tools.translation.verdict import (
    ANOTHER,
    IMPLIED,
    LEFT,
    OTHER,
    RENAMED,
    SAME,
    UNNECESSARY,
    UNSUPPORTED,
)

_INERT = "MindSpeed parses it and does nothing since core_r0.12.1; here it works, with the same numbers"


def _size(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        return 0.0


def _adaptive(value: str, given: Mapping[str, str]) -> Decided:
    if _size(given.get("adaptive-recompute-device-size", "")) > 0:
        return IMPLIED, "", "--adaptive-recompute-device-size says it"
    return LEFT, "", "--adaptive-recompute-device-size is the memory it may use, in MB; there the whole device's"


def _adaptive_size(value: str, given: Mapping[str, str]) -> Decided:
    if _size(value) <= 0:
        return UNNECESSARY, "", "no memory is set for it"
    return SAME, f"--adaptive-recompute-device-size {value}", ""


def _slices(value: str, given: Mapping[str, str]) -> Decided:
    if _size(value) <= 1:
        return UNNECESSARY, "", "one slice"
    return SAME, f"--ampipe-degree {value}", _INERT


def _slices_overlap(value: str, given: Mapping[str, str]) -> Decided:
    if _size(given.get("ampipe-degree", "")) <= 1:
        return UNNECESSARY, "", "means nothing without --ampipe-degree"
    return SAME, "--ampipe-tp-sp-comm-overlap", _INERT


def _kind(value: str, given: Mapping[str, str]) -> Decided:
    if "moe-no-drop" in given:
        return RENAMED, "--moe-model-type megatron_moe", "no token is dropped"
    return SAME, f"--moe-model-type {value}", ""


def _capacity(value: str, given: Mapping[str, str]) -> Decided:
    if "moe-no-drop" in given:
        return UNNECESSARY, "", "no token is dropped (--moe-no-drop)"
    if given.get("moe-model-type") != "deepspeed_moe":
        return UNNECESSARY, "", "a capacity of deepspeed_moe, which is not chosen"
    return RENAMED, f"--moe-capacity-factor {value}", ""


def _undropped(value: str, given: Mapping[str, str]) -> Decided:
    if "moe-model-type" in given:
        return IMPLIED, "", "megatron_moe drops no token"
    return RENAMED, "--moe-model-type megatron_moe", "drops no token"


def _expert_ranks(value: str, given: Mapping[str, str]) -> Decided:
    if "moe-tp-extend-ep" not in given:
        return RENAMED, f"--ep-degree {value}", ""
    ranks = round(_size(value) * max(1, _size(given.get("tensor-model-parallel-size", "1"))))
    return RENAMED, f"--ep-degree {ranks}", "the mp ranks of --moe-tp-extend-ep are expert ranks"


_SHARED = {"megatron_cp_algo": "megatron_cp_algo", "ulysses_cp_algo": "ulysses_cp_algo"}


def _algorithm(value: str, given: Mapping[str, str]) -> Decided:
    if _size(given.get("context-parallel-size", given.get("cp-degree", "1"))) <= 1:
        return UNNECESSARY, "", "one cp rank has the whole sequence"
    if value in _SHARED:
        return SAME, f"--context-parallel-algo {value}", ""
    if value == "kvallgather_cp_algo":
        return RENAMED, "--context-parallel-algo allgather_cp_algo", ""
    return RENAMED, "--context-parallel-algo megatron_cp_algo", "rings only or heads only: the numbers are the same"


def _balancing(value: str, given: Mapping[str, str]) -> Decided:
    if value == "softmax_topk":
        if "norm-topk-prob" in given:
            return RENAMED, "--moe-aux-loss-coeff 0", "no balance loss"
        return OTHER, "", "the weights of the chosen experts sum to one here; there they keep their scores"
    if value in ("group_limited_greedy", "pai_megatron_aux_loss", "sparsemixer_topk", "sinkhorn"):
        return OTHER, "", f"{value} chooses experts in a way of its own"
    return DECIDED["balancing"](value, given)


def _biases(value: str, given: Mapping[str, str]) -> Decided:
    if not {"disable-bias-linear", "no-add-bias-linear"} & set(given):
        return IMPLIED, "", "--add-bias-linear has them in every linear layer"
    return ANOTHER, "", "biases are in all linear layers or in none"


def _optimizer(value: str, given: Mapping[str, str]) -> Decided:
    if value == "fused_ema_adamw":
        return UNSUPPORTED, "", "AdamW is the same; a mean of the weights over time is not kept beside them"
    return IMPLIED, "", "AdamW, fused where the device has it"


def _mask(value: str, given: Mapping[str, str]) -> Decided:
    return IMPLIED, "", "masks are causal, and end with a document where --reset-attention-mask says so"


def _past(value: str, given: Mapping[str, str]) -> Decided:
    if _size(given.get("sparse-mode", "0")) == 2:
        return UNNECESSARY, "", "--sparse-mode 2 is the causal mask"
    if _size(value) >= _size(given.get("seq-length", "0")):
        return UNNECESSARY, "", "as far back as a sample goes"
    return ANOTHER, "", "attention sees everything before it"


def _starts(counts: list[int]) -> Decided:
    starts = [0, *accumulate(counts)][:-1]
    return RENAMED, f"--pp-seg-method {','.join(map(str, starts))}", "the first layer of each stage"


def _layers_of_stages(value: str, given: Mapping[str, str]) -> Decided:
    words = value.strip("'\"").split(",")
    if "noop-layers" in given:
        return UNNECESSARY, "", "given up for --noop-layers there"
    if not all(word.strip().isdigit() for word in words):
        return LEFT, "", "no list of numbers of layers: --pp-seg-method has the first layer of each stage"
    return _starts([int(word) for word in words])


def _layers_of_chunks(value: str, given: Mapping[str, str]) -> Decided:
    try:
        stages = ast.literal_eval(value.strip("'\""))
        counts = [[int(layers) for layers in stage] for stage in stages]
    except (ValueError, TypeError, SyntaxError):
        return LEFT, "", "not written out: --pp-seg-method has the first layer of each stage"
    if any(len(stage) != 1 for stage in counts):
        return UNSUPPORTED, "", "chunks of a stage get layers by --pp-seg-method uniform or balanced"
    return _starts([stage[0] for stage in counts])


FUNCTIONS: Mapping[str, Function] = {
    "adaptive": _adaptive,
    "adaptive_size": _adaptive_size,
    "ampipe": _slices,
    "ampipe_overlap": _slices_overlap,
    "mindspeed_kind": _kind,
    "mindspeed_capacity": _capacity,
    "mindspeed_undropped": _undropped,
    "mindspeed_expert_ranks": _expert_ranks,
    "mindspeed_algorithm": _algorithm,
    "mindspeed_balancing": _balancing,
    "mindspeed_biases": _biases,
    "mindspeed_optimizer": _optimizer,
    "mindspeed_mask": _mask,
    "mindspeed_past": _past,
    "layers_of_stages": _layers_of_stages,
    "layers_of_chunks": _layers_of_chunks,
}
# Of layout, memory and speed: whatever their value, the numbers are the same.
HARMLESS = frozenset(
    {
        "adaptive",
        "adaptive_size",
        "ampipe",
        "ampipe_overlap",
        "mindspeed_expert_ranks",
        "mindspeed_algorithm",
        "mindspeed_optimizer",
        "mindspeed_mask",
        "layers_of_stages",
        "layers_of_chunks",
    }
)
