"""``megapar report RUN_DIR [RUN_DIR ...]``: writes one self-contained HTML page about a run, or about several.

It reads the files that a run writes with ``--metrics-jsonl RUN_DIR/metrics.jsonl``: the metrics, ``run.json``, the
experts' load, and ``trace.json`` if ``--profile`` was set.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from megapar.config.report import refusal
from megapar.errors import Complaint, ConfigError
from megapar.files.disk import write_file
from megapar.files.location import at, read_locally, replace
from megapar.files.uri import refuse_wrong
from megapar.tools.parser import Parser
from megapar.tools.run_page import tables
from megapar.tools.run_page.curve_sections import COMMUNICATION, LOSSES, ROUTER, SPEED, expert_figures, panels
from megapar.tools.run_page.document import PageSection, document
from megapar.tools.run_page.plan_comparison import memory, plan_of, step_time
from megapar.tools.run_page.profile_section import slowest_operators, timeline
from megapar.tools.run_page.run_folder import RunFolder, read_run, run_names


def make_parser() -> Parser:
    """Return the parser of the command."""
    parser = Parser(prog="megapar report", description="Write one HTML page about a run, or about several.")
    parser.add_argument("run", nargs="+", help="folders of --metrics-jsonl FOLDER/metrics.jsonl, or their URIs")
    parser.add_argument("--output", help="file or URI to write (default: report.html in the first folder)")
    return parser


def main(argv: Sequence[str]) -> int:
    """Write the page. Return 0, 2 if a folder does not contain a run, or 1 if the page cannot be written."""
    options = make_parser().parse_args(list(argv))
    try:
        page = _page_of(options.run)
        refuse_wrong(options.output or "")
    except ConfigError as error:
        sys.stderr.write(refusal(error.complaints))
        return ConfigError.exit_status
    place = at(options.output) if options.output else at(options.run[0]) / "report.html"
    content = page.encode(errors="replace")  # a path of other bytes than UTF-8 has characters that no file can have
    name = str(place).encode(errors="replace").decode()
    try:
        if (output := place.local_path()) is None:
            replace(place, content)
        elif output.exists() and not output.is_file():  # a pipe or a device
            output.write_bytes(content)
        else:
            write_file(output.resolve(), content)
    except OSError as error:
        text = f"{name} cannot be written: {error.strerror}. Pass --output FILE in a folder that can be."
        print(f"megapar report: {text}", file=sys.stderr)
        return 1
    print(f"wrote {name}")
    return 0


def _page_of(runs: Sequence[str]) -> str:
    """Return the page of runs on a disk or in stores. Raises ConfigError."""
    for run in runs:
        refuse_wrong(run)
    with ExitStack() as copies:
        try:
            folders = [copies.enter_context(read_locally(at(run))) for run in runs]
        except OSError as error:
            raise ConfigError([Complaint("run-folder", f"{', '.join(runs)} cannot be read: {error}.")]) from error
        return report(*folders)


def report(*folders: Path) -> str:
    """Return the page. Raises ConfigError if a folder has no metrics or contains files that no run has written."""
    named = ", ".join(map(str, folders))
    try:
        runs = [read_run(folder, name) for folder, name in zip(folders, run_names(folders), strict=True)]
        return _page_of_one(runs[0]) if len(runs) == 1 else _page_of_several(runs)
    except OSError as error:
        raise ConfigError([Complaint("run-folder", f"{named} cannot be read: {error}.")]) from error
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        # The page reads hundreds of values. If one has the wrong type, the files were not written by a run.
        message = f"{named}: data that no run has written: {type(error).__name__}, {str(error)[:200]}."
        raise ConfigError([Complaint("run-folder", message, "Pass the unchanged folder of a run.")]) from error


def _page_of_one(run: RunFolder) -> str:
    sections = [
        *_compared([run]),
        PageSection("Ranks", html=tables.ranks(run.facts)),
        PageSection(
            "Timeline",
            [figure for figure in (timeline(run.trace),) if figure],
            tables.operators(slowest_operators(run.trace)),
        ),
        PageSection("Configuration", html=tables.configuration(run.facts)),
        PageSection("Environment", html=tables.environment(run.facts)),
    ]
    head = tables.tiles(run) + tables.restarts(run) + tables.phases(run)
    return document(f"megapar: {run.name}", head, sections, run.marks)


def _page_of_several(runs: Sequence[RunFolder]) -> str:
    return document(f"megapar: {len(runs)} runs", tables.side_by_side(runs), _compared(runs))


def _compared(runs: Sequence[RunFolder]) -> list[PageSection]:
    """Return the sections that a page of several runs has as well."""
    plans = [plan_of(run.facts) for run in runs]
    bar = step_time(runs, plans)
    return [
        PageSection("Losses", panels(runs, LOSSES)),
        PageSection("Speed", [*([bar] if bar else []), *panels(runs, SPEED)]),
        PageSection("Memory", memory(runs, plans)),
        PageSection("Communication", panels(runs, COMMUNICATION)),
        PageSection("Experts", [*expert_figures(runs), *panels(runs, ROUTER)]),
    ]
