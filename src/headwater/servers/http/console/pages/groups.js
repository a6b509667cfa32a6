// Queue groups: how far they are, who works, what failed, and what to do about it.

import { get, path, post, query, remove } from "../api.js";
import { isEmpty } from "../json.js";
import { action, atLeast, badge, card, confirm, count, dialog, duration, events, every, exact, facts, form, h, head, note, number, range, show, table, update, when } from "../ui.js";
import { contentOf, keyOf } from "./events.js";

const PAGE = 100;

export const link = (name) => h("a", { href: `#/groups/${encodeURIComponent(name)}` }, name);

export async function groups() {
  const list = h("div");
  show(
    head("Groups", action("New group", async () => {
      const made = await form("New queue group", [
        { name: "name", label: "Name", required: true },
        { name: "topic", label: "Topic", help: "Empty: the whole log. More bindings can be added later." },
        { name: "lease_seconds", label: "Lease in seconds", type: "number", min: 1, value: "30" },
        { name: "max_attempts", label: "Tries before an event is dead", type: "number", min: 1, value: "10" },
        { name: "ordered_keys", label: "Events of one key one after the other", type: "checkbox" },
      ], async (given) => {
        await post("/v1/groups", {
          name: given.name,
          lease_seconds: Number(given.lease_seconds),
          max_attempts: Number(given.max_attempts),
          ordered_keys: given.ordered_keys,
          bindings: [given.topic ? { topic: given.topic } : {}],
        });
        return given.name;
      }, { button: "Create" });
      if (made) location.hash = `#/groups/${encodeURIComponent(made)}`;
    }, { style: "primary" })),
    card(null, list),
  );
  return every(3, async () => update(list, groupTable((await get("/v1/groups")).groups)), list).stop;
}

const TONES = { running: "good", paused: "warn", no_workers: "warn", no_reader: "warn", stalled: "bad" };

/** Whether anybody works on a group. */
export const stateBadge = (g) => badge(g.state.replace("_", " "), TONES[g.state] ?? "bad");

/** Queue groups. Those that only own SQL subscriptions have a page of their own. */
export const groupTable = (groups) => table([
  { name: "Group", of: (g) => link(g.name) },
  { name: "Ready", kind: "number", of: (g) => atLeast(g.ready, g.ready_is_more) },
  { name: "In work", kind: "number", of: (g) => number(g.processing) },
  { name: "Again", kind: "number wide", of: (g) => number(g.retrying) },
  { name: "Done", kind: "number wide", of: (g) => number(g.done) },
  { name: "Dead", kind: "number", of: (g) => (g.dead ? h("strong.bad", number(g.dead)) : "0") },
  { name: "State", of: stateBadge },
], groups.filter((g) => g.kind === "queue"), { label: "Queue groups", key: (g) => g.name, empty: "No queue group yet." });

export async function group(name) {
  if ((await get(path`/v1/groups/${name}`)).kind !== "queue") {
    location.replace(`#/subscriptions?group=${encodeURIComponent(name)}`);
    return undefined;
  }
  const whole = h("div.stack");
  const title = head(name);
  const tiles = h("div.tiles");
  const settings = h("div");
  const dead = h("div.stack");
  const leases = h("div");
  const bindings = h("div");
  whole.append(title, tiles, card("Dead letters", dead), card("Leases", leases), card("Bindings", bindings), card("Settings", settings));
  show(whole);
  // Each part by itself: who may see one need not be allowed to see another.
  const parts = [];
  const again = () => Promise.all(parts.map((one) => one.now()));
  const leave = () => parts.forEach((one) => one.stop());
  const part = (place, load, draw) => parts.push(every(3, async () => update(place, ...draw(await load())), place));

  const tile = (what, value, tone) => h("div.tile", h("div.name", what), h(`div.value.${tone ?? "plain"}`, value));
  parts.push(every(3, async () => {
    const found = await get(path`/v1/groups/${name}`).catch((error) => {
      // Without the group the rest is not there either.
      if (error.status === 404) leave();
      throw error;
    });
    update(title, ...head(name, stateBadge(found), ...actions(found, again)).childNodes);
    update(tiles,
      tile("Ready", atLeast(found.ready, found.ready_is_more)),
      tile("In work", number(found.processing)),
      tile("Waiting for another try", number(found.retrying)),
      tile("Done", number(found.done), "good"),
      tile("Dead", number(found.dead), found.dead ? "bad" : "plain"));
    update(settings, facts([
      ["Lease", duration(found.lease_seconds)],
      ["Tries", number(found.max_attempts)],
      ["Order", found.ordered_keys ? "events of one key one after the other" : "none"],
      ["Most in work", found.max_in_flight ? number(found.max_in_flight) : "no limit"],
      ["Frontier", number(found.frontier)],
      ["Last claim", found.last_claimed_at ? h("span", when(found.last_claimed_at), ` by ${found.last_worker}`) : "none yet"],
      ["Made", exact(found.created_at)],
    ]));
  }, whole));

  parts.push(deadLetters(name, dead, again));
  part(leases, () => get(path`/v1/groups/${name}/leases`), (held) => [table([
    { name: "Worker", of: (l) => l.worker },
    { name: "Events", kind: "number", of: (l) => number(l.events) },
    { name: "Positions", kind: "wide", of: (l) => `${number(l.first_position)} to ${number(l.last_position)}` },
    { name: "Ends", kind: "tight", of: (l) => when(l.expires_at) },
  ], held.leases, { label: "Leases", key: (l) => l.token, empty: "Nobody works for this group now." })]);
  part(bindings, () => get(path`/v1/groups/${name}/bindings`), (bound) => [table([
    { name: "Topic", of: (b) => b.topic ?? "every topic" },
    { name: "Type", of: (b) => b.type ?? "any" },
    { name: "Routing key", kind: "wide", of: (b) => (b.pattern ? h("span.code", b.pattern) : "any") },
    { name: "Headers", kind: "wide", of: (b) => (isEmpty(b.headers) ? "any" : h("span.code", b.headers)) },
    { name: "Positions", kind: "wide", of: (b) => `after ${number(b.from_position)}${b.to_position === null ? "" : ` to ${number(b.to_position)}`}` },
    { name: "", of: (b) => (b.to_position === null ? action("Unbind", () => unbind(name, b, again), { style: "second small" }) : badge("ended")) },
  ], bound.bindings, { label: "Bindings", key: (b) => b.id, empty: "Bound to nothing: the group gets no events." })]);
  return leave;
}

/** The dead letters of a group, kept up to date in a place: those of a queue, or those of the handlers of SQL subscriptions. */
export function deadLetters(name, place, again) {
  let after = 0;
  const turn = (to) => {
    after = to;
    return again();
  };
  return every(3, async () => {
    const page = await get(path`/v1/groups/${name}/dead` + query({ after, limit: PAGE }));
    const handlers = page.dead.some((d) => d.handler !== null);
    update(place,
      page.dead.length ? h("div.buttons", bulk(name, "redrive", again), bulk(name, "discard", again)) : null,
      table([
        { name: "Position", kind: "number tight", of: (d) => number(d.position) },
        { name: "Topic", kind: "wide", of: (d) => d.event?.topic ?? d.topic },
        ...(handlers ? [
          { name: "Handler", of: (d) => d.handler },
          { name: "Subscription", kind: "number wide", of: (d) => number(d.subscription) },
        ] : []),
        { name: "Tries", kind: "number", of: (d) => number(d.attempts) },
        { name: "Error", of: (d) => h("span.code", (d.error ?? "").split("\n")[0]) },
        { name: "Died", kind: "tight wide", of: (d) => when(d.died_at) },
        { name: "", of: (d) => h("div.buttons", action("Look", () => lookAt(d), { style: "second small" }), one(name, d, "redrive", again), one(name, d, "discard", again)) },
      ], page.dead, { label: "Dead letters", key: (d) => `${d.position} ${d.subscription} ${d.handler}`, empty: after ? `Nothing has died after position ${number(after)}.` : "Nothing has died." }),
      after || page.next ? h("div.buttons",
        after ? action("From the first", () => turn(0)) : null,
        page.next ? action("Next dead letters", () => turn(page.dead.at(-1).position)) : null) : null);
  }, place);
}

const actions = ({ name, paused }, again) => [
  paused
    ? action("Resume", () => post(path`/v1/groups/${name}/resume`).then(again), { key: "pause" })
    : action("Pause", () => post(path`/v1/groups/${name}/pause`).then(again), { key: "pause" }),
  action("Bind", async () => {
    const done = await form(`Bind ${name} to events`, [
      { name: "topic", label: "Topic", help: "Empty: every topic." },
      { name: "type", label: "Type" },
      { name: "pattern", label: "Routing key pattern", help: "orders.* is one word, orders.# any number." },
    ], (given) => post(path`/v1/groups/${name}/bindings`, Object.fromEntries(Object.entries(given).filter(([, value]) => value))), { button: "Bind" });
    if (done) await again();
  }),
  action("Rewind", () => rewind(name, again)),
  action("Delete", async () => {
    const done = await confirm(`Delete group ${name}?`, {
      name,
      button: "Delete group",
      look: () => remove(path`/v1/groups/${name}` + "?dry_run=true"),
      tell: (seen) => h("p", `${count(seen.ready, "event", seen.ready_is_more)} not worked on yet, ${number(seen.processing)} in work and ${count(seen.dead, "dead letter")} are forgotten${range(seen.first, seen.last)}. The events themselves stay in the log.`),
      act: () => remove(path`/v1/groups/${name}`),
    });
    if (done) location.hash = "#/groups";
  }, { style: "risky" }),
];

const WORDS = {
  redrive: { title: "Work on dead letters again?", button: "Redrive", tell: (n) => `${n} will be worked on again, as if new.` },
  discard: { title: "Discard dead letters?", button: "Discard", tell: (n) => `${n} will be forgotten by this group. The events stay in the log.` },
};
const counted = (seen) => count(seen.count, "dead letter") + range(seen.first, seen.last);

function ask(name, verb, which, again) {
  const words = WORDS[verb];
  return confirm(words.title, {
    button: words.button,
    look: () => post(path`/v1/groups/${name}/dead/${verb}`, { ...which, dry_run: true }),
    tell: (seen) => h("p", words.tell(counted(seen))),
    act: () => post(path`/v1/groups/${name}/dead/${verb}`, which),
  }).then((done) => {
    if (done) note(`${verb === "redrive" ? "Redriven" : "Discarded"}: ${number(done.count)}.`);
    return done && again();
  });
}

const bulk = (name, verb, again) => action(`${WORDS[verb].button} all`, () => ask(name, verb, { all: true }, again), { style: "second small" });
const one = (name, letter, verb, again) => action(WORDS[verb].button, () => ask(name, verb, { positions: [letter.position], handler: letter.handler, subscription: letter.subscription }, again), { style: "second small" });

function lookAt(letter) {
  const event = letter.event;
  return dialog((close) => h("div",
    h("h2", `Dead letter ${number(letter.position)}`),
    facts([
      letter.handler === null ? null : ["Handler", letter.handler],
      letter.handler === null ? null : ["Subscription", number(letter.subscription)],
      ["Tries", number(letter.attempts)],
      ["Died", exact(letter.died_at)],
      event ? ["Topic", event.topic] : null,
      event ? ["Type", event.type ?? "–"] : null,
      event ? ["Key", h("span.code", keyOf(event))] : null,
      event ? ["Published", exact(event.published_at)] : null,
    ]),
    h("h2", "Error"), h("pre", { tabIndex: 0 }, letter.error ?? "–"),
    h("h2", "Tries"),
    table([
      { name: "Try", kind: "number tight", of: (t) => number(t.attempt) },
      { name: "When", kind: "tight", of: (t) => exact(t.at) },
      { name: "Worker", of: (t) => t.worker },
      { name: "Error", of: (t) => h("span.code", t.error ?? "–") },
    ], letter.history, { label: "Tries", empty: "No try was noted." }),
    event ? contentOf(event) : h("p.empty", "The event itself is not shown: retention took it, or its topic may not be read."),
    h("div.buttons", h("button", { type: "button", onclick: () => close() }, "Close"))));
}

async function rewind(name, again) {
  const asked = await form(`Rewind ${name}`, [
    { name: "to", label: "To just after position", type: "number", min: 0, value: "0", required: true, help: "0 is the beginning of the log. Further on than the group is: what lies between is skipped." },
  ], async (given) => ({ to: Number(given.to) }), { button: "Look" });
  if (!asked) return;
  const some = (seen, verb) => (seen.events ? h("p", `${count(seen.events, "event", seen.events_is_more)} ${seen.events === 1 && !seen.events_is_more ? "is" : "are"} ${verb}${range(seen.first, seen.last)}.`) : null);
  const done = await confirm(`Rewind ${name}?`, {
    name,
    button: "Rewind",
    look: () => post(path`/v1/groups/${name}/rewind`, { ...asked, dry_run: true }),
    tell: (seen) => [
      h("p", `The group starts again after position ${number(seen.to)}. Leases that are held now are lost.`),
      some(seen.again, "worked on again"),
      some(seen.skipped, "skipped: this group never works on them"),
      seen.again.events || seen.skipped.events ? null : h("p", "No event is worked on again, and none is skipped."),
    ],
    act: () => post(path`/v1/groups/${name}/rewind`, asked),
  });
  if (done) await again();
}

async function unbind(name, binding, again) {
  const done = await confirm("Take this binding away?", {
    button: "Unbind",
    look: () => remove(path`/v1/groups/${name}/bindings/${binding.id}` + "?dry_run=true"),
    tell: (seen) => h("p", `It ends at position ${number(seen.to_position)}. ${events(seen)} that no other binding selects, and all that come, this group never works on.`),
    act: () => remove(path`/v1/groups/${name}/bindings/${binding.id}`),
  });
  if (done) await again();
}
