"""Examines a machine for `python -m xpar doctor`. Every part works without the others: torch itself may be missing."""

import importlib.util
import json
import os
import platform
import resource
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata

# package -> what it is for; the first ones are needed.
_NEEDED = {
    "torch": "everything",
    "diffusers": "the pipelines",
    "transformers": "text encoders",
    "accelerate": "loading models without twice their memory",
    "safetensors": "loading weights",
}
_OPTIONAL = {
    "flash-attn": "attention_backend='flash_attn2' on NVIDIA GPUs; without it torch's own kernels are used",
    "yunchang": "further attention kernels on other devices; never needed to be right",
    "ray": "xpar.ray and examples/ray_flux.py: pipelines held by Ray actors",
}
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    name: str
    value: str
    healthy: bool = True
    """False: something that is needed does not work."""
    advice: str = ""
    """What to do, or what it would be good for."""


@dataclass(frozen=True)
class Report:
    """Findings by section."""

    sections: Mapping[str, list[Finding]]

    @property
    def healthy(self) -> bool:
        """Whether all that is needed works."""
        return all(each.healthy for findings in self.sections.values() for each in findings)

    def to_json(self) -> str:
        """One JSON object with `healthy` and the findings by section."""
        sections = {title: [asdict(each) for each in findings] for title, findings in self.sections.items()}
        return json.dumps({"healthy": self.healthy, **sections}, indent=2) + "\n"

    def to_text(self) -> str:
        """For people: what was found, and at the end what is wrong."""
        lines = []
        for title, findings in self.sections.items():
            lines += ["", title]
            for each in findings:
                mark = "  " if each.healthy else "! "
                lines.append(f"  {mark}{each.name:<24} {each.value}")
                if each.advice:
                    lines.append(f"      {each.advice}")
        wrong = [each for findings in self.sections.values() for each in findings if not each.healthy]
        lines += ["", "All that is needed works." if not wrong else "What is wrong:"]
        lines += [f"- {each.name}: {each.value}. {each.advice}".rstrip() for each in wrong]
        return "\n".join(lines[1:]) + "\n"


def examine(*, limit: float) -> Report:
    """Examine this machine.

    Args:
        limit: seconds that the test on two processes may take.
    """
    sections: dict[str, Callable[[], list[Finding]]] = {
        "Versions": _versions,
        "Environment": _environment,
    }
    if importlib.util.find_spec("torch") is not None:
        # These import torch, which may be what is missing.
        sections |= {"Devices": _devices, "Communication": _backends, "Attention kernels": _kernels}
    findings = {title: look() for title, look in sections.items()}
    if all(each.healthy for each in findings["Versions"]):
        findings["Test on two processes"] = _two_processes(limit)
    return Report(findings)


def _versions() -> list[Finding]:
    found = [Finding(name="python", value=platform.python_version())]
    limits = _required_versions()
    for package, purpose in (_NEEDED | _OPTIONAL).items():
        needed = package in _NEEDED
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            advice = f"pip install {package}; it is {'needed' if needed else 'optional'}, for {purpose}"
            found.append(Finding(name=package, value="is not installed", healthy=not needed, advice=advice))
            continue
        allowed = limits.get(package, "")
        fits = not allowed or _fits(version, allowed)
        advice = "" if fits else f"xpar was tested with {package}{allowed}: pip install '{package}{allowed}'"
        found.append(Finding(name=package, value=version, healthy=fits, advice=advice))
    return found


def _required_versions() -> dict[str, str]:
    """What xpar's own metadata ask for, by package; nothing where xpar is run from a folder and not installed."""
    try:
        lines = metadata.requires("xpar") or []
    except metadata.PackageNotFoundError:
        return {}
    found = {}
    for line in (line for line in lines if "extra ==" not in line):
        name = next((name for name in _NEEDED if line.startswith(name)), None)
        if name is not None:
            found[name] = line.removeprefix(name).strip(" ()")
    return found


def _fits(version: str, allowed: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(allowed).contains(version, prereleases=True)


def _devices() -> list[Finding]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        cores = os.cpu_count() or 1
        return [Finding(name="cpu", value=f"{cores} cores; no CUDA device, so pipelines run on the CPU")]
    found = []
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        value = f"{properties.name}, {properties.total_memory / _GIB:.0f} GiB"
        found.append(Finding(name=f"cuda:{index}", value=value))
    return found


def _backends() -> list[Finding]:
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        advice = "install a build of torch with torch.distributed"
        return [Finding(name="torch.distributed", value="is not in this torch", healthy=False, advice=advice)]
    gloo, nccl, gpus = dist.is_gloo_available(), dist.is_nccl_available(), torch.cuda.device_count()
    return [
        Finding(name="gloo", value="there" if gloo else "missing", healthy=gloo),
        Finding(
            name="nccl",
            value="there" if nccl else "missing",
            healthy=nccl or gpus < 2,
            advice="" if nccl else "needed between GPUs only; it comes with torch's CUDA builds",
        ),
    ]


def _kernels() -> list[Finding]:
    from xpar.core.long_ctx_attention.self_check import check_kernels

    return [
        Finding(
            name=f"{each.backend} on {each.device}",
            value=each.reason or f"log-sum-exp right: merged from two parts, off by {each.error:.1e} from fp64",
            healthy=each.reason == "" or not each.wrong,
            advice="do not use this attention_backend; 'auto' or 'math' is right" if each.wrong else "",
        )
        for each in check_kernels()
    ]


def _two_processes(limit: float) -> list[Finding]:
    from xpar.self_test import run_self_test

    return [
        Finding(name=name, value=value, healthy=healthy, advice=advice)
        for name, value, healthy, advice in run_self_test(limit)
    ]


def _environment() -> list[Finding]:
    found = []
    for name, advice in (
        ("GLOO_SOCKET_IFNAME", "gloo chooses a network by the host's name; on several nodes name one, e.g. eth0"),
        ("NCCL_SOCKET_IFNAME", "nccl chooses a network itself; on several nodes name one if it chooses wrongly"),
        ("OMP_NUM_THREADS", "torchrun sets 1; on CPUs use cores / processes"),
    ):
        value = os.environ.get(name)
        found.append(Finding(name=name, value=value or "not set", advice="" if value else advice))
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = files != resource.RLIM_INFINITY and files < 1024
    advice = "each process group takes a few sockets for each peer; say `ulimit -n 4096`" if few else ""
    found.append(Finding(name="open files (ulimit -n)", value=str(files), advice=advice))
    if os.path.isdir("/dev/shm"):  # noqa: PTH112 - one path of Linux, asked about only
        size = shutil.disk_usage("/dev/shm")
        small = size.free < _GIB
        advice = "nccl and Ray keep buffers there; in a container say `--shm-size=8g`" if small else ""
        value = f"{size.free / _GIB:.1f} of {size.total / _GIB:.1f} GiB free"
        found.append(Finding(name="/dev/shm", value=value, advice=advice))
    return found
