"""Dealing a number of things (tokens, heads, blocks, rows) over a number of parts.

Everything in xpar that is split is split by these two functions, so that each rank can work out what every other
rank holds from the full length alone and no sizes are ever exchanged.
"""

from xpar.errors import ConfigError

__all__ = ["share", "shares"]


def shares(total: int, parts: int) -> list[int]:
    """Sizes of `parts` contiguous parts of `total` things: they differ by at most one and the larger come first.

    Raises:
        ConfigError: `total` is negative or `parts` is not positive.
    """
    _check(total, parts)
    size, larger = divmod(total, parts)
    return [size + 1] * larger + [size] * (parts - larger)


def share(total: int, parts: int, index: int) -> tuple[int, int]:
    """Start and stop of part `index` when `total` things are dealt as by `shares`.

    Raises:
        ConfigError: `total` is negative, `parts` is not positive, or `index` is not in `range(parts)`.
    """
    _check(total, parts)
    if not 0 <= index < parts:
        raise ConfigError(f"index={index} is not one of {parts} parts; it must be in 0..{parts - 1}")
    size, larger = divmod(total, parts)
    start = index * size + min(index, larger)
    return start, start + size + (index < larger)


def _check(total: int, parts: int) -> None:
    if total < 0 or parts < 1:
        raise ConfigError(f"cannot deal total={total} over parts={parts}; total must be >= 0 and parts >= 1")
