"""Attention that spans the sequence, while each rank holds only a shard of it."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from xpar.core.distributed.collectives import group_size
from xpar.core.long_ctx_attention.kernels import attend
from xpar.core.long_ctx_attention.masks import heads_of, is_trivial, normalise_mask, slice_whole
from xpar.core.long_ctx_attention.ring import ring_gather
from xpar.core.long_ctx_attention.ulysses import gather_heads, scatter_heads
from xpar.core.long_ctx_attention.usp import TokenLayout, usp_attention
from xpar.core.stale_cache.kv_cache import LayerCache
from xpar.core.stale_cache.token_partition import TokenPartition
from xpar.errors import CommError, UnsupportedError
from xpar.wrappers.layers.token_flow import TokenFlow


class ParallelAttnProcessor:
    """Stands in for the forward of one attention module, and so around whatever processor that module has.

    The module runs as it is, on this rank's tokens; the attention primitive it calls
    (`torch.nn.functional.scaled_dot_product_attention`, in which diffusers' native dispatch ends too) is taken over
    while it runs. Projections, norms, rotary embeddings, LoRA and IP-Adapter, also those loaded later, stay the
    module's own. Method: unified sequence parallelism, arXiv 2405.07719; stale keys and values, arXiv 2405.14430.

    Args:
        inner: the module's forward.
        name: the module's name in the transformer.
        streams: the streams that it joins, in its order.
        flow: gives the state of the forward that is running, or None outside of one.
        backend: kernel for attention with a log-sum-exp (`EngineConfig.attention_backend`).
    """

    def __init__(
        self,
        inner: Callable[..., Any],
        name: str,
        streams: tuple[str, ...],
        flow: Callable[[], TokenFlow | None],
        backend: str = "auto",
    ) -> None:
        self.inner, self.name, self.streams, self.flow, self.backend = inner, name, streams, flow, backend

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on this rank's tokens.

        Raises:
            UnsupportedError: the module did not reach the primitive exactly once with its own tokens as keys: it
                computes attention in a way of its own, and running it on a shard would be wrong.
        """
        flow = self.flow()
        if flow is None:
            return self.inner(*args, **kwargs)
        spanning = _SpanningAttention(self, flow)
        try:
            with spanning:
                result = self.inner(*args, **kwargs)
        except CommError as error:
            error.place = error.place or f"layer {self.name}"
            raise
        if spanning.calls != 1:
            raise UnsupportedError(
                f"{self.name} reached F.scaled_dot_product_attention {spanning.calls} times with its "
                f"{spanning.local} local tokens as keys, not once; use the native attention backend "
                "(transformer.set_attention_backend('native')) and a processor that calls it"
            )
        return result


class _SpanningAttention(TorchFunctionMode):
    """Takes over scaled_dot_product_attention inside one attention module."""

    def __init__(self, layer: ParallelAttnProcessor, flow: TokenFlow) -> None:
        super().__init__()
        self.layer, self.flow, self.calls = layer, flow, 0
        where = (layer.streams, flow.view.patch, flow.groups.index)
        self.own_rows = flow.partition.own_rows(*where)
        stand_ins = sum(flow.partition.has_stand_in(name, *where[1:]) for name in layer.streams)
        self.local = flow.partition.count(*where) + stand_ins

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if query.shape[2] != self.local or key.shape[2] != self.local:  # cross-attention to tokens every rank has
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if dropout_p:
            raise UnsupportedError(
                f"{self.layer.name}: dropout_p={dropout_p} would differ between ranks; use eval mode"
            )
        self.calls += 1
        mask = self._whole_mask(attn_mask)
        if self.own_rows is None:
            return self._attend_whole(query, key, value, mask, is_causal, scale)
        rows = torch.tensor(self.own_rows, device=query.device, dtype=torch.long)
        q, k, v = (x.index_select(2, rows) for x in (query, key, value))
        out = query.new_zeros(*query.shape[:3], value.shape[-1])
        return out.index_copy(2, rows, self._attend_whole(q, k, v, mask, is_causal, scale))

    def _attend_whole(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        is_causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        """Attention of this rank's tokens, [B, H, S of this rank, D], over what is known of the sequence."""
        layout = self._layout(with_positions=mask is not None or is_causal)
        if self.flow.view.caches is not None:
            return self._attend_cached(query, key, value, layout, mask, is_causal, scale)
        return usp_attention(
            query,
            key,
            value,
            layout,
            ulysses_group=self.flow.groups.ulysses,
            ring_group=self.flow.groups.ring,
            mask=mask,
            is_causal=is_causal,
            scale=scale,
            backend=self.layer.backend,
        )

    def _layout(self, with_positions: bool) -> TokenLayout:
        """Who holds which tokens of the view; positions are only needed to cut masks."""
        partition, streams, patch, groups = (
            self.flow.partition,
            self.layer.streams,
            self.flow.view.patch,
            self.flow.groups,
        )
        shards = range(groups.count)
        return TokenLayout(
            tuple(partition.count(streams, patch, shard) for shard in shards),
            group_size(groups.ulysses),
            groups.ring_size,
            tuple(partition.positions(streams, patch, [shard]) for shard in shards) if with_positions else None,
        )

    def _attend_cached(
        self,
        q_BHSD: torch.Tensor,
        k_BHSD: torch.Tensor,
        v_BHSD: torch.Tensor,
        layout: TokenLayout,
        mask: torch.Tensor | None,
        is_causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        """Queries of the view against cached keys and values, of which those of the view are refreshed first."""
        groups, heads = self.flow.groups, q_BHSD.shape[1]
        lengths = layout.group_lengths(groups.ring_index)
        q_BHSD, k_BHSD, v_BHSD = scatter_heads(q_BHSD, k_BHSD, v_BHSD, lengths, groups.ulysses)
        k_BHSD, v_BHSD = ring_gather(k_BHSD, v_BHSD, layout.ring_lengths, groups.ring)
        cache = self._cache()
        if self.flow.view.patch is None:
            cache.store_whole(k_BHSD, v_BHSD)
        else:
            k_BHSD, v_BHSD = cache.refresh(self.flow.view.patch, k_BHSD, v_BHSD)
        if mask is not None or is_causal:
            device = q_BHSD.device
            rows = layout.ring_positions(groups.ring_index, device)
            if self.flow.view.patch is None:
                columns = torch.cat([layout.ring_positions(ring, device) for ring in range(groups.ring_size)])
            else:
                columns = cache.positions().to(device)
            if mask is not None:
                whole = sum(self.flow.partition.length(name) for name in self.layer.streams)
                mask = heads_of(normalise_mask(mask, q_BHSD.shape[0], heads, whole, whole), heads, groups.ulysses)
            mask = slice_whole(mask, is_causal, rows, columns)
        out_BHSD = attend(q_BHSD, k_BHSD, v_BHSD, mask, scale=scale)
        return gather_heads(out_BHSD, lengths, heads, groups.ulysses)

    def _cache(self) -> LayerCache:
        caches, name, partition = self.flow.view.caches, self.layer.name, self.flow.partition
        if caches is None or caches.get(name) is None or caches[name].partition != partition:
            cache = LayerCache(partition, self.layer.streams)
            if caches is not None:
                caches[name] = cache
            return cache
        return caches[name]

    def _whole_mask(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """The mask over the whole joint sequence behind the one that the module passed.

        Raises:
            UnsupportedError: it neither covers the whole sequence nor is it built from a mask that the plan names.
        """
        if mask is None:
            return None
        partition, streams = self.flow.partition, self.layer.streams
        whole = sum(partition.length(name) for name in streams)
        declared = {name: self.flow.key_masks[name] for name in streams if name in self.flow.key_masks}
        if declared and mask.shape[-1] == self.local:
            source = next(iter(declared.values()))
            return self.flow.once(("joint", streams), source, lambda: _join_key_masks(partition, streams, declared))
        if mask.shape[-1] in (whole, 1):
            return mask
        raise UnsupportedError(
            f"{self.layer.name}: an attention mask of shape {tuple(mask.shape)} covers neither the {whole} tokens of "
            f"{streams} nor comes from a block argument that the plan names in masks"
        )


def _join_key_masks(
    partition: TokenPartition, streams: tuple[str, ...], declared: dict[str, torch.Tensor]
) -> torch.Tensor | None:
    """[B, 1, 1, S] boolean mask over the joint keys, where streams without a mask are seen whole; None if all are.

    Whether it hides anything is asked on the CPU only, where no device has to be waited for.
    """
    sample = next(iter(declared.values()))
    parts = [
        declared[name].bool()
        if name in declared
        else sample.new_ones((sample.shape[0], partition.length(name)), dtype=torch.bool)
        for name in streams
    ]
    joint = torch.cat(parts, dim=1)[:, None, None, :]
    return None if joint.device.type == "cpu" and is_trivial(joint) else joint
