import json
import math
from pathlib import Path

import pytest

from dessilbi.training.config import Config
from dessilbi.training.run import Run

ROWS = [
    {"epoch": 1, "loss": 1.25, "dense": 0.5, "sparse": 0.1, "keep": 0.0, "lam": math.inf, "seconds": 2.04, "lr": 0.1},
    {"epoch": 2, "loss": 0.5, "dense": 0.75, "sparse": 0.625, "keep": 0.0625, "lam": 0.03125, "seconds": 2.0},
    {"epoch": 3, "loss": 0.25, "dense": 0.87654},
]


@pytest.fixture
def run(cli, monkeypatch) -> Run:
    monkeypatch.setenv("COLUMNS", "80")
    made = Run.create("some run", Config(epochs=12, model="vgg16", data="cifar10"))
    for row in ROWS:
        made.append(row)
    made.set_status("interrupted")
    return made


def test_the_table(cli, run):
    result = cli("show", "some run")
    assert (result.status, result.err) == (0, "")
    lines = [line.strip() for line in result.out.splitlines() if line.strip()]
    assert lines[0] == "some run: vgg16 on cifar10, interrupted"
    assert lines[1].split() == ["epoch", "loss", "dense", "sparse", "keep", "λ", "time"]
    assert [" ".join(line.split()) for line in lines[3:]] == [
        "1/12 1.2500 50.00 % 10.00 % 0 inf 2.0 s",
        "2/12 0.5000 75.00 % 62.50 % 0.0625 0.03125 2.0 s",
        "3/12 0.2500 87.65 % - - - -",
    ]


def test_in_a_file_there_are_no_escapes(cli, run):
    assert "\x1b" not in cli("show", "some run").out


def test_the_last(cli, run):
    out = cli("show", "some run", "--last", "2").out
    assert "1/12" not in out
    assert "2/12" in out
    assert "3/12" in out
    assert cli("show", "some run", "--last", "99").out == cli("show", "some run").out


def test_raw(cli, run):
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    lines = cli("show", "some run", "--json").out.splitlines()
    rows = [json.loads(line, parse_constant=refuse) for line in lines]
    assert rows == [ROWS[0] | {"lam": None}, *ROWS[1:]]
    assert cli("show", "some run", "--json", "--last", "1").out.splitlines() == lines[-1:]


def test_a_run_without_epochs(cli):
    Run.create("new", Config())
    assert "lenet5 on mnist, new" in cli("show", "new").out
    assert cli("show", "new", "--json") == (0, "", "")


@pytest.mark.parametrize("name", ["nowhere", "."])
def test_what_is_no_run(cli, name):
    result = cli("show", name)
    assert (result.status, result.out) == (1, "")
    assert "run folder" in result.err
    assert result.err.count("\n") == 1


def test_a_damaged_run(cli, run):
    Path("some run/metrics.jsonl").write_text("not JSON\n{}\n")
    result = cli("show", "some run")
    assert result.status == 1
    assert "line 1 is not JSON" in result.err
    Path("some run/config.toml").write_text("nu = 'x'")
    assert "nu='x': must be a number" in cli("show", "some run").err


LINES = [
    "epoch 1/12  loss 1.2500  dense 50.00 %  sparse 10.00 %  keep 0  λ inf  time 2.0 s",
    "epoch 2/12  loss 0.5000  dense 75.00 %  sparse 62.50 %  keep 0.0625  λ 0.03125  time 2.0 s",
    "epoch 3/12  loss 0.2500  dense 87.65 %",
]


def test_following_a_run_that_has_ended(cli, run):
    assert cli("show", "some run", "--follow").out.splitlines() == [*LINES, "some run: interrupted"]
    assert cli("show", "some run", "-f", "--last", "1").out.splitlines() == [LINES[2], "some run: interrupted"]
    assert cli("show", "some run", "-f", "--json").out == cli("show", "some run", "--json").out


def test_following_while_it_trains(cli, monkeypatch):
    """Every look at the run comes before something that happens to it; every line is told once, in its order."""
    made = Run.create("live", Config(epochs=12))
    told = []

    def again() -> None:
        """A run that went back to its checkpoint goes through an epoch again."""
        Path("live/metrics.jsonl").write_text(json.dumps(ROWS[0]) + "\n")

    events = [
        lambda: made.set_status("running"),
        lambda: made.append(ROWS[0]),
        lambda: made.append(ROWS[1]),
        again,
        lambda: made.append(ROWS[1] | {"loss": 0.625}),
        lambda: (made.append(ROWS[2]), made.set_status("finished")),
    ]

    def wait(seconds: float) -> None:
        told.append(seconds)
        events.pop(0)()

    monkeypatch.setattr("dessilbi.cli.show.time.sleep", wait)
    result = cli("show", "live", "--follow")
    assert result.out.splitlines() == [*LINES[:2], LINES[1].replace("0.5000", "0.6250"), LINES[2], "live: finished"]
    assert not events
    assert max(told) <= 1
