"""Counters and gauges of a bridge: as Prometheus text, as a log line and as a JSON document. No I/O."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Final


def _figure(name: str, kind: str, help_text: str) -> Any:
    return field(default=0, metadata={"name": name, "kind": kind, "help": help_text})


@dataclass(slots=True)
class BridgeMetrics:
    """Counters and gauges of one bridge. The first ten have the same names as in ZeBridge."""

    uptime_seconds: int = _figure("bridge_uptime_seconds", "gauge", "Seconds since the bridge started.")
    wal_messages: int = _figure("bridge_wal_messages_received_total", "counter", "Changes read from the slot.")
    cdc_events: int = _figure("bridge_cdc_events_published_total", "counter", "Changes that JetStream acknowledged.")
    last_ack_lsn: int = _figure("bridge_last_ack_lsn", "gauge", "LSN up to which all changes are in JetStream.")
    connected: int = _figure("bridge_connected", "gauge", "1 if Postgres and NATS are reachable, else 0.")
    reconnects: int = _figure("bridge_reconnects_total", "counter", "Reconnections to Postgres.")
    nats_reconnects: int = _figure("bridge_nats_reconnects_total", "counter", "Reconnections to NATS.")
    last_processing_time_us: int = _figure(
        "bridge_last_processing_time_us", "gauge", "Microseconds per change in the last batch."
    )
    slot_active: int = _figure("bridge_slot_active", "gauge", "1 if the slot exists and has lost no WAL, else 0.")
    wal_lag_bytes: int = _figure("bridge_wal_lag_bytes", "gauge", "Bytes of WAL that the slot retains.")
    wal_confirmed_lag_bytes: int = _figure(
        "bridge_wal_confirmed_lag_bytes", "gauge", "Bytes of WAL that the slot has not confirmed yet."
    )
    batches: int = _figure("bridge_batches_total", "counter", "Micro-batches published.")
    messages: int = _figure("bridge_nats_messages_total", "counter", "Change messages that JetStream acknowledged.")
    schemas: int = _figure(
        "bridge_schemas_published_total", "counter", "Schema documents published because a table was new or changed."
    )
    snapshots_running: int = _figure("bridge_snapshots_running", "gauge", "Snapshots in progress.")
    snapshots_completed: int = _figure("bridge_snapshots_completed_total", "counter", "Snapshots completed.")
    snapshots_failed: int = _figure("bridge_snapshots_failed_total", "counter", "Snapshots that failed.")
    snapshot_rows: int = _figure("bridge_snapshot_rows_published_total", "counter", "Snapshot rows published.")

    def document(self) -> dict[str, int]:
        return asdict(self)


_LINE: Final = (
    ("uptime", "uptime_seconds"),
    ("wal_messages", "wal_messages"),
    ("cdc_events", "cdc_events"),
    ("lsn", "last_ack_lsn"),
    ("connected", "connected"),
    ("reconnects", "reconnects"),
    ("nats_reconnects", "nats_reconnects"),
    ("lag_bytes", "wal_lag_bytes"),
    ("slot_active", "slot_active"),
    ("messages", "messages"),
    ("snapshots_running", "snapshots_running"),
    ("snapshot_rows", "snapshot_rows"),
)


def prometheus(figures: BridgeMetrics) -> str:
    """The metrics in Prometheus text format."""
    lines = []
    for name, described in BridgeMetrics.__dataclass_fields__.items():
        metric = described.metadata["name"]
        lines.append(f"# HELP {metric} {described.metadata['help']}")
        lines.append(f"# TYPE {metric} {described.metadata['kind']}")
        lines.append(f"{metric} {getattr(figures, name)}")
    return "\n".join(lines) + "\n"


def log_line(figures: BridgeMetrics) -> str:
    """The key=value pairs of the METRICS log line, with the LSN in Postgres' format."""
    values = {shown: getattr(figures, name) for shown, name in _LINE}
    lsn = values["lsn"]
    values["lsn"] = f"{lsn >> 32:x}/{lsn & 0xFFFFFFFF:x}"
    return " ".join(f"{shown}={value}" for shown, value in values.items())
