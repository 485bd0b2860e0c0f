"""How what a run selected is trained: the paper's schedules, after a run of a given configuration.

All of them use SGD with momentum 0.9 and the run's weight decay (AdamW after a run of DessiAdamW), on the run's data.
"""

from __future__ import annotations

from dessilbi.training.config import Config


def finetuning(config: Config, epochs: int) -> Config:
    """Fine-tuning after a run of this configuration.

    The step size is a tenth of the run's, of W: 0.01 after the paper's 0.1 (and κ = 1), divided by 5 after every 0.3 of
    the epochs: every 120 of 400. After a run whose schedule is not in steps, that schedule is used, without warm-up.
    """
    return _training(config, epochs, config.lr * config.kappa / 10).replace(lr_drop=5.0, warmup=0.0)


def retraining(config: Config, epochs: int) -> Config:
    """Training from the initial weights as in a run of this configuration.

    Step size, schedule and warm-up are the run's; drops come after every 0.3 of the epochs: every 60 of 200.
    """
    return _training(config, epochs, config.lr * config.kappa)


def ticket_training(config: Config, epochs: int = 160) -> Config:
    """Training a ticket that a run of this configuration found: the step size falls to a tenth after a half and after
    three quarters of the epochs, 80 and 120 of 160."""
    whole = _training(config, epochs, config.lr * config.kappa)
    drops = tuple(dict.fromkeys(max(1, round(part * epochs)) for part in (0.5, 0.75)))
    return whole.replace(schedule="step", lr_drop=10.0, lr_at=drops, warmup=0.0)


def _training(config: Config, epochs: int, lr: float) -> Config:
    adaptive = config.optimizer == "dessiadamw"
    return config.replace(
        optimizer="adamw" if adaptive else "sgd",
        optimizer_options=config.optimizer_options if adaptive else {},
        method="none",
        method_options={},
        grow_options={},
        momentum=0.9,
        decoupled_weight_decay=False,
        fused=None,
        fsdp=False,
        keep=None,
        epochs=epochs,
        lr=lr,
        lr_every=max(1, round(0.3 * epochs)),
        lr_at=(),
        patience=None,
        settle_keep=None,
        keep_epochs=(),
        start=None,
        mask=None,
        ticket=None,
    )
