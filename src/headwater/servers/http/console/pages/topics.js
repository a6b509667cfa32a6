// Topics: list, contents, settings, publish, delete.

import { get, patch, path, post, remove } from "../api.js";
import { isJson, isObject } from "../json.js";
import { action, badge, card, confirm, duration, events, exact, facts, form, h, head, note, number, redraw, show, table, when } from "../ui.js";

const link = (name) => h("a", { href: `#/topics/${encodeURIComponent(name)}` }, name);

export async function topics() {
  const found = (await get("/v1/topics")).topics;
  show(
    head("Topics", action("New topic", async () => {
      const made = await form("New topic", [
        { name: "name", label: "Name", required: true },
        { name: "kind", label: "Kind", options: [["open", "open: publishers do not wait for each other"], ["sequenced", "sequenced: gapless offsets, for Kafka"], ["event_store", "event store: appends with conditions"]], value: "open" },
        { name: "partitions", label: "Partitions", type: "number", min: 1, value: "1" },
        { name: "retention_seconds", label: "Retention in seconds", type: "number", min: 1, help: "Empty: events are kept forever." },
      ], async (given) => {
        const store = given.kind === "event_store";
        await post("/v1/topics", {
          name: given.name,
          kind: store ? "sequenced" : given.kind,
          ...(store ? { event_store: true } : { partitions: Number(given.partitions) }),
          ...(given.retention_seconds ? { retention_seconds: Number(given.retention_seconds) } : {}),
        });
        return given.name;
      }, { button: "Create" });
      if (made) {
        note(`Created topic ${made}.`);
        location.hash = `#/topics/${encodeURIComponent(made)}`;
      }
    }, { style: "primary" })),
    card(null, topicTable(found)),
  );
}

export const topicTable = (topics) => table([
  { name: "Topic", of: (t) => link(t.name) },
  { name: "Kind", kind: "wide", of: (t) => badge(t.event_store ? "event store" : t.kind) },
  { name: "Partitions", kind: "number wide", of: (t) => number(t.partitions) },
  { name: "Last position", kind: "number", of: (t) => number(t.last_position) },
  { name: "Last event", kind: "tight", of: (t) => when(t.last_published_at) },
  { name: "Retention", kind: "number wide", of: (t) => (t.retention_seconds ? duration(t.retention_seconds) : "forever") },
], topics, { label: "Topics", key: (t) => t.name, empty: "No topics." });

export async function topic(name, search, put = show) {
  const found = await get(path`/v1/topics/${name}`);
  const again = () => topic(name, search, redraw);
  put(
    head(name,
      h("a.button.second", { href: `#/events?topic=${encodeURIComponent(name)}` }, "Events"),
      action("Publish", () => publish(name).then((done) => done && again())),
      action("Settings", () => settings(found).then((done) => done && again())),
      action("Delete", async () => {
        const done = await confirm(`Delete topic ${name}?`, {
          name,
          button: "Delete topic",
          preview: () => remove(path`/v1/topics/${name}` + "?dry_run=true"),
          describe: (preview) => h("p", "This deletes ", h("strong", events(preview)), ". It cannot be undone."),
          act: () => remove(path`/v1/topics/${name}`),
        });
        if (done) {
          note(`Deleted topic ${name}.`);
          location.hash = "#/topics";
        }
      }, { style: "risky" })),
    card("Settings", facts([
      ["Kind", found.event_store ? "event store" : found.kind],
      ["Partitions", number(found.partitions)],
      ["Retention", found.retention_seconds ? duration(found.retention_seconds) : "forever"],
      ["Maximum payload", `${number(found.max_payload_bytes)} bytes`],
      ["Created", exact(found.created_at)],
    ])),
    card("Contents", facts([
      ["First position", number(found.first_position)],
      ["Last position", number(found.last_position)],
      ["Last event", when(found.last_published_at)],
      found.expired_to ? ["Removed by retention", `up to position ${number(found.expired_to)}`] : null,
    ])),
  );
}

async function settings({ name, retention_seconds: current, max_payload_bytes }) {
  let changes;
  // Events removed by retention cannot be restored, so a shorter retention is confirmed first.
  const isShorter = () => changes.retention_seconds !== null && (current === null || changes.retention_seconds < current);
  const done = await form(`Settings of ${name}`, [
    { name: "retention_seconds", label: "Retention in seconds", type: "number", min: 1, value: current ?? "", help: "Empty: events are kept forever." },
    { name: "max_payload_bytes", label: "Maximum payload in bytes", type: "number", min: 1, value: max_payload_bytes },
  ], (given) => {
    changes = { retention_seconds: given.retention_seconds ? Number(given.retention_seconds) : null, max_payload_bytes: Number(given.max_payload_bytes) };
    return patch(path`/v1/topics/${name}`, { ...changes, dry_run: isShorter() });
  });
  if (!done || !isShorter()) return done;
  return confirm(`Keep events of ${name} for ${duration(changes.retention_seconds)}?`, {
    name,
    button: "Set retention",
    preview: () => patch(path`/v1/topics/${name}`, { ...changes, dry_run: true }),
    describe: (preview) => h("p", "This deletes ", h("strong", events(preview)), ", and later events when they exceed the retention. It cannot be undone."),
    act: () => patch(path`/v1/topics/${name}`, changes),
  });
}

async function publish(name) {
  const done = await form(`Publish to ${name}`, [
    { name: "type", label: "Type" },
    { name: "key", label: "Key", help: "Events with the same key stay in order." },
    { name: "headers", label: "Headers (JSON)", value: "{}" },
    { name: "body", label: "Payload", rows: 6, value: "{}", help: "Published as JSON if it is valid JSON, otherwise as text." },
  ], async (given) => {
    const headers = given.headers.trim() || "{}";
    if (!isObject(headers)) throw new Error("The headers must be a JSON object.");
    const parts = {
      ...(given.type ? { type: given.type } : {}),
      ...(given.key ? { key: given.key } : {}),
      text: given.body,
      ...(isJson(given.body) ? { content_type: "application/json" } : {}),
    };
    // Sent exactly as typed: JavaScript would round large numbers.
    return post(path`/v1/topics/${name}/events`, `{"headers":${headers},${JSON.stringify(parts).slice(1)}`);
  }, { button: "Publish" });
  if (done) note(`Published at position ${number(done.positions[0])}.`);
  return done;
}
