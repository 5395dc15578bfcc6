"""How this package starts processes of its own: a clean interpreter with the caller's module path, which ends with its caller.

The child imports one module and calls one function of it. It neither runs the caller's `__main__` nor inherits anything of the
caller's CUDA state. Standard library only.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1


def command(module: str, function: str, *arguments: object) -> list[str]:
    """Command line of a process that calls `module.function(*arguments)`; the function gets the arguments as texts."""
    call = f"from {module} import {function}; {function}(*sys.argv[2:])"
    code = f"import sys,json; sys.path[:]=json.loads(sys.argv[1]); {call}"
    flags = subprocess._args_from_interpreter_flags()
    return [sys.executable, *flags, "-c", code, json.dumps(sys.path), *map(str, arguments)]


def die_with(parent: int) -> None:
    """Have the system kill this process when the thread that started it ends, in the middle of a launch or a compile too.

    Args:
        parent: process id of the caller; this process ends at once if the caller is gone already.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
