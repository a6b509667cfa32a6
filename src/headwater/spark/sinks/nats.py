"""The sink `nats`: publishes captured changes to JetStream with a bridge, or rows that are messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from headwater.errors import InvalidRequest
from headwater.nats import codec
from headwater.spark.formats import nats
from headwater.spark.nats_bridge.bridge import Bridge, Zstd
from headwater.spark.options import refuse_unknown_keys
from headwater.spark.pipelines.batch import Batch, SinkContext

OPTIONS: Final = ("url", "shape", "encoding", "zstd", "host", "port", "allow_shutdown", "retry_seconds")
ZSTD: Final[Mapping[bool | str, Zstd]] = {
    False: "off",
    True: "plain",
    "off": "off",
    "plain": "plain",
    "dictionary": "dictionary",
}


class NatsBridgeSink:
    """Publishes to JetStream. For captured changes, a bridge also serves schemas, snapshots and metrics."""

    def __init__(self, options: Mapping[str, Any], context: SinkContext) -> None:
        refuse_unknown_keys(options, OPTIONS, "the sink nats")
        url = options.get("url") or context.nats_url
        if not isinstance(url, str):
            raise InvalidRequest(
                "the sink nats requires an address", hint="Write nats: nats://host:4222 at the top of the file."
            )
        shape, encoding = options.get("shape", "each"), options.get("encoding", "msgpack")
        if shape not in nats.SHAPES:
            raise InvalidRequest(f"invalid shape {shape!r}: expected {' or '.join(nats.SHAPES)}")
        if encoding not in codec.ENCODINGS:
            raise InvalidRequest(f"invalid encoding {encoding!r}: expected {' or '.join(codec.ENCODINGS)}")
        zstd = options.get("zstd", False)
        if not isinstance(zstd, bool | str) or zstd not in ZSTD:
            raise InvalidRequest(f"invalid zstd {zstd!r}: expected true, false or dictionary")
        retry_seconds = options.get("retry_seconds", 60)
        if isinstance(retry_seconds, bool) or not isinstance(retry_seconds, int | float) or retry_seconds <= 0:
            raise InvalidRequest(f"invalid retry_seconds {retry_seconds!r}: expected a number above 0")
        port = options.get("port")
        if port is not None and (isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65_535):
            raise InvalidRequest(f"invalid port {port!r}: expected 0 to 65535")
        self._context: Final = context
        self._url: Final = url
        self._shape: Final[nats.Shape] = shape
        self._retry_seconds: Final = float(retry_seconds)
        self._bridge: Bridge | None = None
        if context.source == "changes":
            slot = str(context.source_options["slot"])
            self._bridge = Bridge(
                context.spark,
                dsn=context.dsn,
                slot=slot,
                publication=context.source_options.get("publication", slot),
                tables=context.source_options.get("tables", ()),
                nats_url=url,
                encoding=encoding,
                zstd=ZSTD[zstd],
                port=port,
                host=options.get("host", "127.0.0.1"),
                allow_shutdown=bool(options.get("allow_shutdown", False)),
                ask_to_stop=context.ask_to_stop,
            )

    def prepare(self) -> None:
        if self._bridge is not None:
            self._bridge.start()

    def write(self, rows: DataFrame, batch: Batch) -> Mapping[str, int]:
        if self._bridge is not None and "commit_lsn" in rows.columns:
            published = self._bridge.publish(
                rows,
                shape=self._shape,
                end=batch.end,
                timeline=None if batch.history is None else batch.history.timeline,
                retry_seconds=self._retry_seconds,
            )
            return {"stored": published.stored, "duplicates": published.duplicates}
        if self._context.rewound_in is not None and "msg_id" in rows.columns:
            # An id derived from a position may have been used for a lost event; JetStream would drop the new message.
            rows = rows.withColumn("msg_id", f.concat("msg_id", f.lit(f"@{self._context.rewound_in}")))
        writer = rows.write.format("headwater.nats").mode("append").option("url", self._url)
        writer.option("retry_seconds", str(self._retry_seconds)).save()
        return {}

    def close(self) -> None:
        if self._bridge is not None:
            self._bridge.stop()
