"""`tpf-jit doctor`: what is installed, which GPU, what will be used, what is wrong and how to mend it."""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import typer

from tpf_jit.cli._output import Json, print_json, print_table

OK, NOTE, FAIL = "ok", "note", "wrong"
"""A note changes what is used (no GPU: the PyTorch path) but nothing is broken; a wrong one has to be mended."""


@dataclass(frozen=True)
class Finding:
    """One checked thing."""

    what: str
    state: str
    found: str
    remedy: str = ""


# Distribution, oldest accepted version, first refused one, what it does, whether tpf_jit works without it.
_PACKAGES = (
    ("torch", (2, 6), None, "tensors, autograd, the PyTorch path", False),
    ("nvidia-cutlass-dsl", (4, 8), (4, 9), "compiles kernels", False),
    ("apache-tvm-ffi", (0, 1), (0, 2), "loads and launches kernels", False),
    ("sqlite-utils", (4,), (5,), "writes the tuning database", False),
    ("optuna", (4, 5), (6,), "searches large spaces", False),
    ("torch-c-dlpack-ext", (0, 1), None, "quick hand-over of tensors", True),
    ("cuda-bindings", (12, 8), None, "device facts", True),
)


def doctor(json: Json = False) -> None:
    """Check this machine: packages, GPU, compiler, cache, database; say what is wrong and how to mend it."""
    findings = list(examine())
    broken = [finding for finding in findings if finding.state == FAIL]
    if json:
        print_json({"healthy": not broken, "findings": [asdict(finding) for finding in findings]})
    else:
        rows = [(finding.state, finding.what, finding.found) for finding in findings]
        print_table("tpf-jit doctor", ("", "what", "found"), rows)
        for finding in findings:
            if finding.remedy:
                print(f"{finding.what}: {finding.remedy}")
        print("nothing is wrong" if not broken else f"{len(broken)} to mend")
    if broken:
        raise typer.Exit(1)


def examine() -> Iterator[Finding]:
    """All findings, in the order of the way from the interpreter to the kernel. Never raises: a failed check is a finding."""
    yield _python()
    for package in _PACKAGES:
        yield _package(*package)
    for name, check in (
        ("linker", _linker),
        ("kernel runtime", _runtime),
        ("GPU", _gpu),
        ("kernels", _kernels),
        ("object cache", _cache),
        ("user database", _database),
        ("workspace", _workspace),
        ("tuned for this GPU", _winners),
    ):
        yield _guarded(name, check)


def _guarded(name: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:  # a doctor that falls ill helps nobody; the error is what the user has to see
        return Finding(name, FAIL, f"{type(error).__name__}: {error}", "see the message")


def _python() -> Finding:
    found = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return Finding("Python", NOTE, found, "kernels are built for Linux on x86-64; here only the PyTorch path works")
    return Finding("Python", OK, found)


def _package(name: str, oldest: tuple[int, ...], newest: tuple[int, ...] | None, use: str, optional: bool) -> Finding:
    wanted = f"{name}>={'.'.join(map(str, oldest))}" + (f",<{'.'.join(map(str, newest))}" if newest else "")
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(name, NOTE if optional else FAIL, f"not installed ({use})", f'pip install "{wanted}"')
    parts = _release(version)
    if parts < oldest or (newest and parts >= newest):
        return Finding(name, FAIL, f"{version} ({use})", f'pip install "{wanted}"')
    return Finding(name, OK, f"{version} ({use})")


def _release(version: str) -> tuple[int, ...]:
    numbers = []
    for part in version.partition("+")[0].split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _linker() -> Finding:
    from tpf_jit.linker import linker

    command = linker()
    if command:
        return Finding("linker", OK, command[0])
    remedy = "install a C linker (gcc) for quick loading; without one, objects load through the compiler"
    return Finding("linker", NOTE, "none", remedy)


def _runtime() -> Finding:
    from tpf_jit.errors import NoKernel
    from tpf_jit.loader import runtime_library

    try:
        flavour, path = runtime_library()
    except NoKernel as error:
        return Finding("kernel runtime", FAIL, str(error), 'pip install "nvidia-cutlass-dsl[cu13]>=4.8,<4.9"')
    return Finding("kernel runtime", OK, f"{flavour}, {path}")


def _gpu() -> Finding:
    from tpf_jit.device import current_device

    device = current_device()
    if device is None:
        remedy = "calls take the PyTorch path; compiling for sm_90a works all the same"
        return Finding("GPU", NOTE, "none that PyTorch sees", remedy)
    major, minor = device.compute_capability
    found = f"{device.name}, {device.sms} SMs, {device.memory_bytes / 2**30:.0f} GiB, driver {device.driver}"
    if device.arch is None:
        remedy = f"kernels need compute capability 9.0, this is {major}.{minor}: the PyTorch path is used"
        return Finding("GPU", NOTE, found, remedy)
    return Finding("GPU", OK, found)


def _kernels() -> Finding:
    from tpf_jit.templates import registry

    names = [template.name for template in registry.templates()]
    if not names:
        return Finding("kernels", FAIL, "no template is registered", "reinstall tpf_jit")
    return Finding("kernels", OK, ", ".join(names))


def _cache() -> Finding:
    from tpf_jit.cache import ObjectStore
    from tpf_jit.errors import CacheUntrusted

    try:
        store = ObjectStore()
        count = len(list(store.entries()))
    except CacheUntrusted as error:
        return Finding("object cache", FAIL, str(error), "set TPF_JIT_CACHE to a folder of your own, or mend its owner and mode")
    problem = _unwritable(store.root)
    if problem:
        remedy = "kernels are compiled anew by every process; set TPF_JIT_CACHE to a folder that can be written"
        return Finding("object cache", FAIL, f"{store.root}: {problem}", remedy)
    return Finding("object cache", OK, f"{store.root}, {count} objects")


def _unwritable(folder: Path) -> str | None:
    """Why nothing can be written to a folder, or where it is not there yet, to the one it would be made in. None if it can."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"tpf_jit")
            file.flush()
    except OSError as error:
        return f"{folder} cannot be written ({error.strerror or error})"
    return None


def _database() -> Finding:
    from tpf_jit.tuning_db import user_database_path
    from tpf_jit.tuning_db.audit import audit_file, is_empty, is_refused
    from tpf_jit.tuning_db.reader import folder_problem, read_layer

    path = user_database_path()
    remedy = "tuning results and hashes of cached kernels cannot be kept; set TPF_JIT_DB to a file that can be written"
    try:
        exists = path.exists()
    except OSError as error:
        return Finding("user database", FAIL, f"{path}: {error.strerror}", remedy)
    if wrong := folder_problem(path):
        return Finding("user database", FAIL, f"{path} {wrong}", remedy)
    problem = _unwritable(path.parent)
    if problem:
        return Finding("user database", FAIL, f"{path}: {problem}", remedy)
    if not exists:
        return Finding("user database", OK, f"{path}, not made yet (tpf-jit tune makes it)")
    if is_empty(path):
        return Finding("user database", OK, f"{path}, empty (the next write, such as tpf-jit tune, makes it)")
    problems = audit_file(path)
    if problems:
        if is_refused(path):
            remedy = "writing to it is refused too, and it stays as it is; set TPF_JIT_DB to another file"
        else:
            remedy = "tpf-jit db verify shows all problems; a file that is damaged as a whole is set aside at the next write"
        named = problems[0] if problems[0].startswith(str(path)) else f"{path}: {problems[0]}"
        return Finding("user database", FAIL, named, remedy)
    return Finding("user database", OK, f"{path}, {len(read_layer(path).winners)} tuned problems")


def _workspace() -> Finding:
    from tpf_jit.errors import InvalidInput
    from tpf_jit.ops.settings import WORKSPACE_VARIABLE, workspace_bytes

    try:
        mib = workspace_bytes(None) // 2**20
    except InvalidInput as error:
        return Finding("workspace", FAIL, str(error), f"training on kernels fails; mend or unset {WORKSPACE_VARIABLE}")
    return Finding("workspace", OK, f"at most {mib} MiB for the bias's gradient")


def _winners() -> Finding:
    from tpf_jit.device import current_device
    from tpf_jit.tuning_db import device_model, load_winners

    winners: Any = load_winners()
    models = {winner.device for group in winners.values() for winner in group}
    device = current_device()
    if device is None:
        return Finding("tuned for this GPU", NOTE, f"no GPU; the database knows {', '.join(sorted(models)) or 'none'}")
    model = device_model(device)
    own = [group[0] for group in winners.values() if group[0].device == model]
    if not own:
        remedy = "nearest measurements or defaults are used; tpf-jit tune TARGET mends it"
        return Finding("tuned for this GPU", NOTE, "nothing", remedy)
    stale = _stale(own)
    if stale:
        remedy = "they serve all the same; tpf-jit db stale lists them, with --recompile it finds those whose code is unchanged"
        return Finding("tuned for this GPU", NOTE, f"{len(own)} problems, {stale} with other sources or another compiler", remedy)
    return Finding("tuned for this GPU", OK, f"{len(own)} problems")


def _stale(winners: list[Any]) -> int:
    """How many winners were measured with other sources or another compiler than today's."""
    from tpf_jit.standing import Presents
    from tpf_jit.tuning_db import reader, trust

    presents = Presents()
    said: trust.Statements = {}
    for layer in reader.default_layers():
        trust.add(said, layer.statements)
    known = [(winner, presents(winner.template)) for winner in winners]
    return sum(now is None or bool(trust.outdated(winner, now, said)) for winner, now in known)
