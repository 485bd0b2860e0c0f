"""Several runs on one page, tickets, growth and pruning: what is on the screen against what is in the files."""

import csv
import itertools
import json
import math
import re
import statistics
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.report.conftest import Show
from tests.training.runs import SMALL

from dessilbi import Path as SolutionPath
from dessilbi import Selection
from dessilbi.applications.comparison import Comparison, Grid
from dessilbi.report import build_page
from dessilbi.training.run import Run


@pytest.fixture
def page(show: Show, all_file: Path) -> Any:
    return show(all_file)


def rows(page: Any, figure: str) -> list[list[str]]:
    found: list[list[str]] = page.locator(f"#{figure} table").first.evaluate(
        "table => [...table.rows].map(row => [...row.cells].map(cell => cell.textContent))"
    )
    return found


def drawn(page: Any, figure: str) -> list[list[float | None]]:
    """What the chart of a figure was given: x, and a line each."""
    page.locator(f"#{figure} .plot").scroll_into_view_if_needed()
    page.locator(f"#{figure} canvas").wait_for()
    data: list[list[float | None]] = page.locator(f"#{figure} .plot").evaluate(
        "host => host.chart.plot.data.map(d => [...d])"
    )
    return data


def saved(page: Any, figure: str) -> list[list[str]]:
    with page.expect_download() as waiting:
        page.locator(f"#{figure} .tools button").click()
    return list(csv.reader(Path(waiting.value.path()).read_text("utf-8").splitlines()))


def metrics(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]


# -- runs ----------------------------------------------------------------------------------------------------------


def test_what_differs_in_the_configurations_is_marked(
    page: Any, run: Run, unscaled: Run, pruned: Run, grown: Run
) -> None:
    configs = [tomllib.loads((r.folder / "config.toml").read_text()) for r in (run, unscaled, pruned, grown)]
    fields = [field for field in configs[0] if any(c.get(field) != configs[0].get(field) for c in configs)]
    head, *body = rows(page, "differences")
    assert head == ["setting", "plain", "unscaled", "pruned", "grown"]
    # A setting that is not in the file (such as keep = none) has its default; those in all files must be here.
    assert {"scaling", "linear", "keep_epochs"} <= {row[0] for row in body}
    assert set(fields) <= {row[0] for row in body}
    assert {row[0]: row[1:3] for row in body}["scaling"] == ["true", "false"]
    marked = page.locator("#differences td.other").evaluate_all(
        "cells => cells.map(c => [c.parentElement.cells[0].textContent, c.cellIndex])"
    )
    wanted = [[row[0], i] for row in body for i in range(2, 5) if row[i] != row[1]]
    assert marked == wanted
    assert page.locator("#differences .note").inner_text().startswith(f"{len(body)} of ")
    weights = page.locator("#differences td.other strong").evaluate_all(
        "all => all.map(e => +getComputedStyle(e).fontWeight)"
    )
    assert len(weights) == len(marked)  # seen without colours too
    assert min(weights) >= 600


def test_curves_of_runs_are_their_metrics(page: Any, run: Run, unscaled: Run, grown: Run) -> None:
    for figure, name in (("dense-compared", "dense"), ("sparse-compared", "sparse")):
        x, *lines = drawn(page, figure)
        for line, shown in zip(lines, (run, unscaled, grown), strict=True):  # the pruned one has not been trained
            found = [[e, v] for e, v in zip(x, line, strict=True) if v is not None]
            assert found == [[m["epoch"], m[name]] for m in metrics(shown)]
        head, *body = saved(page, figure)
        assert head == ["epoch", "plain", "unscaled", "grown"]
        assert [float(row[1]) for row in body if row[1]] == [m[name] for m in metrics(run)]


def test_the_end_of_every_run(page: Any, unscaled: Run) -> None:
    _, *body = rows(page, "outcomes")
    assert [row[0] for row in body] == ["plain", "unscaled", "pruned", "grown"]
    assert [row[1] for row in body] == ["finished", "finished", "new", "finished"]  # the pruned one was not trained
    last = metrics(unscaled)[-1]
    path = SolutionPath.load(unscaled.path_file)
    kept = sum(int(path.support(n).sum()) for n in path.names) / sum(path.support(n).numel() for n in path.names)
    assert body[1][2:6] == ["4", f"{100 * last['dense']:.2f} %", f"{100 * last['sparse']:.2f} %", f"{100 * kept:.2f} %"]


def test_norms_with_and_without_magnitude_scaling_stand_beside_each_other(page: Any, run: Run, unscaled: Run) -> None:
    for i, (shown, words) in enumerate(((run, "plain, with"), (unscaled, "unscaled, without"))):
        assert page.locator(f"#norms-of-{i} h3").inner_text() == f"‖V‖ by layer: {words} magnitude scaling"
        page.locator(f"#norms-of-{i}").scroll_into_view_if_needed()
        page.wait_for_function(f"document.querySelector('#norms-of-{i} svg title')?.textContent")
        tips = page.locator(f"#norms-of-{i} svg title").all_text_contents()
        path = SolutionPath.load(shown.path_file)
        for tip, name in zip(tips, path.names, strict=True):
            norms = path.norms(name).v
            wanted = float(norms[-1, 5]) if path.kind(name) == "weight" else float(np.median(norms[-1].numpy()))
            median = float(re.match(r".*: median (\S+),", tip)[1])  # type: ignore[index]
            assert median == pytest.approx(wanted, abs=0.51 * float(norms.max()) / 4095 + 5e-4 * wanted)


def test_another_run_may_be_chosen(page: Any, unscaled: Run) -> None:
    page.get_by_label("One run").select_option("unscaled")
    path = SolutionPath.load(unscaled.path_file)
    assert page.locator("#path h3").all_inner_texts() == [name.removesuffix(".weight") for name in path.names]
    assert page.get_by_label("Command", exact=True).inner_text() == "dessilbi train --run unscaled"


def test_runs_of_the_same_name_are_told_apart(show: Show, run: Run, tmp_path: Path) -> None:
    import shutil

    other = shutil.copytree(run.folder, tmp_path / "elsewhere" / "plain")
    page = show(build_page([run.folder, other], tmp_path / "page.html"))
    assert page.locator("#which option").all_inner_texts() == [str(run.folder), str(other)]
    assert page.locator("#differences .note").inner_text() == "The configurations are the same."


# -- pruning -------------------------------------------------------------------------------------------------------


def test_the_table_and_structure_of_a_pruned_network(page: Any, pruned: Run) -> None:
    page.get_by_label("One run").select_option("pruned")
    table = json.loads((pruned.folder / "table.json").read_text())
    _, *body = rows(page, "pruned")
    assert len(body) == len(table["rows"]) == 3
    for found, wanted in zip(body, table["rows"], strict=True):
        assert found[:2] == [wanted["network"], f"{100 * wanted['accuracy']:.2f} %"]
        assert [int(cell) for cell in found[2:6]] == [wanted[n] for n in ("parameters", "nonzero", "macs", "bytes")]
    sel = Selection.load(pruned.selection_file)
    tips = page.locator("#pruned-structure svg title").all_text_contents()
    for tip, (name, mask) in zip(tips, sel.items(), strict=True):
        kept = int(mask.flatten(1).any(1).sum()) if mask.ndim > 1 else int(mask.sum())
        assert tip.startswith(f"{name}: {kept} of {len(mask)}")


# -- growth --------------------------------------------------------------------------------------------------------


def test_growth_is_drawn_as_it_was(page: Any, grown: Run) -> None:
    page.get_by_label("One run").select_option("grown")
    stages = json.loads((grown.folder / "growth.json").read_text())["stages"]
    assert len(stages) >= 3
    assert stages[-1]["parameters"] > stages[0]["parameters"]
    x, *lines = drawn(page, "growth-widths")
    assert x == [0, *(stage["epoch"] for stage in stages)]
    names = page.locator("#growth-widths .legend span").all_inner_texts()
    for name, line in zip(names, lines, strict=True):
        # A step ends where the stage does: its width comes first, and again at the end for the last stage.
        assert line == [*(stage["widths"][f"{name}"] for stage in stages), stages[-1]["widths"][f"{name}"]]
    sizes, accuracy = drawn(page, "growth-accuracy")
    assert sorted(zip(sizes, accuracy, strict=True)) == sorted((s["parameters"], s["accuracy"]) for s in stages)
    head, *body = saved(page, "growth-stages")
    assert [float(row[head.index("MACs")]) for row in body] == [stage["macs"] for stage in stages]
    head, *body = saved(page, "growth-widths")
    assert [[int(cell) for cell in row] for row in body] == [
        [s["epoch"], *(s["widths"][n] for n in head[1:])] for s in stages
    ]


# -- tickets -------------------------------------------------------------------------------------------------------


def outcomes(comparison: Comparison, method: str, keep: float) -> list[float]:
    """The accuracies of a cell over the seeds, out of its files."""
    found = [json.loads(file.read_text()) for file in sorted(comparison.folder.rglob("*.json"))]
    return [
        accuracy
        for cell in found
        if isinstance(cell, dict) and (cell.get("method"), cell.get("keep")) == (method, keep)
        for accuracy in cell["accuracies"]
    ]


def said(values: list[float]) -> str:
    return f"{100 * statistics.fmean(values):.2f} ± {100 * statistics.stdev(values):.2f}"


def check_tickets(
    page: Any, comparison: Comparison, methods: tuple[str, ...], keeps: tuple[float, ...], id: str
) -> None:
    x, *lines = drawn(page, f"{id}-accuracy")
    assert x == sorted(keeps)
    assert page.locator(f"#{id}-accuracy .legend span").all_inner_texts() == list(methods)
    head, *body = rows(page, f"{id}-table")
    assert head[: 1 + len(methods)] == ["keep", *methods]
    for (i, method), (j, keep) in itertools.product(enumerate(methods), enumerate(sorted(keeps))):
        values = outcomes(comparison, method, keep)
        assert len(values) == 2
        assert lines[i][j] == pytest.approx(statistics.fmean(values), abs=1e-12)
        assert body[j][1 + i] == said(values)


def test_accuracy_of_tickets_against_keep(page: Any, compared: Comparison) -> None:
    check_tickets(page, compared, ("dessilbi@1", "magnitude"), (0.3, 0.1), "tickets-0")
    dense = outcomes(compared, "dense", 1.0)
    assert [row[-1] for row in rows(page, "tickets-0-table")[1:]] == [said(dense)] * 2
    # Differences are paired by seed.
    pairs = [a - b for a, b in zip(*(outcomes(compared, m, 0.1) for m in ("dessilbi@1", "magnitude")), strict=True)]
    costs = rows(page, "tickets-0-costs")
    (row,) = (row for row in costs if row[:2] == ["dessilbi@1", "10.00 %"])
    found = row[costs[0].index("difference")].replace("−", "-")
    assert found == f"{100 * statistics.fmean(pairs):+.2f} ± {100 * statistics.stdev(pairs):.2f}"
    head, *body = saved(page, "tickets-0-accuracy")
    (row,) = (row for row in body if row[:2] == ["magnitude", "0.3"])
    assert float(row[head.index("mean")]) == pytest.approx(statistics.fmean(outcomes(compared, "magnitude", 0.3)))


def test_error_bars_are_one_standard_deviation(page: Any, compared: Comparison) -> None:
    """Pixels of the colour of the first line, beside its point at the smallest fraction, as high as the bar is long."""
    drawn(page, "tickets-0-accuracy")
    values = outcomes(compared, "dessilbi@1", 0.1)
    ends = page.locator("#tickets-0-accuracy .plot").evaluate(
        """(host, x) => {
          const { plot } = host.chart, { ctx } = plot, { width, height } = ctx.canvas;
          const middle = Math.round(plot.valToPos(x, "x", true)), { data } = ctx.getImageData(0, 0, width, height);
          const high = [];
          for (let px = middle - 4; px <= middle + 1; px++) for (let py = 0; py < height; py++) {
            const i = 4 * (py * width + px);
            if (data[i + 3] > 150 && data[i + 2] - data[i] > 100) high.push(py);
          }
          return [Math.max(...high), Math.min(...high)].map(py => plot.posToVal(py / devicePixelRatio, "y")
            - (plot.posToVal(plot.bbox.top / devicePixelRatio, "y") - plot.scales.y.max));
        }""",
        0.1,
    )
    mean, sd = statistics.fmean(values), statistics.stdev(values)
    assert sd > 0.005
    pixel = (ends[1] - ends[0]) / 100
    assert ends == pytest.approx([mean - sd, mean + sd], abs=max(3 * pixel, 0.004))


def test_transfer_has_a_table(show: Show, tmp_path: Path) -> None:
    search = SMALL.replace(conv="weight", keep=None, lam=0.02, schedule="constant", epochs=1, data="digits[5-9]")
    methods = ("dessilbi@1", "transferred@1", "random-like@1")
    grid = Grid(search, methods, (0.3,), seeds=(0, 1), epochs=1, rewind=1, repeats=1, source="digits[0-4]")
    made = Comparison.create(tmp_path / "transfer", grid)
    assert made.go() == []
    page = show(build_page([made.folder], tmp_path / "page.html"))
    assert (
        page.locator("#tickets-0-table h3").inner_text()
        == "Transfer: tickets found on digits[0-4], trained on digits[5-9]"
    )
    check_tickets(page, made, methods, (0.3,), "tickets-0")
    # Nobody in this grid is what the others are compared with.
    assert "difference" not in rows(page, "tickets-0-costs")[0]
    assert not math.isnan(drawn(page, "tickets-0-accuracy")[1][0])  # type: ignore[arg-type]
