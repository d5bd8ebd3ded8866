"""Pictures as SVG: the lanes of one step, and hidden shares over the rate of the link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")
WIDTH = 1200


def draw_step(began: float, events: Sequence[Mapping[str, float | str]], title: str, path: Path) -> None:
    """Draw the lanes of one rank.

    The lanes are its projections (blue) and experts (red), forward and backward, and each collective (green) from its
    launch to its arrival. The dark end of a collective is the time that the host waited, which nothing hid.
    """
    lanes = ["compute", *sorted({str(event["lane"]) for event in events} - {"compute"})]
    last = max(float(event["there"]) for event in events) - began
    rows = {lane: [event for event in events if event["lane"] == lane] for lane in lanes}
    height = 60 + 70 * len(lanes)
    parts = [_head(height, title)]
    for number, lane in enumerate(lanes):
        top = 50 + 70 * number
        parts.append(f'<text x="5" y="{top + 25}">{lane}</text>')
        for place, event in enumerate(sorted(rows[lane], key=lambda event: float(event["launch"]))):
            start, end = ((float(event[key]) - began) / last for key in ("launch", "there"))
            x, width = 80 + start * (WIDTH - 90), max(1.0, (end - start) * (WIDTH - 90))
            own = COLORS[0] if str(event["name"]).startswith("attention") else COLORS[1]
            color = own if lane == "compute" else COLORS[2]
            # Flights of one axis overlap: they take turns on four thin rows.
            y, thick = (top, 40) if lane == "compute" else (top + 12 * (place % 4), 10)
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{thick}" fill="{color}"/>')
            if "wait" in event:
                waited = max(0.5, (float(event["there"]) - float(event["wait"])) / last * (WIDTH - 90))
                parts.append(
                    f'<rect x="{x + width - waited:.1f}" y="{y}" width="{waited:.1f}" height="{thick}" '
                    f'fill="#000" fill-opacity="0.6"/>'
                )
    parts.append(f'<text x="80" y="{height - 5}">0 s</text><text x="{WIDTH - 60}" y="{height - 5}">{last:.2f} s</text>')
    path.write_text("\n".join([*parts, "</svg>\n"]))


def draw_shares(rates: Sequence[str], hidden: Mapping[str, Sequence[float]], path: Path) -> None:
    """Draw a line for each way: the share of communication that was hidden, by rate."""
    height, step = 400, (WIDTH - 400) / max(1, len(rates) - 1)
    parts = [_head(height, "share of communication hidden")]
    for mark in (0, 25, 50, 75, 100):
        y = 360 - 3 * mark
        parts.append(f'<line x1="60" x2="{WIDTH - 300}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="5" y="{y + 4}">{mark} %</text>')
    parts += [f'<text x="{60 + number * step:.0f}" y="385">{rate}</text>' for number, rate in enumerate(rates)]
    for number, (way, shares) in enumerate(hidden.items()):
        color = COLORS[number % len(COLORS)]
        points = " ".join(f"{60 + i * step:.0f},{360 - 300 * share:.0f}" for i, share in enumerate(shares))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts.append(f'<text x="{WIDTH - 280}" y="{60 + 22 * number}" fill="{color}">{way}</text>')
    path.write_text("\n".join([*parts, "</svg>\n"]))


def _head(height: int, title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        f'font-size="13">\n<rect width="100%" height="100%" fill="#fff"/>\n<text x="60" y="25">{title}</text>'
    )
