"""The example's command, as docs/ray.md and README.md give it."""

import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline
from PIL import Image

from tests.smoke.test_readme import LIMIT, README, ROOT, blocks, run

pytest.importorskip("ray")

PROMPTS = ["a blue ring on a black background", "a red circle on a white background", "a green square"]


@pytest.mark.slow
@pytest.mark.timeout(LIMIT + 30)
def test_the_example_paints_each_prompt_in_its_place(tmp_path: Path) -> None:
    (block,) = blocks((ROOT / "docs" / "ray.md").read_text(encoding="utf-8"), "sh")
    assert block.strip() in README
    python, script, *flags = shlex.split(block)
    assert python == "python"
    more = ["--steps", "2", "--size", "64", "--output", str(tmp_path / "pictures"), "--prompts", *PROMPTS]
    text = run([sys.executable, str(ROOT / script), *flags, *more], tmp_path)
    assert "3 pictures in" in text and "on 2 x 2 actors" in text
    assert sorted(path.name for path in tmp_path.glob("pictures/*")) == ["000.png", "001.png", "002.png"]
    pipe = FluxPipeline.from_pretrained(ROOT / "examples" / "assets" / "tiny-flux", dtype=torch.float32)
    for index, prompt in enumerate(PROMPTS):
        generator = torch.Generator().manual_seed(index)
        plain = pipe(prompt, height=64, width=64, num_inference_steps=2, generator=generator).images[0]
        with Image.open(tmp_path / "pictures" / f"{index:03d}.png") as picture:
            # Rounding may move a channel by one step of 255.
            assert abs(np.asarray(picture, dtype=int) - np.asarray(plain, dtype=int)).max() <= 1, prompt
