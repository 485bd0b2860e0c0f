"""A second filter for layers that have one.

The channel graph tells channels apart by where they lie along an axis; of a single one it cannot say which axis is its
own. So such a layer is given a second filter outright, and as the data come by, every layer and normalisation is made
to fit what reaches it. The graph of what results, in which there are two channels to tell apart, then says whether the
second can be taken away again, and where its entries are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dessilbi.surgery.graph import Inputs, call_arguments
from dessilbi.surgery.resize import tell

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.modules.batchnorm._NormBase,)


@torch.no_grad()
def double(model: nn.Module, paths: Sequence[str], example_inputs: Inputs) -> None:
    """Give these layers a second filter, in place; new entries are zero. The network is left in evaluation mode."""
    for path in paths:
        layer = model.get_submodule(path)
        if not isinstance(layer, (*_CONVS, nn.Linear)):
            raise ValueError(f"module {path!r} ({type(layer).__name__}) has a single channel")
        for name, p in layer.named_parameters(recurse=False):
            _lengthen(layer, name, p, 0, 2)
        tell(layer, {})
    hooks = [
        module.register_forward_pre_hook(_fit) for module in model.modules()
        if isinstance(module, (*_CONVS, nn.Linear, *_NORMS))
    ]  # fmt: skip
    args, kwargs = call_arguments(example_inputs)
    try:
        model.eval()(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()


def _fit(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Make a layer as wide as its input."""
    x = args[0]
    if isinstance(module, nn.Linear) and x.shape[-1] > module.in_features:
        _lengthen(module, "weight", module.weight, 1, x.shape[-1])
    elif isinstance(module, _CONVS) and module.groups == 1 and x.shape[1] > module.in_channels:
        _lengthen(module, "weight", module.weight, 1, x.shape[1])
    elif isinstance(module, _NORMS) and x.shape[1] > module.num_features:
        for name, t in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if t.ndim:
                _lengthen(module, name, t, 0, x.shape[1])
    else:
        return
    tell(module, {})


def _lengthen(module: nn.Module, name: str, t: Tensor, axis: int, size: int) -> None:
    new = t.new_zeros([size if d == axis else n for d, n in enumerate(t.shape)])
    if t.ndim == 4 and t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous():
        new = new.contiguous(memory_format=torch.channels_last)
    setattr(module, name, nn.Parameter(new, t.requires_grad) if isinstance(t, nn.Parameter) else new)
