"""A selection at an early epoch knows what a run that ends there knows."""

from pathlib import Path

import pytest
import torch
from tests.training.nets import tiny
from tests.training.runs import SMALL, final_state

from dessilbi import Path as SelectionPath
from dessilbi import select
from dessilbi.applications.moment import Moment
from dessilbi.training import train
from dessilbi.training.run import Run

# With a constant threshold and step size, a shorter run is the beginning of a longer one.
WEIGHTS = SMALL.replace(conv="weight", schedule="constant", keep=None, lam=0.05, epochs=4, keep_epochs=(2,))


@pytest.mark.parametrize("keep", [0.05, 0.4])
def test_what_comes_later_plays_no_part(keep: float, tmp_path: Path) -> None:
    train(WEIGHTS, tmp_path / "long")
    train(WEIGHTS.replace(epochs=2), tmp_path / "short")
    short = SelectionPath.load(tmp_path / "short" / "path.safetensors")
    model = tiny()
    moment = Moment.of(Run.open(tmp_path / "long"), model, (1, 8, 8), 2)
    assert moment.epoch == 2
    assert [p["point"] for p in moment.path.points] == [p["point"] for p in short.points]
    ended = final_state(tmp_path / "short")["model"]
    assert all(torch.equal(value, ended[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(value, ended[name]) for name, value in moment.weights.items())
    mine, theirs = select(moment.path, keep=keep), select(short, keep=keep)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    # The long path, read there with what it remembers of its end, would say something else.
    later = select(SelectionPath.load(tmp_path / "long" / "path.safetensors"), len(short) - 1, keep=keep)
    if keep == 0.4:  # of which not all have entered by then
        assert any(not torch.equal(later[name], theirs[name]) for name in theirs)


def test_the_latest_checkpoint(tmp_path: Path) -> None:
    train(WEIGHTS.replace(epochs=2), tmp_path / "run")
    moment = Moment.of(Run.open(tmp_path / "run"), tiny(), (1, 8, 8))
    assert (moment.epoch, moment.state["epoch"]) == (2, 2)
