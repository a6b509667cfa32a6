// Queues: lag, leases, bindings, dead letters and actions.

import { get, patch, path, post, query, remove } from "../api.js";
import { isEmpty } from "../json.js";
import { action, atLeast, badge, card, confirm, count, dialog, events, every, exact, facts, form, h, head, note, number, range, show, table, update, when } from "../ui.js";
import { changedSettings, settingFacts, settingFields, settings } from "../settings.js";
import { contentOf, keyOf } from "./events.js";

const PAGE = 100;

export const link = (name) => h("a", { href: `#/queues/${encodeURIComponent(name)}` }, name);

export async function queues() {
  const list = h("div");
  show(
    head("Queues", action("New queue", async () => {
      const known = await settings("QueueCreate");
      const made = await form("New queue", [
        { name: "name", label: "Name", required: true },
        { name: "topic", label: "Topic", help: "Empty: the whole log. More bindings can be added later." },
        ...settingFields(known),
      ], async (given) => {
        await post("/v1/queues", {
          name: given.name,
          bindings: [given.topic ? { topic: given.topic } : {}],
          ...changedSettings(known, given),
        });
        return given.name;
      }, { button: "Create" });
      if (made) location.hash = `#/queues/${encodeURIComponent(made)}`;
    }, { style: "primary" })),
    card(null, list),
  );
  return every(3, async () => update(list, queueTable((await get("/v1/queues")).queues)), list).stop;
}

const TONES = { running: "good", paused: "warn", no_workers: "warn", no_reader: "warn", stalled: "bad" };

/** The state of a queue as a badge. */
export const stateBadge = (g) => badge(g.state.replace("_", " "), TONES[g.state] ?? "bad");

/** A table of queues with bindings. Queues with SQL subscriptions are on the page of subscriptions. */
export const queueTable = (queues) => table([
  { name: "Queue", of: (g) => link(g.name) },
  { name: "Ready", kind: "number", of: (g) => atLeast(g.ready, g.ready_is_more) },
  { name: "Processing", kind: "number", of: (g) => number(g.processing) },
  { name: "Retrying", kind: "number wide", of: (g) => number(g.retrying) },
  { name: "Done", kind: "number wide", of: (g) => number(g.done) },
  { name: "Dead", kind: "number", of: (g) => (g.dead ? h("strong.bad", number(g.dead)) : "0") },
  { name: "State", of: stateBadge },
], queues.filter((g) => g.kind === "bindings"), { label: "Queues", key: (g) => g.name, empty: "No queues." });

export async function queue(name) {
  if ((await get(path`/v1/queues/${name}`)).kind !== "bindings") {
    location.replace(`#/subscriptions?queue=${encodeURIComponent(name)}`);
    return undefined;
  }
  const content = h("div.stack");
  const title = head(name);
  const tiles = h("div.tiles");
  const details = h("div");
  const dead = h("div.stack");
  const leases = h("div");
  const bindings = h("div");
  content.append(title, tiles, card("Dead letters", dead), card("Leases", leases), card("Bindings", bindings), card("Settings", details));
  show(content);
  // Each part is loaded separately, because each may require another permission.
  const parts = [];
  const again = () => Promise.all(parts.map((one) => one.now()));
  const leave = () => parts.forEach((one) => one.stop());
  const part = (target, load, draw) => parts.push(every(3, async () => update(target, ...draw(await load())), target));

  const tile = (what, value, tone) => h("div.tile", h("div.name", what), h(`div.value.${tone ?? "plain"}`, value));
  parts.push(every(3, async () => {
    const found = await get(path`/v1/queues/${name}`).catch((error) => {
      // The queue was deleted: stop all parts.
      if (error.status === 404) leave();
      throw error;
    });
    update(title, ...head(name, stateBadge(found), ...actions(found, again)).childNodes);
    update(tiles,
      tile("Ready", atLeast(found.ready, found.ready_is_more)),
      tile("Processing", number(found.processing)),
      tile("Retrying", number(found.retrying)),
      tile("Done", number(found.done), "good"),
      tile("Dead", number(found.dead), found.dead ? "bad" : "plain"));
    const known = await settings("Queue");
    update(details, facts([
      ...settingFacts(known, found),
      ["Claimed position", number(found.claimed_position)],
      ["Last claim", found.last_claimed_at ? h("span", when(found.last_claimed_at), ` by ${found.last_worker}`) : "none"],
      ["Created", exact(found.created_at)],
    ]));
  }, content));

  parts.push(deadLetters(name, dead, again));
  part(leases, () => get(path`/v1/queues/${name}/leases`), (held) => [table([
    { name: "Worker", of: (l) => l.worker },
    { name: "Events", kind: "number", of: (l) => number(l.events) },
    { name: "Positions", kind: "wide", of: (l) => `${number(l.first_position)} to ${number(l.last_position)}` },
    { name: "Expires", kind: "tight", of: (l) => when(l.expires_at) },
  ], held.leases, { label: "Leases", key: (l) => l.token, empty: "No active leases." })]);
  part(bindings, () => get(path`/v1/queues/${name}/bindings`), (bound) => [table([
    { name: "Topic", of: (b) => b.topic ?? "every topic" },
    { name: "Type", of: (b) => b.type ?? "any" },
    { name: "Routing key", kind: "wide", of: (b) => (b.pattern ? h("span.code", b.pattern) : "any") },
    { name: "Headers", kind: "wide", of: (b) => (isEmpty(b.headers) ? "any" : h("span.code", b.headers)) },
    { name: "Positions", kind: "wide", of: (b) => `after ${number(b.from_position)}${b.to_position === null ? "" : ` to ${number(b.to_position)}`}` },
    { name: "", of: (b) => (b.to_position === null ? action("Unbind", () => unbind(name, b, again), { style: "second small" }) : badge("ended")) },
  ], bound.bindings, { label: "Bindings", key: (b) => b.id, empty: "No bindings: the queue receives no events." })]);
  return leave;
}

/** Show the dead letters of a queue, including those of SQL subscriptions, in a node and keep them current. */
export function deadLetters(name, target, again) {
  let after = 0;
  const turn = (to) => {
    after = to;
    return again();
  };
  return every(3, async () => {
    const page = await get(path`/v1/queues/${name}/dead` + query({ after, limit: PAGE }));
    const handlers = page.dead.some((d) => d.handler !== null);
    update(target,
      page.dead.length ? h("div.buttons", bulk(name, "redrive", again), bulk(name, "discard", again)) : null,
      table([
        { name: "Position", kind: "number tight", of: (d) => number(d.position) },
        { name: "Topic", kind: "wide", of: (d) => d.event?.topic ?? d.topic },
        ...(handlers ? [
          { name: "Handler", of: (d) => d.handler },
          { name: "Subscription", kind: "number wide", of: (d) => number(d.subscription) },
        ] : []),
        { name: "Attempts", kind: "number", of: (d) => number(d.attempts) },
        { name: "Error", of: (d) => h("span.code", (d.error ?? "").split("\n")[0]) },
        { name: "Died", kind: "tight wide", of: (d) => when(d.died_at) },
        { name: "", of: (d) => h("div.buttons", action("Details", () => showDetails(d), { style: "second small" }), one(name, d, "redrive", again), one(name, d, "discard", again)) },
      ], page.dead, { label: "Dead letters", key: (d) => `${d.position} ${d.subscription} ${d.handler}`, empty: after ? `No dead letters after position ${number(after)}.` : "No dead letters." }),
      after || page.next ? h("div.buttons",
        after ? action("First page", () => turn(0)) : null,
        page.next ? action("Next page", () => turn(page.dead.at(-1).position)) : null) : null);
  }, target);
}

async function change(found, again) {
  const known = await settings("QueueUpdate");
  const done = await form(`Settings of ${found.name}`, settingFields(known, found), (given) => patch(path`/v1/queues/${found.name}`, changedSettings(known, given, found)));
  if (done) await again();
}

const actions = (found, again, { name, paused } = found) => [
  paused
    ? action("Resume", () => post(path`/v1/queues/${name}/resume`).then(again), { key: "pause" })
    : action("Pause", () => post(path`/v1/queues/${name}/pause`).then(again), { key: "pause" }),
  action("Bind", async () => {
    const done = await form(`Bind ${name} to events`, [
      { name: "topic", label: "Topic", help: "Empty: every topic." },
      { name: "type", label: "Type" },
      { name: "pattern", label: "Routing key pattern", help: "* matches one word, # any number of words: orders.*, orders.#" },
    ], (given) => post(path`/v1/queues/${name}/bindings`, Object.fromEntries(Object.entries(given).filter(([, value]) => value))), { button: "Bind" });
    if (done) await again();
  }),
  action("Settings", () => change(found, again)),
  action("Rewind", () => rewind(name, again)),
  action("Delete", async () => {
    const done = await confirm(`Delete queue ${name}?`, {
      name,
      button: "Delete queue",
      preview: () => remove(path`/v1/queues/${name}` + "?dry_run=true"),
      describe: (preview) => h("p", `${count(preview.ready, "event", preview.ready_is_more)} ready, ${number(preview.processing)} processing and ${count(preview.dead, "dead letter")} are dropped from the queue${range(preview.first, preview.last)}. The events stay in the log.`),
      act: () => remove(path`/v1/queues/${name}`),
    });
    if (done) location.hash = "#/queues";
  }, { style: "risky" }),
];

const WORDS = {
  redrive: { title: "Redrive dead letters?", button: "Redrive", describe: (n) => `${n} will return to the queue with a new set of attempts.` },
  discard: { title: "Discard dead letters?", button: "Discard", describe: (n) => `${n} will be deleted from this queue. The events stay in the log.` },
};
const counted = (preview) => count(preview.count, "dead letter") + range(preview.first, preview.last);

function confirmVerb(name, verb, which, again) {
  const words = WORDS[verb];
  return confirm(words.title, {
    button: words.button,
    preview: () => post(path`/v1/queues/${name}/dead/${verb}`, { ...which, dry_run: true }),
    describe: (preview) => h("p", words.describe(counted(preview))),
    act: () => post(path`/v1/queues/${name}/dead/${verb}`, which),
  }).then((done) => {
    if (done) note(`${verb === "redrive" ? "Redriven" : "Discarded"}: ${number(done.count)}.`);
    return done && again();
  });
}

const bulk = (name, verb, again) => action(`${WORDS[verb].button} all`, () => confirmVerb(name, verb, { all: true }, again), { style: "second small" });
const one = (name, letter, verb, again) => action(WORDS[verb].button, () => confirmVerb(name, verb, { positions: [letter.position], handler: letter.handler, subscription: letter.subscription }, again), { style: "second small" });

function showDetails(letter) {
  const event = letter.event;
  return dialog((close) => h("div",
    h("h2", `Dead letter ${number(letter.position)}`),
    facts([
      letter.handler === null ? null : ["Handler", letter.handler],
      letter.handler === null ? null : ["Subscription", number(letter.subscription)],
      ["Attempts", number(letter.attempts)],
      ["Died", exact(letter.died_at)],
      event ? ["Topic", event.topic] : null,
      event ? ["Type", event.type ?? "–"] : null,
      event ? ["Key", h("span.code", keyOf(event))] : null,
      event ? ["Published", exact(event.published_at)] : null,
    ]),
    h("h2", "Error"), h("pre", { tabIndex: 0 }, letter.error ?? "–"),
    h("h2", "Attempts"),
    table([
      { name: "Attempt", kind: "number tight", of: (t) => number(t.attempt) },
      { name: "When", kind: "tight", of: (t) => exact(t.at) },
      { name: "Worker", of: (t) => t.worker },
      { name: "Error", of: (t) => h("span.code", t.error ?? "–") },
    ], letter.history, { label: "Attempts", empty: "No attempts were recorded." }),
    event ? contentOf(event) : h("p.empty", "The event is not available: it was removed by retention, or you have no permission to read its topic."),
    h("div.buttons", h("button", { type: "button", onclick: () => close() }, "Close"))));
}

async function rewind(name, again) {
  const target = await form(`Rewind ${name}`, [
    { name: "to", label: "After position", type: "number", min: 0, value: "0", required: true, help: "0 is the beginning of the log. If the position is ahead of the queue, the events in between are skipped." },
  ], async (given) => ({ to: Number(given.to) }), { button: "Preview" });
  if (!target) return;
  const some = (preview, verb) => (preview.events ? h("p", `${count(preview.events, "event", preview.events_is_more)} ${preview.events === 1 && !preview.events_is_more ? "is" : "are"} ${verb}${range(preview.first, preview.last)}.`) : null);
  const done = await confirm(`Rewind ${name}?`, {
    name,
    button: "Rewind",
    preview: () => post(path`/v1/queues/${name}/rewind`, { ...target, dry_run: true }),
    describe: (preview) => [
      h("p", `The queue continues after position ${number(preview.to)}. Its current leases are revoked.`),
      some(preview.again, "delivered again"),
      some(preview.skipped, "skipped"),
      preview.again.events || preview.skipped.events ? null : h("p", "No events are delivered again or skipped."),
    ],
    act: () => post(path`/v1/queues/${name}/rewind`, target),
  });
  if (done) await again();
}

async function unbind(name, binding, again) {
  const done = await confirm("Remove this binding?", {
    button: "Unbind",
    preview: () => remove(path`/v1/queues/${name}/bindings/${binding.id}` + "?dry_run=true"),
    describe: (preview) => h("p", `It ends at position ${number(preview.to_position)}. The queue does not receive ${events(preview)} that no other binding selects, nor later ones.`),
    act: () => remove(path`/v1/queues/${name}/bindings/${binding.id}`),
  });
  if (done) await again();
}
