"""Measuring in a child process: a kernel that hangs, crashes or ruins its CUDA context costs one trial, not the sweep.

    with Isolation() as isolation:
        measurer = isolation.measurer(measure.cuda_measurer, template, shape, device, 0)

The child is started once, serves one measurer after another, and is replaced when it is lost: ended by a signal, silent for
longer than a hard limit, or left with a device that takes no more work. The candidate that was running is then a
`launch_error` whose detail says what happened, and the next one starts in a new process with a new context, after a proof
that the device works there. What need not be the candidate's doing is tried once more before it is written down: SIGKILL from
outside (the system's out-of-memory killer, an operator), a child that was gone before the candidate's turn, and errors of the
machine (ECC, a driver that was reset). A machine error that comes back ends the sweep.

Candidates and outcomes are plain data and travel by pickle over a socket pair. The child does not run the caller's `__main__`,
prints to stderr only, ignores Ctrl-C, which is the caller's to handle, and dies with the thread that started it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from tpf_jit import child
from tpf_jit.errors import MeasurementFailed
from tpf_jit.tune.measure import DETAIL_LIMIT, Job, Measurer, Outcome

_log = logging.getLogger("tpf_jit")

MACHINE_FAULTS = (
    *("uncorrectable", "ecc error", "hardware error"),
    *("gpu is lost", "fallen off the bus", "requires reset", "was reset", "driver reset"),
    *("busy or unavailable", "driver shutting down", "system not yet initialized", "unsupported display driver"),
    "no cuda-capable device",
)
"""Parts of error texts, in lower case, that speak of the machine and not of the kernel that happened to run."""

_END_S = 10.0


@dataclass(frozen=True)
class HardLimits:
    """Seconds of silence after which a child is killed. Generous: most hanging kernels are found by the timer in the child."""

    start_s: float = 300.0
    """Until the measurer is made: importing torch from a cold disk, creating a context."""
    first_s: float = 900.0
    """First candidate of a child, which waits for the FP64 reference of the check."""
    step_s: float = 180.0
    """Any other: checking or timing one candidate."""


class _Lost(Exception):
    """A child is gone. `killed`: by SIGKILL that we did not send. `at`: key of the job it had announced, "" if none."""

    def __init__(self, text: str, at: str = "", killed: bool = False) -> None:
        super().__init__(text)
        self.at, self.killed = at, killed


class Isolation:
    """A child process for measuring, started when the first measurer is made. A context manager: leaving it ends the child.

    Args:
        limits: see `HardLimits`.

    Attributes:
        started: how many processes were started so far; 1 unless one was lost.
    """

    def __init__(self, limits: HardLimits | None = None) -> None:
        self.limits = limits or HardLimits()
        self.started = 0
        self._child: _Child | None = None
        self._serves: object = None
        self._greeting: tuple[str, dict[str, Any]] = ("", {})
        self._fresh = True

    def __enter__(self) -> Isolation:
        return self

    def __exit__(self, *exc: object) -> None:
        self.discard()

    def measurer(self, make: Callable[..., Measurer], template: Any, *arguments: Any) -> Measurer:
        """`make(template, *arguments)` made in the child. One measurer is served at a time, the one made or used last.

        A template that another process cannot import (of `__main__`, or defined in a function) is measured in this one.

        Raises:
            MeasurementFailed: the measurer cannot be made there; the message has the reason.
        """
        kind = type(template)
        if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
            _log.warning("%s is defined in %s, which no other process can import: it is measured here", template.name, kind)
            return make(template, *arguments)
        return IsolatedMeasurer(self, (make, (template, *arguments)))

    def hello(self, recipe: tuple[Any, ...]) -> tuple[str, dict[str, Any]]:
        """Protocol and device facts of the measurer that `recipe` (function, arguments) makes in the child, made now if need be.

        Raises:
            MeasurementFailed: see `measurer`.
        """
        if self._child is not None and self._serves is recipe:
            return self._greeting
        try:
            kind, *answer = self._made(recipe)
        except _Lost as lost:
            raise MeasurementFailed(f"the measuring process cannot be started: {lost}") from lost
        if kind == "error" or not answer[2]:
            self.discard()
            reason = answer[0] if kind == "error" else "the GPU takes no work in a new process"
            raise MeasurementFailed(
                f"measuring in a process of its own failed: {reason}. If the GPU is in exclusive mode, end the processes that "
                "use it; where there is a choice, measure in this one (TuneOptions(isolate=False), see docs/faults.md)"
            )
        self._serves, self._fresh, self._greeting = recipe, True, (answer[0], answer[1])
        return self._greeting

    def _made(self, recipe: tuple[Any, ...]) -> tuple[Any, ...]:
        """The child's answer when it is told to make a measurer; a child that was killed meanwhile is replaced once."""
        for again in (True, False):
            try:
                if self._child is None:
                    self._child = _Child()
                    self.started += 1
                return self._child.ask(("make", *recipe), self.limits.start_s)
            except _Lost as lost:
                self.discard()
                if not (lost.killed and again):
                    raise
            except BaseException:
                self.discard()
                raise
        raise _Lost("no process")

    def call(self, recipe: tuple[Any, ...], method: str, *arguments: Any) -> Any:
        """What a method of the measurer returns.

        Raises:
            _Lost: the child was lost; the next call starts another.
            MeasurementFailed: no child can be made, or the method raised.
        """
        self.hello(recipe)
        limits = self.limits
        try:
            kind, answer = self._child.ask(("call", method, arguments), limits.step_s, limits.first_s if self._fresh else None)
        except BaseException:
            # Ctrl-C too: the answer that is still to come must not be taken for that of the next question.
            self.discard()
            raise
        if kind == "error":
            raise MeasurementFailed(f"the measurer failed: {answer}")
        self._fresh = False
        return answer

    def discard(self) -> None:
        """End the child; harmless if there is none."""
        process, self._child, self._serves = self._child, None, None
        if process is not None:
            process.end()

    def release(self, recipe: tuple[Any, ...]) -> None:
        """Let the child free what a measurer holds on the device; the child stays for the next one."""
        if self._child is not None and self._serves is recipe:
            with contextlib.suppress(_Lost, MeasurementFailed):
                self.call(recipe, "close")
            self._serves = None


class IsolatedMeasurer:
    """A `Measurer` whose work is done in the child of an `Isolation`; made by `Isolation.measurer`."""

    def __init__(self, isolation: Isolation, recipe: tuple[Any, ...]) -> None:
        self._isolation = isolation
        self._recipe = recipe
        self.protocol, self.device = isolation.hello(recipe)

    def measure(self, job: Job, best_us: float | None = None, incumbent: Job | None = None) -> Outcome:
        return self._trial("measure", job, best_us, incumbent)

    def verify(self, job: Job) -> Outcome:
        return self._trial("verify", job)

    def shootout(self, jobs: Sequence[Job]) -> dict[str, Outcome]:
        outcomes: dict[str, Outcome] = {}
        left = list(jobs)
        again = True
        while left:
            try:
                found = self._isolation.call(self._recipe, "shootout", left)
            except _Lost as lost:
                ran = lost.at in {job.key for job in left}
                if not ran and not again:
                    raise MeasurementFailed(f"the shoot-out was lost before its first launch: {lost}") from lost
                culprit, outcome, excusable = lost.at, Outcome("launch_error", f"{lost}"), lost.killed or not ran
            else:
                culprit = next((key for key, outcome in found.items() if outcome.fatal), "")
                if not culprit:
                    return {**outcomes, **found}
                self._isolation.discard()
                outcome = found[culprit]
                excusable = _of_the_machine(outcome)
            if excusable and again:
                again = False
                continue
            if _of_the_machine(outcome):
                return {**outcomes, culprit: outcome}
            outcomes[culprit] = _blamed(outcome)
            left = [job for job in left if job.key != culprit]
        return outcomes

    def close(self) -> None:
        self._isolation.release(self._recipe)

    def _trial(self, method: str, job: Job, *more: Any) -> Outcome:
        for again in (True, False):
            try:
                outcome = self._isolation.call(self._recipe, method, job, *more)
            except _Lost as lost:
                # A child that was gone before it announced the candidate has not run it.
                outcome, excusable = Outcome("launch_error", f"{lost}"), lost.killed or lost.at != job.key
            else:
                if not outcome.fatal:
                    return outcome
                self._isolation.discard()
                excusable = _of_the_machine(outcome)
            if not (excusable and again):
                break
            _log.info("%s is measured again in a new process: %s", job.symbol, outcome.detail)
        return outcome if _of_the_machine(outcome) else _blamed(outcome)


def _of_the_machine(outcome: Outcome) -> bool:
    return outcome.fatal and any(text in outcome.detail.lower() for text in MACHINE_FAULTS)


def _blamed(outcome: Outcome) -> Outcome:
    """The outcome of a candidate that cost its process: not fatal, as the next candidate gets another."""
    outcome.fatal = False
    outcome.detail = f"{outcome.detail}; measured in a process of its own, which was replaced"[-DETAIL_LIMIT:]
    return outcome


class _Child:
    """The process and the connection to it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                child.command("tpf_jit.tune.isolated", "_serve", theirs.fileno(), os.getpid()),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a template prints must not mix with the caller's output
            )
        self._connection = Connection(ours.detach())

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def ask(self, question: tuple[Any, ...], limit_s: float, first_s: float | None = None) -> tuple[Any, ...]:
        """The answer to a question. Every announcement restarts the clock; until the second one it stands at `first_s`."""
        at = ""
        seen: set[str] = set()
        data = pickle.dumps(question)
        try:
            self._connection.send_bytes(data)
            while True:
                limit = first_s if first_s is not None and len(seen) < 2 else limit_s
                if not self._connection.poll(limit):
                    raise _Lost(f"timeout: no answer from the measuring process within {limit:g} s, which was stopped", at)
                kind, *answer = pickle.loads(self._connection.recv_bytes())
                if kind != "at":
                    return kind, *answer
                at = answer[0]
                seen.add(at)
        except _Lost:
            raise
        except Exception as error:  # noqa: BLE001 - a closed connection, or nonsense from a process with ruined memory
            raise self._why(at) from error

    def end(self) -> None:
        """End the process and wait for it, which can take a moment where the driver has to stop a kernel."""
        self._connection.close()
        self._process.kill()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            _log.warning("measuring process %d does not end: the driver may be stuck in it", self._process.pid)

    def _why(self, at: str) -> _Lost:
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return _Lost("the measuring process closed its connection", at)
        if code >= 0:
            return _Lost(f"the measuring process ended itself with exit code {code}", at)
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        if code == -signal.SIGKILL:
            return _Lost(f"the measuring process was killed ({name}: out of memory, or by hand)", at, killed=True)
        return _Lost(f"the measuring process crashed ({name})", at)


def _serve(descriptor: str, parent: str) -> None:
    """Main loop of the child: questions come in, announcements and answers go out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child.die_with(int(parent))
    connection = Connection(int(descriptor))
    measurer: Any = None

    def announce(key: str) -> None:
        connection.send_bytes(pickle.dumps(("at", key)))

    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            data = connection.recv_bytes()
            try:
                kind, subject, arguments = pickle.loads(data)
                if kind == "make":
                    if measurer is not None:
                        measurer.close()
                    measurer = None
                    measurer = subject(*arguments)
                    measurer.announce = announce
                    alive = getattr(measurer, "alive", lambda: True)()
                    answer = pickle.dumps(("made", measurer.protocol, measurer.device, alive))
                else:
                    answer = pickle.dumps(("done", getattr(measurer, subject)(*arguments)))
            except Exception as error:  # noqa: BLE001 - the caller must get an answer
                answer = pickle.dumps(("error", f"{type(error).__name__}: {error}"[:DETAIL_LIMIT]))
            connection.send_bytes(answer)
