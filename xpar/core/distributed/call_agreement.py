"""Ranks agree on what a call is, before anything else of it is communicated, or all of them say what differs.

Ranks that call with different arguments hang, abort, or get wrong data without an error: neither gloo nor NCCL compares
what ranks do. So each call begins with one all-gather of a fixed vector of 64-bit integers.
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from xpar.core.distributed.differences import differences
from xpar.core.distributed.operations import named
from xpar.errors import RankMismatchError

# Arguments that are compared one by one, so that the error can name them; all others share one slot.
_NAMED = (
    "num_inference_steps",
    "height",
    "width",
    "num_frames",
    "prompt",
    "negative_prompt",
    "prompt_embeds",
    "guidance_scale",
    "true_cfg_scale",
    "generator",
    "latents",
    "image",
    "num_images_per_prompt",
    "num_videos_per_prompt",
    "output_type",
    "callback_on_step_end",
)
_OTHERS = "other arguments"
_REFUSED = "refused with"
_SMALL = 1 << 18  # bytes of a tensor that are hashed on the host, 0.2 ms at most; of a larger one its checksum is


class CallHeader:
    """What a call is, field by field.

    Args:
        number: this rank's number of the call; once the ranks have agreed, the one that all of them use.
        facts: what else must be equal (pipeline class, dtype, ...), the same names on every rank.
        arguments: the call's arguments by name.
    """

    def __init__(self, number: int, facts: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
        self.number = number
        self.fields = {**facts, **{name: arguments.get(name) for name in _NAMED}}
        self.fields[_OTHERS] = {name: value for name, value in sorted(arguments.items()) if name not in _NAMED}
        self.fields[_REFUSED] = None

    def refuse(self, error: str) -> None:
        """Say that this rank does not make the call."""
        self.fields[_REFUSED] = error

    def codes(self) -> list[int]:
        """A number for each field, equal where the fields are."""
        return [_code(value) for value in self.fields.values()]

    def shown(self) -> dict[str, str]:
        """The fields for people to read; different where the fields are."""
        return {name: _show(value) for name, value in self.fields.items()}


def agree_on_call(header: CallHeader, group: ProcessGroup | None) -> None:
    """Compare a call over the ranks of a group.

    A rank that has refused a call alone, and then made the next, is ahead of the others; nothing is wrong with that,
    so numbers are not compared: the largest is everyone's from here on.

    Args:
        header: the call, as this rank makes it; gets the number that all ranks give it.
        group: the ranks, of a backend that sends from the host (gloo), or None for one.

    Raises:
        RankMismatchError: on every rank, naming the fields that differ and their values by rank.
    """
    if group is None:
        return
    own = torch.tensor([header.number, *header.codes()], dtype=torch.int64)
    every = torch.empty(dist.get_world_size(group) * own.numel(), dtype=torch.int64)
    with named("the agreement on a call", group):
        dist.all_gather_single(every, own, group=group)
    by_rank = every.view(-1, own.numel()).tolist()
    header.number = max(number for number, *_ in by_rank)
    if any(codes != by_rank[0][1:] for _, *codes in by_rank):
        # All ranks come here together, so they can tell each other their values.
        shown: list[Any] = [None] * dist.get_world_size(group)
        with named("the agreement on a call", group):
            dist.all_gather_object(shown, header.shown(), group=group)
        raise RankMismatchError(_describe(dict(zip(dist.get_process_group_ranks(group), shown, strict=True))))


def _describe(shown: Mapping[int, Mapping[str, str]]) -> str:
    """What is different in a call, in words, from `CallHeader.shown` by rank."""
    known = {rank: _known(values) for rank, values in shown.items()}
    return f"the ranks were called with different arguments; {differences(known)}; pass the same on every rank"


def _known(shown: Mapping[str, str]) -> dict[str, str]:
    """The fields that a rank knows: one that has refused its arguments may not know them all."""
    has_refused = shown[_REFUSED] != repr(None)
    return {name: text for name, text in shown.items() if not has_refused or text not in (repr(None), "{}")}


def _show(value: Any) -> str:
    if isinstance(value, (str, int, float, type(None))):
        text = repr(value)
    elif torch.is_tensor(value):
        text = f"{tuple(value.shape)} {value.dtype} #{_code(value) & 0xFFFFFF:06x}"
    elif isinstance(value, torch.Generator):
        text = f"seed {value.initial_seed()} #{_code(value) & 0xFFFFFF:06x}"
    elif isinstance(value, Mapping):
        text = "{" + ", ".join(f"{key}={_show(item)}" for key, item in value.items()) + "}"
    elif isinstance(value, (list, tuple)):
        text = "[" + ", ".join(_show(item) for item in value) + "]"
    else:
        text = f"{type(value).__name__} #{_code(value) & 0xFFFFFF:06x}"
    return text if len(text) <= 200 else f"{text[:190]}... #{_code(value) & 0xFFFFFF:06x}"


def _code(value: Any) -> int:
    """A number that is equal for equal values: small integers are themselves, the rest is hashed to 63 bits."""
    if type(value) is int and 0 <= value < 2**31:
        return value
    digest = hashlib.blake2b(digest_size=8)
    _feed(digest, value)
    return int.from_bytes(digest.digest(), "little") >> 1 | 1 << 62


def _feed(digest: Any, value: Any) -> None:
    """Put a value into a digest, with its type, in a form that does not depend on the process."""
    digest.update(type(value).__name__.encode())
    if isinstance(value, (str, bool, int, type(None))):
        digest.update(repr(value).encode())
    elif isinstance(value, float):
        digest.update(struct.pack("<d", value))
    elif torch.is_tensor(value):
        digest.update(repr((tuple(value.shape), str(value.dtype))).encode())
        small = value.nbytes <= _SMALL
        digest.update(_bits(value).cpu().numpy() if small else struct.pack("<Q", int(sum_of_bits(value))))
    elif isinstance(value, torch.Generator):
        digest.update(value.get_state().numpy().tobytes())
    elif isinstance(value, Mapping):
        for key in value:
            _feed(digest, key)
            _feed(digest, value[key])
    elif isinstance(value, Sequence):
        for item in value:
            _feed(digest, item)
    elif hasattr(value, "tobytes"):  # pictures and arrays
        digest.update(repr(getattr(value, "size", None)).encode())
        digest.update(value.tobytes())


def sum_of_bits(value: torch.Tensor) -> torch.Tensor:
    """A checksum of a tensor's bits, computed where the tensor is; the position of each element counts."""
    bits = _bits(value).to(torch.int64)
    weights = torch.arange(1, bits.numel() + 1, device=bits.device) * 2654435761 % 1000003
    return (bits * weights).sum() & (2**62 - 1)


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.detach().contiguous().view(-1).view(torch.uint8)
