"""Filters as images, at several epochs of a run: kernels, what excites a filter most, and what of an image does.

    made = sheet(Run.open("runs/lenet"), "features.6", epochs=[2, 10])
    made.save("filters.html")                                      # or .png

Those selected are shown beside those that are not: what DessiLBI takes in early is meant to be what matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dessilbi.path import Path
from dessilbi.ranking import Candidate, ranked
from dessilbi.report.excitation import excite, respond
from dessilbi.report.sheet import Block, Row, Sheet, Tile
from dessilbi.training import datasets
from dessilbi.training.opening import network_of
from dessilbi.training.run import Run

State = dict[str, Any]


def sheet(run: Run, layer: str, epochs: Sequence[int] = (), count: int = 6, image: int | None = None) -> Sheet:
    """Images of the filters of a layer.

    Args:
        run: its checkpoints of the ends of `epochs` are read: train with `keep_epochs`. A network that grew is shown
            since its last growth.
        layer: the name of a module or of its weight, of those that the path has.
        epochs: by default those of `keep_epochs`, and the last one.
        count: how many of the filters selected at the last of the epochs are shown, and how many of the others. Of the
            selected those that entered first; of the others those that would enter last.
        image: which image of the test split gradients are taken at; None is the first one, if the data can be read.
    """
    path, name = _layer(run, layer)
    states = _states(run, path, epochs)
    ends = list(states)
    along = [_ranked(path, name, epoch) for epoch in ends]
    weights = states[ends[-1]]["model"]
    network, shape = network_of(run, weights, states[ends[-1]].get("modules"))
    if shape is None:
        raise ValueError(f"{run.folder}: the shape of its images is not known: set input_shape in its config.toml")

    last, order = along[-1], ranked(along[-1].entry, along[-1].magnitude).tolist()
    selected = [g for g in order if last.support[g]]
    others = [g for g in reversed(order) if not last.support[g]]
    shown = selected[:count] + others[:count]
    entered = [_entry(path, int(index)) for index in last.entry]
    heads = [f"filter {g}\n{entered[g]}" for g in shown]

    def block(title: str, note: str, images: Sequence[Tensor], first: Tile | None = None) -> Block:
        """A column a filter, a row an epoch."""
        rows = [
            Row(
                f"epoch {epoch}",
                [
                    Tile(x, bool(now.support[g]), f"filter {g} at epoch {epoch}")
                    for g, x in zip(shown, made, strict=True)
                ],
            )
            for epoch, now, made in zip(ends, along, images, strict=True)
        ]
        return Block(title, note, heads, rows, first)

    blocks = []
    kernels = weights[name].float()
    if kernels.ndim == 4 and kernels.shape[1] == shape[0]:
        tiles = [Tile(kernels[g], bool(last.support[g]), f"filter {g}, {entered[g]}") for g in order]
        note = f"All of them at epoch {ends[-1]}, in the order in which they entered; the others by the norm of V."
        blocks.append(Block("Kernels", note, [], [Row("", tiles)]))
    module = network.get_submodule(name.rpartition(".")[0])
    picture, without = _image(run, image)
    excited, responses = [], []
    for state in states.values():
        network.load_state_dict(state["model"])
        excited.append(excite(network, module, shown, shape, run.config.seed))
        if picture is not None:
            responses.append(respond(network, module, shown, picture))
    note = ("Images of the norm of a usual one, made by gradient ascent so that the output of the filter in their "
            "middle is large (activation maximisation, Erhan et al. 2009).")  # fmt: skip
    blocks.append(block("What excites them", note, excited))
    if picture is not None:
        note = ("The gradient of the filter's largest output at the image; on the way back each ReLU lets through only "
                "what excites (guided backpropagation, Springenberg et al. 2014).")  # fmt: skip
        blocks.append(block("What of an image excites them", note, responses, _as_it_looks(picture)))
    facts = (
        f"{run.config.model} on {run.config.data}. With a frame: selected at that epoch. Shown are "
        f"{min(count, len(selected))} of the {len(selected)} filters selected at epoch {ends[-1]}, those that entered "
        f"first, and {min(count, len(others))} of the {len(others)} others.{without}"
    )
    return Sheet(f"{run.folder.resolve().name}: filters of {name.removesuffix('.weight')}", facts, blocks)


def _layer(run: Run, layer: str) -> tuple[Path, str]:
    if not run.path_file.is_file():
        raise ValueError(
            f"{run.folder}: has no path, in whose order filters are shown: train with optimizer='dessilbi'"
        )
    path = Path.load(run.path_file)
    for name in (layer, f"{layer}.weight"):
        if name in path.names:
            return path, name
    known = ", ".join(name.removesuffix(".weight") for name in path.names)
    raise ValueError(f"layer={layer!r}: is not on the path of {run.folder}, which has {known}")


def _states(run: Run, path: Path, epochs: Sequence[int]) -> dict[int, State]:
    """What the checkpoints of the ends of epochs hold, in their order."""
    recorded = [point["point"] for point in path.points]
    latest = run.latest()
    if latest is None or not latest["epoch"]:
        raise ValueError(f"{run.folder}: has no checkpoint of the end of an epoch yet: let it train for one")
    if absent := [epoch for epoch in epochs if epoch not in recorded]:
        grew = ", which begins with the last growth of the network" if run.growth_file.is_file() else ""
        raise ValueError(f"epochs={absent}: not on the path of {run.folder}{grew}; its last point is {recorded[-1]:g}")
    default = [epoch for epoch in (*run.kept_epochs(), latest["epoch"]) if epoch in recorded]
    found: dict[int, State] = {}
    missing: dict[int, ValueError] = {}
    for epoch in sorted({*(epochs or default)}):
        try:
            state = run.at_epoch(epoch)
            found[epoch] = {name: state[name] for name in ("model", "modules") if name in state}
        except ValueError as error:
            missing[epoch] = error
    if missing and (epochs or not found):
        if len(missing) == 1:
            raise next(iter(missing.values()))
        options = " ".join(f"--keep-epochs {epoch}" for epoch in sorted(epochs))
        raise ValueError(f"{run.folder}: there are no checkpoints of the ends of epochs "
                         f"{', '.join(map(str, missing))}: train with {options} to have them")  # fmt: skip
    if not found:
        raise ValueError(f"{run.folder}: no checkpoint is of a point of its path: let it train for an epoch more")
    return found


def _ranked(path: Path, name: str, epoch: int) -> Candidate:
    """The filters of a layer as they were at the end of an epoch."""
    index = [point["point"] for point in path.points].index(epoch)
    filters = Candidate.of(path, name, index, "filter")
    if filters.groups != path.shape(name)[0]:
        raise ValueError(f"layer={name.removesuffix('.weight')!r}: is recorded by groups of kind {path.kind(name)!r}, "
                         "which are not its filters: train with conv='filter' or 'weight'")  # fmt: skip
    return filters


def _entry(path: Path, index: int) -> str:
    """When a filter entered, in words."""
    if index >= len(path):
        return "never in"
    point = path.points[index]["point"]
    return f"since {point:.2g}" if point < 1 else f"since {point:g}"


def _image(run: Run, index: int | None) -> tuple[Tensor | None, str]:
    """An image of the test split; None, and a sentence on why, if none was asked for and the data are not here."""
    try:
        data = datasets.build(run.config, torch.device("cpu"), torch.float32)
    except OSError as error:
        if index is not None:
            raise
        return None, f" The data cannot be read, so there are no gradients at an image: {error}"
    wanted = skipped = index or 0
    for ticket in data.test.tickets(0):
        images, _ = data.test.load(ticket)
        if skipped < len(images):
            return images[skipped].contiguous(), ""
        skipped -= len(images)
    raise ValueError(f"image={wanted}: the test split has {wanted - skipped}, counted from 0")


def _as_it_looks(image: Tensor) -> Tile:
    """An image as a tile: from black to white."""
    return Tile(image - (image.min() + image.max()) / 2, None, "the image")
