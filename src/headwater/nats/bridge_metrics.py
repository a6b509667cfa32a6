"""What a bridge counts, as Prometheus reads it, as a line of the log, and as a document. No I/O here."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Final


def _figure(name: str, kind: str, help_text: str) -> Any:
    return field(default=0, metadata={"name": name, "kind": kind, "help": help_text})


@dataclass(slots=True)
class Figures:
    """Counters and gauges of one bridge. The first ten have ZeBridge's names."""

    uptime_seconds: int = _figure("bridge_uptime_seconds", "gauge", "Seconds since the bridge started.")
    wal_messages: int = _figure("bridge_wal_messages_received_total", "counter", "Changes read from the slot.")
    cdc_events: int = _figure("bridge_cdc_events_published_total", "counter", "Changes that JetStream acknowledged.")
    last_ack_lsn: int = _figure("bridge_last_ack_lsn", "gauge", "Everything before this LSN is in JetStream.")
    connected: int = _figure("bridge_connected", "gauge", "1 if Postgres and NATS answer.")
    reconnects: int = _figure("bridge_reconnects_total", "counter", "How often Postgres answered again.")
    nats_reconnects: int = _figure("bridge_nats_reconnects_total", "counter", "How often NATS answered again.")
    last_processing_time_us: int = _figure(
        "bridge_last_processing_time_us", "gauge", "Microseconds that a change of the last batch took."
    )
    slot_active: int = _figure("bridge_slot_active", "gauge", "1 if the slot is there and has lost nothing.")
    wal_lag_bytes: int = _figure("bridge_wal_lag_bytes", "gauge", "What the slot keeps of the server's log.")
    wal_confirmed_lag_bytes: int = _figure(
        "bridge_wal_confirmed_lag_bytes", "gauge", "How much of the server's log is not confirmed yet."
    )
    batches: int = _figure("bridge_batches_total", "counter", "Micro-batches that were published.")
    messages: int = _figure("bridge_nats_messages_total", "counter", "Messages of changes that were acknowledged.")
    schemas: int = _figure("bridge_schemas_published_total", "counter", "Schema documents that were new.")
    snapshots_running: int = _figure("bridge_snapshots_running", "gauge", "Snapshots that are being taken.")
    snapshots_completed: int = _figure("bridge_snapshots_completed_total", "counter", "Snapshots that are whole.")
    snapshots_failed: int = _figure("bridge_snapshots_failed_total", "counter", "Snapshots that failed.")
    snapshot_rows: int = _figure("bridge_snapshot_rows_published_total", "counter", "Rows of snapshots published.")

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


def prometheus(figures: Figures) -> str:
    """The text that Prometheus reads."""
    lines = []
    for name, described in Figures.__dataclass_fields__.items():
        metric = described.metadata["name"]
        lines.append(f"# HELP {metric} {described.metadata['help']}")
        lines.append(f"# TYPE {metric} {described.metadata['kind']}")
        lines.append(f"{metric} {getattr(figures, name)}")
    return "\n".join(lines) + "\n"


def log_line(figures: Figures) -> str:
    """What stands behind METRICS in the log: pairs, the LSN as Postgres writes it."""
    values = {shown: getattr(figures, name) for shown, name in _LINE}
    lsn = values["lsn"]
    values["lsn"] = f"{lsn >> 32:x}/{lsn & 0xFFFFFFFF:x}"
    return " ".join(f"{shown}={value}" for shown, value in values.items())
