"""A fuzzer of the Kafka protocol with state between frames: mutates requests of every API and version.

Each fuzzer keeps some connections open and remembers what answers told: members, generations, producers, topic ids.
A request is made from its schema, with values from that memory, and then damaged or not. After each burst of frames
comes a request of a known number: its answer proves that all before it were answered; the other fair end is that the
broker closes the connection. A connection that has neither within the time is a failure.

    python tests/conformance/kafka_fuzzer.py HOST:PORT FRAMES SEED [PID]
"""

from __future__ import annotations

import random
import select
import socket
import struct
import sys
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any, Final

import google_crc32c
from kio.index import load_request_schema, load_response_schema
from kio.serial import entity_reader
from kio.serial.errors import SerialError

from headwater.servers.kafka.compression import compress
from headwater.servers.kafka.dispatch import SUPPORTED_VERSIONS
from headwater.servers.kafka.records import TRANSACTIONAL, Columns, build_batch
from headwater.servers.kafka.wire import _entity_writer, _shapes

ANSWER_SECONDS: Final = 120.0
WAIT_SECONDS: Final = 0.5
CONNECTIONS: Final = 4
BURST: Final = 24
SENTINEL: Final = 0x5EED
TOPICS: Final = ("fz", "fz-compact", "fz-open", "fz-none", "fz-new-1", "fz-new-2")
# What may rightly wait for others, or for time: joins, syncs, fetches.
WAITING: Final = frozenset({1, 11, 14})
WEIGHTS: Final = {0: 6, 1: 3, 8: 3, 11: 6, 12: 4, 13: 2, 14: 5, 22: 2, 24: 2, 25: 2, 26: 2, 28: 2, 68: 8,
                  19: 0.2, 20: 0.2, 37: 0.1, 51: 0.3, 30: 0.3}  # fmt: skip
APIS: Final = tuple(SUPPORTED_VERSIONS)
PATIENT_WEIGHTS: Final = [WEIGHTS.get(api, 1.0) for api in APIS]
QUICK_WEIGHTS: Final = [0 if api in WAITING else WEIGHTS.get(api, 1.0) for api in APIS]
NUMBERS: Final = (0, 1, 2, 3, -1, -2, 100, 127, 1000, 2**15 - 1, -(2**15), 2**31 - 1, -(2**31), 2**63 - 1, -(2**63))


class Unanswered(AssertionError):
    """A connection was neither answered nor closed."""


class Fuzzer:
    """Sends frames to one broker until there were enough."""

    def __init__(self, address: tuple[str, int], seed: int) -> None:
        self._address = address
        self._random = random.Random(seed)
        self._connections: list[socket.socket] = []
        self.counts: Counter[str] = Counter()
        self._members: list[str] = [""]
        self._generations: list[int] = [-1, 0, 1]
        self._producers: list[tuple[int, int]] = [(-1, -1)]
        self._topic_ids: list[uuid.UUID] = [uuid.UUID(int=1)]
        self._last: list[bytes] = []

    def run(self, frames: int) -> None:
        """Send frames, in bursts, over several connections, until the broker has answered or closed on so many."""
        self._learn()
        while self.handled < frames:
            self._burst()
            if self._random.random() < 0.01:
                self._learn()
        for one in self._connections:
            one.close()
        self._connections.clear()

    @property
    def handled(self) -> int:
        """Frames that were answered, and those that ended their connection. What was sent after it is not."""
        return self.counts["answers"] + self.counts["closed by the broker"]

    # --- frames ---

    def _learn(self) -> None:
        """Read the ids of topics, and look that the broker answers an honest client."""
        client = socket.create_connection(self._address, timeout=ANSWER_SECONDS)
        with client:
            client.sendall(self._framed(3, 12, {"topics": None}, 7))
            answer = self._read(client, ANSWER_SECONDS)
            if answer is None or answer[:4] != struct.pack(">i", 7):
                raise Unanswered("an honest client got no metadata")
            found = self._parsed(3, 12, answer)
            self._topic_ids = [topic.topic_id for topic in found.topics if topic.topic_id] or self._topic_ids
            self.counts["honest answers"] += 1

    def _burst(self) -> None:
        rng = self._random
        if len(self._connections) < CONNECTIONS:
            self._connections.append(socket.create_connection(self._address, timeout=ANSWER_SECONDS))
            self.counts["connections"] += 1
        client = rng.choice(self._connections)
        sent: dict[int, tuple[int, int]] = {}
        data = []
        may_wait = broken = False
        # Most bursts hold nothing that may wait: they are answered at once.
        weights = PATIENT_WEIGHTS if rng.random() < 0.15 else QUICK_WEIGHTS
        for number in range(rng.randint(1, BURST)):
            api = rng.choices(APIS, weights)[0]
            oldest, newest = SUPPORTED_VERSIONS[api]
            version = rng.randint(max(oldest, 3 if api == 0 else 0), newest)
            frame = self._framed(api, version, self._fields(api, version), number)
            may_wait |= api in WAITING
            kind = rng.random()
            if kind < 0.1:
                frame = self._damaged(frame)
                # The number of an API may be another now.
                may_wait |= int.from_bytes(frame[4:6], "big") in WAITING
            elif kind < 0.102:
                frame, broken = self._missized(frame), True
            else:
                sent[number] = (api, version)
            data.append(frame)
            if rng.random() < 0.05:
                data.append(frame)
            self._last = [*self._last[-40:], frame]
        self.counts["sent"] += len(data)
        try:
            client.sendall(b"".join(data) + self._framed(18, 0, {}, SENTINEL))
            if broken:
                client.shutdown(socket.SHUT_WR)
            ended = self._hear(client, sent, WAIT_SECONDS if may_wait else ANSWER_SECONDS)
        except TimeoutError:
            if not may_wait:
                raise Unanswered(f"no answer and no end within {ANSWER_SECONDS:g} s: {self._last!r}") from None
            self.counts["left waiting"] += 1
            ended = True
        except ConnectionError:
            self.counts["closed by the broker"] += 1
            ended = True
        if ended or rng.random() < 0.01:
            client.close()
            self._connections.remove(client)

    def _hear(self, client: socket.socket, sent: dict[int, tuple[int, int]], seconds: float) -> bool:
        """Read answers up to the sentinel's; True: the broker closed the connection before."""
        until = time.monotonic() + seconds
        while True:
            answer = self._read(client, max(0.01, until - time.monotonic()))
            if answer is None:
                self.counts["closed by the broker"] += 1
                return True
            (number,) = struct.unpack_from(">i", answer)
            self.counts["answers"] += 1
            if number == SENTINEL:
                self.counts["answers"] -= 1
                return False
            if number in sent:
                self._remember(*sent[number], answer)

    def _read(self, client: socket.socket, seconds: float) -> bytes | None:
        head = self._exactly(client, 4, seconds)
        return None if head is None else self._exactly(client, struct.unpack(">i", head)[0], ANSWER_SECONDS)

    def _exactly(self, client: socket.socket, count: int, seconds: float) -> bytes | None:
        found = bytearray()
        while len(found) < count:
            if not select.select([client], [], [], seconds)[0]:
                raise TimeoutError
            part = client.recv(count - len(found))
            if not part:
                return None
            found += part
        return bytes(found)

    def _framed(self, api: int, version: int, fields: dict[str, Any], number: int) -> bytes:
        schema: Any = load_request_schema(api, version)
        parts = [struct.pack(">hhih", api, version, number, 2) + b"fz" + (b"\x00" if schema.__flexible__ else b"")]
        _entity_writer(schema)(parts, fields)
        body = b"".join(parts)
        return struct.pack(">i", len(body)) + body

    # --- what answers told ---

    def _parsed(self, api: int, version: int, answer: bytes) -> Any:
        schema: Any = load_response_schema(api, version)
        return entity_reader(schema)(answer, 4 + (schema.__flexible__ and api != 18))[0]

    def _remember(self, api: int, version: int, answer: bytes) -> None:
        if api not in (11, 22, 68):
            return
        try:
            found = self._parsed(api, version, answer)
        except (KeyError, ValueError, IndexError, struct.error, MemoryError, SerialError):
            # A damaged frame may carry the number of another one, and this is its answer.
            return
        if getattr(found, "member_id", None):
            self._members = [*self._members[-30:], found.member_id]
        for name in ("generation_id", "member_epoch"):
            if hasattr(found, name):
                self._generations = [*self._generations[-30:], getattr(found, name)]
        if hasattr(found, "producer_id"):
            self._producers = [*self._producers[-10:], (found.producer_id, found.producer_epoch)]

    # --- values ---

    def _fields(self, api: int, version: int) -> dict[str, Any]:
        self._producer = self._random.choice(self._producers)
        return self._entity(load_request_schema(api, version))

    def _entity(self, schema: Any) -> dict[str, Any]:
        rng = self._random
        fields: dict[str, Any] = {}
        for shape in _shapes(schema):
            if shape.tag is not None and rng.random() < 0.5:
                continue
            # Null where it may be, and at times where it may not.
            if rng.random() < (0.15 if shape.nullable else 0.001) and (
                shape.array or shape.nullable or shape.kind in ("string", "bytes", "records")
            ):
                fields[shape.name] = None
            elif shape.array:
                fields[shape.name] = [self._one(shape) for _ in range(rng.choice((0, 1, 1, 2, 3)))]
            else:
                fields[shape.name] = self._one(shape)
        return fields

    def _one(self, shape: Any) -> Any:
        return self._entity(shape.nested) if shape.nested is not None else self._value(shape.name, shape.kind)

    def _value(self, name: str, kind: str) -> Any:
        rng = self._random
        if kind == "string":
            return self._text(name)
        if kind == "uuid":
            return rng.choice(self._topic_ids)
        if kind == "bool":
            return rng.random() < 0.5
        if kind == "records":
            return self._batch()
        if kind == "bytes":
            return rng.randbytes(rng.choice((0, 4, 30)))
        if kind == "float64":
            return rng.choice((0.0, 1.5, -1.0))
        number = self._number(name)
        bits = {"int8": 7, "int16": 15, "error_code": 15, "int32": 31, "timedelta_i32": 31}.get(kind, 63)
        if kind in ("uint16", "uint32"):
            return abs(number) % 2 ** int(kind[4:])
        return max(-(2**bits), min(2**bits - 1, number))

    def _text(self, name: str) -> str:
        rng = self._random
        if rng.random() < 0.02:
            return rng.choice(("", "\x00", "x" * 300, "ü", "a.b", "*", "User:*", "../x"))
        if "member_id" in name:
            return rng.choice(self._members)
        if name in ("transactional_id", "transactional_ids"):
            return rng.choice(("fz-t1", "fz-t2"))
        if "group" in name or name in ("key", "coordinator_keys"):
            return rng.choice(("fz-g1", "fz-g2", "fz-g3", "fz-g4"))
        if "instance" in name:
            return rng.choice(("fz-i1", "fz-i2"))
        if "assignor" in name:
            return rng.choice(("uniform", "range", "none"))
        if "regex" in name:
            return rng.choice(("fz.*", "(", "", "f[a-z]", "(a*)*b", "^fz$"))
        if "protocol" in name:
            return "consumer" if "type" in name else rng.choice(("range", "sticky"))
        if "mechanism" in name:
            return "PLAIN"
        return rng.choice(TOPICS)

    def _number(self, name: str) -> int:
        rng = self._random
        if rng.random() < 0.03:
            return rng.choice(NUMBERS)
        if "session_timeout" in name:
            return rng.choice((100, 300, 1000))
        if "rebalance_timeout" in name:
            return rng.choice((100, 500, 2000))
        if "max_wait" in name or name == "timeout":
            return rng.choice((0, 1, 50))
        if "generation" in name or "member_epoch" in name:
            return rng.choice((*self._generations, 0, 0, 0, -1, -2))
        if name == "producer_id":
            return self._producer[0]
        if name == "producer_epoch":
            return self._producer[1]
        if name == "acks":
            return rng.choice((-1, -1, 1, 0))
        if "bytes" in name:
            return rng.choice((0, 1, 10_000, 1_000_000))
        if name in ("num_partitions", "count"):
            return rng.choice((-1, 1, 2, 5))
        return rng.choice((0, 0, 0, 1, 2, -1, 5))

    def _batch(self) -> bytes:
        rng = self._random
        count = rng.choice((1, 1, 2, 10))
        columns = Columns(
            [1] * count, [rng.choice((None, b"k")) for _ in range(count)], [b"v" * rng.choice((0, 5, 500))] * count,
            [None] * count,
        )  # fmt: skip
        batch = bytearray(build_batch(list(range(count)), columns))
        struct.pack_into(">qhi", batch, 43, *self._producer, rng.choice((-1, 0, 1, 2)))
        batch[22] |= rng.choice((0, 0, TRANSACTIONAL))
        if rng.random() < 0.4:
            codec = rng.randint(1, 5)
            batch[22] |= codec
            batch[61:] = compress(min(codec, 4), bytes(batch[61:]))
            if rng.random() < 0.3:
                batch[rng.randrange(61, len(batch))] ^= 0xFF
            struct.pack_into(">i", batch, 8, len(batch) - 12)
        if rng.random() < 0.9:
            struct.pack_into(">I", batch, 17, google_crc32c.value(bytes(batch[21:])))
        return bytes(batch)

    # --- damage ---

    def _damaged(self, frame: bytes) -> bytes:
        rng = self._random
        body = bytearray(frame[4:])
        for _ in range(rng.choice((1, 1, 2, 4))):
            kind = rng.randrange(7)
            at = rng.randrange(len(body))
            if kind == 0:
                body[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            elif kind == 1 and at + 4 <= len(body):
                struct.pack_into(">i", body, at, rng.choice((-1, -2, 0, 2**31 - 1, -(2**31), 100_000)))
            elif kind == 2 and at + 2 <= len(body):
                struct.pack_into(">h", body, at, rng.choice((-1, -2, 2**15 - 1, 0)))
            elif kind == 3 and len(body) > 12:
                del body[rng.randrange(10, len(body)) :]
            elif kind == 4:
                body[at:at] = rng.randbytes(rng.randint(1, 8))
            elif kind == 5:
                struct.pack_into(">h", body, 2, rng.choice((-1, 0, 1, 2, 3, 5, 9, 20, 2**15 - 1)))
            else:
                # Tagged fields at the end, known and unknown.
                body[-1:] = bytes((2, rng.randrange(4), 1, 0, 9, 2, 0, 0))
        return struct.pack(">i", len(body)) + bytes(body)

    def _missized(self, frame: bytes) -> bytes:
        size = self._random.choice((-1, 0, 1, 7, len(frame) - 5, len(frame) + 40, 2**31 - 1, -(2**31), 20_000_000))
        return struct.pack(">i", size) + frame[4:]


def resident_mib(pid: int) -> int:
    """How much memory a process has now."""
    found = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(found.split()[1]) // 1024


def main() -> None:
    """Fuzz a broker from the command line, and print figures."""
    host, _, port = sys.argv[1].rpartition(":")
    frames, seed = int(sys.argv[2]), int(sys.argv[3])
    pid = int(sys.argv[4]) if len(sys.argv) > 4 else None
    fuzzer = Fuzzer((host, int(port)), seed)
    step = max(1, frames // 20)
    for goal in range(step, frames + step, step):
        fuzzer.run(min(goal, frames))
        told = f"rss={resident_mib(pid)}MiB " if pid else ""
        print(f"seed={seed} {told}handled={fuzzer.handled} {dict(fuzzer.counts)}", flush=True)


if __name__ == "__main__":
    main()
