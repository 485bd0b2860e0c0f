"""What accompanies an optimizer through training: the baselines that act while the network trains."""

from __future__ import annotations

from typing import Any


class Companion:
    """Call `step` after every optimizer step and `end_epoch` after every epoch; most methods need one of them only.

    Like :class:`~dessilbi.TargetThreshold`, a companion is made with the optimizer and saved beside it.
    """

    def step(self, fraction_done: float) -> None:
        """After an optimizer step, when this much of the run is done."""

    def end_epoch(self) -> None:
        """After the last step of an epoch."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""

    def remove(self) -> None:
        """Leave the optimizer; the weights stay as they are."""
