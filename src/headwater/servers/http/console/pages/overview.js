// Overview: publish rate, size of the log, lag of all consumers.

import { get } from "../api.js";
import { atLeast, badge, bytes, card, count, duration, every, h, head, number, errorText, show, spark, table, update, when } from "../ui.js";
import { queueTable, link, stateBadge } from "./queues.js";
import { tone } from "./pipelines.js";
import { topicTable } from "./topics.js";

const MAX_VALUES = 90;
const seconds = 2;

export async function overview() {
  try {
    await get("/v1/overview");
  } catch (error) {
    if (error.status === 403) return partialOverview(error);
    throw error;
  }
  return fullOverview();
}

/** For accounts without permission to describe the log: the topics and queues that they may see. */
function partialOverview(problem) {
  const topics = h("div");
  const queues = h("div");
  show(head("Overview"), card(null, errorText(problem)), card("Topics", topics), card("Queues", queues));
  const parts = [
    every(seconds, async () => update(topics, topicTable((await get("/v1/topics")).topics)), topics),
    every(seconds, async () => update(queues, queueTable((await get("/v1/queues")).queues)), queues),
  ];
  return () => parts.forEach((one) => one.stop());
}

function fullOverview() {
  const history = new Map();
  const remember = (name, value) => {
    const values = history.get(name) ?? [];
    values.push(value ?? 0);
    if (values.length > MAX_VALUES) values.shift();
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
    const queues = now.queues.filter((queue) => queue.kind === "bindings");
    const readers = now.queues.filter((queue) => queue.kind !== "bindings");
    update(body,
      h("div.tiles",
        tile("Events per second", number(rate), "positions assigned", remember("rate", rate)),
        tile("Head", number(now.head), now.stable === now.head ? "all stable" : `stable position ${number(now.stable)}`),
        tile("Topics", number(now.topics), `about ${count(now.events_estimate, "event")}`),
        tile("Size on disk", bytes(now.bytes), count(now.segments, "segment")),
        tile("Oldest open publisher", oldest ? h(`span.${oldest.age_seconds > 10 ? "bad" : "good"}`, duration(oldest.age_seconds)) : "none", oldest ? `pid ${oldest.pid ?? "prepared"}; readers wait for it` : "readers wait for no transaction")),
      card("Queues", table([
        { name: "Queue", of: (g) => link(g.name) },
        { name: "Lag", kind: "number", of: (g) => atLeast(g.lag_events, g.lag_is_more) },
        { name: "", kind: "wide", of: (g) => spark(remember(`queue ${g.name}`, g.lag_events), `lag of ${g.name}`) },
        { name: "Oldest event", kind: "number wide", of: (g) => duration(g.lag_seconds) },
        { name: "Processing", kind: "number", of: (g) => number(g.leased) },
        { name: "Retrying", kind: "number wide", of: (g) => number(g.redeliveries) },
        { name: "Dead", kind: "number", of: (g) => (g.dead ? h("strong.bad", number(g.dead)) : "0") },
        { name: "State", of: stateBadge },
      ], queues, { label: "Queues", key, empty: "No queues. Create one with headwater queue create." })),
      readers.length ? card("SQL subscriptions", table([
        { name: "Queue", of: (g) => h("a", { href: `#/subscriptions?queue=${encodeURIComponent(g.name)}` }, g.name) },
        { name: "Position", kind: "number", of: (g) => number(g.position) },
        { name: "Lag", kind: "number", of: (g) => atLeast(g.lag_events, g.lag_is_more) },
        { name: "", kind: "wide", of: (g) => spark(remember(`queue ${g.name}`, g.lag_events), `lag of ${g.name}`) },
        { name: "Oldest event", kind: "number wide", of: (g) => duration(g.lag_seconds) },
        { name: "State", of: stateBadge },
      ], readers, { label: "SQL subscriptions", key })) : null,
      card("Cursors", table([
        { name: "Cursor", of: (c) => c.name },
        { name: "Position", kind: "number", of: (c) => number(c.position) },
        { name: "Lag", kind: "number", of: (c) => atLeast(c.lag_events, c.lag_is_more) },
        { name: "", kind: "wide", of: (c) => spark(remember(`cursor ${c.name}`, c.lag_events), `lag of ${c.name}`) },
        { name: "Oldest event", kind: "number wide", of: (c) => duration(c.lag_seconds) },
        { name: "Moved", kind: "tight wide", of: (c) => when(c.updated_at) },
      ], now.cursors, { label: "Cursors", key, empty: "No cursors." })),
      card("Pipelines", table([
        { name: "Pipeline", of: (p) => h("a", { href: `#/pipelines/${encodeURIComponent(p.name)}` }, p.name) },
        { name: "State", of: (p) => badge(p.state, tone(p.state)) },
        { name: "Lag", kind: "number", of: (p) => atLeast(p.behind, p.behind_is_more) },
        { name: "Rows", kind: "number wide", of: (p) => number(p.rows) },
        { name: "Last batch", kind: "tight wide", of: (p) => when(p.last_batch_at) },
      ], now.pipelines, { label: "Pipelines", key, empty: "No pipeline has run." })));
  }, body).stop;
}
