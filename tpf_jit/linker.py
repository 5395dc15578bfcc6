"""Links an object file into a shared library with the system's C compiler or linker, where there is one.

The library needs nothing of the C library and names neither libraries nor paths, so it loads on any machine. Where there is no
linker, kernels stay object files (see `tpf_jit.loader`).
"""

from __future__ import annotations

import logging
import shutil
import subprocess
from functools import cache
from pathlib import Path

log = logging.getLogger("tpf_jit")

_FLAGS = ("-z", "noexecstack", "--build-id=none", "-s")


@cache
def linker() -> tuple[str, ...] | None:
    """Command that links one object file into a shared library, or None where no linker is installed."""
    for name in ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            return (path, "-shared", "-nostdlib", "-Wl," + ",".join(_FLAGS))
    for name in ("ld", "ld.lld"):
        if path := shutil.which(name):
            return (path, "-shared", *_FLAGS)
    return None


def link(path: Path) -> bytes | None:
    """The shared library of an object file, made beside it; None where it cannot be linked."""
    command = linker()
    if command is None:
        return None
    output = path.with_suffix(".so")
    try:
        done = subprocess.run([*command, "-o", str(output), str(path)], capture_output=True, text=True)
        problem = done.stderr.strip() if done.returncode else None
    except OSError as error:
        problem = str(error)
    if problem is not None:
        log.warning("%s cannot link kernels, they stay object files and load more slowly: %s", command[0], problem)
        return None
    return output.read_bytes()
