"""What the watcher sees of other threads."""

import gc
import threading
import weakref

import torch

from xpar.core.distributed.watcher import _whereabouts


def test_to_look_where_a_thread_is_keeps_nothing_of_it_alive() -> None:
    """No activation may wait for the garbage collector because a beat fell into its time."""
    holds, may_end = threading.Event(), threading.Event()
    seen: list[weakref.ref[torch.Tensor]] = []

    def compute() -> None:
        activation = torch.zeros(1)
        seen.append(weakref.ref(activation))
        holds.set()
        may_end.wait(10)

    thread = threading.Thread(target=compute)
    thread.start()
    gc.disable()
    try:
        assert holds.wait(10)
        is_inside, at = _whereabouts(thread.ident or 0)
        may_end.set()
        thread.join()
        assert seen[0]() is None
        assert not is_inside
        assert "threading.py" in at
    finally:
        gc.enable()
