"""What accompanies the optimizer of a run: a baseline that acts during training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from dessilbi.training.config import Config

if TYPE_CHECKING:
    from dessilbi.baselines.companion import Companion


def build(config: Config, model: nn.Module, optimizer: Optimizer) -> Companion | None:
    """The companion that the configuration names, or None. It acts by hooks of this optimizer."""
    if config.method == "none":
        return None
    from dessilbi.baselines import L1, Gradual, Slimming, SoftFilters

    kind = {"gradual": Gradual, "soft-filters": SoftFilters, "l1": L1, "slimming": Slimming}[config.method]
    options: dict[str, Any] = {"exclude": config.exclude}
    if config.method != "slimming":
        options |= {
            n: None if kind == "none" else kind for n, kind in (("conv", config.conv), ("linear", config.linear))
        }
    options |= config.method_options
    try:
        return kind(model, optimizer, **options)  # type: ignore[no-any-return,operator]
    except TypeError as error:
        raise ValueError(f"method={config.method!r} with method_options={dict(config.method_options)!r}: "
                         f"{error}") from None  # fmt: skip
