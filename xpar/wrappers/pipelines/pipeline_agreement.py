"""Ranks compare what they wrap: pipeline, libraries, dtype and, if asked for, every weight."""

import hashlib
import importlib.metadata
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from xpar.config import EngineConfig
from xpar.core.distributed.call_agreement import sum_of_bits
from xpar.core.distributed.differences import differences
from xpar.core.distributed.grid import RankGrid
from xpar.core.distributed.operations import named
from xpar.errors import RankMismatchError

__all__ = ["agree_on_pipeline"]

_LIBRARIES = ("torch", "diffusers", "transformers", "accelerate", "xpar")


def agree_on_pipeline(pipe: Any, config: EngineConfig, grid: RankGrid) -> None:
    """Compare the pipeline over the ranks of a grid, before anything is wrapped.

    Raises:
        RankMismatchError: on every rank, naming what differs and its values by rank; for weights the first parameter.
    """
    if grid.control is None:
        return
    _compare(_facts(pipe), grid.control, "the ranks wrap different pipelines")
    if config.verify_weights:
        for name, module in pipe.components.items():
            if isinstance(module, nn.Module):
                _compare_weights(name, module, grid.control)


def _facts(pipe: Any) -> dict[str, str]:
    facts = {"pipeline": type(pipe).__name__}
    for library in _LIBRARIES:
        try:
            facts[f"version of {library}"] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            facts[f"version of {library}"] = "not installed"
    for name, component in pipe.components.items():
        facts[name] = type(component).__name__
        if isinstance(component, nn.Module):
            first = next(component.parameters(), None)
            facts[name] += "" if first is None else f" of {first.dtype} on {first.device.type}"
    return facts


def _compare(facts: dict[str, str], group: dist.ProcessGroup, what: str) -> None:
    every: list[Any] = [None] * dist.get_world_size(group)
    with named("the agreement on a pipeline", group):
        dist.all_gather_object(every, facts, group=group)
    fields = dict.fromkeys(name for of_rank in every for name in of_rank)
    complete = [dict.fromkeys(fields, "missing") | of_rank for of_rank in every]
    found = differences(dict(zip(dist.get_process_group_ranks(group), complete, strict=True)))
    if found:
        raise RankMismatchError(f"{what}; {found}; load the same on every rank")


def _compare_weights(name: str, module: nn.Module, group: dist.ProcessGroup) -> None:
    """Compare checksums: one exchange of all of them as one number, and, if that differs, of each."""
    sums = {key: f"{int(sum_of_bits(x)):x}" for key, x in module.state_dict().items() if torch.is_tensor(x)}
    digest = hashlib.sha256(repr(sums).encode()).hexdigest()
    try:
        _compare({f"weights of {name}": digest[:16]}, group, "verify_weights: the ranks hold different weights")
    except RankMismatchError as error:
        every: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(every, sums, group=group)
        first = next(key for key in every[0] if len({of_rank.get(key) for of_rank in every}) > 1)
        raise RankMismatchError(f"{error}; the first parameter that differs is {name}.{first}") from None
