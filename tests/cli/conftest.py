"""The command line called in this process, in an empty folder; what a command imports late is replaced where the test
is about the command and not about what it calls."""

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dessilbi.cli import main


class Result(NamedTuple):
    status: int
    out: str
    err: str


Cli = Callable[..., Result]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """`cli("data", "show", "mnist")`: exit status, standard output, standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)

    def call(*arguments: str) -> Result:
        capsys.readouterr()
        status = main(list(arguments))
        return Result(status, *capsys.readouterr())

    return call


class Trained(NamedTuple):
    config: Any
    folder: Path
    options: dict[str, Any]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Trained]:
    """Calls of `train`, which only reports two epochs; an exception in `trained.error` is raised after the first."""

    class Calls(list[Trained]):
        error: BaseException | None = None

    calls = Calls()

    def train(config: Any, folder: Path, **options: Any) -> dict[str, Any]:
        calls.append(Trained(config, folder, options))
        folder.mkdir(parents=True, exist_ok=True)
        progress = options["progress"]
        if progress:
            progress.start(2, 3)
            for epoch in (1, 2):
                for step in (1, 2, 3):
                    progress.step(epoch, step, 0.5 if step == 3 else None)
                measured = {"epoch": epoch, "loss": 0.5, "dense": 0.9, "keep": 0.06, "lam": 1.25, "seconds": 3.0}
                progress.epoch(measured if epoch == 1 else measured | {"sparse": 0.875})
                if calls.error:
                    raise calls.error
            progress.note("a note")
        elif calls.error:
            raise calls.error
        return {}

    loop = types.ModuleType("dessilbi.training.loop")
    loop.train = train  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dessilbi.training.loop", loop)
    return calls
