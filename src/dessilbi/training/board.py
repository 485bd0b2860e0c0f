"""TensorBoard, for those who ask for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Board:
    """Writes the metrics of each epoch for TensorBoard."""

    def __init__(self, folder: Path, done: int = 0) -> None:
        """`done`: what was written for later epochs, before a crash, is not shown."""
        self.check()
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), purge_step=done + 1 if done else None)

    @staticmethod
    def check() -> None:
        """Raise a ModuleNotFoundError that says what to install, if anything is missing."""
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "tensorboard=True needs the package tensorboard: pip install tensorboard", name="tensorboard"
            ) from error

    def write(self, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            if name != "epoch" and isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, metrics["epoch"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
