// Queue groups: how far they are, who works, what failed, and what to do about it.

import { get, path, post, remove } from "../api.js";
import { action, badge, card, confirm, dialog, duration, every, exact, facts, form, h, head, note, number, show, table, when } from "../ui.js";
import { bodyOf, keyOf } from "./events.js";

const link = (name) => h("a", { href: `#/groups/${encodeURIComponent(name)}` }, name);

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
  return every(3, async () => {
    const found = (await get("/v1/groups")).groups;
    list.replaceChildren(table([
      { name: "Group", of: (g) => link(g.name) },
      { name: "Ready", kind: "number", of: (g) => number(g.ready) + (g.ready_is_more ? "+" : "") },
      { name: "In work", kind: "number", of: (g) => number(g.processing) },
      { name: "Again", kind: "number wide", of: (g) => number(g.retrying) },
      { name: "Done", kind: "number wide", of: (g) => number(g.done) },
      { name: "Dead", kind: "number", of: (g) => (g.dead ? h("strong.bad", number(g.dead)) : "0") },
      { name: "", of: (g) => (g.paused ? badge("paused", "warn") : "") },
    ], found, { label: "Groups", empty: "No queue group yet." }));
  });
}

export async function group(name) {
  const title = head(name);
  const tiles = h("div.tiles");
  const bindings = h("div");
  const leases = h("div");
  const dead = h("div");
  const settings = h("div");
  show(title, tiles, card("Dead letters", dead), card("Leases", leases), card("Bindings", bindings), card("Settings", settings));
  let round = async () => {};
  const again = () => round();

  const tile = (what, value, tone) => h("div.tile", h("div.name", what), h(`div.value.${tone ?? "plain"}`, value));
  const actions = (found) => [
    found.paused
      ? action("Resume", () => post(path`/v1/groups/${name}/resume`).then(again))
      : action("Pause", () => post(path`/v1/groups/${name}/pause`).then(again)),
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
        tell: (seen) => h("p", `${number(seen.ready)}${seen.ready_is_more ? " or more" : ""} events not worked on yet, ${number(seen.processing)} in work and ${number(seen.dead)} dead letters are forgotten. The events themselves stay in the log.`),
        act: () => remove(path`/v1/groups/${name}`),
      });
      if (done) location.hash = "#/groups";
    }, { style: "risky" }),
  ];

  round = async () => {
    const [found, bound, held, letters] = await Promise.all([
      get(path`/v1/groups/${name}`),
      get(path`/v1/groups/${name}/bindings`),
      get(path`/v1/groups/${name}/leases`),
      get(path`/v1/groups/${name}/dead` + "?limit=100"),
    ]);
    title.replaceChildren(...head(name, found.paused ? badge("paused", "warn") : null, ...actions(found)).childNodes);
    tiles.replaceChildren(
      tile("Ready", number(found.ready) + (found.ready_is_more ? "+" : "")),
      tile("In work", number(found.processing)),
      tile("Waiting for another try", number(found.retrying)),
      tile("Done", number(found.done), "good"),
      tile("Dead", number(found.dead), found.dead ? "bad" : "plain"));
    settings.replaceChildren(facts([
      ["Lease", duration(found.lease_seconds)],
      ["Tries", number(found.max_attempts)],
      ["Order", found.ordered_keys ? "events of one key one after the other" : "none"],
      ["Most in work", found.max_in_flight ? number(found.max_in_flight) : "no limit"],
      ["Frontier", number(found.frontier)],
      ["Made", exact(found.created_at)],
    ]));
    bindings.replaceChildren(table([
      { name: "Topic", of: (b) => b.topic ?? "every topic" },
      { name: "Type", of: (b) => b.type ?? "any" },
      { name: "Routing key", kind: "wide", of: (b) => (b.pattern ? h("span.code", b.pattern) : "any") },
      { name: "Headers", kind: "wide", of: (b) => (b.headers && Object.keys(b.headers).length ? h("span.code", JSON.stringify(b.headers)) : "any") },
      { name: "From position", kind: "number wide", of: (b) => number(b.from_position) },
      { name: "", of: (b) => action("Unbind", async () => {
        const done = await confirm("Take this binding away?", {
          button: "Unbind",
          tell: () => h("p", "Events that only this binding selects are no longer worked on by the group."),
          act: () => remove(path`/v1/groups/${name}/bindings/${b.id}`),
        });
        if (done) await again();
      }, { style: "second small" }) },
    ], bound.bindings, { label: "Bindings", empty: "Bound to nothing: the group gets no events." }));
    leases.replaceChildren(table([
      { name: "Worker", of: (l) => l.worker },
      { name: "Events", kind: "number", of: (l) => number(l.events) },
      { name: "Positions", kind: "wide", of: (l) => `${number(l.first_position)} to ${number(l.last_position)}` },
      { name: "Ends", kind: "tight", of: (l) => when(l.expires_at) },
    ], held.leases, { label: "Leases", empty: "Nobody works for this group now." }));
    dead.replaceChildren(
      letters.dead.length ? h("div.buttons", bulk(name, "redrive", again), bulk(name, "discard", again)) : null ?? "",
      table([
        { name: "Position", kind: "number tight", of: (d) => number(d.position) },
        { name: "Topic", kind: "wide", of: (d) => d.event?.topic ?? d.topic },
        { name: "Tries", kind: "number", of: (d) => number(d.attempts) },
        { name: "Error", of: (d) => h("span.code", (d.error ?? "").split("\n")[0]) },
        { name: "Died", kind: "tight wide", of: (d) => when(d.died_at) },
        { name: "", of: (d) => h("div.buttons", action("Look", () => lookAt(d), { style: "second small" }), one(name, d, "redrive", again), one(name, d, "discard", again)) },
      ], letters.dead, { label: "Dead letters", empty: "Nothing has died." }));
  };
  return every(3, () => round());
}

const WORDS = {
  redrive: { title: "Work on dead letters again?", button: "Redrive", tell: (n) => `${n} will be worked on again, as if new.` },
  discard: { title: "Discard dead letters?", button: "Discard", tell: (n) => `${n} will be forgotten by this group. The events stay in the log.` },
};
const counted = (seen) => (seen.count === 1 ? "1 dead letter" : `${number(seen.count)} dead letters`) + (seen.first ? ` (positions ${number(seen.first)} to ${number(seen.last)})` : "");

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
const one = (name, letter, verb, again) => action(WORDS[verb].button, () => ask(name, verb, { positions: [letter.position] }, again), { style: "second small" });

function lookAt(letter) {
  const event = letter.event;
  return dialog((close) => h("div",
    h("h2", `Dead letter ${number(letter.position)}`),
    facts([
      ["Tries", number(letter.attempts)],
      ["Died", exact(letter.died_at)],
      event ? ["Topic", event.topic] : null,
      event ? ["Key", keyOf(event)] : null,
    ]),
    h("h2", "Error"), h("pre", { tabIndex: 0 }, letter.error ?? "–"),
    event ? [h("h2", "Payload"), h("pre", { tabIndex: 0 }, bodyOf(event))] : h("p.empty", "The event itself is gone: retention took it."),
    h("div.buttons", h("button", { type: "button", onclick: () => close() }, "Close"))));
}

async function rewind(name, again) {
  const asked = await form(`Rewind ${name}`, [
    { name: "to", label: "To just after position", type: "number", min: 0, value: "0", required: true, help: "0 is the beginning of the log." },
  ], async (given) => ({ to: Number(given.to) }), { button: "Look" });
  if (!asked) return;
  const done = await confirm(`Rewind ${name}?`, {
    name,
    button: "Rewind",
    look: () => post(path`/v1/groups/${name}/rewind`, { ...asked, dry_run: true }),
    tell: (seen) => h("p", `The group starts again after position ${number(seen.to)}: ${number(seen.events)}${seen.events_is_more ? " or more" : ""} events are worked on again. Leases that are held now are lost.`),
    act: () => post(path`/v1/groups/${name}/rewind`, asked),
  });
  if (done) await again();
}
