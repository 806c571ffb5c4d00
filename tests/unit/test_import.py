"""`import xpar` is cheap, starts nothing, and offers the public names."""

import subprocess
import sys

import pytest

import xpar


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    return done.stdout.strip()


def test_import_loads_neither_torch_nor_diffusers():
    code = (
        "import sys, xpar; print([m for m in ('torch', 'diffusers', 'transformers', 'flash_attn') if m in sys.modules])"
    )
    assert run(code) == "[]"


def test_config_and_errors_load_no_torch():
    code = "import sys; from xpar import EngineConfig, ConfigError; EngineConfig(); print('torch' in sys.modules)"
    assert run(code) == "False"


def test_parallel_loads_no_transformers_and_starts_no_process_group():
    code = (
        "import sys; from xpar import Parallel; import torch.distributed as dist; "
        "print('transformers' in sys.modules, dist.is_initialized())"
    )
    assert run(code) == "False False"


def test_public_names():
    assert xpar.__version__
    for name in xpar.__all__:
        assert getattr(xpar, name) is not None
        assert name in dir(xpar)


def test_errors_keep_their_builtin_bases():
    assert issubclass(xpar.ConfigError, ValueError)
    assert issubclass(xpar.UnsupportedError, NotImplementedError)
    for name in xpar.__all__:
        if name.endswith("Error"):
            assert issubclass(getattr(xpar, name), xpar.XparError)


def test_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'Paralel'"):
        _ = xpar.Paralel
