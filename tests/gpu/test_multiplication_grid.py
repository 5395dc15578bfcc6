"""The triangle multiplicative update and all its gradients on random problems, against float64; `pytest --record FOLDER` keeps
what they saw."""

from __future__ import annotations

import functools
import math
import random
import warnings

import pytest
import torch

import tpf_jit
from tpf_jit.errors import FallbackWarning
from tpf_jit.shape import TriangleMultiplicationShape
from tpf_jit.templates.triangle_multiplication.workload import EPS, OperatorWorkload

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
CASES = 64
WIDTHS = [(32, 32), (64, 64), (96, 160), (128, 128), (128, 128), (128, 64), (160, 96), (256, 256), (512, 384)]
"""(C, D): each pair of widths is a set of kernels of its own, so they are few."""
LARGEST = {"normal": 1100, "trained_like": 700}

EVIDENCE: list[dict] = []


def problem(seed: int) -> tuple[TriangleMultiplicationShape, str]:
    """A problem and a family of inputs; the same on every machine. Small crops, where edges matter most, are as frequent as large
    ones."""
    draw = random.Random(seed)
    channels, hidden = draw.choice(WIDTHS)
    family = draw.choice(sorted(LARGEST))
    largest = LARGEST[family] if channels * hidden <= 128 * 128 else 400
    crop = draw.randint(1, draw.choice([8, 70, 300, largest]))
    batch = draw.choice([1, 1, 2]) if crop <= 300 else 1
    direction, mask = draw.choice(["outgoing", "incoming"]), draw.choice(["none", "bool", "float"])
    weights = draw.choice(["float32", "float32", "bfloat16"])
    return TriangleMultiplicationShape(crop, channels, hidden, direction, batch, "bfloat16", weights, mask), family


@pytest.fixture(scope="module", autouse=True)
def compiled_ahead():
    """The grid's kernels, compiled on all cores at once instead of one by one."""
    tpf_jit.warmup([problem(seed)[0] for seed in range(CASES)], training=True)


@pytest.fixture(autouse=True)
def poisoned():
    """Every buffer is full of NaNs when a kernel gets it: what is read of it without having been written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("seed", range(CASES))
def test_random_problem(seed: int) -> None:
    shape, family = problem(seed)
    workload = OperatorWorkload(shape, DEVICE, seed, family)
    x = workload.make_inputs(0)
    update = functools.partial(tpf_jit.triangle_multiplication, recompute=seed % 3 == 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        warnings.filterwarnings("ignore", "the backward of", FallbackWarning)  # of widths above 256
        found = workload.run(update, x)
        again = [workload.run(update, x) for _ in range(2)]
        with torch.no_grad():
            z = x.z.clone()
            tpf_jit.triangle_multiplication(z, shape.direction, x.mask, **x.weights._asdict(), eps=EPS, inplace=True)
    assert torch.equal(z, found["out"]), "in place"
    equal = {name: all(torch.equal(value, other[name]) for other in again) for name, value in found.items()}
    errors, allowed = workload.errors(found, workload.reference(x)), workload.bounds()
    named = {"B": shape.batch, "N": shape.crop, "C": shape.channels, "D": shape.hidden, "direction": shape.direction}
    for name, error in errors.items():
        EVIDENCE.append(
            {"op": shape.op, "pass": "forward" if name == "out" else "backward", "impl": "tpf_jit", "tensor": name, **named}
            | {"dtype": shape.dtype, "weight_dtype": shape.weight_dtype, "mask": shape.mask, "family": family}
            | {"rel_rms_max": error if math.isfinite(error) else None, "bound": allowed[name]}
            | {"bitwise_repeats": 3, "bitwise_equal": equal[name]}
        )
    assert all(errors[name] <= allowed[name] for name in allowed), (shape, family, errors, allowed)
    assert all(equal.values()), (shape, equal)
