// The log at a glance: how much comes in, how far everybody has come.

import { get } from "../api.js";
import { atLeast, badge, bytes, card, count, duration, every, h, head, number, said, show, spark, table, update, when } from "../ui.js";
import { groupTable, link, stateBadge } from "./groups.js";
import { tone } from "./pipelines.js";
import { topicTable } from "./topics.js";

const KEPT = 90;
const seconds = 2;

export async function overview() {
  try {
    await get("/v1/overview");
  } catch (error) {
    if (error.status === 403) return part(error);
    throw error;
  }
  return whole();
}

/** For who may not look at the log as a whole: what they may see of it. */
function part(refusal) {
  const topics = h("div");
  const groups = h("div");
  show(head("Overview"), card(null, said(refusal)), card("Topics", topics), card("Queue groups", groups));
  const parts = [
    every(seconds, async () => update(topics, topicTable((await get("/v1/topics")).topics)), topics),
    every(seconds, async () => update(groups, groupTable((await get("/v1/groups")).groups)), groups),
  ];
  return () => parts.forEach((one) => one.stop());
}

function whole() {
  const history = new Map();
  const remember = (name, value) => {
    const values = history.get(name) ?? [];
    values.push(value ?? 0);
    if (values.length > KEPT) values.shift();
    history.set(name, values);
    return values;
  };
  const body = h("div.stack");
  show(head("Overview"), body);

  const tile = (name, value, more, line) => h("div.tile", h("div.name", name), h("div.value", value), line ? spark(line, name) : null, h("div.more", more ?? ""));
  const key = (row) => row.name;
  let last = null;
  return every(seconds, async () => {
    const now = await get("/v1/overview");
    const at = performance.now();
    const rate = now.rates?.published_per_s ?? (last ? ((now.head - last.head) / (at - last.at)) * 1000 : 0);
    last = { head: now.head, at };
    const oldest = now.oldest_publisher;
    const queues = now.groups.filter((group) => group.kind === "queue");
    const readers = now.groups.filter((group) => group.kind !== "queue");
    update(body,
      h("div.tiles",
        tile("Events per second", number(rate), "positions drawn", remember("rate", rate)),
        tile("Head of the log", number(now.head), now.settled === now.head ? "all settled" : `settled to ${number(now.settled)}`),
        tile("Topics", number(now.topics), `about ${count(now.events_estimate, "event")}`),
        tile("On disk", bytes(now.bytes), count(now.segments, "segment")),
        tile("Open publisher", oldest ? h(`span.${oldest.age_seconds > 10 ? "bad" : "good"}`, duration(oldest.age_seconds)) : "none", oldest ? `pid ${oldest.pid ?? "prepared"}; readers wait for it` : "nobody is waited for")),
      card("Queue groups", table([
        { name: "Group", of: (g) => link(g.name) },
        { name: "Behind", kind: "number", of: (g) => atLeast(g.lag_events, g.lag_is_more) },
        { name: "", kind: "wide", of: (g) => spark(remember(`group ${g.name}`, g.lag_events), `lag of ${g.name}`) },
        { name: "Oldest", kind: "number wide", of: (g) => duration(g.lag_seconds) },
        { name: "In work", kind: "number", of: (g) => number(g.leased) },
        { name: "Again", kind: "number wide", of: (g) => number(g.redeliveries) },
        { name: "Dead", kind: "number", of: (g) => (g.dead ? h("strong.bad", number(g.dead)) : "0") },
        { name: "State", of: stateBadge },
      ], queues, { label: "Queue groups", key, empty: "No queue group yet: headwater group create." })),
      readers.length ? card("SQL subscriptions", table([
        { name: "Group", of: (g) => h("a", { href: `#/subscriptions?group=${encodeURIComponent(g.name)}` }, g.name) },
        { name: "Position", kind: "number", of: (g) => number(g.position) },
        { name: "Behind", kind: "number", of: (g) => atLeast(g.lag_events, g.lag_is_more) },
        { name: "", kind: "wide", of: (g) => spark(remember(`group ${g.name}`, g.lag_events), `lag of ${g.name}`) },
        { name: "Oldest", kind: "number wide", of: (g) => duration(g.lag_seconds) },
              { name: "State", of: stateBadge },
      ], readers, { label: "SQL subscriptions", key })) : null,
      card("Cursors", table([
        { name: "Cursor", of: (c) => c.name },
        { name: "Position", kind: "number", of: (c) => number(c.position) },
        { name: "Behind", kind: "number", of: (c) => atLeast(c.lag_events, c.lag_is_more) },
        { name: "", kind: "wide", of: (c) => spark(remember(`cursor ${c.name}`, c.lag_events), `lag of ${c.name}`) },
        { name: "Oldest", kind: "number wide", of: (c) => duration(c.lag_seconds) },
        { name: "Moved", kind: "tight wide", of: (c) => when(c.updated_at) },
      ], now.cursors, { label: "Cursors", key, empty: "Nobody keeps a cursor." })),
      card("Pipelines", table([
        { name: "Pipeline", of: (p) => h("a", { href: `#/pipelines/${encodeURIComponent(p.name)}` }, p.name) },
        { name: "State", of: (p) => badge(p.state, tone(p.state)) },
        { name: "Behind", kind: "number", of: (p) => atLeast(p.behind, p.behind_is_more) },
        { name: "Rows", kind: "number wide", of: (p) => number(p.rows) },
        { name: "Last batch", kind: "tight wide", of: (p) => when(p.last_batch_at) },
      ], now.pipelines, { label: "Pipelines", key, empty: "No pipeline has run here." })));
  }, body).stop;
}
