"""A toy operation with everything a sweep touches, deterministic and without torch or a GPU.

The operation doubles a list of numbers. Its template, backend, workload and clock are real implementations of the project's
interfaces, so the tuner under test is the real one: only what runs on a device is replaced. Imported by subprocesses too.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
import time
from array import array
from collections import Counter
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from tpf_jit.compiler import compile_kernel
from tpf_jit.errors import InvalidInput
from tpf_jit.templates import registry
from tpf_jit.templates.base import Compiled, Resources, Template, canonical_json, config_to_dict
from tpf_jit.tune import TuneOptions
from tpf_jit.tune.measure import MeasureSettings, WorkloadMeasurer

H200 = {"name": "Toy H200", "compute_capability": [9, 0], "sms": 132, "l2_bytes": 1000, "memory_bytes": 141 << 30, "driver": "1"}

TRICKS = ("none", "skip", "race", "uncompilable", "unlaunchable", "greedy", "deadly", "nan_tail")
"""What a configuration does wrong: nothing; wrong and very fast; other bits on every run; fails to compile, to launch, for lack
of memory; kills the device; leaves a ragged tail unwritten."""


@dataclass(frozen=True)
class ToyShape:
    op: ClassVar[str] = "toy"

    crop: int = 64
    rows: int = 8

    def key(self) -> str:
        return f"toy/N{self.crop}/I{self.rows}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def parse(cls, key: str) -> ToyShape:
        match = re.fullmatch(r"toy/N(\d+)/I(\d+)", key)
        if match is None:
            raise InvalidInput.of("key", key, "toy/N64/I8")
        return cls(int(match[1]), int(match[2]))


@dataclass(frozen=True)
class ToyConfig:
    tile: int = 32
    stages: int = 2
    trick: str = "none"
    twin: int = 0
    """Does not reach the device code."""


class ToyTemplate(Template):
    name = "toy_forward"
    op = "toy"
    direction = "forward"
    arch = "sm_90a"
    Config = ToyConfig
    backend = "toy"

    def __init__(self, configs: tuple[ToyConfig, ...] | None = None) -> None:
        self.configs = configs or tuple(ToyConfig(tile, stages) for tile in (16, 32, 64, 128) for stages in (1, 2, 3, 4))

    def supports(self, shape: Any) -> tuple[bool, str]:
        return (True, "") if shape.crop <= 4096 else (False, "crop above 4096")

    def variant(self, shape: Any, **flags: Any) -> dict[str, Any]:
        return {}

    def check(self, shape: Any, config: Any) -> str | None:
        return None if config.tile <= 256 else "tile above 256"

    def space(self, shape: Any) -> list[Any]:
        return list(self.configs)

    def default(self, shape: Any) -> Any:
        return self.configs[0]

    def resources(self, shape: Any, config: Any) -> Resources:
        return Resources(128, 1024 * config.stages, 128, 1)

    def build(self, variant: Any, config: Any, options: str) -> Any:
        raise NotImplementedError("the toy backend reads configurations")

    def workload(self, shape: Any, device: Any, seed: int = 0, family: str = "normal") -> ToyWorkload:
        if family not in ("normal", "adversarial"):
            raise InvalidInput.of("family", family, "normal, adversarial")
        return ToyWorkload(shape, seed)

    def sources(self) -> tuple:
        return ()

    def source_hash(self) -> str:
        return "5" * 64


class ToyBackend:
    name = "toy"
    version = "1"
    compile_s = 0.0
    """Seconds a compile sleeps."""

    def toolchain(self) -> dict[str, str]:
        return {"toy": type(self).version}

    def compile(self, template: Any, variant: Any, config: Any, symbol: str) -> Compiled:
        time.sleep(type(self).compile_s)
        if config.trick == "uncompilable":
            raise ValueError("ptxas says no")
        fields = config_to_dict(config)
        code = canonical_json({name: value for name, value in fields.items() if name != "twin"})
        cubin = hashlib.sha256(code.encode()).hexdigest()
        return Compiled(canonical_json(fields).encode(), "so", {"cubin_sha256": cubin, "registers": 32})

    def load(self, source: Any, symbol: str, kind: str) -> ToyKernel:
        data = source if isinstance(source, bytes) else source.read_bytes()
        return ToyKernel(ToyConfig(**json.loads(data)))


def toy_us(config: ToyConfig, crop: int) -> float:
    """The landscape: best at tile 64, stages 3; `skip` is five times as fast as anything right."""
    us = 100.0 * crop / 64 * (1 + 0.2 * abs(math.log2(config.tile / 64)) + 0.1 * abs(config.stages - 3))
    return us / 5 if config.trick == "skip" else us


class ToyKernel:
    def __init__(self, config: ToyConfig) -> None:
        self.config = config
        self.runs = 0

    def __call__(self, x: array, out: array) -> None:
        trick = self.config.trick
        if trick == "unlaunchable":
            raise RuntimeError("CUDA error: invalid configuration argument")
        if trick == "greedy":
            raise RuntimeError("CUDA out of memory")
        if trick == "deadly":
            ToyTimer.dead = True
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.runs += 1
        end = len(x) // 4 * 4 if trick == "nan_tail" else len(x)
        for i in range(end):
            out[i] = 2.0 * x[i]
        if trick == "skip":
            out[0] = 0.0
        elif trick == "race":
            out[0] *= 1.0 + 1e-9 * self.runs


class ToyWorkload:
    def __init__(self, shape: ToyShape, seed: int) -> None:
        self.shape = shape
        self.seed = seed
        self.bytes_per_set = 8 * shape.crop

    def make_inputs(self, seed: int) -> array:
        generator = random.Random(f"{self.seed} {seed}")
        return array("d", [generator.gauss(0.0, 1.0) for _ in range(self.shape.crop)])

    def prepare(self, kernel_fn: Any, inputs: array) -> Any:
        out = array("d", [0.0]) * len(inputs)
        return ToyLaunch(kernel_fn, inputs, out, toy_us(kernel_fn.config, self.shape.crop))

    def run(self, kernel_fn: Any, inputs: array) -> dict[str, array]:
        out = array("d", [math.nan]) * len(inputs)
        kernel_fn(inputs, out)
        return {"out": out}

    def reference(self, inputs: array) -> dict[str, array]:
        return {"out": array("d", [2.0 * value for value in inputs])}

    def errors(self, out: dict[str, array], ref: dict[str, array]) -> dict[str, float]:
        difference = math.sqrt(sum((a - b) ** 2 for a, b in zip(out["out"], ref["out"], strict=True)))
        found = difference / math.sqrt(sum(b * b for b in ref["out"]))
        return {"out": math.inf if math.isnan(found) else found}

    def bounds(self) -> dict[str, float]:
        return {"out": 1e-6}


class ToyLaunch:
    def __init__(self, kernel: ToyKernel, x: array, out: array, us: float) -> None:
        self.kernel, self.x, self.out, self.us = kernel, x, out, us

    def __call__(self) -> None:
        self.kernel(self.x, self.out)


class ToyTimer:
    """A deterministic clock: the landscape's time, a little noise, and a factor that tests may let drift."""

    name = "toy"
    cold_bytes = 2000
    dead = False
    """Class-wide, as a lost device is lost to every timer of the process."""

    def __init__(self, noise: float = 0.0, drift: float = 0.0) -> None:
        self.noise, self.drift = noise, drift
        self.calls = 0
        self.timed: Counter[str] = Counter()
        """Timed samples by configuration."""
        self.sequence: list[str] = []
        self.released = 0

    def sample(self, launches: Any, count: int, group: int = 1, flush: bool = False) -> list[float]:
        samples = []
        for _ in range(count):
            self.calls += 1
            launch = launches[self.calls % len(launches)]
            launch()
            name = canonical_json(config_to_dict(launch.kernel.config))
            self.timed[name] += 1
            if self.sequence[-1:] != [name]:
                self.sequence.append(name)
            wobble = self.noise * (((self.calls * 2654435761) % 1000) / 500 - 1)
            samples.append(launch.us * (1 + wobble) * (1 + self.drift * self.calls))
        return samples

    def wait(self) -> None:
        if type(self).dead:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def alive(self) -> bool:
        return not type(self).dead

    def release_memory(self) -> None:
        self.released += 1


class InlinePool:
    """Compiles when asked, in the calling process."""

    workers = 1

    def __init__(self) -> None:
        self.compiled: list[str] = []

    def close(self, wait: bool = True) -> None:
        pass

    def submit(self, spec: Any) -> Future:
        future: Future = Future()
        self.compiled.append(canonical_json(dict(spec.config)))
        try:
            future.set_result(compile_kernel(spec))
        except Exception as error:
            future.set_exception(error)
        return future


SETTINGS = MeasureSettings(samples=6, block=3, first_look=3, rounds=2, round_samples=3, heat_s=0.0)


def install(configs: tuple[ToyConfig, ...] | None = None) -> ToyTemplate:
    """Register the toy template with these configurations, and its backend; returns the template."""
    template = ToyTemplate(configs)
    registry.register(template, replace=True)
    registry.register_backend(ToyBackend, replace=True)
    return template


def options(template: ToyTemplate, timer: ToyTimer, pool: InlinePool | None = None, **more: Any) -> TuneOptions:
    """Options that make `tune` run the toy."""
    facts = more.pop("facts", H200)

    def make_measurer(chosen: Any, shape: Any) -> WorkloadMeasurer:
        load = ToyBackend().load
        return WorkloadMeasurer(chosen, shape, timer, load, "toy", dict(facts), more.get("settings", SETTINGS), {"seed": 7})

    used = {name: value for name, value in more.items() if name != "settings"}
    return TuneOptions(
        template=template, make_measurer=make_measurer, make_pool=lambda: pool or InlinePool(), seed=7, workers=2, **used
    )
