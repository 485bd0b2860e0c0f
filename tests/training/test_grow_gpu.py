"""Growing on a GPU: after every growth the step is captured anew, on the new parameters."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dessilbi.applications.grow import grow
from dessilbi.training import checkpoint
from dessilbi.training.run import Run
from dessilbi.training.step import GraphStep
from tests.training.runs import SMALL, numbers

pytestmark = pytest.mark.gpu

# Decisions that no rounding can change: all layers grow alike, twice.
GPU = SMALL.replace(
    device="cuda",
    model="tests.training.nets:seed",
    channels_last=True,
    keep=None,
    lam=0.002,
    lr=0.02,
    schedule="constant",
    epochs=9,
    grow_options={"every": 2, "then": 3, "policy": "uniform", "by": 0.5, "growths": 2},
)


def widths(folder: Path) -> list[dict[str, int]]:
    stages = json.loads((folder / "growth.json").read_text())["stages"]
    return [stage["widths"] for stage in stages]


def close(folder: Path, other: Path) -> None:
    for one, two in zip(numbers(folder), numbers(other), strict=True):
        assert one.keys() == two.keys()
        for name in one:
            assert one[name] == pytest.approx(two[name], rel=0.03, abs=0.02), name


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"scaling": True, "clip": 1.0, "linear": "none"},
        {"conv": "channel", "model": "resnet20", "model_options": {"widths": [4, 4, 4]}},
        {"optimizer": "dessiadamw", "lr": 2e-3},
    ],
)
def test_captured_growth_is_eager_growth(changes: dict[str, Any], tmp_path: Path) -> None:
    config = GPU.replace(**changes)
    grow(config, tmp_path / "eager")
    grow(config.replace(compile="graph"), tmp_path / "graph")
    assert widths(tmp_path / "graph") == widths(tmp_path / "eager")
    first, second, third, last = widths(tmp_path / "graph")
    assert all(first[name] <= second[name] <= third[name] for name in first)
    assert sum(first.values()) < sum(second.values()) < sum(third.values()) == sum(last.values())
    close(tmp_path / "graph", tmp_path / "eager")


def test_every_size_is_captured_once_and_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[GraphStep] = []
    before = GraphStep.__init__

    def init(self: GraphStep, *arguments: Any) -> None:
        before(self, *arguments)
        steps.append(self)

    monkeypatch.setattr(GraphStep, "__init__", init)
    replays, replay = [], torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda self: (replays.append(id(self)), replay(self)))
    grow(GPU.replace(compile="graph", keep_checkpoints=9), tmp_path / "run")
    assert len(steps) == 3
    assert all(step.graph is not None for step in steps)
    # 12 steps an epoch, of which the last is smaller; two epochs for each of two sizes, and 2 + 3 for the third. Three
    # steps of each are eager.
    assert len(replays) == (2 * 11 - 3) + (2 * 11 - 3) + (5 * 11 - 3)
    # What replays move are the parameters of the network that is saved: old filters, and new ones too.
    states = [checkpoint.load(file)["model"] for file in sorted((tmp_path / "run" / "checkpoints").iterdir())]
    for earlier, later in ((states[2], states[3]), (states[4], states[5])):
        weight, moved = earlier["0.weight"], later["0.weight"]
        assert weight.shape == moved.shape
        assert (weight != moved).flatten(1).any(1).all()


def test_a_captured_run_that_grew_resumes(tmp_path: Path) -> None:
    config = GPU.replace(compile="graph", checkpoint_every=5)
    grow(config, tmp_path / "whole")

    class Stop:
        def step(self, epoch: int, step: int, loss: float | None) -> None:
            if (epoch, step) == (4, 7):
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        grow(config, tmp_path / "run", progress=Stop())
    grow(config, tmp_path / "run", resume=True)
    assert widths(tmp_path / "run") == widths(tmp_path / "whole")
    close(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("init", ["zero", "random", "split", "gradmax"])
def test_half_precision(init: str, tmp_path: Path) -> None:
    """As in the presets for a GPU."""
    config = GPU.replace(precision="bf16", compile="graph", schedule="cosine", epochs=20)
    found = grow(config.replace(grow_options={**GPU.grow_options, "init": init, "then": 8}), tmp_path / "run")
    assert found["epoch"] == 14
    assert found["dense"] > 0.5
    run = Run.open(tmp_path / "run")
    assert found["parameters"] == sum(t.numel() for t in run.latest()["model"].values())  # type: ignore[index]
