"""Random tickets: what a mask is worth beyond its numbers.

A ticket that does not beat `random_like` has found no more than how much to keep of each layer; one that does not beat
`random_global` has found nothing. Take several seeds.

Frankle, Carbin, "The lottery ticket hypothesis: finding sparse, trainable neural networks", ICLR 2019; Su, Chen, Cai,
Wu, Gao, Wang, Lee, "Sanity-checking pruning methods: random tickets can win the jackpot", NeurIPS 2020.
"""

from __future__ import annotations

import torch
from torch import nn

from dessilbi.baselines.allocation import check_keep
from dessilbi.baselines.tensors import Excluded, partitioned, selection
from dessilbi.selection import Selection


def random_like(selection: Selection, seed: int) -> Selection:
    """Every mask shuffled within its tensor: as many are kept in each layer, at random places.

    The result depends on the seed and the shapes alone, and torch's own random numbers stay untouched. What goes
    `along` with a selection belongs to its places and is not taken over.
    """
    generator = _generator(seed)
    masks = {}
    for name, mask in selection.items():
        order = torch.randperm(mask.numel(), generator=generator).to(mask.device)
        masks[name] = mask.flatten()[order].view(mask.shape)
    return Selection(masks, selection.level, {"method": "random_like", "seed": seed, "like": selection.source})


def random_global(
    model: nn.Module,
    keep: float,
    seed: int,
    *,
    conv: str | None = "weight",
    linear: str | None = "weight",
    exclude: Excluded = (),
) -> Selection:
    """The same number anywhere: every entry of every tensor is as likely to be kept. Large layers keep the most."""
    check_keep(keep)
    found = partitioned(model, conv, linear, exclude)
    sizes = [part.count(p.shape) for p, part in found.values()]
    chosen = torch.zeros(sum(sizes), dtype=torch.bool)
    order = torch.randperm(sum(sizes), generator=_generator(seed))
    chosen[order[: int(keep * sum(sizes) + 1e-6)]] = True
    masks = {
        name: (mine.view(p.shape) if part.kind == "weight" else mine).to(p.device)
        for (name, (p, part)), mine in zip(found.items(), chosen.split(sizes), strict=True)
    }
    return selection(masks, method="random_global", keep=keep, seed=seed)


def _generator(seed: int) -> torch.Generator:
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ValueError(f"seed must be a whole number ≥ 0, got {seed!r}")
    return torch.Generator().manual_seed(seed)
