// Webhooks: list, settings, state, test.

import { get, patch, path, post, remove } from "../api.js";
import { changedSettings, settingFacts, settingFields, settings } from "../settings.js";
import { action, badge, card, confirm, dialog, duration, events, exact, facts, form, h, head, note, redraw, show, table } from "../ui.js";

const state = (w) => badge(w.state, { active: "good", paused: "warn" }[w.state] ?? "bad");

export async function webhooks(search, put = show) {
  const found = (await get("/v1/webhooks")).webhooks;
  put(
    head("Webhooks", action("New webhook", async () => {
      const known = await settings("WebhookCreate");
      const made = await form("New webhook", [
        { name: "name", label: "Name", required: true },
        { name: "url", label: "URL", type: "url", required: true },
        { name: "topic", label: "Topic", help: "Empty: the whole log." },
        ...settingFields(known),
      ], (given) => post("/v1/webhooks", { name: given.name, url: given.url, bindings: [given.topic ? { topic: given.topic } : {}], ...changedSettings(known, given) }), { button: "Create" });
      if (!made) return;
      if (made.secret) await dialog((close) => h("div", h("h2", "Secret of this webhook"), h("p", "Receivers verify signatures with it. Copy it now: it is not shown again."), h("pre", made.secret), h("div.buttons", h("button", { type: "button", onclick: () => close() }, "I have saved it"))));
      await webhooks(search, redraw);
    }, { style: "primary" })),
    card(null, table([
      { name: "Webhook", of: (w) => h("a", { href: `#/webhooks/${encodeURIComponent(w.name)}` }, w.name) },
      { name: "URL", of: (w) => h("span.code", w.url) },
      { name: "Queue", kind: "wide", of: (w) => h("a", { href: `#/queues/${encodeURIComponent(w.queue)}` }, w.queue) },
      { name: "State", of: state },
    ], found, { label: "Webhooks", key: (w) => w.name, empty: "No webhooks." })),
  );
}

export async function webhook(name, search, put = show) {
  const [w, known] = await Promise.all([get(path`/v1/webhooks/${name}`), settings("WebhookUpdate")]);
  const again = () => webhook(name, search, redraw);
  put(
    head(name, state(w),
      action("Send a test", async () => {
        const result = await post(path`/v1/webhooks/${name}/test`);
        await dialog((close) => h("div",
          h("h2", result.accepted ? "The receiver accepted the event" : "The receiver did not accept the event"),
          facts([["Status", result.status ?? "no response"], ["Latency", duration(result.latency_ms / 1000)], result.error ? ["Error", result.error] : null]),
          result.response ? h("pre", { tabIndex: 0 }, result.response) : null,
          h("div.buttons", h("button", { type: "button", onclick: () => close() }, "Close"))));
      }, { style: "primary" }),
      w.state !== "active"
        ? action("Resume", () => post(path`/v1/webhooks/${name}/resume`).then(again), { key: "pause" })
        : action("Pause", () => post(path`/v1/webhooks/${name}/pause`).then(again), { key: "pause" }),
      action("Change", async () => {
        const done = await form(`Change ${name}`, [
          { name: "url", label: "URL", type: "url", value: w.url, required: true },
          ...settingFields(known, w),
        ], (given) => patch(path`/v1/webhooks/${name}`, { url: given.url, ...changedSettings(known, given, w) }));
        if (done) await again();
      }),
      action("Delete", async () => {
        const done = await confirm(`Delete webhook ${name}?`, {
          name,
          button: "Delete webhook",
          preview: () => remove(path`/v1/webhooks/${name}` + "?dry_run=true"),
          describe: (preview) => h("p", `No more events are sent to ${w.url}. `, h("strong", events(preview)), ` not sent yet and the dead letters stay in the queue ${w.queue}.`),
          act: () => remove(path`/v1/webhooks/${name}`),
        });
        if (done) {
          note(`Deleted webhook ${name}.`);
          location.hash = "#/webhooks";
        }
      }, { style: "risky" })),
    card("Delivery", facts([
      ["URL", h("span.code", w.url)],
      ["Queue", h("a", { href: `#/queues/${encodeURIComponent(w.queue)}` }, `${w.queue} (lag, dead letters)`)],
      ...settingFacts(known, w),
      w.state_reason ? ["Reason", h("span.bad", w.state_reason)] : null,
      ["Created", exact(w.created_at)],
    ])),
  );
}
