// Pipelines: runner, checkpoint, lag, last batches and errors.

import { get, path } from "../api.js";
import { pretty } from "../json.js";
import { atLeast, badge, card, count, duration, every, exact, facts, h, head, number, show, spark, table, update, when } from "../ui.js";

export const tone = (state) => ({ running: "good", idle: "dim", stopped: "dim", stopping: "warn" })[state] ?? "bad";

export async function pipelines() {
  const list = h("div");
  show(head("Pipelines"), card(null, list));
  return every(3, async () => {
    const found = (await get("/v1/pipelines")).pipelines;
    update(list, table([
      { name: "Pipeline", of: (p) => h("a", { href: `#/pipelines/${encodeURIComponent(p.name)}` }, p.name) },
      { name: "State", of: (p) => badge(p.state, tone(p.state)) },
      { name: "Source", kind: "wide", of: (p) => p.source },
      { name: "Batches", kind: "number wide", of: (p) => number(p.batches) },
      { name: "Rows", kind: "number", of: (p) => number(p.rows) },
      { name: "Lag", kind: "number", of: (p) => atLeast(p.behind, p.behind_is_more) },
      { name: "Last batch", kind: "tight wide", of: (p) => when(p.last_batch_at) },
      { name: "Error", of: (p) => (p.failures ? h("span.code.bad", (p.last_error ?? "").split("\n")[0]) : "") },
    ], found, { label: "Pipelines", key: (p) => p.name, empty: "No pipeline has run." }));
  }, list).stop;
}

export async function pipeline(name) {
  const behind = [];
  const body = h("div.stack");
  show(head(name), body);
  return every(2, async () => {
    const [p, last] = await Promise.all([get(path`/v1/pipelines/${name}`), get(path`/v1/pipelines/${name}/batches`)]);
    behind.push(p.behind ?? 0);
    if (behind.length > 90) behind.shift();
    update(body,
      card("Status", facts([
        ["State", badge(p.state, tone(p.state))],
        ["Runner", p.runner ?? "none"],
        ["Running since", p.started_at ? exact(p.started_at) : "–"],
        ["Checkpoint", number(p.checkpoint)],
        ["Lag", h("span", atLeast(p.behind, p.behind_is_more), p.source === "log" ? " events" : " bytes of WAL", spark(behind, "lag"))],
        ["Batches and rows", `${number(p.batches)} · ${number(p.rows)}`],
      ])),
      p.last_error ? card("Last error", h("p", when(p.last_error_at), p.failures ? ` · ${count(p.failures, "failure")} in a row` : " · recovered since"), h("pre", { tabIndex: 0 }, p.last_error)) : null,
      card("Last batches", table([
        { name: "Ended", kind: "tight", of: (b) => when(b.ended_at) },
        { name: "Rows", kind: "number", of: (b) => (b.error === null ? number(b.rows) : "–") },
        { name: "Duration", kind: "number tight", of: (b) => duration(b.seconds) },
        { name: "Checkpoint", kind: "number wide", of: (b) => number(b.details?.checkpoint) },
        { name: "Error", of: (b) => (b.error === null ? "" : h("span.code.bad", b.error.split("\n")[0])) },
      ], last.batches, { label: "Last batches", key: (b) => b.ended_at, empty: "No batches." })),
      card("Definition", h("pre", { tabIndex: 0 }, pretty(p.definition))));
  }, body).stop;
}
