import numpy as np
import pytest
import torch
from tests.data.files import pixels
from torch import Tensor

from dessilbi.data import Batches, Draw, ImageSet

COUNT = 50
SET = ImageSet("noise", torch.from_numpy(pixels(COUNT, 3, 6)), torch.arange(COUNT), COUNT)
FULL = {"shuffle": True, "crop": 2, "flip": True, "seed": 3}


def epoch(batches: Batches, number: int = 0, start: int = 0) -> list[tuple[Tensor, Tensor]]:
    batches.set_epoch(number)
    return list(batches.iterate(start))


def same(a: list[tuple[Tensor, Tensor]], b: list[tuple[Tensor, Tensor]]) -> bool:
    pairs = zip(a, b, strict=True)
    return all(torch.equal(x[0], y[0]) and torch.equal(x[1], y[1]) for x, y in pairs)


def labels(batches: list[tuple[Tensor, Tensor]]) -> list[int]:
    return torch.cat([part for _, part in batches]).tolist()


def test_plain_batches_are_the_set_in_order() -> None:
    batches = Batches(SET, 16)
    assert len(batches) == 4
    found = epoch(batches)
    assert [len(part) for part, _ in found] == [16, 16, 16, 2]
    assert labels(found) == list(range(COUNT))
    expected = (SET.images.numpy() / 255 - np.reshape(SET.mean, (3, 1, 1))) / np.reshape(SET.std, (3, 1, 1))
    np.testing.assert_allclose(torch.cat([part for part, _ in found]), expected, atol=1e-5)


def test_an_epoch_has_every_image_once_in_its_own_order() -> None:
    batches = Batches(SET, 16, shuffle=True)
    first, second = labels(epoch(batches, 0)), labels(epoch(batches, 1))
    assert sorted(first) == sorted(second) == list(range(COUNT))
    assert first != second != list(range(COUNT))


def test_batches_are_what_numpy_makes_of_the_draws() -> None:
    batches = Batches(SET, 16, dtype=torch.float64, **FULL)
    mean, std = np.reshape(SET.mean, (3, 1, 1)), np.reshape(SET.std, (3, 1, 1))
    for draw, (images, numbers) in zip(batches.draws(), batches, strict=True):
        for i, index in enumerate(draw.indices.tolist()):
            top, left = draw.offsets[i].tolist()
            crop = np.pad(SET.images[index].numpy(), ((0, 0), (2, 2), (2, 2)))[:, top : top + 6, left : left + 6]
            crop = crop[:, :, ::-1] if draw.flips[i] else crop
            np.testing.assert_allclose(images[i], (crop / 255 - mean) / std, atol=1e-12)
            assert numbers[i] == SET.labels[index]


def test_draws_cover_their_ranges_evenly() -> None:
    many = ImageSet("many", torch.zeros(9000, 1, 1, 1, dtype=torch.uint8), torch.zeros(9000, dtype=torch.int64), 1)
    draw = next(Batches(many, 9000, **FULL).draws())
    for axis in (0, 1):
        counts = torch.bincount(draw.offsets[:, axis], minlength=5)
        assert counts.shape == (5,)
        assert (counts - 1800).abs().max() < 200
    assert abs(draw.flips.sum().item() - 4500) < 250


def test_without_crop_or_flip_there_is_none() -> None:
    draw = next(Batches(SET, COUNT, shuffle=True, flip=True).draws())
    assert not draw.offsets.any()
    assert draw.flips.any()
    draw = next(Batches(SET, COUNT, shuffle=True, crop=4).draws())
    assert draw.offsets.max() == 8
    assert not draw.flips.any()


def test_an_epoch_follows_from_seed_and_number_alone() -> None:
    batches = Batches(SET, 16, **FULL)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = epoch(batches, 4)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    epoch(batches, 5)
    assert same(first, epoch(batches, 4))
    assert same(first, epoch(Batches(SET, 16, **FULL), 4))
    assert not same(first, epoch(batches, 5))
    assert not same(first, epoch(Batches(SET, 16, **FULL | {"seed": 4}), 4))


def test_two_iterations_may_run_at_once() -> None:
    batches = Batches(SET, 16, **FULL)
    expected = epoch(batches, 0)
    running = iter(batches)
    found = [next(running)]
    epoch(batches, 1)
    assert same(expected, found + list(running))


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_epoch_can_be_taken_up_at_any_batch(world_size: int) -> None:
    batches = Batches(SET, 16, **FULL, rank=world_size - 1, world_size=world_size)
    whole = epoch(batches, 2)
    for start in range(len(batches) + 1):
        assert same(whole[start:], epoch(batches, 2, start))
    for start in (-1, 5):
        with pytest.raises(ValueError, match=f"start={start}: must be from 0 to the number of batches, 4"):
            batches.iterate(start)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_ranks_together_make_the_batches_of_one_process(world_size: int, drop_last: bool) -> None:
    single = epoch(Batches(SET, 16, **FULL, drop_last=drop_last), 1)
    ranks = [
        epoch(Batches(SET, 16, **FULL, drop_last=drop_last, rank=rank, world_size=world_size), 1)
        for rank in range(world_size)
    ]
    joined = [
        (torch.cat([images for images, _ in parts]), torch.cat([numbers for _, numbers in parts]))
        for parts in zip(*ranks, strict=True)
    ]
    assert same(single, joined)
    assert all(len(part) == 16 // world_size for part, _ in ranks[0][:3])


def test_drop_last_leaves_out_the_small_batch() -> None:
    batches = Batches(SET, 16, drop_last=True)
    assert len(batches) == len(epoch(batches)) == 3
    assert len(Batches(SET, 25)) == len(Batches(SET, 25, drop_last=True)) == 2


def test_type_and_layout() -> None:
    images, numbers = next(iter(Batches(SET, 16, **FULL, dtype=torch.bfloat16, channels_last=True)))
    assert (images.dtype, numbers.dtype) == (torch.bfloat16, torch.int64)
    assert images.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 51, "drop_last": True}, "batch_size=51 with drop_last leaves no batch of 50 images"),
        ({"batch_size": 16, "world_size": 3}, "batch_size=16 .* choose a multiple of 3"),
        ({"batch_size": 16, "world_size": 2, "rank": 2}, "rank=2: must be from 0 to world_size - 1 = 1"),
        ({"batch_size": 16, "crop": -1}, "crop=-1"),
        ({"batch_size": 16, "dtype": torch.int32}, "dtype=torch.int32"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Batches(SET, **arguments)  # type: ignore[arg-type]


@pytest.mark.gpu
def test_on_a_gpu_nothing_waits_and_a_graph_replays_the_same() -> None:
    on_cpu = epoch(Batches(SET, 16, **FULL, drop_last=True), 1)
    batches = Batches(SET, 16, **FULL, drop_last=True, device="cuda")
    batches.set_epoch(1)
    draws = batches.draws()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [batches.load(draw) for draw in draws]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for (images, numbers), (cpu_images, cpu_numbers) in zip(found, on_cpu, strict=True):
        torch.testing.assert_close(images.cpu(), cpu_images)
        assert torch.equal(numbers.cpu(), cpu_numbers)

    held = Draw(*(drawn.clone() for drawn in next(batches.draws())))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        images, numbers = batches.load(held)
    for draw, expected in zip(batches.draws(), found, strict=True):
        for old, new in zip(held, draw, strict=True):
            old.copy_(new)
        graph.replay()
        assert torch.equal(images, expected[0])
        assert torch.equal(numbers, expected[1])
