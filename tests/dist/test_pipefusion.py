"""PipeFusion: the pipelines' own loops, patch by patch through the stages."""

from typing import Any

import pytest
import torch

from tests.dist.pool import RankPool
from tests.dist.recorder import recorded
from tests.tiny_models import FAMILIES, call_arguments, pipeline, relative_error
from xpar import EngineConfig, Parallel


def tensor(output: Any) -> torch.Tensor:
    return torch.as_tensor(output[0])


def painted(family: str, fields: dict[str, int], layers: int = 2, **call: Any) -> torch.Tensor:
    """What a wrapped pipeline returns on this rank."""
    with Parallel(pipeline(family, layers=layers), EngineConfig(timeout=30, **fields)) as parallel:
        return tensor(parallel(**call_arguments(family, **call)))


def plain(family: str, layers: int = 2, **call: Any) -> torch.Tensor:
    return tensor(pipeline(family, layers=layers)(**call_arguments(family, **call)))


def all_equal(values: list[torch.Tensor]) -> bool:
    return all(torch.equal(value, values[0]) for value in values)


@pytest.mark.parametrize("family", FAMILIES)
def test_warm_up_over_all_steps_is_one_process_to_the_bit(pool2: RankPool, family: str) -> None:
    fields = {"pipefusion_degree": 2, "num_patches": 3, "warmup_steps": 4}
    values = pool2.run(painted, family, fields)
    assert all_equal([plain(family), *values])


@pytest.mark.parametrize("family", FAMILIES)
def test_one_patch_over_stages_is_one_process_to_the_bit(pool3: RankPool, family: str) -> None:
    values = pool3.run(painted, family, {"pipefusion_degree": 3, "num_patches": 1}, 3)
    assert all_equal([plain(family, 3), *values])


@pytest.mark.parametrize("warmup", [0, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_result_depends_on_patches_and_not_on_stages(
    pool2: RankPool, pool3: RankPool, pool4: RankPool, family: str, warmup: int
) -> None:
    fields = {"num_patches": 4, "warmup_steps": warmup}
    values = [painted(family, fields, 4)]
    for pool in (pool2, pool3, pool4):
        values += pool.run(painted, family, {**fields, "pipefusion_degree": pool.size}, 4)
    assert all_equal(values)
    error = relative_error(values[0], plain(family, 4))
    assert 0 < error < 0.2, error


@pytest.mark.parametrize("other", ["ulysses_degree", "ring_degree"])
@pytest.mark.parametrize("family", FAMILIES)
def test_stages_of_shards_give_what_stages_give(pool4: RankPool, family: str, other: str) -> None:
    fields = {"pipefusion_degree": 2, "num_patches": 3}
    alone = painted(family, {"num_patches": 3}, batch=2)
    values = pool4.run(painted_batch, family, {**fields, other: 2})
    assert all_equal(values)
    assert relative_error(values[0], alone) < 1e-5


def painted_batch(family: str, fields: dict[str, int]) -> torch.Tensor:
    return painted(family, fields, batch=2)


def sequence_of_calls(family: str) -> list[torch.Tensor]:
    """Calls of different size, batch and prompt length on one object; the last repeats the first."""
    small = {"height": 32, "width": 64} if family in ("qwen", "wan") else {"height": 8, "width": 12}
    calls: list[dict[str, Any]] = [{}, small, {"batch": 2}, {"text": 9}, {"steps": 2}, {}]
    config = EngineConfig(timeout=30, pipefusion_degree=2, num_patches=3, warmup_steps=0)
    with Parallel(pipeline(family), config) as parallel:
        return [tensor(parallel(**call_arguments(family, **call))) for call in calls]


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_of_one_call_reaches_the_next(pool2: RankPool, family: str) -> None:
    for values in pool2.run(sequence_of_calls, family):
        assert torch.equal(values[0], values[-1])
        assert values[1].shape != values[0].shape and values[2].shape[0] == 2


def weights_of_a_stage() -> tuple[int, int, int, bool, bool, bool]:
    pipe = pipeline("flux")
    model = pipe.transformer
    keys, forwards = list(model.state_dict()), [module.forward for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    blocks = [*model.transformer_blocks, *model.single_transformer_blocks]
    ends = sum(p.numel() for p in model.parameters()) - sum(p.numel() for b in blocks for p in b.parameters())
    sizes = [sum(p.numel() for p in block.parameters()) for block in blocks]
    parallel = Parallel(pipe, EngineConfig(timeout=30, pipefusion_degree=2))
    resident = sum(p.numel() for p in model.parameters() if not p.is_meta)
    owned = [n for block, n in zip(blocks, sizes, strict=True) if not next(block.parameters()).is_meta]
    same_keys = list(model.state_dict()) == keys
    pipe.to(torch.float32)  # passes over the blocks that are elsewhere
    parallel.close(restore_weights=True)
    restored = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    same_forwards = [module.forward for module in model.modules()] == forwards
    return resident, ends + sum(owned), len(owned), same_keys, restored, same_forwards


def test_a_stage_holds_its_blocks_and_the_ends_and_close_brings_the_rest_back(pool2: RankPool) -> None:
    for resident, expected, owned, same_keys, restored, same_forwards in pool2.run(weights_of_a_stage):
        assert resident == expected and owned == 2
        assert same_keys and restored and same_forwards


def closed_without_weights() -> tuple[bool, int]:
    pipe = pipeline("wan")
    Parallel(pipe, EngineConfig(timeout=30, pipefusion_degree=2)).close()
    return "forward" in vars(pipe.transformer), sum(p.is_meta for p in pipe.transformer.parameters())


def test_plain_close_leaves_freed_blocks_gone(pool2: RankPool) -> None:
    for wrapped, gone in pool2.run(closed_without_weights):
        assert not wrapped and gone > 0


def traffic_of_steps() -> dict[str, int]:
    """Elements sent by this stage in 3 steps of which 1 is warm-up, and their number."""
    config = EngineConfig(timeout=30, pipefusion_degree=2, num_patches=4)
    with Parallel(pipeline("flux"), config) as parallel, recorded() as recorder:
        parallel(**call_arguments("flux", text=8, steps=3, true_cfg_scale=1.0, output_type="latent"))
    assert recorder.calls.pop("agreement") == 2  # at the start and at the end, none in a step
    return {"calls": recorder.calls["send"], "elements": recorder.elements["send"], "kinds": len(recorder.calls)}


def test_a_boundary_carries_the_hidden_tokens_once_a_step(pool2: RankPool) -> None:
    """DESIGN 12: S*h per boundary and step, one message a patch; back travel the latents. S = 24 + 8, h = 64."""
    first, last = pool2.run(traffic_of_steps)
    assert first == {"calls": 1 + 2 * 4, "elements": 3 * (24 + 8) * 64, "kinds": 1}
    assert last == {"calls": 1 + 2 * 4, "elements": 3 * 24 * 16, "kinds": 1}


def failure_of_a_rank_pair() -> tuple[str, str]:
    """All ranks raise in a callback; the object then refuses to be used and can still be closed."""

    def callback(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step == 1:
            raise RuntimeError("stop here")
        return tensors

    parallel = Parallel(pipeline("flux"), EngineConfig(timeout=30, pipefusion_degree=2))
    texts = []
    for _ in range(2):
        try:
            parallel(**call_arguments("flux", callback_on_step_end=callback))
        except Exception as error:
            texts.append(f"{type(error).__name__}: {error}")
    parallel.close()
    return texts[0], texts[1]


def test_after_a_failed_call_the_object_says_so(pool2: RankPool) -> None:
    for first, second in pool2.run(failure_of_a_rank_pair):
        assert first == "RuntimeError: stop here"
        assert second.startswith("XparError") and "stop here" in second and "close()" in second


def two_layouts_at_once() -> list[float]:
    """Two live objects with different layouts, called in turn; one is closed and the other goes on."""
    expected = {family: plain(family) for family in ("flux", "sd3")}
    first = Parallel(pipeline("flux"), EngineConfig(timeout=30, ulysses_degree=2, ring_degree=2))
    second = Parallel(pipeline("sd3"), EngineConfig(timeout=30, ring_degree=2, pipefusion_degree=2, warmup_steps=4))
    errors = []
    for family, parallel in (("flux", first), ("sd3", second), ("flux", first)):
        errors.append(relative_error(tensor(parallel(**call_arguments(family))), expected[family]))
    first.close()
    errors.append(relative_error(tensor(second(**call_arguments("sd3"))), expected["sd3"]))
    second.close()
    return errors


def test_two_objects_with_different_layouts_live_side_by_side(pool4: RankPool) -> None:
    for errors in pool4.run(two_layouts_at_once):
        assert max(errors) < 1e-5


def without_a_generator(fields: dict[str, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ranks start from different global seeds; all use what the first would draw."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(11)
    expected = plain("flux", generator=None)
    state = torch.get_rng_state()
    torch.manual_seed(11 + rank)
    value = painted("flux", {**fields, "warmup_steps": 4}, generator=None)
    return value, expected, torch.get_rng_state(), state


@pytest.mark.parametrize("fields", [{"ulysses_degree": 2}, {"pipefusion_degree": 2, "num_patches": 3}])
def test_without_a_generator_all_ranks_draw_what_one_process_draws(pool2: RankPool, fields: dict[str, int]) -> None:
    for value, expected, state, expected_state in pool2.run(without_a_generator, fields):
        assert relative_error(value, expected) < 1e-5
        assert torch.equal(state, expected_state)
