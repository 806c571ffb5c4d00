"""Arithmetic of split pictures: which rows lie where, who sends what, and statistics put together from parts."""

import pytest
import torch

from xpar.core.halo import Geometry, HaloPlan, Levels, Split, areas, combine_moments, split_pad
from xpar.errors import ConfigError, UnsupportedError
from xpar.wrappers.vae.exact import Cut, choose_cut, choose_grid


def splits(total: int, ranks: int, factor: int = 1) -> list[Split]:
    return [Split.deal(total, ranks, rank).scaled(factor) for rank in range(ranks)]


def test_rows_are_dealt_evenly_and_ranks_beyond_them_hold_a_stand_in() -> None:
    split = Split.deal(3, 4, 3)
    assert split.lengths == [1, 1, 1, 0]
    assert split.is_idle and split.held == 1
    assert split.held_slice == slice(2, 3)
    assert split.scaled(4).held == 4 and split.scaled(4).held_slice == slice(8, 12)
    assert Split.deal(7, 3, 1).own == (3, 5)


def test_rows_that_a_factor_does_not_reach_go_to_the_last_rank_with_rows() -> None:
    assert Split.deal(2, 3, 1).scaled(8, 19).bounds == (0, 8, 19, 19)


def test_a_strided_layer_keeps_rows_where_their_windows_begin() -> None:
    split = Split.deal(7, 2, 0).scaled(8, 57)
    assert split.bounds == (0, 32, 57)
    assert split.reduced(2, 28).bounds == (0, 16, 28)
    assert split.reduced(2, 28).reduced(2, 14).reduced(2, 7).bounds == (0, 4, 7)
    with pytest.raises(UnsupportedError, match="stride of 2"):
        Split.deal(6, 2, 0).reduced(2, 3)


def test_no_rows_or_no_such_rank() -> None:
    for arguments in ((0, 2, 0), (4, 2, 2), (4, 2, 1, (0, 1, 2))):
        with pytest.raises(ConfigError, match="cannot deal"):
            Split.deal(*arguments)


def test_levels_are_found_by_the_rows_held() -> None:
    levels = Levels({-2: Split.deal(7, 3, 1)})
    assert levels.at(-2, 4).bounds == (0, 6, 10, 14)
    assert levels.tokens(2 * 5) == [15, 10, 10]
    for held in (3, 1):
        with pytest.raises(UnsupportedError, match=r"rows belongs to no resolution.*vae_parallel='tile'"):
            levels.at(-2, held)
    with pytest.raises(UnsupportedError, match="no multiple of the 2 positions"):
        levels.tokens(7)


def test_the_coarsest_level_may_turn_out_to_have_a_row_more() -> None:
    levels = Levels({-1: Split.deal(7, 2, 1)})
    whole = levels.base[-1].scaled(8, 57)
    levels.add(-1, whole)
    levels.add(-1, whole.reduced(2, 29).reduced(2, 15).reduced(2, 8))
    assert levels.tokens(4 * 10) == [40, 40]


@pytest.mark.parametrize(("mode", "pads"), [("circular", (0, 0, 1, 1)), ("constant", (0, 0, -1, 0))])
def test_padding_that_needs_rows_of_far_ranks_or_drops_some_is_refused(mode: str, pads: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedError, match=f"padding mode '{mode}' with {pads[2]} and {pads[3]} rows"):
        split_pad(torch.zeros(1, 1, 4, 4), pads, mode, None, splits={-2: Split.deal(4, 1, 0)}, group=None)


@pytest.mark.parametrize("total", [2, 3, 7, 16])
@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize(("above", "below"), [(1, 1), (0, 1), (2, 0), (3, 4), (9, 9)])
def test_every_message_has_a_sender_and_a_receiver(total: int, ranks: int, above: int, below: int) -> None:
    """And each rank gets the rows next to its own, however far they lie."""
    each = splits(total, ranks)
    plans = [HaloPlan.of(split, above, below) for split in each]
    for rank, (split, plan) in enumerate(zip(each, plans, strict=True)):
        got: list[int] = []
        for peer, count in (*plan.above, *plan.below):
            (rows,) = [range(low, high) for to, low, high in plans[peer].sends if to == rank]
            assert len(rows) == count
            got += rows
        start, stop = split.own
        wanted = [*range(max(0, start - above), start), *range(stop, min(total, stop + below))]
        assert got == ([] if split.is_idle else wanted)
    assert sum(len(plan.sends) for plan in plans) == sum(len(plan.above) + len(plan.below) for plan in plans)


@pytest.mark.parametrize(
    ("geometry", "below"),
    [((3, 1, 1, 1), 1), ((3, 2, 1, 1), 0), ((5, 1, 2, 1), 2), ((3, 1, 2, 2), 2), ((4, 2, 1, 1), 1), ((1, 1, 0, 1), 0)],
)
def test_rows_that_a_convolution_reaches_under_its_last(geometry: tuple[int, int, int, int], below: int) -> None:
    shape = Geometry(*geometry)
    shape.check()
    assert shape.below == below


@pytest.mark.parametrize("geometry", [(3, 1, 0, 1), (3, 1, 2, 1), (5, 2, 0, 1)])
def test_a_convolution_that_moves_rows_is_refused(geometry: tuple[int, int, int, int]) -> None:
    with pytest.raises(UnsupportedError, match="windows"):
        Geometry(*geometry).check()


def test_moments_of_parts_are_those_of_the_whole_far_from_zero() -> None:
    x = torch.linspace(0, 1, 1000, dtype=torch.float64) + 1e4
    parts = x.split([100, 500, 400])
    means, variances = (torch.stack([f(part) for part in parts]).unsqueeze(1) for f in (torch.mean, _variance))
    mean, variance = combine_moments(means, variances, torch.tensor([0.1, 0.5, 0.4], dtype=torch.float64))
    torch.testing.assert_close(mean, x.mean().view(1))
    torch.testing.assert_close(variance, _variance(x).view(1), rtol=1e-9, atol=0)


def _variance(x: torch.Tensor) -> torch.Tensor:
    return x.var(correction=0)


@pytest.mark.parametrize(
    ("shape", "ranks", "grid"),
    [
        ((7, 10), 2, (1, 2)),
        ((8, 8), 2, (2, 1)),
        ((3, 16), 4, (1, 4)),
        ((16, 3), 4, (4, 1)),
        ((1, 6), 2, (1, 2)),
        ((128, 128), 4, (2, 2)),
        ((7, 10), 4, (2, 2)),
        ((3, 3), 4, (4, 1)),  # three positions on the busiest rank and one rank idle, instead of four
        ((6, 6), 12, (6, 2)),
        ((7, 10), 12, (1, 12)),  # seven on ten ranks, instead of eight on twelve
        ((7, 10), 16, (8, 2)),
        ((12, 12), 16, (4, 4)),
        ((60, 104), 8, (2, 4)),
        ((16, 16), 3, (3, 1)),
    ],
)
def test_the_grid_leaves_least_to_the_busiest_rank(shape: tuple[int, int], ranks: int, grid: tuple[int, int]) -> None:
    assert choose_grid((1, 4, *shape), 1, ranks) == grid
    assert choose_grid((1, 3, shape[0] * 8, shape[1] * 8), 8, ranks) == grid


def test_tiles_of_a_grid_cover_the_picture_once_in_group_order() -> None:
    cuts = [Cut.by((2, 3), (1, 3, 57, 80), 8, rank) for rank in range(6)]
    assert [tuple(split.own for split in cut.whole.values()) for cut in cuts] == [
        ((0, 32), (0, 32)),
        ((0, 32), (32, 56)),
        ((0, 32), (56, 80)),
        ((32, 57), (0, 32)),
        ((32, 57), (32, 56)),
        ((32, 57), (56, 80)),
    ]
    assert [(cut.base[-2].line, cut.base[-1].line) for cut in (cuts[1], cuts[5])] == [
        ((1, 4), (0, 1, 2)),
        ((2, 5), (3, 4, 5)),
    ]
    assert all(areas(cut.base) == [16, 12, 12, 12, 9, 9] for cut in cuts)
    assert list(Cut.by((1, 3), (1, 4, 7, 10), 1, 2).base) == [-1]


def test_tokens_of_a_tile() -> None:
    levels = Levels(Cut.by((2, 2), (1, 4, 3, 1), 1, 3).base)
    assert levels.is_idle
    assert levels.tokens(5) == [10, 0, 5, 0]  # five frames; this rank holds a stand-in of one column
    assert [split.bounds for split in levels.of((1, 4, 2, 2)).values()] == [(0, 4, 6), (0, 2, 2)]


@pytest.mark.parametrize("grid", [(2, 2), (3, 2), (2, 5)])
def test_messages_along_lines_of_a_grid_have_a_sender_and_a_receiver(grid: tuple[int, int]) -> None:
    ranks = range(grid[0] * grid[1])
    cuts = [Cut.by(grid, (1, 4, 7, 4), 1, rank) for rank in ranks]
    for dim in (-2, -1):
        plans = [HaloPlan.of(cut.base[dim], 2, 1) for cut in cuts]
        sent = [(rank, peer, stop - start) for rank in ranks for peer, start, stop in plans[rank].sends]
        received = [(peer, rank, rows) for rank in ranks for peer, rows in (*plans[rank].above, *plans[rank].below)]
        assert sorted(sent) == sorted(received) and sent


def test_one_position_or_one_rank_has_nothing_to_share() -> None:
    assert choose_cut((1, 4, 1, 1), 1, 4, 0) is None
    assert choose_cut((1, 4, 8, 8), 1, 1, 0) is None
