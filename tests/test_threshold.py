"""λ that follows a target: exact ranks, ties, the curve, and what it sets in the optimizer."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dessilbi import DessiLBI, TargetThreshold
from dessilbi.threshold import ScheduledThreshold, _band, largest


def optimizer_with(duals, kinds, **options):
    """An optimizer whose V are these tensors."""
    params = [nn.Parameter(torch.ones_like(v)) for v in duals]
    groups = [{"params": [p], "group": k} for p, k in zip(params, kinds, strict=True)]
    optimizer = DessiLBI(groups, 1.0, nu=1.0, lam=1e9, **options)
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for p, v in zip(params, duals, strict=True):
        optimizer.dual(p).copy_(v)
    return optimizer, params


def kept(optimizer):
    return sum(int(optimizer.support(p).sum()) for p, _ in optimizer.penalised())


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    sizes=st.lists(st.integers(1, 300_000), min_size=1, max_size=3),
    share=st.floats(0, 1),
    levels=st.sampled_from([0, 3, 1000]),
    power=st.sampled_from([1, 5]),
)
def test_largest_is_exact(seed, sizes, share, levels, power):
    """Against a full sort: smooth, heavy-tailed, and with many ties (few levels), over several tensors."""
    rng = np.random.default_rng(seed)
    values = [rng.standard_normal(n).astype(np.float32) ** power for n in sizes]
    if levels:
        values = [np.round(v * levels) / levels for v in values]
    rank = 1 + int(share * (sum(sizes) - 1))
    expected = np.sort(np.abs(np.concatenate(values)))[::-1][rank - 1]
    assert largest([torch.from_numpy(v) for v in values], rank, np.random.default_rng(1)) == expected


def test_largest_survives_a_sample_that_misleads():
    """All large values sit where the random sample does not look: the count reveals it and everything is ordered."""
    values = torch.arange(1_000_000, dtype=torch.float32)

    class Unlucky:
        def integers(self, low, high, n):
            return np.arange(n) % 100

    assert largest([values], 11, Unlucky()) == 999_989


@settings(max_examples=200, deadline=None)
@given(total=st.integers(300_000, 50_000_000), share=st.floats(0, 1))
def test_the_band_holds_the_rank(total, share):
    rank = 1 + int(share * (total - 1))
    first, last, width = _band(rank, total)
    assert first < rank / total * (1 << 16) < last + 1
    assert 0 < width <= total


def test_keeps_exactly_the_target_over_all_groups_together():
    torch.manual_seed(0)
    duals = [torch.randn(40, 3, 3, 3), torch.randn(30, 50), torch.randn(20, 10)]
    optimizer, _ = optimizer_with(duals, ["filter", "weight", "neuron"])
    threshold = TargetThreshold(optimizer, keep=0.1, ramp=0.5)
    total = 40 + 1500 + 20
    for done, share in [(0.0, 0.0), (0.1, 0.02), (0.25, 0.05), (0.5, 0.1), (0.9, 0.1), (1.0, 0.1)]:
        threshold.step(done)
        assert kept(optimizer) == round(share * total)
    norms = torch.cat([duals[0].flatten(1).norm(dim=1), duals[1].abs().flatten(), duals[2].norm(dim=1)])
    assert optimizer.lam == pytest.approx(float(norms.sort(descending=True).values[156]))


def test_ties_are_all_in_or_all_out():
    v = torch.tensor([[5.0, 3.0, 3.0, 3.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]])
    for keep, expected in [(0.1, 1), (0.2, 1), (0.3, 1), (0.4, 4), (0.5, 4), (0.6, 6), (0.7, 6), (1.0, 6)]:
        optimizer, _ = optimizer_with([v], ["weight"])
        TargetThreshold(optimizer, keep=keep, ramp=0).step(0.0)
        assert kept(optimizer) == expected


def test_per_layer():
    duals = [torch.randn(40, 3, 3, 3), 100 * torch.randn(60, 5)]
    optimizer, params = optimizer_with(duals, ["filter", "neuron"])
    TargetThreshold(optimizer, keep=0.25, ramp=0, per_layer=True).step(0.5)
    assert [int(optimizer.support(p).sum()) for p in params] == [10, 15]
    both = DessiLBI(params, 0.1, nu=1.0, lam=1e9)
    for p in params:
        p.data.normal_()
        p.grad = torch.zeros_like(p)
    both.step()
    TargetThreshold(both, keep=0.25, ramp=0, per_layer=True).step(0.5)
    assert [int(both.support(p).sum()) for p in params] == [10, 75]


def test_size_normalised_ranks_norms_by_root_mean_square():
    small, large = torch.full((4, 2), 1.0), torch.full((4, 200), 0.5)  # norms 1.41 and 7.07, root mean squares 1, 0.5
    for normalised, expected in [(False, [0, 4]), (True, [4, 0])]:
        optimizer, params = optimizer_with([small, large], ["neuron", "neuron"])
        for group in optimizer.param_groups:
            group["size_normalised"] = normalised
        TargetThreshold(optimizer, keep=0.5, ramp=0).step(1.0)
        assert [int(optimizer.support(p).sum()) for p in params] == expected


def test_follows_the_curve_while_training():
    torch.manual_seed(1)
    p = nn.Parameter(torch.randn(50, 40))
    optimizer = DessiLBI([p], 0.1, nu=10.0, momentum=0.9)
    threshold = TargetThreshold(optimizer, keep=0.2, ramp=0.5)
    for k in range(100):
        p.grad = p.detach() - 1 + 0.1 * torch.randn(50, 40)
        optimizer.step()
        threshold.step((k + 1) / 100)
        assert kept(optimizer) == round(2000 * 0.2 * min(1, (k + 1) / 50))


def test_schedule():
    optimizer, _ = optimizer_with([torch.ones(2, 2)], ["weight"])
    ScheduledThreshold(optimizer, lambda done: 2 - done).step(0.5)
    assert optimizer.lam == 1.5
    with pytest.raises(ValueError, match="lam .*-1"):
        ScheduledThreshold(optimizer, lambda done: -done).step(1.0)


def test_other_memory_layouts():
    v = torch.randn(8, 6, 3, 3)
    optimizer, _ = optimizer_with([v.to(memory_format=torch.channels_last)], ["weight"])
    TargetThreshold(optimizer, keep=0.5, ramp=0).step(1.0)
    assert kept(optimizer) == v.numel() // 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"keep": 0.0}, "keep .*0.0"), ({"keep": 1.5}, "keep .*1.5"), ({"keep": 0.1, "ramp": -1}, "ramp .*-1")],
)
def test_bad_input(arguments, words):
    optimizer, _ = optimizer_with([torch.ones(2, 2)], ["weight"])
    with pytest.raises(ValueError, match=words):
        TargetThreshold(optimizer, **arguments)


def test_more_bad_input():
    optimizer, _ = optimizer_with([torch.ones(2, 2)], ["weight"])
    with pytest.raises(ValueError, match="fraction_done .*nan"):
        TargetThreshold(optimizer, 0.5).step(float("nan"))
    with pytest.raises(ValueError, match="penalised"):
        TargetThreshold(DessiLBI([{"params": [nn.Parameter(torch.ones(2))]}], 0.1), 0.5)


@pytest.mark.gpu
def test_on_a_gpu_it_is_exact_and_waits_for_nothing():
    torch.manual_seed(0)
    duals = [torch.randn(512, 512, 3, 3, device="cuda"), torch.randn(1000, 1000, device="cuda")]
    optimizer, _ = optimizer_with(duals, ["weight", "weight"])
    threshold = TargetThreshold(optimizer, keep=0.06, ramp=0.3)
    threshold.step(0.5)
    total = sum(v.numel() for v in duals)
    for done in (0.001, 0.1, 0.3):
        torch.cuda.set_sync_debug_mode("error")
        threshold.step(done)
        torch.cuda.set_sync_debug_mode("default")
        assert kept(optimizer) == round(threshold.target(done) * total)
