"""The pipeline on Spark: changes to NATS and to Delta, snapshots, reads of the log; beside Debezium, JDBC and COPY."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from bench import _measure as measure
from bench._pipeline_changes import CAPTURE, DEBEZIUM, DELTA, EACH, PACKED, Live, measure_changes, measure_live
from bench._pipeline_place import GROUPS, Turns, cpu_us, prepared, rate, ratio
from bench._pipeline_reads import COPY, JDBC, LOG, SNAPSHOT, measure_reads, measure_snapshots

TITLES = {
    PACKED: "slot to NATS, packed by transaction",
    EACH: "slot to NATS, a message for each change",
    DELTA: "slot to a Delta table",
    CAPTURE: "slot to nothing",
    DEBEZIUM: "the same by Debezium, to its handler",
    LOG: "the log, to nothing",
    JDBC: "the same by Spark's JDBC source",
    SNAPSHOT: "a snapshot of a table, to nothing",
    COPY: "the same by COPY, one connection",
}


def show(turns: Turns, compared: Mapping[str, str]) -> None:
    rows: list[Sequence[str] | None] = []
    for name, some in turns.items():
        other = compared.get(name)
        times = ratio(turns, name, other) if other else None
        rows.append(
            (
                TITLES[name],
                measure.number(rate(turns, name)),
                "" if times is None else measure.number(times, 2),
                *(measure.number(cpu_us(some, group), 1) for group in GROUPS),
            )
        )
    columns = ("", "a second", "of the next", *(f"{group} us" for group in GROUPS))
    measure.table("changes, events and rows; CPU time for each; `python`: Spark's workers and driver", columns, rows)


def main() -> None:
    options = measure.arguments(__doc__ or "")
    started = time.monotonic()
    # Who is told to end still stops the servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if options.quick:
        changes, rows, rounds, slow = 100_000, 300_000, 1, 15
    else:
        changes, rows, rounds, slow = 300_000, 1_000_000, 3, 200
    parts = options.only or ["changes", "reads", "snapshots", "live"]
    turns: Turns = {}
    live: Live | None = None
    with prepared(options.dsn, rows=rows) as place:
        if "changes" in parts:
            measure.say("changes: capture, NATS, Delta, Debezium")
            turns |= measure_changes(place, count=changes, rounds=rounds)
        if "reads" in parts:
            measure.say("reading the log")
            turns |= measure_reads(place, rows=rows, rounds=rounds)
        if "snapshots" in parts:
            measure.say("snapshots")
            turns |= measure_snapshots(place, rows=rows, rounds=rounds)
        if "live" in parts:
            measure.say("a pipeline that stays up")
            live = measure_live(place, count=slow, warm_up=5 if options.quick else 40, per_second=4)
        show(turns, {CAPTURE: DEBEZIUM, LOG: JDBC, SNAPSHOT: COPY})
        if live is not None:
            print(
                f"from commit to message, 4 changes a second: p50 {measure.percentile(live.latencies_ms, 50):.0f} ms, "
                f"p99 {measure.percentile(live.latencies_ms, 99):.0f} ms; "
                f"a snapshot to NATS beside it: {live.snapshot_rows_per_s:,.0f} rows/s"
            )
        measure.finish(
            place.server,
            {
                "bench": "pipeline",
                **result(turns, live),
                "quick": options.quick,
                "seconds": round(time.monotonic() - started, 1),
            },
        )


def result(turns: Turns, live: Live | None) -> dict[str, Any]:
    """Rates and ratios; null where the other side is not there."""

    def rounded(value: float | None, digits: int | None = None) -> float | None:
        return None if value is None else round(value, digits)

    found: dict[str, Any] = {
        "changes_per_s_packed": rounded(rate(turns, PACKED)),
        "changes_per_s_each": rounded(rate(turns, EACH)),
        "changes_per_s_delta": rounded(rate(turns, DELTA)),
        "changes_per_s_captured": rounded(rate(turns, CAPTURE)),
        "log_rows_per_s": rounded(rate(turns, LOG)),
        "snapshot_rows_per_s": rounded(rate(turns, SNAPSHOT)),
        "snapshot_rows_per_s_nats": rounded(live.snapshot_rows_per_s) if live else None,
        "capture_vs_debezium": rounded(ratio(turns, CAPTURE, DEBEZIUM), 2),
        "read_vs_jdbc": rounded(ratio(turns, LOG, JDBC), 2),
        "snapshot_vs_copy": rounded(ratio(turns, SNAPSHOT, COPY), 2),
        "latency_p50_ms": rounded(measure.percentile(live.latencies_ms, 50), 1) if live else None,
        "latency_p99_ms": rounded(measure.percentile(live.latencies_ms, 99), 1) if live else None,
    }
    for name in (PACKED, EACH, DELTA, CAPTURE, DEBEZIUM):
        for group in GROUPS if turns.get(name) else ():
            if (used := cpu_us(turns[name], group)) is not None:
                found[f"cpu_us_per_change_{name}_{group}"] = round(used, 1)
    return found


if __name__ == "__main__":
    main()
