"""Pages of runs that have little to show, or numbers that are none. That the console stays silent is part of each."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.report.conftest import FIRST, Show
from torch import nn

from dessilbi import DessiLBI, param_groups
from dessilbi import Path as SolutionPath
from dessilbi.report import build_page
from dessilbi.training import train
from dessilbi.training.run import Run


def recorded(points: int, spoil: bool = False) -> SolutionPath:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    groups: list[dict[str, Any]] = param_groups(net, linear="neuron")
    groups[0]["lam"] = 0.02
    optimizer = DessiLBI(groups, lr=0.1, lam=0.02)
    path = SolutionPath(net, optimizer)
    for point in range(points):
        net(torch.randn(8, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if spoil and point == points - 1:
            nn.init.constant_(net[0].weight[1], math.nan)
        path.record(point)
    return path


@pytest.mark.parametrize("points", [0, 1, 2])
def test_few_points(show: Show, tmp_path: Path, points: int) -> None:
    recorded(points).save(tmp_path / "few.path")
    page: Any = show(build_page([tmp_path / "few.path"], tmp_path / "page.html"))
    assert page.locator("h1").inner_text() == "few.path"
    if not points:
        assert page.get_by_text("Nothing is recorded yet").is_visible()
        assert page.get_by_role("slider").count() == 0
        return
    assert page.locator("#now-epoch").inner_text() == str(points - 1)
    assert page.get_by_role("slider").get_attribute("max") == str(points - 1)
    for summary in page.locator("summary").all():
        summary.click()
    page.get_by_role("slider").press("Home")
    assert page.locator("#now-epoch").inner_text() == "0"


def test_weights_that_are_no_numbers_leave_gaps(show: Show, tmp_path: Path) -> None:
    path = recorded(6, spoil=True)
    path.save(tmp_path / "bad.path")
    page: Any = show(build_page([tmp_path / "bad.path"], tmp_path / "page.html"))
    name = path.names[0]
    assert bool(path.norms(name).w[-1, 1].isnan())
    page.evaluate("() => Promise.all(page.data.runs[0].layers.map(l => unpack(l, 6, 11)))")
    found = page.evaluate("[...page.data.runs[0].layers[0].w]")
    gaps = [i for i, value in enumerate(found) if value is None or math.isnan(value)]
    wanted = path.norms(name).w.T.flatten().isnan().nonzero().flatten().tolist()
    assert gaps == wanted == [1 * 6 + 5]
    page.locator("#path summary").first.click()
    page.locator("#path tbody tr").first.wait_for()
    rows = page.locator("#path table").first.locator("tr").all_inner_texts()
    assert any(row.startswith("1\t") and "\t–\t" in row for row in rows)


def test_a_run_without_a_path_has_a_slider_over_its_epochs(show: Show, tmp_path: Path) -> None:
    train(FIRST.replace(optimizer="sgd", scaling=False, keep=None, keep_epochs=(), epochs=3), tmp_path / "sgd")
    metrics = Run.open(tmp_path / "sgd").metrics()
    page: Any = show(build_page([tmp_path / "sgd"], tmp_path / "page.html"))
    assert page.locator("#path, #selected").count() == 0
    slider = page.get_by_role("slider")
    for k in (0, 2):
        slider.press("Home")
        for _ in range(k):
            slider.press("ArrowRight")
        assert page.locator("#now-epoch").inner_text() == str(metrics[k]["epoch"])
        assert page.locator("#now-dense").inner_text() == f"{100 * metrics[k]['dense']:.2f} %"


def test_a_run_that_has_not_begun(show: Show, tmp_path: Path) -> None:
    Run.create(tmp_path / "new", FIRST)
    page: Any = show(build_page([tmp_path / "new"], tmp_path / "page.html"))
    assert page.get_by_text("Nothing is recorded yet").is_visible()
    assert page.get_by_role("heading", name="How to repeat it").is_visible()
