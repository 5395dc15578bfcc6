"""The GPU as facts: what identifies it, how fast it runs at the moment, and which boards count as siblings.

Facts come from PyTorch where it is loaded, else from cuda-python, else from PyTorch after all, else from `nvidia-smi`. Neither
importing this module nor a process that sees no GPU initialises CUDA.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

_ARCHES = {(9, 0): "sm_90a"}

SIBLINGS: dict[str, tuple[str, ...]] = {
    "gh100": (
        "NVIDIA H100 80GB HBM3",
        "NVIDIA H100 64GB HBM2",
        "NVIDIA H100 PCIe",
        "NVIDIA H100 NVL",
        "NVIDIA H200",
        "NVIDIA H200 NVL",
        "NVIDIA H800",
        "NVIDIA H800 PCIe",
        "NVIDIA H800 NVL",
        "NVIDIA H20",
        "NVIDIA H20-3e",
        "NVIDIA GH200 120GB",
        "NVIDIA GH200 144G HBM3e",
        "NVIDIA GH200 480GB",
    ),
}
"""Classes of boards that carry the same die, by the names their drivers report. A board outside the table has no siblings."""


@dataclass(frozen=True)
class Device:
    """A GPU by the facts that decide which measurements hold for it.

    Attributes:
        name: as the driver reports it, e.g. "NVIDIA H200".
        compute_capability: (major, minor).
        sms: streaming multiprocessors; 0 if unknown.
        l2_bytes: L2 cache; 0 if unknown.
        memory_bytes: device memory; 0 if unknown.
        driver: driver version, "" if unknown.
    """

    name: str
    compute_capability: tuple[int, int]
    sms: int
    l2_bytes: int
    memory_bytes: int
    driver: str = ""

    @property
    def arch(self) -> str | None:
        """The architecture kernels are compiled for, e.g. "sm_90a"; None where there are none."""
        return _ARCHES.get(self.compute_capability)

    @property
    def model(self) -> str:
        """Name under which measurements of equal devices are shared, see `tuning_db.device_model`."""
        from tpf_jit.tuning_db.rows import device_model

        return device_model(self)

    def facts(self) -> dict[str, Any]:
        """The fields as JSON values, as trials keep them."""
        return {**asdict(self), "compute_capability": list(self.compute_capability)}


def sibling_class(name: str) -> str | None:
    """The class of `SIBLINGS` that lists a device name; None if none does. A MIG slice is no sibling of a whole board."""
    return next((label for label, names in SIBLINGS.items() if name in names), None)


def current_device(index: int | None = None) -> Device | None:
    """Facts of a CUDA device; None when there is none, or its facts cannot be had.

    Args:
        index: CUDA device index as PyTorch counts them; PyTorch's current device when left out (0 if PyTorch is not loaded).
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return None
    if index is None:
        index = _default_index()
    device = _known.get(index)
    if device is None:
        device = _probe(index)
        if device is not None:
            _known[index] = device
    return device


def clocks(index: int | None = None) -> dict[str, float]:
    """State of a device at this moment; keys that cannot be read are missing.

    Returns:
        `sm_clock_mhz`, `mem_clock_mhz`, `power_w`, `temperature_c`, `power_limit_w`, and `throttle_reasons`, NVML's bit mask.
    """
    chosen = _system_id(_default_index() if index is None else index)
    if chosen is None:
        return {}
    return _nvml_clocks(chosen) or _smi_clocks(chosen)


_known: dict[int, Device] = {}


def _probe(index: int) -> Device | None:
    if _torch(load=False) is not None:
        return _from_torch(index)
    for source in (_from_cuda_python, _from_torch, _from_smi):
        device = source(index)
        if device is not None:
            return device
    return None


def _torch(load: bool) -> Any:
    torch = sys.modules.get("torch")
    if torch is None and load and importlib.util.find_spec("torch") is not None:
        import torch
    # A module that is still being imported by another thread has no cuda attribute yet.
    return torch if torch is not None and hasattr(torch, "cuda") else None


def _default_index() -> int:
    torch = _torch(load=False)
    return torch.cuda.current_device() if torch is not None and torch.cuda.is_available() else 0


def _from_torch(index: int) -> Device | None:
    torch = _torch(load=True)
    if torch is None or torch.version.cuda is None or not torch.cuda.is_available() or index >= torch.cuda.device_count():
        return None
    found = torch.cuda.get_device_properties(index)
    return Device(
        name=found.name,
        compute_capability=(found.major, found.minor),
        sms=found.multi_processor_count,
        l2_bytes=getattr(found, "L2_cache_size", 0),
        memory_bytes=found.total_memory,
        driver=_driver_version(),
    )


def _from_cuda_python(index: int) -> Device | None:
    try:
        from cuda.bindings import driver
    except ImportError:
        return None

    def call(function: Any, *arguments: Any) -> Any:
        status, *values = function(*arguments)
        if int(status) != 0:
            raise RuntimeError(f"{function.__name__}: {status}")
        return values[0] if values else None

    attribute = driver.CUdevice_attribute
    try:
        call(driver.cuInit, 0)
        handle = call(driver.cuDeviceGet, index)
        major, minor, sms, l2_bytes = (
            call(driver.cuDeviceGetAttribute, which, handle)
            for which in (
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
                attribute.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE,
            )
        )
        name = call(driver.cuDeviceGetName, 256, handle).split(b"\0")[0].decode()
        memory_bytes = call(driver.cuDeviceTotalMem, handle)
    except (RuntimeError, OSError):  # no driver, or no such device
        return None
    return Device(name, (int(major), int(minor)), int(sms), int(l2_bytes), int(memory_bytes), _driver_version())


def _from_smi(index: int) -> Device | None:
    chosen = _system_id(index)
    values = _smi(chosen, "name,compute_cap,memory.total,driver_version") if chosen is not None else None
    if values is None:
        return None
    try:
        name, capability, memory_mib, driver = values
        major, minor = capability.split(".")
        # It does not tell the number of SMs: such a device never passes for one that was measured.
        return Device(name, (int(major), int(minor)), 0, 0, int(float(memory_mib)) << 20, driver)
    except ValueError:
        return None


def _system_id(index: int) -> str | None:
    """What NVML and nvidia-smi know a CUDA device by: its UUID, else its number on the host."""
    torch = _torch(load=False)
    if torch is not None and torch.version.cuda is not None and torch.cuda.is_available() and index < torch.cuda.device_count():
        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
        if uuid is not None:
            return f"GPU-{uuid}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return str(index)
    entries = [entry.strip() for entry in visible.split(",") if entry.strip()]
    return entries[index] if index < len(entries) else None


@cache
def _driver_version() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
        words = text.split("\n", 1)[0].split()
        return next(word for word in words if word[0].isdigit() and word.count(".") >= 1)
    except (OSError, StopIteration):
        values = _smi("0", "driver_version")
        return values[0] if values else ""


def _smi(chosen: str, query: str) -> list[str] | None:
    command = ["nvidia-smi", f"--id={chosen}", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    line = done.stdout.strip().splitlines()[:1]
    return [value.strip() for value in line[0].split(",")] if line else None


def _smi_clocks(chosen: str) -> dict[str, float]:
    names = {
        "sm_clock_mhz": "clocks.sm",
        "mem_clock_mhz": "clocks.mem",
        "power_w": "power.draw",
        "temperature_c": "temperature.gpu",
        "power_limit_w": "power.limit",
    }
    state = {}
    for name, text in zip(names, _smi(chosen, ",".join(names.values())) or [], strict=False):
        try:
            state[name] = float(text)
        except ValueError:
            continue
    return state


@cache
def _nvml() -> Any:
    """The management library, initialised; None where there is none."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        return library if library.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):
        return None


def _nvml_clocks(chosen: str) -> dict[str, float]:
    library = _nvml()
    if library is None:
        return {}
    handle = ctypes.c_void_p()
    by_number = chosen.isdecimal()
    find = library.nvmlDeviceGetHandleByIndex_v2 if by_number else library.nvmlDeviceGetHandleByUUID
    if find(ctypes.c_uint(int(chosen)) if by_number else chosen.encode(), ctypes.byref(handle)) != 0:
        return {}
    queries: dict[str, tuple[str, tuple[int, ...], float]] = {
        "sm_clock_mhz": ("nvmlDeviceGetClockInfo", (1,), 1),
        "mem_clock_mhz": ("nvmlDeviceGetClockInfo", (2,), 1),
        "power_w": ("nvmlDeviceGetPowerUsage", (), 1e-3),
        "temperature_c": ("nvmlDeviceGetTemperature", (0,), 1),
        "power_limit_w": ("nvmlDeviceGetEnforcedPowerLimit", (), 1e-3),
        "throttle_reasons": ("nvmlDeviceGetCurrentClocksThrottleReasons", (), 1),
    }
    state = {}
    for name, (function, arguments, unit) in queries.items():
        value = ctypes.c_ulonglong(0)  # wide enough for every query; unsigned int results fill the low half
        call = getattr(library, function, None)
        if call is not None and call(handle, *map(ctypes.c_uint, arguments), ctypes.byref(value)) == 0:
            state[name] = value.value if unit == 1 else round(value.value * unit, 3)
    return state
