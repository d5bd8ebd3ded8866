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
from megapar.errors import Complaint, ConfigError, listed
from megapar.files.disk import write_file
from megapar.files.location import Location, at, read_locally, replace
from megapar.files.uri import refuse_wrong
from megapar.planning.plan import Plan
from megapar.tools.parser import Parser
from megapar.tools.run_page import tables
from megapar.tools.run_page.curve_sections import COMMUNICATION, LOSSES, ROUTER, SPEED, panels
from megapar.tools.run_page.document import PageSection, document
from megapar.tools.run_page.expert_section import expert_figures
from megapar.tools.run_page.findings import sentence
from megapar.tools.run_page.plan_comparison import memory, plan_of, step_time
from megapar.tools.run_page.profile_section import slowest_operators, timeline
from megapar.tools.run_page.run_folder import RunFolder, read_run, run_names
from megapar.tools.run_page.watch import RELOAD_SECONDS, watch

SHOWN_NAMES = 3  # in the title of a page of several runs


def make_parser() -> Parser:
    """Return the parser of the command."""
    parser = Parser(
        prog="megapar report",
        description="Write one HTML page about a run, or about several.",
        examples=("runs/tiny", "runs/a runs/b --output compared.html"),
    )
    parser.add_argument("run", nargs="+", help="folders of --metrics-jsonl FOLDER/metrics.jsonl, or their URIs")
    parser.add_argument("--output", help="file or URI to write (default: report.html in the first folder)")
    parser.add_argument("--watch", action="store_true", help="write it at each log interval until the runs have ended")
    return parser


def main(argv: Sequence[str]) -> int:
    """Write the page. Return 0, 2 if a folder does not contain a run, or 1 if the page cannot be written."""
    options = make_parser().parse_args(list(argv))
    try:
        for uri in (*options.run, options.output or ""):
            refuse_wrong(uri)
        place = at(options.output) if options.output else at(options.run[0]) / "report.html"
        name = str(place).encode(errors="replace").decode()
        if options.watch:
            print(f"{name}: written at each log interval until the run has ended; Ctrl-C stops", flush=True)
            watch([at(run) for run in options.run], lambda live: _write(options.run, place, live=live))
        else:
            _write(options.run, place, live=False)
    except ConfigError as error:
        sys.stderr.write(refusal(error.complaints))
        return ConfigError.exit_status
    except OSError as error:
        text = f"{name} cannot be written: {error.strerror or error}. Pass --output FILE in a folder that can be."
        print(f"megapar report: {text}", file=sys.stderr)
        return 1
    print(f"wrote {name}")
    return 0


def _write(runs: Sequence[str], place: Location, *, live: bool) -> bool:
    """Write the page. Return True if all runs have ended. Raises ConfigError, or OSError if it cannot be written."""
    with ExitStack() as copies:
        try:
            folders = [copies.enter_context(read_locally(at(run))) for run in runs]
        except OSError as error:
            raise ConfigError([Complaint("run-folder", f"{', '.join(runs)} cannot be read: {error}.")]) from error
        page, ended = _report(folders, live=live)
    content = page.encode(errors="replace")  # a path of other bytes than UTF-8 has characters that no file can have
    if (output := place.local_path()) is None:
        replace(place, content)
    elif output.exists() and not output.is_file():  # a pipe or a device
        output.write_bytes(content)
    else:
        write_file(output.resolve(), content)
    return ended


def report(*folders: Path) -> str:
    """Return the page. Raises ConfigError if a folder has no metrics or contains files that no run has written."""
    return _report(folders, live=False)[0]


def _report(folders: Sequence[Path], *, live: bool) -> tuple[str, bool]:
    """Return the page, which reloads itself if it is ``live``, and whether all runs have ended."""
    named = ", ".join(map(str, folders))
    try:
        runs = [read_run(folder, name) for folder, name in zip(folders, run_names(folders), strict=True)]
        reload = RELOAD_SECONDS if live else 0
        page = _page_of_one(runs[0], reload) if len(runs) == 1 else _page_of_several(runs, reload)
        return page, all(run.ended for run in runs)
    except OSError as error:
        raise ConfigError([Complaint("run-folder", f"{named} cannot be read: {error}.")]) from error
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        # The page reads hundreds of values. If one has the wrong type, the files were not written by a run.
        message = f"{named}: data that no run has written: {type(error).__name__}, {str(error)[:200]}."
        raise ConfigError([Complaint("run-folder", message, "Pass the unchanged folder of a run.")]) from error


def _page_of_one(run: RunFolder, reload: int) -> str:
    plan = plan_of(run.facts)
    sections = [
        *_compared([run], [plan]),
        PageSection("Ranks", html=tables.ranks(run.facts)),
        PageSection(
            "Timeline",
            [figure for figure in (timeline(run.trace),) if figure],
            tables.operators(slowest_operators(run.trace)),
        ),
        PageSection("Configuration", html=tables.configuration(run.facts)),
        PageSection("Environment", html=tables.environment(run.facts)),
    ]
    head = sentence(run, plan) + tables.tiles(run) + tables.restarts(run) + tables.phases(run)
    return document(f"megapar: {run.name}", head, sections, run.marks, reload)


def _page_of_several(runs: Sequence[RunFolder], reload: int) -> str:
    sections = _compared(runs, [plan_of(run.facts) for run in runs])
    title = listed([run.name for run in runs], SHOWN_NAMES)
    return document(f"megapar: {title}", tables.side_by_side(runs), sections, reload=reload)


def _compared(runs: Sequence[RunFolder], plans: Sequence[Plan | None]) -> list[PageSection]:
    """Return the sections that a page of several runs has as well."""
    bar = step_time(runs, plans)
    return [
        PageSection("Losses", panels(runs, LOSSES)),
        PageSection("Speed", [*([bar] if bar else []), *panels(runs, SPEED)]),
        PageSection("Memory", memory(runs, plans)),
        PageSection("Communication", panels(runs, COMMUNICATION)),
        PageSection("Experts", [*expert_figures(runs), *panels(runs, ROUTER)]),
    ]
