"""The accuracy suite's results as a record: a row for every problem, family, implementation and tensor."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tpf_jit.bench.accuracy_work import WorkFile
from tpf_jit.bench.peer_base import Peer

REASONS = 3
"""Different failures of one implementation that a record names."""


def compose(
    head: Mapping[str, Any], settings: Any, kept: WorkFile, absent: Mapping[str, str], present: Sequence[Peer]
) -> dict[str, Any]:
    """A record of kind ``accuracy.attention`` from everything in the work file.

    Args:
        head: its first fields, see `record_head`.
        settings: the `AccuracySettings`.
        kept: the results.
        absent: who cannot run in this environment, and why.
        present: who can.
    """
    versions = {name: version for run in kept.runs for name, version in run["peers"].items() if version is not None}
    facts: dict[str, dict[str, Any]] = defaultdict(dict)
    for run in kept.runs:
        for impl, problems in run.get("facts", {}).items():
            facts[impl] |= problems
    seeds = sorted({key[3] for key in kept.results})
    method = {
        "reference": "float64 on the device, all rows",
        "statistic": "relative RMS per case, then mean and largest over the cases",
        "bitwise": f"{settings.repeats} calls, every other one with the smallest workspace",
        "concurrent_load": settings.load,
        "cases": len({key[:4] for key in kept.results}),
        "seeds": f"{seeds[0]}..{seeds[-1]}",
    }
    return {
        **head,
        "versions": {**head["versions"], "peers": versions},
        "method": method,
        "absent_peers": _absent(settings, kept, absent, present),
        "configurations": dict(facts),
        "rows": list(_rows(settings, kept)),
    }


def _rows(settings: Any, kept: WorkFile) -> Iterator[dict[str, Any]]:
    groups: dict[tuple, list[Mapping[str, Any]]] = defaultdict(list)
    for (crop, head_dim, family, _, impl), result in kept.results.items():
        if "failed" not in result:
            groups[family, crop, head_dim, impl].append(result)
    for (family, crop, head_dim, impl), results in sorted(groups.items()):
        shape = settings.shape(crop, head_dim)
        for tensor in results[0]["rel_rms"]:
            yield {
                "op": shape.op,
                "family": family,
                "B": shape.batch,
                "I": shape.rows,
                "N": crop,
                "H": shape.heads,
                "D": head_dim,
                "dtype": shape.dtype,
                "bias_dtype": shape.bias_dtype,
                "mask": shape.mask,
                "impl": impl,
                **judged(results, tensor, settings.repeats),
            }


def judged(results: Sequence[Mapping[str, Any]], tensor: str, repeats: int) -> dict[str, Any]:
    """The fields of a row about one tensor: errors over all cases, and whether repeated calls gave the same bits.

    Args:
        results: a case each: `rel_rms` (None where not finite, and where not zero though nothing else is right), `max_abs` (None
            where not finite) and `equal`, all by tensor.
        tensor: which.
        repeats: calls that were compared.
    """
    errors = [result["rel_rms"][tensor] for result in results if result["rel_rms"][tensor] is not None]
    largest = [result["max_abs"][tensor] for result in results if result["max_abs"][tensor] is not None]
    equal = sum(result["equal"][tensor] for result in results)
    return {
        "tensor": tensor,
        "cases": len(results),
        "not_finite": len(results) - len(largest),
        "not_zero": len(largest) - len(errors),
        "rel_rms_mean": _digits(sum(errors) / len(errors)) if errors else None,
        "rel_rms_max": _digits(max(errors)) if errors else None,
        "max_abs": _digits(max(largest)) if largest else None,
        "bitwise_repeats": repeats,
        "bitwise_cases": equal,
        "bitwise_equal": equal == len(results),
    }


def worst(result: Mapping[str, Any]) -> str:
    """One case in a few words: its largest error or what is wrong, and whether bits differ. `result`: see `judged`."""
    wrong: dict[str, list[str]] = defaultdict(list)
    for tensor, error in result["rel_rms"].items():
        if error is None:
            wrong["not finite" if result["max_abs"][tensor] is None else "not exactly zero"].append(tensor)
    reasons = "; ".join(f"{reason}: {' '.join(tensors)}" for reason, tensors in wrong.items())
    text = f"wrong ({reasons})" if wrong else f"at most {max(result['rel_rms'].values()):.2e}"
    return text + ("" if all(result["equal"].values()) else " (bits differ)")


def _absent(settings: Any, kept: WorkFile, absent: Mapping[str, str], present: Sequence[Peer]) -> dict[str, str]:
    """Why implementations lack cases: not here, a problem that they do not take, or a failure."""
    measured = {key[4] for key, result in kept.results.items() if "failed" not in result}
    found = {name: why for name, why in absent.items() if name not in measured}
    reasons: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for peer in present:
        for crop in settings.crops:
            for head_dim in settings.head_dims:
                why = peer.unsupported(settings.shape(crop, head_dim), "both")
                if why is not None:
                    reasons[peer.name][why].append(f"N={crop} D={head_dim}")
    failures: dict[str, Counter] = defaultdict(Counter)
    for (crop, head_dim, _, _, impl), result in kept.results.items():
        if "failed" in result:
            failures[impl][result["failed"], f"N={crop} D={head_dim}"] += 1
    for impl, counts in failures.items():
        for (why, where), count in counts.most_common(REASONS):
            reasons[impl][why].append(f"{where}, {count} case{'s' if count > 1 else ''}")
    found |= {
        impl: "; ".join(f"{why} ({'; '.join(where)})" for why, where in by_reason.items()) for impl, by_reason in reasons.items()
    }
    return found


def _digits(value: float) -> float:
    return float(f"{value:.5g}")
