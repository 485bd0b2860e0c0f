"""``train``: the one loop. It can be stopped at any moment, by any means, and goes on from the last checkpoint."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dessilbi.baselines.paths import selected
from dessilbi.diagnostics import StepSizeMonitor
from dessilbi.optim import DessiAdamW, DessiLBI
from dessilbi.selection import Selection
from dessilbi.settling import Settling
from dessilbi.training import sharding, step
from dessilbi.training.board import Board
from dessilbi.training.config import Config, differences
from dessilbi.training.distribution import World
from dessilbi.training.evaluation import evaluate
from dessilbi.training.growing import Grower, Now
from dessilbi.training.interrupts import Interrupts
from dessilbi.training.record import Record
from dessilbi.training.reporter import Reporter
from dessilbi.training.run import Run
from dessilbi.training.schedule import set_step_size, step_size
from dessilbi.training.session import Session, TrainingDiverged

# On an accelerator the losses are looked at every so many steps: looking waits for the device.
_LOOK_EVERY = 200
# What may differ when a run is resumed elsewhere: it does not enter the numbers.
_PLACE = ("data_root", "device", "workers", "tensorboard", "checkpoint_every", "keep_checkpoints", "keep_epochs",
          "watch_step_size")  # fmt: skip


def train(
    config: Config,
    folder: str | os.PathLike[str],
    *,
    resume: bool = False,
    overwrite: bool = False,
    until: int | None = None,
    grower: Grower | None = None,
    progress: object | None = None,
    command: str = "",
) -> dict[str, Any]:
    """Train as the configuration says, and leave everything there is to know in a run folder (see :class:`Run`).

    Args:
        config: what to compute. With `resume` it must be that of the run, except that `epochs` may be larger (a
            `cosine` schedule and a `keep` target are then stretched over the new length from there on), and that what
            depends on the place, such as `data_root` and `device`, may differ.
        folder: the run folder.
        resume: go on from the newest checkpoint that is whole; from the beginning if there is none yet. On a CPU in one
            process the result is bit for bit that of a run that was never stopped, given as many threads.
        overwrite: start anew in the folder of another run.
        until: pause at the end of this epoch, if the run is longer; resumed, it goes on as if it had not stopped.
        grower: lets the network grow, where the configuration has `grow_options`: see
            :func:`dessilbi.applications.grow.grow`, which calls this.
        progress: an object with some of the methods ``start(total_epochs, steps_per_epoch)``, ``step(epoch, step,
            loss)`` (counted from 1; the loss only where it is known without waiting), ``epoch(metrics)`` and
            ``note(text)``.
        command: recorded with the environment.

    Returns:
        The last metrics, and `best_epoch`, `best_dense`, `stopped_early`, `settled`, `folder`.

    Raises:
        KeyboardInterrupt, SystemExit: after Ctrl-C or SIGTERM, when a checkpoint was written at the end of the step.
        TrainingDiverged: the loss is not finite.
        OSError: nothing more could be written; the last checkpoint is kept.

    Under torchrun, all processes call this alike; the first one writes.
    """
    if resume and overwrite:
        raise ValueError("resume=True goes on and overwrite=True starts anew: choose one of them")
    if bool(config.grow_options) != (grower is not None):
        raise ValueError(
            "grow_options: a network that grows is trained by `dessilbi grow` (dessilbi.applications.grow)"
        )
    # What is wrong with the folder should not be said after reading the data.
    if resume:
        _check_same(Run.open(folder), config)
    elif os.environ.get("RANK", "0") == "0":
        Run.check(folder, overwrite)
    if config.tensorboard:
        Board.check()
    world = World.enter(config)
    try:
        reporter = Reporter(progress if world.first else None)
        with Interrupts() as interrupts, _tuned(world.device):
            session = _Loop(config, world, reporter, interrupts, Run(folder, config), resume, until, grower)
            with session.mask or contextlib.nullcontext():
                session.enter(resume, overwrite, command)
                summary = session.go()
            world.wait()  # who leaves first cuts off the others in the middle of a word
            return summary
    finally:
        world.leave()


def _check_same(run: Run, config: Config) -> None:
    recorded = run.config.replace(**{name: getattr(config, name) for name in _PLACE})
    found = differences(recorded, config)
    if config.epochs > recorded.epochs:
        found = [line for line in found if not line.startswith("epochs:")]
    if found:
        raise ValueError(
            f"{run.folder}: the run has another configuration ({'; '.join(found)}): resume it with its own, or start "
            "another run; only epochs may be raised"
        )


@contextlib.contextmanager
def _tuned(device: torch.device) -> Iterator[None]:
    """The device is the current one; shapes seldom change during a run, so cuDNN may try which algorithm is fastest."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = before or device.type == "cuda"
    current = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    try:
        with current:
            yield
    finally:
        torch.backends.cudnn.benchmark = before


class _Loop(Session):
    """Going through the epochs of a run."""

    def go(self) -> dict[str, Any]:
        """Train to the end, or until something stops it."""
        if self._finished():
            self.set_status(self._outcome())
            return self._summary()
        self.set_status("running")
        self.reporter.start(self.config.epochs, self.steps_per_epoch)
        self.model.train()
        try:
            if not self.steps and 0 in self.config.keep_epochs:
                self.save()
            while not self._finished():
                self._train_epoch()
                self._end_epoch()
                self.interrupts.check()
            with self.storing():
                self.writer.wait()
        except (KeyboardInterrupt, SystemExit):
            self.save_interrupted()
            self.set_status("interrupted")
            raise
        except TrainingDiverged as error:
            self.set_status("diverged", str(error))
            raise
        except BaseException as error:
            self.set_status("failed", str(error))
            raise
        finally:
            self.writer.close()
            if self.board:
                self.board.close()
        self.set_status(self._outcome())
        return self._summary()

    def _finished(self) -> bool:
        return self.epoch >= min(self.last, self._end()) or self._stopped_early()

    def _outcome(self) -> str:
        return "finished" if self.epoch >= self._end() or self._stopped_early() else "paused"

    def _end(self) -> int:
        """The epoch at whose end the run is done, as far as that is known."""
        end = self.grower.end if self.grower is not None else None
        return self.config.epochs if end is None else end

    def _stopped_early(self) -> bool:
        if self.settling is not None and self.settling.settled:
            return True
        return self.config.patience is not None and self.epoch - self.best[1] >= self.config.patience

    def _train_epoch(self) -> None:
        begun = time.perf_counter() - self.seconds
        train, total = self.data.train, self.config.epochs * self.steps_per_epoch
        for ticket in train.tickets(self.epoch, self.step):
            self.whole = False
            lr = self._step_size()
            if lr != self.lr:
                set_step_size(self.optimizer, lr)
                self.lr = lr
            if self.monitor and self.steps % (self.config.watch_step_size or 1) == 0:
                self._watch(self.monitor, ticket)
            loss = self.step_once(ticket, train.size(self.step))
            self.losses[self.step] = loss
            self.step += 1
            self.steps += 1
            known = self._look(loss)
            if self.threshold:
                self.threshold.step(self.steps / total)
            if self.companion:
                self.companion.step(self.steps / total)
            if self.record is not None:
                self.record.early(self.epoch, self.step)
            self.whole = True
            self.reporter.step(self.epoch + 1, self.step, known)
            every = self.config.checkpoint_every
            if every and self.steps % every == 0 and self.step < self.steps_per_epoch:
                self.seconds = time.perf_counter() - begun
                self.save()
            self.seconds = time.perf_counter() - begun
            self.interrupts.check()
        self.whole = False
        self.train_loss = self._epoch_loss()
        self.seconds = time.perf_counter() - begun

    def _watch(self, monitor: StepSizeMonitor, ticket: step.Ticket) -> None:
        """Say so if the step to come is too long. The step itself is what it would be unwatched."""
        images, labels = self.data.train.load(ticket)
        warning = monitor.look(images.float(), labels)
        if warning is not None:
            self.reporter.note(f"step {self.steps + 1} (epoch {self.epoch + 1}): {warning}")

    def _step_size(self) -> float:
        if self.grower is not None:
            return self.grower.step_size(self.steps, self.steps_per_epoch)
        return step_size(self.config, self.steps, self.steps_per_epoch)

    def _look(self, loss: Tensor) -> float | None:
        """The loss if it is known without waiting; raises if it is not finite."""
        if self.world.device.type == "cpu":
            value = float(self.world.add(loss.clone()))
            if not math.isfinite(value):
                raise self.diverged(self.step, f"the loss is {value}")
            return value
        if self.step % _LOOK_EVERY and self.step < self.steps_per_epoch:
            return None
        return self.check_losses()

    def _epoch_loss(self) -> float:
        losses = self.world.add(self.losses.clone()).cpu().double()
        sizes = torch.tensor([self.data.train.size(i) for i in range(self.steps_per_epoch)], dtype=torch.float64)
        return float((losses * sizes).sum() / sizes.sum())

    def _end_epoch(self) -> None:
        """Evaluate, write down, save."""
        begun = time.perf_counter()
        if self.companion:
            self.companion.end_epoch()
        self.world.share_buffers(self.model)
        test_loss, dense = evaluate(self.model, self.data.test, self.config, self.world)
        metrics: dict[str, Any] = {
            "epoch": self.epoch + 1,
            "steps": self.steps,
            "lr": self.lr,
            "loss": self.train_loss,
            "test_loss": test_loss,
            "dense": dense,
        }
        if self.ours:
            with Selection.of(self.model, self.ours).applied(self.model):
                _, sparse = evaluate(self.model, self.data.test, self.config, self.world)
            metrics |= {"sparse": sparse, "keep": self._keep(self.ours), "lam": _lam(self.ours), "time": self.ours.time}
        metrics["seconds"] = self.seconds
        metrics["images_per_second"] = self.data.train.order.count / self.seconds
        metrics["evaluation_seconds"] = time.perf_counter() - begun
        metrics = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        self.epoch += 1
        self.step, self.seconds = 0, 0.0
        self.losses.zero_()
        if dense > self.best[0]:
            self.best = (dense, self.epoch)
        if self.record is not None:
            scalars = {"loss": self.train_loss, "dense": dense, "sparse": metrics["sparse"]}
            self.record.end(self.epoch, **{k: v for k, v in scalars.items() if v is not None})
        if self.settling is not None:
            metrics["change"] = self._settle(self.settling)
        wide = None
        if self.grower is not None:
            metrics["parameters"] = sum(p.numel() for p in self.model.parameters())
            wide = self.grower.end_epoch(Now(self.model, self.optimizer, metrics, self.example, self._loss_of))
        if self.world.first:
            with self.storing():
                self.run.append(metrics)
            if self.board:
                self.board.write(metrics)
        if self.grower is not None:
            self._grow(self.grower, wide)
        self.whole = True
        every = self.config.checkpoint_every
        if not every or self.steps % every == 0 or self._finished() or self.epoch in self.config.keep_epochs:
            self.save()
        self.reporter.epoch(metrics)

    def _grow(self, grower: Grower, wide: nn.Module | None) -> None:
        """Go on with a wider network, if there is one: new step (a CUDA graph is captured anew), new path."""
        if wide is not None:
            scaler = self.step_once.scaler.state_dict()
            self.model = wide
            if self.config.compile == "compile":
                torch.compiler.reset()  # else its limit on variants of the same code is soon reached
            self.build_step()
            self.step_once.scaler.load_state_dict(scaler)
        with self.storing():
            if wide is not None and self.record is not None and self.ours:
                self.record.put_aside(self.run.path_before(self.growths))
                self.record = Record(wide, self.ours, self.run.path_file, self.steps_per_epoch)
                self.record.end(self.epoch)
            grower.write(self.run)
        self.growths += wide is not None

    def _loss_of(self, model: nn.Module) -> Tensor:
        """The loss of a network on the first batch of the epoch that comes."""
        train = self.data.train
        images, labels = train.load(next(iter(train.tickets(self.epoch))))
        with step.autocast(self.config, self.world.device):
            return functional.cross_entropy(model(images), labels)

    def _settle(self, settling: Settling) -> float | None:
        """How much the epoch changed the selection; None for the first one. The path is the first process's."""
        change = torch.zeros(1, dtype=torch.float64, device=self.world.device)
        if self.world.first and self.record is not None:
            shares = self.config.settle_allocation
            change += settling.add(
                selected(self.record.path, self.config.settle_keep, None if shares == "none" else shares)
            )
        self.world.add(change)
        if not self.world.first:
            settling.note(float(change))
        return None if change.isnan() else float(change)

    def _keep(self, optimizer: DessiLBI | DessiAdamW) -> float:
        """The fraction of groups in the support, as the path and the target count them."""
        supports = [optimizer.support(p) for p, _ in optimizer.penalised()]
        kept = torch.stack([sharding.full(s).sum() for s in supports]).sum()
        return float(kept) / sum(s.numel() for s in supports)

    def _summary(self) -> dict[str, Any]:
        metrics = self.run.metrics() if self.world.first else []
        return {
            **(metrics[-1] if metrics else {}),
            "best_dense": self.best[0],
            "best_epoch": self.best[1],
            "stopped_early": self._stopped_early() and self.epoch < self.config.epochs,
            "settled": self.settling is not None and self.settling.settled,
            "folder": str(self.run.folder),
        }


def _lam(optimizer: DessiLBI | DessiAdamW) -> float:
    lam = optimizer.lam
    shared = not isinstance(lam, list) and not (isinstance(lam, Tensor) and lam.ndim)
    return float(lam) if shared else math.nan  # type: ignore[arg-type]
