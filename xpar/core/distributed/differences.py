"""What differs between ranks, in words."""

from collections.abc import Mapping

__all__ = ["differences"]


def differences(by_rank: Mapping[int, Mapping[str, str]]) -> str:
    """Each field whose value is not the same everywhere, as `field: rank0=... rank1=...`; "" if there is none.

    Args:
        by_rank: for each rank its fields as text. A rank that does not have a field is passed over in it.
    """
    fields = dict.fromkeys(field for shown in by_rank.values() for field in shown)
    lines = []
    for field in fields:
        values = {rank: shown[field] for rank, shown in by_rank.items() if field in shown}
        if len(set(values.values())) > 1:
            lines.append(f"{field}: " + " ".join(f"rank{rank}={value}" for rank, value in values.items()))
    return "; ".join(lines)
