"""EngineConfig: what it accepts, what it refuses, and how the refusal reads."""

import dataclasses

import pytest

from xpar import ConfigError, EngineConfig

DEGREES = ["dp_degree", "cfg_degree", "pipefusion_degree", "ring_degree", "ulysses_degree"]


def test_defaults_are_one_process():
    config = EngineConfig()
    assert config.world_size == 1
    assert config.patches == 1
    assert config.warmup_steps == 1
    assert config.timeout == 600


def test_is_frozen_and_keyword_only():
    config = EngineConfig(ulysses_degree=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.ulysses_degree = 4
    with pytest.raises(TypeError):
        EngineConfig(2)
    with pytest.raises(TypeError, match="ulises_degree"):
        EngineConfig(ulises_degree=2)
    assert hash(config) == hash(EngineConfig(ulysses_degree=2))


@pytest.mark.parametrize("name", DEGREES)
@pytest.mark.parametrize("value", [0, -1, True, False, 2.0, "2", None, float("nan"), [2]])
def test_refuses_a_degree_that_is_no_positive_int(name, value):
    with pytest.raises(ConfigError, match=name) as error:
        EngineConfig(**{name: value})
    assert repr(value) in str(error.value)
    assert "must be an int >= 1" in str(error.value)


def test_two_negative_degrees_do_not_make_a_product():
    with pytest.raises(ConfigError, match="ring_degree=-2"):
        EngineConfig(ulysses_degree=-2, ring_degree=-2)


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "4"])
def test_refuses_num_patches(value):
    with pytest.raises(ConfigError, match="num_patches"):
        EngineConfig(num_patches=value)


@pytest.mark.parametrize("value", [-1, True, 1.0, "1", None])
def test_refuses_warmup_steps(value):
    with pytest.raises(ConfigError, match="warmup_steps"):
        EngineConfig(warmup_steps=value)


@pytest.mark.parametrize("value", [0, -1, True, "60", None, float("inf"), float("nan")])
def test_refuses_timeout(value):
    with pytest.raises(ConfigError, match="timeout"):
        EngineConfig(timeout=value)


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_refuses_verify_weights(value):
    with pytest.raises(ConfigError, match=r"verify_weights=.* must be True or False"):
        EngineConfig(verify_weights=value)


@pytest.mark.parametrize("value", ["", "FLASH", "sdpa", None, 1])
def test_refuses_attention_backend_and_names_the_choices(value):
    with pytest.raises(ConfigError, match=r"attention_backend.*auto.*flash"):
        EngineConfig(attention_backend=value)


def test_legal_edges():
    assert EngineConfig(warmup_steps=0).warmup_steps == 0
    assert EngineConfig(timeout=1).timeout == 1
    # Patches on one stage, and fewer patches than stages, are slow but right.
    assert EngineConfig(num_patches=3).patches == 3
    assert EngineConfig(pipefusion_degree=4, num_patches=1).patches == 1


@pytest.mark.parametrize(("stages", "patches"), [(1, 1), (2, 4), (3, 6), (8, 16)])
def test_default_patches_follow_the_stages(stages, patches):
    assert EngineConfig(pipefusion_degree=stages).patches == patches


def test_errors_are_value_errors():
    with pytest.raises(ValueError, match="ring_degree"):
        EngineConfig(ring_degree=0)


def test_world_size_is_the_product():
    config = EngineConfig(dp_degree=2, cfg_degree=2, pipefusion_degree=3, ring_degree=5, ulysses_degree=7)
    assert config.world_size == 420
    config.check_world_size(420)


@pytest.mark.parametrize("world_size", [1, 4, 16, 7])
def test_wrong_world_size_prints_the_whole_equation(world_size):
    config = EngineConfig(pipefusion_degree=2, ulysses_degree=4)
    with pytest.raises(ConfigError) as error:
        config.check_world_size(world_size)
    assert (
        "dp_degree(1) * cfg_degree(1) * pipefusion_degree(2) * ring_degree(1) * ulysses_degree(4) = 8 "
        f"does not equal the world size {world_size}; launch 8 processes" in str(error.value)
    )


def test_the_suggested_degrees_have_the_right_product():
    config = EngineConfig(pipefusion_degree=2, ulysses_degree=4, cfg_degree=2)
    for world_size in range(1, 33):
        if world_size == config.world_size:
            continue
        with pytest.raises(ConfigError) as error:
            config.check_world_size(world_size)
        text = str(error.value).partition("e.g. ")[2].removesuffix(" and the others 1")
        degrees = {name: int(value) for name, value in (part.split("=") for part in text.split(", "))}
        assert EngineConfig(**degrees).world_size == world_size
