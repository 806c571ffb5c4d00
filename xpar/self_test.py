"""A test on two processes of this machine: a tiny transformer through `Parallel`, against one process.

`run_self_test` starts the processes (`python -m xpar.self_test RANK FOLDER SECONDS`), which meet over a file and leave
their results in the folder. They are killed when the time is up.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

__all__ = ["run_self_test"]

_RANKS = 2
_METHODS = ("ulysses_degree", "ring_degree")
# Seconds that a process gets to end once the other one has failed.
_GRACE = 5.0
# What an exact method may differ by in fp32.
_TOLERANCE = 1e-4

Line = tuple[str, str, bool, str]


def run_self_test(limit: float) -> list[Line]:
    """Run the test.

    Args:
        limit: seconds that it may take, the start of both processes included.

    Returns:
        (name, what was found, whether it works, what to do) for each method.
    """
    with tempfile.TemporaryDirectory(prefix="xpar_doctor_") as name:
        folder = Path(name)
        processes = [_start(rank, folder, limit) for rank in range(_RANKS)]
        codes = _wait(processes, limit)
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        if failed is not None:
            told = _result_of(failed, folder).get("failure") or _last_line(folder / f"{failed}.log")
            value = f"process {failed} failed: {told or f'exit code {codes[failed]}'}"
            return [("two processes", value, False, _advice("see what it says"))]
        if None in codes:
            advice = "give it more seconds with --limit; on a machine with nothing else to do it takes about ten"
            return [("two processes", f"did not end within {limit:g} s", False, _advice(advice))]
        results = [_result_of(rank, folder) for rank in range(_RANKS)]
    return [_describe(method, [result[method] for result in results]) for method in _METHODS]


def _describe(method: str, measured: list[dict[str, float]]) -> Line:
    error, seconds = (max(each[key] for each in measured) for key in ("error", "seconds"))
    right = error <= _TOLERANCE
    value = f"relative error {error:.1e} against one process, {seconds:.2f} s"
    advice = "" if right else "results over ranks are wrong on this machine; please report it"
    return f"{method}={_RANKS}", value, right, advice


def _start(rank: int, folder: Path, limit: float) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with (folder / f"{rank}.log").open("wb") as log:
        command = [sys.executable, "-m", "xpar.self_test", str(rank), str(folder), str(limit)]
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def _wait(processes: list[subprocess.Popen[bytes]], limit: float) -> list[int | None]:
    """Wait for all; exit codes, None for those that had to be killed when the time was up."""
    deadline = time.monotonic() + limit
    try:
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            if any(process.poll() for process in processes):  # the others now wait for one that is gone
                deadline = min(deadline, time.monotonic() + _GRACE)
            time.sleep(0.05)
        return [process.poll() for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def _result_of(rank: int, folder: Path) -> dict[str, Any]:
    """What a process left; empty if it left nothing."""
    path = folder / f"{rank}.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def _advice(otherwise: str) -> str:
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface is None:
        return f"{otherwise}; if processes cannot reach each other, set GLOO_SOCKET_IFNAME=lo (one machine)"
    return f"{otherwise}; GLOO_SOCKET_IFNAME={interface} must name a network interface of this machine, e.g. lo"


def _rank(rank: int, folder: Path, limit: float) -> dict[str, Any]:
    """Body of one process: compute alone, then together, and compare."""
    from datetime import timedelta
    from types import SimpleNamespace

    import torch
    import torch.distributed as dist

    from xpar import EngineConfig, Parallel

    where: dict[str, Any] = {"init_method": f"file://{folder / 'store'}", "rank": rank, "world_size": _RANKS}
    dist.init_process_group("gloo", timeout=timedelta(seconds=limit), **where)
    model, inputs = _tiny_flux()
    pipe = SimpleNamespace(components={"transformer": model}, _execution_device=torch.device("cpu"))
    results: dict[str, Any] = {}
    with torch.inference_mode():
        alone = model(**inputs, return_dict=False)[0]
        for method in _METHODS:
            start = time.perf_counter()
            fields: dict[str, Any] = {method: _RANKS, "timeout": limit}
            with Parallel(pipe, EngineConfig(**fields)):
                together = model(**inputs, return_dict=False)[0]
            error = float((together - alone).norm() / alone.norm())
            results[method] = {"error": error, "seconds": time.perf_counter() - start}
    dist.destroy_process_group()
    return results


def _tiny_flux() -> tuple[Any, dict[str, Any]]:
    """A random transformer whose heads and tokens two ranks cannot share evenly, and inputs for it."""
    import torch
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=32,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 4, 8),
    ).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():  # anew: weights that start at zero would hide errors
        scale = 1 / math.sqrt(parameter[0].numel()) if parameter.ndim > 1 else 0.2
        parameter.data.copy_(scale * torch.randn(parameter.shape, generator=generator))
    tokens = torch.arange(25)
    inputs = {
        "hidden_states": torch.randn(1, 25, 16, generator=generator),
        "encoder_hidden_states": torch.randn(1, 7, 32, generator=generator),
        "pooled_projections": torch.randn(1, 16, generator=generator),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.stack([torch.zeros(25), tokens // 5, tokens % 5], 1).float(),
        "txt_ids": torch.zeros(7, 3),
    }
    return model, inputs


def _main(rank: str, folder: str, limit: str) -> int:
    try:
        result = _rank(int(rank), Path(folder), float(limit))
    except Exception as error:  # noqa: BLE001 - whatever it is, the doctor is to say it
        result = {"failure": f"{type(error).__name__}: {error}"}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(result), encoding="utf-8")
    return int("failure" in result)


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
