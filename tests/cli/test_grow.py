"""`dessilbi grow` on scikit-learn's digits: runs, what is shown of them, and what cannot be asked for."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from dessilbi.cli import main
from dessilbi.report.growth import growth_figure
from dessilbi.training import presets
from dessilbi.training.config import Config
from dessilbi.training.run import Run

GROWN = (
    "grow --model lenet5 --model-options widths=[2,2,2,2] --data digits --linear neuron --exclude classifier.2 "
    "--lam 0.001 --lr 0.02 --nu 20 --epochs 6 --every 1 --tau 0.4 --by 1 --growths 2 --then 2 --schedule constant "
    "--seed 3 --device cpu --run run"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that grew after the first and the second of five epochs."""
    place = tmp_path_factory.mktemp("grown")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(sys, "path", list(sys.path))
        assert main(shlex.split(GROWN)) == 0
    return place


@pytest.fixture
def there(cli, folder, monkeypatch):
    """`there("grow --run run --show")`, in that folder."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setattr(sys, "path", list(sys.path))
    return lambda arguments: cli(*shlex.split(arguments))


def history(name: str = "run") -> dict[str, Any]:
    return json.loads(Path(name, "growth.json").read_text())


def test_show(there):
    result = there("grow --run run --show")
    assert (result.status, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0] == "run: lenet5 on digits, grown: growths"
    stages = history()["stages"]
    rows = [line.split() for line in lines if line.split()[:1] and line.split()[0].isdigit()]
    assert [row[0] for row in rows] == [str(stage["epoch"]) for stage in stages]
    for row, stage in zip(rows, stages, strict=True):
        assert row[1:3] == [f"{100 * stage['accuracy']:.2f}", "%"]
        for layer, extra in stage["grew"].items():
            assert f"{layer} +{extra}" in " ".join(row)
    last = stages[-1]["widths"]
    assert ["features.0", "2", str(last["features.0"])] in [line.split() for line in lines]
    assert ["classifier.2", "10", "10"] in [line.split() for line in lines]


def test_what_the_run_prints_in_the_end_is_what_show_prints(there, cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = cli(*shlex.split(GROWN))
    assert result.status == 0
    assert [line.split()[:2] for line in result.out.splitlines()[:5]] == [["epoch", f"{i}/6"] for i in range(1, 6)]
    shown = cli(*shlex.split("grow --run run --show"))
    assert shown.out.splitlines() == result.out.splitlines()[5:]


@pytest.mark.parametrize("kind", ["svg", "pdf", "png"])
def test_figure(there, kind):
    result = there(f"grow --run run --show --figure growth.{kind}")
    assert result.status == 0
    assert result.out.splitlines()[-1] == f"growth.{kind}"
    start = {"svg": b"<?xml", "pdf": b"%PDF", "png": b"\x89PNG"}[kind]
    assert Path(f"growth.{kind}").read_bytes().startswith(start)
    assert there(f"grow --run run --show --figure growth.{kind}x").status == 1


def test_resume_ends_what_was_paused_and_repeats_nothing(there):
    result = there("grow --run run --resume")
    assert result.status == 0
    assert "grown: growths" in result.out
    assert len(Path("run", "metrics.jsonl").read_text().splitlines()) == 5
    result = there("grow --run run --resume --tau 0.9")
    assert result.status == 1
    assert "the run has another configuration (grow_options:" in result.err
    assert history()["settings"]["tau"] == 0.4


def test_control_and_prune(there):
    result = there("grow --control run")
    assert (result.status, result.err) == (0, "")
    ours, theirs = history()["stages"], history("runs/run-uniform")["stages"]
    assert history("runs/run-uniform")["settings"]["policy"] == "uniform"
    assert [stage["epoch"] for stage in theirs] == [stage["epoch"] for stage in ours]
    assert all(b["parameters"] <= a["parameters"] for a, b in zip(ours, theirs, strict=True))
    result = there("prune run --level filter --macs 70% --rounds 0 --run pruned")
    assert (result.status, result.err) == (0, "")
    table = json.loads(Path("pruned", "table.json").read_text())
    assert table["rows"][0]["parameters"] == ours[-1]["parameters"]
    assert table["rows"][-1]["macs"] <= 0.7 * ours[-1]["macs"]
    result = there("show run")
    assert result.status == 0


def configured(cli, arguments: str) -> Config:
    result = cli("grow", "--dry-run", *shlex.split(arguments))
    assert (result.status, result.err) == (0, "")
    Path("printed.toml").write_text(result.out)
    return Config.from_toml("printed.toml")


def test_options_go_over_the_file_and_the_file_over_the_preset(cli):
    base = presets.get("grow/lenet-mnist")
    assert configured(cli, "--preset grow/lenet-mnist") == base
    Path("mine.toml").write_text("lam = 0.7\n[grow_options]\nby = 0.25\nevery = 3\n")
    config = configured(cli, "--preset grow/lenet-mnist --config mine.toml --every 4 --tau 0.8,classifier=0.5")
    assert config == base.replace(
        lam=0.7,
        grow_options={**base.grow_options, "by": 0.25, "every": 4, "tau": {"default": 0.8, "classifier": 0.5}},
    )
    settings = (
        "--tau 0.7 --by 0.1 --least 3 --growths 5 --params 1000,2000 --macs 99 --flat 0.01 --then 2 "
        "--policy uniform --init split"
    )
    assert configured(cli, f"{settings} --epochs 100").grow_options == {
        "tau": 0.7, "by": 0.1, "least": 3, "growths": 5, "params": [1000, 2000], "macs": 99, "flat": 0.01, "then": 2,
        "policy": "uniform", "init": "split",
    }  # fmt: skip
    assert configured(cli, "--params 1000 --epochs 100").grow_options == {"params": 1000}


def test_dry_run_writes_nothing(cli, tmp_path):
    assert cli("grow", "--dry-run", "--preset", "grow/vgg16-cifar10").status == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ("--preset grow/lenet-mnits", 2, "did you mean 'grow/lenet-mnist'?"),
        ("--tau high", 2, "'high' of 'high' is neither a number nor LAYER=NUMBER"),
        ("--tau 0.8,features=x", 2, "neither a number nor LAYER=NUMBER"),
        ("--tau 1.5", 2, "tau=1.5: must be a number of at least 0 and at most 1"),
        ("--every 0", 2, "--every"),
        ("--by -1", 2, "--by"),
        ("--params many", 2, "--params"),
        ("--params 0", 2, "params=0: must be a whole number of at least 1"),
        ("--policy greedy", 2, "--policy"),
        ("--init ones", 2, "--init"),
        ("--epochs 5 --every 10", 2, "there is no time to grow"),
        ("--epochs 100 --optimizer sgd", 2, "which selects nothing"),
        ("--epochs 100 --keep 0.5", 2, "No such option '--keep'"),
        ("--resume --overwrite", 2, "--resume goes on and --overwrite starts anew"),
        ("--show", 2, "--show needs the folder of a run"),
        ("--show --run nowhere", 1, "nowhere: no such run folder"),
        ("--resume --run nowhere", 1, "nowhere: no such run folder"),
        ("--control nowhere", 1, "nowhere: no such run folder"),
        ("--control nowhere --tau 0.3", 2, "--control takes the settings of its RUN"),
        ("--config nowhere.toml", 2, "nowhere.toml"),
    ],
)
def test_what_cannot_be_asked_for(cli, tmp_path, arguments, status, words):
    result = cli("grow", *shlex.split(arguments))
    assert result.status == status
    assert words in " ".join(result.err.split())
    assert "Traceback" not in result.err
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_does_not_grow_has_no_history(there):
    assert there("train --model lenet5 --data digits --epochs 1 --device cpu --run plain").status == 0
    for arguments in ("--show --run plain", "--control plain"):
        result = there(f"grow {arguments}")
        assert result.status == 1
        assert "is not a run of a network that grows" in result.err
    result = there("train --config run/config.toml --run other")
    assert result.status == 1
    assert "trained by `dessilbi grow`" in result.err


PAPER_VGG16 = (32, 96, 126, 220, 242, 200, 182, 261, 151, 105, 88, 88, 80)  # its table "vgg16-filter", "Ours"


def test_beside_the_papers(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    run = Run.create("run", presets.get("grow/vgg16-cifar10"))
    convolutions = [f"features.{i}" for i in (0, 3, 7, 10, 14, 17, 20, 24, 27, 30, 34, 37, 40)]
    others = {"classifier.0": 512, "classifier.2": 10}
    stage = {"macs": 200e6, "loss": None, "seconds": 60.0, "ratios": {}, "grew": {}}
    seed, grown = (dict.fromkeys(convolutions, width) | others for width in (8, 99))
    history = {
        "version": 1,
        "streams": [[path] for path in convolutions],
        "stopped": "budget",
        "stages": [
            {**stage, "epoch": 10, "parameters": 17074, "accuracy": 0.7, "widths": seed},
            {**stage, "epoch": 20, "parameters": 2.9e6, "accuracy": 0.9, "widths": grown},
        ],
    }
    run.growth_file.write_text(json.dumps(history))
    result = cli(*shlex.split("grow --run run --show --figure growth.svg"))
    assert (result.status, result.err) == (0, "")
    rows = [line.split() for line in result.out.splitlines()]
    assert ["layer", "seed", "grown", "paper"] in rows
    for path, width in zip(convolutions, PAPER_VGG16, strict=True):
        assert [path, "8", "99", str(width)] in rows
    assert ["classifier.0", "512", "512", "-"] in rows
    assert "paper: 93.80 % with 2.96M parameters" in result.out
    # The figure: a step curve a layer that grows, one of accuracy against size, and the paper's point.
    figure = growth_figure(run)
    widths, accuracy = figure.axes
    assert len(widths.lines) == len(convolutions)
    assert [list(line.get_xdata()) for line in widths.lines] == [[0, 10, 20]] * 13
    assert [list(line.get_ydata()) for line in widths.lines] == [[8, 8, 99]] * 13
    ours, papers = accuracy.lines
    assert [list(ours.get_xdata()), list(ours.get_ydata())] == [[17074, 2.9e6], [70.0, 90.0]]
    assert [list(papers.get_xdata()), list(papers.get_ydata())] == [[2.96e6], [pytest.approx(93.8)]]
    assert Path("growth.svg").read_text().startswith("<?xml")
