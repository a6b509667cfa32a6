"""Is an event the same everywhere: over HTTP, in an SSE stream, in a webhook, on the command line, in the console?"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import headwater
from headwater import NewEvent
from headwater.cli import app
from headwater.log.cloud_events import parse_binary, parse_structured
from headwater.log.event_json import read_array, read_object
from headwater.servers.http import static
from http_server import http_process
from patience import PATIENCE_SECONDS
from webhook_receiver import Received, Receiver

Until = Callable[[Callable[[], Any]], Any]
CONSOLE = Path(static.__file__).parent / "console"

# Postgres stores neither NUL nor lone surrogates in text.
_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=12)
_name = _text.filter(bool)
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3),
    max_leaves=6,
)
_written = st.builds(lambda value, indent: json.dumps(value, indent=indent).encode(), _json, st.none() | st.just(1))
_bytes = st.none() | st.binary(max_size=30) | _text.map(str.encode) | _written
_content = st.tuples(st.none() | _written, st.just("application/json")) | st.tuples(
    _bytes, st.none() | st.sampled_from(["application/vnd.a+json", "text/plain", "application/xml", "image/png"])
)
new_events = st.builds(
    lambda content, **given: NewEvent(content[0], content_type=content[1], **given),
    _content,
    key=st.none() | st.binary(max_size=12) | _text,
    type=st.none() | _name,
    routing_key=st.none() | _name,
    headers=st.none() | st.dictionaries(_text, _json, max_size=3),
    event_id=st.none() | _name,
)


def _named(event: NewEvent) -> tuple[str | None, ...]:
    return event.type, event.routing_key, event.event_id


def _is_plain(text: str | None) -> bool:
    return text is None or text.isprintable()


def on_a_server(examples: int) -> settings:
    """An example takes as long as the slowest interface: few of them, and none is made smaller once it failed."""
    return settings(
        max_examples=examples,
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


_lists = st.lists(new_events, min_size=1, max_size=12)
_numbers = itertools.count()


@dataclass(frozen=True)
class Place:
    """A server, a topic, and the receivers of its webhooks by their body."""

    http: httpx.Client
    dsn: str
    topic: str
    receivers: dict[str, Receiver]


@pytest.fixture(scope="module")
def place(dsn: str) -> Iterator[Place]:
    receivers = {body: Receiver() for body in ("envelope", "cloudevents-structured", "cloudevents-binary")}
    with (
        headwater.connect(dsn) as log,
        receivers["envelope"],
        receivers["cloudevents-structured"],
        receivers["cloudevents-binary"],
        http_process(dsn, "--webhooks", "--allow-network", "127.0.0.1") as (address, _),
        httpx.Client(base_url=address, timeout=PATIENCE_SECONDS) as http,
    ):
        log.create_topic("shapes")
        for body, receiver in receivers.items():
            log.create_webhook(body, receiver.url, "shapes", body=body)
        yield Place(http, dsn, "shapes", receivers)


def publish(log: headwater.Headwater, place: Place, events: list[NewEvent]) -> list[int]:
    """Publish events, each with an id that no other event has."""
    fresh = [
        one if one.event_id is None else one._replace(event_id=f"{next(_numbers)} {one.event_id}") for one in events
    ]
    return [position for position in log.publish_batch(place.topic, fresh) if position is not None]


def over_http(place: Place, after: int) -> tuple[str, list[str]]:
    """A page, and the JSON of its events as it stands there."""
    page = place.http.get(f"/v1/topics/{place.topic}/events", params={"after": after, "limit": 1000}).text
    _, events = read_object(page, content=("events",))
    return page, read_array(events)


def cloud_events_over_http(place: Place, after: int) -> list[str]:
    asked = {"accept": "application/cloudevents-batch+json"}
    answer = place.http.get(f"/v1/topics/{place.topic}/events", params={"after": after, "limit": 1000}, headers=asked)
    assert answer.headers["content-type"] == asked["accept"]
    return read_array(answer.text)


def followed(place: Place, after: int, count: int, **parameters: str) -> list[str]:
    """The data of the next events of an SSE stream. A line ends at a line break, and nowhere else."""
    found: list[str] = []
    rest = b""
    with place.http.stream(
        "GET", f"/v1/topics/{place.topic}/follow", params={"after": str(after), **parameters}
    ) as answer:
        for part in answer.iter_raw():
            *lines, rest = re.split(rb"\r\n|\n|\r", rest + part)
            found += [line.removeprefix(b"data: ").decode() for line in lines if line.startswith(b"data: ")]
            if len(found) >= count:
                break
    return found


def printed(place: Place, after: int, option: str) -> list[str]:
    """What the command line prints, line by line."""
    arguments = ["read", place.topic, "--after", str(after), "--limit", "1000", option]
    result = CliRunner(env={"HEADWATER_DSN": place.dsn}).invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout_bytes.decode().removesuffix("\n").split("\n")


def sent(place: Place, body: str, positions: list[int], until: Until) -> list[Received]:
    """The requests of a webhook, in the order of their events."""
    received = place.receivers[body].received

    def all_sent() -> list[Received] | None:
        by_position = {one.position: one for one in list(received)}
        return [by_position[position] for position in positions] if by_position.keys() >= set(positions) else None

    return until(all_sent)  # type: ignore[no-any-return]


@on_a_server(10)
@given(events=_lists)
def test_every_interface_shows_an_event_with_the_same_characters(
    place: Place, log: headwater.Headwater, until: Until, events: list[NewEvent]
) -> None:
    positions = publish(log, place, events)
    after = positions[0] - 1
    _, shown = over_http(place, after)
    assert [json.loads(one)["position"] for one in shown] == positions
    assert place.http.get(f"/v1/events/{positions[0]}").text == shown[0]
    assert followed(place, after, len(events)) == shown
    assert printed(place, after, "--json") == shown
    assert [one.body.decode() for one in sent(place, "envelope", positions, until)] == shown

    cloud = cloud_events_over_http(place, after)
    one = place.http.get(f"/v1/events/{positions[0]}", headers={"accept": "application/cloudevents+json"})
    assert (one.text, one.headers["content-type"]) == (cloud[0], "application/cloudevents+json")
    assert followed(place, after, len(events), format="cloudevents") == cloud
    assert printed(place, after, "--cloudevents") == cloud
    requests = sent(place, "cloudevents-structured", positions, until)
    assert [one.body.decode() for one in requests] == cloud
    assert {one.headers["content-type"] for one in requests} == {"application/cloudevents+json"}


@on_a_server(6)
# Attributes with control characters are sent, but no reader needs to accept them.
@given(events=_lists.filter(lambda some: all(_is_plain(part) for one in some for part in _named(one))))
def test_binary_and_structured_webhooks_are_the_same_cloud_event(
    place: Place, log: headwater.Headwater, until: Until, events: list[NewEvent]
) -> None:
    positions = publish(log, place, events)
    structured = sent(place, "cloudevents-structured", positions, until)
    binary = sent(place, "cloudevents-binary", positions, until)
    for one, other, event in zip(structured, binary, events, strict=True):
        expected = parse_structured(one.body.decode())
        found = parse_binary(other.headers.items(), other.body)
        text = {name: json.dumps(v) if not isinstance(v, str) else v for name, v in expected.attributes.items()}
        implied = {"datacontenttype": "application/json"} if event.content_type is None else {}
        assert {**implied, **found.attributes} == {**implied, **text}
        assert other.body == (event.payload or b"")


_SHOW = """
import { readFileSync } from "node:fs";
class Node { constructor(tag) { this.tag = tag; this.children = []; } append(...some) { this.children.push(...some); }
  setAttribute() {} get textContent() { return this.children.map((c) => c.textContent ?? String(c)).join(""); } }
globalThis.Node = Node;
globalThis.document = { createElement: (tag) => new Node(tag), querySelector: () => new Node("div") };
const { read } = await import("./json.js");
const { contentOf, keyOf } = await import("./pages/events.js");
const { page, streamed } = JSON.parse(readFileSync(0, "utf-8"));
const view = (event) => ({
  position: event.position, topic: event.topic, partition: event.partition, offset: event.offset, type: event.type,
  key: event.key ?? null, key_base64: event.key_base64 ?? null, shownKey: keyOf(event),
  routing_key: event.routing_key, content_type: event.content_type, event_id: event.event_id,
  published_at: event.published_at,
  headers: event.headers,
  parts: contentOf(event).flat().filter((node) => node !== null).map((node) => [node.tag, node.textContent]),
});
console.log(JSON.stringify([read(page).events.map(view), streamed.map((data) => view(read(data)))]));
"""


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """What the console shows of events, by its own code on a document that only holds text."""
    if shutil.which("node") is None:
        pytest.skip("no Node on this machine: apt-get install nodejs")
    folder = tmp_path_factory.mktemp("console")
    shutil.copytree(CONSOLE, folder, dirs_exist_ok=True)
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "show.mjs").write_text(_SHOW)

    def show(page: str, streamed: list[str]) -> Any:
        asked = json.dumps({"page": page, "streamed": streamed})
        answer = subprocess.run(
            ["node", "show.mjs"],
            cwd=folder,
            input=asked.encode(),
            capture_output=True,
            check=False,
            timeout=PATIENCE_SECONDS,
        )
        assert answer.returncode == 0, answer.stderr.decode()
        return json.loads(answer.stdout)

    return show


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[^\s"]+|\s+')


def tokens(text: str) -> str:
    """JSON without the white space between its tokens."""
    return "".join(part for part in _TOKEN.findall(text) if not part.isspace())


@on_a_server(6)
@given(events=_lists)
def test_the_console_shows_what_the_json_says(
    place: Place, log: headwater.Headwater, console: Callable[..., Any], events: list[NewEvent]
) -> None:
    positions = publish(log, place, events)
    page, shown = over_http(place, positions[0] - 1)
    searched, streamed = console(page, followed(place, positions[0] - 1, len(events), named="false"))
    assert searched == streamed
    for view, text in zip(searched, shown, strict=True):
        members, content = read_object(text, content=("data", "text", "base64"))
        _, headers = read_object(text, content=("headers",))
        for name in ("position", "topic", "partition", "offset", "type", "routing_key", "content_type", "event_id"):
            assert view[name] == members[name]
        assert view["published_at"] == members["published_at"]
        assert (view["key"], view["key_base64"]) == (members.get("key"), members.get("key_base64"))
        key = members.get("key")
        if key is not None:
            assert view["shownKey"] == key
        parts = view["parts"]
        if headers != "{}":
            assert [tag for tag, _ in parts[:2]] == ["h2", "pre"]
            assert tokens(parts[1][1]) == tokens(headers)
            parts = parts[2:]
        (_, title), (tag, body) = parts
        assert title == ("Payload (base64)" if "base64" in members else "Payload")
        if "data" in members and content != "null":
            assert (tag, tokens(body)) == ("pre", tokens(content))
        elif members.get("text") or members.get("base64"):
            assert (tag, body) == ("pre", members.get("text") or members["base64"])
        else:
            assert tag == "p"
