"""Trials, devices and templates to test the tuning database and the dispatcher with."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpf_jit.device import Device
from tpf_jit.errors import NoKernel
from tpf_jit.shape import TriangleAttentionShape
from tpf_jit.tuning_db.rows import TrialRow, cell_key, content_hash

H200 = Device("NVIDIA H200", (9, 0), 132, 60 << 20, 150_109_880_320, "580.159.04")
H100 = Device("NVIDIA H100 80GB HBM3", (9, 0), 132, 50 << 20, 85_031_714_816, "580.159.04")
H100_PCIE = Device("NVIDIA H100 PCIe", (9, 0), 114, 50 << 20, 85_031_714_816, "570.86.15")
A100 = Device("NVIDIA A100-SXM4-80GB", (8, 0), 108, 40 << 20, 85_031_714_816, "570.86.15")
SOURCE = "5" * 64


def trial(shape: Any = None, us: float = 100.0, direction: str = "forward", **fields: Any) -> TrialRow:
    """A sound trial on the H200; samples scatter by 0.2 % around `us`."""
    shape = shape or TriangleAttentionShape(crop=384)
    failed = fields.get("status", "ok") != "ok"
    values: dict[str, Any] = {
        "template": "fake_forward",
        "cell": cell_key(shape, direction),
        "config": {"tile_n": 128, "stages": 2, "crop": 0},
        "source_hash": SOURCE,
        "device": {**H200.facts(), "sm_clock_mhz": 1980, "power_w": 412.5},
        "toolchain": {"torch": "2.13.0", "nvidia-cutlass-dsl": "4.8.1"},
        "protocol": "events-rotated-1",
        "samples_us": [] if failed else [us * (1 + 0.001 * offset) for offset in (-2, -1, 0, 1, 2)],
        "errors": {} if failed else {"out": 1.9e-3, "lse": 4e-7},
        "status": "ok",
        "date": "2026-12-01T10:20:30Z",
        "session": "s",
    }
    values |= fields
    # One kernel a configuration and source, as in life; sorted, so that the order of fields does not matter.
    config = values["config"]
    made_of = sorted(config.items()) if isinstance(config, dict) else config
    values.setdefault("kernel_key", content_hash(f"{made_of} {values['source_hash']}"))
    return TrialRow(**values)


def kernel(key: str = "k" * 64, **fields: Any) -> dict[str, Any]:
    """The row of a compiled kernel."""
    values = {
        "key": key,
        "template": "fake_forward",
        "variant": {"dtype": "bfloat16", "mask": False, "tile_hdim": 32},
        "config": {"tile_n": 128, "stages": 2, "crop": 0},
        "arch": "sm_90a",
        "source_hash": SOURCE,
        "toolchain": {"nvidia-cutlass-dsl": "4.8.1"},
        "sha256": "a" * 64,
        "kind": "so",
        "size": 123456,
        "resources": {"registers": 168, "spill_bytes": 0},
        "compile_s": 2.5,
    }
    return {**values, **fields}


@dataclass(frozen=True)
class Config:
    tile_n: int = 64
    stages: int = 2
    crop: int = 0


class FakeTemplate:
    """What the dispatcher and the records ask of a template."""

    name = "fake_forward"
    op = "triangle_attention"
    direction = "forward"
    arch = "sm_90a"
    Config = Config

    def __init__(self, name: str = "fake_forward", max_tile_n: int = 256, source: str = SOURCE) -> None:
        self.name = name
        self.max_tile_n = max_tile_n
        self.source = source

    def measured_as(self, shape: Any) -> Any:
        return shape

    def supports(self, shape: Any) -> tuple[bool, str]:
        return (shape.head_dim <= 64, "" if shape.head_dim <= 64 else "head dim above 64")

    def check(self, shape: Any, config: Config) -> str | None:
        if config.crop not in (0, shape.crop):
            return f"compiled for crop {config.crop}"
        return None if config.tile_n <= self.max_tile_n else f"tile_n {config.tile_n} does not fit shared memory"

    def default(self, shape: Any) -> Config:
        return Config()

    def source_hash(self) -> str:
        return self.source


class FakeRegistry:
    def __init__(self, *templates: Any) -> None:
        self._templates = templates or (FakeTemplate(),)

    def get(self, name: str) -> Any:
        for template in self._templates:
            if template.name == name:
                return template
        raise NoKernel(f"no template {name}")

    def templates(self, op: str | None = None, direction: str | None = None, arch: str | None = None) -> list[Any]:
        wanted = {"op": op, "direction": direction, "arch": arch}
        return [t for t in self._templates if all(value is None or getattr(t, key) == value for key, value in wanted.items())]


def shape(**fields: Any) -> TriangleAttentionShape:
    return TriangleAttentionShape(**{"crop": 384, **fields})


def on(device: Device, **state: Any) -> dict[str, Any]:
    """A device's facts for a trial."""
    return {**device.facts(), **state}


def without_sms(device: Device) -> Device:
    return dataclasses.replace(device, sms=0)


@contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that other users may enter, unlike pytest's own; tests may take its write permission away."""
    with tempfile.TemporaryDirectory(prefix="tpf_jit_open_") as name:
        folder = Path(name)
        folder.chmod(0o755)
        try:
            yield folder
        finally:
            folder.chmod(0o755)
