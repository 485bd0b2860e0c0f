"""The figure of a comparison: accuracy against what is kept, one line a method."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dessilbi import files

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Of Okabe and Ito: told apart by those who do not see red and green alike. Markers tell them apart in print.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#000000", "#8c8c8c")
_MARKERS = "osD^vPX*"


def figure(table: Mapping[str, Any]) -> Figure:
    """Mean accuracy over the seeds, with the standard deviation as a bar; what was not pruned is a band."""
    from matplotlib.figure import Figure

    grid = table["grid"]
    fig = Figure(figsize=(6.4, 4.2), layout="constrained")
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
                label=method,
                color=COLOURS[i % len(COLOURS)],
                marker=_MARKERS[i % len(_MARKERS)],
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
    axes.set_title(f"{grid['search']['model']} on {grid['search']['data']}", fontsize=10)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    return fig


def draw(table: Mapping[str, Any], file: str | os.PathLike[str]) -> None:
    """The figure as a file: .svg, .pdf or .png."""
    import io

    place, made = Path(file), io.BytesIO()
    kind = place.suffix.removeprefix(".").lower()
    if kind not in ("svg", "pdf", "png"):
        raise ValueError(f"{place}: the figure's name must end in .svg, .pdf or .png")
    figure(table).savefig(made, format=kind, dpi=150)
    files.write_atomically(place, made.getvalue())
