"""Fit of the planner's constants to the rows of ``rows.yaml`` that are for it; writes ``calibration.yaml``.

python -m benchmarks.prediction.fit            print the constants and the errors
python -m benchmarks.prediction.fit --write    also write them, and the residuals to results/fit.jsonl

Least squares of log(predicted / published), by Gauss-Newton steps with damping over the logarithms of the constants.
Errors beyond 15 % have less weight (Huber), so that rows that the model does not describe affect it little, and rows of
one model on one device in one dtype have the weight of one row. Unfitted rows are not read.

Rows of experts with biases, which were described last, fit the cost of these biases alone, after all other constants.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import yaml

from benchmarks.prediction.rows import published_rows
from benchmarks.prediction.run import ROWS, attention_flops, published_plan
from megapar.planning.calibration import MEGATRON, TABLE, Calibration, calibrations
from megapar.planning.planned_run import PlannedRun
from megapar.planning.speed import model_flops, predict

RESIDUALS = Path(__file__).with_name("results") / "fit.jsonl"
MOST = 0.9  # share of its peak that any device is taken to reach
MOST_BIAS = 150  # bytes per element of the outputs of experts with biases
HUBER, DAMPING, STEPS, NUDGE = 0.15, 1e-3, 12, 0.02
# Blackwell Ultra is on the fit side as a GB300 only, so a B300 has its clock.
SAME_CLOCK = {"b300-288g": "gb300-288g"}
LINEAR = ("qkv", "latents", "kv", "proj", "up", "down")  # whose inputs and outputs their products move
EXPERT = ("router", "dispatch")
# The head's kernels leave logits in the compute dtype and make their gradient in place: a quarter of fp32's passes.
HEAD = 0.25


class Constants:
    """Constants that are fitted, as a vector of logarithms in a fixed order.

    Those with the name of a device are its clock in fp8; ``wide`` is the clock in bf16 relative to that, of all
    devices.
    """

    # name: start, and the most that a fit may make of it (shares are at most 1).
    FREE: ClassVar[dict[str, tuple[float, float]]] = {
        "product": (0.76, 0.95),
        "fp8": (0.65, 0.95),
        "memory": (0.70, 0.95),
        "small": (350.0, 1000.0),
        "b200-180g": (1.0, 1.2),
        "gb200-186g": (1.0, 1.2),
        "gb300-288g": (1.0, 1.2),
        "wide": (1.0, 1.15),
        "cast": (4.0, 30.0),
        "scores": (0.5, 0.65),
        "linear_bytes": (0.7, 3.0),
        "expert_bytes": (1.0, 4.0),
        "grouped": (0.8, 1.0),
        "wait": (100.0, 2000.0),
        "fp8_launches_per_expert": (6.0, 60.0),
    }

    @classmethod
    def start(cls) -> np.ndarray:
        """Return the vector that the fit starts from."""
        return np.log([first for first, _ in cls.FREE.values()])

    @classmethod
    def clipped(cls, vector: np.ndarray) -> np.ndarray:
        """Return the vector within the bounds."""
        return np.minimum(vector, np.log([most for _, most in cls.FREE.values()]))

    @classmethod
    def calibration(cls, vector: np.ndarray) -> Calibration:
        """Return the calibration of megatron with these constants."""
        value = dict(zip(cls.FREE, map(float, np.exp(vector)), strict=True))
        most = MOST / value["product"]
        clocks = {name: (min(value[name] * value["wide"], most), value[name]) for name in value if name.endswith("g")}
        clocks |= {name: clocks[other] for name, other in SAME_CLOCK.items()}
        base = calibrations()[MEGATRON]
        names = ("scores", "memory", "grouped", "wait", "fp8_launches_per_expert", "cast")
        linear, expert = dict.fromkeys(LINEAR, value["linear_bytes"]), dict.fromkeys(EXPERT, value["expert_bytes"])
        costs: dict[str, Any] = {name: value[name] for name in names}
        software = replace(base.software, bytes={"head": HEAD, **linear, **expert}, **costs)
        shares = {name: value[name] for name in ("product", "fp8", "small")}
        return replace(base, **shares, clocks=clocks, software=software)


class Target(NamedTuple):
    """A run that the fit is held to.

    Attributes:
        name: Its name in tables.
        table: Where it was published.
        run: The run as it is planned.
        tokens: Published tokens per second and device.
    """

    name: str
    table: str
    run: PlannedRun
    tokens: float

    @property
    def group(self) -> tuple[object, ...]:
        """Key of the targets that have the weight of one together."""
        return self.run.sizes.num_layers, self.run.sizes.hidden_size, self.run.kind.name, self.run.assumed.fp8


def targets() -> list[Target]:
    """Return the rows for the fit: of ``rows.yaml``, and of ``published.yaml`` those that state all that counts."""
    rows = [row for row in published_rows() if row.use == "fit" and not row.left_out]
    found = [Target(row.name, row.table, row.plan.run, row.tokens) for row in rows]
    for entry in yaml.safe_load(ROWS.read_text(encoding="utf-8")):
        if "unstated" not in entry:
            plan = published_plan(entry)
            flops, run = model_flops(plan.run), plan.run
            counted = flops + (attention_flops(run) if entry["basis"] == "full" else 0.0)
            rate = entry["mfu"] / 100 * run.kind.peak(run.dtype)
            found.append(Target(entry["config"], "published.yaml", run, rate * plan.tokens_per_step / counted))
    return found


def biased_targets() -> list[Target]:
    """Return the rows that fit the cost of biases of experts."""
    rows = [row for row in published_rows() if row.use == "fit" and "biases" in row.left_out]
    return [Target(row.name, row.table, row.plan.run, row.tokens) for row in rows]


def with_biases(calibration: Calibration, rows: Sequence[Target]) -> Calibration:
    """Return the calibration with the cost of biases of experts that fits these rows best, to a byte."""

    def of(size: float) -> Calibration:
        return replace(calibration, software=replace(calibration.software, expert_bias=size))

    found = {size: loss(errors(rows, of(size)), np.ones(len(rows))) for size in map(float, range(MOST_BIAS + 1))}
    return of(min(found, key=found.__getitem__))


def errors(rows: Sequence[Target], calibration: Calibration) -> np.ndarray:
    """Return log(predicted / published) of the rows."""
    found = []
    for row in rows:
        speed = predict(row.run, calibration)
        found.append(math.log(speed.tokens_per_second / row.run.config.grid.world_size / row.tokens))
    return np.array(found)


def loss(residuals: np.ndarray, weights: np.ndarray) -> float:
    """Return Huber's loss."""
    size = np.abs(residuals)
    return float((weights * np.where(size < HUBER, size**2 / 2, HUBER * (size - HUBER / 2))).sum())


def fit(rows: Sequence[Target]) -> np.ndarray:
    """Return the fitted vector of constants."""
    at, damping = Constants.start(), DAMPING
    count = Counter(row.group for row in rows)
    share = np.array([1 / count[row.group] for row in rows])
    now = errors(rows, Constants.calibration(at))
    for _ in range(STEPS):
        columns = []
        for place in range(len(at)):
            nudged = at.copy()
            nudged[place] -= NUDGE
            columns.append((now - errors(rows, Constants.calibration(nudged))) / NUDGE)
        jacobian = np.stack(columns, 1)
        weights = share * np.minimum(1.0, HUBER / np.maximum(np.abs(now), 1e-9))
        for _ in range(6):
            normal = jacobian.T @ (weights[:, None] * jacobian) + damping * share.sum() * np.eye(len(at))
            step = np.clip(np.linalg.solve(normal, -jacobian.T @ (weights * now)), -0.7, 0.7)
            after = Constants.clipped(at + step)
            residuals = errors(rows, Constants.calibration(after))
            if loss(residuals, share) < loss(now, share):
                break
            damping *= 4
        else:
            return at
        done = loss(now, share) - loss(residuals, share) < 1e-4 * loss(now, share)
        at, now, damping = after, residuals, damping / 2
        if done:
            return at
    return at


def table(calibration: Calibration) -> str:
    """Return the text of ``calibration.yaml``, floats with four digits."""
    numbers: dict[str, Any] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    numbers["shares"] = {name: getattr(calibration, name) for name in numbers["shares"]}
    numbers["clocks"] = {name: list(clocks) for name, clocks in calibration.clocks.items()}
    costs = {name: getattr(calibration.software, name) for name in numbers["software"][MEGATRON]}
    numbers["software"][MEGATRON] = costs
    head = "# Numbers of calibration.py, written by ``python -m benchmarks.prediction.fit --write``.\n"
    return head + yaml.safe_dump(_rounded(numbers), sort_keys=False, default_flow_style=None, width=120)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_rounded(part) for part in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main() -> None:
    """Fit and print the constants, and write them if requested."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the constants and the residuals")
    args = parser.parse_args()
    rows = targets()
    calibration = with_biases(Constants.calibration(fit(rows)), biased_targets())
    lines = []
    for row, error in zip(rows, errors(rows, calibration), strict=True):
        lines.append(json.dumps({"row": row.name, "table": row.table, "residual": round(math.exp(error) - 1, 4)}))
        print(lines[-1])
    text = table(calibration)
    print(text)
    if args.write:
        TABLE.write_text(text, encoding="utf-8")
        RESIDUALS.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
