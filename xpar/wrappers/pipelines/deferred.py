"""A value that another rank computes, while the pipeline goes on."""

import operator
from collections.abc import Callable
from typing import Any

from xpar.wrappers.models.plan import leaves_of

# Asking for one of these needs the value; slicing, casting and arithmetic can wait with it.
_METADATA = "shape dtype device ndim size dim numel layout stride is_floating_point is_cuda requires_grad data_ptr"
_NEEDS_VALUE = frozenset(f"{_METADATA} item tolist numpy cpu keys values items to_tuple".split(" "))


class Deferred:
    """Stands for a denoiser's output, or what is made of it, until the value is there.

    Indexing, attributes, methods, operators and torch functions give another `Deferred` while the value is still on
    its way, and the real thing afterwards. Whatever cannot wait asks for the value.

    Args:
        make: computes the value from others that are there.
        is_ready: whether `make` would return without communication.
    """

    __slots__ = ("_is_ready", "_known", "_make", "_result")

    def __init__(self, make: Callable[[], Any], is_ready: Callable[[], bool]) -> None:
        self._make, self._is_ready = make, is_ready
        self._known, self._result = False, None

    def value(self) -> Any:
        """The value; communicates if it has not arrived."""
        if not self._known:
            self._result = settle(self._make())
            self._known = True
        return self._result

    def _then(self, function: Callable[[Any], Any]) -> Any:
        if self._known or self._is_ready():
            return function(self.value())
        return Deferred(lambda: function(self.value()), self._is_ready)

    def __getitem__(self, index: Any) -> Any:
        return self._then(lambda value: value[settle(index)])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in _NEEDS_VALUE:
            return getattr(self.value(), name)
        return self._then(lambda value: getattr(value, name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what this will be (a method of the value, say)."""
        return self._then(lambda method: method(*settle(args), **settle(kwargs)))

    def __iter__(self) -> Any:
        return iter(self.value())

    def __len__(self) -> int:
        return len(self.value())

    def __bool__(self) -> bool:
        return bool(self.value())

    def __float__(self) -> float:
        return float(self.value())

    def __neg__(self) -> Any:
        return self._then(operator.neg)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        waiting = [x for x in leaves_of((args, kwargs or {}), Deferred) if not (x._known or x._is_ready())]
        if not waiting:
            return func(*settle(args), **settle(kwargs or {}))
        return Deferred(
            lambda: func(*settle(args), **settle(kwargs or {})), lambda: all(x._known or x._is_ready() for x in waiting)
        )


def _operator(name: str) -> Callable[[Deferred, Any], Any]:
    function = getattr(operator, name)

    def apply(self: Deferred, other: Any) -> Any:
        return Deferred.__torch_function__(function, (), (self, other))

    return apply


def _reflected(name: str) -> Callable[[Deferred, Any], Any]:
    function = getattr(operator, name)

    def apply(self: Deferred, other: Any) -> Any:
        return Deferred.__torch_function__(function, (), (other, self))

    return apply


for _name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "matmul", "mod"):
    setattr(Deferred, f"__{_name}__", _operator(_name))
    setattr(Deferred, f"__r{_name}__", _reflected(_name))
for _name in ("lt", "le", "gt", "ge"):
    setattr(Deferred, f"__{_name}__", _operator(_name))


def settle(tree: Any) -> Any:
    """The tree with every deferred value in its nested tuples, lists, dicts and slices replaced by the value."""
    if isinstance(tree, Deferred):
        return tree.value()
    if isinstance(tree, dict):
        return type(tree)(**{k: settle(v) for k, v in tree.items()}) if leaves_of(tree, Deferred) else tree
    if type(tree) in (list, tuple):
        return type(tree)(settle(item) for item in tree)
    return tree
