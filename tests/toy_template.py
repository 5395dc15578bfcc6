"""A template and backend that need no compiler: what the machinery around kernels is tested with.

"Compiling" writes the configuration as JSON; "loading" gives a function that returns it. `ToyConfig.mood` makes it misbehave in
the ways real compilers do.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from tpf_jit.errors import NoKernel
from tpf_jit.templates import registry
from tpf_jit.templates.base import Compiled, Resources, Template, config_to_dict


@dataclass(frozen=True)
class ToyShape:
    op: ClassVar[str] = "toy"
    size: int = 8
    dtype: str = "bfloat16"

    def key(self) -> str:
        return f"toy/{self.size}/{self.dtype}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class ToyConfig:
    tile: int = 1
    mood: str = "good"
    log: str = ""
    """File that gets a line for every compile, in whichever process."""


class ToyBackend:
    name = "toy"

    def __init__(self) -> None:
        self.compiles = 0
        self.loads: list[Any] = []
        self.versions = {"toy": "1"}

    def toolchain(self) -> dict[str, str]:
        return dict(self.versions)

    def compile(self, template: Template, variant: Mapping[str, Any], config: ToyConfig, symbol: str) -> Compiled:
        self.compiles += 1
        if config.log:
            with open(config.log, "a") as file:
                file.write(f"{os.getpid()}\n")
        if config.mood == "broken":
            raise ValueError("toy compiler says no: \x1b[31mC7508\x1b[0m")
        if config.mood == "deadly":
            os.kill(os.getpid(), signal.SIGKILL)
        if config.mood == "hanging":
            time.sleep(600)
        if config.mood == "slow":
            time.sleep(1.0)
        data = json.dumps({"symbol": symbol, "variant": dict(variant), "config": config_to_dict(config)}).encode()
        return Compiled(data, "toy", {"registers": 32 * config.tile, "pid": os.getpid()})

    def load(self, source: Path | bytes, symbol: str, kind: str) -> Any:
        self.loads.append(source)
        try:
            content = json.loads(source if isinstance(source, bytes) else Path(source).read_bytes())
        except OSError as error:
            raise NoKernel(f"cannot load {source}: {error}") from error
        if content["symbol"] != symbol or kind != "toy":
            raise NoKernel(f"{source} is not {symbol}")
        if content["config"]["mood"] == "noexec" and not isinstance(source, bytes):
            raise NoKernel("failed to map segment from shared object")
        return lambda *args: (content["config"]["tile"], *args)


class ToyTemplate(Template):
    name = "toy_forward"
    op = "toy"
    arch = "toy_1"
    backend = "toy"
    Config = ToyConfig

    def supports(self, shape: ToyShape) -> tuple[bool, str]:
        return (True, "") if shape.size > 0 else (False, "size must be positive")

    def variant(self, shape: ToyShape, **flags: Any) -> dict[str, Any]:
        if set(flags) - {"residual"}:
            raise TypeError(f"unknown flags {flags}")
        return {"dtype": shape.dtype, **flags}

    def check(self, shape: ToyShape, config: ToyConfig) -> str | None:
        return None if 1 <= config.tile <= 8 else f"tile must be 1 to 8, is {config.tile}"

    def space(self, shape: ToyShape) -> list[ToyConfig]:
        return [ToyConfig(tile) for tile in range(1, 9)]

    def default(self, shape: ToyShape) -> ToyConfig:
        return ToyConfig(2)

    def resources(self, shape: ToyShape, config: ToyConfig) -> Resources:
        return Resources(32, 0, 32 * config.tile, 1)

    def build(self, variant: Any, config: Any, options: str) -> Any:
        raise NotImplementedError("the toy backend compiles by itself")

    def workload(self, shape: Any, device: Any, seed: int = 0, family: str = "normal") -> Any:
        from toy_workload_that_does_not_exist import Workload  # reached by tests of the source closure only

        return Workload(shape)


class MemoryRecords:
    """`KernelRecords` in a dict."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}

    def sha256(self, key: str) -> str | None:
        return self.rows[key]["sha256"] if key in self.rows else None

    def resources(self, key: str) -> dict[str, Any]:
        return self.rows[key]["resources"] if key in self.rows else {}

    def record(self, row: Mapping[str, Any]) -> None:
        self.rows[row["key"]] = dict(row)


class FileRecords(MemoryRecords):
    """`KernelRecords` in a file of JSON lines that processes share."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = Path(path)

    def sha256(self, key: str) -> str | None:
        if self.path.exists():
            self.rows = {row["key"]: row for row in map(json.loads, self.path.read_text().splitlines())}
        return super().sha256(key)

    def record(self, row: Mapping[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def install() -> ToyBackend:
    """Register template and a fresh backend; the backend."""
    backend = ToyBackend()
    registry.register_backend(backend, replace=True)
    registry.register(ToyTemplate, replace=True)
    return backend


BACKEND = install()
