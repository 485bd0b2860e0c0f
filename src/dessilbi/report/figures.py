"""The page's figures for papers, with matplotlib: also what `path.plot()` and `sel.plot()` return.

Figures are made without pyplot: they belong to nobody's global state, and show in a notebook by themselves. Files
of one figure are the same bytes.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dessilbi import files
from dessilbi.path import QUANTILES, Path
from dessilbi.report.contents import Target, columns, history, of_selection, widths_of
from dessilbi.selection import Selection
from dessilbi.training.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREY, LIGHT, INK = "#0b62b8", "#b8560a", "#9aa2ac", "#cfd6de", "#1b2430"
KINDS = ("svg", "pdf", "png")
# Layers of more groups than this are drawn as pixels: thousands of lines make a file that no viewer scrolls.
_VECTOR = 64
_BOX = (0.05, 0.25, 0.5, 0.75, 0.95)
# What would tell one file from the next.
_DATES = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}


class Source(NamedTuple):
    """What a run folder or a path file has."""

    name: str
    run: Run | None
    path: Path | None

    @classmethod
    def open(cls, place: FilePath) -> Source:
        if place.is_file():
            return cls(place.stem, None, Path.load(place))
        run = Run.open(place)
        path = Path.load(run.path_file) if run.path_file.is_file() else None
        return cls(place.resolve().name, run, path)

    def metrics(self) -> dict[str, list[Any]]:
        """By epoch, as columns; of a path without a run what its points have."""
        found = columns(self.run.metrics()) if self.run is not None else {}
        if found or self.path is None:
            return found
        points = columns(self.path.points)
        return {"epoch": points.get("point", []), **points}


def build_figures(targets: Iterable[Target], folder: Target) -> list[FilePath]:
    """Write the figures of run folders, comparisons and path files into a folder, each as SVG and as PDF.

    Several runs are drawn beside each other as well.

    Returns:
        The files.
    """
    place, drawn = FilePath(folder), _figures([FilePath(target) for target in targets])
    written: list[FilePath] = []
    for name, figure in drawn:
        place.mkdir(parents=True, exist_ok=True)
        label, number = name, 1
        while place / f"{label}.svg" in written:
            number += 1
            label = f"{name}-{number}"
        written += [write(figure, place / f"{label}.{kind}") for kind in ("svg", "pdf")]
    if not written:
        raise ValueError("there is nothing to draw yet: the figures come with the first recorded point")
    return written


def write(figure: Figure, file: Target) -> FilePath:
    """Write a figure; the ending of the name says as what: .svg, .pdf or .png."""
    place, data = FilePath(file), io.BytesIO()
    kind = place.suffix.removeprefix(".").lower()
    if kind not in KINDS:
        raise ValueError(f"{place}: the figure's name must end in .svg, .pdf or .png")
    figure.savefig(data, format=kind, dpi=300)
    files.write_atomically(place, data.getvalue())
    return place


def _figures(places: Sequence[FilePath]) -> Iterator[tuple[str, Figure]]:
    from dessilbi.report import comparison, several

    grids = [place for place in places if (place / "comparison.json").is_file()]
    sources = [Source.open(place) for place in places if place not in grids]
    for source in sources:
        yield from ((f"{source.name}-{name}", figure) for name, figure in _of_source(source))
    if len(sources) > 1:
        yield from ((f"runs-{name}", figure) for name, figure in several.figures(sources))
    for place in grids:
        yield from ((f"{place.resolve().name}-{name}", figure) for name, figure in comparison.figures(place))


def _of_source(source: Source) -> Iterator[tuple[str, Figure]]:
    run, path, metrics = source.run, source.path, source.metrics()
    if path is not None and len(path):
        yield "path", path_figure(path)
        yield "keep", keep_figure({name: float(path.keep(name)[-1]) for name in path.names})
        yield "structure", structure_figure([(name, *widths_of(path, name)) for name in path.names])
        yield "norms", norms_figure(path, scaling_of(source))
    if metrics.get("epoch"):
        yield "training", training_figure(metrics, path)
    if run is None:
        return
    if run.selection_file.is_file():
        sel = Selection.load(run.selection_file)
        yield "pruned-keep", selection_figure(sel)
        yield "pruned", structure_figure([(x["name"], x["width"], x["wide"]) for x in of_selection(sel)])
    if run.table_file.is_file():
        from dessilbi.applications.sparsify import read_table
        from dessilbi.report.tables import pruned_figure

        yield "pruned-table", pruned_figure(read_table(run))
    if run.growth_file.is_file():
        from dessilbi.report.growth import growth, growth_figure

        if growth(run)["stages"]:
            yield "growth", growth_figure(run)


def path_figure(path: Path, along: str = "epoch") -> Figure:
    """The solution path: ‖Γ_g‖ above ‖W_g‖ of every layer, blue while a group is in the support of Γ.

    Where every weight is a group, quantiles of all weights instead. `along` is "epoch", or "time" for the path time.
    """
    if not len(path):
        raise ValueError("this path has no points yet: call record(point) first")
    if along not in ("epoch", "time"):
        raise ValueError(f"along={along!r}: must be 'epoch' or 'time'")
    layers = path.names
    across = min(3, len(layers))
    down = math.ceil(len(layers) / across)
    figure = blank_figure(3.4 * across, 3.0 * down)
    axes = figure.subplots(2 * down, across, squeeze=False, sharex=True)
    x = np.array([point["point" if along == "epoch" else "time"] for point in path.points])
    for i, name in enumerate(layers):
        norms = path.norms(name)
        supports = None if path.kind(name) == "weight" else history(path, name)
        for row, values, symbol in ((0, norms.gamma, "Γ"), (1, norms.w, "W")):
            ax = axes[2 * (i // across) + row, i % across]
            if supports is None:
                _fan(ax, x, values.numpy(), BLUE if row == 0 else GREY)
            else:
                _lines(ax, x, values.numpy(), supports)
            plain_axes(ax, f"|{symbol}|" if supports is None else f"‖{symbol}‖")
            ax.set_xlim(x[0], max(x[-1], x[0] + 1e-9))
            ax.set_ylim(bottom=0)
        axes[2 * (i // across), i % across].set_title(_short(name), fontsize=9)
    for ax in axes.ravel():
        ax.set_visible(bool(ax.lines or ax.collections))
    for i in range(max(0, len(layers) - across), len(layers)):
        ax = axes[2 * (i // across) + 1, i % across]
        ax.set_xlabel("epoch" if along == "epoch" else "path time", fontsize=8)
        ax.tick_params(labelbottom=True)
    return figure


def _lines(ax: Axes, x: np.ndarray, values: np.ndarray, supports: np.ndarray) -> None:
    """A line a group: from one point to the next in the colour of the latter."""
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
    figure = blank_figure(5.2, 0.6 + 0.22 * max(3, len(keeps)))
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
    figure = blank_figure(max(4.0, 0.34 * len(layers)), 3.0)
    ax = figure.subplots()
    columns_ = np.arange(len(layers))
    ax.bar(columns_, [width for _, width, _ in layers], color=LIGHT, width=0.74, label="dense")
    ax.bar(columns_, [wide for *_, wide in layers], color=BLUE, width=0.74, label="selected")
    for column, (_, width, wide) in enumerate(layers):
        ax.text(column, width, str(wide) if wide else "×", ha="center", va="bottom", fontsize=7, color=INK)
    ax.set_xticks(columns_, [_short(name) for name, *_ in layers], rotation=60, ha="right", fontsize=7)
    plain_axes(ax, "filters, neurons")
    ax.legend(fontsize=7, frameon=False)
    return figure


def norms_figure(path: Path, scaling: str = "", at: int = -1) -> Figure:
    """How ‖V_g‖ and ‖W_g‖ are distributed in every layer: the middle half, 5–95 %, and the threshold λ."""
    figure = blank_figure(max(6.0, 0.6 * len(path.names)), 3.2)
    for ax, which in zip(figure.subplots(1, 2), ("v", "w"), strict=True):
        boxes(ax, path, which, at)
    if scaling:
        figure.suptitle(scaling, fontsize=9)
    return figure


def boxes(ax: Axes, path: Path, which: str, at: int = -1) -> None:
    """The distribution of a norm ("v" or "w") in every layer, as a box each."""
    stats = []
    for name in path.names:
        values = getattr(path.norms(name), which)[at].numpy()
        if path.kind(name) == "weight":
            found = [values[QUANTILES.index(q)] for q in _BOX]
        else:
            finite = values[np.isfinite(values)]
            found = list(np.quantile(finite, _BOX)) if finite.size else [math.nan] * len(_BOX)
        stats.append(dict(zip(("whislo", "q1", "med", "q3", "whishi"), found, strict=True), fliers=[]))
    ax.bxp(stats, showfliers=False, widths=0.6, patch_artist=True, boxprops={"facecolor": LIGHT, "edgecolor": GREY},
           medianprops={"color": INK}, whiskerprops={"color": GREY}, capprops={"color": GREY})  # fmt: skip
    ax.set_xticks(np.arange(1, len(stats) + 1), [_short(name) for name in path.names], rotation=60, ha="right",
                  fontsize=7)  # fmt: skip
    lam = path.points[at]["lam"]
    if which == "v" and math.isfinite(lam):
        ax.axhline(lam, color=ORANGE, linewidth=1, linestyle="--", label="λ")
        ax.legend(fontsize=7, frameon=False)
    plain_axes(ax, f"‖{which.upper()}‖")


def scaling_of(source: Source) -> str:
    """Whether a run is one with magnitude scaling, in words; nothing where that is not known."""
    if source.run is None or not source.run.config.ours:
        return ""
    return f"{'with' if source.run.config.scaling else 'without'} magnitude scaling"


def training_figure(metrics: Mapping[str, Sequence[Any]], path: Path | None) -> Figure:
    """Over the epochs: accuracy of W and of what is selected of it, loss, groups kept, λ, and the step size."""
    figure = blank_figure(9.6, 4.8)
    axes = iter(figure.subplots(2, 3).ravel())
    epochs = metrics["epoch"]
    for lines, scale, label in (
        ((("dense", ORANGE, "-"), ("sparse", BLUE, "--")), 100, "accuracy, %"),
        ((("loss", ORANGE, "-"), ("test_loss", BLUE, "--")), 1, "loss"),
        ((("lr", INK, "-"),), 1, "step size α"),
    ):
        shown = [line for line in lines if any(value is not None for value in metrics.get(line[0], ()))]
        if not shown:
            continue
        ax = next(axes)
        for name, colour, style in shown:
            ax.plot(epochs, numbers(metrics[name], scale), color=colour, linestyle=style, label=name.replace("_", " "))
        plain_axes(ax, label)
        if len(lines) > 1:
            ax.legend(fontsize=7, frameon=False)
    if path is not None and len(path):
        points = columns(path.points)
        for values, label in ((100 * path.keep().numpy(), "groups kept, %"), (numbers(points["lam"]), "λ")):
            ax = next(axes)
            ax.plot(points["point"], values, color=BLUE if "kept" in label else INK)
            plain_axes(ax, label)
    for ax in axes:
        ax.remove()
    for ax in figure.axes:
        ax.set_xlabel("epoch", fontsize=8)
    return figure


def numbers(values: Sequence[Any], scale: float = 1.0) -> np.ndarray:
    """Values to draw: what was not measured or is not finite leaves a gap."""
    found = np.array([math.nan if value is None else scale * value for value in values], dtype=float)
    return np.where(np.isfinite(found), found, math.nan)


@cache
def _class() -> type[Figure]:
    """Figure, as it is here."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ImportError(f"{error}: figures need matplotlib: pip install 'dessilbi[plot]'") from None

    class Shown(Figure):
        """A figure that a notebook shows, with or without pyplot, and whose files have no date or random names."""

        def savefig(self, fname: Any, **options: Any) -> None:
            kind = options.get("format") or str(fname).rpartition(".")[2].lower()
            options["metadata"] = {**_DATES.get(kind, {}), **(options.get("metadata") or {})}
            with rc_context({"svg.hashsalt": "dessilbi", "pdf.fonttype": 42}):
                super().savefig(fname, **options)

        def _repr_png_(self) -> bytes:
            data = io.BytesIO()
            self.savefig(data, format="png", dpi=110)
            return data.getvalue()

    return Shown


def blank_figure(width: float, height: float) -> Figure:
    return _class()(figsize=(width, height), layout="constrained")


def plain_axes(ax: Axes, label: str) -> None:
    ax.set_ylabel(label, fontsize=8)
    ax.tick_params(labelsize=7, length=2)
    ax.grid(alpha=0.25, linewidth=0.5)
    ax.spines[["top", "right"]].set_visible(False)


def _short(name: str) -> str:
    return text(name.removesuffix(".weight"))


def text(name: str) -> str:
    """A name as text: matplotlib takes what stands between two $ for mathematics, and what begins with _ for hidden."""
    return (" " if name.startswith("_") else "") + name.replace("$", r"\$")
