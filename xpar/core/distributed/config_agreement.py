"""All ranks of a grid compare their configuration before the first group is made."""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from xpar.config import EngineConfig
from xpar.core.distributed.attempt import Attempt
from xpar.core.distributed.differences import differences
from xpar.core.distributed.operations import named
from xpar.core.distributed.span import Span
from xpar.errors import CommTimeoutError, RankMismatchError

# Every rank sends this many bytes, whatever it has to say: a wrong size would abort the process in gloo.
_RECORD_BYTES = 1024


def agree_on_config(config: EngineConfig, span: Span, attempt: Attempt) -> str:
    """Check that every rank of `span` has the same `config`, and return a token that they now share.

    Without this check ranks of different degrees would wait for each other in groups that never form.
    The token is new on each call; it makes the names of groups unique for the life of the job.

    Raises:
        RankMismatchError: on every rank alike; names each field that differs and the value on each rank.
        CommTimeoutError, PeerFailedError: another rank did not come here, or has given up `attempt`.
    """
    record: dict[str, Any] = {"rank": dist.get_rank(), "token": secrets.token_hex(8), "config": asdict(config)}
    records = [record]
    for link in span.links:
        gathered = [_exchange(known, link, config.timeout, attempt) for known in records]
        records = [each for one in gathered for each in one]
    attempt.settle()
    records.sort(key=lambda each: span.ranks.index(each["rank"]))
    _check_equal(records)
    return str(records[0]["token"])


def _exchange(
    record: dict[str, Any], link: dist.ProcessGroup, timeout: float, attempt: Attempt
) -> list[dict[str, Any]]:
    """All-gather one record over `link`."""
    text = json.dumps(record).encode().ljust(_RECORD_BYTES)
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(link) == "nccl" else "cpu"
    mine = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    out = [torch.empty_like(mine) for _ in range(dist.get_world_size(link))]
    with named("the building of a rank grid", link):
        work = dist.all_gather(out, mine, group=link, async_op=True)
        # The caller's group may have a far longer time-out than we were told to use.
        if not attempt.wait(work, timeout):
            raise CommTimeoutError(
                f"timeout={timeout}: not every rank of {dist.get_process_group_ranks(link)} built its rank grid "
                f"in time; build Parallel on all of them"
            )
        work.wait()
    return [json.loads(bytes(each.tolist())) for each in out]


def _check_equal(records: list[dict[str, Any]]) -> None:
    found = differences(
        {each["rank"]: {name: repr(value) for name, value in each["config"].items()} for each in records}
    )
    if found:
        raise RankMismatchError(
            f"the ranks have different configurations; {found}; pass the same EngineConfig on every rank"
        )
