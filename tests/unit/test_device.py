"""Device facts from every source, with fakes in place of a GPU; clocks; sibling classes."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
from tuning_samples import A100, H100, H200

from tpf_jit import device
from tpf_jit.device import Device, clocks, current_device, sibling_class

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_known", {})
    monkeypatch.setattr(device, "_driver_version", lambda: "580.159.04")
    monkeypatch.setattr(device, "_nvml", lambda: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def fake_torch(*properties: SimpleNamespace, current: int = 0, cuda: str | None = "13.0") -> types.ModuleType:
    torch = types.ModuleType("torch")
    torch.version = SimpleNamespace(cuda=cuda)
    torch.cuda = SimpleNamespace(
        is_available=lambda: bool(properties),
        device_count=lambda: len(properties),
        current_device=lambda: current,
        get_device_properties=lambda index: properties[index],
    )
    return torch


def properties(of: Device, uuid: str = "1234-5678") -> SimpleNamespace:
    major, minor = of.compute_capability
    return SimpleNamespace(
        name=of.name,
        major=major,
        minor=minor,
        multi_processor_count=of.sms,
        L2_cache_size=of.l2_bytes,
        total_memory=of.memory_bytes,
        uuid=uuid,
    )


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_torch", lambda load: None)


@pytest.fixture
def smi(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A fake nvidia-smi with one H200; the calls it got."""
    calls: list[list[str]] = []
    known = {
        "name": "NVIDIA H200",
        "compute_cap": "9.0",
        "memory.total": "143771",
        "driver_version": "580.159.04",
        "clocks.sm": "1980",
        "clocks.mem": "3201",
        "power.draw": "412.57",
        "temperature.gpu": "41",
        "power.limit": "[N/A]",
    }

    def run(command: list[str], **options) -> SimpleNamespace:
        calls.append(command)
        assert options["timeout"] > 0
        (query,) = [part.removeprefix("--query-gpu=") for part in command if part.startswith("--query-gpu=")]
        return SimpleNamespace(stdout=", ".join(known[name] for name in query.split(",")) + "\n")

    monkeypatch.setattr(device.subprocess, "run", run)
    return calls


def test_arch_and_model() -> None:
    assert (H200.arch, A100.arch) == ("sm_90a", None)
    assert Device("NVIDIA B200", (10, 0), 148, 0, 0).arch is None
    assert H200.model == "NVIDIA H200/132sm/144g"
    assert H200.facts() == {
        "name": "NVIDIA H200",
        "compute_capability": [9, 0],
        "sms": 132,
        "l2_bytes": 60 << 20,
        "memory_bytes": 150_109_880_320,
        "driver": "580.159.04",
    }
    assert hash(H200) == hash(Device(**{**H200.facts(), "compute_capability": (9, 0)}))


def test_facts_from_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch(properties(A100), properties(H200), current=1))
    assert current_device() == H200
    assert current_device(0) == dataclasses.replace(A100, driver="580.159.04")
    assert current_device(2) is None


def test_the_current_device_is_asked_for_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = fake_torch(properties(H100), properties(H200))
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert current_device() == H100
    torch.cuda.current_device = lambda: 1
    assert current_device() == H200


@pytest.mark.parametrize("torch", [fake_torch(), fake_torch(properties(H200), cuda=None)], ids=["no device", "not a CUDA build"])
def test_torch_without_a_cuda_device(monkeypatch: pytest.MonkeyPatch, torch: types.ModuleType) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert current_device() is None
    assert current_device(0) is None


def test_a_blinded_process_does_not_even_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(device, "_probe", lambda index: pytest.fail("looked for a device"))
    assert current_device() is None
    assert current_device(0) is None


def test_facts_from_nvidia_smi(monkeypatch: pytest.MonkeyPatch, no_torch: None, smi: list) -> None:
    monkeypatch.setattr(device, "_from_cuda_python", lambda index: None)
    found = current_device()
    assert found == Device("NVIDIA H200", (9, 0), 0, 0, 143771 << 20, "580.159.04")
    assert found.arch == "sm_90a"
    assert found.model != H200.model, "a device of unknown size must not pass for one that was measured"
    assert "--id=0" in smi[0]


def test_cuda_python_comes_before_nvidia_smi(monkeypatch: pytest.MonkeyPatch, no_torch: None, smi: list) -> None:
    monkeypatch.setattr(device, "_from_cuda_python", lambda index: H200)
    assert current_device() is H200
    assert smi == []


class FakeDriver:
    """`cuda.bindings.driver` with one H200."""

    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR="major",
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR="minor",
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT="sms",
        CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE="l2",
    )

    def __init__(self, init: int = 0) -> None:
        self._init = init

    def cuInit(self, flags):
        return (self._init,)

    def cuDeviceGet(self, index):
        return (0, index) if index == 0 else (101, None)

    def cuDeviceGetAttribute(self, which, handle):
        return (0, {"major": 9, "minor": 0, "sms": H200.sms, "l2": H200.l2_bytes}[which])

    def cuDeviceGetName(self, length, handle):
        return (0, b"NVIDIA H200" + b"\0" * (length - 11))

    def cuDeviceTotalMem(self, handle):
        return (0, H200.memory_bytes)


@pytest.mark.parametrize(
    ("driver", "index", "found"), [(FakeDriver(), 0, H200), (FakeDriver(), 1, None), (FakeDriver(init=100), 0, None)]
)
def test_facts_from_cuda_python(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver, index: int, found: Device | None) -> None:
    package, bindings = types.ModuleType("cuda"), types.ModuleType("cuda.bindings")
    package.bindings, bindings.driver = bindings, driver
    for name, module in (("cuda", package), ("cuda.bindings", bindings), ("cuda.bindings.driver", driver)):
        monkeypatch.setitem(sys.modules, name, module)
    assert device._from_cuda_python(index) == found


def test_real_cuda_python_without_a_driver_gives_nothing_or_facts() -> None:
    """Whatever this machine has: no exception, and facts only where they are complete."""
    found = device._from_cuda_python(0)
    assert found is None or (found.name and found.sms > 0 and found.memory_bytes > 0)


def test_nothing_anywhere(monkeypatch: pytest.MonkeyPatch, no_torch: None) -> None:
    monkeypatch.setattr(device, "_from_cuda_python", lambda index: None)

    def missing(*_, **__):
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(device.subprocess, "run", missing)
    assert current_device() is None
    assert clocks() == {}


def test_a_hanging_nvidia_smi(monkeypatch: pytest.MonkeyPatch, no_torch: None) -> None:
    def hang(*_, **options):
        raise subprocess.TimeoutExpired("nvidia-smi", options["timeout"])

    monkeypatch.setattr(device.subprocess, "run", hang)
    assert clocks() == {}


# clocks


def test_clocks_from_nvidia_smi_leave_out_what_is_not_supported(no_torch: None, smi: list) -> None:
    assert clocks() == {"sm_clock_mhz": 1980.0, "mem_clock_mhz": 3201.0, "power_w": 412.57, "temperature_c": 41.0}


class FakeNvml:
    """The management library: two devices by number and one by UUID; memory clock not supported."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        self.asked.append(index.value)
        return 0 if index.value < 2 else 6

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):
        self.asked.append(uuid)
        return 0 if uuid == b"GPU-1234-5678" else 6

    def nvmlDeviceGetClockInfo(self, handle, kind, value):
        value._obj.value = 1980
        return 0 if kind.value == 1 else 3

    def nvmlDeviceGetPowerUsage(self, handle, value):
        value._obj.value = 412_571
        return 0

    def nvmlDeviceGetTemperature(self, handle, sensor, value):
        value._obj.value = 41
        return 0


EXPECTED = {"sm_clock_mhz": 1980, "power_w": 412.571, "temperature_c": 41}


def test_clocks_from_nvml(monkeypatch: pytest.MonkeyPatch, no_torch: None) -> None:
    library = FakeNvml()
    monkeypatch.setattr(device, "_nvml", lambda: library)
    assert clocks() == clocks(1) == EXPECTED
    assert library.asked == [0, 1]


def test_clocks_are_of_the_device_torch_means(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA numbers devices as CUDA_VISIBLE_DEVICES says, NVML does not: only the UUID is the same."""
    library = FakeNvml()
    monkeypatch.setattr(device, "_nvml", lambda: library)
    torch = fake_torch(properties(H100, "9999"), properties(H200, "1234-5678"), current=1)
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert clocks() == EXPECTED
    assert library.asked == [b"GPU-1234-5678"]


def test_visible_devices_are_followed_without_torch(monkeypatch: pytest.MonkeyPatch, no_torch: None) -> None:
    library = FakeNvml()
    monkeypatch.setattr(device, "_nvml", lambda: library)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1, GPU-1234-5678")
    assert clocks(0) == clocks(1) == EXPECTED
    assert library.asked == [1, b"GPU-1234-5678"]
    assert clocks(2) == {}


# siblings


def test_siblings_are_listed_and_never_guessed() -> None:
    assert sibling_class(H100.name) == sibling_class(H200.name) == "gh100"
    for name in ("NVIDIA H200 MIG 1g.18gb", "NVIDIA A100-SXM4-80GB", "H200", "nvidia h200", ""):
        assert sibling_class(name) is None
    names = [name for members in device.SIBLINGS.values() for name in members]
    assert len(set(names)) == len(names)


def test_importing_costs_no_cuda_and_no_torch() -> None:
    code = "import sys, tpf_jit.device; print(*sorted({'torch', 'cuda', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
