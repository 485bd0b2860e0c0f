"""Real runs: a small network of the user's own, in the current folder, on scikit-learn's digits."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dessilbi.cli import main
from dessilbi.cli.progress import Lines

NETS = """
from torch import nn

def build(num_classes=10):
    return nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, num_classes))
"""
CONFIG = """
model = "mynets:build"
data = "digits"
batch = 256
lr = 0.05
nu = 10.0
keep = 0.5
device = "cpu"
"""
OPTIONS = ["--config", "mine.toml"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the user's network, and a run of two epochs in `run`."""
    place = tmp_path_factory.mktemp("own")
    (place / "mynets.py").write_text(NETS)
    (place / "mine.toml").write_text(CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(sys, "path", list(sys.path))
        assert main(["train", *OPTIONS, "--epochs", "2", "--run", "run"]) == 0
    return place


@pytest.fixture
def here(cli, folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return cli


def test_show(here):
    result = here("show", "run")
    assert (result.status, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0].startswith("run: mynets:build on digits")
    assert lines[2].split() == ["epoch", "loss", "dense", "sparse", "keep", "λ", "time"]
    assert [line.split()[0] for line in lines[4:] if line.strip()] == ["1/2", "2/2"]


def test_show_raw(here):
    rows = [json.loads(line) for line in here("show", "run", "--json").out.splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2]
    assert all(0 < row["dense"] <= 1 and 0 <= row["sparse"] <= 1 and row["loss"] > 0 for row in rows)
    shown = here("show", "run").out
    assert all(f"{row['loss']:.4f}" in shown and f"{100 * row['dense']:.2f} %" in shown for row in rows)


def test_a_run_folder_that_exists_is_left_alone(here, folder):
    before = {file: file.read_bytes() for file in (folder / "run").rglob("*") if file.is_file()}
    result = here("train", *OPTIONS, "--epochs", "2", "--run", "run")
    assert result.status == 1
    assert "--resume" in result.err
    assert "--overwrite" in result.err
    assert result.err.count("\n") == 1
    assert {file: file.read_bytes() for file in (folder / "run").rglob("*") if file.is_file()} == before


def test_overwrite(here):
    assert here("train", *OPTIONS, "--epochs", "1", "--run", "other").status == 0
    assert here("train", *OPTIONS, "--epochs", "2", "--run", "other", "--overwrite").status == 0
    assert len(here("show", "other", "--json").out.splitlines()) == 2


def test_resume_with_another_configuration_shows_the_difference(here):
    result = here("train", "--run", "run", "--resume", "--nu", "20")
    assert result.status == 1
    assert "10.0" in result.err
    assert "20.0" in result.err
    assert result.err.count("\n") == 1


def test_resume_what_is_not_there(here):
    result = here("train", "--run", "nowhere", "--resume")
    assert result.status == 1
    assert "nowhere" in result.err
    assert result.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--model lenet6 --data digits", "lenet5"),
        ("--model lenet5 --data digitz", "did you mean 'digits'?"),
        ("--model mynets:biuld --data digits", "did you mean 'build'?"),
        ("--model lenet5 --data mnist", "dessilbi data get mnist"),
    ],
)
def test_what_cannot_be_trained(here, folder, arguments, text):
    result = here("train", *arguments.split(), "--device", "cpu", "--run", "never")
    assert result.status == 1
    assert text in result.err
    assert result.err.count("\n") == 1


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_and_resume(here, folder, monkeypatch):
    shown = _interrupted(folder, [*OPTIONS, "--epochs", "100000", "--run", "long"])
    assert shown == list(range(1, len(shown) + 1))

    def interrupt(self: Lines, metrics: Mapping[str, Any]) -> None:
        resumed.append(metrics["epoch"])
        os.kill(os.getpid(), signal.SIGINT)

    resumed: list[int] = []
    monkeypatch.setattr(Lines, "epoch", interrupt)
    result = here("train", "--run", "long", "--resume")
    assert result.status == 130
    assert resumed == [len(shown) + 1]
    assert len(here("show", "long", "--json").out.splitlines()) == len(shown) + 1


def _interrupted(folder: Path, arguments: list[str]) -> list[int]:
    """The epochs shown by a run that gets Ctrl-C after two of them."""
    command = [sys.executable, "-m", "dessilbi.cli", "train", *arguments]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        shown: list[str] = []
        while sum(line.startswith("epoch") for line in shown) < 2:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            shown.append(line)
        process.send_signal(signal.SIGINT)
        shown += process.stdout.readlines()
        errors = process.stderr.read().splitlines()
        assert process.wait(timeout=60) == 130, errors
    assert errors[-1:] == ["dessilbi: interrupted: go on with `dessilbi train --run long --resume`"]
    return [int(line.split()[1].partition("/")[0]) for line in shown if line.startswith("epoch")]
