"""Filters as images, at several epochs of a run: kernels, what excites a filter most, and what of an image does.

    made = sheet(Run.open("runs/lenet"), "features.6", epochs=[2, 10])
    made.save("filters.html")                                      # or .png

Those selected are shown beside those that are not: what DessiLBI takes in early is meant to be what matters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dessilbi.path import NEVER, Path
from dessilbi.ranking import Candidate
from dessilbi.report.sheet import Block, Row, Sheet, Tile
from dessilbi.training import datasets
from dessilbi.training.opening import network_of
from dessilbi.training.run import Run

_STEPS = 150
_STRIDE = 0.2
_NEVER = torch.iinfo(torch.int32).max


def sheet(run: Run, layer: str, epochs: Sequence[int] = (), count: int = 6, image: int | None = None) -> Sheet:
    """Images of the filters of a layer.

    Args:
        run: its checkpoints of the ends of `epochs` are read: train with `keep_epochs`.
        layer: the name of a module or of its weight, of those that the path has.
        epochs: by default those of `keep_epochs`, and the last one.
        count: how many of the filters selected at the last of the epochs are shown, and how many of the others. Of the
            selected those that entered first; of the others those with the smallest ‖V‖.
        image: which image of the test split gradients are taken at; None is the first one, if the data can be read.
    """
    path, name = _layer(run, layer)
    ends = sorted(set(epochs or [e for e in run.kept_epochs() if e] + [_last(run)]))
    points = [_point(run, path, epoch) for epoch in ends]
    supports = [Candidate.of(path, name, point, "filter").support for point in points]
    last = Candidate.of(path, name, points[-1], "filter")
    if last.groups != path.shape(name)[0]:
        raise ValueError(f"layer={layer!r}: is recorded by groups of kind {path.kind(name)!r}, which are not its filters: "
                         "record a run with conv='filter' or 'weight'")  # fmt: skip
    states = [run.at_epoch(epoch)["model"] for epoch in ends]
    network, shape = network_of(run, states[-1])
    if shape is None:
        raise ValueError(f"{run.folder}: the shape of its images is not known: its configuration has no input_shape")
    order = torch.argsort(last.entry.long() * 1.0 - last.magnitude / (1 + last.magnitude.max()), stable=True)
    selected = [int(g) for g in order if last.support[g]][:count]
    others = [int(g) for g in order.flip(0) if not last.support[g]][:count]
    shown = selected + others
    entered = [int(e) for e in last.entry]
    when = [f"{path.points[e]['point']:g}" if e not in (NEVER, _NEVER) else "never" for e in entered]
    labels = {g: f"filter {g}, {'epoch ' if when[g] != 'never' else ''}{when[g]}" for g in range(last.groups)}
    heads = [f"epoch {epoch}" for epoch in ends]

    def block(title: str, note: str, images: Sequence[Tensor], first: Tensor | None = None) -> Block:
        """A row a filter, a column an epoch."""
        rows = [
            Row(labels[g], [Tile(images[j][i], bool(supports[j][g]), heads[j]) for j in range(len(ends))])
            for i, g in enumerate(shown)
        ]
        return Block(title, note, heads, rows, None if first is None else Tile(first, None, "the image"))

    blocks = []
    kernels = [state[name].float() for state in states]
    if kernels[-1].ndim == 4 and kernels[-1].shape[1] in (1, 3):
        tiles = [Tile(kernels[-1][g], bool(last.support[g]), labels[int(g)]) for g in order]
        blocks.append(
            Block(
                "Kernels", f"All of them at epoch {ends[-1]}, in the order in which they entered.", [], [Row("", tiles)]
            )
        )
    module = network.get_submodule(name.rpartition(".")[0])
    picture = _image(run, image)
    excited, responses = [], []
    for state in states:
        network.load_state_dict(state)
        network.eval()
        excited.append(excite(network, module, shown, shape))
        if picture is not None:
            responses.append(respond(network, module, shown, picture))
    blocks.append(
        block("What excites them", "Images of the norm of a usual one that make the mean activation of the filter as "
              "large as gradient ascent can (activation maximisation, Erhan et al. 2009).", excited)
    )  # fmt: skip
    if picture is not None:
        blocks.append(
            block("What of an image does", "The gradient of the largest activation of the filter at the image, of which "
                  "only what excites passes each ReLU (guided backpropagation, Springenberg et al. 2014).", responses,
                  picture)
        )  # fmt: skip
    facts = (
        f"{run.config.model} on {run.config.data}. {len(selected)} of {int(last.support.sum())} filters selected at epoch "
        f"{ends[-1]}, those that entered first, and {len(others)} of the {last.groups - int(last.support.sum())} others; "
        "with a frame: in the support of Γ at that epoch."
    )
    return Sheet(f"{run.folder.resolve().name}: filters of {name.removesuffix('.weight')}", facts, blocks)


def excite(network: nn.Module, module: nn.Module, filters: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Images, one a filter, that maximise the mean of its output over all images of norm √(number of pixels).

    Gradient ascent on the sphere from noise, with the same noise for every filter and epoch; the step shrinks.
    """
    start = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    x = start.expand(len(filters), *shape).clone()
    radius = start.numel() ** 0.5
    picks = torch.arange(len(filters)), torch.tensor(list(filters))
    for step in range(_STEPS):
        x = (x * (radius / _norm(x))).requires_grad_()
        (grad,) = torch.autograd.grad(_outputs(network, module, x)[picks].flatten(1).mean(1).sum(), x)
        size = _norm(grad)
        x = x.detach() + _STRIDE * radius * (1 - step / _STEPS) * grad / size.clamp_min(torch.finfo(size.dtype).tiny)
    return x * (radius / _norm(x))


def respond(network: nn.Module, module: nn.Module, filters: Sequence[int], image: Tensor) -> Tensor:
    """The gradient at an image of each filter's largest output, by guided backpropagation."""
    x = image.expand(len(filters), *image.shape).clone().requires_grad_()
    picks = torch.arange(len(filters)), torch.tensor(list(filters))
    with _Guided():
        outputs = _outputs(network, module, x)[picks].flatten(1)
        (grad,) = torch.autograd.grad(outputs.amax(1).sum(), x)
    return grad


class _Through(torch.autograd.Function):
    """A ReLU whose gradient passes where both its input and the gradient are positive."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp_min(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0].clamp_min(0) * (x > 0)


class _Guided(TorchFunctionMode):
    """Inside, every ReLU, however the network writes it, is the one of guided backpropagation."""

    _RELUS = (nn.functional.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_, nn.functional.relu_)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._RELUS:
            return _Through.apply(args[0] if args else kwargs["input"])
        return func(*args, **(kwargs or {}))


class _Enough(Exception):
    """The layer has been reached: what comes after it is not needed."""


def _outputs(network: nn.Module, module: nn.Module, images: Tensor) -> Tensor:
    """What a module of the network puts out, before anything follows."""
    with _caught(module) as found:
        network(images)
    return found[0]


@contextmanager
def _caught(module: nn.Module) -> Iterator[list[Tensor]]:
    found: list[Tensor] = []

    def hook(_module: nn.Module, _inputs: object, outputs: Tensor) -> None:
        found.append(outputs)
        raise _Enough

    handle = module.register_forward_hook(hook)
    try:
        yield found
    except _Enough:
        pass
    finally:
        handle.remove()


def _norm(x: Tensor) -> Tensor:
    return x.flatten(1).norm(dim=1).view(-1, *[1] * (x.ndim - 1))


# -- what the run has ----------------------------------------------------------------------------------------------


def _layer(run: Run, layer: str) -> tuple[Path, str]:
    if not run.path_file.is_file():
        raise ValueError(f"{run.folder}: has no path: filters are shown in the order in which they entered it")
    path = Path.load(run.path_file)
    for name in (layer, f"{layer}.weight"):
        if name in path.names:
            return path, name
    known = ", ".join(name.removesuffix(".weight") for name in path.names)
    raise ValueError(f"layer={layer!r}: is not on the path of {run.folder}, which has {known}")


def _last(run: Run) -> int:
    state = run.latest()
    if state is None or not state["epoch"]:
        raise ValueError(f"{run.folder}: has no checkpoint yet: let it train for an epoch")
    return int(state["epoch"])


def _point(run: Run, path: Path, epoch: int) -> int:
    points: Iterable[float] = (point["point"] for point in path.points)
    for index, point in enumerate(points):
        if point == epoch:
            return index
    raise ValueError(f"{run.folder}: epoch {epoch} is not on its path: give the ends of epochs")


def _image(run: Run, index: int | None) -> Tensor | None:
    """An image of the test split; None if none was asked for and the data are not here."""
    try:
        data = datasets.build(run.config, torch.device("cpu"), torch.float32)
    except FileNotFoundError:
        if index is None:
            return None
        raise
    for ticket in data.test.tickets(0):
        images, _ = data.test.load(ticket)
        if (index or 0) < len(images):
            return images[index or 0].contiguous()
        if index is not None:
            index -= len(images)
    raise ValueError(f"image={index}: the test split has fewer")
