"""Published runs of ``rows.yaml`` and the blind files: a row's columns as a configuration of megapar, and its plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml

from megapar.arguments import parse
from megapar.planning.assume import assumed
from megapar.planning.devices import device_kind
from megapar.planning.plan import Plan

HERE = Path(__file__).parent
CONFIGS = HERE.parents[1] / "configs"
# Rows of the busiest expert rank over the mean, assumed for natural routing early in training, which no source states.
NATURAL_IMBALANCE = 1.3
# Keys of a file in configs/ that are not of its model.
_NOT_OF_THE_MODEL = """
    script world_size device_kind assume mp_degree pp_degree ep_degree sharding_degree sequence_parallel pp_seg_method
    micro_batch_size global_batch_size rampup_batch_size seq_length recompute_interval train_iters dtype lr min_lr
    lr_decay_style lr_warmup_iters lr_wsd_decay_style lr_decay_iters lr_wsd_decay_iters weight_decay adam_beta1
    adam_beta2 clip_grad max_position_embeddings
"""
# Columns that are flags.
_FLAGS = {
    **{"mbs": "micro-batch-size", "gbs": "global-batch-size", "seq": "seq-length", "tp": "mp-degree"},
    **{"pp": "pp-degree", "cp": "cp-degree", "vp": "vpp-degree", "ep": "ep-degree"},
}


@dataclass(frozen=True)
class PublishedRow:
    """One published run.

    Attributes:
        table: Name of its table in ``rows.yaml``.
        use: ``fit``, ``unfitted`` or ``blind``.
        source: Repository, file and commit.
        columns: Its columns, by name.
        more: What it says beyond its columns.
    """

    table: str
    use: str
    source: str
    columns: Mapping[str, Any]
    more: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Name of the row in tables, which distinguishes it from the others."""
        c = self.columns
        degrees = {
            "FSDP": c["fsdp"] and c["gpus"],
            **{axis.upper(): c[axis] for axis in ("tp", "pp", "cp", "vp", "ep")},
        }
        layout = " ".join(f"{axis}{degree}" for axis, degree in degrees.items() if degree > 1)
        words = [f"{c['gpus']}x {c['device'].partition('-')[0]}", c["precision"], layout]
        words += ["drops" if self.more.get("drops") else "", "natural" if self.natural else ""]
        batch = f"{c['gbs']}/{c['mbs']}x{c['seq']}"
        return f"{c['model']} {' '.join(word for word in words if word)} {batch}"

    @property
    def natural(self) -> bool:
        """Experts get the tokens that the router sends, not as many each."""
        return self.more.get("routing") == "natural"

    @property
    def left_out(self) -> str:
        """Reason why the row is not planned; "" if it is."""
        return str(self.more.get("left_out", ""))

    @property
    def unscored(self) -> str:
        """Reason why its error does not count; "" if it does."""
        return str(self.more.get("unscored", ""))

    @property
    def tokens(self) -> float:
        """Published tokens per second and GPU."""
        return float(self.columns["tokens"])

    @property
    def data_parallel(self) -> int:
        """Number of data parallel ranks."""
        c = self.columns
        return int(c["gpus"] // (c["tp"] * c["pp"] * c["cp"]))

    def line(self) -> list[str]:
        """Return the command line that plans the row."""
        c = self.columns
        line = [*_model_flags(c["model"], self.more.get("without", "")), "--world-size", str(c["gpus"])]
        line += ["--validate-only", "--dtype", "bf16"]
        line += [word for column, flag in _FLAGS.items() for word in (f"--{flag}", str(c[column]))]
        if c["tp"] > 1:
            line += ["--sequence-parallel", "--tp-comm-overlap", "on"]
        if c["pp"] > 1:
            line += ["--pp-seg-method", "balanced", "--pp-schedule", "interleaved" if c["vp"] > 1 else "1f1b"]
        if c["fsdp"]:
            line += ["--sharding-stage", "3", "--gradient-merge-mode", "micro_batch"]
        if c["ep"] > 1:
            line += ["--expert-mp-degree", "1"]
        if self.more.get("drops"):
            line += ["--moe-model-type", "deepspeed_moe"]
        return [*line, "--grad-reduce-dtype", "bf16", *str(self.more.get("flags", "")).split()]

    @cached_property
    def plan(self) -> Plan:
        """Return the plan of the row. Raises ConfigError if it is refused."""
        c = self.columns
        words = ["fp8", "fp8-activations"] if c["precision"].startswith("fp8") else []
        assume = str(self.more.get("assume", "")).replace("hybrid-ep", self.more.get("dispatch", "hybrid-ep"))
        words += assume.split()
        imbalance = NATURAL_IMBALANCE if self.natural else 1.0
        assumption = replace(assumed(words), software="megatron", expert_imbalance=imbalance)
        return Plan(parse("moe", self.line(), {}, planning=True), device_kind(c["device"]), assumption)

    def predicted(self) -> float:
        """Return the predicted tokens per second and GPU."""
        return self.plan.speed.tokens_per_second / float(self.columns["gpus"])


def published_rows(file: str = "rows.yaml", *, again: bool = False) -> Iterator[PublishedRow]:
    """Yield all rows of a file of this form. again: as their sources were read again, where they have ``again``."""
    for table in yaml.safe_load((HERE / file).read_text(encoding="utf-8")):
        for row in table["rows"]:
            more = {**(table.get("all") or {}), **(row[-1] if isinstance(row[-1], dict) else {})}
            more |= more.get("again", {}) if again else {}
            columns = dict(zip(table["columns"], row, strict=False))
            yield PublishedRow(table["name"], table["use"], table["source"], columns, more)


@cache
def _model_flags(name: str, without: str) -> tuple[str, ...]:
    here = HERE / "models" / f"{name}.yaml"
    path = here if here.exists() else CONFIGS / f"{name}.yaml"
    flags: list[str] = []
    for key, value in yaml.safe_load(path.read_text(encoding="utf-8")).items():
        if key not in _NOT_OF_THE_MODEL.split() and key not in without.split():
            word = key.replace("_", "-")
            switch = f"--{word}" if value else f"--no-{word}"
            flags += [switch] if isinstance(value, bool) else [f"--{word}", str(value)]
    return tuple(flags)
