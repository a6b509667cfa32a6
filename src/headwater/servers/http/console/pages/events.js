// Events: search by key, type, header and time; details; follow live.

import { follow, get, may, path, query } from "../api.js";
import { isEmpty, pretty } from "../json.js";
import { badge, card, dialog, exact, facts, h, head, input, noteError, number, errorText, show } from "../ui.js";

const PAGE = 50;
// Bounds the table of a page that stays open for days.
const MAX_ROWS = 500;
const SHORT = 140;

export const keyOf = (event) => event.key ?? (event.key_base64 ? `base64:${event.key_base64}` : "–");

/** The payload unchanged: JSON as stored, text, or base64; null if there is none. */
const payloadOf = (event) => event.data ?? event.text ?? event.base64 ?? null;

/** The payload formatted for reading. */
const bodyOf = (event) => (event.data ? pretty(event.data) : payloadOf(event) ?? "");

function shortBody(event) {
  // Only one line is shown: format only the beginning of a large payload.
  const text = (event.data ? pretty(event.data.slice(0, 4 * SHORT)) : (payloadOf(event) ?? "").slice(0, 4 * SHORT)).replace(/\s+/g, " ");
  return text.length > SHORT ? `${text.slice(0, SHORT)}…` : text;
}

/** Headers and payload of an event. */
export function contentOf(event) {
  const body = bodyOf(event);
  return [
    isEmpty(event.headers) ? null : [h("h2", "Headers"), h("pre", { tabIndex: 0 }, pretty(event.headers))],
    isEmpty(event.metadata) ? null : [h("h2", "Metadata"), h("pre", { tabIndex: 0 }, pretty(event.metadata))],
    h("h2", event.base64 !== undefined ? "Payload (base64)" : "Payload"),
    body ? h("pre", { tabIndex: 0 }, body) : h("p.empty", "This event has no payload."),
  ];
}

const tagsOf = (event) => (event.tags.length ? event.tags.join(", ") : "–");

function showDetails(event) {
  return dialog((close) => h("div",
    h("h2", `Event ${number(event.position)}`),
    facts([
      ["Topic", h("a", { href: `#/topics/${encodeURIComponent(event.topic)}`, onclick: () => close() }, event.topic)],
      ["Position", String(event.position)],
      event.offset !== null && event.offset !== undefined ? ["Partition and offset", `${event.partition} · ${number(event.offset)}`] : null,
      ["Type", event.type ?? "–"],
      event.tags ? ["Tags", h("span.code", tagsOf(event))] : ["Key", h("span.code", keyOf(event))],
      event.routing_key ? ["Routing key", h("span.code", event.routing_key)] : null,
      event.event_id ? ["Event id", h("span.code", event.event_id)] : null,
      ["Content type", event.content_type ?? "–"],
      ["Published", exact(event.published_at)],
    ]),
    contentOf(event),
    h("div.buttons",
      h("button.second", { type: "button", onclick: () => navigator.clipboard?.writeText(payloadOf(event) ?? "") }, "Copy payload"),
      h("button", { type: "button", onclick: () => close() }, "Close"))));
}

const POSITION = { name: "Position", kind: "number tight", of: (event) => h("button.quiet.small", { type: "button", onclick: () => showDetails(event), "aria-label": `Show event ${event.position}` }, number(event.position)) };
const TYPE = { name: "Type", of: (event) => event.type ?? "–" };
const PAYLOAD = { name: "Payload", kind: "code", of: shortBody };
const PUBLISHED = { name: "Published", kind: "tight wide", of: (event) => exact(event.published_at) };
const OF_TOPICS = [POSITION, { name: "Topic", kind: "wide", of: (event) => event.topic }, TYPE, { name: "Key", kind: "code wide", of: keyOf }, PAYLOAD, PUBLISHED];
export const OF_STORE = [POSITION, TYPE, { name: "Tags", kind: "code", of: tagsOf }, PAYLOAD, PUBLISHED];

/** A table of events; `add` inserts one at the top. */
export function eventTable(label, columns = OF_TOPICS) {
  const body = h("tbody");
  const cell = (tag, { kind }, given, content) => h([tag, ...(kind ?? "").split(" ").filter(Boolean)].join("."), given, content);
  const row = (event) => h("tr", columns.map((column) => cell("td", column, {}, column.of(event))));
  const node = h("div.scroll", h("table", { "aria-label": label }, h("thead", h("tr", columns.map((column) => cell("th", column, { scope: "col" }, column.name)))), body));
  return {
    node,
    fill: (events) => body.replaceChildren(...events.map(row)),
    append: (events) => body.append(...events.map(row)),
    add: (event) => {
      const made = row(event);
      made.classList.add("fresh");
      body.prepend(made);
      while (body.children.length > MAX_ROWS) body.lastElementChild.remove();
    },
    get size() {
      return body.children.length;
    },
  };
}

/** Store the values of a form in the URL, for bookmarks and the back button. */
export function keepInAddress(page, values) {
  const address = `#${page}${query(values)}`;
  if (location.hash !== address) history.pushState(null, "", address);
}

/** The query parameters of the API for a search form. */
function searchParameters(given) {
  const header = given.header.includes("=") ? { [`header.${given.header.split("=")[0].trim()}`]: given.header.slice(given.header.indexOf("=") + 1).trim() } : {};
  const time = (text) => (text ? new Date(text).toISOString() : "");
  return { type: given.type, key: given.key, ...header, since: time(given.since), until: time(given.until) };
}

export async function events(search) {
  const [me, found] = await Promise.all([get("/v1/me"), get("/v1/topics")]);
  const all = may(me, "read", "topic", "*");
  const names = new Set(found.topics.map((topic) => topic.name).filter((name) => may(me, "read", "topic", name)));
  if (search.get("topic")) names.add(search.get("topic"));
  const topics = [...(all ? [["", "all topics"]] : []), ...names];
  const field = (name, label, more = {}) => h("label", label, input({ name, value: search.get(name) ?? "", ...more }));
  const live = h("input", { type: "checkbox" });
  const form = h("form.row", { "aria-label": "Search" },
    field("topic", "Topic", { options: topics }),
    field("type", "Type"),
    field("key", "Key"),
    field("header", "Header", { placeholder: "name=value" }),
    field("since", "From", { type: "datetime-local", step: 1 }),
    field("until", "To", { type: "datetime-local", step: 1 }),
    h("button", { type: "submit" }, "Search"),
    h("label.check", live, "Follow live"));
  const state = h("span", { role: "status" });
  const list = eventTable("Events");
  const message = h("div", { "aria-live": "polite" });
  const more = h("button.second", { type: "button", hidden: true });
  if (!topics.length) {
    show(head("Events"), card(null, h("p.empty", `The account ${me.account} has no permission to read a topic.`)));
    return undefined;
  }
  show(head("Events", state), card(null, form), card(null, list.node, message, more));

  let stop = null;
  let next = null;
  // Counts searches: the answer of one that was replaced meanwhile is dropped, and it follows nothing.
  let current = 0;
  const values = () => Object.fromEntries(new FormData(form));
  const base = (given) => (given.topic ? path`/v1/topics/${given.topic}/` : "/v1/");
  const take = (page, put) => {
    put(page.events);
    next = page.next;
    more.hidden = !next;
    more.textContent = page.events.length ? "Older events" : "Search further back";
    const back = next && new URLSearchParams(next).get("before");
    const sofar = back ? `Searched back to position ${number(Number(back))}` : "";
    const shown = list.size ? (page.events.length < PAGE && back ? `${sofar}.` : "") : back ? `${sofar}: no matching event so far.` : "No matching events.";
    message.replaceChildren(shown ? h("p.empty", shown) : "");
  };
  const showError = (error) => {
    list.fill([]);
    more.hidden = true;
    message.replaceChildren(errorText(error));
  };
  const halt = () => {
    current += 1;
    stop?.();
    stop = null;
    state.replaceChildren();
  };
  const run = async () => {
    halt();
    const mine = current;
    const given = values();
    const parameters = searchParameters(given);
    try {
      const page = await get(base(given) + "events" + query({ ...parameters, order: "desc", limit: PAGE }));
      if (mine !== current) return;
      take(page, list.fill);
      if (!live.checked) return;
      // Follow from the stable position of the page, so that no event in between is missed.
      const { since, until, ...selected } = parameters;
      stop = follow(base(given) + "follow" + query({ ...selected, named: false, after: page.stable }), (event) => {
        message.replaceChildren();
        list.add(event);
      }, (how) => state.replaceChildren(how === "live" ? badge("live", "good") : badge(how, "warn")));
    } catch (error) {
      if (mine === current) showError(error);
    }
  };
  const submit = () => {
    keepInAddress("/events", values());
    return run();
  };
  form.onsubmit = (event) => {
    event.preventDefault();
    submit();
  };
  form.elements.topic.onchange = submit;
  live.onchange = run;
  more.onclick = async () => {
    more.disabled = true;
    const mine = current;
    try {
      const page = await get(base(values()) + "events" + next);
      if (mine === current) take(page, list.append);
    } catch (error) {
      noteError(error);
    } finally {
      more.disabled = false;
    }
  };
  await run();
  return halt;
}
