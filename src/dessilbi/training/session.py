"""A run in this process: what is built from the configuration, how far it has come, and its checkpoints."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dessilbi import files
from dessilbi.diagnostics import StepSizeMonitor
from dessilbi.optim import DessiAdamW, DessiLBI
from dessilbi.selection import Selection
from dessilbi.settling import Settling
from dessilbi.threshold import TargetThreshold
from dessilbi.ticket import Ticket
from dessilbi.training import companions, datasets, network, optimizers, randomness, sharding, step
from dessilbi.training.board import Board
from dessilbi.training.config import Config
from dessilbi.training.distribution import World
from dessilbi.training.environment import facts
from dessilbi.training.growing import Grower
from dessilbi.training.interrupts import Interrupts
from dessilbi.training.record import Record
from dessilbi.training.reporter import Reporter
from dessilbi.training.run import Run
from dessilbi.training.writer import Writer


class TrainingDiverged(RuntimeError):
    """The loss or the weights are not finite any more. The last good checkpoint is kept."""


class Session:
    """What is built from the configuration, and how far the run has come."""

    def __init__(
        self,
        config: Config,
        world: World,
        reporter: Reporter,
        interrupts: Interrupts,
        run: Run,
        resume: bool,
        until: int | None,
        grower: Grower | None,
    ) -> None:
        if grower is not None and world.size > 1:
            raise ValueError(f"a network grows in one process, not in {world.size}: start it without torchrun")
        self.grower = grower
        self.last = config.epochs if until is None else min(config.epochs, until)
        self.config, self.world, self.reporter, self.interrupts = config, world, reporter, interrupts
        self.run = run
        start, mask, ticket = (network.find(run, name, resume) for name in ("start", "mask", "ticket"))
        dtype = step.DTYPES[config.precision]
        self.data = datasets.build(config, world.device, dtype, world.rank, world.size)
        randomness.seed_all(config.seed)
        self.model = network.build(config, self.data, world.device, start)
        self.example = torch.randn(1, *self.data.shape, generator=torch.Generator().manual_seed(0)).to(world.device)
        # What a new run folder gets a copy of.
        files_of = ((start, run.network_file), (mask, run.mask_file), (ticket, run.ticket_file))
        self.given = [(to, file.read_bytes()) for file, to in files_of if file]
        kept = Selection.load(mask) if mask is not None else None
        if ticket is not None:
            kept = Ticket.load(ticket).place(self.model, config.data, config.seed)
        self.mask = kept.apply(self.model) if kept is not None else None
        if config.fsdp:
            world.shard(self.model)
        self.equip()
        self.companion = companions.build(config, self.model, self.optimizer)
        self.settling = Settling(config.settle) if config.settle_keep is not None else None
        watched = config.watch_step_size is not None and world.first
        self.monitor = StepSizeMonitor(self.model, self.optimizer, self.criterion) if watched else None
        self.steps_per_epoch = len(self.data.train)
        # How far the run is: whole epochs, steps into the next one, steps in all.
        self.epoch = self.step = self.steps = 0
        self.growths = 0
        self.losses = torch.zeros(self.steps_per_epoch, device=world.device)
        self.looked = 0
        self.seconds = 0.0
        self.lr = math.nan
        self.best: tuple[float, int] = (-1.0, 0)
        # False while a step or an evaluation is half done: such a state must not be saved.
        self.whole = True
        self.writer = Writer(background=world.device.type != "cpu")
        self.record: Record | None = None
        self.board: Board | None = None

    def equip(self) -> None:
        """The optimizer of the network, and what makes its steps."""
        config = self.config
        self.optimizer = optimizers.build(config, self.model, self.world.device, self.data.shape)
        self.build_step()
        ours = isinstance(self.optimizer, (DessiLBI, DessiAdamW)) and bool(self.optimizer.penalised())
        self.ours: DessiLBI | DessiAdamW | None = self.optimizer if ours else None  # type: ignore[assignment]
        self.threshold = (
            TargetThreshold(self.ours, config.keep, config.ramp) if self.ours and config.keep is not None else None
        )

    def build_step(self) -> None:
        config, world = self.config, self.world
        wrapped = self.model if config.fsdp else world.wrap(self.model)
        self.step_once = step.build(config, wrapped, self.optimizer, self.data.train, world.device, world.size)

    def criterion(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, labels, label_smoothing=self.config.label_smoothing)

    def check_losses(self) -> float:
        """The newest loss, when all of this epoch were found finite."""
        losses = self.world.add(self.losses[: self.step].clone()).cpu()
        bad = (~losses.isfinite()).nonzero()
        if len(bad):
            first = int(bad[0])
            raise self.diverged(first + 1, f"the loss is {float(losses[first])}")
        return float(losses[-1])

    def diverged(self, step: int, what: str) -> TrainingDiverged:
        config = self.config
        advice = f"lower lr (it is {self.lr:g}; try {self.lr / 10:g}), clip the gradient (clip=1), or warm up"
        if self.ours:
            advice += (
                f"; a step size below 2/(κ(L + 2/ν)), here 2/({config.kappa:g}·(L + {2 / config.nu:g})) with L the "
                "Lipschitz constant of the gradient, is safe without momentum"
            )
        where = f"step {self.steps - self.step + step} (epoch {self.epoch + 1}, step {step} of {self.steps_per_epoch})"
        return TrainingDiverged(f"{what} at {where}: {advice}. The last good checkpoint is kept")

    def _check_weights(self) -> None:
        if self.step and self.world.device.type != "cpu":
            self.check_losses()
        largest = torch._foreach_norm([sharding.local(p.detach()) for p in self.model.parameters()], math.inf)
        if not torch.stack(largest).isfinite().all():
            raise self.diverged(self.step, "there are weights that are not finite")

    # -- the folder ----------------------------------------------------------------------------------------------

    def enter(self, resume: bool, overwrite: bool, command: str) -> None:
        """Make the run folder, or take up what is in it."""
        if resume:
            state = self.run.latest(self.reporter.note)
            self.world.wait()
        else:
            state = None
            if self.world.first:
                Run.create(self.run.folder, self.config, overwrite, self._hand_over)
            self.world.wait()
        if state is not None and "modules" in state:
            self.model = network.of_checkpoint(self.config, self.model, state, self.world.device).train()
            self.equip()
        if self.ours and (self.world.first or self.config.fsdp):
            self.record = Record(self.model, self.ours, self.run.path_file, self.steps_per_epoch)
        if state is not None:
            self._restore(state)
        if state is None or self.world.rank:
            # Importing a package may have drawn a random number, in one process and not in the next.
            randomness.seed_all((self.config.seed + 1_000_003 * self.world.rank + self.steps) % 2**63)
        if self.world.first:
            with self.storing():
                if resume:
                    self.run.write_config(self.config)
                    self.run.truncate(self.epoch)
                    if self.record is not None and state is None:
                        self.record.resume(0)
                self.run.add_environment(facts(self.world, command))
            if self.config.tensorboard:
                self.board = Board(self.run.folder / "tensorboard", self.epoch)

    def _hand_over(self, run: Run) -> None:
        """Give the new folder the files that the run starts from."""
        for file, data in self.given:
            files.write_atomically(file, data)

    def _state(self) -> dict[str, Any]:
        state = {
            "epoch": self.epoch,
            "step": self.step,
            "steps": self.steps,
            "points": len(self.record) if self.record is not None else 0,
            "losses": self.losses[: self.step],
            "seconds": self.seconds,
            "best": self.best,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.step_once.scaler.state_dict(),
            "threshold": self.threshold.state_dict() if self.threshold else None,
            "companion": self.companion.state_dict() if self.companion else None,
            "settling": self.settling.state_dict() if self.settling else None,
            "random": randomness.state(),
        }
        if self.grower is not None:
            from dessilbi.surgery.saving import structure

            state |= {
                "modules": structure(self.model),
                "growths": self.growths,
                "grower": self.grower.state_dict(),
            }
        return sharding.gathered(state) if self.config.fsdp else state

    def _restore(self, state: dict[str, Any]) -> None:
        if self.config.fsdp:
            state = sharding.scattered(state, self.model, self.optimizer)
        self.epoch, self.step, self.steps = state["epoch"], state["step"], state["steps"]
        self.losses[: self.step].copy_(state["losses"])
        self.seconds, self.best = state["seconds"], state["best"]
        self.model.load_state_dict(state["model"])
        optimizers.load(self.optimizer, state["optimizer"])
        self.step_once.scaler.load_state_dict(state["scaler"])
        if self.threshold and state["threshold"]:
            self.threshold.load_state_dict(state["threshold"])
        # Checkpoints of earlier versions have neither of the two.
        if self.companion and state.get("companion"):
            self.companion.load_state_dict(state["companion"])
        if self.settling is not None and state.get("settling"):
            self.settling.load_state_dict(state["settling"])
        if self.grower is not None:
            self.growths = state["growths"]
            self.grower.load_state_dict(state["grower"])
            if self.world.first:
                self.run.take_path_back(self.growths)
        if self.record is not None:
            self.record.resume(state["points"])
        randomness.restore(state["random"])

    def save(self, check: bool = True) -> None:
        """Write a checkpoint, if the state is a good one."""
        if check:
            self._check_weights()
        if not self.world.first and not self.config.fsdp:
            return
        state = self._state()
        if self.world.first:
            with self.storing():
                if self.record is not None:
                    self.record.save()
                taken = self.writer.take(state)
                self.writer(lambda: self.run.save_checkpoint(taken))

    def save_interrupted(self) -> None:
        if self.config.fsdp and self.world.size > 1:
            # All processes would have to come here, and some may not have had the signal.
            self.reporter.note("interrupted: a sharded run goes on from its last checkpoint")
        elif self.whole:
            try:
                # Checking takes all processes of a distributed run.
                self.save(check=self.world.size == 1)
                with self.storing():
                    self.writer.wait()
            except (TrainingDiverged, OSError) as error:
                self.reporter.note(str(error))

    @contextlib.contextmanager
    def storing(self) -> Iterator[None]:
        """Says what to do when a disk is full or a folder cannot be written."""
        try:
            yield
        except OSError as error:
            raise OSError(
                error.errno,
                f"{self.run.folder}: cannot write ({error.strerror or error}): the last good checkpoint is kept; make "
                "room, or make the folder writable, and resume",
            ) from error

    def set_status(self, status: str, message: str = "") -> None:
        if self.world.first:
            # A full disk has been reported already, or will be by what matters more.
            with contextlib.suppress(OSError):
                self.run.set_status(status, message)
