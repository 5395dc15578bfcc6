"""Work on another stream: results must not depend on what else the GPU does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIZE = 1024
"""Matrices whose product takes part of the GPU's SMs at a time, so that the rest of the work comes and goes beside it."""
BATCH = 16
AHEAD = 2
"""Batches of products in flight."""


@contextmanager
def concurrent_load(device: Any) -> Iterator[None]:
    """Keep a second stream of a CUDA device busy with matrix products; does nothing for None and for other devices.

    On leaving, the stream is idle.
    """
    import torch

    if device is None or device.type != "cuda":
        yield
        return
    left, right = (torch.ones((SIZE, SIZE), dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(left)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    stop, running = threading.Event(), threading.Event()

    def work() -> None:
        flying: list[Any] = []
        with torch.no_grad(), torch.cuda.device(device), torch.cuda.stream(stream):
            while not stop.is_set():
                for _ in range(BATCH):
                    torch.mm(left, right, out=out)
                flying.append(torch.cuda.Event())
                flying[-1].record(stream)
                running.set()
                if len(flying) > AHEAD:
                    flying.pop(0).synchronize()
        stream.synchronize()

    thread = threading.Thread(target=work, name="tpf_jit-load", daemon=True)
    thread.start()
    try:
        running.wait(10.0)
        yield
        torch.cuda.current_stream(device).synchronize()
    finally:
        stop.set()
        thread.join()
