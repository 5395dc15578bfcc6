"""Importing tpf_jit, and everything an ordinary call imports, stays cheap."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 0.5

MEASURE = """
import time
import torch
start = time.process_time()
import tpf_jit
tpf_jit.triangle_attention, tpf_jit.compile, tpf_jit.warmup, tpf_jit.TriangleAttentionShape
print(time.process_time() - start)
import sys
heavy = {'cutlass', 'optuna', 'sqlite_utils', 'rich', 'typer', 'matplotlib'}
print(*sorted(heavy & {name.partition('.')[0] for name in sys.modules}))
"""


def run(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_import_beyond_torch() -> None:
    """CPU time, not wall time: other tests run on the same cores. The best of three, as the first also fills caches."""
    run(MEASURE)
    times = []
    for _ in range(3):
        seconds, heavy = (run(MEASURE) + [""])[:2]
        assert heavy == "", f"importing the operator loads {heavy}"
        times.append(float(seconds))
    assert min(times) <= LIMIT_S, f"import takes {min(times):.2f} s beyond torch"


def test_bare_import_loads_no_torch() -> None:
    (line,) = run("import sys, tpf_jit; print('torch' in sys.modules)")
    assert line == "False"


def test_help_is_quick() -> None:
    """`tpf-jit --help` must not pay for torch or the compiler."""
    code = (
        "import sys\n"
        "from tpf_jit.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print(*sorted({'torch', 'cutlass', 'optuna', 'sqlite_utils'} & set(sys.modules)), sep=' ')\n"
    )
    assert run(code)[-1] == ""
