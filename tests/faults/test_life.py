"""Many objects, one after the other and at the same time; closed, forked and in other people's processes."""

import os
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.dist.pool import RankPool
from tests.faults.harness import LIMIT, SLACK, Rank, run_ranks
from tests.faults.jobs import PIPEFUSION, ULYSSES, Answer, answer_of, config
from tests.faults.test_numbers import sha256
from tests.tiny_models import call_arguments, pipeline, relative_error
from xpar import ConfigError, EngineConfig, Parallel, load_pipeline

pytestmark = pytest.mark.timeout(LIMIT + 80)


def create_again_and_again() -> tuple[set[str], list[int], list[int]]:
    """Hashes, descriptors and threads of ten lives of an object."""
    pipe = pipeline("flux")
    hashes, descriptors, threads = set(), [], []
    for _ in range(10):
        with Parallel(pipe, config(**ULYSSES)) as parallel:
            hashes.add(sha256(parallel(**call_arguments("flux"))[0]))
        dist.barrier()
        process = psutil.Process()
        descriptors.append(process.num_fds())
        threads.append(process.num_threads())
    return hashes, descriptors, threads


def test_ten_objects_one_after_the_other(pool2: RankPool) -> None:
    """F24: what a destroyed group leaves behind goes with the next; nothing grows."""
    for hashes, descriptors, threads in pool2.run(create_again_and_again, timeout=LIMIT):
        assert len(hashes) == 1
        assert max(descriptors[2:]) - descriptors[1] <= 8, descriptors
        assert max(threads[2:]) - threads[1] <= 4, threads


def use_two_at_once() -> tuple[float, float, float]:
    """Errors of two objects' interleaved calls, and of the second once the first is closed."""
    pipes = pipeline("flux"), pipeline("sd3")
    expected = [pipe(**call_arguments(name))[0] for pipe, name in zip(pipes, ("flux", "sd3"), strict=True)]
    first = Parallel(pipes[0], config(**ULYSSES))
    second = Parallel(pipes[1], config(ring_degree=2))
    errors = []
    for _ in range(2):
        errors.append(relative_error(first(**call_arguments("flux"))[0], expected[0]))
        errors.append(relative_error(second(**call_arguments("sd3"))[0], expected[1]))
    first.close()
    last = relative_error(second(**call_arguments("sd3"))[0], expected[1])
    second.close()
    return max(errors[::2]), max(errors[1::2]), last


def test_two_objects_at_once(pool2: RankPool) -> None:
    """F25."""
    for errors in pool2.run(use_two_at_once):
        assert max(errors) < 1e-5


def use_after_close(fields: dict[str, int]) -> Answer:
    parallel = Parallel(pipeline("flux"), config(**fields))
    parallel(**call_arguments("flux"))
    parallel.close()
    parallel.close()
    return answer_of(lambda: parallel(**call_arguments("flux")))


@pytest.mark.parametrize("fields", [ULYSSES, PIPEFUSION], ids=["ulysses", "pipefusion"])
def test_a_call_after_close(pool2: RankPool, fields: dict[str, int]) -> None:
    """F26: refused; closing twice is fine."""
    for answer in pool2.run(use_after_close, fields):
        assert answer.kind == "XparError" and "closed" in answer.text, answer
        assert answer.seconds < 0.1 * SLACK


def call_in_a_fork() -> tuple[str, float]:
    """What a call says in a forked child, and the error of the parent's next call."""
    pipe = pipeline("flux")
    expected = pipe(**call_arguments("flux"))[0]
    with Parallel(pipe, config(**ULYSSES)) as parallel:
        parallel(**call_arguments("flux"))
        receiver, sender = os.pipe()
        child = os.fork()
        if child == 0:
            answer = answer_of(lambda: parallel(**call_arguments("flux")))
            parallel.close()
            os.write(sender, f"{answer.kind}: {answer.text} after {answer.seconds:.1f} s".encode())
            os.kill(os.getpid(), 9)  # leave without the tests' own clean-up
        os.close(sender)
        with os.fdopen(receiver) as stream:
            text = stream.read()
        os.waitpid(child, 0)
        return text, relative_error(parallel(**call_arguments("flux"))[0], expected)


def test_a_call_after_a_fork(pool2: RankPool) -> None:
    """F30: the child is told at once, and can close its copy; the parent's object works on."""
    for text, error in pool2.run(call_in_a_fork):
        assert text.startswith("XparError: process id changed from") and "spawn" in text, text
        assert text.endswith("after 0.0 s")
        assert error < 1e-5


def use_the_users_groups() -> tuple[float, float, bool]:
    """The sum of a user's group before and after, and the error of a call in between."""
    group = dist.new_group(list(range(dist.get_world_size())))
    pipe = pipeline("flux")
    expected = pipe(**call_arguments("flux"))[0]
    with Parallel(pipe, config(**ULYSSES), group=group) as parallel:
        error = relative_error(parallel(**call_arguments("flux"))[0], expected)
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    dist.all_reduce(total)
    dist.destroy_process_group(group)
    return error, float(total), dist.is_initialized()


def test_the_users_groups_are_left_alone(pool2: RankPool) -> None:
    """F31."""
    for error, total, is_initialized in pool2.run(use_the_users_groups):
        assert error < 1e-5 and total == 4 and is_initialized


def test_one_process() -> None:
    """F32: the plain result to the last bit, and no group."""
    pipe = pipeline("flux")
    expected = pipe(**call_arguments("flux"))[0]
    with Parallel(pipe, EngineConfig()) as parallel:
        assert torch.equal(parallel(**call_arguments("flux"))[0], expected)
    assert not dist.is_initialized()


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self.path}'",)


def load(path: str) -> Answer:
    return answer_of(lambda: load_pipeline(path))


@pytest.mark.parametrize("kind", ["pickled", "cut short"])
def test_a_bad_checkpoint(pool2: RankPool, tmp_path: Path, kind: str) -> None:
    """F33: refused on every rank, in the same words; what is in it does not run."""
    pipeline("flux").save_pretrained(tmp_path / "pipe")
    (weights,) = (tmp_path / "pipe" / "transformer").glob("*.safetensors")
    if kind == "pickled":
        weights.unlink()
        torch.save({"payload": Payload(tmp_path / "has run")}, weights.with_suffix(".bin"))
    else:
        weights.write_bytes(weights.read_bytes()[:-100])
    answers = pool2.run(load, str(tmp_path / "pipe"))
    assert len({answer.text for answer in answers}) == 1
    for answer in answers:
        assert answer.kind == ConfigError.__name__, answer
        assert "transformer" in answer.text and answer.seconds < 10
    assert not (tmp_path / "has run").exists()


def call_on_two_threads(where: Rank) -> tuple[Answer, Answer]:
    """What a call says while another thread's is under way, and what that one says."""
    parallel = Parallel(pipeline("flux"), config(**ULYSSES))
    inside, go_on = threading.Event(), threading.Event()

    def callback(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        inside.set()
        go_on.wait(10)
        return tensors

    answers = []
    arguments = call_arguments("flux", callback_on_step_end=callback)
    thread = threading.Thread(target=lambda: answers.append(answer_of(lambda: parallel(**arguments))))
    thread.start()
    inside.wait(20)
    second = answer_of(lambda: parallel(**call_arguments("flux")))
    go_on.set()
    thread.join()
    parallel.close()
    return second, Answer(answers[0].kind, answers[0].text, answers[0].seconds)


def test_a_second_thread_is_refused() -> None:
    """A call on another thread is refused at once, and the one that is running goes on."""
    for outcome in run_ranks(call_on_two_threads):
        assert outcome.exit_code == 0, (outcome, outcome.log)
        second, first = outcome.value
        assert second.kind == "XparError" and "in a call on another thread" in second.text, second
        assert first.kind == "", first
