"""Many topics, queues and segments: the cost of commands, claims and reads."""

from __future__ import annotations

import http.client
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

import headwater
from bench import _measure as measure
from bench._measure import Server
from bench._serving import serving
from headwater.calls import queues as queue_calls
from headwater.calls import reading as reading_calls

TOPICS = 10_000
QUEUES = 1_000
# One topic is busy, others have a few events each, and some are empty.
BUSY_EVENTS = 100_000
SPREAD_EVENTS = 50_000
WIDE_TOPICS = 2_000
WIDE_BATCH = 100
SEGMENTS = 700
EVENTS_A_SEGMENT = 20
PAGE = 1_000
PAYLOAD_BYTES = 200

# The limits that docs/benchmarks-method.md states.
LIMITS = {
    "doctor_ms": 1_000,
    "queue_list_ms": 1_000,
    "overview_ms": 1_000,
    "show_queue_ms": 50,
    "claim_idle_topics_ms": 20,
    "claim_busy_topics_ms": 20,
    "read_segments_ratio": 2,
    "maintain_ms": 2_000,
}

# What its page relies on: a number in the last line of every run, also with --quick.
PROMISED = tuple(LIMITS)

PREPARE = f"""
insert into headwater_internal.topic (name) select 't' || lpad(i::text, 5, '0') from generate_series(1, {TOPICS}) as i;
insert into headwater_internal.event (topic_id, routing_key, payload)
select t.id, 'orders.' || t.name, convert_to(repeat('x', {PAYLOAD_BYTES}), 'UTF8')
from generate_series(1, {SPREAD_EVENTS}) as i
join headwater_internal.topic t on t.name = 't' || lpad((1 + (i * 7919) % {TOPICS // 2})::text, 5, '0');
insert into headwater_internal.event (topic_id, routing_key, payload)
select t.id, 'orders.busy', convert_to(repeat('x', {PAYLOAD_BYTES}), 'UTF8')
from headwater_internal.topic t cross join generate_series(1, {BUSY_EVENTS}) as i
where t.name = 't00001';

-- Of ten queues seven have one topic, one has ten, one a pattern over all topics, one a type of the busy topic.
insert into headwater_internal.queue (name, start_position)
select 'q' || lpad(i::text, 4, '0'), case when i % 3 = 0 then 0 else headwater.head() end
from generate_series(1, {QUEUES}) as i;
insert into headwater_internal.binding (queue_id, topic_id, from_position)
select g.id, t.id, 0
from headwater_internal.queue g
cross join generate_series(0, case when g.id % 10 = 7 then 9 else 0 end) as i
join headwater_internal.topic t on t.name = 't' || lpad((1 + (g.id * 37 + i) % {TOPICS})::text, 5, '0')
where g.id % 10 < 8;
insert into headwater_internal.binding (queue_id, pattern, pattern_regex, from_position)
select g.id, 'orders.t' || lpad(g.id::text, 5, '0'),
    headwater_internal.pattern_regex('orders.t' || lpad(g.id::text, 5, '0')), 0
from headwater_internal.queue g
where g.id % 10 = 8;
insert into headwater_internal.binding (queue_id, topic_id, type, from_position)
select g.id, t.id, 'OrderPlaced', 0
from headwater_internal.queue g
join headwater_internal.topic t on t.name = 't00001'
where g.id % 10 = 9;
"""

WIDE = f"""
select headwater.create_queue(
    'wide',
    array(select t.name from headwater_internal.topic t where t.name > 't05000' order by t.name limit {WIDE_TOPICS}),
    start_position => headwater.head()
)
"""

PUBLISH = """
insert into headwater_internal.event (topic_id, payload)
select t.id, convert_to(repeat('x', 200), 'UTF8')
from headwater_internal.topic t
where t.name > 't05000' and t.name <= 't' || lpad((5000 + %s::integer)::text, 5, '0')
"""


def milliseconds(act: Callable[[], Any], times: int, *, warm: bool = False) -> float:
    """The median of several runs, after a warm-up run if necessary."""
    if not warm:
        act()
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        act()
        taken.append((time.perf_counter() - started) * 1000)
    return statistics.median(taken)


# --- commands ------------------------------------------------------------------------------------------------


def commands(server: Server, times: int) -> dict[str, float]:
    """Run commands as a user does: medians of the elapsed time, and the CPU time of the process and of the server.
    `command_start_ms` is the time of a command that does nothing.
    """
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as bytecode:
        # An installed package has bytecode files; here the warm-up run writes them.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment |= {"PYTHONPYCACHEPREFIX": bytecode, "HEADWATER_DSN": server.dsn}
        for name, arguments in (("command_start", "--version"), ("doctor", "doctor"), ("queue_list", "queue list")):
            program = [sys.executable, "-c", "from headwater.cli import main; main()", *arguments.split()]

            def run(program: list[str] = program) -> None:
                subprocess.run(program, env=environment, stdout=subprocess.DEVNULL, check=True)

            run()
            client, database = children_cpu_seconds(), server.cpu_seconds()
            found[f"{name}_ms"] = milliseconds(run, times, warm=True)
            found[f"{name}_client_cpu_ms"] = (children_cpu_seconds() - client) / times * 1000
            if database is not None and name != "command_start":
                found[f"{name}_server_cpu_ms"] = ((server.cpu_seconds() or 0) - database) / times * 1000
    return found


def children_cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextmanager
def http_client(server: Server) -> Iterator[Callable[[str], Any]]:
    with serving(server.dsn, "--http", "127.0.0.1:0", "--requests-per-second", "0") as (ready, _):
        connection = http.client.HTTPConnection(ready["http"].removeprefix("http://"), timeout=120)

        def get(path: str) -> Any:
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read()
            if answer.status != 200:
                raise RuntimeError(f"{path}: {answer.status} {body.decode()}")
            return json.loads(body)

        try:
            yield get
        finally:
            connection.close()


def looking(server: Server, times: int) -> dict[str, float]:
    found = commands(server, times) | {
        "maintain_ms": milliseconds(lambda: server.execute("select headwater.maintain()"), times),
    }
    with http_client(server) as get:
        found["overview_ms"] = milliseconds(lambda: get("/v1/overview"), times)
        found["show_queue_ms"] = milliseconds(lambda: get("/v1/queues/q0201"), 4 * times)
    return found


# --- claiming ------------------------------------------------------------------------------------------------


def claiming(server: Server, times: int, *, active: int) -> float:
    """One claim of a queue bound to 2,000 topics; some of them get an event before each claim."""
    taken = []
    with headwater.connect(server.dsn, pool_size=1) as log, psycopg.connect(server.dsn, autocommit=True) as publisher:
        claim = queue_calls.claim("wide", worker="bench", batch_size=WIDE_BATCH, relaxed=True)
        for number in range(times + 3):
            publisher.execute(PUBLISH, (active,))
            started = time.perf_counter()
            lease = log.run(claim)
            milli = (time.perf_counter() - started) * 1000
            assert lease is not None
            assert len(lease.events) == min(active, WIDE_BATCH)
            log.run(queue_calls.settle(lease, {}, rest_done=True))
            if number >= 3:
                taken.append(milli)
    return statistics.median(taken)


# --- reading -------------------------------------------------------------------------------------------------


ROTATE = f"""
begin
    insert into headwater_internal.event (topic_id, payload)
    select t.id, convert_to(repeat('x', {PAYLOAD_BYTES}), 'UTF8')
    from headwater_internal.topic t
    cross join generate_series(1, {EVENTS_A_SEGMENT})
    where t.name = 'many-segments';
    update headwater_internal.segment set opened_at = opened_at - interval '2 days' where closed_at is null;
    perform headwater_internal.rotate();
end;
"""


def make_segments(server: Server, segments: int) -> None:
    """Rotate segments as maintenance does, with some events of the topic in each; 20 rotations per transaction."""
    for _ in range(segments // 20):
        server.execute(f"do $$ begin for _ in 1 .. 20 loop {ROTATE} end loop; end $$")


@contextmanager
def pages(server: Server, topic: str) -> Iterator[dict[str, Callable[[], Any]]]:
    """Read a page at the start of the topic and one at its end, on one connection."""
    with headwater.connect(server.dsn, pool_size=1) as log:
        stable = log.state().stable
        last = log.read_backwards(topic, batch_size=10)[-1].position

        def page(after: int) -> Callable[[], Any]:
            call = reading_calls.read_stable(
                [topic], after=after, stable=stable, batch_size=PAGE, max_bytes=16_777_216, gone_to=0
            )
            return lambda: log.run(call)

        yield {"start": page(0), "end": page(last - 1)}


def main() -> None:
    options = measure.arguments(__doc__ or "")
    times, segments = options.sized((9, SEGMENTS), (3, SEGMENTS), (1, 40))
    wanted = options.only or ["look", "claim", "read"]
    found: dict[str, float] = {}
    with measure.measured_server(options.dsn) as server:
        if "look" in wanted or "claim" in wanted:
            measure.say(f"{TOPICS:,} topics, {QUEUES:,} queues")
            server.execute(PREPARE)
        if "look" in wanted:
            measure.say("doctor, queue list, overview, one queue")
            found |= looking(server, times)
        if "claim" in wanted:
            measure.say(f"claims of a queue bound to {WIDE_TOPICS:,} topics")
            server.execute(WIDE)
            found["claim_idle_topics_ms"] = claiming(server, 5 * times, active=1)
            found["claim_busy_topics_ms"] = claiming(server, 5 * times, active=WIDE_TOPICS)
        if "read" in wanted:
            found |= reading(server, times, segments)
        measure.table(
            "at scale",
            ("", "ms", "promised"),
            [(name, measure.number(value, 1), measure.number(LIMITS.get(name))) for name, value in found.items()],
        )
        measure.finish(
            server,
            options,
            "scale",
            {
                **{name: round(value, 2) for name, value in found.items()},
            },
        )


ONE_SEGMENT = f"""
insert into headwater_internal.topic (name) values ('one-segment'), ('many-segments');
insert into headwater_internal.event (topic_id, payload)
select t.id, convert_to(repeat('x', {PAYLOAD_BYTES}), 'UTF8')
from headwater_internal.topic t
cross join generate_series(1, {PAGE + EVENTS_A_SEGMENT})
where t.name = 'one-segment';
"""


def reading(server: Server, times: int, segments: int) -> dict[str, float]:
    """Read pages of 1,000 events of one topic, alternately from a log of one segment and of many."""
    with measure.twin(server) as small:
        for one in (small, server):
            one.execute(ONE_SEGMENT)
        measure.say(f"rotating {segments} times")
        make_segments(server, segments)
        measure.say(f"pages of one topic, with one segment and with {segments}")
        with (
            pages(small, "one-segment") as alone,
            pages(server, "one-segment") as same,
            pages(server, "many-segments") as spread,
        ):
            acts = {
                "read_one_segment_ms": alone["start"],
                "read_segments_ms": same["start"],
                "read_spread_ms": spread["start"],
                "read_tail_one_segment_ms": alone["end"],
                "read_tail_segments_ms": spread["end"],
            }
            taken: dict[str, list[float]] = {name: [] for name in acts}
            # Alternating, so that other load on the machine affects all equally.
            for number in range(10 * times + 2):
                for name, act in acts.items():
                    started = time.perf_counter()
                    act()
                    if number >= 2:
                        taken[name].append((time.perf_counter() - started) * 1000)
    found = {name: statistics.median(values) for name, values in taken.items()}
    return found | {
        "read_segments_ratio": max(
            found["read_segments_ms"] / found["read_one_segment_ms"],
            found["read_tail_segments_ms"] / found["read_tail_one_segment_ms"],
        ),
        "read_spread_ratio": found["read_spread_ms"] / found["read_one_segment_ms"],
    }


if __name__ == "__main__":
    main()
