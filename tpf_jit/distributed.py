"""All ranks of a distributed job run the same kernels: rank 0's tuning decides, and ranks that cannot agree say so at the start.

    torch.cuda.set_device(local_rank)
    torch.distributed.init_process_group("nccl")
    tpf_jit.distributed.freeze("openfold3")              # once, on all ranks, before training
    tpf_jit.warmup("openfold3", training=True)

Ranks have databases of their own (a home folder a node, a sweep on one of them), so without `freeze` they may run different
configurations: equally right, but neither equal to the last bit nor equally fast. Nothing here communicates but `freeze`: a call
of the operator, a compile or a first use of a new shape never does, because that would hang as soon as ranks do different work.

What is broadcast is rank 0's table of winners, not single answers. The answer for a problem is a pure function of that table, the
templates and the device model, all of which `freeze` compares, so shapes that nobody listed are served alike too.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from tpf_jit import kernels, resolve
from tpf_jit.errors import NoKernel, RanksDisagree
from tpf_jit.resolve import Dispatcher
from tpf_jit.templates import registry
from tpf_jit.templates.base import config_to_dict
from tpf_jit.tuning_db.reader import Layer
from tpf_jit.tuning_db.rows import content_hash

__all__ = ["Frozen", "freeze", "frozen", "thaw"]

log = logging.getLogger("tpf_jit")

_lock = threading.RLock()
_current: list[tuple[Frozen, Dispatcher]] = []
"""What is in force, and the dispatcher that it replaced; empty before `freeze`."""


@dataclass(frozen=True)
class Frozen:
    """What the ranks agreed on.

    Attributes:
        ranks: how many they are.
        facts: what was compared and found equal: versions, source hashes, device model.
        choices: for each of the listed problems "op/direction shape" -> template and configuration, or why there is no kernel.
        sources: the databases of rank 0 that decide, in order of precedence, with the number of problems each knows.
    """

    ranks: int
    facts: dict[str, str]
    choices: dict[str, str] = field(default_factory=dict)
    sources: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        tables = ", ".join(f"{name} ({count} problems)" for name, count in self.sources.items()) or "none"
        lines = [f"{self.ranks} ranks, tables of rank 0: {tables}"]
        return "\n".join([*lines, *(f"  {problem}: {choice}" for problem, choice in self.choices.items())])


class FrozenDispatcher(Dispatcher):
    """A dispatcher whose tables were handed to it; `reload` does not change them.

    Args:
        layers: the tables.
        user_db, shipped: of the dispatcher that the tables are from: they say which of them comes first.
        before: this process's own dispatcher, which says for which device and with which templates to answer.
    """

    def __init__(self, layers: list[Layer], user_db: Any, shipped: bool, before: Dispatcher) -> None:
        super().__init__(user_db, shipped, before._given_device, before._registry)
        self._layers = layers

    def _read_layers(self) -> list[Layer]:
        return self._layers


def freeze(shapes: Any = None, group: Any = None) -> Frozen:
    """Make all ranks use rank 0's tuning from now on. Collective: every rank of the group calls it, at the same point.

    Calls made afterwards look nothing up in databases any more; tuning in this process is not seen until `freeze` is called
    again. Kernels that are already loaded stay loaded. Without torch.distributed, or with one rank, this process's own tables
    are frozen and nothing is sent.

    Args:
        shapes: problems whose answers are compared as well and listed in the result: a shape, its key, a preset's name, or an
            iterable of these. Left out, only what decides them is compared.
        group: the process group; the default one when left out. With NCCL each rank has chosen its device before.

    Returns:
        What was agreed on. Equal on all ranks.

    Raises:
        RanksDisagree: on all ranks, when versions (tpf_jit, PyTorch, compiler), template sources, device models or `shapes`
            differ, or some rank could not take part; the message names the ranks and what differs. Nothing is changed then.
    """
    ranks = _Ranks(group)
    with _lock:
        before = _current[0][1] if _current else resolve.default_dispatcher()
        # The device may have been looked up before this rank chose its own, and rank 0's rows may be newer.
        before.reload()
        asked: list[Any] = []
        facts = _compare(ranks.gather(_attempt(lambda: _facts(before, _problems(shapes, asked)))))
        offered = ranks.from_first(_attempt(lambda: _offer(before)) if ranks.rank == 0 else None)
        present = resolve.default_dispatcher()
        done = _attempt(lambda: _install(offered, asked, before))
        try:
            answers = _compare(ranks.gather(done))
        except BaseException:  # also a collective that failed: half a job must not go on with new tables
            _use(present)
            raise
        layers = resolve.default_dispatcher().layers()
        result = Frozen(ranks.count, facts, answers, {layer.name: len(layer.winners) for layer in layers})
        _current[:] = [(result, before)]
    log.info("configurations are frozen: %s", str(result).partition("\n")[0])
    return result


def frozen() -> Frozen | None:
    """What is in force in this process; None before `freeze` and after `thaw`."""
    return _current[0][0] if _current else None


def thaw() -> None:
    """Go back to this process's own databases. Local, not collective: ranks may differ from here on."""
    with _lock:
        if _current:
            _, before = _current.pop()
            before.reload()
            _use(before)


class _Ranks:
    """The group's collectives on small objects; a process without torch.distributed is a group of one."""

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist

        together = dist.is_available() and dist.is_initialized()
        self._group, self._dist = group, dist
        self.rank = dist.get_rank(group) if together else 0
        self.count = dist.get_world_size(group) if together else 1

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        self._dist.all_gather_object(values, value, group=self._group)
        return values

    def from_first(self, value: Any) -> Any:
        """The value of rank 0."""
        if self.count == 1:
            return value
        box = [value]
        source = 0 if self._group is None else self._dist.get_global_rank(self._group, 0)
        self._dist.broadcast_object_list(box, src=source, group=self._group)
        return box[0]


def _attempt(work: Callable[[], Any]) -> dict[str, Any]:
    """What `work` gives, or its error as text: a rank that raised before a collective would leave the others waiting in it."""
    host = socket.gethostname()
    try:
        return {"host": host, "value": work()}
    except Exception as error:  # noqa: BLE001 - told to all ranks, which raise
        return {"host": host, "error": f"{type(error).__name__}: {error}"}


def _facts(dispatcher: Dispatcher, problems: list[Any]) -> dict[str, str]:
    """What must be equal on all ranks for equal answers, as texts: a rank of another version could not read our classes."""
    import torch

    from tpf_jit import __version__, compiler

    templates = registry.templates()
    facts = {"tpf_jit": __version__, "torch": str(torch.__version__)}
    for backend in sorted({template.backend for template in templates}):
        try:
            versions = compiler.toolchain(backend)
        except NoKernel as error:
            versions = {"": f"not usable ({error})"}
        facts.update({f"{backend} {name}".strip(): str(version) for name, version in versions.items()})
    facts.update({f"source of {template.name}": template.source_hash()[:16] for template in templates})
    device = dispatcher.device
    facts["device"] = "no GPU" if device is None else device.model
    facts["shapes"] = f"{len(problems)} ({content_hash([shape.key() for shape in problems])[:12]})" if problems else "none"
    return facts


def _problems(shapes: Any, into: list[Any]) -> list[Any]:
    from tpf_jit import api

    into.extend([] if shapes is None else dict.fromkeys(api._shapes(shapes)[0]))
    return into


def _offer(dispatcher: Dispatcher) -> tuple[list[Layer], Any, bool]:
    """A dispatcher's tables, and what decides which of them comes first."""
    return dispatcher.layers(), dispatcher._user_db, dispatcher._shipped


def _install(offered: dict[str, Any], problems: list[Any], before: Dispatcher) -> dict[str, str]:
    """Put rank 0's tables in force in this process, and say how they answer the problems."""
    if "error" in offered:
        raise RanksDisagree(f"rank 0 has no tables to offer: {offered['error']}")
    layers, user_db, shipped = offered["value"]
    named = [replace(layer, name=f"rank 0: {layer.name}") for layer in layers]
    dispatcher = FrozenDispatcher(named, user_db, shipped, before)
    _use(dispatcher)
    return {
        f"{shape.op}/{direction} {shape.key()}": _answer(dispatcher, shape, direction)
        for shape in problems
        for direction in dict.fromkeys(template.direction for template in registry.templates(op=shape.op))
    }


def _answer(dispatcher: Dispatcher, shape: Any, direction: str) -> str:
    try:
        found = dispatcher.resolve(shape.op, direction, shape)
    except NoKernel as error:
        return f"no kernel ({error})"
    return f"{found.template_name} " + " ".join(f"{name}={value}" for name, value in config_to_dict(found.config).items())


def _use(dispatcher: Dispatcher) -> None:
    resolve.use(dispatcher)
    kernels.reload_choices()


def _compare(gathered: list[dict[str, Any]]) -> dict[str, str]:
    """The one value that all ranks sent.

    Raises:
        RanksDisagree: naming what differs, and which ranks say what.
    """
    hosts = [each["host"] for each in gathered]
    failed = [f"rank {rank} ({hosts[rank]}): {each['error']}" for rank, each in enumerate(gathered) if "error" in each]
    if failed:
        raise RanksDisagree("not all ranks can take part, nothing was frozen:\n  " + "\n  ".join(failed))
    values = [each["value"] for each in gathered]
    lines = []
    for name in dict.fromkeys(name for value in values for name in value):
        said: dict[str, list[int]] = {}
        for rank, value in enumerate(values):
            said.setdefault(value.get(name, "missing"), []).append(rank)
        if len(said) > 1:
            lines.append(f"{name}: " + "; ".join(f"{text} on {_named(ranks, hosts)}" for text, ranks in said.items()))
    if lines:
        advice = "run every rank with the same installation on the same kind of GPU"
        raise RanksDisagree("the ranks would not run the same kernels, nothing was frozen:\n  " + "\n  ".join([*lines, advice]))
    return values[0]


def _named(ranks: list[int], hosts: list[str]) -> str:
    """`[0, 1, 2, 5]` as "ranks 0-2, 5", with their hosts where these are few."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    where = list(dict.fromkeys(hosts[rank] for rank in ranks))
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}" + (f" ({', '.join(where)})" if len(where) <= 4 else "")
