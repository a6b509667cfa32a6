// Topics: what there is, what each holds, making and deleting them.

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
        { name: "kind", label: "Kind", options: [["open", "open: writers never wait for each other"], ["sequenced", "sequenced: dense offsets, for Kafka"], ["event_store", "event store: append under a condition"]], value: "open" },
        { name: "partitions", label: "Partitions", type: "number", min: 1, value: "1" },
        { name: "retention_seconds", label: "Retention in seconds", type: "number", min: 1, help: "Empty: events are kept." },
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
        note(`Topic ${made} is there.`);
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
  { name: "Retention", kind: "number wide", of: (t) => (t.retention_seconds ? duration(t.retention_seconds) : "kept") },
], topics, { label: "Topics", key: (t) => t.name, empty: "No topic yet." });

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
          look: () => remove(path`/v1/topics/${name}` + "?dry_run=true"),
          tell: (seen) => h("p", "This takes ", h("strong", events(seen)), " from every reader, and cannot be taken back."),
          act: () => remove(path`/v1/topics/${name}`),
        });
        if (done) {
          note(`Topic ${name} is deleted.`);
          location.hash = "#/topics";
        }
      }, { style: "risky" })),
    card("Settings", facts([
      ["Kind", found.event_store ? "event store" : found.kind],
      ["Partitions", number(found.partitions)],
      ["Retention", found.retention_seconds ? duration(found.retention_seconds) : "events are kept"],
      ["Largest payload", `${number(found.max_payload_bytes)} bytes`],
      ["Made", exact(found.created_at)],
    ])),
    card("Holds", facts([
      ["First position", number(found.first_position)],
      ["Last position", number(found.last_position)],
      ["Last event", when(found.last_published_at)],
      found.expired_to ? ["Taken by retention", `up to position ${number(found.expired_to)}`] : null,
    ])),
  );
}

async function settings({ name, retention_seconds: kept, max_payload_bytes }) {
  let changes;
  // What retention takes is gone for good, so a shorter one is looked at before it is set.
  const isShorter = () => changes.retention_seconds !== null && (kept === null || changes.retention_seconds < kept);
  const done = await form(`Settings of ${name}`, [
    { name: "retention_seconds", label: "Retention in seconds", type: "number", min: 1, value: kept ?? "", help: "Empty: events are kept." },
    { name: "max_payload_bytes", label: "Largest payload, in bytes", type: "number", min: 1, value: max_payload_bytes },
  ], (given) => {
    changes = { retention_seconds: given.retention_seconds ? Number(given.retention_seconds) : null, max_payload_bytes: Number(given.max_payload_bytes) };
    return patch(path`/v1/topics/${name}`, { ...changes, dry_run: isShorter() });
  });
  if (!done || !isShorter()) return done;
  return confirm(`Keep events of ${name} for ${duration(changes.retention_seconds)}?`, {
    name,
    button: "Set retention",
    look: () => patch(path`/v1/topics/${name}`, { ...changes, dry_run: true }),
    tell: (seen) => h("p", "This takes ", h("strong", events(seen)), " from every reader, and what grows older from now on. It cannot be taken back."),
    act: () => patch(path`/v1/topics/${name}`, changes),
  });
}

async function publish(name) {
  const done = await form(`Publish to ${name}`, [
    { name: "type", label: "Type" },
    { name: "key", label: "Key", help: "Events of one key stay in order." },
    { name: "headers", label: "Headers, as JSON", value: "{}" },
    { name: "body", label: "Payload", rows: 6, value: "{}", help: "JSON if it can be read as such, otherwise text." },
  ], async (given) => {
    const headers = given.headers.trim() || "{}";
    if (!isObject(headers)) throw new Error("The headers are not a JSON object.");
    const parts = {
      ...(given.type ? { type: given.type } : {}),
      ...(given.key ? { key: given.key } : {}),
      text: given.body,
      ...(isJson(given.body) ? { content_type: "application/json" } : {}),
    };
    // What was typed goes out as it was typed: numbers of JavaScript would round it.
    return post(path`/v1/topics/${name}/events`, `{"headers":${headers},${JSON.stringify(parts).slice(1)}`);
  }, { button: "Publish" });
  if (done) note(`Published at position ${number(done.positions[0])}.`);
  return done;
}
