// SQL subscriptions, by group, with what their readers have yet to do.

import { get, path, query, remove } from "../api.js";
import { deadLetters } from "./groups.js";
import { action, badge, card, confirm, events, h, head, number, redraw, show, table, when } from "../ui.js";

export async function subscriptions(search, put = show) {
  const group = search.get("group");
  const found = (await get("/v1/subscriptions" + query({ group }))).subscriptions;
  const dead = h("div.stack");
  put(head(group ? `Subscriptions of ${group}` : "Subscriptions", group ? h("a.button.second", { href: "#/subscriptions" }, "All groups") : null), card(null, table([
    { name: "Group", of: (s) => s.group },
    { name: "Condition", of: (s) => h("span.code", s.condition) },
    { name: "Parameters", kind: "wide", of: (s) => h("span.code", s.params ?? "{}") },
    { name: "State", of: (s) => (s.set_aside ? badge("set aside", "bad") : badge("active", "good")) },
    { name: "Seen", kind: "tight wide", of: (s) => when(s.last_active_at) },
    { name: "Id", kind: "number wide", of: (s) => number(s.id) },
    { name: "", of: (s) => action("Delete", async () => {
      const done = await confirm("Delete this subscription?", {
        button: "Delete",
        look: () => remove(path`/v1/subscriptions/${s.group}/${s.id}` + "?dry_run=true"),
        tell: (seen) => [
          h("p", `The group ${s.group} gets no more events by this condition. `, h("strong", events(seen)), " that it has yet to read match it."),
          h("pre", s.condition),
        ],
        act: () => remove(path`/v1/subscriptions/${s.group}/${s.id}`),
      });
      if (done) await subscriptions(search, redraw);
    }, { style: "second small" }) },
  ], found, { label: "Subscriptions", key: (s) => s.id, empty: "No subscription. headwater sub create makes one." })), ...(group ? [card("Dead letters", dead)] : []));
  // Drawn again, the letters stay in the place that they have.
  if (!group || put === redraw) return undefined;
  const letters = deadLetters(group, dead, () => letters.now());
  return letters.stop;
}
