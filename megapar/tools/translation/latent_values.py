"""Values of multi-latent attention's arguments in Megatron-LM and MindSpeed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megapar.tools.translation.verdict import IMPLIED, RENAMED, SAME, UNNECESSARY, UNSUPPORTED, Decided, Given

_SWITCHES = ("multi-latent-attention", "multi-head-latent-attention")
_WITHOUT = (UNNECESSARY, "", "no effect without --multi-latent-attention")


def is_latent(given: Given) -> bool:
    """Return True if the command's attention is multi-latent attention."""
    return any(name in given and given[name].lower() not in ("false", "off", "0") for name in _SWITCHES)


def _size(flag: str, verdict: str) -> Callable[[str, Given], Decided]:
    """Return the function that translates one size to ``flag``."""

    def decide(value: str, given: Given) -> Decided:
        if not is_latent(given):
            return _WITHOUT
        if value.lower() == "none":
            return IMPLIED, "", "queries come straight from the hidden states"
        return verdict, f"{flag} {value}", ""

    return decide


def _kernel(value: str, given: Given) -> Decided:
    if not is_latent(given):
        return _WITHOUT
    return UNNECESSARY, "", "heads are padded where a kernel needs it, and keys and values are never kept"


def _overlap(value: str, given: Given) -> Decided:
    if not is_latent(given):
        return _WITHOUT
    return UNSUPPORTED, "", "the up projections do not overlap a collective"


def _head_size(value: str, given: Given) -> Decided:
    if is_latent(given):
        return UNNECESSARY, "", "heads of multi-latent attention have sizes of their own"
    return RENAMED, f"--head-dim {value}", ""


DECIDED: Mapping[str, Callable[[str, Given], Decided]] = {
    "latent_queries": _size("--q-lora-rank", SAME),
    "latent_keys": _size("--kv-lora-rank", SAME),
    "latent_plain": _size("--qk-head-dim", SAME),
    "latent_rotated": _size("--qk-pos-emb-head-dim", SAME),
    "latent_nope": _size("--qk-head-dim", RENAMED),
    "latent_rope": _size("--qk-pos-emb-head-dim", RENAMED),
    "latent_values": _size("--v-head-dim", SAME),
    "latent_epsilon": _size("--attention-latent-norm-epsilon", SAME),
    "latent_kernel": _kernel,
    "latent_overlap": _overlap,
    "head_size": _head_size,
}
