"""SNIP: pruning before training, by what the loss would feel.

Lee, Ajanthan, Torr, "SNIP: single-shot network pruning based on connection sensitivity", ICLR 2019. With a mask c on
the weights, L(c ⊙ w), the sensitivity of a connection is

    s = |∂L/∂c| at c = 1 = |g ⊙ w|,    g the gradient of the mean cross-entropy over the images.

It needs no training at all, hence it is the one to beat for tickets found early. The paper takes one batch (about ten
images a class) at an initialisation whose variance is the same in all layers (He or Glorot); small `keep` (below 2 %)
is known to cut deep networks apart. More images make it less a matter of chance.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dessilbi.baselines.allocation import allocate
from dessilbi.baselines.tensors import Excluded, partitioned, selection, size
from dessilbi.selection import Selection
from dessilbi.wrappers import unwrap


def snip(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    keep: float,
    allocation: str = "global",
    *,
    conv: str | None = "weight",
    linear: str | None = "weight",
    exclude: Excluded = (),
    batch: int = 256,
) -> Selection:
    """Keep the largest |g ⊙ w|, at the filter level the largest sum of them; "global" is the paper's allocation.

    Normalisation takes the statistics of the batch, as in training: of chunks of at most `batch` images, of equal size
    but for one. The model comes back as it was, with its gradients, buffers and modes, and so do random numbers.
    Where every process is given the same images, every process finds the same masks.
    """
    if len(images) != len(labels) or len(images) == 0:
        raise ValueError(f"images and labels must be as many, at least one, got {len(images)} and {len(labels)}")
    if not isinstance(batch, int) or batch < 1:
        raise ValueError(f"batch must be a whole number ≥ 1, got {batch!r}")
    found = partitioned(model, conv, linear, exclude)
    params = [p for p, _ in found.values()]
    inner, chunks, device = unwrap(model), -(-len(images) // batch), params[0].device
    sums = [torch.zeros_like(p, requires_grad=False) for p in params]
    with _as_it_was(inner), torch.enable_grad():
        inner.train()
        for x, y in zip(images.tensor_split(chunks), labels.tensor_split(chunks), strict=True):
            loss = F.cross_entropy(inner(x.to(device)), y.to(device), reduction="sum") / len(images)
            grads = torch.autograd.grad(loss, params, materialize_grads=True)
            torch._foreach_add_(sums, grads)
    scores = {name: size(g * p.detach(), part) for (name, (p, part)), g in zip(found.items(), sums, strict=True)}
    masks = allocate(scores, keep, allocation, {name: p.shape for name, (p, _) in found.items()})
    return selection(masks, method="snip", keep=keep, allocation=allocation, images=len(images))


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Afterwards the buffers, the modes of all modules and torch's random numbers are what they were."""
    buffers = [(b, b.clone()) for b in model.buffers()]
    modes = [(m, m.training) for m in model.modules()]
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices=[d for d in devices if d is not None]):
            yield
    finally:
        with torch.no_grad():
            for buffer, saved in buffers:
                buffer.copy_(saved)
        for module, mode in modes:
            module.training = mode
