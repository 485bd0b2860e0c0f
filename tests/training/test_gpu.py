"""What only a GPU can do: the whole step in a CUDA graph, half precision, no waiting."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dessilbi import Path as SelectionPath
from dessilbi import Selection
from dessilbi.training import TrainingDiverged, checkpoint, train
from dessilbi.training.run import Run
from dessilbi.training.step import GraphStep
from tests.training.runs import SMALL, numbers

pytestmark = pytest.mark.gpu

GPU = SMALL.replace(device="cuda", model="tests.training.nets:plain", lr=0.02)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"keep": None, "lam": 0.002},
        {"keep": None, "lam": 0.002, "scaling": True, "nesterov": True, "clip": 1.0},
        {"optimizer": "dessiadamw", "lr": 5e-3},
        {"optimizer": "sgd", "keep": None},
        {"optimizer": "adamw", "keep": None, "lr": 5e-3},
        {"model": "lenet5", "channels_last": True},
    ],
)
def test_a_captured_run_is_an_eager_run(changes: dict[str, Any], tmp_path: Path) -> None:
    config = GPU.replace(**changes)
    train(config, tmp_path / "eager")
    train(config.replace(compile="graph"), tmp_path / "graph")
    eager, graph = numbers(tmp_path / "eager"), numbers(tmp_path / "graph")
    assert eager[-1]["dense"] > 0.3
    for one, other in zip(graph, eager, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert one[name] == pytest.approx(other[name], rel=0.03, abs=0.02), name


@pytest.mark.parametrize(
    "changes", [{"optimizer": "sgd", "keep": None}, {"optimizer": "adamw", "keep": None, "lr": 5e-3}, {}]
)
def test_a_captured_step_keeps_a_mask(changes: dict[str, Any], tmp_path: Path) -> None:
    """From the first step to the last, replayed ones and the eager ones of smaller batches."""
    chosen = torch.rand(16, 64, generator=torch.Generator().manual_seed(1)) < 0.5
    Selection({"1.weight": chosen}).save(tmp_path / "mask.safetensors")
    config = GPU.replace(mask=str(tmp_path / "mask.safetensors"), checkpoint_every=5, **changes)
    for compile in ("none", "graph"):
        train(config.replace(compile=compile), tmp_path / compile)
        for steps in (35, 36):  # the first of them replayed
            state = checkpoint.load(tmp_path / compile / "checkpoints" / f"{steps:09d}.safetensors")
            assert torch.equal(state["model"]["1.weight"] != 0, chosen)
    eager, graph = numbers(tmp_path / "none"), numbers(tmp_path / "graph")
    assert eager[-1]["dense"] > 0.3
    for one, other in zip(graph, eager, strict=True):
        for name in one:
            assert one[name] == pytest.approx(other[name], rel=0.03, abs=0.02), name


def test_the_graph_is_used_and_the_last_batch_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[GraphStep] = []
    before = GraphStep.__init__

    def init(self: GraphStep, *arguments: Any) -> None:
        before(self, *arguments)
        steps.append(self)

    monkeypatch.setattr(GraphStep, "__init__", init)
    replays, replay = [], torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda self: (replays.append(1), replay(self)))
    train(GPU.replace(compile="graph"), tmp_path / "run")
    assert steps[0].graph is not None
    # 12 steps an epoch, of which the last is smaller, and three at the start are eager.
    assert len(replays) == 3 * 11 - 3


def test_a_captured_run_resumes(tmp_path: Path) -> None:
    config = GPU.replace(compile="graph", schedule="constant", checkpoint_every=5)
    train(config, tmp_path / "whole")

    class Stop:
        def step(self, epoch: int, step: int, loss: float | None) -> None:
            if (epoch, step) == (2, 7):
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", progress=Stop())
    train(config, tmp_path / "run", resume=True)
    for one, other in zip(numbers(tmp_path / "run"), numbers(tmp_path / "whole"), strict=True):
        for name in one:
            assert one[name] == pytest.approx(other[name], rel=0.03, abs=0.02), name


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision(precision: str, tmp_path: Path) -> None:
    config = GPU.replace(precision=precision, model="tests.training.nets:tiny", channels_last=True, epochs=5)
    assert train(config, tmp_path / "run")["dense"] > 0.5
    if precision == "bf16":
        assert train(config.replace(compile="graph"), tmp_path / "graph")["dense"] > 0.5


def test_steps_do_not_wait_for_the_device(tmp_path: Path) -> None:
    """Inside an epoch nothing synchronises, in an eager run and in a captured one."""

    class Watch:
        def step(self, epoch: int, step: int, loss: float | None) -> None:
            inside = epoch == 2 and 2 <= step < 10
            torch.cuda.set_sync_debug_mode("error" if inside else "default")

    try:
        for compile in ("none", "graph"):
            train(GPU.replace(compile=compile), tmp_path / compile, progress=Watch())
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_divergence_is_seen_at_the_end_of_the_epoch(tmp_path: Path) -> None:
    config = GPU.replace(model="tests.training.nets:exploding")
    for compile in ("none", "graph"):
        with pytest.raises(TrainingDiverged, match=r"step 30 \(epoch 3, step 6 of 12\)"):
            train(config.replace(compile=compile), tmp_path / compile)
        assert Run.open(tmp_path / compile).latest()["steps"] == 24  # type: ignore[index]


def test_a_run_moves_between_devices(tmp_path: Path) -> None:
    train(GPU.replace(epochs=1), tmp_path / "run")
    train(GPU.replace(device="cpu"), tmp_path / "run", resume=True)
    assert len(numbers(tmp_path / "run")) == 3
    assert len(SelectionPath.load(Run.open(tmp_path / "run").path_file).points) > 3
