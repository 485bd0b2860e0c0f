"""Tasks side by side, each in a process of its own: several trainings share a device that one of them does not fill."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, TypeVar

_T = TypeVar("_T", bound=Hashable)


def side_by_side(
    work: Callable[[_T], str | None], tasks: Sequence[_T], needs: Callable[[_T], _T | None], jobs: int
) -> list[str]:
    """Call `work` with every task, `jobs` at a time, each after the one that it needs; returns what went wrong.

    `work` returns a line where something went wrong; what needs that task is then left out. An interrupt of this
    process is handed on to the others, as SIGTERM, and waits for them; they end too if this one is killed.
    """
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    waiting, failed, wrong = list(tasks), set[_T](), list[str]()
    running: dict[Any, tuple[BaseProcess, _T]] = {}
    with _terminable():
        try:
            while waiting or running:
                ahead = {*waiting, *(task for _, task in running.values())}
                for task in [task for task in waiting if needs(task) not in ahead][: jobs - len(running)]:
                    waiting.remove(task)
                    if needs(task) in failed:
                        failed.add(task)
                        continue
                    ours, theirs = context.Pipe()
                    child: BaseProcess = context.Process(target=_child, args=(work, task, theirs))
                    running[ours] = child, task
                    child.start()
                    theirs.close()
                for ended in wait(list(running)) if running else []:
                    child, task = running[ended]
                    line = _said(ended, child, task)
                    del running[ended]
                    if line is not None:
                        failed.add(task)
                        wrong.append(line)
        except BaseException:
            started = [child for child, _ in running.values() if child.pid is not None]
            for child in started:
                child.terminate()
            for child in started:
                child.join()
            raise
    return wrong


def _said(ours: Any, child: BaseProcess, task: object) -> str | None:
    """What a process says at its end, or what is to be said of one that cannot any more."""
    with ours:
        try:
            line: str | None = ours.recv()
        except (EOFError, ConnectionError):
            child.join()
            return f"{task}: its process ended with status {child.exitcode}"
        child.join()
        return line


def _child(work: Callable[[_T], str | None], task: _T, theirs: Connection) -> None:
    # Ctrl-C goes to a whole process group. Here it comes once, from the process that started this one.
    os.setpgid(0, 0)
    threading.Thread(target=_end_with, args=(theirs,), daemon=True).start()
    try:
        theirs.send(work(task))
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None


def _end_with(theirs: Connection) -> None:
    """Stop, as after SIGTERM, when the other end of the pipe is gone."""
    with contextlib.suppress(EOFError, OSError):
        theirs.recv()
    os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM raises SystemExit(143) inside."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
