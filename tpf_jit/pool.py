"""Compiles many kernels at once, in worker processes that see no GPU.

A pool starts one clean process (the nursery) that imports the compiler once and forks a worker whenever one is needed, which
takes milliseconds instead of seconds. Nursery and workers inherit nothing from the calling process but its module
path and environment, with ``CUDA_VISIBLE_DEVICES=""``: they neither run the caller's ``__main__`` nor share its CUDA state.

Failure is contained: a compile that raises, hangs past the time limit, or takes its process down fails its own future with
CompileFailed, and the next job gets a new worker. Workers end with the pool, with the interpreter, and (within a second)
when the calling process is killed.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import pickle
import queue
import select
import signal
import socket
import subprocess
import threading
import time
import weakref
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

from tpf_jit import child
from tpf_jit.compiler import CompiledObject, KernelSpec, compile_kernel, import_dsl
from tpf_jit.errors import CompileFailed, TpfError
from tpf_jit.templates import registry

log = logging.getLogger("tpf_jit")

_MAX_WORKERS = 32
_START_LIMIT_S = 120.0  # importing the compiler from a cold network file system
_WATCH_S = 1.0
# One compute thread per worker; the fork must not meet helper threads of numerical libraries either.
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class CompilePool:
    """Worker processes that compile kernel specs.

    Args:
        workers: how many compile at once; by default one per CPU this process may use, at most 32.
        timeout_s: seconds one compile may take before its worker is killed.

    Use as a context manager: leaving it normally waits for what was submitted, leaving it by an exception (Ctrl-C too) cancels
    what waits and kills what runs. Thread-safe.
    """

    def __init__(self, workers: int | None = None, timeout_s: float = 120.0) -> None:
        usable = len(os.sched_getaffinity(0))
        self.workers = max(1, min(_MAX_WORKERS, usable) if workers is None else workers)
        self.timeout_s = timeout_s
        self._jobs: queue.SimpleQueue[tuple[Future, KernelSpec, bytes] | None] = queue.SimpleQueue()
        self._nursery = _NurseryHandle()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._unfinished = 0
        self._closed = False
        # Not a bound method: the interpreter-exit hook must not keep the pool alive.
        self._finalizer = weakref.finalize(self, _NurseryHandle.kill, self._nursery)

    def submit(self, spec: KernelSpec) -> Future[CompiledObject]:
        """Queue one compile. The future raises CompileFailed (or NoKernel) when it fails; it can be cancelled while it waits.

        Raises RuntimeError if the pool is closed, NoKernel if the template is not registered here.
        """
        spec.key  # noqa: B018 - fixed here, so that the worker can tell whether it reads the same sources
        payload = pickle.dumps((spec, _portable(registry.get(spec.template))))
        future: Future[CompiledObject] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the compile pool is closed")
            self._jobs.put((future, spec, payload))
            self._unfinished += 1
            if len(self._threads) < min(self.workers, self._unfinished):
                thread = threading.Thread(target=self._serve, name=f"tpf_jit-compile-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
        return future

    def close(self, wait: bool = True) -> None:
        """Stop. With `wait`, what was submitted is finished first; without, it is cancelled or killed. Idempotent."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
        if not wait:
            self._cancel_waiting()
            self._nursery.kill()
        for _ in threads:
            self._jobs.put(None)
        for thread in threads:
            thread.join()
        self._finalizer()

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self.close(wait=kind is None)

    def _cancel_waiting(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is not None:
                    job[0].cancel()

    def _serve(self) -> None:
        """One thread per worker process: hands it jobs, watches it, replaces it."""
        worker: _Worker | None = None
        while (job := self._jobs.get()) is not None:
            future, spec, payload = job
            if future.set_running_or_notify_cancel():
                worker, outcome = self._run(worker, spec, payload)
                if isinstance(outcome, BaseException):
                    future.set_exception(outcome)
                else:
                    log.info("compiled %s in %.2f s", spec, outcome.compile_s)
                    future.set_result(outcome)
            with self._lock:
                self._unfinished -= 1
        if worker is not None:
            worker.kill()

    def _run(
        self, worker: _Worker | None, spec: KernelSpec, payload: bytes
    ) -> tuple[_Worker | None, CompiledObject | BaseException]:
        """One job on `worker`, or on a new one; the worker for the next job, and the outcome."""
        try:
            worker = worker or self._nursery.new_worker()
            return worker, worker.run(payload, self.timeout_s)
        except Exception as error:  # noqa: BLE001 - whatever broke must not end the thread that serves the queue
            if worker is not None:
                worker.kill()
            return None, CompileFailed(f"{spec} did not compile: {error}")


class _WorkerLost(Exception):
    """A worker process ended or was ended before it answered."""


class _Worker:
    """One forked worker: its process and the connection to it."""

    def __init__(self, pid: int, connection: Connection) -> None:
        self.pid, self._connection = pid, connection
        try:
            # By id alone, a signal could reach whatever process has inherited the number of a dead worker.
            self._process: int | None = os.pidfd_open(pid)
        except (AttributeError, OSError):
            self._process = None

    def run(self, payload: bytes, timeout_s: float) -> CompiledObject | BaseException:
        """The result or the exception of one job. Raises _WorkerLost if there is no answer."""
        try:
            self._connection.send_bytes(payload)
            if not self._connection.poll(timeout_s):
                raise _WorkerLost(f"it took longer than {timeout_s:g} s and was stopped")
            return pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise _WorkerLost("its worker process died (a crash in the compiler, out of memory, or killed)") from error

    def kill(self) -> None:
        """End the process; harmless if it is gone, and to repeat."""
        self._connection.close()
        with contextlib.suppress(OSError):
            if self._process is None:
                os.kill(self.pid, signal.SIGKILL)
            else:
                process, self._process = self._process, -1
                signal.pidfd_send_signal(process, signal.SIGKILL)
                os.close(process)


class _NurseryHandle:
    """The parent's side of the nursery; starts it on the first request and again if it died."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._socket: socket.socket | None = None
        self._stopped = False
        self._owner = os.getpid()

    def new_worker(self) -> _Worker:
        """A fresh worker. Raises _WorkerLost if none can be started."""
        with self._lock:
            problem: Exception | None = None
            for _attempt in range(2):
                if self._stopped:
                    raise _WorkerLost("the compile pool was stopped")
                try:
                    if self._process is None or self._process.poll() is not None:
                        self._start()
                    return self._fork()
                except (OSError, EOFError) as error:
                    problem = error
                    self._discard()
            raise _WorkerLost(f"no worker process can be started ({problem})") from problem

    def kill(self) -> None:
        """End the nursery, and through it every worker. Idempotent; a forked copy of the calling process leaves it alone."""
        if os.getpid() != self._owner:
            return
        self._stopped = True
        process = self._process
        if process is not None:
            process.kill()  # wakes a thread that holds the lock while it waits for an answer
        with self._lock:
            self._discard()

    def _start(self) -> None:
        self._discard()
        ours, theirs = socket.socketpair()
        started = time.perf_counter()
        self._process = subprocess.Popen(
            child.command("tpf_jit.pool", "_nursery", theirs.fileno()),
            env={**os.environ, **_ENVIRONMENT},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a template prints while it is traced must not mix with the caller's output
        )
        theirs.close()
        ours.settimeout(_START_LIMIT_S)
        self._socket = ours
        if ours.recv(1) != b"r":
            raise EOFError("the process that imports the compiler ended early; its message is on stderr")
        log.debug("compile workers ready in %.2f s", time.perf_counter() - started)

    def _fork(self) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._socket, [b"f"], [theirs.fileno()])
        answer = self._socket.recv(8)
        if len(answer) != 8:
            ours.close()
            raise EOFError("the process that starts workers died")
        return _Worker(int.from_bytes(answer, "little"), Connection(ours.detach()))

    def _discard(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _portable(template: Any) -> Any:
    """The template as a worker will get it. CompileFailed where it cannot get it."""
    cls = type(template)
    if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
        raise CompileFailed(
            f"template {template.name} is defined in {cls.__module__}.{cls.__qualname__}, which compile workers cannot import; "
            "remedy: move it to a module, or compile it in this process"
        )
    return template


def _nursery(descriptor: str) -> None:
    """Main loop of the nursery process: a byte with a socket comes in, a worker is forked, its process id goes out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the caller, who ends us
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the kernel
    parent, here = os.getppid(), os.getpid()
    import_dsl()
    importlib.import_module("tvm_ffi")
    control = socket.socket(fileno=int(descriptor))
    control.send(b"r")
    while True:
        ready, _, _ = select.select([control], [], [], _WATCH_S)
        if os.getppid() != parent:
            os._exit(1)
        if not ready:
            continue
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            control.close()
            _work(descriptors[0], here)
            os._exit(0)
        os.close(descriptors[0])
        control.send(pid.to_bytes(8, "little"))


def _work(descriptor: int, nursery: int) -> None:
    """Main loop of a worker: a pickled (spec, template) comes in, a pickled result or exception goes out."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the linker is a child process
    # The compiler may hold the interpreter lock, so no thread can see to it. The nursery in turn ends when the caller does.
    child.die_with(nursery)
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, OSError):
        while True:
            connection.send_bytes(_answer(connection.recv_bytes()))


def _answer(payload: bytes) -> bytes:
    outcome: CompiledObject | BaseException
    try:
        spec, template = pickle.loads(payload)
        registry.register(template)
        here = KernelSpec(spec.template, spec.variant, spec.config, spec.arch)
        if here.key != spec.key:
            raise CompileFailed(f"the source files of {spec.template} changed while this process ran; remedy: start it again")
        outcome = compile_kernel(spec)
    except TpfError as error:
        outcome = type(error)(str(error))  # causes may not survive pickling
    except BaseException as error:  # noqa: BLE001 - the caller must get an answer
        outcome = CompileFailed(f"the compile worker failed: {type(error).__name__}: {error}")
    return pickle.dumps(outcome)

