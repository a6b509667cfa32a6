// Event stores, browsed by tag and type.

import { get, path, post } from "../api.js";
import { card, count, h, head, input, number, said, show, table, when } from "../ui.js";
import { eventTable, keepInAddress, OF_STORE } from "./events.js";

const PAGE = 50;

export async function stores() {
  const found = (await get("/v1/topics")).topics.filter((topic) => topic.event_store);
  show(head("Event stores"), card(null, table([
    { name: "Store", of: (t) => h("a", { href: `#/stores/${encodeURIComponent(t.name)}` }, t.name) },
    { name: "Last position", kind: "number", of: (t) => number(t.last_position) },
    { name: "Last event", kind: "tight", of: (t) => when(t.last_published_at) },
  ], found, { label: "Event stores", empty: "No event store yet. It is a kind of topic: make one under Topics." })));
}

export async function store(name, search) {
  const tags = input({ name: "tags", value: search.get("tags") ?? "", placeholder: "order:1, customer:7" });
  const types = input({ name: "types", value: search.get("types") ?? "", placeholder: "OrderPlaced, OrderPaid" });
  const form = h("form.row", { "aria-label": "Search" }, h("label", "Tags, all of them", tags), h("label", "Types, any of them", types), h("button", { type: "submit" }, "Search"));
  const matching = h("span.dim", { role: "status" });
  const list = eventTable("Events", OF_STORE);
  const told = h("div", { "aria-live": "polite" });
  const more = h("button.second", { type: "button", hidden: true }, "Older events");
  show(head(name, matching), card(null, form), card(null, list.node, told, more));
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
    told.replaceChildren(list.size ? "" : h("p.empty", "No event matches."));
    if (before) return;
    const total = (await post(path`/v1/stores/${name}/count`, { query })).count;
    matching.textContent = `${count(total, "event")} ${total === 1 ? "matches" : "match"}`;
  };
  const run = (before) => load(before).catch((error) => told.replaceChildren(said(error)));
  form.onsubmit = (event) => {
    event.preventDefault();
    keepInAddress(`/stores/${encodeURIComponent(name)}`, { tags: tags.value, types: types.value });
    run();
  };
  more.onclick = () => run(oldest);
  await run();
}
