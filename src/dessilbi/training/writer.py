"""Writing checkpoints beside the training, so that a fast GPU need not wait for a disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor


class Writer:
    """Does one piece of work at a time: in the background, or at once.

    An error of work in the background is raised by the next call. A process that is killed in the middle of a write
    leaves the checkpoint before it.
    """

    def __init__(self, background: bool) -> None:
        self._pool = ThreadPoolExecutor(1, "checkpoint") if background else None
        self._pending: Future[object] | None = None

    def __call__(self, work: Callable[[], object]) -> None:
        """Do it, when what was asked for before is done."""
        self.wait()
        if self._pool is None:
            work()
        else:
            self._pending = self._pool.submit(work)

    def wait(self) -> None:
        """For the work that is under way."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def take(self, state: Any) -> Any:
        """The state as it is now, whatever becomes of its tensors while it is being written."""
        if self._pool is None:
            return state
        if isinstance(state, Tensor):
            held = state.detach()
            return held.clone() if held.device.type == "cpu" else held.cpu()
        if isinstance(state, Mapping):
            return {k: self.take(v) for k, v in state.items()}
        if isinstance(state, (list, tuple)):
            return type(state)(map(self.take, state))
        return state

    def close(self) -> None:
        """No more work will come; what is under way is finished."""
        if self._pool is not None:
            self._pool.shutdown()
