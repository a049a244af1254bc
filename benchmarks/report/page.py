"""One self-contained HTML page: inline styles and plots, nothing fetched from anywhere."""

import html
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

_CSS = """
:root { --ink: #1d2733; --muted: #66707d; --line: #e3e7ec; --accent: #16806a; --bad: #b3382c; }
* { box-sizing: border-box; }
body { margin: 0; background: #f5f7f9; color: var(--ink);
       font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 36px 24px 64px; }
header h1 { margin: 0 0 4px; font-size: 28px; letter-spacing: -.01em; }
header p { margin: 0; color: var(--muted); max-width: 76ch; }
h2 { margin: 40px 0 12px; font-size: 19px; }
h3 { margin: 24px 0 8px; font-size: 15px; }
p.note, li.note { color: var(--muted); max-width: 84ch; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 14px; margin: 24px 0 8px; }
.card, .panel { background: #fff; border: 1px solid var(--line); border-radius: 10px; }
.card { padding: 14px 16px; }
.card:first-child { grid-column: span 2; }
.card b { display: block; font-size: 25px; line-height: 1.25; letter-spacing: -.01em; }
.card span { color: var(--muted); font-size: 13px; }
.card.good b { color: var(--accent); } .card.bad b { color: var(--bad); }
.plots, .scroll, pre { margin: 14px 0; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 14px; }
.panel { padding: 12px 14px; min-width: 0; display: flex; justify-content: center; align-items: center; }
.panel svg { max-width: 100%; height: auto; }
.scroll { overflow-x: auto; background: #fff; border: 1px solid var(--line); border-radius: 10px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 12px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { color: var(--muted); font-weight: 600; font-size: 13px; }
th.text, td.text { text-align: left; }
td.wrap { white-space: normal; }
tr:last-child td { border-bottom: 0; }
pre { background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 12px 14px; overflow-x: auto;
      font: 12.5px/1.5 ui-monospace, "DejaVu Sans Mono", monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
.alarm { background: #fdecea; border: 1px solid #eec4be; border-radius: 10px; padding: 10px 14px; color: var(--bad); }
footer { margin-top: 40px; color: var(--muted); font-size: 13px; }
"""


class Page:
    """A report under construction; plots also go to `folder` as PNG files."""

    def __init__(self, title: str, subtitle: str, folder: Path) -> None:
        self.title, self.subtitle, self.folder = title, subtitle, folder
        self._parts: list[str] = []
        self._names: dict[str, int] = {}

    def heading(self, text: str, note: str = "") -> None:
        """Start a section."""
        self._parts.append(f"<h2>{html.escape(text)}</h2>")
        if note:
            self.note(note)

    def note(self, text: str) -> None:
        """A remark."""
        self._parts.append(f'<p class="note">{html.escape(text)}</p>')

    def alarm(self, text: str) -> None:
        """Something is wrong and must not be missed."""
        self._parts.append(f'<p class="alarm">{html.escape(text)}</p>')

    def cards(self, cards: Sequence[tuple[str, str, str]]) -> None:
        """(big text, small text, `good`, `bad` or empty) side by side."""
        if not cards:
            return
        made = [
            f'<div class="card {html.escape(kind)}"><b>{html.escape(big)}</b><span>{html.escape(small)}</span></div>'
            for big, small, kind in cards
        ]
        self._parts.append(f'<div class="cards">{"".join(made)}</div>')

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Text columns to the left, numbers to the right."""
        text = [any(isinstance(row[i], str) and not _numeric(row[i]) for row in rows) for i in range(len(headers))]

        def cells(tag: str, row: Sequence[Any]) -> str:
            found = []
            for i, value in enumerate(row):
                kind = ("text wrap" if len(str(value)) > 60 else "text") if text[i] else ""
                found.append(f'<{tag} class="{kind}">{html.escape(_show(value))}</{tag}>')
            return f"<tr>{''.join(found)}</tr>"

        body = (cells("th", headers) if any(headers) else "") + "".join(cells("td", row) for row in rows)
        self._parts.append(f'<div class="scroll"><table>{body}</table></div>')

    def plots(self, plots: Sequence[tuple[str, Figure]]) -> None:
        """(file name without ending, figure) side by side."""
        panels = [f'<div class="panel">{self._svg(name, fig)}</div>' for name, fig in plots]
        self._parts.append(f'<div class="plots">{"".join(panels)}</div>')

    def code(self, text: str) -> None:
        """Commands."""
        self._parts.append(f"<pre>{html.escape(text)}</pre>")

    def write(self) -> Path:
        """Write `report.html`; returns its path."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "report.html"
        path.write_text(
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{html.escape(self.title)}</title><style>{_CSS}</style></head>\n<body><main><header><h1>{html.escape(self.title)}</h1>"
            f"<p>{html.escape(self.subtitle)}</p></header>\n" + "\n".join(self._parts) + "\n</main></body></html>\n",
            encoding="utf-8",
        )
        return path

    def _svg(self, name: str, fig: Figure) -> str:
        count = self._names[name] = self._names.get(name, 0) + 1
        name = name if count == 1 else f"{name}-{count}"
        self.folder.mkdir(parents=True, exist_ok=True)
        fig.savefig(self.folder / f"{name}.png", dpi=150, facecolor="white")
        buffer = io.StringIO()
        fig.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        svg = buffer.getvalue()
        svg = svg[svg.index("<svg") :]
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
        # Ids are per document in HTML: without a prefix one plot's clip paths and glyphs would serve another's.
        svg = re.sub(r'(id="|xlink:href="#|url\(#)', rf"\g<1>{name}-", svg)
        return svg.replace("<svg ", f'<svg role="img" aria-label="{html.escape(name)}" ', 1)


def _numeric(text: str) -> bool:
    return bool(re.fullmatch(r"[-+−]?[\d.,]+ ?(%|x|pp|ms|s)?|-|", text))


def _show(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.2f}"
    return str(value)
