"""A callback for the Hugging Face Trainer that drives the threshold and records the path.

`Trainer(model, args, ..., optimizers=(optimizer, None), callbacks=[DessiLBICallback(keep=0.1)])`
"""

from __future__ import annotations

import math
import os
import warnings
from pathlib import Path as FilePath
from typing import Any

from dessilbi.adapters.recorder import Recorder, Settings
from dessilbi.path import Path

try:
    from transformers import TrainerCallback
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ImportError("dessilbi.adapters.huggingface needs transformers: pip install transformers accelerate") from None

FILE = "dessilbi.path"


class DessiLBICallback(TrainerCallback):
    """Record the path of a training, and let the support follow `keep`.

    After every optimizer step λ is set for the fraction of the run that is done. The path, with what has been logged
    since the point before, is recorded at log-spaced points of the first epoch, at the ends of epochs and at the end
    of the run (unless `load_best_model_at_end` has loaded the weights of another moment by then).

    Each checkpoint folder gets the path as `dessilbi.path`; a resumed training goes on with it. The Trainer does not
    tell a callback where it resumes from: the folder is `args.resume_from_checkpoint` if that is one, else
    `checkpoint-N` in `args.output_dir`.

    Args:
        keep, ramp, every_n_epochs, early, file: see :class:`~dessilbi.adapters.recorder.Settings`.
    """

    def __init__(
        self,
        keep: float | None = None,
        ramp: float = 0.3,
        every_n_epochs: int = 1,
        early: int = 5,
        file: str | os.PathLike[str] | None = None,
    ) -> None:
        self._settings = Settings(keep, ramp, every_n_epochs, early, file)
        self._recorder: Recorder | None = None
        self._metrics: dict[str, float] = {}
        self._due = False

    @property
    def path(self) -> Path:
        """What is recorded so far."""
        if self._recorder is None:
            raise ValueError("there is no path yet: it begins with trainer.train()")
        return self._recorder.path

    # -- the hooks of the Trainer --------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        try:
            steps = math.ceil(len(kwargs["train_dataloader"]) / args.gradient_accumulation_steps)
        except TypeError:  # a stream: its length is unknown
            steps = state.max_steps
        self._metrics, self._due = {}, False
        self._recorder = Recorder(
            self._settings,
            kwargs["model"],
            [kwargs["optimizer"]],
            "Trainer(..., optimizers=(DessiAdamW(param_groups(model), lr), None))",
            min(steps, state.max_steps),
            _saved(args, state),
        )

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._record(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self._recorder is not None
        # A checkpoint may be taken right after the last step of an epoch, and training resumed from it begins with the
        # next: the end of the epoch begins here.
        self._due = self._recorder.step(state.global_step, state.max_steps) or self._epoch_due(state)
        self._record_when_told_all(state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._due |= control.should_training_stop or self._epoch_due(state)
        self._record_when_told_all(state, control)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        # The epoch is the point itself, and how fast the machine was is no property of it.
        self._metrics |= {
            name: value
            for name, value in (logs or {}).items()
            if isinstance(value, (int, float)) and name != "epoch" and not name.endswith(("_runtime", "_per_second"))
        }
        self._record_when_told_all(state, control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._record_when_told_all(state, control)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._record(state)
        folder = FilePath(args.output_dir, f"checkpoint-{state.global_step}")
        if state.is_world_process_zero and folder.is_dir():
            self.path.save(folder / FILE)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # With load_best_model_at_end the weights are no longer those of the end of the run.
        self._due |= not args.load_best_model_at_end
        self._metrics = {}
        self._record(state)

    # ------------------------------------------------------------------------------------------------------------

    def _epoch_due(self, state: Any) -> bool:
        """Whether this is the end of an epoch that is to be recorded: `state.epoch` is a whole number exactly there."""
        return bool(state.epoch % self._settings.every_n_epochs == 0)

    def _record_when_told_all(self, state: Any, control: Any) -> None:
        """Logging and evaluation follow the step or epoch that they belong to; the record waits for them."""
        if not control.should_log and not control.should_evaluate:
            self._record(state)

    def _record(self, state: Any) -> None:
        if not self._due or self._recorder is None or state.epoch is None:
            return
        self._recorder.record(state.epoch, self._metrics)
        self._metrics, self._due = {}, False
        if state.is_world_process_zero:
            self._recorder.save()


def _saved(args: Any, state: Any) -> Path | None:
    """The path beside the checkpoint that the Trainer resumes from, if it does."""
    if not state.global_step:
        return None
    given = args.resume_from_checkpoint
    folder = (
        given if given and os.path.isdir(given) else os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
    )
    file = os.path.join(folder, FILE)
    if os.path.isfile(file):
        return Path.load(file)
    warnings.warn(
        f"{file}: no such file, so the path begins at step {state.global_step}; if the checkpoint is elsewhere, "
        "name its folder in TrainingArguments(resume_from_checkpoint=...)",
        stacklevel=2,
    )
    return None
