"""Partitions, norms and the proximal map against closed forms and the NumPy oracle."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dessilbi.groups import KINDS, Labels, Slices, partition, transposed_filters
from tests.oracles import iteration as oracle

shapes = st.lists(st.integers(1, 5), min_size=2, max_size=4).map(tuple)
finite = st.floats(0, 4, width=32)


def values(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    x = np.random.default_rng(seed).standard_normal(shape)
    x[np.random.default_rng(seed + 1).random(shape) < 0.2] = 0.0
    return torch.from_numpy(x)


def index_of(kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """The oracle's rows and columns are those of matrices; here they are the first and second axis of any tensor."""
    if kind == "neuron":
        return oracle.group_index(shape, "filter")
    if kind == "input":
        return np.broadcast_to(np.arange(shape[1]).reshape(-1, *[1] * (len(shape) - 2)), shape)
    return oracle.group_index(shape, kind)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(shape=shapes, seed=st.integers(0, 1000), lam=finite)
def test_norms_and_prox_match_the_oracle(kind, shape, seed, lam):
    part, index, v = partition(kind, shape), index_of(kind, shape), values(shape, seed)
    expected = oracle.norms(v.numpy(), index)
    assert part.count(shape) == len(expected)
    norms = part.flat(part.norms(part.split(v)), shape)
    np.testing.assert_allclose(norms.flatten().numpy(), expected, rtol=1e-12)
    prox = part.prox(part.split(v), lam).reshape(shape)
    np.testing.assert_allclose(prox.numpy(), oracle.prox(v.numpy(), index, lam), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(shape=shapes, seed=st.integers(0, 1000), lam=st.floats(0.01, 4))
def test_prox_is_optimal_scales_and_obeys_moreau(kind, shape, seed, lam):
    part, v = partition(kind, shape), values(shape, seed)
    split = part.split(v)
    x = part.prox(split, lam)
    # 0 ∈ x − v + λ∂‖x‖: v − x is λx/‖x‖ on groups that are on, and of norm at most λ on the others.
    n = part.norms(x)
    on = n > 0
    subgradient = part.spread(torch.where(on, lam / n.clamp_min(1e-300), torch.zeros_like(n))) * x
    residual = (split - x) - subgradient
    assert torch.allclose(residual * part.spread(on), torch.zeros_like(x), atol=1e-9)
    assert (part.norms(split - x) <= lam * (1 + 1e-9)).all()
    torch.testing.assert_close(x, lam * part.prox(split / lam, 1.0), rtol=1e-9, atol=1e-12)
    # Moreau: v = Prox_λ(v) + Π(v), Π the projection on the dual ball ‖·‖ ≤ λ of every group.
    norms = part.norms(split)
    projected = part.spread(torch.where(norms > lam, lam / norms.clamp_min(1e-300), torch.ones_like(norms))) * split
    torch.testing.assert_close(x + projected, split, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lam", [0.0, 1.0, math.inf])
def test_zero_groups_stay_zero(kind, lam):
    part = partition(kind, (3, 2, 2))
    assert torch.equal(part.prox(torch.zeros(3, 2, 2), lam), torch.zeros(3, 2, 2))


def test_prox_by_hand():
    v = torch.tensor([[3.0, 4.0], [0.3, 0.4]])  # rows of norm 5 and 0.5
    torch.testing.assert_close(partition("neuron", v.shape).prox(v, 1.0), torch.tensor([[2.4, 3.2], [0.0, 0.0]]))
    torch.testing.assert_close(partition("weight", v.shape).prox(v, 0.35), torch.tensor([[2.65, 3.65], [0.0, 0.05]]))


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_transposed_filters_are_the_output_channels(groups):
    conv = torch.nn.ConvTranspose2d(6, 6, 3, groups=groups)
    part = transposed_filters(groups)
    index = oracle.group_index(conv.weight.shape, "filter", transposed=True, conv_groups=groups)
    norms = part.flat(part.norms(part.split(conv.weight.detach().double())), conv.weight.shape)
    np.testing.assert_allclose(norms.numpy(), oracle.norms(conv.weight.detach().double().numpy(), index), rtol=1e-9)
    # Not only the oracle's word: switching a group off switches that output channel off, and no other.
    channel = 4
    with torch.no_grad():
        conv.bias.zero_()
        conv.weight[torch.from_numpy(index == channel)] = 0
        silent = (conv(torch.randn(2, 6, 5, 5)).abs().amax((0, 2, 3)) == 0).tolist()
    assert silent == [c == channel for c in range(6)]


def test_labels_agree_with_the_named_kind_and_take_any_partition():
    v = values((4, 6), 3)
    rows = Labels(torch.arange(4).repeat_interleave(6).view(4, 6))
    torch.testing.assert_close(rows.prox(v, 0.7), partition("neuron", v.shape).prox(v, 0.7))
    checkerboard = torch.arange(24).view(4, 6) % 2
    expected = oracle.prox(v.numpy(), checkerboard.numpy(), 0.7)
    np.testing.assert_allclose(Labels(checkerboard).prox(v, 0.7).numpy(), expected, rtol=1e-9)


def test_size_normalised_threshold():
    assert partition("filter", (2, 3, 3)).threshold(2.0, (2, 3, 3), True) == pytest.approx(2.0 * 3.0)
    labels = Labels(torch.tensor([0, 0, 0, 0, 1]))
    torch.testing.assert_close(labels.threshold(0.5, (5,), True), torch.tensor([1.0, 0.5]))


def test_auto_kinds():
    assert partition("auto", (2, 3, 3)).kind == "filter"
    assert partition("auto", (2, 3)).kind == "weight"
    assert partition("auto", (2,)) is None


@pytest.mark.parametrize(
    ("group", "shape", "words"),
    [
        ("filters", (2, 3, 3), "filters"),
        ("filter", (7,), "(7,)"),
        ("input", (7,), "(7,)"),
        (Labels(torch.zeros(3, dtype=torch.long)), (4,), "(4,)"),
        (transposed_filters(4), (6, 2, 3), "6 input channels"),
    ],
)
def test_bad_groups_name_what_was_given(group, shape, words):
    with pytest.raises(ValueError, match="group") as error:
        partition(group, shape)
    assert words in str(error.value)


def test_bad_labels():
    with pytest.raises(ValueError, match="skips group 1"):
        Labels(torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="negative"):
        Labels(torch.tensor([0, -1]))
    with pytest.raises(ValueError, match="integers"):
        Labels(torch.tensor([0.0, 1.0]))
    with pytest.raises(TypeError, match="42"):
        partition(42, (2, 2))


def test_slices_describe_themselves():
    assert Slices((0,)).describe() != transposed_filters(2).describe()
