"""The conditions a trial runs under: threads, determinism, random state; and the record of all that moves numbers."""

import os
import platform
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from blocks.families import MixerModule
from search_space.records import TrialSpec

ISA_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
    "OMP_NUM_THREADS",
    "CUBLAS_WORKSPACE_CONFIG",
)
"""Environment variables that change which instructions, or how many threads, compute a number."""
CUBLAS_DETERMINISTIC = ":4096:8"


@contextmanager
def imposed(spec: TrialSpec) -> Iterator[None]:
    """Threads, deterministic mode and the dropout stream as the spec says; all as before afterwards."""
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    devices = [torch.cuda.current_device()] if spec.device == "cuda" else []
    if spec.deterministic and spec.device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_DETERMINISTIC)
    try:
        torch.set_num_threads(spec.threads)
        torch.use_deterministic_algorithms(spec.deterministic)
        # Filling is a debugging aid for reads of unset memory; it decides no number and costs time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(spec.seeds.dropout)
            yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


def environment() -> dict[str, str]:
    """What this process computes with: everything a replay must impose again or compare."""
    found = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu_model": _cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()).lower(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "mkl": str(torch.backends.mkl.is_available()).lower(),
        "mkldnn": str(torch.backends.mkldnn.is_available()).lower(),
    }
    found.update({f"env/{name}": os.environ[name] for name in ISA_VARIABLES if name in os.environ})
    if torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda)
        found["cudnn"] = str(torch.backends.cudnn.version())
        found["gpu"] = torch.cuda.get_device_name()
    return found


def backends(model: torch.nn.Module) -> dict[str, str]:
    """Per op, which implementation the mixers were built with and why not the others; layers that differ are joined."""
    found: dict[str, list[str]] = {}
    for module in model.modules():
        if isinstance(module, MixerModule):
            for op, record in module.backends.items():
                found.setdefault(op, []).append(record)
    return {op: " | ".join(dict.fromkeys(records)) for op, records in found.items()}


def begin_peak(device: str) -> int:
    """Start measuring peak memory; the bytes already in use, to hand to `peak_bytes`.

    On a CPU the kernel's high-water mark is set back where it allows that, else only growth beyond the old mark shows.
    """
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return 0
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return _high_water()
    return _process_bytes("VmRSS")


def peak_bytes(device: str, baseline: int) -> int:
    """Most bytes held since `begin_peak`: what the allocator gave out on cuda, growth of resident memory on a CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return max(_high_water() - baseline, 0)


def _high_water() -> int:
    if Path("/proc/self/status").exists():
        return _process_bytes("VmHWM")
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


def _process_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {name}")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
