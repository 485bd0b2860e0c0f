"""Ctrl-C and SIGTERM, put off to the end of the step: a step that is half done could not be resumed."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupts:
    """Inside the `with`, the first signal only sets :attr:`pending`; a second one does what it always did.

    In a thread other than the main one, signals do not arrive and nothing is changed.
    """

    def __init__(self) -> None:
        self.pending: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._put_off)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _put_off(self, number: int, frame: FrameType | None) -> None:
        self.pending = number
        signal.signal(number, self._before[number])

    def check(self) -> None:
        """Raise what the signal asked for: KeyboardInterrupt, or SystemExit(143) for SIGTERM."""
        if self.pending == signal.SIGINT:
            raise KeyboardInterrupt
        if self.pending is not None:
            raise SystemExit(128 + self.pending)
