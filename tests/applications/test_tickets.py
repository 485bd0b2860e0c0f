"""Tickets found in a run: the selection, the weights, the allocation, and the way to their training."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.training.runs import SMALL

from dessilbi import Path as SelectionPath
from dessilbi import Selection, select
from dessilbi.applications import tickets
from dessilbi.baselines.paths import selected
from dessilbi.training import Config, train
from dessilbi.training.optimizers import build
from dessilbi.training.run import Run

SEARCH = SMALL.replace(conv="weight", keep=None, lam=0.02, schedule="constant", epochs=3, keep_epochs=(0, 1, 2, 3))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("tickets") / "search"
    train(SEARCH, folder)
    return Run.open(folder)


def test_weights_of_the_point_to_rewind_to(run: Run) -> None:
    for rewind, epoch in ((0, 0), (1, 1), (None, 3)):
        ticket = tickets.find(run, keep=0.3, rewind=rewind)
        expected = run.at_epoch(epoch)["model"]
        for name, value in ticket.weights.items():
            mask = ticket.selection.get(name)
            assert torch.equal(value, expected[name] if mask is None else expected[name] * mask), name
        assert ticket.facts["rewind"] == rewind


def test_without_a_fraction_it_is_the_support(run: Run) -> None:
    path = SelectionPath.load(run.path_file)
    ticket = tickets.find(run, at=2, rewind=1)
    at = [p["point"] for p in path.points].index(2)
    assert all(torch.equal(mask, path.support(name, at)) for name, mask in ticket.selection.items())


def test_provenance_travels_with_it(run: Run, tmp_path: Path) -> None:
    tickets.find(run, at=2, keep=0.3, rewind=1).save(tmp_path / "one.ticket")
    facts = tickets.load(tmp_path / "one.ticket").facts
    assert (facts["method"], facts["at"], facts["rewind"], facts["data"], facts["seed"]) == (
        "dessilbi", 2, 1, "digits", 0,
    )  # fmt: skip
    assert Config.from_dict(facts["config"]) == run.config
    assert facts["run"] == str(run.folder)


def test_an_allocation_shares_out_the_dual(run: Run) -> None:
    """LAMP by its definition, on V as the checkpoint has it, which is exact where the path has three percent."""
    model_of = torch.nn.Module
    state = run.latest()
    assert state is not None
    from tests.training.nets import tiny

    model: model_of = tiny()
    optimizer = build(run.config.replace(fused=False), model, torch.device("cpu"), (1, 8, 8))
    optimizer.load_state_dict(state["optimizer"])
    named = {"0.weight": model[0].weight, "5.weight": model[5].weight}  # type: ignore[index]
    v = {name: optimizer.dual(p).abs().double().numpy().ravel() for name, p in named.items()}  # type: ignore[attr-defined]
    scores = {}
    for name, x in v.items():
        order = np.argsort(-x)
        squares = x[order] ** 2
        scores[name] = np.empty_like(x)
        scores[name][order] = squares / np.cumsum(squares)
    every = np.concatenate(list(scores.values()))
    count = int(0.3 * len(every))
    cut = np.sort(every)[-count]
    sel = tickets.find(run, keep=0.3, rewind=1, allocation="lamp").selection
    for name, x in scores.items():
        mine = sel[name].numpy().ravel()
        assert abs(int(mine.sum()) - int((x >= cut).sum())) <= 0.02 * count
        assert (mine != (x >= cut)).mean() < 0.03
    assert sum(int(m.sum()) for m in sel.values()) == count


def test_uniform_gives_every_layer_the_same(run: Run) -> None:
    sel = tickets.find(run, keep=0.25, rewind=1, allocation="uniform").selection
    assert all(abs(int(m.sum()) - 0.25 * m.numel()) <= 1 for m in sel.values())
    by_entry = tickets.find(run, keep=0.25, rewind=1).selection
    assert any(abs(int(m.sum()) - 0.25 * m.numel()) > 1 for m in by_entry.values())
    with pytest.raises(ValueError, match=r"allocation='lamp' needs keep"):
        tickets.find(run, allocation="lamp")
    with pytest.raises(ValueError, match=r"allocation must be one of .* got 'fair'"):
        tickets.find(run, keep=0.1, allocation="fair")


def test_a_layer_that_is_lost_is_a_warning(run: Run) -> None:
    weights = run.at_epoch(1)["model"]
    masks = {"0.weight": torch.zeros(6, 1, 3, 3, dtype=torch.bool), "5.weight": torch.ones(10, 54, dtype=torch.bool)}
    with pytest.warns(UserWarning, match=r"nothing is kept of 0\.weight"):
        tickets.made(Selection(masks), weights, run.config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tickets.made(Selection({**masks, "0.weight": ~masks["0.weight"]}), weights, run.config)


def test_training_follows_the_papers_schedule(run: Run) -> None:
    config = tickets.training(tickets.find(run, keep=0.3, rewind=1), epochs=160)
    assert (config.optimizer, config.momentum, config.lr, config.lr_at, config.lr_drop) == (
        "sgd", 0.9, 0.05, (80, 120), 10.0,
    )  # fmt: skip
    assert (config.epochs, config.keep_epochs, config.data) == (160, (), "digits")


@pytest.mark.parametrize(
    ("source", "target", "shape"),
    [
        ("mnist", "fashion-mnist", None),
        ("cifar10[0-4]", "cifar10[5-9]", None),
        ("cifar10", "mnist", (3, 32, 32)),
        ("mnist", "cifar10", (1, 32, 32)),
    ],
)
def test_other_data_are_brought_to_what_the_network_takes(
    source: str, target: str, shape: tuple[int, ...] | None
) -> None:
    assert tickets.common_shape(SEARCH.replace(data=source), target) == shape


def test_what_a_run_cannot_give(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"epoch 7 is not on its path, which has epochs 1 to 3"):
        tickets.find(run, at=7, keep=0.3)
    train(SEARCH.replace(epochs=1, keep_epochs=()), tmp_path / "short")
    with pytest.raises(ValueError, match=r"there is no checkpoint of the end of epoch 0"):
        tickets.find(Run.open(tmp_path / "short"), keep=0.3, rewind=0)
    train(SEARCH.replace(epochs=1, optimizer="sgd"), tmp_path / "sgd")
    with pytest.raises(ValueError, match=r"a run of sgd leaves no path"):
        tickets.find(Run.open(tmp_path / "sgd"), keep=0.3)


def test_without_an_allocation_it_is_the_order_of_entry(run: Run) -> None:
    path = SelectionPath.load(run.path_file)
    expected = select(path, keep=0.3)
    assert all(torch.equal(mask, expected[name]) for name, mask in selected(path, 0.3).items())
