"""Two groups of two CPU actors on a local cluster: results, a killed actor, bad calls, and the end."""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.ray import jobs
from tests.tiny_models import relative_error
from xpar import CommTimeoutError, ConfigError, EngineConfig, PeerFailedError, XparError

pytest.importorskip("ray")

from xpar.ray import PipelineGroups

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]  # nearly all of it for processes to start

# Also how long ranks wait for one that died, where nothing tells them sooner.
TIMEOUT = 20
LIMITS = dict(start_timeout=120, call_timeout=90)


@pytest.fixture(scope="module")
def groups(cluster: None) -> Iterator[PipelineGroups]:
    """Two groups of two; tests leave them able to serve."""
    config = EngineConfig(ulysses_degree=2, timeout=TIMEOUT)
    with PipelineGroups(jobs.build, config, groups=2, retries=1, **LIMITS) as groups:
        yield groups


@pytest.fixture(scope="module")
def expected() -> list[torch.Tensor]:
    """What one process makes of `jobs.calls(5)`."""
    pipe = jobs.build()
    return [pipe(**call)[0] for call in jobs.calls(5)]


def check(outputs: list[Any], expected: list[torch.Tensor]) -> None:
    assert len(outputs) == len(expected)
    for output, reference in zip(outputs, expected, strict=True):
        assert relative_error(output[0], reference) < 1e-5


def test_results_are_those_of_one_process_and_in_order(groups: PipelineGroups, expected: list[torch.Tensor]) -> None:
    check(groups.map(jobs.calls(5)), expected)
    pids = [member.pid for members in groups.members for member in members]
    assert len(set(pids)) == 4 and all(psutil.pid_exists(pid) for pid in pids)


def test_a_killed_actor_costs_its_group_and_no_result(
    groups: PipelineGroups, expected: list[torch.Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = groups.members
    calls = jobs.calls(5)
    calls[1] = jobs.held(calls[1], tmp_path)
    outputs: list[Any] = []
    caller = threading.Thread(target=lambda: outputs.extend(groups.map(calls)), daemon=True)
    caller.start()
    pids = [int(path.stem) for path in jobs.wait_for(tmp_path, "*.pid", 2)]
    (index,) = (i for i, members in enumerate(before) if {member.pid for member in members} == set(pids))
    victim = before[index][1].pid
    with caplog.at_level(logging.ERROR, logger="xpar"):
        os.kill(victim, signal.SIGKILL)
        (tmp_path / "go").touch()
        caller.join(150)
    assert not caller.is_alive()
    check(outputs, expected)
    after = groups.members
    assert after[1 - index] == before[1 - index], "the other group must not notice"
    assert not set(after[index]) & set(before[index]), "the whole group must be new"
    (record,) = (record for record in caplog.records if record.name.startswith("xpar.ray"))
    text = record.getMessage()
    assert f"call 6 failed (attempt 1 of 2): group {index}: rank 1 (pid {victim} on " in text
    assert "died: The actor is dead because its worker process has died" in text
    assert text.endswith("the group is replaced and the call run again")
    gone(pids)


def test_an_error_of_the_call_comes_back_as_it_is_and_costs_nothing(
    groups: PipelineGroups, expected: list[torch.Tensor]
) -> None:
    before = groups.members
    good, *_ = jobs.calls(1)
    with pytest.raises(TypeError, match="no_such_argument"):
        groups.map([{"no_such_argument": 1}])
    with pytest.raises(ConfigError, match="height='high'") as raised:
        groups.submit(**{**good, "height": "high"}).result(90)
    assert "rank 0 (pid" in "".join(raised.value.__notes__), "the traceback of the rank is lost"
    outputs = groups.map([good, {"no_such_argument": 1}, good], return_exceptions=True)
    assert isinstance(outputs[1], TypeError)
    check([outputs[0], outputs[2]], [expected[0]] * 2)
    with pytest.raises(ConfigError, match="the arguments: cannot be pickled"):
        groups.submit(prompt=threading.Lock())
    assert groups.members == before


def test_an_error_half_way_comes_back_too_and_the_next_call_finds_a_new_group(
    groups: PipelineGroups, expected: list[torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    before = groups.members
    good, *_ = jobs.calls(1)
    with pytest.raises(XparError, match=r"AwkwardError: the hub said no \(404\)"):
        groups.map([{**good, "callback_on_step_end": jobs.raise_awkward}])
    assert "is replaced, since XparError left it unusable" in caplog.text
    check(groups.map([good] * 2), [expected[0]] * 2)
    assert sum(members in before for members in groups.members) == 1


def test_close_ends_every_actor_and_a_call_under_way(groups: PipelineGroups, tmp_path: Path) -> None:
    pids = [member.pid for members in groups.members for member in members]
    assert len(pids) == 4
    call, *_ = jobs.calls(1)
    held = [groups.submit(**jobs.held(call, tmp_path)) for _ in range(3)]
    jobs.wait_for(tmp_path, "*.pid", 4)
    groups.close()
    groups.close()
    assert held[2].cancelled()
    for future in held[:2]:
        with pytest.raises(XparError, match="was closed before the call had ended"):
            future.result(0)
    with pytest.raises(XparError, match="PipelineGroups object is closed"):
        groups.map([call])
    gone(pids)


def test_a_call_that_always_fails_is_given_up(cluster: None, caplog: pytest.LogCaptureFixture) -> None:
    call, *_ = jobs.calls(1)
    with PipelineGroups(jobs.build, EngineConfig(), retries=0, start_timeout=120, call_timeout=5) as groups:
        with caplog.at_level(logging.ERROR, logger="xpar.ray"), pytest.raises(PeerFailedError) as raised:
            groups.map([{**call, "callback_on_step_end": jobs.die}])
        assert "call 0: its group failed in 1 of 1 attempts (retries=0)" in str(raised.value)
        assert "rank 0" in str(raised.value) and "died" in str(raised.value)
        assert "the call is given up" in caplog.text
        assert groups.members == [()], "it is started again by its next call"
        with pytest.raises(CommTimeoutError, match=r"gave no answer: nothing came back from 'call' .*at most 5 s"):
            groups.map([{**call, "callback_on_step_end": jobs.sleep}])


def test_an_error_of_build_comes_back_as_it_is(cluster: None) -> None:
    with pytest.raises(FileNotFoundError, match="no checkpoint at /nowhere"):
        PipelineGroups(jobs.refuse_to_build, EngineConfig(), **LIMITS)


def test_no_room_is_said_in_time(cluster: None) -> None:
    with pytest.raises(ConfigError, match=r"no room for 2 ranks .*'CPU': 64.* start_timeout=1 s; free .* of 6.0 CPU"):
        PipelineGroups(jobs.build, EngineConfig(ring_degree=2), num_cpus=64, start_timeout=1)


def gone(pids: list[int], limit: float = 20) -> None:
    """Wait until no process of `pids` is left."""
    deadline = time.monotonic() + limit
    while left := [pid for pid in pids if psutil.pid_exists(pid)]:
        assert time.monotonic() < deadline, f"processes {left} are still there"
        time.sleep(0.1)
