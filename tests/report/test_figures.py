"""Figures for papers and notebooks: what is drawn against what is in the files."""

import itertools
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dessilbi import Path as SolutionPath
from dessilbi import Selection, select
from dessilbi.applications.comparison import Comparison
from dessilbi.path import QUANTILES
from dessilbi.report import build_figures
from dessilbi.report.figures import training_figure, write
from dessilbi.training.run import Run

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'dessilbi[plot]'")

BLUE, GREY = (11, 98, 184), (154, 162, 172)


@pytest.fixture(scope="module")
def path(unscaled: Run) -> SolutionPath:
    return SolutionPath.load(unscaled.path_file)


def stretches(ax: Any) -> dict[tuple[int, ...], list[np.ndarray]]:
    """The pieces of lines of each colour."""
    return {
        tuple(np.rint(255 * c.get_colors()[0][:3]).astype(int).tolist()): [np.asarray(s) for s in c.get_segments()]
        for c in ax.collections
    }


@pytest.mark.parametrize("along", ["epoch", "time"])
def test_the_solution_path_is_the_norms_in_the_colours_of_the_support(path: SolutionPath, along: str) -> None:
    figure = path.plot(along=along)
    assert [ax.get_title() for ax in figure.axes if ax.get_title()] == [n.removesuffix(".weight") for n in path.names]
    x = [point["point" if along == "epoch" else "time"] for point in path.points]
    titled = {ax.get_title(): i for i, ax in enumerate(figure.axes) if ax.get_title()}
    across = len(path.names)
    for name in path.names:
        supports = np.stack([path.support(name, k).numpy() for k in range(len(path))])
        first = titled[name.removesuffix(".weight")]
        for which, ax in (("gamma", figure.axes[first]), ("w", figure.axes[first + across])):
            values = getattr(path.norms(name), which).numpy()
            # Every step of every group from one point to the next, in the colour of its end.
            wanted = {
                (x[k - 1], float(values[k - 1, g]), x[k], float(values[k, g]), BLUE if supports[k, g] else GREY)
                for k in range(1, len(x))
                for g in range(values.shape[1])
            }
            found = {
                (*map(float, start), *map(float, end), colour)
                for colour, pieces in stretches(ax).items()
                for piece in pieces
                for start, end in itertools.pairwise(piece)
            }
            assert {(round(a, 9), b, round(c, 9), d, e) for a, b, c, d, e in found} == {
                (round(a, 9), b, round(c, 9), d, e) for a, b, c, d, e in wanted
            }


def test_single_weights_are_drawn_as_quantiles(run: Run) -> None:
    path = SolutionPath.load(run.path_file)
    (name,) = (n for n in path.names if path.kind(n) == "weight")
    figure = path.plot()
    first = next(i for i, ax in enumerate(figure.axes) if ax.get_title() == name.removesuffix(".weight"))
    (median,) = figure.axes[first].lines
    np.testing.assert_allclose(median.get_ydata(), path.norms(name).gamma[:, QUANTILES.index(0.5)].numpy())
    tops = [band.get_paths()[0].vertices[:, 1].max() for band in figure.axes[first].collections]
    wanted = [float(path.norms(name).gamma[:, QUANTILES.index(q)].max()) for q in (0.99, 0.95, 0.75)]
    assert tops == pytest.approx(wanted)


def test_a_notebook_shows_figures_by_themselves(path: SolutionPath) -> None:
    for figure in (path.plot(), select(path, keep=0.5).plot()):
        image = figure._repr_png_()  # what IPython asks objects for
        assert image[:8] == b"\x89PNG\r\n\x1a\n"
        assert len(image) > 3000


def test_a_selection_is_plotted_as_its_fractions() -> None:
    masks = {"a.weight": torch.tensor([True, False, False, False]), "b.weight": torch.tensor([[True, True, False]])}
    (ax,) = Selection(masks).plot().axes
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b"]
    assert [t.get_text() for t in ax.texts] == ["25.0 %", "66.7 %"]
    widths = [bar.get_width() for bar in ax.patches]
    assert widths == pytest.approx([1, 1, 0.25, 2 / 3])


def test_what_there_is_to_plot_is_said(tmp_path: Path) -> None:
    net = torch.nn.Linear(3, 3)
    from dessilbi import DessiLBI

    empty = SolutionPath(net, DessiLBI(net.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="no points yet"):
        empty.plot()
    empty.save(tmp_path / "empty.path")
    with pytest.raises(ValueError, match="nothing to draw yet"):
        build_figures([tmp_path / "empty.path"], tmp_path / "figures")
    assert not (tmp_path / "figures").exists()
    empty.record(0)
    with pytest.raises(ValueError, match=r"along='steps': must be 'epoch' or 'time'"):
        empty.plot(along="steps")


def test_training_is_drawn_as_it_was_measured(unscaled: Run, path: SolutionPath) -> None:
    metrics = [json.loads(line) for line in (unscaled.folder / "metrics.jsonl").read_text().splitlines()]
    columns = {name: [row[name] for row in metrics] for name in metrics[0]}
    drawn = {
        ax.get_ylabel(): {line.get_label(): line for line in ax.lines} for ax in training_figure(columns, path).axes
    }
    assert set(drawn) == {"accuracy, %", "loss", "step size α", "groups kept, %", "λ"}
    assert drawn["accuracy, %"]["dense"].get_ydata() == pytest.approx([100 * row["dense"] for row in metrics])
    assert drawn["accuracy, %"]["sparse"].get_ydata() == pytest.approx([100 * row["sparse"] for row in metrics])
    assert drawn["loss"]["loss"].get_ydata() == pytest.approx([row["loss"] for row in metrics])
    (lam,) = drawn["λ"].values()
    assert lam.get_ydata() == pytest.approx([point["lam"] for point in path.points])
    (keep,) = drawn["groups kept, %"].values()
    sizes = [path.support(name).numel() for name in path.names]
    wanted = [100 * sum(int(path.support(name, k).sum()) for name in path.names) / sum(sizes) for k in range(len(path))]
    assert keep.get_ydata() == pytest.approx(wanted)


def test_every_figure_is_there_as_svg_and_as_pdf(
    unscaled: Run, pruned: Run, grown: Run, compared: Comparison, tmp_path: Path
) -> None:
    written = build_figures([unscaled.folder, pruned.folder, grown.folder, compared.folder], tmp_path)
    names = {file.stem for file in written}
    assert {f"unscaled-{n}" for n in ("path", "keep", "structure", "norms", "training")} <= names
    assert {"pruned-pruned-table", "pruned-pruned", "pruned-pruned-keep", "grown-growth"} <= names
    assert {f"runs-{n}" for n in ("compared", "norms", "configurations", "outcomes")} <= names
    assert {f"tickets-{n}" for n in ("tickets", "table", "costs")} <= names
    assert len(written) == 2 * len(names)
    for file in written:
        if file.suffix == ".svg":
            root = ElementTree.parse(file).getroot()
            assert root.tag == "{http://www.w3.org/2000/svg}svg"
            assert float(root.attrib["width"].removesuffix("pt")) > 50
        else:
            assert file.read_bytes()[:5] == b"%PDF-"
            assert b"/Type3" not in file.read_bytes(), "fonts that papers may not have"


def test_the_same_figure_is_the_same_file(path: SolutionPath, tmp_path: Path) -> None:
    for kind in ("svg", "pdf"):
        one, other = (write(path.plot(), tmp_path / f"{name}.{kind}").read_bytes() for name in "ab")
        assert one == other
    with pytest.raises(ValueError, match=r"a\.jpg: the figure's name must end in \.svg, \.pdf or \.png"):
        write(path.plot(), tmp_path / "a.jpg")
