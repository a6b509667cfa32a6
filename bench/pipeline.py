"""Pipelines on Spark: changes to NATS and Delta, snapshots, log reads; compared with Debezium, JDBC and COPY."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from bench import _measure as measure
from bench._pipeline_changes import CAPTURE, DEBEZIUM, DELTA, EACH, PACKED, Live, measure_changes, measure_live
from bench._pipeline_reads import COPY, JDBC, LOG, SNAPSHOT, measure_reads, measure_snapshots
from bench._pipeline_setup import PROCESS_KINDS, Measurements, cpu_us, prepared, rate, ratio

# What its page relies on: a number in the last line of every run, also with --quick.
PROMISED = ("capture_vs_debezium", "read_vs_jdbc", "snapshot_vs_copy")

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


def show(measurements: Measurements, compared: Mapping[str, str]) -> None:
    rows: list[Sequence[str] | None] = []
    for name, some in measurements.items():
        other = compared.get(name)
        times = ratio(measurements, name, other) if other else None
        rows.append(
            (
                TITLES[name],
                measure.number(rate(measurements, name)),
                "" if times is None else measure.number(times, 2),
                *(measure.number(cpu_us(some, kind), 1) for kind in PROCESS_KINDS),
            )
        )
    columns = ("", "a second", "of the next", *(f"{kind} us" for kind in PROCESS_KINDS))
    measure.table("changes, events and rows; CPU time for each; `python`: Spark's workers and driver", columns, rows)


def main() -> None:
    options = measure.arguments(__doc__ or "")
    # Stop the servers on SIGTERM, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    changes, rows, rounds, slow, warm_up = options.sized(
        (300_000, 1_000_000, 3, 200, 40), (100_000, 300_000, 1, 15, 5), (5_000, 5_000, 1, 2, 1)
    )
    parts = options.only or ["changes", "reads", "snapshots", "live"]
    measurements: Measurements = {}
    live: Live | None = None
    with prepared(options.dsn, rows=rows) as setup:
        if "changes" in parts:
            measure.say("changes: capture, NATS, Delta, Debezium")
            measurements |= measure_changes(setup, count=changes, rounds=rounds)
        if "reads" in parts:
            measure.say("reading the log")
            measurements |= measure_reads(setup, rows=rows, rounds=rounds)
        if "snapshots" in parts:
            measure.say("snapshots")
            measurements |= measure_snapshots(setup, rows=rows, rounds=rounds)
        if "live" in parts:
            measure.say("a continuous pipeline")
            live = measure_live(setup, count=slow, warm_up=warm_up, per_second=4)
        show(measurements, {CAPTURE: DEBEZIUM, LOG: JDBC, SNAPSHOT: COPY})
        if live is not None:
            print(
                f"from commit to message, 4 changes a second: p50 {measure.percentile(live.latencies_ms, 50):.0f} ms, "
                f"p99 {measure.percentile(live.latencies_ms, 99):.0f} ms; "
                f"a snapshot to NATS meanwhile: {live.snapshot_rows_per_s:,.0f} rows/s"
            )
        measure.finish(setup.server, options, "pipeline", result(measurements, live))


def result(measurements: Measurements, live: Live | None) -> dict[str, Any]:
    """Rates and ratios; null if the other side is not installed."""

    def rounded(value: float | None, digits: int | None = None) -> float | None:
        return None if value is None else round(value, digits)

    found: dict[str, Any] = {
        "changes_per_s_packed": rounded(rate(measurements, PACKED)),
        "changes_per_s_each": rounded(rate(measurements, EACH)),
        "changes_per_s_delta": rounded(rate(measurements, DELTA)),
        "changes_per_s_captured": rounded(rate(measurements, CAPTURE)),
        "log_rows_per_s": rounded(rate(measurements, LOG)),
        "snapshot_rows_per_s": rounded(rate(measurements, SNAPSHOT)),
        "snapshot_rows_per_s_nats": rounded(live.snapshot_rows_per_s) if live else None,
        "capture_vs_debezium": rounded(ratio(measurements, CAPTURE, DEBEZIUM), 2),
        "read_vs_jdbc": rounded(ratio(measurements, LOG, JDBC), 2),
        "snapshot_vs_copy": rounded(ratio(measurements, SNAPSHOT, COPY), 2),
        "latency_p50_ms": rounded(measure.percentile(live.latencies_ms, 50), 1) if live else None,
        "latency_p99_ms": rounded(measure.percentile(live.latencies_ms, 99), 1) if live else None,
    }
    for name in (PACKED, EACH, DELTA, CAPTURE, DEBEZIUM):
        for kind in PROCESS_KINDS if measurements.get(name) else ():
            if (used := cpu_us(measurements[name], kind)) is not None:
                found[f"cpu_us_per_change_{name}_{kind}"] = round(used, 1)
    return found


if __name__ == "__main__":
    main()
