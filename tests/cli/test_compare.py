"""`dessilbi compare` and `dessilbi ticket`: from a preset to tables, files and figures, on digits."""

import json
import os
import shlex
from pathlib import Path

import pytest
from tests.cli.conftest import Cli

from dessilbi import Ticket
from dessilbi.applications.comparison import Comparison
from dessilbi.training.run import Run

SEARCH = ("--preset", "quick/lenet-mnist-ticket", "--data", "digits", "--batch", "256", "--device", "cpu")
SMALL = (*SEARCH, "--model-options", "widths=[4,6,12,10]", "--search-epochs", "2", "--epochs", "1", "--rewind", "1")


def test_a_comparison_goes_on_cell_by_cell(cli: Cli) -> None:
    made = cli("compare", "runs/grid", *SMALL, "--method", "dense,dessilbi-lamp@1", "--keep", "0.3",
               "--json", "one.json", "--figure", "one.svg")  # fmt: skip
    assert (made.status, made.err) == (0, "")
    cells = Comparison.open("runs/grid").table()["rows"]
    for row in cells:
        assert f"{100 * row['mean']:.2f}" in made.out
    written = json.loads(Path("one.json").read_text())
    assert written["rows"] == cells
    assert written["command"].startswith("dessilbi compare runs/grid --preset quick/lenet-mnist-ticket")
    assert written["date"]
    assert written["device"] == f"CPU, {os.cpu_count()} cores"
    drawn = Path("one.svg").read_text()
    assert drawn.startswith("<?xml")

    more = ("--method", "dense,dessilbi-lamp@1,snip", "--keep", "0.3,0.1", "--seed", "0")
    # Nothing but the description: the cells are left to others.
    from dessilbi.applications.comparison import Grid

    grid = Comparison.open("runs/grid").grid
    Comparison.create(
        "runs/grid", Grid(grid.search, ("dense", "dessilbi-lamp@1", "snip"), (0.3, 0.1), epochs=1, rewind=1)
    )
    lines = cli("compare", "runs/grid", "--todo").out.splitlines()
    assert lines == [
        "dessilbi compare runs/grid --cell dessilbi-lamp@1 0.1 0",
        "dessilbi compare runs/grid --cell snip 0.3 0",
        "dessilbi compare runs/grid --cell snip 0.1 0",
    ]
    assert cli(*shlex.split(lines[1])[1:]).status == 0
    shown = cli("compare", "runs/grid", "--show")
    assert "2 cells are still to do" in shown.out
    assert cli("compare", "runs/grid").status == 0
    assert cli("compare", "runs/grid", "--todo").out == ""
    assert cli("compare", "runs/grid", *SMALL, *more).status == 0  # the same again, from its options


def test_tickets_from_a_run_to_another_data_set(cli: Cli) -> None:
    search = ("--epochs", "2", "--keep-epochs", "1", "--data", "digits[0-4]")
    config = ("--preset", "quick/lenet-mnist-ticket", "--device", "cpu", "--model-options", "widths=[4,6,12,10]")
    assert cli("train", *config, *search, "--run", "search").status == 0
    found = cli("ticket", "find", "search", "--at", "2", "--keep", "0.3", "--allocation", "lamp", "--rewind", "1",
                "-o", "half.ticket")  # fmt: skip
    assert (found.status, found.err) == (0, "")
    assert "30 % of lenet5, found on digits[0-4] at epoch 2, starting from epoch 1" in found.out
    ticket = Ticket.load("half.ticket")
    shown = cli("ticket", "show", "half.ticket").out
    for name, kept in ticket.selection.per_layer().items():
        assert f"{name}  {100 * kept:.3g} %" in shown
    trained = cli(
        "ticket", "train", "half.ticket", "--data", "digits[5-9]", "--seed", "3", "--epochs", "1", "--run", "there"
    )
    assert trained.status == 0
    run = Run.open("there")
    assert (run.config.data, run.config.seed, run.status) == ("digits[5-9]", 3, "finished")
    assert run.environment["command"].startswith("dessilbi ticket train half.ticket")
    assert cli("ticket", "show", "there").out == shown
    assert cli("ticket", "train", "there", "--data", "digits[5-9]", "--run", "there", "--resume").status == 0


def test_a_sweep_and_a_transfer_are_comparisons(cli: Cli) -> None:
    sweep = cli("ticket", "sweep", "runs/sweep", *SMALL, "--at", "1,2", "--keep", "0.3", "--allocation", "erk")
    assert sweep.status == 0
    assert Comparison.open("runs/sweep").grid.methods == ("dense", "dessilbi-erk@1", "dessilbi-erk@2", "dessilbi-erk")
    assert "dessilbi-erk, keep 0.3: stopped after 2 of 2 epochs of the search, 0 saved" in sweep.out
    transfer = cli("ticket", "transfer", "runs/transfer", *SMALL, "--source", "digits[0-4]", "--target", "digits[5-9]",
                   "--at", "1", "--keep", "0.3", "--repeats", "1")  # fmt: skip
    assert (transfer.status, transfer.err) == (0, "")
    rows = Comparison.open("runs/transfer").table()["rows"]
    assert [row["method"] for row in rows] == ["dense", "dessilbi@1", "transferred@1", "random-like@1", "random"]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ("compare", 2, "name a FOLDER that is there, or say what to compare"),
        ("compare nowhere", 1, "nowhere: is no comparison"),
        ("compare runs/x --method magnitud --keep 0.1", 2, "did you mean 'magnitude'"),
        ("compare runs/x --keep 0.1,many", 2, "'many' of '0.1,many' is no number"),
        ("compare runs/x --seed 0-x", 2, "'0-x' of '0-x' is no whole number"),
        ("compare runs/x --rewind never --keep 0.1", 2, "'never' is neither an epoch nor the word none"),
        ("compare runs/x --keep 0.1 --todo", 2, "--cell, --todo and --show are about a FOLDER that is there"),
        ("ticket find nowhere -o x.ticket", 1, "no such run folder"),
        ("ticket train nowhere.ticket", 1, "no such file"),
        ("ticket fnd", 2, "did you mean 'find'"),
    ],
)
def test_what_is_wrong_is_one_line(cli: Cli, arguments: str, status: int, message: str) -> None:
    result = cli(*shlex.split(arguments))
    assert result.status == status
    assert message in result.err
    assert result.err.count("\n") == 1


def test_data_that_are_not_there_are_said_before_anything_is_trained(cli: Cli) -> None:
    wrong = cli("ticket", "transfer", "runs/x", *SMALL, "--source", "svhn", "--target", "digits", "--keep", "0.3")
    assert (wrong.status, wrong.out) == (1, "")
    assert "train_32x32.mat not found: run `dessilbi data get svhn --root data`" in wrong.err
    assert not list(Path("runs/x").glob("seed-*"))


def test_methods_are_listed(cli: Cli) -> None:
    listed = cli("compare", "--methods").out
    assert all(f"\n{name} " in f"\n{listed}" for name in ("dessilbi", "iterative", "snip", "slimming", "adabreg"))
