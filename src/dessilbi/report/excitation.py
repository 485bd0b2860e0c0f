"""What excites a filter: an image made for it, and what of a given image does.

    images = excite(network, network.features[6], [3, 17], (3, 32, 32))       # one an entry of [3, 17]
    grads = respond(network, network.features[6], [3, 17], image)

Both leave the network as it was: its mode, its gradients, its hooks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_STEPS = 150
_STRIDE = 0.2


def excite(
    network: nn.Module, module: nn.Module, filters: Sequence[int], shape: Sequence[int], seed: int = 0
) -> Tensor:
    """Activation maximisation (Erhan et al. 2009): for each filter the image x with the largest

        output of the filter in the middle of x,      ‖x‖ = √(number of entries of x).

    That is the norm of a usual image, whose pixels have variance one. Gradient ascent on the sphere from noise, by
    steps whose length shrinks to zero; all filters start from the same noise.

    Args:
        network: in it `module`, a convolution or linear layer, whose outputs are taken before anything follows.
        filters: the numbers of its output channels.
        shape: of an image, without the batch.
        seed: of the noise.

    Returns:
        Images (filters, *shape). All zero where no change of the image makes a difference: nothing excites the filter.
    """
    like = next(network.parameters())
    start = torch.randn(1, *shape, generator=torch.Generator().manual_seed(seed)).to(like.device, like.dtype)
    x = start.repeat(len(filters), *[1] * len(shape))
    radius = start.numel() ** 0.5
    size = torch.zeros(())
    for step in range(_STEPS):
        x = (x * (radius / _norm(x))).requires_grad_()
        outputs = _outputs(network, module, filters, x)
        for axis in range(1, outputs.ndim):
            outputs = outputs.narrow(axis, outputs.shape[axis] // 2, 1)
        (grad,) = torch.autograd.grad(outputs.sum(), x)
        size = _norm(grad)
        x = x.detach() + _STRIDE * radius * (1 - step / _STEPS) * grad / size.clamp_min(torch.finfo(size.dtype).tiny)
    return torch.where(size > 0, x * (radius / _norm(x)), 0)


def respond(network: nn.Module, module: nn.Module, filters: Sequence[int], image: Tensor) -> Tensor:
    """Guided backpropagation (Springenberg et al. 2014): the gradient of each filter's largest output at an image, of
    which every ReLU on the way back lets through what is positive only.

    Returns:
        Gradients (filters, *image.shape).
    """
    x = image.repeat(len(filters), *[1] * image.ndim).requires_grad_()
    with _Guided():
        largest = _outputs(network, module, filters, x).flatten(1).amax(1)
    grad: Tensor = torch.autograd.grad(largest.sum(), x)[0]
    return grad


class _Positive(torch.autograd.Function):
    """A ReLU whose gradient passes where both its input and the gradient are positive."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x > 0)
        return x.clamp_min(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        passed: Tensor = grads[0].clamp_min(0) * ctx.saved_tensors[0]
        return passed


class _Guided(TorchFunctionMode):
    """Inside, every ReLU, however the network writes it, is that of guided backpropagation."""

    _IN_PLACE = (torch.relu_, Tensor.relu_, nn.functional.relu_)
    _RELUS = (torch.relu, Tensor.relu, nn.functional.relu, *_IN_PLACE)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in self._RELUS:
            return func(*args, **kwargs)
        x = args[0] if args else kwargs["input"]
        inplace = func in self._IN_PLACE or kwargs.get("inplace", args[1] if len(args) > 1 else False)
        positive: Tensor = _Positive.apply(x)
        return x.copy_(positive) if inplace else positive


class _Enough(Exception):
    """The layer has been reached: what comes after it is not needed."""


def _outputs(network: nn.Module, module: nn.Module, filters: Sequence[int], images: Tensor) -> Tensor:
    """Of each image the outputs of its filter: (filters, *positions)."""
    with _reading(network), _caught(module) as caught:
        network(images)
    found = caught[0] if caught else None
    if not isinstance(found, Tensor):
        raise ValueError(f"{type(module).__name__}: images do not pass through this layer, or what it puts out is no "
                         "tensor: choose a convolution or linear layer")  # fmt: skip
    channels = -1 if isinstance(module, nn.Linear) else 1
    outputs: Tensor = found.movedim(channels, 1)[torch.arange(len(filters)), torch.tensor(list(filters))]
    return outputs if outputs.ndim > 1 else outputs.unsqueeze(1)


@contextmanager
def _reading(network: nn.Module) -> Iterator[None]:
    """Inside, the network evaluates."""
    training = [module for module in network.modules() if module.training]
    network.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _caught(module: nn.Module) -> Iterator[list[Any]]:
    """What the module puts out, when the network is called inside."""
    found: list[Any] = []

    def hook(_module: nn.Module, _inputs: object, outputs: object) -> None:
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
    """The norm of each image, shaped to multiply it."""
    norms: Tensor = torch.linalg.vector_norm(x.flatten(1), dim=1)
    return norms.view(-1, *[1] * (x.ndim - 1))
