"""Subject and floor in turns, and what may be said of the two afterwards.

A single absolute time says little on a machine whose disk changes its mind; the ratio of two runs side by side says more. So every
comparison is a row of pairs, its figure is the median of their ratios, and none is given while the disk moved.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

PAIRS_MIN: Final = 5
"""Fewer can't outvote two bad ones."""

DISK_MOVED_MAX: Final = 2.0
"""How much the raw write may change between pairs before their ratios are worth nothing."""

SLOW_DISK_MS: Final = 2.0
"""From here on a disk counts as slow, and the stricter target of B1 holds: beside such a write nothing else should be felt."""

Sense: TypeAlias = Literal["at most", "at least"]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One turn of each, and the raw write around them."""

    subject: float
    floor: float
    disk_ms: float
    notes: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def ratio(self) -> float:
        """Subject over floor."""
        return self.subject / self.floor


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One line of the table."""

    bench: str
    name: str
    value: float | None
    """None when it may not be reported."""
    target: float | None = None
    sense: Sense = "at most"
    unit: str = ""
    disk_ms: float | None = None
    detail: str = ""
    raw: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one, or without a value."""
        if self.value is None or self.target is None:
            return None
        return self.value <= self.target if self.sense == "at most" else self.value >= self.target


def disk_moved(disks_ms: Sequence[float]) -> bool:
    """Whether the raw write changed too much over these."""
    return bool(disks_ms) and max(disks_ms) > DISK_MOVED_MAX * min(disks_ms)


def longest_steady(pairs: Sequence[Pair]) -> Sequence[Pair]:
    """The longest row of neighbours over which the disk stayed what it was. Chosen by the disk alone, never by the ratios."""
    best: Sequence[Pair] = []
    for first in range(len(pairs)):
        last = first
        while last < len(pairs) and not disk_moved([p.disk_ms for p in pairs[first : last + 1]]):
            last += 1
        if last - first > len(best):
            best = pairs[first:last]
    return best


def run_pairs(one: Callable[[], Pair], *, pairs_min: int = PAIRS_MIN, pairs_max: int | None = None) -> list[Pair]:
    """Pairs until enough neighbours had a steady disk, at most twice as many as that needs."""
    most = pairs_max if pairs_max is not None else 2 * pairs_min
    pairs: list[Pair] = []
    while len(longest_steady(pairs)) < pairs_min and len(pairs) < most:
        pairs.append(one())
    return pairs


def median_ratio(pairs: Sequence[Pair], *, pairs_min: int = PAIRS_MIN) -> tuple[float | None, Sequence[Pair]]:
    """The median of the ratios of the steady pairs, and those; None when there are not enough of them."""
    steady = longest_steady(pairs)
    if len(steady) < pairs_min:
        return None, steady
    return statistics.median(p.ratio for p in steady), steady


def spread(values: Sequence[float]) -> str:
    """Median and range, as a reader wants them."""
    if not values:
        return "-"
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share of all lies; nearest rank."""
    if not values:
        raise ValueError("no values, so no percentile")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered)) - 1))]


def of_pairs(
    bench: str, name: str, pairs: Sequence[Pair], *, target: float, sense: Sense, pairs_min: int = PAIRS_MIN, unit: str
) -> Figure:
    """The line of the table that a row of pairs gives."""
    value, steady = median_ratio(pairs, pairs_min=pairs_min)
    shown = steady or pairs
    subjects, floors = [p.subject for p in shown], [p.floor for p in shown]
    detail = f"subject {spread(subjects)} {unit}, floor {spread(floors)} {unit}, {len(shown)} of {len(pairs)} pairs"
    if value is None:
        disks = [p.disk_ms for p in pairs]
        detail = f"not reported: the disk moved from {min(disks):.2f} to {max(disks):.2f} ms; {detail}"
    return Figure(
        bench=bench,
        name=name,
        value=value,
        target=target,
        sense=sense,
        unit="x",
        disk_ms=statistics.median(p.disk_ms for p in shown),
        detail=detail,
        raw={
            "pairs": [
                {"subject": p.subject, "floor": p.floor, "ratio": p.ratio, "disk_ms": p.disk_ms, **p.notes}
                for p in pairs
            ]
        },
    )


def table(figures: Sequence[Figure]) -> str:
    """Everything that was measured, a line each."""
    rows = [("", "figure", "value", "target", "met", "fdatasync p50", "detail")]
    for f in figures:
        met = {True: "yes", False: "NO", None: "-"}[f.met]
        target = "-" if f.target is None else f"{'<=' if f.sense == 'at most' else '>='} {f.target:g}"
        value = "-" if f.value is None else f"{f.value:.3g} {f.unit}".strip()
        disk = "-" if f.disk_ms is None else f"{f.disk_ms:.2f} ms"
        rows.append((f.bench, f.name, value, target, met, disk, f.detail))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = ["  ".join([c.ljust(w) for c, w in zip(row, widths, strict=False)] + [row[-1]]).rstrip() for row in rows]
    return "\n".join(lines)
