"""Random selections: what is matched, and what is left to chance."""

import pytest
import torch
from torch import nn

from dessilbi import Selection
from dessilbi.baselines import random_global, random_like


def like() -> Selection:
    a = torch.zeros(8, 5, dtype=torch.bool)
    a[0] = True
    return Selection({"a": a, "b": torch.arange(30) < 6}, source={"method": "mine"})


def test_as_many_in_every_tensor() -> None:
    found = random_like(like(), 3)
    assert {name: (tuple(mask.shape), int(mask.sum())) for name, mask in found.items()} == {
        "a": ((8, 5), 5), "b": ((30,), 6)
    }  # fmt: skip
    assert found.source == {"method": "random_like", "seed": 3, "like": {"method": "mine"}}


def test_as_many_in_all() -> None:
    model = nn.Sequential(nn.Linear(20, 10, bias=False), nn.Linear(10, 3, bias=False))
    found = random_global(model, 0.3, 0)
    assert sum(int(mask.sum()) for mask in found.values()) == 69
    assert {int(random_global(model, 0.3, seed)["1.weight"].sum()) for seed in range(10)} != {9}


def test_filters() -> None:
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.Conv2d(6, 4, 3))
    found = random_global(model, 0.5, 1, conv="filter")
    assert {name: tuple(mask.shape) for name, mask in found.items()} == {"0.weight": (6,), "1.weight": (4,)}
    assert found.level == "filter"
    assert found.keep == 0.5


def test_a_seed_is_all_that_counts() -> None:
    model = nn.Linear(20, 10)
    state = torch.get_rng_state()
    for draw in (lambda seed: random_like(like(), seed)["a"], lambda seed: random_global(model, 0.2, seed)["weight"]):
        assert torch.equal(draw(5), draw(5))
        assert not torch.equal(draw(5), draw(6))
    assert torch.equal(torch.get_rng_state(), state)


def test_every_place_is_as_likely() -> None:
    draws = 2000
    counts = sum(random_like(like(), seed)["a"].double() for seed in range(draws))
    # Each place is taken with probability 1/8: five standard deviations of the frequency are 0.037.
    assert (counts / draws - 1 / 8).abs().max() < 0.037


@pytest.mark.parametrize("seed", [-1, 0.5, True, None])
def test_seeds_are_whole_numbers(seed: object) -> None:
    with pytest.raises(ValueError, match="seed must be a whole number ≥ 0"):
        random_like(like(), seed)  # type: ignore[arg-type]
