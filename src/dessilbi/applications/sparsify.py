"""Pruning: what a run selected is cut out of its network, which is then fine-tuned, or retrained from the start.

    run = prune(Run.open("runs/resnet56"), "runs/half", level="filter", macs="50%", finetune=400)
    table = finish(run)         # trains, as `train` does: what was stopped goes on

The weights W of the run are masked by the support of Γ (M ⊙ W), or by as many groups as a target allows, in the order
in which they entered. Filters and layers that are out leave the network, which becomes smaller; weights stay as zeros.
"""

from __future__ import annotations

import copy
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path as FilePath
from typing import Any

import torch
from torch import Tensor, nn

from dessilbi import files, models
from dessilbi.applications.moment import Moment
from dessilbi.applications.schedules import finetuning, retraining
from dessilbi.ranking import select
from dessilbi.selection import Selection
from dessilbi.surgery import Profile, complete, profile, save_shrunk
from dessilbi.surgery.graph import FIXED, Graph
from dessilbi.surgery.saving import facts_of
from dessilbi.surgery.shrinking import Shrunk, cut_down
from dessilbi.training import datasets, network, randomness, step
from dessilbi.training.config import Config
from dessilbi.training.distribution import World, find_device
from dessilbi.training.environment import facts
from dessilbi.training.evaluation import evaluate
from dessilbi.training.loop import train
from dessilbi.training.opening import open_network
from dessilbi.training.run import Run

_VERSION = 1
_BATCHES = (1, 64)
_FINETUNED, _RETRAINED = "fine-tuned", "retrained"

Table = dict[str, Any]
# A number, or the part of what the dense network has, such as "50%".
Budget = float | str


def prune(
    run: Run,
    folder: str | os.PathLike[str],
    *,
    level: str,
    at: int | None = None,
    keep: float | None = None,
    params: Budget | None = None,
    macs: Budget | None = None,
    latency: Budget | None = None,
    max_prune: float | None = None,
    min_keep: int = 1,
    finetune: int | None = None,
    retrain: int | None = None,
    overwrite: bool = False,
    data_root: str | None = None,
    device: str | None = None,
    rounds: int = 15,
    command: str = "",
    note: Callable[[str], object] = lambda text: None,
) -> Run:
    """Prune the network of a run into a run folder of its own, in which nothing is trained yet.

    The folder holds the pruned network and what must stay zero in it (`start` and `mask` of its configuration), the
    selection, and a table of the dense network, the selected (masked) and the shrunk one. At the levels ``filter`` and
    ``layer`` the shrunk network is the one to be trained, at the level ``weight`` the masked one.

    Args:
        run: a run of an optimizer that leaves a path.
        folder: the new folder.
        level: ``weight``, ``filter`` or ``layer``. The neurons that are the network's outputs are not selected from.
        at: the epoch at whose end path and weights are read; None is the latest checkpoint. All but the last few epochs
            need the `keep_epochs` of the configuration.
        keep, params, macs, latency, max_prune, min_keep: as in :func:`dessilbi.select`, for one image. A budget may be
            a part of what the dense network has, such as ``"50%"``. Without a target the selection is the support of Γ.
        finetune: epochs to fine-tune for: see :func:`finetuning`.
        retrain: epochs to train for from the initial weights of the run: see :func:`retraining`. Without either of the
            two, the folder is set up for fine-tuning as long as the run was.
        overwrite: replace another run.
        data_root, device: where they differ from the run's.
        rounds: how often latency is timed; 0 leaves it out.
        command: recorded with the environment.
        note: is told what was selected.
    """
    if finetune is not None and retrain is not None:
        raise ValueError(f"finetune={finetune} and retrain={retrain}: give one of them")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("pruning works in one process: prune first, then train the new folder under torchrun")
    folder = FilePath(folder)
    if folder.resolve() == run.folder.resolve():
        raise ValueError(f"{folder}: is the run to be pruned: choose another folder for what comes of it")
    if retrain is not None and run.config.grow_options:
        raise ValueError(f"{run.folder}: a network that grew has no initial weights to train from: give finetune")
    Run.check(folder, overwrite)
    place = {name: value for name, value in (("data_root", data_root), ("device", device)) if value is not None}
    config = run.config.replace(**place)
    if config.compile == "graph" and find_device(config.device).type != "cuda":
        config = config.replace(compile="none")
    new = retraining(config, retrain) if retrain is not None else finetuning(config, finetune or config.epochs)
    new = new.replace(start="network.safetensors")

    Moment.check(run, at)
    bench = _Bench(config)
    dense = bench.network(run)
    initial = {name: t.clone() for name, t in dense.state_dict().items()}
    moment = Moment.of(run, dense, bench.data.shape, at)
    path, epoch = moment.path, moment.epoch
    whole = profile(dense, bench.example)
    if level != "weight":
        path = path.without(_heads(dense, bench.example))
    budgets = _budgets(whole, params=params, macs=macs, latency=latency)
    sel = select(path, -1, keep=keep, **budgets, max_prune=max_prune, min_keep=min_keep, level=level, cost=whole)
    _warn_of_narrow(sel)
    sel = complete(dense, sel, bench.example)
    note(f"epoch {epoch:g}, level {level}: {100 * sel.keep:.4g} % of the groups kept")
    masked, shrunk = _masked(dense, sel), cut_down(dense, sel, bench.example)
    candidates = {"dense": dense, "selected": masked, "shrunk": shrunk.model}
    timing = bench.time(candidates, rounds)
    table = {
        "version": _VERSION,
        "run": str(run.folder),
        "epoch": epoch,
        "selection": {**sel.source, "level": sel.level, "kept": sel.keep},
        "trained": _RETRAINED if retrain is not None else _FINETUNED,
        "from": "selected" if level == "weight" else "shrunk",
        "timing": timing,
        "rows": [bench.row(name, model, timing) for name, model in candidates.items()],
    }
    start, mask = _to_train(run, dense, sel, shrunk, initial if retrain is not None else None)
    new = new.replace(mask="mask.safetensors" if mask is not None else None)

    def write(made: Run) -> None:
        bench.save(start, made.network_file)
        if mask is not None:
            mask.save(made.mask_file)
        sel.save(made.selection_file)
        _write_table(made, table)
        made.add_environment(facts(bench.world, command))

    return Run.create(folder, new, overwrite, write)


def finish(run: Run, progress: object | None = None, command: str = "") -> Table:
    """Train what `prune` left, or go on with it, and add the outcome to the table.

    `progress` and `command` are those of :func:`~dessilbi.training.train`, which does it; a run that `train` resumed
    and finished only gets its row.
    """
    table = read_table(run)
    summary = train(run.config, run.folder, resume=True, progress=progress, command=command)
    if int(os.environ.get("RANK", "0")):
        return table
    model, _, _ = open_network(run.folder)
    known = facts_of(run.network_file)
    before = next(row for row in table["rows"] if row["network"] == table["from"])
    # The same shapes: what does not depend on the weights is known.
    trained = {
        **before,
        "network": table["trained"],
        "epochs": summary["epoch"],
        "accuracy": summary["dense"],
        "nonzero": _nonzero(model),
        "bytes": _size(model, known["network"], known["options"]),
    }
    table["rows"] = [row for row in table["rows"] if row["network"] != table["trained"]] + [trained]
    _write_table(run, table)
    return table


def read_table(run: Run) -> Table:
    """The table of a folder that `prune` made.

    Its `rows` are the networks: accuracy on the test split, parameters, how many are not zero, multiply-adds (MACs) an
    image, bytes of the file that :func:`dessilbi.save_shrunk` writes, and latency by batch size: seconds, and how many
    times as fast as the dense one (None where it was not measured).
    """
    if not run.table_file.is_file():
        raise ValueError(f"{run.folder}: was not made by pruning (it has no {run.table_file.name})")
    try:
        table = json.loads(run.table_file.read_text(encoding="utf-8"))
        if table["version"] > _VERSION:
            raise ValueError(f"its format {table['version']} is newer than {_VERSION}, the last this version reads")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{run.table_file}: not a table of pruning ({error})") from None
    return table  # type: ignore[no-any-return]


# -- what is pruned ----------------------------------------------------------------------------------------------------


def _heads(model: nn.Module, example: Tensor) -> set[str]:
    """The weights whose filters or neurons are the network's outputs: without them, classes would be missing."""
    graph = Graph.of(model, example)
    return {name for (name, axis), atoms in graph.axes.items()
            if axis == 0 and len(graph.shapes[name]) > 1 and bool((graph.classes[atoms] == FIXED).all())}  # fmt: skip


def _warn_of_narrow(sel: Selection) -> None:
    """Early entries may all lie in a few layers: a target far below what the run held to can starve the others."""
    if sel.level == "layer":
        return
    for name, mask in sel.items():
        kept = int(mask.sum())
        if 0 < kept <= max(1, 0.005 * mask.numel()) < mask.numel():
            warnings.warn(
                f"{name} keeps {kept} of {mask.numel()} groups, and the network may not recover: bound what a tensor "
                "may lose (max_prune, min_keep), or train towards this target (keep)",
                UserWarning,
                stacklevel=3,
            )


def _budgets(whole: Profile, **given: Budget | None) -> dict[str, float | None]:
    """Budgets as numbers; "50%" is a half of what the dense network has."""
    dense: dict[str, Callable[[], float]] = {
        "params": lambda: whole.parameters,
        "macs": lambda: whole.macs,
        "latency": lambda: whole.latency_of(Selection({})),
    }
    return {name: _amount(name, value, dense[name]) for name, value in given.items()}


def _amount(name: str, value: Budget | None, dense: Callable[[], float]) -> float | None:
    if not isinstance(value, str):
        return value
    try:
        number = float(value.removesuffix("%"))
    except ValueError:
        raise ValueError(f"{name}={value!r}: give a number, or a part of the dense network such as '50%'") from None
    return number / 100 * dense() if value.endswith("%") else number


def _masked(model: nn.Module, sel: Selection) -> nn.Module:
    masked = copy.deepcopy(model)
    sel.apply(masked).remove()
    return masked


@torch.no_grad()
def _to_train(
    run: Run, dense: nn.Module, sel: Selection, shrunk: Shrunk, initial: Mapping[str, Tensor] | None
) -> tuple[nn.Module, Selection | None]:
    """The network to be trained, with the weights that it has or with initial ones, and what stays zero in it."""
    cuts: Mapping[str, Callable[[Tensor], Tensor]] = {}
    if sel.level == "weight":
        model, masks = copy.deepcopy(dense), sel.masks(dense)
    else:
        model, masks, cuts = shrunk.model, dict(shrunk.masks), shrunk.cuts
    there = model.state_dict()
    before = network.find(run, "mask", resume=True)
    if before is not None:
        # What was zero in the run stays zero after it.
        for name, mask in Selection.load(before).masks(dense).items():
            if name in there:
                mask = cuts[name](mask) if name in cuts else mask
                masks[name] = masks[name] & mask if name in masks else mask
    for name, value in (initial or {}).items():
        if name in there:
            there[name].copy_(cuts[name](value) if name in cuts else value)
    masks = {name: mask for name, mask in masks.items() if not mask.all()}
    left = Selection(masks, "weight", sel.source) if masks else None
    if left is not None:
        left.apply(model).remove()
    return model, left


# -- what it is worth --------------------------------------------------------------------------------------------------


class _Bench:
    """Measures networks for the data of a configuration, all alike."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.world = World(0, 1, find_device(config.device))
        self.data = datasets.build(config, self.world.device, step.DTYPES[config.precision])
        self.example = torch.randn(1, *self.data.shape, generator=torch.Generator().manual_seed(0))
        named = config.model in models.names()
        self.name = config.model if named else None
        sizes = {"num_classes": self.data.num_classes, "in_channels": self.data.shape[0]}
        self.options = {**sizes, **config.model_options} if named else {}

    def network(self, run: Run) -> nn.Module:
        """The network of a run with its initial weights, or as large as it has grown, on the CPU."""
        randomness.seed_all(self.config.seed)
        start = network.find(run, "start", resume=True)
        model = network.build(self.config, self.data, self.world.device, start)
        state = run.latest() if self.config.grow_options else None
        if state is not None:
            model = network.of_checkpoint(self.config, model, state, self.world.device)
        return model.cpu().eval()

    def save(self, model: nn.Module, file: FilePath) -> None:
        save_shrunk(model, file, self.name, self.options, {"input_shape": list(self.data.shape)})

    def time(self, candidates: Mapping[str, nn.Module], rounds: int) -> dict[str, Any] | None:
        """Latencies, measured side by side in a process of their own."""
        if not rounds:
            return None
        from dessilbi.latency import measure

        report = measure(
            candidates, self.example, batches=_BATCHES, rounds=rounds, device=str(self.world.device)
        ).to_dict()
        for row in report["rows"]:
            row |= row.pop("speed")
        return report

    def row(self, name: str, model: nn.Module, timing: Mapping[str, Any] | None) -> dict[str, Any]:
        """A line of the table."""
        there = copy.deepcopy(model).to(self.world.device)
        _, accuracy = evaluate(there, self.data.test, self.config, self.world)
        costs = profile(model, self.example)
        mine = [row for row in timing["rows"] if row["name"] == name] if timing else []
        return {
            "network": name,
            "accuracy": accuracy,
            "parameters": costs.parameters,
            "nonzero": _nonzero(model),
            "macs": costs.macs,
            "bytes": _size(model, self.name, self.options),
            "latency": {str(row["batch"]): {"seconds": row["seconds"], "ratio": row["ratio"]} for row in mine} or None,
        }


def _nonzero(model: nn.Module) -> int:
    return sum(int(p.count_nonzero()) for p in model.parameters())


def _size(model: nn.Module, name: str | None, options: Mapping[str, Any]) -> int:
    """Bytes of the network's file."""
    with tempfile.TemporaryDirectory(prefix="dessilbi-") as folder:
        file = FilePath(folder) / "network.safetensors"
        save_shrunk(model, file, name, options)
        return file.stat().st_size


def _write_table(run: Run, table: Table) -> None:
    files.write_atomically(run.table_file, (json.dumps(table, indent=2) + "\n").encode())
