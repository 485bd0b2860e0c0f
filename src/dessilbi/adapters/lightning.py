"""A callback for Lightning that drives the threshold and records the path: `Trainer(callbacks=[PathCallback(0.1)])`."""

from __future__ import annotations

import math
import os
import sys
import tempfile
from importlib import import_module
from typing import Any

import torch

from dessilbi.adapters.recorder import Recorder, Settings
from dessilbi.path import Path


def _base() -> type:
    """Lightning's Callback, under the name that the user imported it by, or under both."""
    names = ("lightning.pytorch", "pytorch_lightning")
    imported = tuple(sys.modules[name].Callback for name in names if sys.modules.get(name) is not None)
    for name in () if imported else names:
        try:
            imported = (import_module(name).Callback,)
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):
                raise
        else:
            break
    if not imported:
        raise ImportError("dessilbi.adapters.lightning needs Lightning 2: pip install lightning (or pytorch-lightning)")
    return type("Callback", imported, {})


_Callback: Any = _base()


class PathCallback(_Callback):
    """Record the path of a fit, and let the support follow `keep`.

    After every optimizer step λ is set for the fraction of the run that is done. The path, with whatever scalars the
    module logs, is recorded at log-spaced points of the first epoch, at the ends of epochs and at the end of the run.
    It travels in Lightning's checkpoints: a resumed fit goes on with it.

    Args:
        keep, ramp, every_n_epochs, early, file: see :class:`~dessilbi.adapters.recorder.Settings`.

    With manual optimization the run is counted in batches, whichever optimizers step in them.
    """

    def __init__(
        self,
        keep: float | None = None,
        ramp: float = 0.3,
        every_n_epochs: int = 1,
        early: int = 5,
        file: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        self._settings = Settings(keep, ramp, every_n_epochs, early, file)
        self._recorder: Recorder | None = None
        self._loaded: Path | None = None
        self._done = 0  # steps
        self._point: float | None = None  # where the run is, in epochs
        self._known: dict[str, Any] = {}  # metrics that are no news

    @property
    def path(self) -> Path:
        """What is recorded so far."""
        path = self._loaded if self._recorder is None else self._recorder.path
        if path is None:
            raise ValueError("there is no path yet: it begins with trainer.fit(...)")
        return path

    # -- the hooks of Lightning ----------------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._total = trainer.estimated_stepping_batches if self._settings.keep is not None else math.inf
        if self._settings.keep is not None and not 0 < self._total < math.inf:
            raise ValueError("keep needs to know where the run ends: give the Trainer max_steps")
        self._recorder = Recorder(
            self._settings,
            pl_module,
            trainer.optimizers,
            "return one from configure_optimizers",
            _epoch_steps(trainer),
            self._loaded,
        )
        self._loaded, self._point, self._known = None, None, {}
        self._done = self._count(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._known = dict(trainer.callback_metrics)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self._recorder is not None
        batches = trainer.num_training_batches
        # `is_last_batch` knows the end of the data, `num_training_batches` that of limit_train_batches.
        last = trainer.is_last_batch or batch_idx + 1 == batches
        length = batches if batches != math.inf else trainer.max_steps * trainer.accumulate_grad_batches
        self._point = trainer.current_epoch + (1.0 if last or length <= 0 else (batch_idx + 1) / length)
        done = self._count(trainer, pl_module)
        early = done != self._done and self._recorder.step(done, self._total)
        self._done = done
        # A checkpoint may be taken right after this, and training resumed from it begins with the next epoch: the end
        # of the epoch is recorded here, and given the metrics that are still to come when they come.
        if early or (last and self._due(trainer)):
            self._record(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.state.fn == "fit" and self._recorder is not None and self._recorder.recorded(self._point):
            self._record(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self._due(trainer):
            self._record(trainer)
        self._save(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._record(trainer)
        self._save(trainer)

    def state_dict(self) -> dict[str, Any]:
        path = self._loaded if self._recorder is None else self._recorder.path
        if path is None:
            return {}
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "path")
            path.save(file)
            with open(file, "rb") as saved:
                return {"path": torch.frombuffer(bytearray(saved.read()), dtype=torch.uint8)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "path" not in state_dict:
            return
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "path")
            with open(file, "wb") as saved:
                saved.write(state_dict["path"].cpu().numpy().tobytes())
            self._recorder, self._loaded = None, Path.load(file)

    # ------------------------------------------------------------------------------------------------------------

    def _count(self, trainer: Any, pl_module: Any) -> int:
        """Optimizer steps done. With manual optimization Lightning counts those of all optimizers: batches, then."""
        automatic = pl_module.automatic_optimization or self._total == trainer.max_steps
        return int(trainer.global_step if automatic else trainer.fit_loop.total_batch_idx + 1)

    def _due(self, trainer: Any) -> bool:
        return bool((trainer.current_epoch + 1) % self._settings.every_n_epochs == 0)

    def _record(self, trainer: Any) -> None:
        """Record this moment with what this epoch has logged; Lightning keeps older values among the new."""
        assert self._recorder is not None
        if self._point is None:  # nothing happened since the fit was resumed
            return
        metrics = dict(trainer.callback_metrics)
        self._recorder.record(self._point, {k: v for k, v in metrics.items() if v is not self._known.get(k)})
        self._known = metrics

    def _save(self, trainer: Any) -> None:
        assert self._recorder is not None
        if trainer.is_global_zero:
            self._recorder.save()


def _epoch_steps(trainer: Any) -> int | None:
    """Optimizer steps in the first epoch, or in the run if that is shorter or the epoch's length unknown."""
    batches, most = trainer.num_training_batches, trainer.max_steps
    steps = batches if batches == math.inf else math.ceil(batches / trainer.accumulate_grad_batches)
    steps = min(steps, most) if most > 0 else steps
    return None if steps == math.inf else int(steps)
