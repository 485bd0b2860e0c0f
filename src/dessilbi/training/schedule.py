"""The step size as a function of where the run is."""

from __future__ import annotations

import math

from torch import Tensor
from torch.optim import Optimizer

from dessilbi.training.config import Config


def step_size(config: Config, step: int, steps_per_epoch: int) -> float:
    """α for step number `step`, counted from 0 over the whole run."""
    rising = config.warmup * steps_per_epoch
    if step < rising:
        return config.lr * (step + 1) / math.ceil(rising)
    if config.schedule == "step":
        epoch = step // steps_per_epoch
        drops = sum(epoch >= at for at in config.lr_at) if config.lr_at else epoch // config.lr_every
        return config.lr / config.lr_drop**drops
    if config.schedule == "cosine":
        done = (step - rising) / max(1.0, config.epochs * steps_per_epoch - rising)
        return config.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return config.lr


def set_step_size(optimizer: Optimizer, lr: float) -> None:
    """Give it to all param groups; a tensor, which a CUDA graph holds on to, is filled."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
