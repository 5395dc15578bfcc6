"""The command line, `tpf-jit`. One verb a module; each imports what it needs when it runs, so `--help` is quick."""

from __future__ import annotations

import sys
import warnings


def main(argv: list[str] | None = None) -> None:
    """Run one command and exit: 0 done, 1 a failure that was said in one line, 2 a wrong command line, 130 interrupted."""
    usual, warnings.formatwarning = warnings.formatwarning, _warning
    try:
        from tpf_jit.cli.app import run

        sys.exit(run(sys.argv[1:] if argv is None else argv))
    finally:
        warnings.formatwarning = usual


def _warning(message: Warning | str, *_: object, **__: object) -> str:
    """A warning as the command line prints it: the line that led to it is ours here, and tells the user nothing."""
    return f"warning: {message}\n"
