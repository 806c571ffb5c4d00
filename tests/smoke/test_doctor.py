"""`python -m xpar doctor` on this machine, and on one where processes cannot reach each other."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from xpar import doctor, self_test
from xpar.core.long_ctx_attention import self_check
from xpar.doctor import Finding, Report

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 240
pytestmark = pytest.mark.timeout(LIMIT + 60)


def run_doctor(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own; the test on two processes must end within its own limit."""
    command = [sys.executable, "-m", "xpar", "doctor", "--limit", str(LIMIT), *flags]
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT + 50, env=settings, check=False)


@pytest.mark.slow
def test_a_machine_that_works() -> None:
    done = run_doctor()
    assert done.returncode == 0, done.stdout + done.stderr
    for section in (
        "Versions",
        "Environment",
        "Devices",
        "Communication",
        "Attention kernels",
        "Test on two processes",
    ):
        assert f"\n{section}\n" in f"\n{done.stdout}", done.stdout
    assert "cpu on cpu" in done.stdout and "log-sum-exp right" in done.stdout
    assert "ulysses_degree=2" in done.stdout and "ring_degree=2" in done.stdout
    assert done.stdout.endswith("All that is needed works.\n")


@pytest.mark.slow
def test_processes_that_cannot_reach_each_other() -> None:
    done = run_doctor("--json", GLOO_SOCKET_IFNAME="nosuch0")
    report = json.loads(done.stdout)
    assert done.returncode == 1 and report["healthy"] is False
    (finding,) = report["Test on two processes"]
    assert not finding["healthy"] and "failed" in finding["value"] and "nosuch0" in finding["value"]
    assert "GLOO_SOCKET_IFNAME=nosuch0 must name a network interface" in finding["advice"]
    assert all(each["healthy"] for title in ("Versions", "Attention kernels") for each in report[title])


def test_a_test_that_does_not_end_is_ended() -> None:
    ((_, value, healthy, advice),) = self_test.run_self_test(0.01)
    assert not healthy and value == "did not end within 0.01 s" and "--limit" in advice


def test_what_is_missing_or_too_old_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if package in ("accelerate", "ray"):
            raise importlib.metadata.PackageNotFoundError(package)
        return "0.1"

    monkeypatch.setattr(doctor.metadata, "version", version)
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: ["diffusers<0.43,>=0.42.1", 'ray>=2; extra == "ray"'])
    report = doctor.examine(limit=1)
    found = {each.name: each for each in report.sections["Versions"]}
    assert not report.healthy and "Test on two processes" not in report.sections
    assert not found["accelerate"].healthy and found["accelerate"].advice.startswith("pip install accelerate")
    assert found["ray"].healthy and "optional" in found["ray"].advice
    assert not found["diffusers"].healthy and "pip install 'diffusers<0.43,>=0.42.1'" in found["diffusers"].advice
    assert "What is wrong:\n- diffusers: 0.1." in report.to_text()


def test_a_kernel_with_a_wrong_log_sum_exp_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that returns zeros for it, as a known package does."""
    right = self_check.attend_with_lse

    def wrong(*args: object, backend: str, **kwargs: object) -> object:
        out, lse = right(*args, backend=backend, **kwargs)
        return (out, lse * 0) if backend == "math" else (out, lse)

    monkeypatch.setattr(self_check, "attend_with_lse", wrong)
    checks = {check.backend: check for check in self_check.check_kernels() if not check.reason}
    assert checks["math"].wrong and not checks["cpu"].wrong and checks["cpu"].error < 1e-6


def test_the_text_ends_with_what_is_wrong() -> None:
    good, bad = Finding(name="a", value="1"), Finding(name="b", value="2", healthy=False, advice="do this")
    assert Report({"Part": [good, bad]}).to_text().endswith("What is wrong:\n- b: 2. do this\n")
    assert json.loads(Report({"Part": [good]}).to_json())["healthy"] is True
