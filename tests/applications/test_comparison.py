"""Comparisons: what each cell selects and costs, worked out apart from it; a grid that goes on, grows, and repeats."""

import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from joblib import register_parallel_backend
from joblib._parallel_backends import LokyBackend
from tests.training.runs import SMALL, same
from torch import Tensor

from dessilbi import Path as SelectionPath
from dessilbi import Selection, select
from dessilbi.applications import tickets
from dessilbi.applications.comparison import Cell, Comparison, Grid
from dessilbi.applications.methods import KINDS, Method
from dessilbi.data import read
from dessilbi.report.comparison import figure
from dessilbi.settling import distance
from dessilbi.training import Config, train
from dessilbi.training.run import Run

SEARCH = SMALL.replace(conv="weight", keep=None, lam=0.02, schedule="constant", epochs=4, settle=0.9)
STEPS = math.ceil(len(read("digits", split="train").labels) / 128)  # of an epoch
MACS = 6 * 3 * 3 * 9 + 54 * 10  # of tests.training.nets.tiny on 8 x 8 pixels
METHODS = ("dense", "dessilbi@2", "dessilbi@1", "dessilbi", "random-like@2", "magnitude", "magnitude-lamp@1",
           "iterative-uniform", "iterative@2", "snip", "random", "gradual")  # fmt: skip


def cell_of(comparison: Comparison, method: str, keep: float = 0.3, seed: int = 0) -> dict[str, Any]:
    found = comparison.outcome(Cell(method, keep, seed))
    assert found is not None
    return found


def selection_of(comparison: Comparison, method: str, keep: float = 0.3, repeat: str = "") -> Selection:
    return tickets.load(comparison.folder / "seed-0" / f"{method}-{keep:g}{repeat}").selection


def weights_of(run: Run) -> dict[str, Tensor]:
    state = run.latest()
    assert state is not None
    weights: dict[str, Tensor] = state["model"]
    return weights


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    folder = tmp_path_factory.mktemp("comparison") / "grid"
    comparison = Comparison.create(folder, Grid(SEARCH, METHODS, (0.3,), epochs=3, rewind=1, repeats=2))
    assert comparison.go() == []
    return comparison


@pytest.mark.parametrize("epoch", [1, 2])
def test_our_ticket_is_what_a_run_that_ended_there_selects(done: Comparison, epoch: int, tmp_path: Path) -> None:
    """That of the first epoch too, though the search had gone on to the second when it was asked for."""
    train(SEARCH.replace(epochs=epoch, keep_epochs=(1,)), tmp_path / "run")
    expected = select(SelectionPath.load(tmp_path / "run" / "path.safetensors"), keep=0.3)
    mine = selection_of(done, f"dessilbi@{epoch}")
    assert all(torch.equal(mine[name], mask) for name, mask in expected.items())
    ticket = tickets.load(done.folder / "seed-0" / f"dessilbi@{epoch}-0.3")
    early = Run.open(tmp_path / "run").at_epoch(1)["model"]
    for name, value in early.items():
        assert torch.equal(ticket.weights[name], value * mine[name] if name in mine else value), name


def test_every_ticket_is_trained_masked(done: Comparison) -> None:
    for method in METHODS[1:]:
        repeat = "-1" if Method.parse(method).by_chance else ""
        run = Run.open(done.folder / "seed-0" / f"{method}-0.3{repeat}")
        assert (run.status, len(run.metrics())) == ("finished", 3)
        assert cell_of(done, method)["accuracies"][-1] == run.metrics()[-1]["dense"]
        sel, weights = tickets.load(run.folder).selection, weights_of(run)
        total = sum(mask.numel() for mask in sel.values())
        assert sum(int(mask.sum()) for mask in sel.values()) == int(0.3 * total), method
        for name, mask in sel.items():
            assert not weights[name][~mask].any()
            assert weights[name][mask].count_nonzero() > 0.9 * mask.sum()


def test_magnitude_keeps_the_largest_weights_of_the_dense_network(done: Comparison) -> None:
    sel, weights = selection_of(done, "magnitude"), weights_of(Run.open(done.folder / "seed-0" / "dense"))
    values = torch.cat([weights[name].abs().flatten() for name in sel])
    kept = torch.cat([mask.flatten() for mask in sel.values()])
    assert values[kept].min() > values[~kept].max()


def test_iterative_rounds_are_nested_and_uniform(done: Comparison) -> None:
    before = None
    for rung in ("0.8", "0.64", "0.512", "0.4096", "0.32768"):
        sel = tickets.load(done.folder / "seed-0" / "iterative-uniform" / rung).selection
        for name, mask in sel.items():
            assert int(mask.sum()) == pytest.approx(float(rung) * mask.numel(), abs=1)
            assert before is None or not (mask & ~before[name]).any()
        before = sel
    last = selection_of(done, "iterative-uniform")
    assert before is not None
    assert all(not (mask & ~before[name]).any() for name, mask in last.items())


def test_rounds_may_end_early(done: Comparison) -> None:
    """Every round selects from the weights that its training has at the end of that epoch, by hand: the largest."""
    folder, rungs = done.folder / "seed-0" / "iterative-global@2", ("0.8", "0.64", "0.512", "0.4096", "0.32768")
    weights = Run.open(done.folder / "seed-0" / "dense").at_epoch(2)["model"]
    start = Run.open(done.folder / "seed-0" / "dense").at_epoch(1)["model"]
    for rung in rungs:
        ticket = tickets.load(folder / rung)
        flat = torch.cat([weights[name].abs().flatten() for name in ticket.selection])
        mask = torch.cat([mask.flatten() for mask in ticket.selection.values()])
        assert int(mask.sum()) == int(float(rung) * len(flat) + 1e-6)
        assert flat[mask].min() >= flat[~mask].max()
        assert torch.equal(ticket.weights["5.bias"], start["5.bias"])
        run = Run.open(folder / rung)
        assert (run.status, len(run.metrics())) == ("paused", 2)
        weights = weights_of(run)
    assert cell_of(done, "iterative@2")["at"] == 2


def test_random_tickets_have_the_densities_of_ours_and_differ(done: Comparison) -> None:
    ours = selection_of(done, "dessilbi@2")
    first, second = (selection_of(done, "random-like@2", repeat=f"-{i}") for i in (0, 1))
    for name, mask in ours.items():
        assert int(first[name].sum()) == int(second[name].sum()) == int(mask.sum())
    assert distance(first, second) > 0.5
    assert len(cell_of(done, "random-like@2")["accuracies"]) == 2


def test_the_stopping_rule_says_when(done: Comparison) -> None:
    settled = cell_of(done, "dessilbi")
    changes = [m["change"] for m in Run.open(done.folder / "seed-0" / "dessilbi-settled-0.3").metrics()]
    assert len(changes) == settled["at"] == 4  # three changes, each below the 0.9 that SEARCH allows
    assert max(changes[1:]) < 0.9
    assert settled["steps"] == 4 * STEPS


def test_costs(done: Comparison) -> None:
    rounds = math.ceil(math.log(0.3) / math.log(0.8))
    steps = {
        "dense": 3 * STEPS,
        "dessilbi@2": 2 * STEPS,
        "dessilbi@1": STEPS,
        "dessilbi": 4 * STEPS,
        "magnitude": 3 * STEPS,
        "magnitude-lamp@1": STEPS,
        "iterative-uniform": 3 * STEPS * rounds,  # a dense training, and one for each round but the last
        "iterative@2": 2 * STEPS * rounds,
        "snip": STEPS,  # a batch or eight, and the epoch to rewind to
        "random": STEPS,
        "gradual": 3 * STEPS,
    }
    for method, number in steps.items():
        found = cell_of(done, method, 1.0 if method == "dense" else 0.3)
        assert found["steps"] == number, method
        assert found["cost"] == pytest.approx(number / (3 * STEPS))
        assert found["macs"] == number * 128 * MACS


def test_what_is_done_stays_done_and_what_is_new_is_done(done: Comparison) -> None:
    marked = {file: file.stat().st_mtime_ns for file in done.folder.rglob("*.json")}
    said: list[str] = []
    assert done.go(note=said.append) == []
    assert said == []
    wider = Comparison.create(done.folder, Grid(SEARCH, (*METHODS, "snip-erk"), (0.3,), epochs=3, rewind=1, repeats=2))
    assert [str(cell) for cell in wider.todo()] == ["snip-erk-0.3-0"]
    assert wider.go(note=said.append) == []
    assert len(said) == 1
    assert "snip-erk-0.3" in said[0]
    assert all(file.stat().st_mtime_ns == at for file, at in marked.items() if file.name != "comparison.json")
    Comparison.create(done.folder, done.grid)


def test_a_cell_that_was_cut_off_goes_on_where_its_run_was(done: Comparison, tmp_path: Path) -> None:
    whole = cell_of(done, "magnitude")
    again = Comparison.create(tmp_path / "again", done.grid)
    bench = again.grid.bench(again.folder, 0, lambda _: None)
    bench.run("dense", bench.training_config, until=2)  # as far as a killed process came
    assert Run.open(again.folder / "seed-0" / "dense").status == "paused"
    found = again.do(Cell("magnitude", 0.3, 0))
    assert {**found, "commit": None} == {**whole, "commit": None}


def test_side_by_side_is_the_same_as_one_by_one(tmp_path: Path) -> None:
    grid = Grid(SEARCH.replace(epochs=1), ("dessilbi@1", "magnitude"), (0.5, 0.2), (0, 1), epochs=1, rewind=0)
    one, many = (Comparison.create(tmp_path / name, grid) for name in ("one", "many"))
    assert one.go() == many.go(jobs=2) == []
    rows = [comparison.table()["rows"] for comparison in (one, many)]
    assert rows[0] == rows[1]
    assert len(rows[0]) == 4
    masks = [tickets.load(c.folder / "seed-1" / "dessilbi@1-0.5").selection for c in (one, many)]
    assert distance(*masks) == 0
    other = tickets.load(one.folder / "seed-0" / "dessilbi@1-0.5").selection
    assert distance(masks[0], other) > 0


def test_another_backend_of_joblib_does_the_cells(tmp_path: Path) -> None:
    made: list[LokyBackend] = []

    def elsewhere(**options: Any) -> LokyBackend:
        made.append(LokyBackend(**options))
        return made[-1]

    register_parallel_backend("elsewhere", elsewhere)
    grid = Grid(SEARCH.replace(epochs=1), ("snip", "magnitude"), (0.5,), epochs=1, rewind=0)
    comparison = Comparison.create(tmp_path / "grid", grid)
    assert comparison.go(backend="elsewhere") == []
    assert (len(made), comparison.todo()) == (1, [])


def test_backends_and_jobs_that_there_are_not(done: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray.util.joblib", None)
    with pytest.raises(ValueError, match="Ray is not installed: pip install ray, or leave backend out"):
        done.go(backend="ray")
    with pytest.raises(ValueError, match="backend: nowhere"):
        done.go(backend="nowhere")
    with pytest.raises(ValueError, match="jobs=0: give at least 1"):
        done.go(jobs=0)


def test_fine_tuning_instead_of_rewinding(tmp_path: Path) -> None:
    grid = Grid(SEARCH.replace(epochs=1), ("dessilbi@1", "iterative"), (0.7,), epochs=2, rewind=None)
    comparison = Comparison.create(tmp_path / "grid", grid)
    assert comparison.go() == []
    found = tickets.load(comparison.folder / "seed-0" / "dessilbi@1-0.7")
    there = weights_of(Run.open(comparison.folder / "seed-0" / "dessilbi"))
    assert torch.equal(found.weights["5.bias"], there["5.bias"])
    assert Run.open(comparison.folder / "seed-0" / "dessilbi@1-0.7").metrics()[0]["lr"] == pytest.approx(0.005)
    # Iterative-Pruning-A goes on from the weights of the round before.
    last = tickets.load(comparison.folder / "seed-0" / "iterative-0.7")
    before = weights_of(Run.open(comparison.folder / "seed-0" / "iterative-global" / "0.8"))
    assert torch.equal(last.weights["5.bias"], before["5.bias"])
    with pytest.raises(ValueError, match=r"snip selects before anything is trained"):
        Method.parse("snip").find(grid.bench(comparison.folder, 0, lambda _: None), 0.7)


def test_transfer_between_halves_of_the_classes(tmp_path: Path) -> None:
    grid = Grid(
        SEARCH.replace(data="digits[5-9]", epochs=1), ("dessilbi@1", "transferred@1"), (0.3,), epochs=1, rewind=1,
        source="digits[0-4]",
    )  # fmt: skip
    comparison = Comparison.create(tmp_path / "grid", grid)
    assert comparison.go() == []
    own, theirs = (tickets.load(tmp_path / "grid" / "seed-0" / f"{method}-0.3") for method in grid.methods)
    assert (own.facts["data"], theirs.facts["data"]) == ("digits[5-9]", "digits[0-4]")
    train(SEARCH.replace(data="digits[0-4]", epochs=1), tmp_path / "source")
    expected = select(SelectionPath.load(tmp_path / "source" / "path.safetensors"), keep=0.3)
    assert all(torch.equal(theirs.selection[name], mask) for name, mask in expected.items())
    assert cell_of(comparison, "transferred@1")["macs"] == math.ceil(
        len(read("digits[5-9]", split="train").labels) / 128
    ) * 128 * (6 * 3 * 3 * 9 + 54 * 5)


def written(folder: Path, grid: Grid, accuracies: dict[Cell, list[float]]) -> Comparison:
    """A comparison whose cells hold these accuracies."""
    comparison = Comparison.create(folder, grid)
    for cell, values in accuracies.items():
        file = comparison.file(cell)
        file.parent.mkdir(exist_ok=True)
        known = {
            "accuracies": values,
            "at": 2,
            "kept": cell.keep,
            "emptied": ["a"],
            "cost": 0.5,
            "macs": 10,
            "steps": 1,
        }
        file.write_text(json.dumps({**cell._asdict(), **known, "commit": "c"}))
    return comparison


def test_the_table(tmp_path: Path) -> None:
    grid = Grid(SEARCH, ("snip", "magnitude", "random"), (0.1, 0.2), (0, 1, 2), epochs=3, rewind=1)
    comparison = written(
        tmp_path / "grid", grid,
        {
            Cell("magnitude", 0.1, 0): [0.5], Cell("magnitude", 0.1, 1): [0.6], Cell("magnitude", 0.1, 2): [0.7],
            Cell("snip", 0.1, 0): [0.4], Cell("snip", 0.1, 2): [0.8],
            Cell("random", 0.1, 0): [0.1, 0.3], Cell("snip", 0.2, 1): [0.9],
        },
    )  # fmt: skip
    table = comparison.table()
    rows = {(row["method"], row["keep"]): row for row in table["rows"]}
    assert [(row["keep"], row["method"]) for row in table["rows"]] == [
        (0.2, "snip"), (0.1, "snip"), (0.1, "magnitude"), (0.1, "random"),
    ]  # fmt: skip
    assert table["missing"] == 3 * 2 * 3 - 7
    snip, reference, random = (rows[m, 0.1] for m in ("snip", "magnitude", "random"))
    assert (reference["mean"], reference["sd"]) == (pytest.approx(0.6), pytest.approx(0.1))
    assert reference["difference"] is None
    # Paired: −0.1 with seed 0 and +0.1 with seed 2; seed 1 has no pair.
    assert (snip["mean"], snip["difference"]) == (pytest.approx(0.6), pytest.approx(0.0))
    assert snip["difference_sd"] == pytest.approx(statistics.stdev([-0.1, 0.1]))
    assert (random["mean"], random["seeds"], random["difference"]) == (pytest.approx(0.2), 1, pytest.approx(-0.3))
    assert rows["snip", 0.2]["difference"] is None
    assert snip["emptied"] == 1


def test_one_at_chance_leaves_the_others_apart(tmp_path: Path) -> None:
    grid = Grid(SEARCH, ("snip", "magnitude", "random"), (0.1,), epochs=3, rewind=1)
    known = {Cell("snip", 0.1, 0): [0.98], Cell("magnitude", 0.1, 0): [0.99]}
    axes = figure(written(tmp_path / "near", grid, known).table()).axes[0]
    assert axes.get_yscale() == "linear"
    far = written(tmp_path / "far", grid, {**known, Cell("random", 0.1, 0): [0.1]})
    axes = figure(far.table()).axes[0]
    height = axes.transData.transform([(0.1, y) for y in (10, 98, 99)])[:, 1]
    # Errors of 90, 2 and 1 %: the logarithm halves as often everywhere.
    assert (height[2] - height[1]) / (height[1] - height[0]) == pytest.approx(math.log(2) / math.log(45))
    assert axes.get_ylim() == pytest.approx((5, 99.5))


@pytest.mark.parametrize(
    ("methods", "reference"),
    [
        (("magnitude-erk", "magnitude"), "magnitude"),
        (("snip", "magnitude-erk@1", "magnitude-lamp", "magnitude-erk"), "magnitude-lamp"),
        (("snip", "magnitude-erk@1"), "magnitude-erk@1"),
        (("snip",), "magnitude"),
    ],
)
def test_what_the_others_are_paired_with(methods: tuple[str, ...], reference: str, tmp_path: Path) -> None:
    assert Grid(SEARCH, methods, (0.1,), epochs=3, rewind=1).reference == reference
    comparison = Comparison.create(tmp_path / "grid", Grid(SEARCH, methods, (0.1,), epochs=3, rewind=1))
    wider = Comparison.create(tmp_path / "grid", Grid(SEARCH, (*methods, "magnitude"), (0.1,), epochs=3, rewind=1))
    assert (comparison.grid.reference, wider.grid.reference) == (reference, "magnitude")
    assert Comparison.open(tmp_path / "grid").grid == wider.grid


def test_what_goes_wrong_is_said_and_the_rest_is_done(tmp_path: Path) -> None:
    grid = Grid(SEARCH.replace(epochs=1), ("magnitude", "magnitude-lamp"), (0.001,), epochs=1, rewind=0)
    comparison = Comparison.create(tmp_path / "grid", grid)
    (wrong,) = comparison.go()
    assert "magnitude-lamp-0.001-0" in wrong
    assert "fewer than there are tensors" in wrong
    assert [cell.method for cell in comparison.todo()] == ["magnitude-lamp"]
    assert cell_of(comparison, "magnitude", 0.001)["kept"] == 0
    with pytest.raises(ValueError, match="there is no cell snip-0.001-0"):
        comparison.do(Cell("snip", 0.001, 0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ()}, "methods is empty"),
        ({"methods": ("magnitud",)}, r"method 'magnitud': did you mean 'magnitude'"),
        ({"methods": ("snip@2",)}, r"method 'snip@2': snip has no epoch to choose"),
        ({"methods": ("slimming-erk",)}, r"slimming decides by itself what each layer gets"),
        ({"methods": ("dessilbi@0",)}, r"after @ comes an epoch, counted from 1"),
        ({"methods": ("dessilbi@9",)}, r"dessilbi@9: its run has only 4 epochs"),
        ({"methods": ("iterative@4",)}, r"iterative@4: its run has only 3 epochs"),
        ({"methods": ("transferred",)}, r"needs a source"),
        ({"keeps": (1.5,)}, r"keep=1.5: must be a fraction in \(0, 1\)"),
        ({"keeps": (0.12345678,)}, r"keep=0.12345678: cells are named by it: give six digits at most, 0.123457"),
        ({"rewind": 4}, r"rewind=4: must be an epoch of the search and of dense training, from 0 to 3"),
        ({"repeats": 0}, r"repeats=0: must be at least 1"),
        ({"search": SMALL.replace(optimizer="sgd", keep=None)}, r"optimizer='sgd' leaves no path"),
    ],
)
def test_grids_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Grid(**{"search": SEARCH, "methods": ("snip",), "keeps": (0.1,), "epochs": 3, "rewind": 1, **changes})


def test_folders_that_are_something_else(done: Comparison, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds a comparison of other runs \(nu: 10.0 -> 20.0"):
        Comparison.create(done.folder, Grid(SEARCH.replace(nu=20.0), METHODS, (0.3,), epochs=3, rewind=1, repeats=2))
    with pytest.raises(ValueError, match=r"epochs: 3 -> 2"):
        Comparison.create(done.folder, Grid(SEARCH, METHODS, (0.3,), epochs=2, rewind=1, repeats=2))
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="is no comparison"):
        Comparison.create(tmp_path, done.grid)
    with pytest.raises(FileNotFoundError, match="is no comparison"):
        Comparison.open(tmp_path)
    (tmp_path / "comparison.json").write_text('{"version": 99}')
    with pytest.raises(ValueError, match="newer than 1"):
        Comparison.open(tmp_path)


def test_every_method_has_words_and_a_name() -> None:
    for name, kind in KINDS.items():
        assert Method.parse(name).kind == name
        assert kind.words
    assert Method.parse("soft-filters") == ("soft-filters", None, None)
    assert Method.parse("random-like-lamp@3") == ("random-like", "lamp", 3)


MNIST = SEARCH.replace(model="lenet5", data="mnist", data_root="tests/data/mnist-5000", keep=0.3)


@pytest.mark.parametrize(("search", "keeps"), [(SEARCH, (0.2, 0.1)), (MNIST, (0.1,))], ids=("digits", "mnist"))
def test_a_sweep_with_three_seeds(search: Config, keeps: tuple[float, ...], tmp_path: Path) -> None:
    """Points and fractions, the epoch where the rule fires, and what others select; and some of it once more."""
    methods = ("dense", "dessilbi-lamp@1", "dessilbi-lamp@2", "dessilbi-lamp", "magnitude-lamp", "snip", "random")
    grid = Grid(search, methods, keeps, (0, 1, 2), epochs=2, rewind=1, repeats=1)
    comparison = Comparison.create(tmp_path / "grid", grid)
    assert comparison.go() == []
    rows = {(row["method"], row["keep"]): row for row in comparison.table()["rows"]}
    assert len(rows) == 1 + 6 * len(keeps)
    for row in rows.values():
        assert row["seeds"] == len(row["accuracies"]) == 3
        assert all(0 < accuracy < 1 for accuracy in row["accuracies"])
        assert row["sd"] == pytest.approx(statistics.stdev(row["accuracies"]))
    # The search of a seed is one run; it stops where the rule fires: with settle=0.9 after three changes.
    assert [rows[m, 0.1]["at"] for m in methods[1:]] == [1, 2, 4, 2, 0, 0]
    assert [rows[m, 0.1]["cost"] for m in methods[1:]] == [0.5, 1, 2, 1, 0.5, 0.5]
    for seed in grid.seeds:
        folder = comparison.folder / f"seed-{seed}"
        early, settled = (Run.open(folder / name) for name in ("dessilbi", "dessilbi-settled-lamp-0.1"))
        assert (len(early.metrics()), len(settled.metrics())) == (2, 4)
        assert (settled.config.settle_keep, settled.config.settle_allocation) == (0.1, "lamp")
        for method in methods[1:]:
            for keep in keeps:
                run = Run.open(folder / f"{method}-{keep:g}")
                sel, weights = tickets.load(run.folder).selection, weights_of(run)
                assert sum(int(m.sum()) for m in sel.values()) == int(keep * sum(m.numel() for m in sel.values()))
                assert not any(weights[name][~mask].any() for name, mask in sel.items())
    again = Comparison.create(tmp_path / "again", grid)
    for cell in (Cell("dessilbi-lamp@2", 0.1, 2), Cell("magnitude-lamp", 0.1, 2), Cell("snip", 0.1, 2)):
        assert {**again.do(cell), "commit": ""} == {**(comparison.outcome(cell) or {}), "commit": ""}
        first, second = (Run.open(c.folder / "seed-2" / f"{cell.method}-0.1") for c in (comparison, again))
        assert same(weights_of(first), weights_of(second))
