// SQL subscriptions by queue.

import { get, path, query, remove } from "../api.js";
import { deadLetters } from "./queues.js";
import { action, badge, card, confirm, events, h, head, number, redraw, show, table, when } from "../ui.js";

export async function subscriptions(search, put = show) {
  const queue = search.get("queue");
  const found = (await get("/v1/subscriptions" + query({ queue }))).subscriptions;
  const dead = h("div.stack");
  put(head(queue ? `Subscriptions of ${queue}` : "Subscriptions", queue ? h("a.button.second", { href: "#/subscriptions" }, "All queues") : null), card(null, table([
    { name: "Queue", of: (s) => s.queue },
    { name: "Filter", of: (s) => h("span.code", s.filter) },
    { name: "Parameters", kind: "wide", of: (s) => h("span.code", s.params ?? "{}") },
    { name: "State", of: (s) => (s.set_aside ? badge("stopped", "bad") : badge("active", "good")) },
    { name: "Last active", kind: "tight wide", of: (s) => when(s.last_active_at) },
    { name: "Id", kind: "number wide", of: (s) => number(s.id) },
    { name: "", of: (s) => action("Delete", async () => {
      const done = await confirm("Delete this subscription?", {
        button: "Delete",
        preview: () => remove(path`/v1/subscriptions/${s.queue}/${s.id}` + "?dry_run=true"),
        describe: (preview) => [
          h("p", `The queue ${s.queue} receives no more events by this filter, including `, h("strong", events(preview)), " that it has not read yet."),
          h("pre", s.filter),
        ],
        act: () => remove(path`/v1/subscriptions/${s.queue}/${s.id}`),
      });
      if (done) await subscriptions(search, redraw);
    }, { style: "second small" }) },
  ], found, { label: "Subscriptions", key: (s) => s.id, empty: "No SQL subscriptions. Create one with headwater sub create." })), ...(queue ? [card("Dead letters", dead)] : []));
  // On a redraw the existing list of dead letters stays.
  if (!queue || put === redraw) return undefined;
  const letters = deadLetters(queue, dead, () => letters.now());
  return letters.stop;
}
