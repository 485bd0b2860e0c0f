"""The figures of a comparison: accuracy against what is kept, one line a method; and its tables."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dessilbi.report.figures import blank_figure, text, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of Okabe and Ito: told apart by those who do not see red and green alike. Markers tell them apart in print.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#000000", "#8c8c8c")
MARKERS = "osD^vPX*"


def figures(folder: str | os.PathLike[str]) -> Iterator[tuple[str, Figure]]:
    """Those of a comparison folder, by name."""
    from dessilbi.applications.comparison import Comparison

    table = Comparison.open(folder).table()
    if table["rows"]:
        yield "tickets", figure(table)
        yield "transfer" if table["grid"]["source"] else "table", accuracies(table)
        yield "costs", costs(table)


def figure(table: Mapping[str, Any]) -> Figure:
    """Mean accuracy over the seeds, with the standard deviation as a bar; what was not pruned is a band."""
    grid = table["grid"]
    fig = blank_figure(6.4, 4.2)
    axes = fig.subplots()
    drawn = [method for method in grid["methods"] if method != "dense"]
    keeps = sorted({row["keep"] for row in table["rows"] if row["method"] != "dense"})
    for i, method in enumerate(drawn):
        rows = sorted((row for row in table["rows"] if row["method"] == method), key=lambda row: row["keep"])
        if rows:
            # Bars beside each other, not on top of each other.
            aside = 1 + 0.012 * (i - (len(drawn) - 1) / 2)
            axes.errorbar(
                [aside * row["keep"] for row in rows],
                [100 * row["mean"] for row in rows],
                yerr=[100 * (row["sd"] or 0) for row in rows],
                label=text(method),
                color=COLOURS[i % len(COLOURS)],
                marker=MARKERS[i % len(MARKERS)],
                linestyle="-" if i < len(COLOURS) else "--",
                markersize=5,
                linewidth=1.3,
                capsize=2,
            )
    for row in table["rows"]:
        if row["method"] == "dense":
            mean, sd = 100 * row["mean"], 100 * (row["sd"] or 0)
            axes.axhline(mean, color="#555555", linewidth=1, linestyle=":", label="dense")
            axes.axhspan(mean - sd, mean + sd, color="#555555", alpha=0.12, linewidth=0)
    axes.set_xscale("log")
    axes.set_xticks(keeps, [f"{keep:g}" for keep in keeps])
    axes.minorticks_off()
    axes.set_xlabel("fraction of weights kept")
    axes.set_ylabel("accuracy, %")
    means = [100 * row["mean"] for row in table["rows"]]
    if min(means) < 0.8 * max(means):
        _by_error(axes, means)
    axes.set_title(text(_about(grid)), fontsize=10)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    return fig


def _by_error(axes: Axes, means: Sequence[float]) -> None:
    """Accuracies on the scale of the logarithm of the error: one at chance leaves the others apart."""
    least = max((100 - max(means)) / 2, 0.01)
    low, high = max(min(means) - 5, 0), 100 - least
    axes.set_yscale(
        "function",
        functions=(lambda y: -np.log10(np.maximum(100 - np.asarray(y), least)), lambda z: 100 - 10.0 ** -np.asarray(z)),
    )
    axes.set_ylim(low, high)
    ticks = [tick for tick in (0, 20, 50, 80, 90, 95, 98, 99, 99.5, 99.8, 99.9) if low <= tick <= high]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])


def accuracies(table: Mapping[str, Any]) -> Figure:
    """The accuracies as a table, a column a method; of tickets that were taken elsewhere, the table of the transfer."""
    from dessilbi.report.tables import percent, table_figure

    cells = {(row["method"], row["keep"]): percent(row["mean"], row["sd"]) for row in table["rows"]}
    methods = [m for m in table["grid"]["methods"] if m != "dense" and any(m == method for method, _ in cells)]
    keeps = sorted({keep for method, keep in cells if method != "dense"}, reverse=True)
    rows = [["keep", *methods], *([f"{keep:g}", *(cells.get((m, keep), "–") for m in methods)] for keep in keeps)]
    if dense := [cell for (method, _), cell in cells.items() if method == "dense"]:
        rows = [[*row, extra] for row, extra in zip(rows, ["dense", *dense * len(keeps)], strict=True)]
    return table_figure(rows, _about(table["grid"]))


def costs(table: Mapping[str, Any]) -> Figure:
    """What it took to find each ticket, and how it compares with the reference."""
    from dessilbi.report.tables import percent, table_figure

    # Only where the grid has the method that the others are paired with.
    paired = any(row["difference"] is not None for row in table["rows"])
    rows = [["method", "keep", "seeds", "accuracy", f"to {table['grid']['reference']}", "found at", "cost", "MACs"]]
    for row in table["rows"]:
        rows.append(
            [
                row["method"],
                f"{row['keep']:g}",
                str(row["seeds"]),
                percent(row["mean"], row["sd"]),
                percent(row["difference"], row["difference_sd"], "+"),
                f"epoch {row['at']:.3g}",
                f"{row['cost']:.2f}",
                f"{row['macs']:.2e}",
            ]
        )
    if not paired:
        rows = [row[:4] + row[5:] for row in rows]
    return table_figure(rows, "cost: in dense trainings")


def _about(grid: Mapping[str, Any]) -> str:
    found = f", tickets found on {grid['source']}" if grid.get("source") else ""
    return f"{grid['search']['model']} on {grid['search']['data']}{found}"


def draw(table: Mapping[str, Any], file: str | os.PathLike[str]) -> Path:
    """The figure as a file: .svg, .pdf or .png."""
    return write(figure(table), file)
