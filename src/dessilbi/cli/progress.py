"""What a long command shows while it works: a bar on a terminal, plain lines in a file or a pipe."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self, TextIO

import click

_REFRESH_SECONDS = 0.1


def training_progress() -> Lines | None:
    """The display of a training run; None in every process of a distributed run but the first."""
    if os.environ.get("RANK", "0") != "0":
        return None
    return Bar() if _is_terminal(sys.stdout) else Lines()


def download_progress() -> Downloads:
    """The display of a download, on standard error: where the files are is the output."""
    return DownloadBar() if _is_terminal(sys.stderr) else Downloads()


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


class Lines:
    """One line an epoch."""

    total = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def start(self, total_epochs: int, steps_per_epoch: int) -> None:
        self.total = total_epochs

    def step(self, epoch: int, step: int, loss: float | None) -> None:
        pass

    def epoch(self, metrics: Mapping[str, Any]) -> None:
        self.write(epoch_line(metrics, self.total))

    def note(self, text: str) -> None:
        self.write(text)

    def write(self, text: str) -> None:
        click.echo(text)
        sys.stdout.flush()


class Bar(Lines):
    """The lines, and below them a bar with the time that is left."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=Console(highlight=False),
            transient=True,
        )
        self.steps = 1
        self.task = self.bar.add_task("preparing", total=None)
        self.running = False
        self.shown = 0.0

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def start(self, total_epochs: int, steps_per_epoch: int) -> None:
        super().start(total_epochs, steps_per_epoch)
        self.steps = max(steps_per_epoch, 1)
        self.bar.update(self.task, total=total_epochs * self.steps)

    def step(self, epoch: int, step: int, loss: float | None) -> None:
        now = time.monotonic()
        if self.running and now - self.shown < _REFRESH_SECONDS:
            return  # at hundreds of steps a second the display must not cost
        self.shown = now
        done = (epoch - 1) * self.steps + step
        text = f"epoch {epoch}/{self.total}" + ("" if loss is None else f"  loss {loss:.4f}")
        if not self.running:  # a resumed run starts far along: that is not its speed
            self.running = True
            self.bar.reset(self.task, completed=done, description=text)
        self.bar.update(self.task, completed=done, description=text)

    def epoch(self, metrics: Mapping[str, Any]) -> None:
        super().epoch(metrics)
        self.bar.update(self.task, completed=metrics.get("epoch", 0) * self.steps)

    def write(self, text: str) -> None:
        self.bar.console.print(text, markup=False, soft_wrap=True)


def epoch_line(metrics: Mapping[str, Any], total: int) -> str:
    """An epoch in one line, without what was not measured."""
    parts = [f"epoch {metrics.get('epoch', '?')}/{total}"]
    parts += [f"{label} {text}" for label, text in cells(metrics) if text]
    return "  ".join(parts)


def cells(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What people read of an epoch: label and text, empty where it was not measured."""
    return [
        ("loss", _number(metrics.get("loss"), "{:.4f}")),
        ("dense", _percent(metrics.get("dense"))),
        ("sparse", _percent(metrics.get("sparse"))),
        ("keep", _number(metrics.get("keep"), "{:.4g}")),
        ("λ", _number(metrics.get("lam"), "{:.4g}")),
        ("time", _number(metrics.get("seconds"), "{:.1f} s")),
    ]


def _number(value: Any, form: str) -> str:
    return form.format(value) if isinstance(value, int | float) else ""


def _percent(value: Any) -> str:
    return _number(100 * value, "{:.2f} %") if isinstance(value, int | float) else ""


class Downloads:
    """One line a file, when it is there."""

    def __init__(self) -> None:
        self.last: tuple[str, int] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._finish()

    def __call__(self, what: str, done: int, total: int | None) -> None:
        if self.last and self.last[0] != what:
            self._finish()
        self.last = (what, done)

    def _finish(self) -> None:
        if self.last:
            what, size = self.last
            click.echo(f"{what}: {size / 1e6:.1f} MB", err=True)


class DownloadBar(Downloads):
    """A bar a file, with speed and the time that is left."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.progress import TransferSpeedColumn as Speed

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), Speed(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=Console(stderr=True, highlight=False))
        self.tasks: dict[str, Any] = {}

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def __call__(self, what: str, done: int, total: int | None) -> None:
        if what not in self.tasks:
            self.tasks[what] = self.bar.add_task(what, total=total)
        self.bar.update(self.tasks[what], completed=done, total=total)
