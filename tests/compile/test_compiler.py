"""Compiling for sm_90a on a machine without a GPU: objects, what is known about them, and using them elsewhere.

Most tests share one compile of the small template in examples/third_party_template, which is also the example's own test.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tpf_jit import compiler, inspect_sass, kernels, linker, loader
from tpf_jit.compiler import CompiledObject, KernelSpec, compile_kernel
from tpf_jit.errors import CompileFailed, InvalidInput
from tpf_jit.shape import TriangleAttentionShape
from tpf_jit.templates import registry

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "third_party_template"
sys.path.insert(0, str(EXAMPLE / "src"))

import tpf_scaled_bias as example  # noqa: E402

registry.register(example.ScaledBiasForward)
SHAPE = example.ScaledBiasShape(4096, 1024)


def spec_of(dtype: str = "bfloat16", **config: Any) -> KernelSpec:
    return KernelSpec.make("scaled_bias_forward", replace(SHAPE, dtype=dtype), example.ScaledBiasConfig(**config))


@pytest.fixture(scope="module")
def bf16() -> CompiledObject:
    return compile_kernel(spec_of())


@pytest.fixture(scope="module")
def fp32() -> CompiledObject:
    return compile_kernel(spec_of("float32", threads=64, rows_per_cta=2))


@pytest.fixture(scope="module")
def attention() -> CompiledObject:
    return compile_kernel(KernelSpec.make("triangle_attention_forward_sm90", TriangleAttentionShape(crop=384)))


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device", ctypes.c_int32), ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p), ("offset", ctypes.c_uint64), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
    ]  # fmt: skip


class FakeCuda:
    """A tensor that claims to lie on cuda:0: enough for the argument checks of a kernel, which never read it."""

    BFLOAT16, FLOAT = 4, 2

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...], code: int, bits: int, address: int = 1 << 32) -> None:
        array = ctypes.c_int64 * len(shape)
        self.shape, self.strides = array(*shape), array(*strides)
        self.tensor = DLTensor(
            address, 2, 0, len(shape), code, bits, 1, ctypes.addressof(self.shape), ctypes.addressof(self.strides), 0, None, None
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, **_: Any) -> Any:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.tensor), b"dltensor", None)


_kept: list[FakeCuda] = []


def fake(shape: tuple[int, ...], code: int = FakeCuda.BFLOAT16, bits: int = 16, address: int = 1 << 32, row: int | None = None):
    import tvm_ffi

    strides = (row or shape[1], 1) if len(shape) == 2 else (1,)
    _kept.append(FakeCuda(shape, strides, code, bits, address))
    return tvm_ffi.from_dlpack(_kept[-1])


def check_arguments(function: Any, cols: int = 1024, code: int = FakeCuda.BFLOAT16, bits: int = 16) -> None:
    """The function checks its arguments as declared; a call that passes them all ends at the missing GPU."""

    def x(**change: Any) -> Any:
        return fake((64, cols), code, bits, **change)

    bias = fake((cols,), code, bits)
    with pytest.raises(Exception, match="[Cc]uda|CUDA|driver|device"):
        function(x(), bias, x(), 0.5)
    with pytest.raises(TypeError, match="Expects 4 parameters"):
        function(x())
    for wrong in (x(address=(1 << 32) + 2), x(row=cols + 1), fake((64, cols), 0, 32), fake((64, cols + 8), code, bits)):
        with pytest.raises((ValueError, TypeError), match="mX|mBias|mOut"):
            function(wrong, bias, x(), 0.5)


def test_resources_are_known_without_a_gpu(bf16: CompiledObject) -> None:
    facts = bf16.resources
    assert facts["threads"] == 128 and 8 < facts["registers"] <= 64
    assert [facts[name] for name in ("stack_bytes", "spill_bytes", "stl", "ldl", "hgmma", "utmaldg", "smem_bytes")] == [0] * 7
    assert facts["sass_instructions"] > 50 and facts["ptxas_notes"] == []
    assert re.fullmatch(r"[\d.]+", facts["ptxas_version"]) and re.fullmatch("[0-9a-f]{64}", facts["cubin_sha256"])
    assert json.loads(json.dumps(bf16.to_row())) == json.loads(json.dumps(bf16.to_row())), "fit for the database"
    assert bf16.to_row()["toolchain"]["ptxas"] == facts["ptxas_version"]


def test_the_attention_kernel_is_described_by_its_launch(attention: CompiledObject) -> None:
    """Threads and dynamic shared memory are in no cubin; they come from the host code."""
    template = registry.get("triangle_attention_forward_sm90")
    shape = TriangleAttentionShape(crop=384)
    planned = template.resources(shape, template.default(shape))
    facts = attention.resources
    assert facts["threads"] == planned.threads
    assert planned.smem_bytes - 2048 <= facts["smem_bytes"] <= planned.smem_bytes
    assert facts["hgmma"] > 0 and facts["utmaldg"] > 0 and facts["utmastg"] > 0 and facts["setmaxnreg"] == 2
    assert facts["spill_bytes"] == 0 == facts["stl"] and facts["ptxas_notes"] == []


def test_counts_agree_with_the_disassembler(attention: CompiledObject, monkeypatch: pytest.MonkeyPatch) -> None:
    """The opcode table against NVIDIA's own nvdisasm, on the kernel that uses the instructions."""
    if inspect_sass.find_tool("nvdisasm") is None and inspect_sass.find_tool("cuobjdump") is None:
        pytest.skip("needs nvdisasm or cuobjdump")
    cubin = cubin_of(attention)
    text = inspect_sass.sass(cubin)
    lines = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?) ?;", text, re.MULTILINE)
    names = [re.sub(r"^@!?U?P\w+ +", "", line).split()[0].split(".")[0] for line in lines]
    facts = inspect_sass.inspect_cubin(cubin)
    pairs = {"hgmma": "HGMMA", "utmaldg": "UTMALDG", "utmastg": "UTMASTG", "stl": "STL", "ldl": "LDL", "setmaxnreg": "USETMAXREG"}
    assert {key: facts[key] for key in pairs} == {key: names.count(name) for key, name in pairs.items()}
    assert facts["sass_instructions"] == len(lines)
    monkeypatch.setattr(inspect_sass, "find_tool", lambda name: None)
    assert inspect_sass.sass(cubin) is None, "without a disassembler there is no text, but"
    assert inspect_sass.inspect_cubin(cubin) == facts, "the facts are the same"


def cubin_of(obj: CompiledObject) -> bytes:
    """The device code inside a host object: the ELF image whose machine is CUDA's."""
    for match in re.finditer(rb"\x7fELF\x02\x01", obj.data):
        start = match.start()
        if struct.unpack_from("<H", obj.data, start + 18) == (190,):
            (table,) = struct.unpack_from("<Q", obj.data, start + 0x28)
            size, count = struct.unpack_from("<HH", obj.data, start + 0x3A)
            programs, = struct.unpack_from("<Q", obj.data, start + 0x20)
            each, n = struct.unpack_from("<HH", obj.data, start + 0x36)
            return obj.data[start : start + max(table + size * count, programs + each * n)]
    raise LookupError("no cubin")


def test_the_target_is_hopper_whatever_the_machine(bf16: CompiledObject) -> None:
    cubin = cubin_of(bf16)
    assert (struct.unpack_from("<I", cubin, 0x30)[0] >> 8) & 0xFF == 90 and b"-arch sm_90a" in cubin


def test_host_code_runs_on_every_x86(bf16: CompiledObject, tmp_path: Path) -> None:
    """The compiler would use AVX-512 where it finds it; an object must also run on a machine without."""
    if shutil.which("objdump") is None:
        pytest.skip("needs objdump")
    path = tmp_path / "kernel.so"
    path.write_bytes(bf16.data)
    text = subprocess.run(["objdump", "-d", str(path)], capture_output=True, text=True, check=True).stdout
    instructions = re.findall(r"^\s+[0-9a-f]+:\t(?:[0-9a-f]{2} )+\s*\t(\S+)", text, re.MULTILINE)
    assert len(instructions) > 100
    assert not [name for name in instructions if name.startswith("v") and name not in ("verr", "verw")]
    assert not re.search(r"%[yz]mm", text)


def test_a_kernel_checks_its_arguments_before_it_launches(bf16: CompiledObject, fp32: CompiledObject) -> None:
    first = loader.load(bf16.data, bf16.spec.symbol, bf16.kind)
    second = loader.load(fp32.data, fp32.spec.symbol, fp32.kind)
    check_arguments(first)
    check_arguments(second, 1000, FakeCuda.FLOAT, 32)
    with pytest.raises((ValueError, TypeError), match="mX"):
        first(fake((64, 1000), FakeCuda.FLOAT, 32), fake((1000,), FakeCuda.FLOAT, 32), fake((64, 1000), FakeCuda.FLOAT, 32), 0.5)


def test_two_kernels_from_disk_in_one_process_without_the_compiler(
    bf16: CompiledObject, fp32: CompiledObject, tmp_path: Path
) -> None:
    """Each answers for itself (they differ in dtype, which their messages name), and nothing imports the DSL."""
    names = []
    for obj in (bf16, fp32):
        path = tmp_path / f"{obj.spec.symbol}.{obj.kind}"
        path.write_bytes(obj.data)
        names.append(str(path))
    code = """
        import sys
        from pathlib import Path
        from tpf_jit import loader
        for path in map(Path, sys.argv[1:]):
            try:
                loader.load(path, path.stem, path.suffix[1:])()
            except TypeError as error:
                print(str(error).split("mX: ")[1].split(",")[2])
        print("cutlass" in sys.modules)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *names], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["bfloat16)", "float32)", "False"]


def test_a_warm_process_never_imports_the_compiler(private_state: Path) -> None:
    """From nothing to a callable twice: the first process compiles, the second loads; both by the public path."""
    code = """
        import sys, time
        sys.path.insert(0, sys.argv[1])
        import tpf_scaled_bias as example
        from tpf_jit.kernels import get_kernel
        from tpf_jit.templates import registry
        registry.register(example.ScaledBiasForward)
        kernel = get_kernel("scaled_bias_forward", example.ScaledBiasShape(64, 64), config=example.ScaledBiasConfig())
        kernel.function
        print("cutlass" in sys.modules, "sqlite_utils" in sys.modules, kernel.resources["threads"])
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(EXAMPLE / "src")]
    runs = [subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split() for _ in range(2)]
    assert runs == [["True", "True", "128"], ["False", "False", "128"]]
    assert len(list((private_state / "objects").glob("*.so" if linker.linker() else "*.o"))) == 1


def test_without_a_linker_objects_stay_objects_and_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linker, "linker", lambda: None)
    obj = compile_kernel(spec_of(rows_per_cta=1))
    assert obj.kind == "o" and obj.data[:4] == b"\x7fELF"
    check_arguments(loader.load(obj.data, obj.spec.symbol, "o"))


def test_a_linker_that_fails_leaves_the_object(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(linker, "linker", lambda: ("false",))
    assert compile_kernel(spec_of(rows_per_cta=1)).kind == "o"
    assert "cannot link kernels" in caplog.text


def test_compiling_again_gives_the_same_device_code(bf16: CompiledObject) -> None:
    again = compile_kernel(spec_of())
    assert again.resources == bf16.resources and again.spec.symbol == bf16.spec.symbol
    other = compile_kernel(spec_of(rows_per_cta=2))
    assert other.resources["cubin_sha256"] != bf16.resources["cubin_sha256"]


def test_switches_of_the_compiler_are_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = spec_of().key
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    assert spec_of().key != before
    assert compiler.toolchain()["CUTE_DSL_LINEINFO"] == "1"


class Broken(example.ScaledBiasForward):
    name = "scaled_bias_broken"

    def build(self, variant: Any, config: Any, options: str) -> Any:
        import cutlass.cute as cute

        @cute.jit
        def host(x: cute.Tensor):
            cute.make_layout("nonsense")

        return cute.compile(host, cute.runtime.make_fake_compact_tensor(cute.Float32, (4,)), options=options)


class Forgetful(example.ScaledBiasForward):
    """Ignores the options it is given, so no cubin is kept."""

    name = "scaled_bias_forgetful"

    def build(self, variant: Any, config: Any, options: str) -> Any:
        return super().build(variant, config, "--enable-tvm-ffi --gpu-arch sm_90a")


@pytest.mark.parametrize(("template", "message"), [(Broken, "did not compile for sm_90a: "), (Forgetful, "kept no cubin")])
def test_a_template_that_fails_is_reported_with_its_log(template: type, message: str, capfd: pytest.CaptureFixture) -> None:
    registry.register(template, replace=True)
    with pytest.raises(CompileFailed, match=message) as caught:
        compile_kernel(KernelSpec.make(template.name, SHAPE))
    assert template.name in str(caught.value) and "\x1b" not in str(caught.value)
    assert sys.stderr is not None and not isinstance(sys.stderr, compiler._ThreadTee), "stderr is given back"


def test_a_spec_with_a_field_its_template_lacks_is_refused() -> None:
    spec = KernelSpec("scaled_bias_forward", (("dtype", "bfloat16"),), (("warps", 4),), "sm_90a")
    with pytest.raises(InvalidInput, match="no field warps"):
        compile_kernel(spec)


def test_the_environment_is_left_as_it_was(bf16: CompiledObject) -> None:
    assert "CUTE_DSL_ARCH" not in os.environ and "cutlass" in sys.modules


def test_the_example_registers_itself_by_its_entry_point(tmp_path: Path) -> None:
    """As installed: only metadata on the path tells tpf_jit about it."""
    metadata = tmp_path / "tpf_scaled_bias-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tpf-scaled-bias\nVersion: 0.1.0\n")
    project = (EXAMPLE / "pyproject.toml").read_text()
    group, point = re.search(r'\[project\.entry-points\."(.+)"\]\n(.+)\n', project).groups()
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{point.replace(chr(34), '')}\n")
    code = "from tpf_jit.templates import registry; print(*[t.name for t in registry.templates('scaled_bias')])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(EXAMPLE / "src")])}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["scaled_bias_forward"] and done.stderr == ""


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", [(4096, 1024), (1, 4), (3, 12), (100_000, 8)])
def test_the_example_keeps_the_template_contract(dtype: str, shape: tuple[int, int]) -> None:
    template = example.ScaledBiasForward()
    problem = example.ScaledBiasShape(*shape, dtype=dtype)
    assert template.supports(problem)[0]
    space = template.space(problem)
    assert space and template.check(problem, template.default(problem)) is None
    assert all(template.check(problem, config) is None for config in space) and len(set(space)) == len(space)
    workload = template.workload(problem, "cpu")
    inputs = workload.make_inputs(3)

    def kernel(x: Any, bias: Any, out: Any, scale: float) -> None:
        out.copy_((scale * x.float() + bias.float()).to(out.dtype))

    reference = workload.reference(inputs)
    assert workload.errors(workload.run(kernel, inputs), reference)["out"] <= workload.bounds()["out"]
    assert workload.errors(workload.run(lambda *_: None, inputs), reference)["out"] == float("inf"), "unwritten output is NaN"


def test_kernels_of_the_example_share_one_object_for_all_sizes() -> None:
    config = example.ScaledBiasConfig()
    a, b = (kernels.get_kernel("scaled_bias_forward", replace(SHAPE, rows=rows), config=config) for rows in (1, 77))
    assert a.spec == b.spec
