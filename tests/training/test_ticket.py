"""Runs that train a ticket, that save their first state, and that stop when the selection has settled."""

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from dessilbi import Path as SelectionPath
from dessilbi import Selection, Ticket, select
from dessilbi.settling import distance
from dessilbi.training import Config, train
from dessilbi.training.run import Run
from tests.training.nets import tiny
from tests.training.runs import SMALL, Stops, final_state, numbers, same

SGD = SMALL.replace(optimizer="sgd", keep=None, checkpoint_every=5, epochs=2)


@pytest.fixture
def ticket(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    masks = {"0.weight": torch.rand(6, 1, 3, 3) < 0.5, "5.weight": torch.rand(10, 54) < 0.2}
    Ticket(Selection(masks), tiny().state_dict(), {"data": "digits"}).save(tmp_path / "one.ticket")
    return tmp_path / "one.ticket"


def test_it_starts_from_the_ticket_and_keeps_its_mask(ticket: Path, tmp_path: Path) -> None:
    given = Ticket.load(ticket)
    still = SGD.replace(ticket=str(ticket), lr=0.0, momentum=0.0, epochs=1, keep_epochs=(0,))
    train(still, tmp_path / "still")
    for state in (final_state(tmp_path / "still"), Run.open(tmp_path / "still").at_epoch(0)):
        for name in ("0.weight", "0.bias", "1.weight", "5.weight", "5.bias"):
            assert torch.equal(state["model"][name], given.weights[name]), name
    learning = SGD.replace(ticket=str(ticket))
    train(learning, tmp_path / "whole")
    for name, mask in given.selection.items():
        assert torch.equal(final_state(tmp_path / "whole")["model"][name] != 0, mask)
    assert numbers(tmp_path / "whole")[-1]["dense"] > 0.2  # chance is 0.1

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(learning, tmp_path / "parts", progress=Stops(1, 7, stop))
    ticket.unlink()  # the run has its own
    train(learning, tmp_path / "parts", resume=True)
    assert same(final_state(tmp_path / "parts"), final_state(tmp_path / "whole"))


def test_two_masks_are_one_too_many() -> None:
    with pytest.raises(ValueError, match=r"mask='a' and ticket='b'"):
        Config(mask="a", ticket="b")
    with pytest.raises(ValueError, match=r"ticket='b' with fsdp=True"):
        Config(ticket="b", fsdp=True)


def test_the_first_state_is_that_of_the_seed(tmp_path: Path) -> None:
    train(SMALL.replace(epochs=1, keep_epochs=(0, 1), seed=4), tmp_path / "run")
    torch.manual_seed(4)
    new = tiny().state_dict()
    first = Run.open(tmp_path / "run").at_epoch(0)
    assert (first["epoch"], first["steps"], first["points"]) == (0, 0, 0)
    assert all(torch.equal(first["model"][name], value) for name, value in new.items())


def test_drops_at_given_epochs(tmp_path: Path) -> None:
    config = SGD.replace(schedule="step", lr=0.08, lr_drop=4.0, lr_at=(1, 2), epochs=4)
    train(config, tmp_path / "run")
    assert [m["lr"] for m in Run.open(tmp_path / "run").metrics()] == pytest.approx([0.08, 0.02, 0.005, 0.005])


WEIGHTS = SMALL.replace(conv="weight", settle_keep=0.3, schedule="constant", epochs=8, keep=None, lam=0.01)


def test_a_run_stops_when_the_selection_has_settled(tmp_path: Path) -> None:
    summary = train(WEIGHTS.replace(settle=1.0, epochs=9), tmp_path / "loose")
    # Every distance below 1 counts: three of them are known after the fourth epoch.
    assert (summary["epoch"], summary["settled"], summary["stopped_early"]) == (4, True, True)
    assert train(WEIGHTS.replace(settle=1e-9, epochs=4), tmp_path / "strict")["settled"] is False
    # The change that is reported is that of the selections of runs which end there.
    found: list[Selection] = []
    for epochs in (1, 2, 3):
        folder = tmp_path / f"{epochs}"
        train(WEIGHTS.replace(epochs=epochs), folder)
        found.append(select(SelectionPath.load(folder / "path.safetensors"), keep=0.3))
    changes = [m["change"] for m in Run.open(tmp_path / "strict").metrics()]
    assert changes[0] is None
    assert changes[1:3] == pytest.approx([distance(*found[:2]), distance(*found[1:])])
    assert all(0 < c < 1 and math.isfinite(c) for c in changes[1:])


def test_what_settles_is_what_the_ticket_will_keep(tmp_path: Path) -> None:
    """With LAMP by its definition, on V of runs that end there."""
    train(WEIGHTS.replace(settle=1e-9, epochs=3, settle_allocation="lamp"), tmp_path / "run")
    found: list[np.ndarray] = []
    for epochs in (1, 2, 3):
        train(WEIGHTS.replace(epochs=epochs, settle_keep=None), tmp_path / f"{epochs}")
        path, scores = SelectionPath.load(tmp_path / f"{epochs}" / "path.safetensors"), []
        for name in path.names:
            squares = path.magnitude(name).double().numpy().ravel() ** 2
            scores.append([u / squares[squares >= u].sum() for u in squares])
        every = np.concatenate(scores)
        found.append(every >= np.sort(every)[-int(0.3 * every.size)])
    expected = [1 - (a & b).sum() / (a | b).sum() for a, b in pairwise(found)]
    changes = [m["change"] for m in Run.open(tmp_path / "run").metrics()]
    # The path file has |V| to three percent: a few weights at the edge fall on the other side of it.
    assert changes[1:] == pytest.approx(expected, abs=0.03)
    train(WEIGHTS.replace(settle=1e-9, epochs=3), tmp_path / "entry")  # another selection, other changes
    assert abs(Run.open(tmp_path / "entry").metrics()[2]["change"] - expected[1]) > 0.05


def test_it_settles_alike_after_an_interruption(tmp_path: Path) -> None:
    config = WEIGHTS.replace(settle=1.0)
    train(config, tmp_path / "whole")

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "parts", progress=Stops(3, 4, stop))
    train(config, tmp_path / "parts", resume=True)
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")
    again = train(config, tmp_path / "parts", resume=True)  # there is nothing left to do
    assert (again["epoch"], again["settled"]) == (4, True)


def test_settling_needs_a_path() -> None:
    with pytest.raises(ValueError, match=r"settle_keep=0.1 needs a path"):
        Config(optimizer="sgd", settle_keep=0.1)


def test_a_run_that_pauses_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    config = SMALL.replace(epochs=3)
    train(config, tmp_path / "whole")
    assert train(config, tmp_path / "parts", until=1)["epoch"] == 1
    assert Run.open(tmp_path / "parts").status == "paused"
    assert train(config, tmp_path / "parts", until=1, resume=True)["epoch"] == 1
    train(config, tmp_path / "parts", resume=True, until=7)
    assert Run.open(tmp_path / "parts").status == "finished"
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")
    assert same(final_state(tmp_path / "parts"), final_state(tmp_path / "whole"))
