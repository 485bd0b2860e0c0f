"""The figures of several runs beside each other: curves, distributions, growth, and what differs in their settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dessilbi.report.comparison import COLOURS, MARKERS
from dessilbi.report.contents import columns, told
from dessilbi.report.figures import Source, blank_figure, boxes, numbers, plain_axes, scaling_of, text
from dessilbi.report.tables import percent, table_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CURVES = {"dense": "dense accuracy, %", "sparse": "sparse accuracy, %", "keep": "groups kept, %"}


def figures(sources: Sequence[Source]) -> Iterator[tuple[str, Figure]]:
    """Those that these runs have data for, by name."""
    shown = [name for name in _CURVES if any(len(_curve(source, name)[0]) for source in sources)]
    if shown:
        yield "compared", curves_figure(sources, shown)
    drawn = [source for source in sources if source.path is not None and len(source.path)]
    if len(drawn) > 1:
        yield "norms", norms_figure(drawn)
    grown = [source for source in sources if source.run is not None and source.run.growth_file.is_file()]
    if len(grown) > 1:
        yield "growth", growth_figure(grown)
    if sum(source.run is not None for source in sources) > 1:
        yield "configurations", differences_figure(sources)
    yield "outcomes", outcomes_figure(sources)


def curves_figure(sources: Sequence[Source], names: Sequence[str]) -> Figure:
    """What was measured over the epochs, a line a run."""
    figure = blank_figure(3.4 * len(names), 2.8)
    for ax, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for i, source in enumerate(sources):
            epochs, values = _curve(source, name)
            if len(epochs):
                ax.plot(epochs, values, label=text(source.name), linewidth=1.2, **_style(i))
        plain_axes(ax, _CURVES[name])
        ax.set_xlabel("epoch", fontsize=8)
        ax.legend(fontsize=7, frameon=False)
    return figure


def _curve(source: Source, name: str) -> tuple[Sequence[float], Sequence[float]]:
    """Epochs, and values in %; nothing where it was not measured."""
    if name == "keep" and source.path is not None:
        return columns(source.path.points).get("point", []), (100 * source.path.keep()).tolist()
    metrics = source.metrics()
    values = metrics.get(name, [])
    if all(value is None for value in values):
        return [], []
    return metrics["epoch"], numbers(values, 100).tolist()


def norms_figure(sources: Sequence[Source]) -> Figure:
    """‖V_g‖ by layer at the end of each path: with magnitude scaling it is of one size in all layers."""
    most = max(len(source.path.names) for source in sources if source.path is not None)
    figure = blank_figure(max(3.4, 0.3 * most) * min(2, len(sources)), 3.0 * -(-len(sources) // 2))
    axes = iter(figure.subplots(-(-len(sources) // 2), min(2, len(sources)), squeeze=False).ravel())
    for source, ax in zip(sources, axes, strict=False):
        assert source.path is not None
        boxes(ax, source.path, "v")
        words = scaling_of(source)
        ax.set_title(text(source.name) + (f", {words}" if words else ""), fontsize=9)
    for ax in axes:
        ax.remove()
    return figure


def growth_figure(sources: Sequence[Source]) -> Figure:
    """Accuracy against parameters, of runs that grew: a point a stage."""
    from dessilbi.applications.grow import read_growth

    figure = blank_figure(4.6, 3.2)
    ax: Axes = figure.subplots()
    for i, source in enumerate(sources):
        assert source.run is not None
        stages = read_growth(source.run)["stages"]
        ax.plot([stage["parameters"] for stage in stages], [100 * stage["accuracy"] for stage in stages],
                label=text(source.name), markersize=4, linewidth=1.2, marker=MARKERS[i % len(MARKERS)],
                **_style(i))  # fmt: skip
    ax.set_xscale("log")
    plain_axes(ax, "accuracy, %")
    ax.set_xlabel("parameters", fontsize=8)
    ax.legend(fontsize=7, frameon=False)
    return figure


def differences_figure(sources: Sequence[Source]) -> Figure:
    """The settings in which runs differ; marked where one is not that of the first run."""
    configured = [(source.name, source.run.config.to_dict()) for source in sources if source.run is not None]
    told_ = [{name: told(value) for name, value in config.items()} for _, config in configured]
    differing = [name for name in told_[0] if any(config.get(name) != told_[0][name] for config in told_)]
    rows = [["setting", *(name for name, _ in configured)]]
    rows += [[name, *(config.get(name, "–") for config in told_)] for name in differing]
    marked = {(i, j) for i, row in enumerate(rows) if i for j in range(2, len(row)) if row[j] != row[1]}
    same = f"{len(differing)} of {len(told_[0])} settings differ" if differing else "the settings are the same"
    return table_figure(rows, same, marked)


def outcomes_figure(sources: Sequence[Source]) -> Figure:
    """What came of each run."""
    rows = [["run", "status", "epoch", "dense accuracy", "sparse accuracy", "groups kept"]]
    for source in sources:
        metrics, last = source.metrics(), {}
        for name in ("epoch", "dense", "sparse", "keep"):
            last[name] = next((value for value in reversed(metrics.get(name, [])) if value is not None), None)
        if source.path is not None and len(source.path):
            last["keep"] = float(source.path.keep()[-1])
        epoch = "–" if last["epoch"] is None else f"{last['epoch']:g}"
        status = "–" if source.run is None else source.run.status
        rows.append([source.name, status, epoch, *(percent(last[name]) for name in ("dense", "sparse", "keep"))])
    return table_figure(rows)


def _style(i: int) -> dict[str, Any]:
    return {"color": COLOURS[i % len(COLOURS)], "linestyle": "-" if i < len(COLOURS) else "--"}
