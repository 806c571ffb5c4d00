"""Every token of every stream is in exactly one shard of one patch."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from xpar.core.stale_cache.kv_cache import LayerCache
from xpar.core.stale_cache.token_partition import TokenPartition

partitions = st.builds(
    lambda image, text, patches, shards: TokenPartition.of({"image": image, "text": text}, patches, shards),
    st.integers(1, 60),
    st.integers(0, 20),
    st.integers(1, 9),
    st.integers(1, 5),
)
JOINED = ("text", "image")


@given(partitions)
def test_no_token_is_lost_or_held_twice_and_sizes_differ_by_at_most_one(partition: TokenPartition) -> None:
    shards = range(partition.shards)
    views = [partition.positions(JOINED, patch, shards) for patch in range(partition.patches)]
    assert torch.equal(
        torch.cat(views).sort().values, torch.arange(partition.length("text") + partition.length("image"))
    )
    assert torch.equal(partition.positions(JOINED, None, shards).sort().values, torch.cat(views).sort().values)
    sizes = [partition.count(("image",), patch, shard) for patch in range(partition.patches) for shard in shards]
    assert sum(sizes) == partition.length("image") and max(sizes) - min(sizes) <= 2
    for patch in range(partition.patches):
        of_patch = sizes[patch * partition.shards : (patch + 1) * partition.shards]
        assert max(of_patch) - min(of_patch) <= 1


@given(partitions, st.data())
def test_a_cut_holds_the_positions_and_a_stand_in_where_there_are_none(
    partition: TokenPartition, data: st.DataObject
) -> None:
    patch = data.draw(st.none() | st.integers(0, partition.patches - 1))
    shard = data.draw(st.integers(0, partition.shards - 1))
    whole = torch.arange(partition.length("text") + partition.length("image"))
    held = partition.cut(whole[:, None], 0, JOINED, patch, shard)[:, 0]
    rows = partition.own_rows(JOINED, patch, shard)
    own = held if rows is None else held[torch.tensor(rows, dtype=torch.long)]
    assert torch.equal(own, partition.positions(JOINED, patch, [shard]))
    assert partition.count(JOINED, patch, shard) == own.numel()
    for name in ("text", "image"):
        alone = partition.cut(torch.arange(partition.length(name)), 0, (name,), patch, shard)
        assert alone.numel() > 0 or partition.length(name) == 0
        assert not partition.has_stand_in(name, patch, shard) or alone.tolist() == [0]


@given(partitions)
def test_a_cache_filled_whole_or_patch_by_patch_holds_the_same(partition: TokenPartition) -> None:
    shards = range(partition.shards)

    def keys(positions: torch.Tensor) -> torch.Tensor:
        return positions.float().view(1, 1, -1, 1)

    whole, refreshed = LayerCache(partition, JOINED), LayerCache(partition, JOINED)
    gathered = keys(partition.positions(JOINED, None, shards))
    whole.store_whole(gathered, -gathered)
    seen = 0
    for patch in range(partition.patches):
        fresh = keys(partition.positions(JOINED, patch, shards))
        seen += fresh.shape[2]
        k, v = refreshed.refresh(patch, fresh, -fresh)
        assert k.shape[2] == v.shape[2] == seen  # nothing older than this call
        assert torch.equal(k.flatten(), refreshed.positions().float())
    assert torch.equal(whole.key_BHSD, refreshed.key_BHSD) and torch.equal(whole.value_BHSD, refreshed.value_BHSD)
    k, _ = whole.refresh(0, keys(partition.positions(JOINED, 0, shards)) + 0.5, gathered[:, :, : whole._bounds[1]])
    assert k.shape[2] == seen
