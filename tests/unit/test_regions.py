"""Regions of the output that belong to patches."""

import pytest
import torch

from xpar.errors import UnsupportedError
from xpar.wrappers.pipelines.regions import Regions


def unpatchify(patch: int) -> torch.Tensor:
    """A head that turns 12 tokens of 4 values into a 6 x 8 picture in 2 x 2 patches, with one patch of three NaN."""
    tokens = torch.zeros(1, 12, 4)
    tokens[:, patch * 4 : patch * 4 + 4] = torch.nan
    return tokens.view(1, 3, 4, 2, 2).permute(0, 1, 3, 2, 4).reshape(1, 1, 6, 8)


def test_regions_are_found_through_an_unpatchify_and_tile_the_output() -> None:
    regions = Regions.probe(unpatchify, 3)
    assert [regions.size(patch) for patch in range(3)] == [16, 16, 16]
    assert torch.equal(regions.owners[0][0, 0, :, 0], torch.tensor([0, 0, 1, 1, 2, 2], dtype=torch.int16))


def test_what_is_taken_from_one_output_can_be_put_into_another() -> None:
    regions = Regions.probe(unpatchify, 3)
    source, target = torch.randn(1, 1, 6, 8), torch.zeros(1, 1, 6, 8)
    for patch in range(3):
        regions.put([target], patch, regions.take([source], patch))
    assert torch.equal(source, target)


def test_latents_may_be_a_leading_part_of_the_output_and_nothing_else() -> None:
    regions = Regions.probe(lambda patch: unpatchify(patch).expand(2, 3, 6, 8), 3)
    for rows in (1, 2, 5):
        assert regions.mask(torch.zeros(rows, 2, 6, 8), 1).shape == (1, 2, 6, 8)
    assert regions.mask(torch.zeros(1, 2, 6, 8), 1).sum() == 2 * 16
    for shape in ((1, 4, 6, 8), (1, 6, 8), (1, 3, 12, 8)):
        with pytest.raises(UnsupportedError, match="no leading part"):
            regions.mask(torch.zeros(shape), 0)


def test_a_head_that_mixes_tokens_is_refused() -> None:
    def blurring(patch: int) -> torch.Tensor:
        return torch.nn.functional.avg_pool2d(unpatchify(patch), 3, 1, 1)

    with pytest.raises(UnsupportedError, match="mixes tokens of different patches"):
        Regions.probe(blurring, 3)


def test_rows_that_are_laid_out_differently_are_refused() -> None:
    def shuffled(patch: int) -> torch.Tensor:
        return torch.cat([unpatchify(patch), unpatchify(2 - patch)])

    with pytest.raises(UnsupportedError, match="rows of a batch differently"):
        Regions.probe(shuffled, 3)
