// Topics: list, contents, settings, publish, delete.

import { get, patch, path, post, remove } from "../api.js";
import { isJson, isObject } from "../json.js";
import { changedSettings, settingFacts, settingFields, settings } from "../settings.js";
import { action, badge, card, confirm, duration, events, exact, facts, form, h, head, note, number, redraw, show, table, when } from "../ui.js";

const link = (name) => h("a", { href: `#/topics/${encodeURIComponent(name)}` }, name);

export async function topics() {
  const found = (await get("/v1/topics")).topics;
  show(
    head("Topics", action("New topic", async () => {
      const known = (await settings("TopicCreate")).map((one) => (one.name === "kind" ? { ...one, enum: [...one.enum, ["event_store", "event store: appends with conditions"]] } : one));
      const made = await form("New topic", [
        { name: "name", label: "Name", required: true },
        ...settingFields(known),
      ], async (given) => {
        const store = given.kind === "event_store";
        await post("/v1/topics", {
          name: given.name,
          ...changedSettings(known, given),
          ...(store ? { event_store: true, kind: "sequenced" } : {}),
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
  const [found, known] = await Promise.all([get(path`/v1/topics/${name}`), settings("TopicUpdate")]);
  const again = () => topic(name, search, redraw);
  put(
    head(name,
      h("a.button.second", { href: `#/events?topic=${encodeURIComponent(name)}` }, "Events"),
      action("Publish", () => publish(name).then((done) => done && again())),
      action("Settings", () => change(found, known).then((done) => done && again())),
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
      ...settingFacts(known, found),
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

async function change(found, known) {
  const { name, retention_seconds: current } = found;
  let changes;
  // Events removed by retention cannot be restored, so a shorter retention is confirmed first.
  const isShorter = () => (changes.retention_seconds ?? null) !== null && (current === null || changes.retention_seconds < current);
  const done = await form(`Settings of ${name}`, settingFields(known, found), (given) => {
    changes = changedSettings(known, given, found);
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
