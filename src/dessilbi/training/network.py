"""The network of a run, checked against the data before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dessilbi.models import create
from dessilbi.training.config import Config
from dessilbi.training.datasets import Data
from dessilbi.training.run import Run
from dessilbi.training.step import autocast


def build(config: Config, data: Data, device: torch.device, start: Path | None = None) -> nn.Module:
    """The network that the configuration names, for the classes and channels of the data, on the device.

    With a file `start`, that network: what became of the one that the configuration names. What is to be trained by
    Bregman iterations is made sparse.
    """

    def new() -> nn.Module:
        return create(config.model, data.num_classes, data.shape[0], **config.model_options)

    if start is None:
        model = new().to(device)
    else:
        from dessilbi.surgery import load_shrunk

        model = load_shrunk(start, new).to(device)
    if config.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if config.starts_sparse:
        from dessilbi.baselines import sparse_start

        conv, linear = (None if kind == "none" else kind for kind in (config.conv, config.linear))
        sparse_start(model, config.sparse_start, conv=conv, linear=linear, exclude=config.exclude)
    _check(config, model, data, device)
    return model


def of_checkpoint(config: Config, model: nn.Module, state: Mapping[str, Any], device: torch.device) -> nn.Module:
    """The network of a checkpoint, where it has grown out of this one, which is used up."""
    from dessilbi.surgery.saving import restore

    restore(model, state["modules"], state["model"])
    model = model.to(device)
    if config.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def find(run: Run, name: str, resume: bool) -> Path | None:
    """The file that the configuration names as `start`, `mask` or `ticket`: the run's own copy, once there is one."""
    value: str | None = getattr(run.config, name)
    if value is None:
        return None
    own = {"start": run.network_file, "mask": run.mask_file, "ticket": run.ticket_file}[name]
    for file in (*([own] if resume else []), run.folder / value, Path(value)):
        if file.is_file():
            return file
    raise FileNotFoundError(f"{name}={value!r}: there is no such file, neither in {run.folder} nor here")


@torch.no_grad()
def _check(config: Config, model: nn.Module, data: Data, device: torch.device) -> None:
    images = torch.zeros(2, *data.shape, device=device)
    if config.channels_last:
        images = images.to(memory_format=torch.channels_last)
    model.eval()
    try:
        with torch.random.fork_rng(devices=[]), autocast(config, device):
            outputs = model(images)
    except (RuntimeError, ValueError) as error:
        size, first = "x".join(map(str, data.shape)), str(error).splitlines()[0]
        raise ValueError(f"model={config.model!r} cannot take the images of {config.data}, {size}: {first}") from error
    finally:
        model.train()
    found = tuple(outputs.shape) if isinstance(outputs, torch.Tensor) else type(outputs).__name__
    if found != (2, data.num_classes):
        raise ValueError(
            f"model={config.model!r} returns {found} for 2 images where {config.data} has {data.num_classes} classes: "
            f"it must return (2, {data.num_classes}); does its factory take num_classes?"
        )
