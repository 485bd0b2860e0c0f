"""Tables as figures, for papers: what the page has as tables that copy."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dessilbi.report.figures import GREY, INK, LIGHT, blank_figure, text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LETTER, _LINE = 0.078, 0.22  # inches


def table_figure(rows: Sequence[Sequence[str]], title: str = "", marked: Collection[tuple[int, int]] = ()) -> Figure:
    """Rows of cells under the first one as heading; cells (row, column) that are marked stand out."""
    widths = [_LETTER * max(len(row[i]) for row in rows) + 0.2 for i in range(len(rows[0]))]
    high = _LINE * (len(rows) + bool(title)) + 0.1
    figure = blank_figure(sum(widths), high)
    figure.set_layout_engine("none")
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set_axis_off()
    ax.set_xlim(0, sum(widths))
    ax.set_ylim(high, 0)
    top = _LINE * bool(title)
    if title:
        ax.text(0.08, _LINE / 2, text(title), fontsize=9, va="center", color=INK)
    for i, row in enumerate(rows):
        y = top + _LINE * (i + 0.5)
        for j, cell in enumerate(row):
            x = sum(widths[:j])
            if (i, j) in marked:
                ax.axhspan(y - _LINE / 2, y + _LINE / 2, x / sum(widths), (x + widths[j]) / sum(widths), color=LIGHT)
            bold = i == 0 or (i, j) in marked
            ax.text(x + 0.08, y, text(cell), fontsize=8, va="center", color=INK, weight="bold" if bold else "normal")
    ax.axhline(top + _LINE, color=GREY, linewidth=0.8)
    return figure


def pruned_figure(table: Mapping[str, Any]) -> Figure:
    """What a selection cost and gained: the networks of table.json."""
    batches = list(dict.fromkeys(batch for row in table["rows"] for batch in row.get("latency") or {}))
    rows = [["network", "accuracy", "parameters", "non-zero", "MACs", *(f"ms at {batch}" for batch in batches)]]
    for row in table["rows"]:
        times = [(row.get("latency") or {}).get(batch) for batch in batches]
        rows.append(
            [
                row["network"],
                percent(row["accuracy"]),
                *(f"{row[name]:,}".replace(",", " ") for name in ("parameters", "nonzero", "macs")),
                *("–" if time is None else f"{1e3 * time['seconds']:.3g}" for time in times),
            ]
        )
    chosen = table["selection"]
    return table_figure(rows, f"{percent(chosen['kept'])} of the groups kept, at the level of {chosen['level']}s")


def percent(value: float | None, sd: float | None = None, sign: str = "") -> str:
    """A fraction in %, with its standard deviation if there is one."""
    if value is None:
        return "–"
    return f"{100 * value:{sign}.2f}" + ("" if sd is None else f" ± {100 * sd:.2f}") + " %"
