"""The command line, `tpf-jit`. One verb a module; each imports what it needs when it runs, so `--help` is quick."""

from __future__ import annotations

import sys


def main(argv: list[str] | None = None) -> None:
    """Run one command and exit: 0 done, 1 a failure that was said in one line, 2 a wrong command line, 130 interrupted."""
    from tpf_jit.cli.app import run

    sys.exit(run(sys.argv[1:] if argv is None else argv))
