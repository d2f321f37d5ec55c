"""Known answers of Random123 for Philox4x32-10, and the uniforms made of it."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels.philox import philox4x32, philox_uniform

MAX = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([MAX] * 4, [MAX] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    words = philox4x32(torch.tensor([counter] * 3).T, torch.tensor([key] * 3).T)
    assert words.T.tolist() == [expected] * 3


def test_the_uniform_is_made_of_the_first_two_words() -> None:
    value = float(philox_uniform(torch.tensor([0]), torch.tensor([0])))
    bits = (0x6627E8D5 >> 5) * 2**26 + (0xE169C58D >> 6)
    assert value == bits / 2**53


def test_every_seed_and_position_gives_its_own_uniform() -> None:
    extremes = [-(2**63), -1, 0, 1, 2**32, 2**63 - 1]
    seeds = torch.tensor(extremes).repeat_interleave(len(extremes))
    positions = torch.tensor(extremes).repeat(len(extremes))
    values = philox_uniform(seeds, positions)
    assert len(set(values.tolist())) == len(extremes) ** 2
    assert bool(((values >= 0) & (values < 1)).all())
    alone = [
        float(philox_uniform(seed[None], position[None]))
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert alone == values.tolist()


def test_uniforms_are_uniform() -> None:
    values = philox_uniform(torch.full((100_000,), 7), torch.arange(100_000))
    counts = torch.histc(values, bins=20, min=0.0, max=1.0)
    chi_square = float(((counts - 5000) ** 2 / 5000).sum())
    assert chi_square < 43.8  # 99.9th percentile at 19 degrees of freedom
