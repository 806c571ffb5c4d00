"""Text, image and VAE encoders run once in a pipeline call; the other patch loops are given the same outputs."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from xpar.wrappers.pipelines.turns import LoopEnded
from xpar.wrappers.replacing import replaced


class EncoderReplay:
    """Records what each encoder returned, call by call, and replays it to the loops that call later.

    While installed, `forward` of every encoder and `encode` of the VAE are replaced on the instances; `decode` ends
    every loop but the last, which alone holds the complete latents.

    Args:
        encoders: (module, method name) pairs to record.
        decoders: (module, method name) pairs at which all loops but the last end.
        current_loop: gives the loop that has the turn.
        last_loop: the loop that decodes.
    """

    def __init__(
        self,
        encoders: list[tuple[nn.Module, str]],
        decoders: list[tuple[nn.Module, str]],
        current_loop: Callable[[], int],
        last_loop: int,
    ) -> None:
        self._encoders, self._decoders = encoders, decoders
        self._current_loop, self._last_loop = current_loop, last_loop
        self._outputs: dict[tuple[int, int], Any] = {}
        self._calls: Counter[tuple[int, int]] = Counter()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Record and replay inside."""
        with ExitStack() as stack:
            for index, (module, method) in enumerate(self._encoders):
                stack.enter_context(replaced(module, method, self._recorder(index, getattr(module, method))))
            for module, method in self._decoders:
                stack.enter_context(replaced(module, method, self._ending(getattr(module, method))))
            yield

    def _recorder(self, index: int, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counter = (index, self._current_loop())
            key = (index, self._calls[counter])
            self._calls[counter] += 1
            if key not in self._outputs:
                self._outputs[key] = inner(*args, **kwargs)
            # a copy each: pipelines may write into what an encoder returned
            return copy.deepcopy(self._outputs[key])

        return call

    def _ending(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._current_loop() != self._last_loop:
                raise LoopEnded
            return inner(*args, **kwargs)

        return call
