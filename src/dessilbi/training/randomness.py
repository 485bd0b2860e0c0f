"""The state of the global random number generators: torch's, NumPy's and Python's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Seed all of them."""
    torch.manual_seed(seed)  # the GPUs' too
    random.seed(seed)
    np.random.seed(seed % 2**32)


def state() -> dict[str, Any]:
    """What `restore` takes: plain values and arrays."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }


def restore(state: dict[str, Any]) -> None:
    """Go on where `state` was taken. GPUs that are not here are left out."""
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for index, one in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(one, index)
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
