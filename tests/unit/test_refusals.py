"""What shows only where it is computed is refused there, in words that say what helps."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tests.tiny_models import call_arguments, pipeline
from tests.tiny_vaes import tiny_vae
from xpar import ConfigError, EngineConfig, Parallel, UnsupportedError
from xpar.core.distributed.collectives import exchange_splits, start_ring_exchange
from xpar.core.halo import Levels, Split
from xpar.core.shard_groups import ShardGroups
from xpar.wrappers.layers.token_flow import TokenFlow, View
from xpar.wrappers.models.flux import FLUX
from xpar.wrappers.pipelines.rows import RowSplit, cut_batch
from xpar.wrappers.vae import parallel_vae
from xpar.wrappers.vae.checks import check_layers, check_tiles
from xpar.wrappers.vae.exact import Cut, run_split
from xpar.wrappers.vae.ops import SplitOps
from xpar.wrappers.vae.plans import find_vae_plan

X = torch.zeros(1, 2, 4, 6)
WEIGHT = torch.zeros(2, 2, 3, 3)


# ---- communication ---------------------------------------------------------------------------------------------------


def test_sizes_that_do_not_fit_a_buffer() -> None:
    with pytest.raises(ConfigError, match=r"send_sizes=\[2\] and receive_sizes=\[3\] do not fit .*of 3"):
        exchange_splits(torch.zeros(3), [2], [3], None)


@pytest.mark.parametrize(("send", "receive"), [(0, 1), (1, 0)])
def test_an_exchange_in_a_ring_is_never_empty(send: int, receive: int) -> None:
    with pytest.raises(ConfigError, match=f"must not be empty: sending {send} and receiving {receive} elements"):
        start_ring_exchange(torch.zeros(send), receive, None)


# ---- the pipeline and its transformer --------------------------------------------------------------------------------


def test_an_object_whose_construction_failed_has_no_pipeline() -> None:
    with pytest.raises(AttributeError, match="pipe"):
        _ = Parallel.__new__(Parallel).pipe


class Changed(TorchFunctionMode):
    """Attention with some arguments changed."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.changes = changes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        changes = self.changes if func is F.scaled_dot_product_attention else {}
        return func(*args, **{**(kwargs or {}), **changes})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"dropout_p": 0.5}, r"attn: dropout_p=0\.5 would differ between ranks; use eval mode"),
        (
            {"attn_mask": torch.zeros(1, 1, 1, 9)},
            r"attn: an attention mask of shape \(1, 1, 1, 9\) covers neither the",
        ),
    ],
)
def test_attention_that_cannot_be_spread(changes: dict[str, Any], text: str) -> None:
    class Processor(FluxAttnProcessor):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            with Changed(**changes):
                return super().__call__(*args, **kwargs)

    pipe = pipeline("flux")
    pipe.transformer.set_attn_processor(Processor())
    with Parallel(pipe, EngineConfig(num_patches=2)) as parallel, pytest.raises(UnsupportedError, match=text):
        parallel(**call_arguments("flux"))


def test_tokens_are_asked_for_before_a_block_is_reached() -> None:
    flow = TokenFlow(FLUX, ShardGroups(None, None), 1, View())
    with pytest.raises(UnsupportedError, match="no block of the plan has been reached"):
        _ = flow.partition


def test_rows_that_are_not_those_of_the_inputs() -> None:
    with pytest.raises(UnsupportedError, match=r"shape \(3, 2\) has not the 4 rows .* use dp_degree=1"):
        RowSplit([]).gather(torch.zeros(3, 2), 4)


def test_an_argument_with_rows_that_the_plan_does_not_know() -> None:
    plan = replace(FLUX, batch=("hidden_states",), unbatched=())
    with pytest.raises(UnsupportedError, match="transformer: argument extra has 4 rows but is not named"):
        cut_batch({"hidden_states": torch.zeros(4, 2), "extra": torch.zeros(4)}, 4, slice(0, 2), plan, "transformer")


# ---- the autoencoder -------------------------------------------------------------------------------------------------


def levels() -> Levels:
    return Levels({-2: Split.deal(4, 1, 0)})


ACTIONS: dict[str, tuple[Callable[[], Any], str]] = {
    "a convolution that pads by a name": (
        lambda: F.conv2d(X, WEIGHT, padding="same"),
        "padding='same' cannot be split over ranks",
    ),
    "attention with dropout": (
        lambda: F.scaled_dot_product_attention(X, X, X, dropout_p=0.1),
        r"dropout_p=0\.1, .* is not what this autoencoder is known to compute; use vae_parallel='off'",
    ),
    "interpolation over rows": (
        lambda: F.interpolate(X, scale_factor=2, mode="bilinear"),
        "mode='bilinear' reaches over rows",
    ),
    "pooling": (lambda: F.avg_pool2d(X, 2), "avg_pool2d is not known to be right over a split picture"),
}


@pytest.mark.parametrize("name", ACTIONS)
def test_functions_that_a_split_picture_cannot_have(name: str) -> None:
    action, text = ACTIONS[name]
    with SplitOps(levels(), None, "full"), pytest.raises(UnsupportedError, match=text):
        action()


def test_padding_where_an_adapter_has_brought_the_neighbours() -> None:
    ops = SplitOps(levels(), None, "full")
    with (
        ops,
        ops.haloed(),
        pytest.raises(UnsupportedError, match="padding mode 'reflect' in a convolution"),
    ):
        F.pad(X, (0, 0, 1, 1), "reflect")


def test_attention_over_frames_outside_of_its_module() -> None:
    mask = torch.zeros(24, 24)
    with (
        SplitOps(levels(), None, "causal"),
        pytest.raises(UnsupportedError, match="outside of the module"),
    ):
        F.scaled_dot_product_attention(*(torch.zeros(1, 1, 24, 2) for _ in "qkv"), attn_mask=mask)


def test_an_argument_of_another_size_than_the_picture() -> None:
    cut = Cut({-2: Split.deal(4, 1, 0)}, {-2: Split.deal(4, 1, 0)})
    with pytest.raises(UnsupportedError, match=r"shape \(1, 1, 6, 6\) cannot be cut like one of 4 rows"):
        run_split(
            lambda x, mask: x,
            (X, torch.zeros(1, 1, 6, 6)),
            {},
            cut,
            group=None,
            attention="full",
            adapters=[],
            to_all=True,
        )


def test_layers_that_a_user_has_changed() -> None:
    vae = tiny_vae("AutoencoderKL")
    plan = find_vae_plan(vae)
    vae.decoder.conv_in.padding_mode = "circular"
    with pytest.raises(UnsupportedError, match="circular padding cannot be split over ranks"):
        check_layers(vae, plan)
    vae = tiny_vae("AutoencoderKL")
    vae.decoder.extra = torch.nn.BatchNorm2d(2)
    with pytest.raises(UnsupportedError, match=r"batch norm in training mode .* call vae\.eval\(\)"):
        check_layers(vae.train(), plan)
    vae = tiny_vae("AutoencoderTiny")
    vae.register_to_config(upsample_fn="bilinear")
    with pytest.raises(UnsupportedError, match="upsample_fn='bilinear' reaches over rows"):
        check_layers(vae, find_vae_plan(vae))


def test_tiles_whose_decoder_draws_noise() -> None:
    with pytest.raises(UnsupportedError, match="draws noise, tile by tile"):
        check_tiles(tiny_vae("AutoencoderKLLTXVideo"), draws=True)


def test_the_peak_of_a_method_that_there_is_not() -> None:
    vae = parallel_vae(tiny_vae("AutoencoderKL"), None)
    with pytest.raises(ConfigError, match="name='paint' is neither 'decode' nor 'encode'"):
        vae.peak_bytes((1, 4, 4, 4), "paint")
    vae.close()
