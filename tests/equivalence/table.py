"""The equivalence table: layouts and options that must give the numbers of one process. Later features add rows."""

from __future__ import annotations

from dataclasses import dataclass

COMMON = ("--train-iters", "10", "--data-path", "mock", "--seed", "7", "--global-batch-size", "8", "--lr", "1e-2")
MODELS: dict[str, tuple[str, ...]] = {
    "moe": (
        *("--num-layers", "3", "--hidden-size", "32", "--num-attention-heads", "4", "--num-query-groups", "2"),
        *("--ffn-hidden-size", "48", "--seq-length", "16", "--vocab-size", "101", "--num-experts", "4"),
        *("--moe-ffn-hidden-size", "24", "--moe-router-topk", "2", "--first-k-dense", "1", "--moe-shared-experts", "1"),
        *("--moe-aux-loss-coeff", "1e-2", "--moe-z-loss-coeff", "1e-3", "--init-std", "0.1"),
    ),
    "ernie": (
        *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--ffn-hidden-size", "64"),
        *("--seq-length", "32", "--vocab-size", "101", "--init-std", "0.1"),
        *("--attention-dropout", "0", "--hidden-dropout", "0"),
    ),
}


@dataclass(frozen=True)
class Row:
    """One line of the table.

    kind: moe or ernie. world_size: processes. layout: flags of the layout. options: flags that the one-process
    reference gets too. micro_batch: samples of a micro-batch, on every layout the same.
    """

    kind: str
    world_size: int
    layout: tuple[str, ...]
    options: tuple[str, ...] = ()
    micro_batch: int = 1

    @property
    def name(self) -> str:
        """Readable, unique id."""
        flags = " ".join((*self.layout, *self.options)).replace("--", "")
        return f"{self.kind} x{self.world_size} mbs{self.micro_batch} {flags}"

    @property
    def overlaps(self) -> bool:
        """Whether our own code has communication in flight, which the late backend can see (stage 3 is torch's)."""
        return not set(NO_OVERLAP) & set(self.layout) and "3" not in self.layout

    def reference_flags(self) -> tuple[str, ...]:
        """Flags of the run on one process."""
        return (*MODELS[self.kind], *COMMON, "--micro-batch-size", str(self.micro_batch), *self.options)

    def flags(self) -> tuple[str, ...]:
        """Flags of the run on the layout."""
        return (*self.reference_flags(), *self.layout)


def _stages(degree: int, *more: str) -> list[tuple[str, ...]]:
    return [("--sharding-degree", str(degree), "--sharding-stage", str(stage), *more) for stage in (1, 2, 3)]


CLIPPED = ("--clip-grad", "0.05")
UNTIED = ("--untie-embeddings-and-output-weights",)
DROPS = ("--moe-model-type", "deepspeed_moe", "--moe-capacity-factor", "0.75", "--moe-min-capacity", "1")
BIASED = ("--moe-router-bias-update-rate", "0.01")
NO_OVERLAP = ("--no-overlap-grad-reduce", "--no-overlap-param-gather")

ROWS: tuple[Row, ...] = (
    *(Row(kind, 2, layout, CLIPPED) for kind in MODELS for layout in _stages(2)),
    *(Row(kind, 4, layout, micro_batch=2) for kind in MODELS for layout in _stages(4)),
    *(Row(kind, 4, layout, CLIPPED) for kind in MODELS for layout in _stages(2, "--hybrid-dp")),
    *(Row(kind, 2, ("--sharding-degree", "1", "--hybrid-dp")) for kind in MODELS),
    *(Row(kind, 4, (*layout, *NO_OVERLAP)) for kind in MODELS for layout in _stages(2, "--hybrid-dp")[:2]),
    *(Row("moe", 2, layout, UNTIED, 2) for layout in _stages(2)[1:]),
    *(Row("moe", 2, _stages(2)[stage], options) for stage, options in enumerate((DROPS, BIASED, (*DROPS, *BIASED)))),
    Row("moe", 4, _stages(4)[0], (*DROPS, "--moe-drop-policy", "choice"), 2),
    Row("moe", 2, _stages(2)[1], (*DROPS, "--moe-drop-policy", "probs"), 4),
    Row("moe", 2, ("--sharding-degree", "2", "--rank-order", "sharding,dp,pp,cp,mp")),
)
