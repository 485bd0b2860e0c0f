"""A network inside what was put around it: torch.compile, DistributedDataParallel, checkpointed blocks."""

from __future__ import annotations

import re

from torch import nn


def unwrap(model: nn.Module) -> nn.Module:
    """The user's module inside torch.compile and DistributedDataParallel."""
    while isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)) or hasattr(model, "_orig_mod"):
        inner: nn.Module = model._orig_mod if hasattr(model, "_orig_mod") else model.module  # type: ignore[assignment]
        model = inner
    return model


def clean(name: str) -> str:
    """A parameter's name without the traces of compiled or checkpointed submodules."""
    return re.sub(r"(^|\.)(_orig_mod|_checkpoint_wrapped_module)(?=\.)", "", name).lstrip(".")
