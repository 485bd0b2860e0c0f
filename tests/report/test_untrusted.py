"""Names and values that somebody else chose are text, wherever they are shown."""

import csv
import json
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.report.conftest import Show
from torch import nn

from dessilbi import DessiLBI, param_groups
from dessilbi import Path as SolutionPath
from dessilbi.report import build_figures, build_page
from dessilbi.report.page import as_script
from dessilbi.report.sheet import Block, Row, Sheet, Tile
from dessilbi.training.run import Run

RUN = "<script>hacked=1<!--"
LAYERS = ("</script><script>hacked=2</script>", "<img src=x onerror=hacked=3>", "=cmd('x')$x_1$")
VALUE = "<b onmouseover=hacked=4>&amp;</b>\u2028`${hacked=5}`"


@pytest.fixture(scope="module")
def hostile(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A real run folder of an evil name, with evil settings, and the path of a network with evil layers."""
    folder = Path(shutil.copytree(run.folder, tmp_path_factory.mktemp("hostile") / RUN))
    torch.manual_seed(0)
    net = nn.Sequential()
    for layer in LAYERS:
        net.add_module(layer.replace(".", ""), nn.Linear(4, 4))
    optimizer = DessiLBI(param_groups(net, linear="neuron"), lr=0.1, lam=0.01)
    path = SolutionPath(net, optimizer)
    for epoch in range(1, 5):
        net(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        path.record(epoch)
    path.save(folder / "path.safetensors")
    environment = json.loads((folder / "environment.json").read_text())
    (folder / "environment.json").write_text(json.dumps({**environment, "command": VALUE, "platform": LAYERS[0]}))
    made = Run(folder, run.config.replace(exclude=(VALUE,)))
    made.write_config(made.config)
    (folder / "status.json").write_text(json.dumps({"status": LAYERS[1]}))
    return Run.open(folder)


class Elements(HTMLParser):
    """What a parser of HTML finds, without running anything."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not any(name.startswith("on") for name, _ in attrs)


def test_they_are_text_on_the_page(show: Show, hostile: Run, run: Run, tmp_path: Path) -> None:
    page: Any = show(build_page([hostile.folder, run.folder], tmp_path / "page.html"))
    assert page.locator("h1").inner_text() == f"{RUN}, plain"
    assert page.title() == f"{RUN}, plain · dessilbi"
    assert page.locator("#path h3").all_inner_texts() == list(LAYERS)
    assert page.get_by_label("Command", exact=True).inner_text().split() == VALUE.split()
    assert VALUE.split("\u2028")[0] in page.locator("#differences").inner_text()
    assert LAYERS[1] in page.locator(".facts").inner_text()
    page.locator("#keep summary").click()
    page.locator("#structure summary").click()
    page.wait_for_timeout(200)
    page.mouse.move(300, 300)
    # No element was made of them, and none of them ran (the console is silent too: nothing had to be stopped).
    assert page.locator("img, b, script").count() == 0  # the page took its own scripts away when it began
    assert page.evaluate("typeof hacked") == "undefined"


def test_a_spreadsheet_does_not_take_a_name_for_a_formula(show: Show, hostile: Run, tmp_path: Path) -> None:
    page: Any = show(build_page([hostile.folder], tmp_path / "page.html"))
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Download CSV: ‖V‖ by layer").click()
    names = {row[0] for row in csv.reader(Path(waiting.value.path()).read_text("utf-8").splitlines())}
    assert f"'{LAYERS[2]}.weight" in names
    assert not any(name.startswith(("=", "+", "-", "@")) for name in names)


def test_the_file_has_no_other_elements_than_those_of_any_page(hostile: Run, run: Run, tmp_path: Path) -> None:
    found = [Elements(build_page([r.folder], tmp_path / "p.html").read_text("utf-8")).tags for r in (hostile, run)]
    assert found[0] == found[1]
    assert found[0].count("script") == 2


def test_json_in_a_script_is_that_json() -> None:
    value = {"</script>": ["<!--", "\u2028\u2029", "&lt;", "\ud800", 1.5, None, "ü"]}
    text = as_script(value)
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == {"</script>": ["<!--", "\u2028\u2029", "&lt;", "?", 1.5, None, "ü"]}
    with pytest.raises(ValueError):
        as_script(float("nan"))  # is no JSON


def test_figures_take_nothing_for_mathematics_or_markup(hostile: Run, tmp_path: Path) -> None:
    for file in build_figures([hostile.folder], tmp_path / "figures"):
        if file.suffix == ".svg":
            assert "hacked" not in "".join(tag for tag in Elements(file.read_text("utf-8")).tags)
            assert "<script" not in file.read_text("utf-8")


def test_a_sheet_of_filters_is_text_and_images() -> None:
    tile = Tile(torch.eye(4).expand(3, 4, 4), True, LAYERS[1] + '" onload="hacked=6')
    text = Sheet(RUN, VALUE, [Block(LAYERS[0], VALUE, [LAYERS[1]], [Row(VALUE, [tile])])]).html()
    mine = "html head meta title style body h1 h2 p div table thead tbody tr th td img"
    assert set(Elements(text).tags) == set(mine.split())
