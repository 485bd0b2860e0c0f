"""Runs of networks that grow: from the seed to the end, stopped and resumed, their control, and what can be pruned."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.runs import SMALL, Stops, final_state, numbers, same

from dessilbi import Path as SelectionPath
from dessilbi import files
from dessilbi.applications import sparsify
from dessilbi.applications.grow import control, grow, read_growth
from dessilbi.training import train
from dessilbi.training.run import Run

# Grows twice, by all that it has, and then stops.
GROW = SMALL.replace(
    model="tests.training.nets:seed",
    keep=None,
    lam=0.0005,
    lr=0.02,
    schedule="step",
    lr_drop=10.0,
    epochs=9,
    linear="none",
    checkpoint_every=5,
    grow_options={"every": 2, "then": 3, "tau": 0.5, "by": 0.5, "growths": 2},
)


def parameters(first: int, second: int) -> int:
    """Of the network of these tests with so many filters, counted on paper."""
    return 9 * first + 2 * first + 9 * first * second + 2 * second + 90 * second + 10


def history(folder: Path) -> dict[str, Any]:
    """growth.json, but for what a clock says."""
    found = read_growth(Run.open(folder))
    return {**found, "stages": [{k: v for k, v in s.items() if k != "seconds"} for s in found["stages"]]}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    grow(GROW, folder)
    return folder


def check_same(folder: Path, whole: Path) -> None:
    assert numbers(folder) == numbers(whole)
    assert history(folder) == history(whole)
    ours, theirs = final_state(folder), final_state(whole)
    assert same({**ours, "grower": None}, {**theirs, "grower": None})
    assert Run.open(folder).status == "finished"
    for growth in (None, 0, 1):
        file, other = (
            Run.open(f).path_file if growth is None else Run.open(f).path_before(growth) for f in (folder, whole)
        )
        path, expected = SelectionPath.load(file), SelectionPath.load(other)
        assert path.points == expected.points
        for name in expected.names:
            assert torch.equal(path.entry(name), expected.entry(name))
            assert torch.equal(path.norms(name).v, expected.norms(name).v)


def test_a_run_from_the_seed_to_the_end(whole: Path) -> None:
    run = Run.open(whole)
    found = history(whole)
    stages = found["stages"]
    assert [stage["epoch"] for stage in stages] == [2, 4, 6, 9]
    assert (found["stopped"], found["end"]) == ("growths", 9)
    # 4 and 4 filters at first; half as many more each time.
    assert [(s["widths"]["0"], s["widths"]["3"]) for s in stages] == [(4, 4), (6, 6), (9, 9), (9, 9)]
    assert [s["grew"] for s in stages] == [{"0": 2, "3": 2}, {"0": 3, "3": 3}, {}, {}]
    sizes = [parameters(width, width) for width in (4, 6, 9, 9)]
    assert [s["parameters"] for s in stages] == sizes
    # At the same epochs the metrics say the same.
    metrics = run.metrics()
    assert [m["parameters"] for m in metrics] == [sizes[i] for i in (0, 0, 1, 1, 2, 2, 2, 2, 2)]
    assert [(m["dense"], m["loss"]) for m in metrics if m["epoch"] in (2, 4, 6, 9)] == [
        (s["accuracy"], s["loss"]) for s in stages
    ]
    # The step size falls when the growth is over.
    assert [m["lr"] for m in metrics] == pytest.approx([0.02] * 6 + [0.002] * 3)
    assert metrics[-1]["dense"] > 0.7
    # Path time goes on over the growths.
    times = [m["time"] for m in metrics]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(12 * (6 * 0.02 + 3 * 0.002))
    # Every size has its own path: before the first growth, between them, and since.
    shapes = [SelectionPath.load(file).support("0.weight", at=-1).shape[0]
              for file in (run.path_before(0), run.path_before(1), run.path_file)]  # fmt: skip
    assert shapes == [4, 6, 9]
    state = run.latest()
    assert state is not None
    assert state["model"]["0.weight"].shape == (9, 1, 3, 3)


def test_momentum_and_v_are_those_of_the_moment_before(tmp_path: Path) -> None:
    config = GROW.replace(keep_epochs=(2, 4), keep_checkpoints=40, checkpoint_every=None, grow_options={
        **GROW.grow_options, "growths": 1})  # fmt: skip
    grow(config, tmp_path / "grown")
    state = Run.open(tmp_path / "grown").at_epoch(2)
    # The same seed without growth: up to the decision the two runs are one.
    train(config.replace(grow_options={}, epochs=2, schedule="constant"), tmp_path / "plain")
    plain = Run.open(tmp_path / "plain").at_epoch(2)
    for name, t in plain["model"].items():
        assert torch.equal(state["model"][name][tuple(map(slice, t.shape))], t), name
    kept = 0
    for key, was in plain["optimizer"]["state"].items():
        for name, t in was.items():
            if isinstance(t, torch.Tensor) and t.ndim:
                now = state["optimizer"]["state"][key][name]
                old = tuple(map(slice, t.shape))
                assert torch.equal(now[old], t)
                assert int((now != 0).sum()) == int((t != 0).sum())
                kept += now.shape != t.shape
    assert kept >= 8


class Killed(Stops):
    """Kills the process at a step, without a word."""

    def __init__(self, epoch: int, step: int) -> None:
        super().__init__(epoch, step, lambda: os.kill(os.getpid(), signal.SIGKILL))


def in_a_process_that_dies(work: Any) -> None:
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


# Before the first growth, right behind it, in the middle between two, behind the second, and after the last decision.
@pytest.mark.parametrize("moment", [(2, 3), (3, 1), (4, 7), (5, 2), (8, 12)])
def test_killed_in_the_middle_it_goes_on_in_the_right_shape(
    moment: tuple[int, int], whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    in_a_process_that_dies(lambda: grow(GROW, folder, progress=Killed(*moment)))
    assert Run.open(folder).status == "killed"
    grow(GROW, folder, resume=True)
    check_same(folder, whole)


def writes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that a run puts in place, in order."""
    names: list[str] = []
    replace = os.replace

    def noted(source: Any, target: Any) -> None:
        names.append(os.path.basename(target))
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "replace", noted)
        grow(GROW, folder)
    return names


def test_killed_while_a_growth_is_written_down(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # From the last checkpoint before the first growth to the first after it: the path that is put aside, the history,
    # the new path, the checkpoint.
    names = writes(tmp_path / "noted", monkeypatch)
    aside = names.index("0.safetensors")
    assert "growth.json" in names[aside:]
    replace = os.replace
    for number in range(aside, aside + 4):
        folder, count = tmp_path / str(number), 0

        def dying(source: Any, target: Any, number: int = number) -> None:
            nonlocal count
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            replace(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(files.os, "replace", dying)
            in_a_process_that_dies(lambda folder=folder: grow(GROW, folder))
        grow(GROW, folder, resume=True)
        check_same(folder, whole)


def test_stopped_by_hand_and_paused(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        grow(GROW, folder, progress=Stops(3, 5, interrupt))
    grow(GROW, folder, resume=True, until=4)
    assert Run.open(folder).status == "paused"
    grow(GROW, folder, resume=True)
    check_same(folder, whole)


def test_a_run_that_is_done_stays_done(whole: Path) -> None:
    before = numbers(whole)
    found = grow(GROW, whole, resume=True)
    assert found["epoch"] == 9
    assert numbers(whole) == before


def test_the_control_grows_alike_to_the_same_sizes_at_the_same_epochs(tmp_path: Path) -> None:
    # By its first convolution alone, which the control does not know.
    tau = {"default": 1.0, "0": 0.5}
    config = GROW.replace(grow_options={**GROW.grow_options, "tau": tau, "by": 3.0})
    grow(config, tmp_path / "run")
    run = Run.open(tmp_path / "run")
    uniform = control(run)
    assert uniform.replace(grow_options={}) == config.replace(grow_options={})
    grow(uniform, tmp_path / "control")
    ours, theirs = history(tmp_path / "run"), history(tmp_path / "control")
    assert [s["epoch"] for s in theirs["stages"]] == [s["epoch"] for s in ours["stages"]]
    assert [s["widths"]["3"] for s in ours["stages"]] == [4] * 4
    for one, other in zip(ours["stages"], theirs["stages"], strict=True):
        # As many as fit: with one more filter in both convolutions it would be larger than what it is compared with.
        width = other["widths"]["0"]
        assert other["widths"]["3"] == width
        assert other["parameters"] == parameters(width, width) <= one["parameters"] < parameters(width + 1, width + 1)
    still = GROW.replace(grow_options={**GROW.grow_options, "tau": 1.0})
    grow(still, tmp_path / "still")
    with pytest.raises(ValueError, match="did not grow: there is nothing to compare it with"):
        control(Run.open(tmp_path / "still"))


def test_fully_connected_layers_grow_too(tmp_path: Path) -> None:
    config = GROW.replace(
        model="tests.training.nets:plain", linear="neuron", exclude=("3",), lam=0.0001,
        grow_options={**GROW.grow_options, "by": 0.25},
    )  # fmt: skip
    grow(config, tmp_path / "run")
    assert [s["widths"] for s in history(tmp_path / "run")["stages"]] == [
        {"1": 16, "3": 10}, {"1": 20, "3": 10}, {"1": 25, "3": 10}, {"1": 25, "3": 10}
    ]  # fmt: skip


@pytest.mark.parametrize("options", [{"optimizer": "dessiadamw", "lr": 2e-3, "lam": 5e-5}, {"conv": "channel"}])
def test_other_optimizers_and_groups(options: dict[str, Any], tmp_path: Path) -> None:
    model = {"model": "resnet20", "model_options": {"widths": [3, 3, 3]}} if "conv" in options else {}
    config = GROW.replace(**options, **model, epochs=5, grow_options={**GROW.grow_options, "growths": 1, "then": 1})
    found = grow(config, tmp_path / "run")
    stages = history(tmp_path / "run")["stages"]
    assert stages[0]["parameters"] < stages[1]["parameters"] == found["parameters"]
    grow(config, tmp_path / "run", resume=True)


@pytest.mark.parametrize("init", ["random", "split", "gradmax"])
def test_starts_of_new_filters_in_a_run(init: str, tmp_path: Path) -> None:
    config = GROW.replace(epochs=5, grow_options={**GROW.grow_options, "growths": 1, "then": 1, "init": init})
    found = grow(config, tmp_path / "run")
    assert found["dense"] > 0.3
    assert history(tmp_path / "run")["settings"]["init"] == init


def test_a_grown_run_can_be_pruned_and_fine_tuned(whole: Path, tmp_path: Path) -> None:
    grown = read_growth(Run.open(whole))["stages"][-1]
    made = sparsify.prune(Run.open(whole), tmp_path / "pruned", level="filter", macs="50%", finetune=1, rounds=0)
    sparsify.finish(made)
    rows = sparsify.read_table(made)["rows"]
    dense = rows[0]
    assert (dense["parameters"], dense["macs"]) == (grown["parameters"], grown["macs"])
    assert dense["accuracy"] == pytest.approx(grown["accuracy"])
    small = next(row for row in rows if row["network"] == "fine-tuned")
    assert small["macs"] <= 0.5 * grown["macs"]
    assert small["parameters"] < grown["parameters"]


def test_only_grow_trains_such_a_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="trained by `dessilbi grow`"):
        train(GROW, tmp_path / "run")
    with pytest.raises(ValueError, match="grow_options is empty: say how the network grows"):
        grow(SMALL, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_history_that_is_none(whole: Path, tmp_path: Path) -> None:
    train(SMALL.replace(epochs=1), tmp_path / "plain")
    run = Run.open(tmp_path / "plain")
    with pytest.raises(ValueError, match="is not a run of a network that grows"):
        read_growth(run)
    for text, words in (("{", "not a history of growth"), (json.dumps({"version": 99}), "format 99 is newer than 1")):
        run.growth_file.write_text(text)
        with pytest.raises(ValueError, match=words):
            read_growth(run)
