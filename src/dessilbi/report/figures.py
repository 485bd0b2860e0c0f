"""The page's figures for papers, with matplotlib: also what `path.plot()` and `sel.plot()` return.

Figures are made without pyplot: they belong to nobody's global state, and show in a notebook by themselves.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import numpy as np

from dessilbi import files
from dessilbi.path import QUANTILES, Path
from dessilbi.report.contents import Target, columns, history, widths_of
from dessilbi.selection import Selection
from dessilbi.training.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREY, LIGHT, INK = "#0b62b8", "#b8560a", "#9aa2ac", "#cfd6de", "#1b2430"
# Layers of more groups than this are drawn as pixels: thousands of lines make a file that no viewer scrolls.
_VECTOR = 64


def build_figures(targets: Iterable[Target], folder: Target) -> list[FilePath]:
    """Write the figures of run folders, comparisons and path files into a folder, each as SVG and as PDF.

    Returns:
        The files.
    """
    place = FilePath(folder)
    drawn = [(name, figure) for target in targets for name, figure in _figures(FilePath(target))]
    place.mkdir(parents=True, exist_ok=True)
    names = [name for name, _ in drawn]
    written = []
    for number, (name, figure) in enumerate(drawn):
        label = name if names.count(name) == 1 else f"{name}-{names[:number].count(name) + 1}"
        for kind in ("svg", "pdf"):
            data = io.BytesIO()
            figure.savefig(data, format=kind, dpi=300)
            file = place / f"{label}.{kind}"
            files.write_atomically(file, data.getvalue())
            written.append(file)
    return written


def _figures(place: FilePath) -> Iterator[tuple[str, Figure]]:
    if (place / "comparison.json").is_file():
        from dessilbi.applications.comparison import Comparison
        from dessilbi.report.comparison import figure

        _figure(1, 1)  # says what to install
        yield f"{place.resolve().name}-tickets", figure(Comparison.open(place).table())
        return
    run = None if place.is_file() else Run.open(place)
    label = place.stem if run is None else place.resolve().name
    path = Path.load(place) if run is None else Path.load(run.path_file) if run.path_file.is_file() else None
    if path is not None and len(path):
        yield f"{label}-path", path_figure(path)
        yield f"{label}-keep", keep_figure({name: float(path.keep(name)[-1]) for name in path.names})
        yield f"{label}-structure", structure_figure([(name, *widths_of(path, name)) for name in path.names])
        yield f"{label}-norms", norms_figure(path)
    metrics = columns(run.metrics()) if run is not None else {}
    if metrics or path is not None:
        yield f"{label}-training", training_figure(metrics, columns(path.points) if path is not None else {})
    if run is not None and run.selection_file.is_file():
        yield f"{label}-pruned", selection_figure(Selection.load(run.selection_file))


def path_figure(path: Path) -> Figure:
    """The solution path: ‖Γ_g‖ above ‖W_g‖ of every layer over epochs, blue while a group is in the support of Γ.

    Where every weight is a group, quantiles of all weights instead.
    """
    if not len(path):
        raise ValueError("this path has no points yet: call record(point) first")
    layers = path.names
    across = min(3, len(layers))
    down = math.ceil(len(layers) / across)
    figure = _figure(3.4 * across, 3.0 * down)
    axes = figure.subplots(2 * down, across, squeeze=False, sharex=True)
    x = np.array([point["point"] for point in path.points])
    for i, name in enumerate(layers):
        norms = path.norms(name)
        supports = None if path.kind(name) == "weight" else history(path, name)
        for row, values, symbol in ((0, norms.gamma, "Γ"), (1, norms.w, "W")):
            ax = axes[2 * (i // across) + row, i % across]
            if supports is None:
                _fan(ax, x, values.numpy(), BLUE if row == 0 else GREY)
            else:
                _lines(ax, x, values.numpy(), supports)
            _plain(ax, f"|{symbol}|" if supports is None else f"‖{symbol}‖")
            ax.set_xlim(x[0], max(x[-1], x[0] + 1e-9))
            ax.set_ylim(bottom=0)
        axes[2 * (i // across), i % across].set_title(_short(name), fontsize=9)
    for ax in axes.ravel()[:]:
        ax.set_visible(bool(ax.lines or ax.collections))
    for i in range(max(0, len(layers) - across), len(layers)):
        ax = axes[2 * (i // across) + 1, i % across]
        ax.set_xlabel("epoch", fontsize=8)
        ax.tick_params(labelbottom=True)
    return figure


def _lines(ax: Axes, x: np.ndarray, values: np.ndarray, supports: np.ndarray) -> None:
    from matplotlib.collections import LineCollection

    for selected, colour in ((False, GREY), (True, BLUE)):
        pieces = []
        for g in range(values.shape[1]):
            # Where stretches of the one state begin and end, as points of the path.
            inside = np.concatenate([[False], supports[1:, g] == selected, [False]])
            edges = np.flatnonzero(np.diff(inside))
            for begin, end in zip(edges[::2], edges[1::2], strict=True):
                pieces.append(np.column_stack([x[begin : end + 1], values[begin : end + 1, g]]))
        many = values.shape[1] > _VECTOR
        ax.add_collection(
            LineCollection(pieces, colors=colour, linewidths=0.5 if many else 0.8, alpha=0.6, rasterized=many)
        )
    ax.autoscale_view()


def _fan(ax: Axes, x: np.ndarray, values: np.ndarray, colour: str) -> None:
    for low, high, alpha in ((0.01, 0.99, 0.15), (0.05, 0.95, 0.2), (0.25, 0.75, 0.35)):
        ax.fill_between(x, values[:, QUANTILES.index(low)], values[:, QUANTILES.index(high)], color=colour, alpha=alpha,
                        linewidth=0)  # fmt: skip
    ax.plot(x, values[:, QUANTILES.index(0.5)], color=colour, linewidth=1)


def selection_figure(sel: Selection) -> Figure:
    """The fraction kept of every layer."""
    return keep_figure(sel.per_layer())


def keep_figure(keeps: Mapping[str, float]) -> Figure:
    """Keep by layer, as bars."""
    figure = _figure(5.2, 0.6 + 0.22 * max(3, len(keeps)))
    ax = figure.subplots()
    rows = np.arange(len(keeps))
    ax.barh(rows, [1.0] * len(keeps), color=LIGHT, height=0.66)
    ax.barh(rows, list(keeps.values()), color=BLUE, height=0.66)
    for row, keep in enumerate(keeps.values()):
        ax.text(1.02, row, f"{100 * keep:.1f} %", va="center", fontsize=7, color=INK)
    ax.set_yticks(rows, [_short(name) for name in keeps], fontsize=7)
    ax.set_xlim(0, 1.16)
    ax.set_xticks([])
    ax.invert_yaxis()
    ax.set_title("keep ratio by layer", fontsize=9)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    return figure


def structure_figure(layers: Sequence[tuple[str, int, int]]) -> Figure:
    """The selected network inside the dense one: a bar a layer, as high as it is wide; × where nothing is left."""
    figure = _figure(max(4.0, 0.34 * len(layers)), 3.0)
    ax = figure.subplots()
    columns_ = np.arange(len(layers))
    ax.bar(columns_, [width for _, width, _ in layers], color=LIGHT, width=0.74, label="dense")
    ax.bar(columns_, [wide for *_, wide in layers], color=BLUE, width=0.74, label="selected")
    for column, (_, width, wide) in enumerate(layers):
        ax.text(column, width, str(wide) if wide else "×", ha="center", va="bottom", fontsize=7, color=INK)
    ax.set_xticks(columns_, [_short(name) for name, *_ in layers], rotation=60, ha="right", fontsize=7)
    _plain(ax, "filters, neurons")
    ax.legend(fontsize=7, frameon=False)
    return figure


def norms_figure(path: Path, at: int = -1) -> Figure:
    """How ‖V_g‖ and ‖W_g‖ are distributed in every layer: the middle half, 5–95 %, and the threshold λ."""
    figure = _figure(max(6.0, 0.6 * len(path.names)), 3.2)
    lam = path.points[at]["lam"]
    for ax, which, symbol in zip(figure.subplots(1, 2), ("v", "w"), "VW", strict=True):
        stats = []
        for name in path.names:
            values = getattr(path.norms(name), which)[at].numpy()
            levels = (0.05, 0.25, 0.5, 0.75, 0.95)
            if path.kind(name) == "weight":
                found = [values[QUANTILES.index(q)] for q in levels]
            else:
                found = list(np.quantile(values[np.isfinite(values)], levels))
            stats.append(dict(zip(("whislo", "q1", "med", "q3", "whishi"), found, strict=True), fliers=[]))
        ax.bxp(stats, showfliers=False, widths=0.6, patch_artist=True, boxprops={"facecolor": LIGHT, "edgecolor": GREY},
               medianprops={"color": INK}, whiskerprops={"color": GREY}, capprops={"color": GREY})  # fmt: skip
        ax.set_xticks(np.arange(1, len(stats) + 1), [_short(name) for name in path.names], rotation=60, ha="right",
                      fontsize=7)  # fmt: skip
        if which == "v" and math.isfinite(lam):
            ax.axhline(lam, color=ORANGE, linewidth=1, linestyle="--", label="λ")
            ax.legend(fontsize=7, frameon=False)
        _plain(ax, f"‖{symbol}‖")
    return figure


def training_figure(metrics: Mapping[str, Sequence[Any]], points: Mapping[str, Sequence[Any]]) -> Figure:
    """Accuracy of W and of its selection, loss, and λ over the run."""
    x, known = (metrics["epoch"], metrics) if metrics else (points["point"], points)
    figure = _figure(9.6, 2.6)
    accuracy, loss, threshold = figure.subplots(1, 3)
    for ax, lines, scale, label in (
        (accuracy, (("dense", ORANGE, "-"), ("sparse", BLUE, "--")), 100, "accuracy, %"),
        (loss, (("loss", ORANGE, "-"), ("test_loss", BLUE, "--")), 1, "loss"),
    ):
        for name, colour, style in lines:
            if any(value is not None for value in known.get(name, ())):
                values = [np.nan if value is None else scale * value for value in known[name]]
                ax.plot(x, values, color=colour, linestyle=style, label=name.replace("_", " "))
        _plain(ax, label)
        if ax.lines:
            ax.legend(fontsize=7, frameon=False)
    if points:
        threshold.plot(points["point"], points["lam"], color=INK)
    _plain(threshold, "λ")
    for ax in (accuracy, loss, threshold):
        ax.set_xlabel("epoch", fontsize=8)
    return figure


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ImportError(f"{error}: figures need matplotlib: pip install 'dessilbi[plot]'") from None

    class Shown(Figure):
        """A figure that a notebook shows, with or without pyplot."""

        def _repr_png_(self) -> bytes:
            data = io.BytesIO()
            self.savefig(data, format="png", dpi=110)
            return data.getvalue()

    return Shown(figsize=(width, height), layout="constrained")


def _plain(ax: Axes, label: str) -> None:
    ax.set_ylabel(label, fontsize=8)
    ax.tick_params(labelsize=7, length=2)
    ax.grid(alpha=0.25, linewidth=0.5)
    ax.spines[["top", "right"]].set_visible(False)


def _short(name: str) -> str:
    return name.removesuffix(".weight")
