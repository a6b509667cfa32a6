// SQL subscriptions, by group, with what their readers have yet to do.

import { get, path, remove } from "../api.js";
import { action, badge, card, confirm, h, head, number, show, table, when } from "../ui.js";

export async function subscriptions() {
  const found = (await get("/v1/subscriptions")).subscriptions;
  show(head("Subscriptions"), card(null, table([
    { name: "Group", of: (s) => s.group },
    { name: "Condition", of: (s) => h("span.code", s.condition) },
    { name: "Parameters", kind: "wide", of: (s) => h("span.code", JSON.stringify(s.params ?? {})) },
    { name: "State", of: (s) => (s.set_aside ? badge("set aside", "bad") : badge("active", "good")) },
    { name: "Seen", kind: "tight wide", of: (s) => when(s.last_active_at) },
    { name: "Id", kind: "number wide", of: (s) => number(s.id) },
    { name: "", of: (s) => action("Delete", async () => {
      const done = await confirm("Delete this subscription?", {
        button: "Delete",
        tell: () => [h("p", "Its group gets no more events by this condition:"), h("pre", s.condition)],
        act: () => remove(path`/v1/subscriptions/${s.group}/${s.id}`),
      });
      if (done) await subscriptions();
    }, { style: "second small" }) },
  ], found, { label: "Subscriptions", empty: "No subscription. headwater sub add makes one." })));
}
