"""The page of a run, in a browser: what is on the screen against what is in the run's files."""

import csv
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.report.conftest import Show

from dessilbi import Path as SolutionPath
from dessilbi.path import QUANTILES
from dessilbi.report import build_page
from dessilbi.training.run import Run

LEVELS = 4095  # the page says that it rounds norms to this part of the largest
BOX = (0.05, 0.25, 0.5, 0.75, 0.95)


def percent(value: float, digits: int = 2) -> str:
    return f"{100 * value:.{digits}f} %"


def told(value: float) -> float:
    """A number as the page writes it: four digits."""
    return float(f"{value:.4g}")


class Numbers:
    """What the files of a run say, read apart from the report."""

    def __init__(self, run: Run) -> None:
        self.path = SolutionPath.load(run.folder / "path.safetensors")
        self.metrics = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
        self.points = self.path.points
        self.count = len(self.points)
        self.supports = {
            name: np.stack([self.path.support(name, k).numpy() for k in range(self.count)]) for name in self.path.names
        }

    def groups(self, name: str) -> int:
        return self.supports[name][0].size

    def kept(self, name: str, k: int) -> int:
        return int(self.supports[name][k].sum())

    def wide(self, name: str, k: int) -> int:
        """Filters or neurons of which anything is selected."""
        support = self.supports[name][k]
        return int((support.reshape(support.shape[0], -1).any(1)).sum())

    def keep(self, k: int) -> float:
        return sum(self.kept(n, k) for n in self.path.names) / sum(self.groups(n) for n in self.path.names)

    def share(self, k: int) -> float:
        sizes = {n: math.prod(self.path.shape(n)) for n in self.path.names}
        return sum(sizes[n] * self.kept(n, k) / self.groups(n) for n in sizes) / sum(sizes.values())

    def ended(self, k: int) -> dict[str, Any] | None:
        """The metrics of the last epoch that has ended at a point."""
        done = [row for row in self.metrics if row["epoch"] <= self.points[k]["point"]]
        return done[-1] if done else None


@pytest.fixture(scope="module")
def numbers(run: Run) -> Numbers:
    return Numbers(run)


@pytest.fixture
def page(show: Show, page_file: Path) -> Any:
    return show(page_file)


def to(page: Any, k: int) -> None:
    """Move the slider with the keyboard."""
    slider = page.get_by_role("slider")
    slider.focus()
    slider.press("Home")
    for _ in range(k):
        slider.press("ArrowRight")


def unpacked(page: Any) -> None:
    """Wait until the norms of all layers are there."""
    page.evaluate(
        "() => Promise.all(page.data.runs.flatMap(r => "
        "r.layers.map(l => unpack(l, r.points.point.length, page.data.quantiles.length))))"
    )


def bring(page: Any, where: str) -> None:
    """Scroll there, and wait for the frames in which what has come onto the screen is drawn."""
    page.locator(where).first.scroll_into_view_if_needed()
    page.evaluate(
        "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done))))"
    )


def cells(page: Any, figure: str) -> list[list[str]]:
    rows: list[list[str]] = page.locator(f"#{figure} table").first.evaluate(
        "table => [...table.rows].map(row => [...row.cells].map(cell => cell.textContent))"
    )
    return rows


def moments(numbers: Numbers) -> Iterator[int]:
    yield from (0, numbers.count // 2, numbers.count - 1)


# -- the slider ----------------------------------------------------------------------------------------------------


def test_at_first_the_page_shows_the_end_of_the_path(page: Any, numbers: Numbers) -> None:
    assert float(page.locator("#now-epoch").inner_text()) == numbers.points[-1]["point"]
    assert page.title() == "plain · dessilbi"


def test_the_slider_moves_all_readouts(page: Any, numbers: Numbers) -> None:
    for k in moments(numbers):
        to(page, k)
        point, read = numbers.points[k], lambda name: page.locator(f"#now-{name}").inner_text()
        assert float(read("epoch")) == told(point["point"])
        assert float(read("time")) == told(point["time"])
        assert float(read("lam")) == told(point["lam"])
        assert read("keep") == percent(numbers.keep(k))
        assert read("share") == percent(numbers.share(k))
        row = next((row for row in numbers.metrics if row["epoch"] == point["point"]), {})
        for name in ("dense", "sparse"):
            assert read(name) == (percent(row[name]) if row.get(name) is not None else "–")
    assert page.get_by_role("slider").get_attribute("aria-valuetext").startswith("epoch 4, path time ")


def test_the_slider_moves_through_all_figures_together(page: Any, numbers: Numbers) -> None:
    unpacked(page)
    for k in moments(numbers):
        to(page, k)
        bring(page, "#structure")
        # The cards of the layers, and keep by layer as numbers and as bars.
        badges = page.locator("#path figcaption .kept").all_inner_texts()
        bars = page.locator("#keep .bar span").evaluate_all(
            "all => all.map(e => new DOMMatrix(getComputedStyle(e).transform).a)"
        )
        for i, name in enumerate(numbers.path.names):
            kept, groups = numbers.kept(name, k), numbers.groups(name)
            assert badges[i] == f"{kept:,} of {groups:,} selected"
            row = cells(page, "keep")[1 + i]
            assert row[:4] == [name.removesuffix(".weight"), f"{kept:,}", f"{groups:,}", percent(kept / groups, 1)]
            assert bars[i] == pytest.approx(kept / groups, abs=1e-5)
        # Structure: as text, and as the height of the bars.
        tips = page.locator("#structure svg title").all_text_contents()
        parts = page.locator("#structure svg g").evaluate_all(
            "all => all.map(g => g.querySelector('.kept').height.baseVal.value"
            " / g.querySelector('.dense').height.baseVal.value)"
        )
        for i, name in enumerate(numbers.path.names):
            wide, width = numbers.wide(name, k), numbers.path.shape(name)[0]
            assert tips[i] == f"{name}: {wide} of {width}" + ("" if wide else ", dropped")
            assert parts[i] == pytest.approx(wide / width, abs=0.02)
        # Accuracy and loss in the legends of their charts.
        row = numbers.ended(k)
        said = dict(
            zip(*(page.locator(f"#training .legend {e}").all_inner_texts() for e in ("span", "output")), strict=True)
        )
        assert said["dense (W)"] == ("–" if row is None else percent(row["dense"]))
        assert said["sparse (W where Γ ≠ 0)"] == ("–" if row is None else percent(row["sparse"]))
        assert (
            said["training"] == "–" if row is None else float(said["training"]) == told(row["loss"])
        )  # not measured yet
        assert said["keep"] == percent(numbers.keep(k))
        assert float(said["λ"]) == told(numbers.points[k]["lam"])


def test_boxes_are_quantiles_of_the_norms(page: Any, numbers: Numbers) -> None:
    unpacked(page)
    for k in moments(numbers):
        to(page, k)
        for which in ("v", "w"):
            bring(page, f"#norms-{which}")
            marks = page.locator(f"#norms-{which} svg g").evaluate_all(
                "all => all.map(g => [g.querySelector('title').textContent, "
                "...['.stem', '.median'].map(c => g.querySelector(c).y1.baseVal.value)])"
            )
            ticks = page.locator(f"#norms-{which} .tick").evaluate_all(
                "all => all.map(t => [+t.textContent, +t.getAttribute('y') - 4])"
            )
            (low, at_low), (high, at_high) = min(ticks), max(ticks)
            for (tip, stem, median), name in zip(marks, numbers.path.names, strict=True):
                expected = quantiles(numbers, name, which, k)
                top = float(getattr(numbers.path.norms(name), which).max())
                step = 0.51 * top / LEVELS
                said = [
                    float(word)
                    for word in tip.removeprefix(f"{name}: median ").replace(", middle half ", " to ").split(" to ")
                ]
                for value, wanted in zip(said, (expected[2], expected[1], expected[3]), strict=True):
                    assert value == pytest.approx(wanted, abs=step + 6e-4 * abs(wanted))
                # Where the marks stand, against the axis.
                for y, wanted in ((stem, expected[0]), (median, expected[2])):
                    read = low + (high - low) * (y - at_low) / (at_high - at_low)
                    assert read == pytest.approx(wanted, abs=step + 0.01 * (high - low))


def quantiles(numbers: Numbers, name: str, which: str, k: int) -> list[float]:
    values = getattr(numbers.path.norms(name), which)[k].numpy()
    if numbers.path.kind(name) == "weight":  # the record has quantiles already
        return [float(values[QUANTILES.index(q)]) for q in BOX]
    return [float(q) for q in np.quantile(values.astype(np.float64), BOX)]


def test_the_slider_follows_the_mouse_and_a_click_into_a_figure(page: Any, numbers: Numbers) -> None:
    box = page.get_by_role("slider").bounding_box()
    page.mouse.click(box["x"] + 9, box["y"] + box["height"] / 2)
    assert float(page.locator("#now-epoch").inner_text()) == told(numbers.points[0]["point"])
    over = page.locator("#path .u-over").first
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    page.mouse.click(box["x"] + box["width"] - 1, box["y"] + 20)
    assert float(page.locator("#now-epoch").inner_text()) == numbers.points[-1]["point"]
    assert page.get_by_role("slider").input_value() == str(numbers.count - 1)


@pytest.mark.parametrize("axis", ["epochs", "path time"])
def test_the_veil_begins_at_the_moment(page: Any, numbers: Numbers, axis: str) -> None:
    page.get_by_label(axis).check()
    column = "point" if axis == "epochs" else "time"
    x = [point[column] for point in numbers.points]
    k = numbers.count // 2
    to(page, k)
    page.locator("#path .veil").first.wait_for(state="attached")
    page.locator("#path .u-over").first.scroll_into_view_if_needed()
    offset, width = page.locator("#path .u-over").first.evaluate(
        "over => [new DOMMatrix(getComputedStyle(over.querySelector('.veil')).transform).e, over.clientWidth]"
    )
    assert offset / width == pytest.approx((x[k] - x[0]) / (x[-1] - x[0]), abs=0.01)


# -- the solution path ---------------------------------------------------------------------------------------------


def test_norms_and_supports_come_out_of_the_page_as_they_went_in(page: Any, numbers: Numbers) -> None:
    unpacked(page)
    for i, name in enumerate(numbers.path.names):
        single, norms = numbers.path.kind(name) == "weight", numbers.path.norms(name)
        for which in ("w", "v", "gamma"):
            wanted = getattr(norms, which).numpy().T
            found = np.array(page.evaluate(f"[...page.data.runs[0].layers[{i}].{which}]")).reshape(wanted.shape)
            np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=0.5001 * wanted.max() / LEVELS)
        if not single:
            found = np.array(page.evaluate(f"[...page.data.runs[0].layers[{i}].support]"))
            np.testing.assert_array_equal(found.reshape(-1, numbers.count), numbers.supports[name].T)


def test_lines_are_blue_while_selected_and_grey_while_not(show: Show, unscaled: Run) -> None:
    numbers = Numbers(unscaled)
    page = show(build_page([unscaled.folder], unscaled.folder.with_name("unscaled.html")))
    unpacked(page)
    x = np.array([point["point"] for point in numbers.points])
    seen = {True: 0, False: 0}
    for i, name in enumerate(numbers.path.names):
        values, support = numbers.path.norms(name).w.numpy(), numbers.supports[name]
        wanted, places = [], []
        for k in np.flatnonzero(np.diff(x) >= 1) + 1:
            # Within a stretch of an epoch, which has the colour of its end; of lines with no other colour near.
            heights, states = (0.3 * values[k - 1] + 0.7 * values[k]) / (1.04 * values.max()), support[k]
            for g, state in enumerate(states):
                if np.abs(heights[states != state] - heights[g]).min(initial=1) > 0.022:
                    places.append([0.3 * x[k - 1] + 0.7 * x[k], float(heights[g])])
                    wanted.append(bool(state))
        chart = page.locator("#path figure").nth(i).locator(".plot").nth(1)
        chart.scroll_into_view_if_needed()
        page.wait_for_timeout(100)
        for (red, _, blue), state, place in zip(chart.evaluate(SAMPLE, places), wanted, places, strict=True):
            assert (blue - red > 60) == state, (name, place, red, blue)
            seen[state] += 1
    assert min(seen.values()) >= 3, seen


# At fractions of the height over x, the darkest pixel: the grid is paler than the lines.
SAMPLE = """(host, places) => {
  const { plot } = host.chart, { ctx, bbox } = plot, { width, height } = ctx.canvas;
  const { data } = ctx.getImageData(0, 0, width, height);
  return places.map(([x, y]) => {
    const px = Math.round(plot.valToPos(x, 'x', true)), py = Math.round(bbox.top + bbox.height * (1 - y));
    const near = [-1, 0, 1].map(d => 4 * ((py + d) * width + px)).filter(i => data[i + 3] > 80);
    const sum = i => data[i] + data[i + 1] + data[i + 2], [i] = near.sort((a, b) => sum(a) - sum(b));
    return i === undefined ? [255, 255, 255] : [...data.slice(i, i + 3)];
  });
}"""


# -- data to take away ---------------------------------------------------------------------------------------------


def saved(page: Any, button: Any) -> list[list[str]]:
    with page.expect_download() as waiting:
        button.click()
    assert waiting.value.suggested_filename.endswith(".csv")
    return list(csv.reader(Path(waiting.value.path()).read_text("utf-8").splitlines()))


def test_csv_of_every_figure_is_what_the_run_recorded(page: Any, numbers: Numbers) -> None:
    def of(title: str) -> list[list[str]]:
        return saved(page, page.get_by_role("button", name=f"Download CSV: {title}", exact=True))

    names = numbers.path.names
    for name in names:
        head, *rows = of(name.removesuffix(".weight"))
        norms = numbers.path.norms(name)
        steps = {which: 0.51 * float(getattr(norms, which).max()) / LEVELS for which in ("w", "v", "gamma")}
        if numbers.path.kind(name) == "weight":
            assert [int(row[2]) for row in rows] == [numbers.kept(name, k) for k in range(numbers.count)]
            quantile = head.index("|V| 50 %")
            for k, row in enumerate(rows):
                wanted = float(norms.v[k, 5])
                assert float(row[quantile]) == pytest.approx(wanted, abs=steps["v"] + 5e-4 * wanted)
            continue
        assert head == ["epoch", "time", "group", "norm W", "norm V", "norm Gamma", "selected"]
        assert len(rows) == numbers.groups(name) * numbers.count
        for i, row in enumerate(rows):
            g, k = divmod(i, numbers.count)
            assert [float(x) for x in row[:3]] == [numbers.points[k]["point"], numbers.points[k]["time"], g]
            for text, which in zip(row[3:6], ("w", "v", "gamma"), strict=True):
                wanted = float(getattr(norms, which)[k, g])
                assert float(text) == pytest.approx(wanted, abs=steps[which] + 5e-4 * wanted), (which, k, g)
            assert int(row[6]) == numbers.supports[name][k, g]
    head, *rows = of("Keep ratio by layer")
    assert head == ["epoch", "time", *names]
    for k, row in enumerate(rows):
        assert [float(x) for x in row[2:]] == [numbers.kept(n, k) / numbers.groups(n) for n in names]
    head, dense, *rows = of("Structure: selected inside dense")
    assert [int(x) for x in dense[2:]] == [numbers.path.shape(n)[0] for n in names]
    assert [[int(x) for x in row[2:]] for row in rows] == [
        [numbers.wide(n, k) for n in names] for k in range(numbers.count)
    ]
    for title, columns in (
        ("Accuracy", ("dense", "sparse")),
        ("Loss", ("loss", "test_loss")),
        ("Learning rate", ("lr",)),
    ):
        _, *rows = of(title)
        assert [[float(x) for x in row] for row in rows] == [
            [m["epoch"], *(m[c] for c in columns)] for m in numbers.metrics
        ]
    _, *rows = of("Threshold λ")
    assert [[float(x) for x in row] for row in rows] == [[p["point"], p["lam"]] for p in numbers.points]
    _, *rows = of("‖V‖ by layer")
    assert [(row[0], float(row[1])) for row in rows] == [(n, p["point"]) for n in names for p in numbers.points]


def test_tables_copy_as_rows_of_a_spreadsheet(page: Any, numbers: Numbers) -> None:
    page.locator("#keep summary").click()
    page.locator("#keep .table table").wait_for()
    k = numbers.count - 1
    wanted = [["layer", "kind", "groups", "selected", "keep", "parameters", "parameters selected"]]
    for name in numbers.path.names:
        size, kept, groups = math.prod(numbers.path.shape(name)), numbers.kept(name, k), numbers.groups(name)
        wanted.append(
            [
                name,
                numbers.path.kind(name),
                str(groups),
                str(kept),
                percent(kept / groups),
                str(size),
                str(round(size * kept / groups)),
            ]
        )
    for table, rows in ((".table table", wanted), (".keeps", [row[:4] for row in cells(page, "keep")])):
        text = page.evaluate(
            """where => {
              const range = document.createRange();
              range.selectNode(document.querySelector(where));
              getSelection().removeAllRanges();
              getSelection().addRange(range);
              return getSelection().toString();
            }""",
            f"#keep {table}",
        )
        assert [line.rstrip("\t").split("\t") for line in text.strip().splitlines()] == rows


def test_the_table_of_a_layer_has_its_groups_in_the_order_of_entry(page: Any, numbers: Numbers) -> None:
    (name,) = (n for n in numbers.path.names if numbers.path.kind(n) == "filter")
    figure = page.locator("#path figure", has=page.locator(f"h3:text-is('{name.removesuffix('.weight')}')"))
    figure.locator("summary").click()
    figure.locator("tbody tr").first.wait_for()
    rows = figure.locator("table").evaluate(
        "t => [...t.tBodies[0].rows].map(r => [...r.cells].map(c => c.textContent))"
    )
    supports = numbers.supports[name]
    first = [int(column.argmax()) if column.any() else numbers.count for column in supports.T]
    last = numbers.path.norms(name).v[-1].numpy()
    assert [int(row[0]) for row in rows] == sorted(range(len(first)), key=lambda g: (first[g], -last[g]))
    for row in rows:
        g = int(row[0])
        entered = "never" if first[g] == numbers.count else told(numbers.points[first[g]]["point"])
        assert (row[1] if row[1] == "never" else float(row[1])) == entered
        assert row[5] == ("yes" if supports[-1, g] else "no")


def test_the_page_says_how_to_repeat_the_run(page: Any, run: Run) -> None:
    assert page.get_by_label("Command", exact=True).inner_text() == "dessilbi train --run plain"
    page.get_by_text("All of them: config.toml").click()
    assert page.get_by_label("config.toml").inner_text().strip() == (run.folder / "config.toml").read_text().strip()
    changed = page.get_by_role("region", name="Configuration").locator("tbody tr").all_inner_texts()
    assert "epochs\t4\t5" in changed
    assert not any(row.startswith("nesterov\t") for row in changed)
    environment = json.loads((run.folder / "environment.json").read_text())
    said = page.get_by_role("region", name="Environment").inner_text()
    for name in ("torch", "commit", "platform"):
        assert f"{name}\t{environment[name]}" in said
