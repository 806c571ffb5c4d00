"""Bad configurations and bad input are refused before the first collective, on every rank in the same words."""

import re
from typing import Any

import pytest
import torch

from tests.dist import bad_input
from tests.dist.pool import RankPool
from tests.tiny_models import bare_pipe, call_arguments, inputs, pipeline, relative_error, transformer, variant
from xpar import EngineConfig, Parallel

# name of a function in bad_input -> what the text says: the field, the value, the rule, the fix
CONSTRUCTIONS = {
    "more_stages_than_blocks": r"pipefusion_degree\(2\) is more than the 1 blocks.*use at most 1",
    "no_pipeline": r"Linear is no diffusers pipeline: it has no components",
    "a_dict_for_config": r"config must be an EngineConfig, got dict",
    "no_transformer": r"has no transformer component \(it has unet\)",
    "unknown_transformer": r"no plan is known for MyTransformer; known are .*FluxTransformer2DModel.*plans=\{MyTransf",
    "plan_for_a_name": r"plans=\{'FluxTransformer2DModel': .*: must map classes to ModelPlan; pass plans=",
    "plan_key_that_matches_nothing": r"streams \['hidden'\] of the plan are no arguments of its blocks",
    "own_attention": r"transformer_blocks\.1\.attn has the processor AttnProcessor, .*way of its own.*set one",
    "own_attention_backend": r"attn computes attention with the backend 'sage'.*set_attention_backend\('native'\)",
    "unknown_autoencoder": r"Upscaler.*vae_parallel='off'",
    "wrapped_already": r"transformer is wrapped already; close\(\) the other Parallel",
    "device_map": r"spread by device_map; load it without one",
    "sequential_offload": r"transformer has weights on the meta device.*remove_all_hooks\(\)",
    "quantised_layer": r"single_transformer_blocks\.1\.proj_out\.weight is a Quantised: pipefusion_degree > 1.*use",
    "backend_for_another_device": r"attention_backend='flash_attn3'.*'auto'",
}
CALLS = {
    "dp_more_than_batch": r"dp_degree\(2\) is more than the 1 picture\(s\).*pass more prompts",
    "generators_of_another_number": r"generator is a list of 3, but the call makes 2 picture\(s\); pass one",
    "unknown_keyword": r"unexpected keyword argument 'guidance_scales'; did you mean 'guidance_scale'",
    "prompt_and_embeds": r"Cannot forward both `prompt`: a fox and `prompt_embeds`: a tensor of shape \(1, 7, 32\)",
    "neither_prompt_nor_embeds": r"Provide either `prompt` or `prompt_embeds`",
    "neither_under_dp": r"Provide either `prompt` or `prompt_embeds`",
    "empty_prompts": r"prompt is \[\]: a call makes at least one picture; pass at least one",
    "empty_embeds": r"prompt_embeds is a tensor of shape \(0, 7, 16\): a call makes at least one picture",
    "no_pictures": r"num_images_per_prompt=0: must be at least 1; leave it out",
    "unknown_output_type": r"output_type='jpeg' is unknown; choose one of 'pil', 'np', 'pt', 'latent'",
    "unknown_video_output_type": r"output_type='mp4' is unknown; choose one of 'pil', 'np', 'pt', 'latent'",
    "latents_of_too_many_tokens": r"latents have shape \(1, 25, 16\), but FluxPipeline works with \(1, 24, 16\) for",
    "latents_not_packed": r"latents have shape \(1, 4, 8, 12\), but QwenImagePipeline works with \(1, 24, 16\) for",
    "latents_of_other_channels": r"latents have shape \(1, 5, 6, 9\), but StableDiffusion3Pipeline works with \(1, 4",
    "latents_of_other_rows": r"latents have shape \(2, 4, 3, 6, 10\), but WanPipeline works with \(1, 4, 3, 6, 10\)",
    "latents_of_a_picture_for_a_video": r"latents have shape \(1, 4, 6, 10\), but WanPipeline works with .*pass that",
    "more_patches_than_tokens": r"num_patches=25 is more than the 24 tokens of 1 picture.*use num_patches <= 24",
    "more_patches_than_tokens_of_a_picture": r"num_patches=8 is more than the 7 tokens of .*height=2, width=14; use",
    "more_patches_than_tokens_of_a_video": r"num_patches=46 is more than the 45 tokens of .*num_frames=",
    "height_in_words": r"height='tall' \(str\): must be a number; pass an int",
    "no_steps": r"num_inference_steps=0: must be a number of steps >= 1; pass 1",
    "negative_steps": r"num_inference_steps=-1: must be a number of steps >= 1",
    "steps_in_words": r"num_inference_steps='four': must be a number of steps >= 1",
    "no_steps_after_strength": r"strength=0\.0 leaves none of the num_inference_steps.*pass a strength above 0",
    "strength_above_one": r"The value of strength should in \[0\.0, 1\.0\] but is 1\.5",
    "height_that_does_not_divide": r"`height` and `width` have to be divisible by 2 but are 13 and 18",
    "width_that_does_not_divide": r"`height` and `width` have to be divisible by 16 but are 48 and 81",
    "callback_tensors_that_are_none": r"`callback_on_step_end_tensor_inputs` has to be in .*but found \['noise'\]",
}
pytestmark = pytest.mark.timeout(300)  # the first test starts two ranks and makes all objects

FAMILY = {"ValueError", "TypeError", "NotImplementedError"}

Refusals = dict[str, tuple[str, list[str], float]]


def all_refusals(names: list[str]) -> Refusals:
    """What this rank says to each row."""
    said = {}
    for name in names:
        said[name] = bad_input.refused(getattr(bad_input, name)())
        while bad_input.open_objects:
            bad_input.open_objects.pop().close()
    return said


@pytest.fixture(scope="module")
def refusals(pool2: RankPool) -> list[Refusals]:
    """What each of two ranks says to each row; made at once, since objects are made by all ranks together."""
    return pool2.run(all_refusals, [*CONSTRUCTIONS, *CALLS], timeout=200)


@pytest.mark.parametrize("name", [*CONSTRUCTIONS, *CALLS])
def test_it_is_refused_in_the_same_words_before_anything_is_communicated(refusals: list[Refusals], name: str) -> None:
    texts = [of_rank[name][0] for of_rank in refusals]
    assert re.search((CONSTRUCTIONS | CALLS)[name], texts[0], flags=re.DOTALL), texts[0]
    assert texts[0] == texts[1]
    for _, classes, seconds in (of_rank[name] for of_rank in refusals):
        assert FAMILY & set(classes) and seconds < 1


def product() -> tuple[str, list[str], float]:
    return bad_input.refused(
        bad_input.wrong_product(), allowed=("all_gather", "all_gather_object", "all_gather_single")
    )


def test_a_wrong_product_of_degrees_is_refused_once_ranks_agree_on_it_and_before_any_group(pool2: RankPool) -> None:
    """A rank that refused alone would keep a better configured one waiting, so configurations are compared first."""
    first, second = pool2.run(product)
    assert "ring_degree(2) * ulysses_degree(2) = 4 does not equal the world size 2; launch 4 processes" in first[0]
    assert first[0] == second[0] and "ValueError" in first[1] and first[2] < 1


def too_many_patches() -> list[Any]:
    """More patches than tokens in a pipeline that makes its latents of a picture: shows in the first denoiser call."""
    said: list[Any] = []
    for fields in ({"ulysses_degree": 2}, {"pipefusion_degree": 2}):
        pipe, more = variant("flux img2img")
        with Parallel(pipe, EngineConfig(timeout=25, num_patches=25, **fields)) as parallel:
            try:
                parallel(**call_arguments(more.pop("family"), **more))
            except NotImplementedError as error:
                said.append(str(error))
    return said


def test_more_patches_than_tokens_of_a_given_picture_are_refused_on_every_rank(pool2: RankPool) -> None:
    first, second = pool2.run(too_many_patches)
    assert first == second and len(first) == 2
    for text in first:
        assert re.search(r"num_patches\(25\) is more than the 24 tokens of hidden_states; use num_patches <= 24", text)


# Legal: what the plain pipeline takes, and looks wrong.


def legal_latents() -> list[float]:
    """SD3 and Wan take latents of another size than height and width say; the picture then has that size."""
    errors = []
    for family, shape in (("sd3", (1, 4, 7, 8)), ("wan", (1, 4, 2, 4, 6)), ("flux", (2, 24, 16))):
        draw = torch.Generator().manual_seed(3)
        more = {"latents": torch.randn(shape, generator=draw), "output_type": "latent", "batch": shape[0]}
        expected = pipeline(family)(**call_arguments(family, **more))[0]
        with Parallel(pipeline(family), EngineConfig(ulysses_degree=2, timeout=25)) as parallel:
            errors.append(relative_error(parallel(**call_arguments(family, **more))[0], expected))
    return errors


def test_latents_of_a_size_that_the_plain_pipeline_takes_are_taken(pool2: RankPool) -> None:
    for errors in pool2.run(legal_latents):
        assert max(errors) < 1e-5


def ring_with_a_mask() -> float:
    model, arguments = transformer("qwen"), inputs("qwen", 25, batch=2)
    expected = model(**arguments, return_dict=False)[0]
    with Parallel(bare_pipe(model), EngineConfig(ring_degree=2, timeout=25)):
        return relative_error(model(**arguments, return_dict=False)[0], expected)


def test_a_mask_with_ring_is_taken(pool2: RankPool) -> None:
    assert max(pool2.run(ring_with_a_mask)) < 1e-5
