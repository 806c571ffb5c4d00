"""Layers of a picture whose rows (or columns) lie on several ranks: halos, padding, convolution, group norm.

Everything here is over plain tensors, a `Split` that says which rows each rank holds, and a process group. "Rows"
stands for the split dim, which may as well be the columns; dims are counted from the end (-2 rows, -1 columns), so that
the same code serves pictures (B, C, H, W) and videos (B, C, T, H, W).
"""

from xpar.core.halo.convolution import Geometry, split_convolution
from xpar.core.halo.exchange import Halo, HaloPlan, start_halo_exchange
from xpar.core.halo.group_norm import combine_moments, split_group_norm
from xpar.core.halo.padding import split_pad
from xpar.core.halo.split import Levels, Split

__all__ = [
    "Geometry",
    "Halo",
    "HaloPlan",
    "Levels",
    "Split",
    "combine_moments",
    "split_convolution",
    "split_group_norm",
    "split_pad",
    "start_halo_exchange",
]
