"""`dessilbi report` and `dessilbi filters`, and what they say of what is not there."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from dessilbi import DessiLBI, Selection, param_groups
from dessilbi import Path as SolutionPath
from dessilbi.applications.comparison import Comparison
from dessilbi.cli import main
from dessilbi.report.contents import contents, of_selection
from dessilbi.training.run import Run

Capture = pytest.CaptureFixture[str]


def call(capsys: Capture, *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    status = main([str(argument) for argument in arguments])
    return status, *capsys.readouterr()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_report_lies_in_its_run_folder(run: Run, here: Path, capsys: Capture) -> None:
    folder = shutil.copytree(run.folder, here / "mine")
    status, out, err = call(capsys, "report", "mine")
    page = folder / "report.html"
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        f"mine/report.html: {page.stat().st_size / 1e6:.2f} MB; open it in a browser: {page.as_uri()}",
        "while it trains: dessilbi watch mine",
    ]
    assert page.read_text("utf-8").startswith("<!doctype html>")
    # A page in the folder does not keep the run from being gone on with, pruned or shown.
    assert Run.open(folder).status == "finished"
    first = page.read_bytes()
    assert call(capsys, "report", "mine")[0] == 0  # again, in its place
    assert len(page.read_bytes()) == len(first)


def test_several_and_files_and_comparisons(run: Run, compared: Comparison, here: Path, capsys: Capture) -> None:
    path = Path(shutil.copy(run.path_file, here / "lonely.path"))
    assert call(capsys, "report", path)[0] == 0
    assert (here / "lonely-report.html").is_file()
    assert call(capsys, "report", run.folder, path, compared.folder)[0] == 0
    text = (here / "report.html").read_text("utf-8")
    assert "<title>plain, lonely.path, tickets · dessilbi</title>" in text
    assert call(capsys, "report", run.folder, "-o", "named.html")[0] == 0
    assert (here / "named.html").is_file()


def test_the_page_asks_nothing_of_the_network(page_file: Path) -> None:
    """Its policy allows nothing but itself, and there is no address in it but those in comments of the licence."""
    text = page_file.read_text("utf-8")
    policy = text.partition('Content-Security-Policy" content="')[2].partition('"')[0]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "http" not in policy
    assert "connect-src" not in policy
    for asking in ("src=", "@import", "url(", "<link", "<iframe", "import("):
        assert asking not in text
    fetches = text.count("fetch(")
    assert fetches == text.count("fetch(`data.json?after=") == 1  # of a page that is watched


def test_static_figures(unscaled: Run, here: Path, capsys: Capture) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'dessilbi[plot]'")
    path = Path(shutil.copy(unscaled.path_file, here / "mine.path"))
    status, out, _ = call(capsys, "report", path, "--static")
    assert status == 0
    files = [Path(line) for line in out.split()]
    assert [file.is_file() for file in files] == [True] * len(files)
    assert {file.parent for file in files} == {here / "mine-figures"}
    assert sorted(file.name for file in files) == sorted(
        f"mine-{name}.{kind}" for name in ("path", "keep", "structure", "norms", "training") for kind in ("svg", "pdf")
    )


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["report"], 2, "Missing argument 'RUN...'"),
        (["report", "nothing"], 1, "nothing: no such run folder"),
        (["report", "."], 1, ".: is not a run folder (it has no config.toml)"),
        (["report", "damaged.path"], 1, "damaged.path: "),
        (
            ["report", "{run}", "-o", "absent/page.html"],
            1,
            "absent/page.html: there is no folder absent: make it first",
        ),
        (["watch", "nothing"], 1, "nothing: no such run folder"),
        (["filters", "{run}"], 2, "Missing option '--layer'"),
        (
            ["filters", "{run}", "--layer", "0", "--epochs", "two"],
            2,
            "'two': give epochs counted from 1, such as 20,40,80",
        ),
        (["filters", "{run}", "--layer", "0", "--epochs", "0,2"], 2, "'0,2': give epochs counted from 1"),
        (["filters", "{run}", "--layer", "0", "-o", "f.pdf"], 2, "f.pdf: must end in .html or .png"),
        (["filters", "{run}", "--layer", "nine"], 1, "layer='nine': is not on the path of"),
    ],
)
def test_bad_input_is_one_line_with_a_remedy(
    arguments: list[str], status: int, message: str, run: Run, here: Path, capsys: Capture
) -> None:
    (here / "damaged.path").write_bytes(run.path_file.read_bytes()[:2000])
    before = {file.name for file in here.iterdir()}
    found, out, err = call(capsys, *(word.replace("{run}", str(run.folder)) for word in arguments))
    assert (found, out) == (status, "")
    assert message in err
    assert err.count("\n") == 1
    assert {file.name for file in here.iterdir()} == before


def test_filters_lie_in_the_run_folder(run: Run, here: Path, capsys: Capture) -> None:
    folder = shutil.copytree(run.folder, here / "mine")
    status, out, err = call(capsys, "filters", "mine", "--layer", "0", "--epochs", "2,4", "--count", "1")
    assert (status, out, err) == (0, "mine/filters-0.html\n", "")
    assert (folder / "filters-0.html").read_text("utf-8").count("<img ") == 6 + 2 * 2 * 2 + 1


# -- what a page is made of ------------------------------------------------------------------------------------------


def test_numbers_that_are_none_are_gaps(run: Run, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run.folder, tmp_path / "odd"))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines[1]["loss"], lines[2]["loss"] = math.inf, math.nan
    del lines[3]["loss"]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = contents([folder])["runs"][0]
    assert shown["metrics"]["loss"] == [lines[0]["loss"], None, None, None]
    assert shown["metrics"]["epoch"] == [1, 2, 3, 4]


def test_a_run_that_has_not_begun_has_a_page(run: Run, tmp_path: Path) -> None:
    made = Run.create(tmp_path / "new", run.config)
    shown = contents([made.folder])["runs"][0]
    assert (shown["status"], shown["metrics"], shown["layers"], shown["points"]) == ("new", {}, [], {})


def test_a_filter_of_which_any_weight_is_selected_is_there() -> None:
    sel = Selection(
        {"a.weight": torch.tensor([[1, 0], [0, 0], [1, 1]]).bool(), "b.weight": torch.tensor([0, 1]).bool()}
    )
    assert of_selection(sel) == [
        {"name": "a.weight", "width": 3, "wide": 2},
        {"name": "b.weight", "width": 2, "wide": 1},
    ]


def test_whole_layers_are_counted_as_they_are(tmp_path: Path) -> None:
    """Layers as groups: one group, as wide as the layer is. Counted here by hand."""
    net = nn.Sequential(nn.Conv2d(2, 5, 3), nn.Conv2d(5, 7, 3))
    optimizer = DessiLBI(param_groups(net, conv="layer"), lr=0.1, lam=1.0, nu=1.0)
    path = SolutionPath(net, optimizer)
    for point in range(6):
        net(torch.ones(1, 2, 9, 9)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        path.record(point)
    path.save(tmp_path / "layers.path")
    layers = contents([tmp_path / "layers.path"])["runs"][0]["layers"]
    for layer, name, width in zip(layers, path.names, (5, 7), strict=True):
        inside = [bool(path.support(name, k).item()) for k in range(6)]
        assert (layer["groups"], layer["width"]) == (1, width)
        assert layer["kept"] == [int(i) for i in inside]
        assert layer["wide"] == [width * i for i in inside]
    assert any(layers[0]["kept"] + layers[1]["kept"])
