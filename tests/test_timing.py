import statistics
import time

import pytest

from dessilbi.timing import Speed, compare, interleave


def test_rounds_are_interleaved_in_changing_order():
    calls: list[str] = []

    def work(name: str):
        def call() -> None:
            calls.append(name)
            time.sleep(0.021)  # longer than a slot: one call a round

        return call

    samples = interleave({name: work(name) for name in "abc"}, rounds=8)
    assert {name: len(values) for name, values in samples.items()} == {"a": 8, "b": 8, "c": 8}
    assert all(value >= 0.021 for values in samples.values() for value in values)
    rounds = ["".join(calls[-24:][i : i + 3]) for i in range(0, 24, 3)]
    assert {"".join(sorted(one)) for one in rounds} == {"abc"}
    assert len(set(rounds)) > 1


def test_short_work_is_called_often():
    count = 0

    def work() -> None:
        nonlocal count
        count += 1
        time.sleep(0.001)

    seconds = interleave({"short": work}, rounds=3)["short"]
    assert count > 30
    assert 0.001 <= statistics.median(seconds) < 0.02


def test_ratios_are_taken_within_a_round():
    # The machine becomes four times slower on the way: both see it.
    speeds = compare({"base": [1.0, 2.0, 4.0], "other": [0.5, 1.0, 2.0]}, "base")
    assert speeds["base"] == Speed(2.0, (1.5, 3.0), 1.0, (1.0, 1.0))
    assert speeds["other"] == Speed(1.0, (0.75, 1.5), 2.0, (2.0, 2.0))


def test_one_round_has_no_spread():
    assert compare({"a": [2.0], "b": [1.0]}, "a")["b"] == Speed(1.0, (1.0, 1.0), 2.0, (2.0, 2.0))


def test_no_rounds():
    with pytest.raises(ValueError, match="rounds = 0"):
        interleave({"a": int}, rounds=0)


@pytest.mark.gpu
def test_a_gpu_is_waited_for():
    import torch

    x = torch.randn(8192, 8192, device="cuda")
    seconds = interleave({"product": lambda: x @ x}, rounds=3, device="cuda")["product"]
    assert statistics.median(seconds) > 1e-3  # a launch alone takes microseconds, 1.1 TFLOP do not
