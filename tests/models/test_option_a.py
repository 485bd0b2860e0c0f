"""The shortcut without parameters, against a computation pixel by pixel."""

import numpy as np
import pytest
import torch

from dessilbi.models import create
from dessilbi.models.resnet_cifar import OptionA


def pixel_by_pixel(x, after):
    """Channel c of the result is channel c of `x` at even rows and columns, or zero where `x` has no channel c."""
    images, before, high, wide = x.shape
    result = np.zeros((images, after, (high + 1) // 2, (wide + 1) // 2), dtype=x.dtype)
    for channel in range(before):
        for i in range(result.shape[2]):
            for j in range(result.shape[3]):
                result[:, channel, i, j] = x[:, channel, 2 * i, 2 * j]
    return result


@pytest.mark.parametrize(("before", "after"), [(16, 32), (8, 8), (3, 10), (1, 2)])
@pytest.mark.parametrize("side", [8, 7])
def test_shortcut(before, after, side):
    x = torch.randn(2, before, side, side)
    shortcut = OptionA(before, after)
    expected = pixel_by_pixel(x.numpy(), after)
    np.testing.assert_array_equal(shortcut(x).numpy(), expected)
    np.testing.assert_array_equal(torch.fx.symbolic_trace(shortcut)(x).numpy(), expected)
    assert not list(shortcut.parameters())


@pytest.mark.parametrize("layer", ["layer2", "layer3"])
def test_a_silent_block_passes_the_shortcut(layer):
    """With the last scale at zero, the first block of a stage is the shortcut and a ReLU."""
    block = create("resnet20", widths=(3, 5, 9)).eval().get_submodule(layer)[0]
    torch.nn.init.zeros_(block.bn2.weight)
    x = torch.randn(2, {"layer2": 3, "layer3": 5}[layer], 8, 8)
    expected = pixel_by_pixel(x.numpy(), {"layer2": 5, "layer3": 9}[layer])
    np.testing.assert_array_equal(block(x).detach().numpy(), np.maximum(expected, 0))


def test_memory_format_is_kept():
    x = torch.randn(2, 4, 8, 8).to(memory_format=torch.channels_last)
    assert OptionA(4, 6)(x).is_contiguous(memory_format=torch.channels_last)


def test_streams_that_get_narrower_are_refused():
    with pytest.raises(ValueError, match=r"widths\[:3\] = \[8, 4, 4\].*cannot drop any"):
        create("resnet20", widths=(8, 4, 4))
