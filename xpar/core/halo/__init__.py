"""Layers of a picture whose rows, columns, or both, lie on several ranks: halos, padding, convolution, group norm.

Everything here is over plain tensors, a `Split` that says which rows each rank of a line holds, and a process group.
"Rows" stands for the split dim, which may as well be the columns; dims are counted from the end (-2 rows, -1 columns),
so that the same code serves pictures (B, C, H, W) and videos (B, C, T, H, W).

Where both dims are split the ranks form a grid, and each of its rows and columns is a line. Whatever looks beyond its
row is then done for the rows, and within that for the columns: a halo of columns is cut out of tensors that have their
halo of rows already, and so brings the corners.
"""

from xpar.core.halo.convolution import Geometry, split_convolution
from xpar.core.halo.exchange import Halo, HaloPlan, start_halo_exchange
from xpar.core.halo.group_norm import combine_moments, split_group_norm
from xpar.core.halo.padding import pads_of, split_pad
from xpar.core.halo.split import Levels, Split, Splits, areas

__all__ = [
    "Geometry",
    "Halo",
    "HaloPlan",
    "Levels",
    "Split",
    "Splits",
    "areas",
    "combine_moments",
    "pads_of",
    "split_convolution",
    "split_group_norm",
    "split_pad",
    "start_halo_exchange",
]
