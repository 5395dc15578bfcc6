"""Where a bench runs and with what: the device and its clock, and the head that every record starts with."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from typing import Any

from tpf_jit.bench.peer_base import installed_version
from tpf_jit.errors import InvalidInput, MeasurementFailed
from tpf_jit.tune import timing
from tpf_jit.tuning_db.rows import utc_now

PACKAGES = ("torch", "nvidia-cutlass-dsl", "apache-tvm-ffi")


def bench_device(device: str | None) -> tuple[Any, timing.Timer]:
    """(torch device, its clock); the current CUDA device when left out.

    Raises:
        InvalidInput: the device is neither `cpu`, `cuda` nor `cuda:N`, or there is no such GPU.
        MeasurementFailed: a GPU is wanted and none is there.
    """
    import torch

    if device is not None and not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", str(device)):
        raise InvalidInput.of("--device", repr(str(device)), "cuda, cuda:N with the number of a GPU, or cpu")
    if device is not None and torch.device(device).type == "cpu":
        return torch.device("cpu"), timing.WallTimer()
    if not torch.cuda.is_available():
        raise MeasurementFailed("this needs a GPU and PyTorch sees none; with device cpu it measures the PyTorch path instead")
    index = torch.device(device).index if device is not None else None
    index = torch.cuda.current_device() if index is None else index
    if index >= (count := torch.cuda.device_count()):
        raise InvalidInput.of("--device", repr(str(device)), f"a GPU that is here, cuda:0 to cuda:{count - 1}")
    torch.cuda.set_device(index)
    return torch.device("cuda", index), timing.CudaTimer(index, torch.cuda.get_device_properties(index).L2_cache_size)


def record_head(kind: str, command: str, device: Any, peers: Mapping[str, str | None]) -> dict[str, Any]:
    """The fields of a record that say what was measured, when, where and with what.

    Call it right after measuring: the clocks are those of a device under load.

    Args:
        kind: kind of the record.
        command: the command line that made it.
        device: torch device.
        peers: versions of the packages measured beside this one, by implementation; None where they have none of their own.
    """
    import torch

    from tpf_jit import __version__, records

    versions: dict[str, Any] = {"tpf_jit": __version__}
    versions |= {name: version for name in PACKAGES if (version := installed_version(name)) is not None}
    versions |= {"torch": torch.__version__, "cuda": torch.version.cuda or "none", "python": platform.python_version()}
    versions["peers"] = {name: version for name, version in peers.items() if version is not None}
    return {
        "kind": kind,
        "date": utc_now(),
        "command": command,
        "device": _device_facts(device),
        "versions": versions,
        "source_hash": records.source_hashes(),
    }


def _device_facts(device: Any) -> dict[str, Any]:
    if device.type != "cuda":
        return {"name": f"{device.type} ({platform.machine()})"}
    from tpf_jit.device import clocks, current_device

    gpu = current_device(device.index)
    state = clocks(device.index)
    facts = {} if gpu is None else {"name": gpu.name, "sms": gpu.sms, "driver": gpu.driver, "memory_bytes": gpu.memory_bytes}
    return {**facts, **{name: value for name, value in state.items() if name != "throttle_reasons"}}
