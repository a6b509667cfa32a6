// Events: searched by key, type, header and time, looked into, followed live.

import { follow, get, path, query } from "../api.js";
import { badge, card, complain, dialog, exact, facts, h, head, input, number, show } from "../ui.js";

const PAGE = 50;
// A page that is left open for days must not grow for days.
const MOST_ROWS = 500;

export const keyOf = (event) => event.key ?? (event.key_base64 ? `base64:${event.key_base64}` : "–");

export function bodyOf(event) {
  if (event.data !== undefined) return JSON.stringify(event.data, null, 2);
  if (event.text !== undefined) return event.text;
  if (event.base64 !== undefined) return event.base64;
  return "";
}

const short = (text) => (text.length > 140 ? `${text.slice(0, 140)}…` : text);

export function look(event) {
  const body = bodyOf(event);
  return dialog((close) => h("div",
    h("h2", `Event ${number(event.position)}`),
    facts([
      ["Topic", h("a", { href: `#/topics/${encodeURIComponent(event.topic)}`, onclick: () => close() }, event.topic)],
      ["Position", String(event.position)],
      event.offset !== null && event.offset !== undefined ? ["Partition and offset", `${event.partition} · ${number(event.offset)}`] : null,
      ["Type", event.type ?? "–"],
      ["Key", h("span.code", keyOf(event))],
      event.routing_key ? ["Routing key", h("span.code", event.routing_key)] : null,
      event.event_id ? ["Event id", h("span.code", event.event_id)] : null,
      ["Content type", event.content_type ?? "–"],
      ["Published", exact(event.published_at)],
    ]),
    event.headers && Object.keys(event.headers).length ? [h("h2", "Headers"), h("pre", { tabIndex: 0 }, JSON.stringify(event.headers, null, 2))] : null,
    h("h2", event.base64 !== undefined ? "Payload, in base64" : "Payload"),
    body ? h("pre", { tabIndex: 0 }, body) : h("p.empty", "This event has no payload."),
    h("div.buttons",
      h("button.second", { type: "button", onclick: () => navigator.clipboard?.writeText(body) }, "Copy payload"),
      h("button", { type: "button", onclick: () => close() }, "Close"))));
}

/** Rows of events; `add` puts one on top. */
export function eventTable(label) {
  const body = h("tbody");
  const row = (event) => h("tr",
    h("td.number.tight", h("button.quiet.small", { type: "button", onclick: () => look(event), "aria-label": `Look at event ${event.position}` }, number(event.position))),
    h("td.wide", event.topic),
    h("td", event.type ?? "–"),
    h("td.code.wide", keyOf(event)),
    h("td.code", short(bodyOf(event).replace(/\s+/g, " "))),
    h("td.tight.wide", exact(event.published_at)));
  const node = h("div.scroll", h("table", { "aria-label": label },
    h("thead", h("tr", h("th.number", { scope: "col" }, "Position"), h("th.wide", { scope: "col" }, "Topic"), h("th", { scope: "col" }, "Type"), h("th.wide", { scope: "col" }, "Key"), h("th", { scope: "col" }, "Payload"), h("th.wide", { scope: "col" }, "Published"))),
    body));
  return {
    node,
    fill: (events) => body.replaceChildren(...events.map(row)),
    append: (events) => body.append(...events.map(row)),
    add: (event) => {
      const made = row(event);
      made.classList.add("fresh");
      body.prepend(made);
      while (body.children.length > MOST_ROWS) body.lastElementChild.remove();
    },
    get size() {
      return body.children.length;
    },
  };
}

/** The search for what a form says, as the API wants it. */
function wanted(given) {
  const header = given.header.includes("=") ? { [`header.${given.header.split("=")[0].trim()}`]: given.header.slice(given.header.indexOf("=") + 1).trim() } : {};
  const time = (text) => (text ? new Date(text).toISOString() : "");
  return { type: given.type, key: given.key, ...header, since: time(given.since), until: time(given.until) };
}

export async function events(search) {
  const topics = (await get("/v1/topics")).topics.map((topic) => topic.name);
  const field = (name, label, more = {}) => h("label", label, input({ name, value: search.get(name) ?? "", ...more }));
  const live = h("input", { type: "checkbox", name: "live" });
  const form = h("form.row", { "aria-label": "Search" },
    field("topic", "Topic", { options: [["", "all topics"], ...topics] }),
    field("type", "Type"),
    field("key", "Key"),
    field("header", "Header", { placeholder: "name=value" }),
    field("since", "From", { type: "datetime-local", step: 1 }),
    field("until", "To", { type: "datetime-local", step: 1 }),
    h("button", { type: "submit" }, "Search"),
    h("label.check", live, "Follow live"));
  const state = h("span", { role: "status" });
  const list = eventTable("Events");
  const nothing = h("p.empty");
  const more = h("button.second", { type: "button", hidden: true }, "Older events");
  show(head("Events", state), card(null, form), card(null, list.node, nothing, more));

  let stop = null;
  let next = null;
  const values = () => Object.fromEntries(new FormData(form));
  const base = (given) => (given.topic ? path`/v1/topics/${given.topic}/` : "/v1/");
  const take = (page, put) => {
    put(page.events);
    next = page.next;
    more.hidden = !next;
    nothing.textContent = list.size ? "" : "No event fits.";
  };
  const load = async () => {
    const given = values();
    const address = base(given) + "events";
    take(await get(address + query({ ...wanted(given), order: "desc", limit: PAGE })), list.fill);
    return address;
  };
  const halt = () => {
    stop?.();
    stop = null;
    state.replaceChildren();
  };
  const run = async () => {
    halt();
    try {
      await load();
      if (!live.checked) return;
      const given = values();
      const { type, key, ...rest } = wanted(given);
      delete rest.since;
      delete rest.until;
      stop = follow(base(given) + "follow" + query({ type, key, ...rest, named: false }), (event) => {
        nothing.textContent = "";
        list.add(event);
      }, (how) => state.replaceChildren(how === "live" ? badge("live", "good") : badge(how, "warn")));
    } catch (error) {
      complain(error);
    }
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    run();
  });
  form.elements.topic.addEventListener("change", run);
  live.addEventListener("change", run);
  more.addEventListener("click", async () => {
    more.disabled = true;
    try {
      take(await get(base(values()) + "events" + (next.startsWith("?") ? next : `?${next}`)), list.append);
    } catch (error) {
      complain(error);
    } finally {
      more.disabled = false;
    }
  });
  await load();
  return halt;
}
