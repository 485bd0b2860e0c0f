"""Loss and accuracy on the test split."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from dessilbi.training.config import Config
from dessilbi.training.datasets import Feed
from dessilbi.training.distribution import World
from dessilbi.training.step import autocast


@torch.no_grad()
def evaluate(model: nn.Module, feed: Feed, config: Config, world: World) -> tuple[float, float]:
    """Mean loss (without label smoothing) and fraction correct; the model is left in training mode if it was."""
    training = model.training
    model.eval()
    try:
        totals = torch.zeros(3, dtype=torch.float64, device=world.device)
        for ticket in feed.tickets(0):
            images, labels = feed.load(ticket)
            if not len(labels):
                continue
            with autocast(config, world.device):
                outputs = model(images)
            loss = functional.cross_entropy(outputs.float(), labels, reduction="sum")
            right = (outputs.argmax(1) == labels).sum()
            totals += torch.stack([loss.double(), right.double(), torch.full_like(loss, len(labels)).double()])
        loss_sum, right_sum, count = world.add(totals).tolist()
    finally:
        model.train(training)
    return loss_sum / count, right_sum / count
