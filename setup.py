"""Metadata and extras of xpar; the settings of the tools are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def version() -> str:
    """The version as written in the package, which is not imported: it would need torch to be there."""
    text = (ROOT / "xpar" / "version.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "(.+)"$', text, flags=re.MULTILINE)
    if match is None:
        raise ValueError('xpar/version.py holds no line of the form __version__ = "..."')
    return match.group(1)


def readme() -> str:
    """The README, which an unfinished checkout may lack."""
    path = ROOT / "README.md"
    return path.read_text(encoding="utf-8") if path.exists() else ""


FLASH = ["flash-attn>=2.6", "yunchang>=0.6"]
TEST = [
    "pytest>=8",
    "pytest-timeout>=2.3",
    "hypothesis>=6.100",
    "psutil>=5.9",
    "numpy>=1.26",
    "pillow>=10",
    "sentencepiece>=0.2",
    "protobuf>=4",
]
DEV = [*TEST, "coverage>=7.6", "ruff>=0.12", "mypy>=1.15", "matplotlib>=3.8"]

setup(
    name="xpar",
    version=version(),
    description="Run one diffusers pipeline on many devices",
    long_description=readme(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["diffusion", "diffusers", "distributed", "inference", "sequence parallelism", "pipeline parallelism"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["xpar", "xpar.*"]),
    package_data={"xpar": ["py.typed"]},
    python_requires=">=3.11",
    # Lower bounds are what the tests run on; upper bounds are the next release that may change what we wrap.
    install_requires=[
        "torch>=2.13,<3",
        "diffusers>=0.42.1,<0.43",
        "transformers>=5.24,<6",
        "accelerate>=1.15,<2",
        "safetensors>=0.8",
    ],
    extras_require={"flash": FLASH, "ray": ["ray>=2.40,<3"], "test": TEST, "dev": DEV},
)
