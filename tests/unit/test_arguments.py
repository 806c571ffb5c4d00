"""The command-line flags of EngineConfig, which are generated from its fields."""

import argparse

import pytest

from xpar import ConfigError, EngineConfig


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompt", default="a red fox", help="what to paint")
    EngineConfig.add_arguments(parser)
    return parser


def test_flag_surface():
    """Scripts depend on these flags: a change here is a change of the public interface."""
    flags = {
        action.option_strings[0]: action.default
        for action in make_parser()._actions
        if action.option_strings[0] not in ("-h", "--prompt")
    }
    assert flags == {
        "--ulysses_degree": 1,
        "--ring_degree": 1,
        "--pipefusion_degree": 1,
        "--cfg_degree": 1,
        "--dp_degree": 1,
        "--num_patches": None,
        "--warmup_steps": 1,
        "--vae_parallel": "exact",
        "--attention_backend": "auto",
        "--timeout": 600.0,
        "--check_finite": "end",
        "--verify_weights": False,
    }


def test_every_flag_has_help_from_the_line_under_its_field():
    text = make_parser().format_help()
    for action in make_parser()._actions:
        assert action.help and not action.help.startswith("(default"), action.option_strings
    assert "Split the attention heads over this many processes" in " ".join(text.split())


def test_no_flags_give_the_defaults():
    assert EngineConfig.from_arguments(make_parser().parse_args([])) == EngineConfig()


def test_flags_are_parsed_to_the_types_of_the_fields():
    line = (
        "--ulysses_degree 2 --ring_degree 3 --pipefusion_degree 4 --cfg_degree 5 --dp_degree 6 "
        "--num_patches 8 --warmup_steps 0 --vae_parallel tile --attention_backend math --timeout 30 "
        "--check_finite step --verify_weights"
    )
    assert EngineConfig.from_arguments(make_parser().parse_args(line.split())) == EngineConfig(
        ulysses_degree=2,
        ring_degree=3,
        pipefusion_degree=4,
        cfg_degree=5,
        dp_degree=6,
        num_patches=8,
        warmup_steps=0,
        vae_parallel="tile",
        attention_backend="math",
        timeout=30.0,
        check_finite="step",
        verify_weights=True,
    )


def test_none_can_be_said():
    namespace = make_parser().parse_args(["--num_patches", "none"])
    assert EngineConfig.from_arguments(namespace).num_patches is None


@pytest.mark.parametrize(
    ("line", "flag"),
    [
        ("--ulysses_degree 2.0", "--ulysses_degree"),
        ("--num_patches many", "--num_patches"),
        ("--attention_backend fast", "--attention_backend"),
        ("--timeout soon", "--timeout"),
    ],
)
def test_a_flag_of_a_wrong_type_ends_the_parsing(line, flag, capsys):
    with pytest.raises(SystemExit):
        make_parser().parse_args(line.split())
    assert flag in capsys.readouterr().err


def test_a_flag_of_a_wrong_value_is_refused_as_in_code():
    with pytest.raises(ConfigError, match="ulysses_degree=0"):
        EngineConfig.from_arguments(make_parser().parse_args(["--ulysses_degree", "0"]))


def test_other_attributes_are_ignored_and_missing_ones_take_the_default():
    namespace = argparse.Namespace(prompt="a red fox", ulysses_degree=2, unknown=1)
    assert EngineConfig.from_arguments(namespace) == EngineConfig(ulysses_degree=2)


def test_a_namespace_without_any_field_is_refused():
    with pytest.raises(ConfigError, match="add_arguments"):
        EngineConfig.from_arguments(argparse.Namespace(prompt="a red fox"))
