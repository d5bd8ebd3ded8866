"""The HTML document of a page. It loads nothing: style, scripts and figures are in it.

Figures are drawn by Apache ECharts 6.1.0 (``echarts.min.js``, as published on npm; its license is ``echarts.LICENSE``)
and ``page.js``. The document's own Content-Security-Policy allows these two scripts, by their hashes, and inline
styles, but no other script and no request, whatever the names of runs and files in it are.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import Any

from megapar.core.units import Json
from megapar.tools.run_page.figures import Figure, thinned

POINTS = 10000  # of all curves of a page, which keeps it below 1.5 MB
MOST_POINTS, LEAST_POINTS = 600, 40  # of a curve
SCRIPTS = ("echarts.min.js", "page.js")


@dataclass(frozen=True)
class PageSection:
    """A part of a page; ``html`` is the text and the tables under the figures."""

    title: str
    figures: Sequence[Figure] = ()
    html: str = ""


def document(
    title: str, head: str, sections: Sequence[PageSection], marks: Sequence[tuple[int, str]] = (), reload: int = 0
) -> str:
    """Return the document.

    Args:
        head: HTML under the title.
        sections: Its parts; those without content are left out.
        marks: Iterations that figures of curves mark, each with ``resume``, ``layout`` or ``phase``.
        reload: Seconds after which a browser reads the page again; 0: it does not.
    """
    filled = [section for section in sections if section.figures or section.html]
    numbers = iter(range(sum(len(section.figures) for section in filled)))
    body = "".join(
        f"<section><h2>{escape(section.title)}</h2>{_grid(section.figures, numbers)}{section.html}</section>"
        for section in filled
    )
    data = {"figures": _drawable([figure for section in filled for figure in section.figures]), "marks": list(marks)}
    scripts = [own_file(name) for name in SCRIPTS]
    again = f'<meta http-equiv="refresh" content="{reload}">' if reload else ""
    live = f"<p>Live: reloads itself every {reload} seconds.</p>" if reload else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{_policy(scripts)}'
        f'{again}<meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
        f"<style>{own_file('page.css')}</style></head><body><main><h1>{escape(title)}</h1>{live}{head}"
        f"<noscript><p>The figures need JavaScript. All of it is in this file.</p></noscript>{body}</main>"
        f'<script type="application/json" id="data">{json_in_html(data)}</script>'
        f"{''.join(f'<script>{script}</script>' for script in scripts)}</body></html>\n"
    )


def place_of(title: str) -> str:
    """Return the name of the figure with this title in links to it."""
    return re.sub(r"\W+", "-", title.lower()).strip("-")


def own_file(name: str) -> str:
    """Return a file that the page contains."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def json_in_html(value: Json) -> str:
    """Return JSON that HTML cannot take for markup; fractions are rounded to five significant digits."""
    text = json.dumps(_short(value), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _policy(scripts: Sequence[str]) -> str:
    hashes = " ".join(f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in scripts)
    rules = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    return f'<meta http-equiv="Content-Security-Policy" content="{rules}">'


def _grid(figures: Sequence[Figure], numbers: Iterator[int]) -> str:
    """Return the cards of figures, two in a row; one that would be alone in a row has the width of the page."""
    cards, left = [], True
    for number, figure in enumerate(figures, 1):
        after = figures[number] if number < len(figures) else None
        wide = figure.wide or (left and (after is None or after.wide))
        left = wide or not left
        cards.append(_card(figure, next(numbers), " wide" if wide else ""))
    return f'<div class="grid">{"".join(cards)}</div>' if cards else ""


def _card(figure: Figure, number: int, wide: str) -> str:
    return (
        f'<figure id={place_of(figure.title)} class="{figure.kind}{wide}">{_choice(figure)}'
        f"<figcaption>{escape(figure.title)}<span>{escape(figure.unit)}</span></figcaption>"
        f'<div class="chart" style="height:{figure.height}px" data-figure="{number}"></div>'
        f"{f'<p>{escape(figure.note)}</p>' if figure.note else ''}</figure>"
    )


def _choice(figure: Figure) -> str:
    options = "".join(
        f"<option value={number}{' selected' if number == figure.chosen else ''}>{escape(name)}</option>"
        for number, name in enumerate(figure.choices)
    )
    return f'<select aria-label="{escape(figure.title)}: choose">{options}</select>' if options else ""


def _drawable(figures: Sequence[Figure]) -> list[dict[str, Any]]:
    """Return what the page's script draws, with as many points per curve as the page has room for."""
    drawn = sum(1 + ("mean" in curve) for figure in figures for curve in figure.body.get("curves", ()))
    limit = max(LEAST_POINTS, min(MOST_POINTS, POINTS // max(1, drawn)))
    return [{"kind": figure.kind, "unit": figure.unit, **_thin(figure.body, limit)} for figure in figures]


def _thin(body: Mapping[str, Any], limit: int) -> dict[str, Any]:
    if "curves" not in body:
        return dict(body)
    rows = [
        {**curve, **{name: thinned(curve[name], limit) for name in ("points", "mean") if name in curve}}
        for curve in body["curves"]
    ]
    return {**body, "curves": rows}


def _short(value: Json) -> Json:
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 1e15 else float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {name: _short(one) for name, one in value.items()}
    return [_short(one) for one in value] if isinstance(value, list | tuple) else value
