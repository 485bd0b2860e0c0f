"""How a network grew, as plain data and as a figure: widths over time, accuracy against size, beside the paper's."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, NamedTuple

from dessilbi import files
from dessilbi.report.figures import BLUE, GREY, ORANGE, blank_figure, plain_axes
from dessilbi.training.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class _Paper(NamedTuple):
    """What the paper has of a network that it grew: sizes with accuracies, and the last widths of its convolutions."""

    sizes: tuple[tuple[float, float], ...]
    widths: tuple[int, ...] = ()


_PAPER = {
    ("vgg16", "cifar10"): _Paper(
        ((2.96e6, 0.9380),), (32, 96, 126, 220, 242, 200, 182, 261, 151, 105, 88, 88, 80)
    ),
    ("resnet56", "cifar10"): _Paper(((2.69e6, 0.9482),)),
    ("resnet56", "cifar100"): _Paper(((3.37e6, 0.7686),)),
    ("vgg19", "cifar10"): _Paper(
        ((0.11e6, 0.8854), (0.20e6, 0.9105), (0.40e6, 0.9249), (0.82e6, 0.9362), (1.41e6, 0.9372), (2.00e6, 0.9403)),
        (17, 59, 102, 186, 308, 284, 128, 72, 48, 28, 20, 18, 12, 12, 12, 18),
    ),
}  # fmt: skip


def growth(run: Run) -> dict[str, Any]:
    """The history of a network that grew, for tables and pages.

    The fields of growth.json (see :mod:`dessilbi.applications.grow`), and `layers`: for each its `name`, the `widths`
    it had in every stage, whether it `grows` at all, and where the paper has it the width `paper` that it had there in
    the end; and `paper`, a list of sizes: `parameters` and `accuracy`.
    """
    from dessilbi.applications.grow import read_growth

    found = read_growth(run)
    paper = _PAPER.get((run.config.model, run.config.data), _Paper(()))
    stages = found["stages"]
    growing = {layer for stream in found["streams"] for layer in stream}
    names = list(stages[0]["widths"]) if stages else []
    return {
        **found,
        "layers": [
            {
                "name": name,
                "widths": [stage["widths"][name] for stage in stages],
                "grows": name in growing,
                "paper": paper.widths[i] if i < len(paper.widths) else None,
            }
            for i, name in enumerate(names)
        ],
        "paper": [{"parameters": size, "accuracy": accuracy} for size, accuracy in paper.sizes],
    }


def growth_figure(run: Run) -> Figure:
    """Widths of the layers over the epochs, early layers dark and late ones light; accuracy against size."""
    found = growth(run)
    stages, layers = found["stages"], [layer for layer in found["layers"] if layer["grows"]]
    if not stages:
        raise ValueError(f"{run.folder}: has no stage of growth yet: let it train to its first decision")
    figure = blank_figure(9.6, 3.2)
    widths, accuracy = figure.subplots(1, 2)
    epochs = [stage["epoch"] for stage in stages]
    for i, layer in enumerate(layers):
        colour = _shade(i, len(layers))
        # The width of a stage is that of the epochs up to its end.
        widths.step([0, *epochs], [layer["widths"][0], *layer["widths"]], where="pre", color=colour, linewidth=1,
                    label=layer["name"])  # fmt: skip
    plain_axes(widths, "filters, neurons")
    widths.set_xlabel("epoch", fontsize=8)
    if len(layers) <= 20:
        widths.legend(fontsize=5, frameon=False, ncols=2)
    sizes = [stage["parameters"] for stage in stages]
    accuracy.plot(sizes, [100 * stage["accuracy"] for stage in stages], color=BLUE, marker="o", markersize=3,
                  linewidth=1, label=run.folder.resolve().name)  # fmt: skip
    if found["paper"]:
        accuracy.plot(
            [point["parameters"] for point in found["paper"]],
            [100 * point["accuracy"] for point in found["paper"]],
            color=ORANGE, marker="s", markersize=3, linestyle="--", linewidth=1, label="paper",
        )  # fmt: skip
    accuracy.set_xscale("log")
    plain_axes(accuracy, "accuracy, %")
    accuracy.set_xlabel("parameters", fontsize=8)
    accuracy.legend(fontsize=7, frameon=False)
    return figure


def draw(folder: FilePath, file: FilePath) -> FilePath:
    """Write the figure of a run to a file, whose ending says what it is."""
    kinds = ("svg", "pdf", "png")
    kind = file.suffix.removeprefix(".").lower()
    if kind not in kinds:
        raise ValueError(f"{file}: a figure ends in .{', .'.join(kinds)}")
    data = io.BytesIO()
    growth_figure(Run.open(folder)).savefig(data, format=kind, dpi=300)
    files.write_atomically(file, data.getvalue())
    return file


def _shade(i: int, count: int) -> Sequence[float] | str:
    """From blue to grey."""
    if count < 2:
        return BLUE
    dark, light = ([int(c[k : k + 2], 16) / 255 for k in (1, 3, 5)] for c in (BLUE, GREY))
    part = i / (count - 1)
    return [(1 - part) * a + part * b for a, b in zip(dark, light, strict=True)]
