"""Carrying out a recipe: each step once, gone on with after a kill, with outcomes that a plain run has too."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.training.runs import numbers

from dessilbi.applications.recipe import Recipe, digest
from dessilbi.applications.reproduction import Reproduction, Task
from dessilbi.training import presets, train
from dessilbi.training.run import Run

CHANGES = {"model": "tests.training.nets:tiny", "epochs": 4, "keep": 0.3, "conv": "weight", "linear": "weight"}
VALUES: dict[str, Any] = {
    "title": "Digits",
    "section": "Weight pruning",
    "seeds": 2,
    "settings": CHANGES,
    "steps": {
        "dense": {"train": "quick/lenet-digits"},
        "ft2": {"prune": "dense", "level": "weight", "at": 2, "keep": 0.2, "finetune": 2},
    },
}
PLACE = {"device": "cpu"}


def work(tmp_path: Path, values: dict[str, Any] = VALUES, **options: Any) -> Reproduction:
    return Reproduction(Recipe.of("digits", values), runs=tmp_path / "runs", results=tmp_path / "results",
                        place=PLACE, **options)  # fmt: skip


def test_steps_are_done_once_in_order(tmp_path: Path) -> None:
    notes: list[str] = []
    mine = work(tmp_path, command="dessilbi reproduce digits", note=notes.append)
    assert mine.todo((0, 1)) == [Task("dense", 0), Task("dense", 1), Task("ft2", 0), Task("ft2", 1)]
    assert mine.go(mine.todo((0,), ["ft2"])) == []  # what it needs comes first
    assert mine.todo((0, 1)) == [Task("dense", 1), Task("ft2", 1)]
    times = {file: file.stat().st_mtime_ns for file in tmp_path.glob("runs/digits/*/seed-0/metrics.jsonl")}
    assert len(times) == 2
    assert mine.go(mine.todo((0,))) == []
    assert mine.todo((0,)) == []
    assert all(file.stat().st_mtime_ns == before for file, before in times.items())  # nothing was trained again

    # The same numbers as the run without any recipe.
    config = presets.get("quick/lenet-digits").replace(**CHANGES, **PLACE, seed=0)
    train(config, tmp_path / "plain")
    dense, fine = (mine.results.find(row=name, seed=0)[0] for name in ("dense", "ft2"))
    last = Run.open(tmp_path / "plain").metrics()[-1]
    assert (dense["accuracy"], dense["sparse"], dense["support"]) == (last["dense"], last["sparse"], last["keep"])
    same = CHANGES.keys() - {"linear"}  # single weights of linear layers are the default
    assert {name: dense["settings"]["train"][name] for name in same} == {name: CHANGES[name] for name in same}
    assert dense["command"] == "dessilbi reproduce digits"
    assert (dense["device"], dense["jobs"], dense["fast"]) == (
        Run.open(tmp_path / "plain").environment["device"],
        1,
        False,
    )
    assert fine["epochs"] == 2
    assert 0.15 < fine["weights"] < 0.3


def test_a_change_of_the_recipe_is_a_new_measurement(tmp_path: Path) -> None:
    mine = work(tmp_path)
    assert mine.go(mine.todo((0,), ["dense"])) == []
    other = work(tmp_path, VALUES | {"settings": CHANGES | {"lr": 0.02}})
    assert other.todo((0,), ["dense"]) == [Task("dense", 0)]
    assert other.go(other.todo((0,), ["dense"])) == []
    rows = other.results.rows()
    assert len(rows) == 2
    assert {row["settings"]["train"].get("lr") for row in rows} == {0.05, 0.02}
    place = work(tmp_path, VALUES | {"settings": CHANGES | {"compile": "none", "eval_batch": 100}})
    assert place.todo((0,), ["dense"]) == []  # what enters no number is no change


def test_fast_is_a_quarter_of_the_epochs_and_kept_apart(tmp_path: Path) -> None:
    mine = work(tmp_path, fast=True)
    assert mine.go(mine.todo((0,))) == []
    dense, fine = (mine.results.find(row=name)[0] for name in ("dense", "ft2"))
    assert (dense["epochs"], fine["epochs"], dense["fast"], fine["fast"]) == (1, 1, True, True)
    assert len(work(tmp_path).todo((0,))) == 2


def test_what_goes_wrong_is_said_and_what_needs_it_is_left_out(tmp_path: Path) -> None:
    broken = {**VALUES, "steps": {**VALUES["steps"], "other": {"train": "quick/lenet-digits"}}}
    broken["steps"]["dense"] = {"train": "quick/lenet-digits", "settings": {"data": "no-such-set"}}
    mine = work(tmp_path, broken)
    wrong = mine.go(mine.todo((0,)))
    assert len(wrong) == 1
    assert wrong[0].startswith("dense, seed 0: data='no-such-set'")
    assert {row["row"] for row in mine.results.rows()} == {"other"}


def test_a_run_that_diverges_is_an_outcome(tmp_path: Path) -> None:
    values = {**VALUES, "steps": {"dense": {"train": "quick/lenet-digits",
                                            "settings": {"model": "tests.training.nets:exploding"}}}}  # fmt: skip
    mine = work(tmp_path, values)
    assert mine.go(mine.todo((0,))) == []
    (row,) = mine.results.rows()
    assert row["accuracy"] is None
    assert "epoch" in row["error"]
    assert mine.todo((0,)) == []


def test_a_row_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="row 'ft3': digits has dense, ft2"):
        work(tmp_path).todo((0,), ["ft3"])
    with pytest.raises(ValueError, match="jobs=0: must be at least 1"):
        work(tmp_path).go([], jobs=0)


def test_side_by_side_is_the_same(tmp_path: Path) -> None:
    one, two = work(tmp_path / "one"), work(tmp_path / "two")
    assert one.go(one.todo((0, 1), ["dense"])) == []
    assert two.go(two.todo((0, 1), ["dense"]), jobs=2) == []
    found = [[(row["seed"], row["accuracy"], row["sparse"]) for row in done.results.rows()] for done in (one, two)]
    assert found[0] == found[1]
    assert [row["seed"] for row in two.results.find(jobs=2)] == [0, 1]


KILLED = """
title = "Digits"
section = "Weight pruning"
settings = {model = "tests.training.nets:tiny", epochs = 40, keep = 0.3, conv = "weight", linear = "weight"}
[steps.dense]
train = "quick/lenet-digits"
[steps.ft2]
prune = "dense"
level = "weight"
at = 2
keep = 0.2
finetune = 40
"""


def test_a_kill_loses_nothing(tmp_path: Path) -> None:
    """kill -9 in the middle of either step; then the same command, and the numbers of a run that nobody killed."""
    file = tmp_path / "digits.toml"
    file.write_text(KILLED)
    command = [sys.executable, "-m", "dessilbi.cli", "reproduce", str(file), "--seeds", "1", "--device", "cpu",
               "--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]  # fmt: skip
    root = Path(__file__).parents[2]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{root}{os.pathsep}{root / 'src'}"}
    result = tmp_path / "results" / "digits.json"
    for step in ("dense", "ft2"):
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not (lines := sum(len(f.read_text().splitlines())
                                for f in tmp_path.glob(f"runs/digits/{step}-*/seed-0/metrics.jsonl"))):  # fmt: skip
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        (metrics,) = tmp_path.glob(f"runs/digits/{step}-*/seed-0/metrics.jsonl")
        assert 1 <= lines <= len(metrics.read_text().splitlines()) < 40
        rows = json.loads(result.read_text())["rows"] if result.is_file() else []
        assert step not in {row["row"] for row in rows}
    notes: list[str] = []
    mine = Reproduction(Recipe.load(file), runs=tmp_path / "runs", results=tmp_path / "results", place=PLACE,
                        note=notes.append)  # fmt: skip
    assert mine.todo((0,)) == [Task("ft2", 0)]  # the outcome of the other was there
    assert mine.go(mine.todo((0,))) == []
    assert mine.todo((0,)) == []

    whole = Reproduction(Recipe.load(file), runs=tmp_path / "whole", results=tmp_path / "unkilled", place=PLACE)
    assert whole.go(whole.todo((0,))) == []
    rows = json.loads(result.read_text())["rows"]
    for row, expected in zip(rows, whole.results.rows(), strict=True):
        assert (row["row"], row["accuracy"], row.get("weights")) == (
            expected["row"], expected["accuracy"], expected.get("weights"))  # fmt: skip
        assert row["settings"] == digest(expected["settings"])
    for folder in tmp_path.glob("runs/digits/*/seed-0"):
        assert numbers(folder) == numbers(tmp_path / "whole" / folder.relative_to(tmp_path / "runs"))
