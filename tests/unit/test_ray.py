"""xpar.ray without a cluster: who is at fault, how calls are dealt and run again, and what is refused."""

import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.tiny_models import call_arguments, pipeline
from xpar import CommTimeoutError, ConfigError, EngineConfig, PeerFailedError, XparError

ray = pytest.importorskip("ray")

from xpar.ray import PipelineGroups, pipeline_groups  # noqa: E402 - Ray may be missing
from xpar.ray.answers import Answer, result  # noqa: E402
from xpar.ray.rank import Rank  # noqa: E402

TWO = EngineConfig(ulysses_degree=2)


def test_importing_starts_nothing() -> None:
    code = (
        "import sys, xpar; assert 'ray' not in sys.modules; import xpar.ray, ray; "
        "print([m for m in ('torch', 'diffusers') if m in sys.modules], ray.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.strip() == "[] False"


def test_missing_ray_is_said_in_plain_words() -> None:
    code = "import sys; sys.modules['ray'] = None; import xpar; import xpar.ray"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert "ModuleNotFoundError: xpar.ray needs Ray" in done.stderr and "pip install 'xpar[ray]'" in done.stderr


def ok(rank: int, value: Any = None) -> Answer:
    return Answer(f"rank {rank}", value=value)


def bad(rank: int, error: Exception, lost: bool = False) -> Answer:
    return Answer(f"rank {rank}", error=error, lost=lost)


def test_the_result_is_that_of_the_first_rank() -> None:
    assert result("group 3", [ok(0, "picture"), ok(1)]) == "picture"


def test_an_error_that_every_rank_raises_is_the_calls() -> None:
    error = ConfigError("height=3: no")
    with pytest.raises(ConfigError) as raised:
        result("group 3", [bad(0, error), bad(1, ConfigError("height=3: no"))])
    assert raised.value is error


DEAD = PeerFailedError("ids of Ray. The actor is dead because\nits node died.  Some common causes include: many")


@pytest.mark.parametrize(
    ("answers", "kind", "begin"),
    [
        ([ok(0), bad(1, ValueError("alone"))], PeerFailedError, "group 3: rank 1 raised ValueError: alone"),
        (
            [bad(0, PeerFailedError("rank 1 failed")), bad(1, ValueError("first"))],
            PeerFailedError,
            "group 3: rank 1 raised ValueError: first; rank 0 raised PeerFailedError: rank 1 failed",
        ),
        (
            [bad(0, PeerFailedError("gone")), bad(1, DEAD, lost=True)],
            PeerFailedError,
            "group 3: rank 1 died: The actor is dead because its node died.; rank 0 raised PeerFailedError: gone",
        ),
        ([bad(0, CommTimeoutError("late"))] * 2, CommTimeoutError, "group 3: rank 0 raised CommTimeoutError: late"),
        ([ok(0), bad(1, CommTimeoutError("nothing"), lost=True)], CommTimeoutError, "group 3: rank 1 gave no answer"),
        ([bad(0, ValueError("a")), bad(1, TypeError("b"))], PeerFailedError, "group 3: rank 0 raised ValueError: a"),
        ([bad(0, DEAD, lost=True)], PeerFailedError, "group 3: rank 0 died"),
    ],
)
def test_anything_else_is_the_groups_and_names_the_nearest_to_the_cause(
    answers: list[Answer], kind: type[Exception], begin: str
) -> None:
    with pytest.raises(kind) as raised:
        result("group 3", answers)
    assert str(raised.value).startswith(begin)


class FakeGroup:
    """Stands for the actors: runs the function that a call carries."""

    def __init__(self, index: int, settings: Any, closing: threading.Event) -> None:
        self.name, self.closing = f"group {index}", closing
        self.members: tuple[int, ...] = ()
        self.starts, self.start_error = 0, None

    def start(self) -> None:
        self.starts += 1
        if self.start_error is not None:
            raise self.start_error
        self.members = (self.starts,)

    def call(self, arguments: bytes) -> Any:
        return pickle.loads(arguments)["run"](self)

    def is_usable(self) -> bool:
        return "unusable" not in self.__dict__

    def stop(self) -> None:
        self.members = ()


def give(value: Any, group: FakeGroup) -> Any:
    return value


def fail(error: Exception, first: int, group: FakeGroup) -> Any:
    """Raise while the group has been started no more than so many times."""
    if group.starts <= first:
        raise error
    return group.starts


def spoil(group: FakeGroup) -> Any:
    group.unusable = True
    raise ValueError("half-way")


def lose(group: FakeGroup, error: Exception | None = None) -> Any:
    """The group fails, and cannot be started again."""
    group.start_error = error or OSError("disk full")
    raise PeerFailedError("gone")


def wait_until_closed(group: FakeGroup) -> Any:
    assert group.closing.wait(60)
    raise XparError("closed")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., PipelineGroups]:
    monkeypatch.setattr(pipeline_groups, "ActorGroup", FakeGroup)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    return partial(PipelineGroups, give, TWO)


def test_calls_run_again_on_a_new_group_a_bounded_number_of_times(fake: Callable[..., PipelineGroups]) -> None:
    with fake(groups=1, retries=2) as groups:
        assert groups.map([{"run": partial(fail, PeerFailedError("gone"), 2)}]) == [3]
        with pytest.raises(CommTimeoutError, match=r"call 1: its group failed in 3 of 3 .*retries=2.* with: late"):
            groups.map([{"run": partial(fail, CommTimeoutError("late"), 99)}])
        assert groups.members == [()]
        assert groups.map([{"run": partial(give, i)} for i in range(4)]) == [0, 1, 2, 3]


def test_an_error_of_a_call_costs_a_group_only_if_it_is_left_unusable(
    fake: Callable[..., PipelineGroups], caplog: pytest.LogCaptureFixture
) -> None:
    with fake(groups=1) as groups:
        with pytest.raises(ValueError, match="mine"):
            groups.map([{"run": partial(fail, ValueError("mine"), 1)}])
        assert groups.members == [(1,)]
        with pytest.raises(ValueError, match="half-way"):
            groups.map([{"run": spoil}])
        assert "group 0: is replaced, since ValueError left it unusable" in caplog.text
        assert groups.map([{"run": partial(give, "again")}]) == ["again"]
        assert groups.members == [(2,)]


def test_a_group_that_cannot_be_started_again_ends_the_call_not_the_object(fake: Callable[..., PipelineGroups]) -> None:
    with fake(groups=2, retries=1) as groups:
        outputs = groups.map([{"run": lose}, {"run": partial(give, 1)}], return_exceptions=True)
        assert isinstance(outputs[0], PeerFailedError) and outputs[1] == 1
        assert "could not be started again: OSError: disk full" in str(outputs[0])


def test_a_new_group_that_does_not_come_up_in_time_ends_the_call_with_that(fake: Callable[..., PipelineGroups]) -> None:
    with fake(groups=1, retries=1) as groups, pytest.raises(CommTimeoutError, match="no answer from its ranks"):
        groups.map([{"run": partial(lose, error=CommTimeoutError("no answer from its ranks"))}])


def test_a_group_that_cannot_be_started_at_first_ends_the_constructor(
    fake: Callable[..., PipelineGroups], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeGroup, "start", lambda group: fail(OSError("no file"), 1, group))
    with pytest.raises(OSError, match="no file"):
        fake(groups=2)


def test_closing_ends_calls_under_way_and_cancels_the_others(fake: Callable[..., PipelineGroups]) -> None:
    groups = fake(groups=1)
    futures = [groups.submit(run=wait_until_closed) for _ in range(2)]
    deadline = time.monotonic() + 60
    while not futures[0].running():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    groups.close()
    assert futures[1].cancelled()
    with pytest.raises(XparError, match="closed"):
        futures[0].result(0)
    with pytest.raises(XparError, match="this PipelineGroups object is closed"):
        groups.submit(run=wait_until_closed)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"groups": 0}, "groups=0: must be an int >= 1"),
        ({"groups": True}, "groups=True"),
        ({"retries": -1}, "retries=-1: must be an int >= 0"),
        ({"num_gpus": 2}, "num_gpus=2: each rank drives one GPU"),
        ({"num_gpus": 0.5}, "num_gpus=0.5: "),
        ({"num_cpus": -1}, "CPU=-1: must be a finite number > 0"),
        ({"num_cpus": 0}, "num_cpus=0: Ray places nothing"),
        ({"resources": {"TPU": "1"}}, "TPU='1': must be a finite number > 0"),
        ({"strategy": "NEAR"}, "strategy='NEAR': .*use one of PACK, SPREAD"),
        ({"start_timeout": 0}, "start_timeout=0: must be a finite number of seconds > 0"),
        ({"call_timeout": float("inf")}, "call_timeout=inf"),
        ({}, "ray: is not initialised"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], text: str
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ConfigError, match=text):
        PipelineGroups(give, TWO, **more)


def test_a_build_that_cannot_be_pickled_is_refused() -> None:
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"build and plans: cannot be pickled .*lock"):
        PipelineGroups(lambda: lock, TWO)


def recipe() -> bytes:
    return bytes(ray.cloudpickle.dumps((partial(pipeline, "flux"), None)))


def test_a_rank_of_one_serves_as_the_plain_pipeline_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get_gpu_ids", list)  # outside of an actor it would start a cluster
    rank = Rank(0, EngineConfig())
    with pytest.raises(XparError, match="has not joined"):
        rank.call(pickle.dumps({}))
    rank.build(recipe())
    rank.join(None)
    output = pickle.loads(rank.call(pickle.dumps(call_arguments("flux"))))
    assert torch.equal(output[0], pipeline("flux")(**call_arguments("flux"))[0])
    rank.check_usable()


class HubError(Exception):
    """Can be pickled and not built again, as some of huggingface_hub's."""

    def __init__(self, text: str, response: Any) -> None:
        super().__init__(text)


def not_found() -> Any:
    raise HubError("404 for the checkpoint", response=None)


def test_an_error_that_cannot_be_built_again_is_put_into_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray, "get_gpu_ids", list)
    with pytest.raises(XparError, match="HubError: 404 for the checkpoint"):
        Rank(0, EngineConfig()).build(bytes(ray.cloudpickle.dumps((not_found, None))))


def test_a_pipeline_left_on_the_cpu_of_a_gpu_actor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[int] = []
    monkeypatch.setattr(ray, "get_gpu_ids", lambda: [5])
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    with pytest.raises(ConfigError, match="build: returned a pipeline on the CPU, but num_gpus=1"):
        Rank(0, TWO).build(recipe())
    assert current == [0]
