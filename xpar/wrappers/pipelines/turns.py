"""Cooperative turns: several threads of which exactly one runs, in a fixed order.

Threads of the standard library, because handing over costs some 14 microseconds (docs/decisions.md) against
milliseconds of a denoiser call, and greenlets would be one more run-time dependency.
"""

import threading
from collections.abc import Callable

import torch

from xpar.wrappers.pipelines.random_state import RandomState


class LoopEnded(BaseException):
    """Unwinds a patch loop that has nothing left to do, or whose call has failed. No pipeline catches it."""


class Turns:
    """Hands the turn from loop to loop; every loop sees random numbers as if it were alone.

    Args:
        count: number of loops. The last one runs on the thread that calls, the others on their own.
        device: device whose default generator the pipeline draws from.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.count, self.current = count, 0
        self.error: BaseException | None = None
        self.is_orderly = False
        """Whether the call ends at the same place on all ranks, so that what is under way will still arrive."""
        self._device = device
        self._stopped = False
        self._alive = [True] * count
        self._wake = [threading.Semaphore(0) for _ in range(count)]

    @property
    def is_broken(self) -> bool:
        """Whether the call has failed, so that what is under way may never arrive."""
        return self._stopped and not self.is_orderly

    def begin(self, loop: int) -> None:
        """Wait for the first turn of a loop.

        Raises:
            LoopEnded: the call has failed meanwhile.
        """
        if loop > 0 or self.count > 1:
            self._wait(loop)

    def pass_on(self) -> None:
        """Hand over to the next loop that is alive; return when the turn comes back.

        Raises:
            LoopEnded: the call has failed meanwhile.
        """
        loop = self.current
        following = self._next(loop)
        if following == loop:
            return
        random = RandomState.now(self._device)
        self._give(following)
        self._wait(loop)
        random.set()

    def finish(self, loop: int, error: BaseException | None = None) -> None:
        """End a loop: the next one goes on, or, after an error, all are woken to end."""
        self._alive[loop] = False
        if error is not None and self.error is None:
            self.error = error
        if self.error is not None or self._stopped:
            self.stop()
        elif any(self._alive):
            self._give(self._next(loop))

    def stop(self) -> None:
        """Wake every loop so that it ends."""
        self._stopped = True
        for wake in self._wake:
            wake.release()

    def start(self) -> None:
        """Give the first turn."""
        if self.count > 1:
            self._give(0)

    def _next(self, loop: int) -> int:
        order = [(loop + step) % self.count for step in range(1, self.count + 1)]
        return next(index for index in order if self._alive[index])

    def _give(self, loop: int) -> None:
        self.current = loop
        self._wake[loop].release()

    def _wait(self, loop: int) -> None:
        self._wake[loop].acquire()
        if self._stopped:
            raise LoopEnded


def inherit_thread_state(function: Callable[[], None]) -> Callable[[], None]:
    """Make a function run on another thread with this thread's grad and inference mode, autocast and CUDA stream."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    autocast = {name: (torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in devices}
    stream = torch.cuda.current_stream() if torch.cuda.is_available() else None

    def run() -> None:
        if stream is not None:
            torch.cuda.set_stream(stream)  # and its device
        for name, (enabled, dtype) in autocast.items():
            torch.set_autocast_enabled(name, enabled)
            torch.set_autocast_dtype(name, dtype)
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            function()

    return run
