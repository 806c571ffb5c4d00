"""How to read a plan: what xpar must know about a transformer class, as data.

The model's own `forward` runs unchanged. Only its *blocks* are told about: which of their arguments carry tokens and
come back from them, which others have a dim that runs over tokens, and which attention modules span the sequence. The
first block that is reached cuts the streams to this rank's tokens, every block cuts its other per-token arguments, and
after the last block the tokens are gathered, so embeddings, rotary tables, output head and unpatchify need no change.

    ModelPlan(
        blocks=("transformer_blocks", "single_transformer_blocks"),    # ModuleLists, in execution order
        streams=("hidden_states", "encoder_hidden_states"),            # block arguments [B, S, C], main stream first
        returns=("encoder_hidden_states", "hidden_states"),            # order in which a block returns them
        attention={"attn": ("encoder_hidden_states", "hidden_states")},  # module in a block: streams in its order
        per_token={"image_rotary_emb": Tokens(dim=0, streams=("encoder_hidden_states", "hidden_states"))},
    )
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn

from xpar.errors import UnsupportedError


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """A tensor with a dim that runs over the tokens of one or more joined streams.

    Args:
        dim: the token dim.
        streams: the streams that this dim covers, in order.
        ndim: the tensor is per token only if it has this many dims, else it is the same for all tokens and left alone
            (Wan's modulation is [B, 6, C], or [B, S, 6, C] with per-token timesteps). None: always per token.
    """

    dim: int
    streams: tuple[str, ...]
    ndim: int | None = None


PerToken = Tokens | tuple[Tokens, ...]


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """What is known about one transformer class.

    Args:
        blocks: attribute paths of the ModuleLists of blocks, in execution order.
        streams: block arguments that carry tokens, shape [B, S, C]; the one that the output head reads comes first.
        returns: the streams in the order in which a block returns them.
        attention: pattern of a module's name inside a block -> streams that it joins, in its own order. Attention that
            no pattern matches stays local (cross-attention to replicated text).
        per_token: other block arguments with a token dim; a tuple describes a tuple argument element by element.
        masks: block arguments [B, S] that mask keys of a stream, from which the attention builds its own mask.
        inputs: root arguments (a tensor or a list of them) that are added between blocks (ControlNet residuals).
        head: module whose first argument is the main stream after everything that follows the blocks; None: the tokens
            are gathered as the last block returns.
        batch: root arguments with a batch dim (dim 0, also of tensors in lists and dicts), the main input first; needed
            for the cfg and dp axes.
        unbatched: root arguments without one. Every root argument is named in one of the two, flags excepted.
        modulation: patterns of Linear layers inside a block that see one row per sample and cost nothing per token.
    """

    blocks: tuple[str, ...]
    streams: tuple[str, ...]
    returns: tuple[str, ...]
    attention: Mapping[str, tuple[str, ...]]
    per_token: Mapping[str, PerToken] = field(default_factory=dict)
    masks: Mapping[str, str] = field(default_factory=dict)
    inputs: Mapping[str, Tokens] = field(default_factory=dict)
    head: str | None = None
    batch: tuple[str, ...] = ()
    unbatched: tuple[str, ...] = ()
    modulation: tuple[str, ...] = ("norm*", "*_mod.*")

    def block_modules(self, transformer: nn.Module) -> list[tuple[str, nn.Module]]:
        """(name, block) of every block, in execution order.

        Raises:
            UnsupportedError: a path of `blocks` is not there or holds no block.
        """
        found = []
        for path in self.blocks:
            children = list(getattr_path(transformer, path).named_children())
            found += [(f"{path}.{index}", block) for index, block in children]
        if not found:
            raise UnsupportedError(
                f"{type(transformer).__name__}: blocks={self.blocks} hold no block; correct the plan."
            )
        return found

    def attention_modules(self, block: nn.Module) -> Iterator[tuple[str, nn.Module, tuple[str, ...]]]:
        """(name, module, streams) of the attention modules of a block that span the sequence."""
        for name, module in block.named_modules():
            for pattern, streams in self.attention.items():
                if fnmatch(name, pattern):
                    yield name, module, streams
                    break

    @classmethod
    def of_branches(cls, transformer: nn.Module) -> "ModelPlan":
        """What is certain about any transformer: enough to compute guidance branches that are calls of their own."""
        parameters = forward_signature(transformer).parameters
        main = next(iter(parameters.values()), None)
        if main is None or main.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
            raise UnsupportedError(
                f"{type(transformer).__name__} does not name its inputs in forward; pass a ModelPlan."
            )
        return cls(blocks=(), streams=(), returns=(), attention={}, batch=(main.name,))

    def check_batch(self, transformer: nn.Module) -> None:
        """Refuse a plan that does not say of every root argument whether it has a batch dim.

        Raises:
            UnsupportedError: naming the arguments that are missing, or that the forward does not have.
        """
        name, parameters = type(transformer).__name__, forward_signature(transformer).parameters
        unknown = [key for key in (*self.batch, *self.unbatched) if key not in parameters]
        flags = [key for key, parameter in parameters.items() if isinstance(parameter.default, bool)]
        missing = [key for key in parameters if key not in (*self.batch, *self.unbatched, *flags)]
        if not self.batch or unknown or missing:
            raise UnsupportedError(
                f"{name}: cfg_degree and dp_degree need a plan whose batch and unbatched name its forward's arguments; "
                f"missing: {missing}, not there: {unknown}"
            )

    def check(self, transformer: nn.Module) -> None:
        """Refuse a plan that does not fit the transformer: a key that matches nothing would silently split nothing.

        Raises:
            UnsupportedError: a block list, attention pattern, argument or head of the plan does not exist.
        """
        name = type(transformer).__name__
        blocks = self.block_modules(transformer)
        parameters: set[str] = set()
        matched: set[str] = set()
        for _, block in blocks:
            parameters |= set(forward_signature(block).parameters)
            matched |= {p for p in self.attention for n, _ in block.named_modules() if fnmatch(n, p)}
        for kind, keys in (("streams", self.streams), ("per_token", self.per_token), ("masks", self.masks)):
            missing = [key for key in keys if key not in parameters]
            if missing:
                raise UnsupportedError(
                    f"{name}: {kind} {missing} of the plan are no arguments of its blocks: {sorted(parameters)}."
                )
        if not self.attention:
            raise UnsupportedError(f"{name}: the plan names no attention that spans the sequence.")
        unmatched = [pattern for pattern in self.attention if pattern not in matched]
        if unmatched:
            raise UnsupportedError(f"{name}: attention patterns {unmatched} of the plan match no module of its blocks.")
        missing = [key for key in self.inputs if key not in forward_signature(transformer).parameters]
        if missing:
            raise UnsupportedError(f"{name}: inputs {missing} of the plan are no arguments of its forward.")
        if self.head is not None:
            getattr_path(transformer, self.head)


def forward_signature(module: nn.Module) -> inspect.Signature:
    """Signature of a module's forward as its class defines it, without `self`."""
    signature = inspect.signature(type(module).forward)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def named_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a module's forward by name, those of a `**kwargs` parameter beside the others."""
    signature = forward_signature(module)
    arguments = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments.update(arguments.pop(name, {}))
    return arguments


def getattr_path(module: nn.Module, path: str) -> Any:
    """The submodule at a dotted path.

    Raises:
        UnsupportedError: there is no such submodule.
    """
    try:
        return module.get_submodule(path)
    except AttributeError as error:
        raise UnsupportedError(f"{type(module).__name__} has no module {path!r}, which the plan names.") from error


def map_tensors(function: Any, tree: Any) -> Any:
    """Apply a function to every tensor of nested tuples, lists and dicts (model outputs are dicts); keep the types."""
    if torch.is_tensor(tree):
        return function(tree)
    if isinstance(tree, dict):
        return type(tree)(**{key: map_tensors(function, value) for key, value in tree.items()})
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_tensors(function, value) for value in tree)
    return tree


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors of nested tuples, lists and dicts, in order."""
    return leaves_of(tree, torch.Tensor)


def leaves_of(tree: Any, kind: type) -> list[Any]:
    """What is of a kind in nested tuples, lists and dicts, in order."""
    if isinstance(tree, kind):
        return [tree]
    if isinstance(tree, dict):
        return [x for value in tree.values() for x in leaves_of(value, kind)]
    if isinstance(tree, (list, tuple)):
        return [x for item in tree for x in leaves_of(item, kind)]
    return []
