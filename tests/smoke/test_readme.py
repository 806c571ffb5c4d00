"""What README.md and docs/plans.md tell a user to run is run here as it stands there, so that they cannot drift."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from PIL import Image

from xpar.wrappers.models import PLANS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LIMIT = 240
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def blocks(text: str, language: str) -> list[str]:
    """The fenced code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def replace(text: str, *pairs: tuple[str, str]) -> str:
    """Replace strings that must be there."""
    for old, new in pairs:
        assert old in text, f"README.md no longer says {old!r}: adapt this test"
        text = text.replace(old, new)
    return text


def run(command: Sequence[str], folder: Path, limit: float = LIMIT) -> str:
    """What a command prints; it must succeed, and it and all its children are killed after `limit` seconds."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
    }
    log = folder / "output.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_tree(process)
    text = log.read_text()
    assert code == 0, f"{shlex.join(command)}: {'no end' if code is None else f'exit code {code}'}\n{text[-6000:]}"
    return text


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill whatever is left of a process, of its group, and of its children: torchrun gives its ranks other groups."""
    try:
        children = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        children = []
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()


def demo_command() -> list[str]:
    """The command that README.md says `make demo` runs, with this Python's torchrun."""
    (block,) = blocks(README, "sh")
    words = shlex.split(block)
    assert words[0] == "torchrun"
    return [*TORCHRUN, *(str(ROOT / word) if word.endswith(".py") else word for word in words[1:])]


@pytest.mark.slow
@pytest.mark.timeout(LIMIT + 30)
def test_demo_paints_and_compares(tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    text = run([*demo_command(), "--num_inference_steps", "4", "--output", str(picture)], tmp_path)
    assert re.search(r"^one process: .* s; (PSNR \d+\.\d dB|no pixel differs)", text, flags=re.MULTILINE), text
    with Image.open(picture) as image:
        assert image.size == (256, 256)


def test_demo_is_what_make_runs() -> None:
    (block,) = blocks(README, "sh")
    assert block.strip().removeprefix("torchrun ") in (ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(LIMIT + 30)
def test_snippets_run_in_one_process(tmp_path: Path) -> None:
    (diff,) = blocks(README, "diff")
    (undo,) = blocks(README, "python")
    fewer = ("num_inference_steps=28", "num_inference_steps=2, height=128, width=128")
    lines = [line[1:] for line in diff.splitlines() if not line.startswith("-")]
    adapted = replace(
        "\n".join(lines),
        ("black-forest-labs/FLUX.1-dev", str(ROOT / "examples" / "assets" / "tiny-flux")),
        ('torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))', "torch.set_num_threads(1)"),
        ("dtype=torch.bfloat16", "dtype=torch.float32"),
        ('.to("cuda")', '.to("cpu")'),
        ("ulysses_degree=4, pipefusion_degree=2", "ulysses_degree=1, pipefusion_degree=1"),
        fewer,
    )
    undo = replace(undo, ("pipefusion_degree=2", "num_patches=2"), fewer)
    script = tmp_path / "snippets.py"
    script.write_text(f"{adapted}\npipe.close()\npipe = pipe.pipe\n{undo}\n", encoding="utf-8")
    run([sys.executable, str(script)], tmp_path)
    assert (tmp_path / "fox.png").exists()


def test_six_lines_are_added() -> None:
    (diff,) = blocks(README, "diff")
    assert sum(line.startswith("+") for line in diff.splitlines()) == 6


def test_every_planned_transformer_is_in_the_table() -> None:
    assert set(re.findall(r"^\| (\w+) \| .*yes", README, flags=re.MULTILINE)) == set(PLANS)


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT + 30)
def test_the_plan_of_the_docs_is_right(tmp_path: Path) -> None:
    (block,) = blocks((ROOT / "docs" / "plans.md").read_text(encoding="utf-8"), "python")
    script = tmp_path / "check_plan.py"
    script.write_text(block, encoding="utf-8")
    assert run([sys.executable, str(script)], tmp_path).count("the plan is right") == 1
    text = run([*TORCHRUN, "--standalone", "--nproc_per_node=2", str(script)], tmp_path)
    assert text.count("the plan is right") == 2


@pytest.mark.slow
@pytest.mark.timeout(LIMIT + 30)
def test_speed_benchmark_runs_and_its_results_are_right(tmp_path: Path) -> None:
    methods = ["ulysses", "ring", "pipefusion-2", "wrapped"]
    command = [sys.executable, str(ROOT / "benchmarks" / "speed.py"), "--size", "128", "--steps", "2", "--rounds", "1"]
    run([*command, "--output-dir", str(tmp_path), "--methods", *methods], tmp_path)
    assert "| ulysses 2 | 2 x 1 |" in (tmp_path / "speed.md").read_text()
    assert (tmp_path / "speed.json").exists()
    with Image.open(tmp_path / "speed.png") as chart:
        assert chart.width > 400
