"""``Run``: the folder of a training run, and all there is to know about it.

config.toml           the configuration, complete: the run can be repeated from it alone
metrics.jsonl         a JSON object a line, one an epoch
path.safetensors      the path (:class:`dessilbi.Path`), where the optimizer leaves one; of a network that grows, since
                      the last growth
paths/                those before, numbered by growths
growth.json           how the network grew (see :mod:`dessilbi.applications.grow`)
checkpoints/          the last few states, named after the number of steps, and those of `keep_epochs`
network.safetensors   the network that it starts from, where the configuration names one (`start`)
mask.safetensors      what stays zero, where the configuration names that (`mask`)
ticket.safetensors    both of a ticket, where the configuration names one (`ticket`)
selection.safetensors what was selected, of a run that pruning made
table.json            what that cost and gained
environment.json      versions, device, commit, command
status.json           running, finished, paused, interrupted, diverged, failed
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dessilbi import files
from dessilbi.training.config import Config

_NAMES = (
    "config.toml",
    "metrics.jsonl",
    "path.safetensors",
    "paths",
    "growth.json",
    "environment.json",
    "status.json",
    "checkpoints",
    "tensorboard",
    "network.safetensors",
    "mask.safetensors",
    "ticket.safetensors",
    "selection.safetensors",
    "table.json",
)
_CHECKPOINT = re.compile(r"(\d+)\.safetensors")
_OF_EPOCH = re.compile(r"epoch-(\d+)\.safetensors")


class Run:
    """A run folder. Make one with :meth:`create`, look into one with :meth:`open`."""

    def __init__(self, folder: str | os.PathLike[str], config: Config) -> None:
        self.folder = Path(folder)
        self.config = config

    @classmethod
    def create(
        cls,
        folder: str | os.PathLike[str],
        config: Config,
        overwrite: bool = False,
        write: Callable[[Run], object] | None = None,
    ) -> Run:
        """A new folder. One that exists is refused, unless `overwrite` is given and it is a run folder: then what
        the old run left is deleted.

        `write` puts further files there, before the configuration: a folder without one is no run.
        """
        folder = Path(folder)
        left = cls.check(folder, overwrite)
        # The configuration goes first: without it, what is left is no run.
        for entry in sorted(left, key=lambda entry: entry.name != "config.toml"):
            if entry.name in _NAMES:
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        run = cls(folder, config)
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        if write is not None:
            write(run)
        run.write_config(config)
        return run

    @staticmethod
    def check(folder: str | os.PathLike[str], overwrite: bool = False) -> list[Path]:
        """Raise what `create` would, without touching anything; what is in the folder."""
        folder = Path(folder)
        if folder.exists() and not folder.is_dir():
            raise FileExistsError(f"{folder}: is a file, not a folder: choose another name for the run")
        left = [entry for entry in folder.iterdir() if not entry.name.startswith(".")] if folder.exists() else []
        names = [entry.name for entry in left]
        foreign = [name for name in names if name not in _NAMES]
        if foreign and "config.toml" not in names:
            raise FileExistsError(f"{folder}: holds {foreign[0]!r} and is not a run folder: choose another folder")
        if left and not overwrite:
            raise FileExistsError(f"{folder}: exists already: resume the run, overwrite it, or choose another folder")
        return left

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Run:
        """A folder that exists."""
        file = Path(folder) / "config.toml"
        if not file.is_file():
            what = "is not a run folder (it has no config.toml)" if Path(folder).is_dir() else "no such run folder"
            raise FileNotFoundError(f"{folder}: {what}")
        return cls(folder, Config.from_toml(file))

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, {self.status})"

    # -- what lies where -----------------------------------------------------------------------------------------

    @property
    def path_file(self) -> Path:
        """The file of the path, for :meth:`dessilbi.Path.load`; it is there if the optimizer leaves a path."""
        return self.folder / "path.safetensors"

    def path_before(self, growth: int) -> Path:
        """The path of a network that grew, between the growth of that number (0: from the beginning) and the next."""
        return self.folder / "paths" / f"{growth}.safetensors"

    def take_path_back(self, growth: int) -> None:
        """Go back to a state after this growth: a path that was put aside since is again the one to go on with."""
        for file in (self.folder / "paths").glob("*.safetensors"):
            if int(file.stem) == growth:
                os.replace(file, self.path_file)
            elif int(file.stem) > growth:
                file.unlink()

    @property
    def growth_file(self) -> Path:
        """How the network grew, as JSON."""
        return self.folder / "growth.json"

    @property
    def network_file(self) -> Path:
        """The network that the run starts from, for :func:`dessilbi.load_shrunk`."""
        return self.folder / "network.safetensors"

    @property
    def mask_file(self) -> Path:
        """What stays zero in it, for :meth:`dessilbi.Selection.load`."""
        return self.folder / "mask.safetensors"

    @property
    def ticket_file(self) -> Path:
        """The ticket that it trains, for :meth:`dessilbi.Ticket.load`."""
        return self.folder / "ticket.safetensors"

    @property
    def selection_file(self) -> Path:
        """What was selected of the network that it was made from, for :meth:`dessilbi.Selection.load`."""
        return self.folder / "selection.safetensors"

    @property
    def table_file(self) -> Path:
        """What the selection cost and gained, as JSON."""
        return self.folder / "table.json"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def metrics_file(self) -> Path:
        return self.folder / "metrics.jsonl"

    def write_config(self, config: Config) -> None:
        self.config = config
        files.write_atomically(self.folder / "config.toml", config.to_toml().encode())

    # -- metrics -------------------------------------------------------------------------------------------------

    def metrics(self) -> list[dict[str, Any]]:
        """The epochs so far. Accuracies (`dense`, `sparse`) and `keep` are fractions; `time` is the path time Σα.

        A last line that a crash cut short is left out.
        """
        if not self.metrics_file.exists():
            return []
        lines = self.metrics_file.read_bytes().split(b"\n")
        found = []
        for number, line in enumerate(lines):
            try:
                if line.strip():
                    found.append(json.loads(line))
            except ValueError:
                if any(rest.strip() for rest in lines[number + 1 :]):
                    raise ValueError(
                        f"{self.metrics_file}: line {number + 1} is not JSON: the file is damaged"
                    ) from None
        return found

    def append(self, metrics: Mapping[str, Any]) -> None:
        """Add an epoch; it is on disk when this returns."""
        line = json.dumps(dict(metrics)) + "\n"
        with open(self.metrics_file, "ab") as out:
            out.write(line.encode())
            out.flush()
            os.fsync(out.fileno())

    def truncate(self, epochs: int) -> None:
        """Forget what came after so many epochs: a resumed run goes through them again."""
        kept = [m for m in self.metrics() if m.get("epoch", 0) <= epochs]
        files.write_atomically(self.metrics_file, "".join(json.dumps(m) + "\n" for m in kept).encode())

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def save_checkpoint(self, state: Mapping[str, Any]) -> Path:
        """Write a state, which holds its number of `steps`, and drop the oldest of more than `keep_checkpoints`.

        That of the end of an epoch in `keep_epochs` is written once more, to stay.
        """
        from dessilbi.training import checkpoint

        self.checkpoints.mkdir(parents=True, exist_ok=True)
        file = self.checkpoints / f"{state['steps']:09d}.safetensors"
        checkpoint.save(file, state)
        epoch = state.get("epoch", 0)
        if state.get("step") == 0 and epoch in self.config.keep_epochs:
            checkpoint.save(self._of_epoch(epoch), state)
        for number in self.kept_epochs():
            if number > epoch:
                self._of_epoch(number).unlink(missing_ok=True)
        # Newer ones are of a part of the run that was gone back on.
        kept = [f for f in self._saved() if f <= file][-self.config.keep_checkpoints :]
        for old in self._saved():
            if old not in kept:
                old.unlink(missing_ok=True)
        return file

    def latest(self, note: Callable[[str], None] | None = None) -> dict[str, Any] | None:
        """The newest state that is whole; None if there is none yet. `note` is told of damaged ones passed over."""
        from dessilbi.training import checkpoint

        damaged = None
        for file in reversed(self._saved()):
            try:
                state: dict[str, Any] = checkpoint.load(file)
            except (ValueError, OSError) as error:
                damaged = error
                if note:
                    note(f"{error}: going back to the one before")
                continue
            return state
        if damaged is not None:
            raise ValueError(f"{self.checkpoints}: no checkpoint is whole (the last: {damaged}): start the run anew")
        return None

    def at_epoch(self, epoch: int) -> dict[str, Any]:
        """The state at the end of an epoch."""
        from dessilbi.training import checkpoint

        there = set(self.kept_epochs())
        if epoch in there:
            kept: dict[str, Any] = checkpoint.load(self._of_epoch(epoch))
            return kept
        for file in reversed(self._saved()):
            state: dict[str, Any] = checkpoint.load(file)
            if state["step"] == 0:
                there.add(state["epoch"])
                if state["epoch"] == epoch:
                    return state
        found = f"only of {', '.join(map(str, sorted(there)))}" if there else "nor of another"
        raise ValueError(f"{self.folder}: there is no checkpoint of the end of epoch {epoch}, {found}: train with "
                         f"keep_epochs=[{epoch}] (--keep-epochs {epoch}) to have one")  # fmt: skip

    def _of_epoch(self, epoch: int) -> Path:
        return self.checkpoints / f"epoch-{epoch}.safetensors"

    def kept_epochs(self) -> list[int]:
        """The epochs whose checkpoints stay, as far as they are there."""
        if not self.checkpoints.is_dir():
            return []
        found = (_OF_EPOCH.fullmatch(f.name) for f in self.checkpoints.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def _saved(self) -> list[Path]:
        if not self.checkpoints.is_dir():
            return []
        return sorted(f for f in self.checkpoints.iterdir() if _CHECKPOINT.fullmatch(f.name))

    # -- environment and status ----------------------------------------------------------------------------------

    @property
    def environment(self) -> dict[str, Any]:
        """Versions, device, commit and command; of the processes that resumed the run under `resumed`."""
        return _read_json(self.folder / "environment.json")

    def add_environment(self, facts: Mapping[str, Any]) -> None:
        """Record where the run takes place; a second call is a resumption."""
        known = self.environment
        if known:
            facts = {**known, "resumed": [*known.get("resumed", []), dict(facts)]}
        files.write_atomically(self.folder / "environment.json", (json.dumps(dict(facts), indent=2) + "\n").encode())

    @property
    def status(self) -> str:
        """new, running, killed, finished, paused, interrupted, diverged or failed.

        A run that was killed had no time to say so: it counts as killed if its process is gone from this machine.
        """
        known = _read_json(self.folder / "status.json")
        status = str(known.get("status", "new"))
        here = known.get("host") == socket.gethostname()
        return "killed" if status == "running" and here and not _alive(known.get("process")) else status

    def set_status(self, status: str, message: str = "") -> None:
        known = {"status": status, "message": message, "host": socket.gethostname(), "process": os.getpid()}
        files.write_atomically(self.folder / "status.json", (json.dumps(known) + "\n").encode())


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _alive(process: Any) -> bool:
    if not isinstance(process, int) or os.name != "posix":
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
