// Pipelines: who runs them, how far they are, their last batches and errors.

import { get, path } from "../api.js";
import { badge, card, duration, every, exact, facts, h, head, number, show, spark, table, when } from "../ui.js";

export const tone = (state) => ({ running: "good", idle: "dim", stopped: "dim", stopping: "warn" })[state] ?? "bad";

export async function pipelines() {
  const list = h("div");
  show(head("Pipelines"), card(null, list));
  return every(3, async () => {
    const found = (await get("/v1/pipelines")).pipelines;
    list.replaceChildren(table([
      { name: "Pipeline", of: (p) => h("a", { href: `#/pipelines/${encodeURIComponent(p.name)}` }, p.name) },
      { name: "State", of: (p) => badge(p.state, tone(p.state)) },
      { name: "Source", kind: "wide", of: (p) => p.source },
      { name: "Batches", kind: "number wide", of: (p) => number(p.batches) },
      { name: "Rows", kind: "number", of: (p) => number(p.rows) },
      { name: "Behind", kind: "number", of: (p) => number(p.behind) },
      { name: "Last batch", kind: "tight wide", of: (p) => when(p.last_batch_at) },
    ], found, { label: "Pipelines", empty: "No pipeline has run on this database." }));
  });
}

export async function pipeline(name) {
  const behind = [];
  const body = h("div");
  show(head(name), body);
  return every(2, async () => {
    const p = await get(path`/v1/pipelines/${name}`);
    behind.push(p.behind ?? 0);
    if (behind.length > 90) behind.shift();
    body.replaceChildren(
      card("Now", facts([
        ["State", badge(p.state, tone(p.state))],
        ["Runner", p.runner ?? "nobody"],
        ["Since", p.started_at ? exact(p.started_at) : "–"],
        ["Place", number(p.place)],
        ["Behind", h("span", number(p.behind), p.source === "log" ? " positions" : " bytes of WAL", spark(behind, "behind"))],
        ["Batches and rows", `${number(p.batches)} · ${number(p.rows)}`],
      ])),
      card("Last batch", p.last_batch ? facts(Object.entries(p.last_batch).map(([key, value]) => [key.replaceAll("_", " "), typeof value === "number" && key.endsWith("seconds") ? duration(value) : typeof value === "object" ? JSON.stringify(value) : String(value)])) : h("p.empty", "No batch yet.")),
      p.last_error ? card("Last error", h("p", when(p.last_error_at), ` · ${number(p.failures)} failures in a row`), h("pre", { tabIndex: 0 }, p.last_error)) : "",
      card("Definition", h("pre", { tabIndex: 0 }, typeof p.definition === "string" ? p.definition : JSON.stringify(p.definition, null, 2))));
  });
}
