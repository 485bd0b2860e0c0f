"""When a selection has settled: distances by hand."""

import math

import pytest
import torch

from dessilbi import Selection, Settling
from dessilbi.settling import distance


def sel(*kept: int, size: int = 10) -> Selection:
    mask = torch.zeros(size, dtype=torch.bool)
    mask[list(kept)] = True
    return Selection({"a": mask[:4].view(2, 2), "b": mask[4:].view(2, 3)})


def test_distance_by_hand() -> None:
    # Three in both, one only in the one, two only in the other: 1 - 3/6.
    assert distance(sel(0, 1, 5, 6), sel(0, 1, 5, 7, 8)) == 0.5
    assert distance(sel(0, 9), sel(0, 9)) == 0
    assert distance(sel(0), sel(9)) == 1
    assert distance(sel(), sel()) == 0


def test_selections_of_other_tensors() -> None:
    with pytest.raises(ValueError, match="different tensors: b, c"):
        distance(sel(0), Selection({"a": torch.ones(2, 2).bool(), "c": torch.ones(2, 3).bool()}))


def test_it_has_settled_when_all_of_the_last_changes_were_small() -> None:
    watch = Settling(tolerance=0.3, window=2)
    seen = [(*range(8),), (*range(8),), (*range(4),), (*range(5),), (*range(5),)]
    #  distances:          0           1/2          1/5          0
    found = []
    for kept in seen:
        watch.add(sel(*kept))
        found.append(watch.settled)
    assert watch.distances == pytest.approx([0, 0.5, 0.2, 0])
    assert found == [False, False, False, False, True]


def test_a_change_of_just_the_tolerance_is_too_large() -> None:
    watch = Settling(tolerance=0.5, window=1)
    assert math.isnan(watch.add(sel(0, 1)))
    watch.add(sel(0))
    assert not watch.settled


def test_it_goes_on_where_it_was() -> None:
    whole, parts = Settling(0.4, 2), Settling(0.4, 2)
    for kept in ((1, 2, 5, 9), (1, 2, 5)):
        whole.add(sel(*kept))
        parts.add(sel(*kept))
    again = Settling(0.4, 2)
    again.load_state_dict(parts.state_dict())
    for watch in (whole, again):
        watch.add(sel(1, 2, 5, 6))
    assert again.distances == whole.distances == [0.25, 0.25]
    assert again.settled


@pytest.mark.parametrize(("options", "message"), [({"tolerance": 0}, "got 0"), ({"window": 0}, "window must be")])
def test_bad_arguments(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settling(**options)  # type: ignore[arg-type]
