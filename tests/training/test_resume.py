"""A run that was stopped, by whatever means, ends bit for bit where one that was not stopped does."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dessilbi import Path as SelectionPath
from dessilbi import files
from dessilbi.training import Config, train
from dessilbi.training.run import Run
from tests.training.runs import SMALL, Stops, final_state, numbers, same

EVERY = SMALL.replace(checkpoint_every=5)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(EVERY, folder)
    return folder


def check_same(folder: Path, whole: Path) -> None:
    assert numbers(folder) == numbers(whole)
    assert len(numbers(folder)) == SMALL.epochs
    assert same(final_state(folder), final_state(whole))
    ours, theirs = (SelectionPath.load(Run.open(f).path_file) for f in (folder, whole))
    assert ours.points == theirs.points
    for name in theirs.names:
        assert torch.equal(ours.entry(name), theirs.entry(name))
        assert torch.equal(ours.norms(name).v, theirs.norms(name).v)


def killed(work: Callable[[], object]) -> None:
    """Do something in a process of its own that is killed with SIGKILL before it ends."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("moment", [(1, 1), (1, 7), (2, 3), (3, 12)])
def test_killed_at_a_step(moment: tuple[int, int], whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    killed(lambda: train(EVERY, folder, progress=Stops(*moment, die)))
    assert Run.open(folder).status == "killed"
    train(EVERY, folder, resume=True)
    check_same(folder, whole)


# The writes of the run one by one: configuration, environment, status, the path and the first checkpoint, ...
@pytest.mark.parametrize("number", [2, 3, 4, 5, 6, 7, 10, 13])
@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_while_writing(
    number: int, when: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    count, replace = 0, os.replace

    def dying(source: str, target: str) -> None:
        nonlocal count
        count += 1
        if count == number and when == "before":
            die()
        replace(source, target)
        if count == number:
            die()

    monkeypatch.setattr(files.os, "replace", dying)
    killed(lambda: train(EVERY, folder))
    monkeypatch.undo()
    train(EVERY, folder, resume=True)
    check_same(folder, whole)


def test_killed_between_metrics_and_checkpoint(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    append = Run.append

    def dying(self: Run, metrics: dict[str, object]) -> None:
        append(self, metrics)
        if metrics["epoch"] == 2:
            with open(self.metrics_file, "a") as out:
                out.write('{"epoch": 3, "lo')  # a line cut short
            die()

    monkeypatch.setattr(Run, "append", dying)
    killed(lambda: train(EVERY, folder))
    monkeypatch.undo()
    assert len(Run.open(folder).metrics()) == 2
    train(EVERY, folder, resume=True)
    check_same(folder, whole)


def test_killed_from_outside(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    script = (
        "import time, torch; torch.set_num_threads(1)\n"
        "from dessilbi.training import train; from tests.training.test_resume import EVERY\n"
        "class Slow:\n    def step(self, *a): time.sleep(0.02)\n"
        f"train(EVERY, {str(folder)!r}, progress=Slow())"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[2])
    deadline = time.monotonic() + 60
    while not newest(folder) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    train(EVERY, folder, resume=True)
    check_same(folder, whole)


def newest(folder: Path) -> str:
    return max((f.name for f in (folder / "checkpoints").glob("0*")), default="")


def test_a_damaged_checkpoint_is_passed_over(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    killed(lambda: train(EVERY, folder, progress=Stops(2, 9, die)))
    newest = max((folder / "checkpoints").iterdir())
    data = bytearray(newest.read_bytes())
    data[-3] ^= 0xFF
    newest.write_bytes(data)
    progress = Stops(0, 0, die)
    train(EVERY, folder, resume=True, progress=progress)
    assert any("checksum" in note for note in progress.notes)
    check_same(folder, whole)


def test_no_whole_checkpoint_is_an_error(tmp_path: Path) -> None:
    train(SMALL.replace(epochs=1), tmp_path / "run")
    for file in (tmp_path / "run" / "checkpoints").iterdir():
        file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match="no checkpoint is whole"):
        train(SMALL.replace(epochs=1), tmp_path / "run", resume=True)


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_signals_leave_a_checkpoint_of_that_step(
    number: int, raised: type[BaseException], whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(raised) as caught:
        train(EVERY, folder, progress=Stops(2, 4, lambda: os.kill(os.getpid(), number)))
    if raised is SystemExit:
        assert caught.value.code == 143  # type: ignore[attr-defined]
    run = Run.open(folder)
    assert run.status == "interrupted"
    state = run.latest()
    assert state is not None
    assert (state["epoch"], state["step"]) == (1, 4)
    assert signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL)
    train(EVERY, folder, resume=True)
    check_same(folder, whole)


def test_ctrl_c_out_of_a_callback(whole: Path, tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(EVERY, tmp_path / "run", progress=Stops(1, 3, interrupt))
    assert Run.open(tmp_path / "run").latest()["step"] == 3  # type: ignore[index]
    train(EVERY, tmp_path / "run", resume=True)
    check_same(tmp_path / "run", whole)


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "sgd", "keep": None},
        {"optimizer": "adamw", "keep": None, "lr": 1e-3},
        {"optimizer": "dessiadamw", "lr": 1e-3, "scaling": True},
        {"lam": 0.05, "keep": None, "scaling": True, "schedule": "step", "lr_every": 1, "warmup": 0.5},
        {"precision": "bf16", "clip": 1.0, "label_smoothing": 0.1, "channels_last": True},
        {"precision": "fp16"},
    ],
)
def test_other_configurations_resume_too(changes: dict[str, object], tmp_path: Path) -> None:
    config = EVERY.replace(**changes, epochs=2)
    train(config, tmp_path / "whole")
    killed(lambda: train(config, tmp_path / "run", progress=Stops(2, 3, die)))
    train(config, tmp_path / "run", resume=True)
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")
    assert same(final_state(tmp_path / "run"), final_state(tmp_path / "whole"))
    assert Run.open(tmp_path / "run").path_file.exists() == config.ours


def test_more_epochs(tmp_path: Path) -> None:
    config = SMALL.replace(schedule="constant", keep=None, lam=0.02)
    train(config.replace(epochs=1), tmp_path / "run")
    train(config, tmp_path / "run", resume=True)
    train(config, tmp_path / "whole")
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")
    assert Run.open(tmp_path / "run").config == config
    with pytest.raises(ValueError, match="epochs: 3 -> 2"):
        train(config.replace(epochs=2), tmp_path / "run", resume=True)


def test_another_configuration_is_refused(whole: Path) -> None:
    with pytest.raises(ValueError, match=r"lr: 0.05 -> 0.1; nu: 10.0 -> 20.0"):
        train(EVERY.replace(lr=0.1, nu=20.0), whole, resume=True)


def test_a_finished_run_has_nothing_to_resume(whole: Path) -> None:
    before = (whole / "metrics.jsonl").read_bytes()
    summary = train(EVERY.replace(data_root="elsewhere"), whole, resume=True)
    assert summary["epoch"] == SMALL.epochs
    assert (whole / "metrics.jsonl").read_bytes() == before
    assert len(Run.open(whole).environment["resumed"]) == 1


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such run folder"):
        train(Config(), tmp_path / "none", resume=True)
