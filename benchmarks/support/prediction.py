"""Figures of a benchmark as the planner predicts them, next to the measured ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.support.table import print_table
from megapar.arguments import parse
from megapar.core.device.kinds import DeviceKind, kinds
from megapar.planning.calibration import Calibration
from megapar.planning.operator_time import OperatorTime
from megapar.planning.planned_run import PlannedRun

# Rows at which a product of these CPUs takes twice as long per row: at 512 positions, four slices take 1.13 times the
# serial computation (benchmarks/communication_hiding).
SMALL = 23.0
SCORES, MEMORY = 0.38, 0.5792  # shares of the peak in attention's core and of the bandwidth; a GPU reaches more
COLUMNS = ("row", "figure", "measured", "predicted", "error")


@dataclass(frozen=True)
class Row:
    """A figure of a benchmark.

    Attributes:
        name: Its row in the benchmark's table.
        figure: Its name and unit.
        measured: The measured value.
        predicted: The planned value.
        of: What the error is a share of; 0: the measured value.
        given: A rate of the plan is from this figure.
    """

    name: str
    figure: str
    measured: float
    predicted: float
    of: float = 0.0
    given: bool = False

    @property
    def error(self) -> float:
        """Error of the prediction, as a share of ``of`` or of the measured value."""
        return (self.predicted - self.measured) / (self.of or self.measured)

    @property
    def cells(self) -> tuple[str, ...]:
        """Text of the columns."""
        percent = round(100 * self.error)
        error = "given" if self.given else f"{percent:+d} %" if percent else "0 %"
        return self.name, self.figure, f"{self.measured:.4g}", f"{self.predicted:.4g}", error


def cpu_on_nodes(node: int) -> DeviceKind:
    """Return the CPU of the device table, on nodes of ``node`` ranks."""
    return replace(kinds()["cpu"], node=node)


def planned(model: str, flags: Sequence[str], kind: DeviceKind) -> PlannedRun:
    """Return the planned run of a command line."""
    return PlannedRun(parse(model, ["--rules-only", *flags], {}, planning=True), kind)


def cpu_calibration(run: PlannedRun) -> Calibration:
    """Return the calibration of a CPU: its links are as its kind says, and messages do not slow its products."""
    calibration = OperatorTime(run).calibration
    software = replace(calibration.software, scores=SCORES, memory=MEMORY)
    return replace(calibration, small=SMALL, inside=1.0, between=1.0, shown=0.0, jitter=0.0, software=software)


def print_rows(rows: Sequence[Row]) -> None:
    """Print the table of a benchmark."""
    print_table(COLUMNS, [row.cells for row in rows])
