// Event stores: browse by tag and type.

import { get, path, post } from "../api.js";
import { card, count, h, head, input, number, errorText, show, table, when } from "../ui.js";
import { eventTable, keepInAddress, OF_STORE } from "./events.js";

const PAGE = 50;

export async function stores() {
  const found = (await get("/v1/topics")).topics.filter((topic) => topic.event_store);
  show(head("Event stores"), card(null, table([
    { name: "Store", of: (t) => h("a", { href: `#/stores/${encodeURIComponent(t.name)}` }, t.name) },
    { name: "Last position", kind: "number", of: (t) => number(t.last_position) },
    { name: "Last event", kind: "tight", of: (t) => when(t.last_published_at) },
  ], found, { label: "Event stores", empty: "No event stores. Create one on the Topics page." })));
}

export async function store(name, search) {
  const tags = input({ name: "tags", value: search.get("tags") ?? "", placeholder: "order:1, customer:7" });
  const types = input({ name: "types", value: search.get("types") ?? "", placeholder: "OrderPlaced, OrderPaid" });
  const form = h("form.row", { "aria-label": "Search" }, h("label", "Tags (all)", tags), h("label", "Types (any)", types), h("button", { type: "submit" }, "Search"));
  const matching = h("span.dim", { role: "status" });
  const list = eventTable("Events", OF_STORE);
  const message = h("div", { "aria-live": "polite" });
  const more = h("button.second", { type: "button", hidden: true }, "Older events");
  show(head(name, matching), card(null, form), card(null, list.node, message, more));
  let oldest = null;
  // Counts searches: the answer of one that was replaced meanwhile is dropped.
  let current = 0;
  const words = (text) => text.split(",").map((word) => word.trim()).filter(Boolean);
  const buildQuery = () => {
    const item = { ...(words(tags.value).length ? { tags: words(tags.value) } : {}), ...(words(types.value).length ? { types: words(types.value) } : {}) };
    return { items: Object.keys(item).length ? [item] : [] };
  };
  const load = async (before, mine) => {
    const query = buildQuery();
    const page = await post(path`/v1/stores/${name}/read`, { query, backwards: true, limit: PAGE, ...(before ? { before } : {}) });
    if (mine !== current) return;
    (before ? list.append : list.fill)(page.events);
    oldest = page.events.at(-1)?.position;
    more.hidden = page.events.length < PAGE;
    message.replaceChildren(list.size ? "" : h("p.empty", "No matching events."));
    if (before) return;
    const total = (await post(path`/v1/stores/${name}/count`, { query })).count;
    if (mine === current) matching.textContent = `${count(total, "event")} ${total === 1 ? "matches" : "match"}`;
  };
  const run = (before) => {
    const mine = (current += 1);
    return load(before, mine).catch((error) => mine === current && message.replaceChildren(errorText(error)));
  };
  form.onsubmit = (event) => {
    event.preventDefault();
    keepInAddress(`/stores/${encodeURIComponent(name)}`, { tags: tags.value, types: types.value });
    run();
  };
  more.onclick = () => run(oldest);
  await run();
}
