"""Open a network by what people have in their hands: a name, a run folder, or a file by ``save_shrunk``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from dessilbi import models
from dessilbi.training.config import Config

if TYPE_CHECKING:
    from dessilbi.training.run import Run


def open_network(
    target: str | os.PathLike[str], input_shape: tuple[int, ...] | None = None
) -> tuple[nn.Module, tuple[int, ...], str]:
    """The network in eval mode, the shape of one input without the batch, and a label.

    `target` is a built-in network (its initial weights), ``package.module:factory``, a run folder (its latest
    checkpoint, or where there is none yet the network that it starts from) or a file by
    :func:`dessilbi.surgery.save_shrunk`. An `input_shape` goes before what is known.
    """
    place = Path(target)
    name = os.fspath(target)
    known: tuple[int, ...] | None
    if name in models.names():
        network, known = models.create(name), models.input_shape(name)
    elif place.is_dir():
        network, known = _of_run(place)
    elif place.is_file():
        network, known = _of_file(place)
    elif ":" in name and os.sep not in name:
        network, known = models.create(name), None
    else:
        near = get_close_matches(name, models.names(), n=1)
        advice = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"{name}: {advice}give a network of `dessilbi models`, package.module:factory, a run folder, or a file"
            " by save_shrunk"
        )
    shape = input_shape or known
    if shape is None:
        raise ValueError(f"{name}: the shape of its inputs is not known: state it, such as --input-shape 3x32x32")
    return network.eval(), tuple(shape), name


def _of_run(folder: Path) -> tuple[nn.Module, tuple[int, ...] | None]:
    from dessilbi.training.run import Run

    run = Run.open(folder)
    state = run.latest()
    if state is None and run.network_file.is_file():
        return _of_start(run)
    if state is None:
        raise ValueError(f"{folder}: the run has no checkpoint yet: let it train for an epoch")
    network, shape = network_of(run, state["model"], state.get("modules"))
    try:
        network.load_state_dict(state["model"])
    except RuntimeError as error:
        line = " ".join(str(error).split())
        raise ValueError(f"{folder}: the checkpoint is of another network than {run.config.model!r}: {line}") from error
    return network, shape


def network_of(
    run: Run, weights: Mapping[str, Any], modules: Mapping[str, Any] | None = None
) -> tuple[nn.Module, tuple[int, ...] | None]:
    """The network of a run that has such weights, without them, and the shape of its images where that is known.

    A network that grew has `modules` in its checkpoint, and comes with the weights.
    """
    shape, classes = _of_data(run.config, weights)

    def dense() -> nn.Module:
        channels = None if shape is None else shape[0]
        return models.create(run.config.model, classes, channels, **run.config.model_options)

    if run.network_file.is_file():
        from dessilbi.surgery import load_shrunk

        network = load_shrunk(run.network_file, factory=dense)
    else:
        network = dense()
    if modules is not None:
        from dessilbi.surgery.saving import restore

        restore(network, modules, weights)
    return network, shape


def _of_start(run: Run) -> tuple[nn.Module, tuple[int, ...] | None]:
    from dessilbi.surgery import load_shrunk
    from dessilbi.surgery.saving import facts_of

    config, file = run.config, run.network_file
    facts = facts_of(file)
    if facts["network"] is not None:
        return _of_file(file)
    shape, classes = _of_data(config, {})
    channels = None if shape is None else shape[0]
    known = facts.get("input_shape", shape)
    network = load_shrunk(file, lambda: models.create(config.model, classes, channels, **config.model_options))
    return network, None if known is None else tuple(known)


def _of_data(config: Config, weights: Mapping[str, Any]) -> tuple[tuple[int, ...] | None, int | None]:
    """The shape of an image and the number of classes, as far as they are known without the files of the data."""
    from dessilbi.data import catalog

    if catalog.base(config.data) in catalog.names():
        entry = catalog.describe(config.data)
        return config.input_shape or entry.shape, len(entry.classes)
    if ":" in config.model:
        return config.input_shape, None
    # ImageNet's classes are the folders there were: the head, which comes last, has one output for each.
    return config.input_shape or models.input_shape(config.model), len(list(weights.values())[-1])


def _of_file(file: Path) -> tuple[nn.Module, tuple[int, ...] | None]:
    from dessilbi.surgery import load_shrunk
    from dessilbi.surgery.saving import facts_of

    network, facts = load_shrunk(file), facts_of(file)
    if "input_shape" in facts:
        return network, tuple(facts["input_shape"])
    channels, *size = models.input_shape(facts["network"])
    return network, (facts["options"].get("in_channels") or channels, *size)
