"""Log output on request: TPF_JIT_LOG=INFO shows on stderr what is compiled, loaded, borrowed or dropped.

Without the variable tpf_jit configures nothing, as a library should: its logger, "tpf_jit", belongs to the application.
"""

from __future__ import annotations

import logging

from tpf_jit import errors

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_FORMAT = "tpf_jit %(levelname)s %(asctime)s [%(process)d] %(message)s"


def configure(level: str) -> bool:
    """Send the logger's messages of `level` and above to stderr; an unknown level warns and changes nothing."""
    name = level.strip().upper()
    if name not in LEVELS:
        errors.warn(f"TPF_JIT_LOG is {level!r}; it can be {', '.join(LEVELS)}", UserWarning)
        return False
    logger = logging.getLogger("tpf_jit")
    logger.setLevel(name)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(_FORMAT, "%H:%M:%S"))
    logger.addHandler(handler)
    # An application that logs to its root handler would print every message twice.
    logger.propagate = False
    return True
