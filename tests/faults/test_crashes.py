"""A rank that dies or raises ends all others within two seconds, with its own words where it left some."""

import pytest

from tests.faults.harness import LIMIT, Outcome, ended_with, free_port, run_ranks
from tests.faults.jobs import FROM_FIRST_STAGE, PIPEFUSION, ULYSSES, ULYSSES3, allocate_too_much, faulty_call

pytestmark = pytest.mark.timeout(LIMIT + 20)

BOTH = pytest.mark.parametrize("fields", [ULYSSES, PIPEFUSION], ids=["ulysses", "pipefusion"])
# In a ring of stages the last rank waits for a live one that waits for the failed one.
THREE = pytest.mark.parametrize(
    ("fields", "failing"), [(ULYSSES3, 1), (FROM_FIRST_STAGE, 0)], ids=["ulysses", "pipefusion"]
)


def was_killed(outcome: Outcome) -> None:
    assert outcome.exit_code == -9, outcome


@BOTH
def test_a_rank_killed_before_the_first_step(fields: dict[str, int]) -> None:
    """F1."""
    survivor, killed = run_ranks(faulty_call, arguments=(fields, "first step", "die"))
    was_killed(killed)
    ended_with(survivor, "PeerFailedError", "rank 1", "connection lost", "step 0")


@THREE
def test_a_killed_rank_ends_two_others(fields: dict[str, int], failing: int) -> None:
    """F1 with three ranks."""
    outcomes = run_ranks(faulty_call, 3, arguments=(fields, "first step", "die", failing))
    was_killed(outcomes.pop(failing))
    for survivor in outcomes:
        ended_with(survivor, "PeerFailedError", f"rank {failing}", "connection lost", "step 0")


def test_a_killed_rank_that_held_the_store() -> None:
    """F1, where the ranks' last place to leave a word has gone too."""
    killed, survivor = run_ranks(faulty_call, arguments=(ULYSSES, "block", "die", 0), port=free_port())
    was_killed(killed)
    ended_with(survivor, "PeerFailedError", "connection lost", "all_to_all", "step 1", "rank 0")


def test_a_rank_killed_in_an_all_to_all() -> None:
    """F2."""
    survivor, killed = run_ranks(faulty_call, arguments=(ULYSSES, "all_to_all", "die"))
    was_killed(killed)
    parts = "rank 1", "connection lost", "all_to_all in group ulysses of ranks 0, 1", "layer transformer_blocks.1.attn"
    ended_with(survivor, "PeerFailedError", *parts, "step 1")


def test_a_rank_killed_between_two_patches() -> None:
    """F3."""
    survivor, killed = run_ranks(faulty_call, arguments=(PIPEFUSION, "receive", "die"))
    was_killed(killed)
    ended_with(survivor, "PeerFailedError", "rank 1", "connection lost", "of patch", "with rank 1", "step")


@BOTH
def test_an_exception_in_a_block(fields: dict[str, int]) -> None:
    """F4."""
    other, failed = run_ranks(faulty_call, arguments=(fields, "block", "raise"))
    ended_with(failed, "ValueError", "boom on rank 1")
    ended_with(other, "PeerFailedError", "rank 1 raised ValueError", "in denoising, step", "boom on rank 1")


@THREE
def test_an_exception_in_a_block_ends_two_others(fields: dict[str, int], failing: int) -> None:
    """F4 with three ranks."""
    outcomes = run_ranks(faulty_call, 3, arguments=(fields, "block", "raise", failing))
    ended_with(outcomes.pop(failing), "ValueError", f"boom on rank {failing}")
    for other in outcomes:
        ended_with(other, "PeerFailedError", f"rank {failing} raised ValueError", f"boom on rank {failing}")


@BOTH
def test_an_exception_in_the_callback(fields: dict[str, int]) -> None:
    """F5."""
    other, failed = run_ranks(faulty_call, arguments=(fields, "callback", "raise"))
    ended_with(failed, "ValueError", "boom on rank 1")
    ended_with(other, "PeerFailedError", "rank 1 raised ValueError", "step 3", "boom on rank 1")


@BOTH
def test_an_exception_in_the_autoencoder(fields: dict[str, int]) -> None:
    """F6."""
    other, failed = run_ranks(faulty_call, arguments=(fields, "decode", "raise"))
    ended_with(failed, "ValueError", "boom on rank 1")
    ended_with(other, "PeerFailedError", "rank 1 raised ValueError (in vae, step 6)", "boom on rank 1")


def test_a_rank_out_of_device_memory() -> None:
    """F20, as CUDA says it."""
    other, failed = run_ranks(faulty_call, arguments=(ULYSSES, "block", "out of memory"))
    ended_with(failed, "OutOfMemoryError", "CUDA out of memory")
    ended_with(other, "PeerFailedError", "rank 1 raised OutOfMemoryError", "CUDA out of memory")


def test_after_a_failed_allocation_a_new_object_works() -> None:
    """F20, with an allocation that the system refuses; both ranks wrap the pipeline again."""
    other, failed = run_ranks(allocate_too_much)
    assert (failed.value["kind"], other.value["kind"]) == ("RuntimeError", "PeerFailedError"), (failed, other)
    for outcome in (other, failed):
        assert "can't allocate memory" in outcome.value["text"], outcome.value
        assert outcome.value["error afterwards"] < 1e-5
        assert outcome.exit_code == 0, outcome
