// Event stores, browsed by tag and type.

import { get, path, post } from "../api.js";
import { card, complain, h, head, input, number, show, table, when } from "../ui.js";
import { eventTable } from "./events.js";

const PAGE = 50;

export async function stores() {
  const found = (await get("/v1/topics")).topics.filter((topic) => topic.event_store);
  show(head("Event stores"), card(null, table([
    { name: "Store", of: (t) => h("a", { href: `#/stores/${encodeURIComponent(t.name)}` }, t.name) },
    { name: "Last position", kind: "number", of: (t) => number(t.last_position) },
    { name: "Last event", kind: "tight", of: (t) => when(t.last_published_at) },
  ], found, { label: "Event stores", empty: "No event store yet. headwater topic create NAME --event-store makes one." })));
}

export async function store(name, search) {
  const tags = input({ name: "tags", value: search.get("tags") ?? "", placeholder: "order:1, customer:7" });
  const types = input({ name: "types", value: search.get("types") ?? "", placeholder: "OrderPlaced, OrderPaid" });
  const form = h("form.row", { "aria-label": "Search" }, h("label", "Tags, all of them", tags), h("label", "Types, any of them", types), h("button", { type: "submit" }, "Search"));
  const count = h("span.dim", { role: "status" });
  const list = eventTable("Events");
  const nothing = h("p.empty");
  const more = h("button.second", { type: "button", hidden: true }, "Older events");
  show(head(name, count), card(null, form), card(null, list.node, nothing, more));
  let oldest = null;
  const words = (text) => text.split(",").map((word) => word.trim()).filter(Boolean);
  const asked = () => {
    const item = { ...(words(tags.value).length ? { tags: words(tags.value) } : {}), ...(words(types.value).length ? { types: words(types.value) } : {}) };
    return { items: Object.keys(item).length ? [item] : [] };
  };
  const load = async (before) => {
    const query = asked();
    const page = await post(path`/v1/stores/${name}/read`, { query, backwards: true, limit: PAGE, ...(before ? { before } : {}) });
    (before ? list.append : list.fill)(page.events);
    oldest = page.events.at(-1)?.position;
    more.hidden = page.events.length < PAGE;
    nothing.textContent = list.size ? "" : "No event matches.";
    if (!before) count.textContent = `${number((await post(path`/v1/stores/${name}/count`, { query })).count)} events match`;
  };
  const run = (before) => load(before).catch(complain);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    run();
  });
  more.addEventListener("click", () => run(oldest));
  await load();
}
