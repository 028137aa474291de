"""Bar charts of a run's figures, as SVG files beside the page that shows them.

Written by hand, because an image in a page follows the reader's dark mode only through a style of
its own, and no plotting library of a reasonable size writes one.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from .figures import Figure, Spread, short

WIDTH, LABEL, VALUE, BAR, GAP, HEAD = 720, 190, 130, 20, 10, 46  # pixels
STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.title { font-weight: 600; font-size: 15px }
.ours { fill: #1a7f5a } .theirs { fill: #8c959f }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .ours { fill: #3fb68b } .theirs { fill: #6e7681 }
}"""
OURS = "django_outbox"

# The start of the names of a chart's figures, each beside a peer: file, title, unit.
PEERS = {
    "drain, one worker process, compared with ": (
        "performance-drain",
        "Backlog drained by one worker process (more is better)",
        "events/s",
    ),
    "commit to listener, p50, compared with ": (
        "performance-latency",
        "Commit to listener, median (less is better)",
        "ms",
    ),
}

Bars = list[tuple[str, float]]  # names and values


def write(results: list[dict[str, Any]], directory: Path) -> None:
    """Write the charts for which a run has figures."""
    for name, svg in rendered(results).items():
        (directory / f"{name}.svg").write_text(svg)


def rendered(results: list[dict[str, Any]]) -> dict[str, str]:
    """Return the charts by file name, without the suffix."""
    figures = [
        Figure(**each)
        for result in results
        if (result["part"], result["database"]) == ("peers", "postgres")
        for each in result.get("figures", ())
    ]
    found = {}
    for start, (name, title, unit) in PEERS.items():
        pairs = [each for each in figures if each.name.startswith(start) and each.references]
        if pairs:
            bars = [(OURS, Spread.of(pairs[0].values).median)]
            bars += [(each.reference, Spread.of(each.references).median) for each in pairs]
            found[name] = chart(title, bars, unit)
    return found


def chart(title: str, bars: Bars, unit: str) -> str:
    """Return horizontal bars on one linear scale, each with its value."""
    height, most = HEAD + len(bars) * (BAR + GAP), max(value for _, value in bars)
    box = f"0 0 {WIDTH} {height}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<text class="title" x="0" y="20">{escape(title)}</text>',
    ]
    for number, (name, value) in enumerate(bars):
        top = HEAD + number * (BAR + GAP)
        length = max((WIDTH - LABEL - VALUE) * value / most, 1)
        kind = "ours" if name == OURS else "theirs"
        lines += [
            f'<text x="{LABEL - 10}" y="{top + 15}" text-anchor="end">{escape(name)}</text>',
            f'<rect class="{kind}" x="{LABEL}" y="{top}" width="{length:.1f}" height="{BAR}"/>',
            f'<text x="{LABEL + length + 8:.1f}" y="{top + 15}">{short(value)} {unit}</text>',
        ]
    return "\n".join([*lines, "</svg>\n"])
