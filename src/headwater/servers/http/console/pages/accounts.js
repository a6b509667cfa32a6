// Accounts, their permissions and API keys.

import { get, patch, path, post, remove } from "../api.js";
import { action, badge, card, confirm, dialog, exact, form, h, head, note, redraw, show, table } from "../ui.js";

const ACTIONS = ["read", "write", "create", "delete", "alter", "describe", "all"];
const KINDS = ["topic", "consumer", "transaction", "log"];

export async function accounts(search, put = show) {
  const found = await get("/v1/accounts");
  const again = () => accounts(search, redraw);
  const of = (p) => p.name + (p.prefix ? "*" : "");
  put(
    head("Accounts", action("New account", async () => {
      const done = await form("New account", [
        { name: "name", label: "Name", required: true, autocomplete: "off" },
        { name: "password", label: "Password", type: "password", required: true, autocomplete: "new-password" },
        { name: "administrator", label: "Administrator (all permissions)", type: "checkbox" },
      ], (given) => post("/v1/accounts", given), { button: "Create" });
      if (done) await again();
    }, { style: "primary" })),
    card(null, table([
      { name: "Account", of: (a) => a.name },
      { name: "Permissions", of: (a) => {
        const given = found.permissions.filter((p) => p.account === a.name);
        if (a.administrator) return badge("administrator", "warn");
        return given.length ? h("div.buttons", given.map((p) => h("button.second.small", { type: "button", title: "Revoke", onclick: () => revoke(a.name, p, again) }, `${p.action} ${p.kind} ${of(p)} ✕`))) : h("span.dim", "none");
      } },
      { name: "", of: (a) => h("div.buttons",
        action("Grant", async () => {
          const done = await form(`Grant a permission to ${a.name}`, [
            { name: "action", label: "Action", options: ACTIONS, value: "read" },
            { name: "kind", label: "Kind", options: KINDS, value: "topic" },
            { name: "name", label: "Name", value: "*", required: true, help: "a* matches all names that start with a; * matches all names." },
          ], (given) => post(path`/v1/accounts/${a.name}/permissions`, permission(given)), { button: "Grant" });
          if (done) await again();
        }, { style: "second small" }),
        action("API keys", () => keys(a.name), { style: "second small" }),
        action("Password", async () => {
          const done = await form(`New password of ${a.name}`, [{ name: "password", label: "Password", type: "password", required: true, autocomplete: "new-password" }], (given) => patch(path`/v1/accounts/${a.name}`, given));
          if (done) note("Password changed. The sessions of the account have ended.");
        }, { style: "second small" }),
        action("Delete", async () => {
          const done = await confirm(`Delete account ${a.name}?`, {
            name: a.name,
            button: "Delete account",
            describe: () => h("p", "Its permissions, API keys and sessions are deleted too."),
            act: () => remove(path`/v1/accounts/${a.name}`),
          });
          if (done) await again();
        }, { style: "second small" })) },
    ], found.accounts, { label: "Accounts", key: (a) => a.name, empty: "No accounts. Without accounts, the server accepts connections only from this machine." })),
    wildcard(found.permissions.filter((p) => p.account === "*"), again),
  );
}

const permission = ({ action: act, kind, name }) => (name.endsWith("*") && name !== "*" ? { action: act, kind, name: name.slice(0, -1), prefix: true } : { action: act, kind, name, prefix: false });

function wildcard(given, again) {
  if (!given.length) return "";
  return card("Permissions of every account", h("div.buttons", given.map((p) => h("button.second.small", { type: "button", onclick: () => revoke("*", p, again) }, `${p.action} ${p.kind} ${p.name}${p.prefix ? "*" : ""} ✕`))));
}

async function revoke(account, p, again) {
  const done = await confirm("Revoke this permission?", {
    button: "Revoke",
    describe: () => h("p", `${account === "*" ? "Every account" : `Account ${account}`} loses the permission: ${p.action} ${p.kind} ${p.name}${p.prefix ? "*" : ""}.`),
    act: () => remove(path`/v1/accounts/${account}/permissions` + `?${new URLSearchParams({ action: p.action, kind: p.kind, name: p.name, prefix: p.prefix })}`),
  });
  if (done) await again();
}

async function keys(account) {
  const found = (await get(path`/v1/accounts/${account}/keys`)).keys;
  await dialog((close) => h("div",
    h("h2", `API keys of ${account}`),
    table([
      { name: "Key", of: (k) => h("span.code", k.hash.slice(0, 12)) },
      { name: "Label", of: (k) => k.label || "–" },
      { name: "Expires", of: (k) => (k.expires_at ? exact(k.expires_at) : "never") },
      { name: "", of: (k) => action("Revoke", async () => {
        const done = await confirm("Revoke this API key?", { button: "Revoke", describe: () => h("p", "Programs that use it lose access within seconds."), act: () => remove(path`/v1/accounts/${account}/keys/${k.hash.slice(0, 16)}`) });
        if (done) close();
      }, { style: "second small" }) },
    ], found, { label: "API keys", empty: "No API keys." }),
    h("div.buttons",
      action("New API key", async () => {
        const made = await form(`New API key for ${account}`, [{ name: "label", label: "Label" }], (given) => post(path`/v1/accounts/${account}/keys`, given), { button: "Create" });
        if (!made) return;
        await dialog((closeKey) => h("div", h("h2", "New API key"), h("p", "Copy it now: it is not shown again."), h("pre", made.key), h("div.buttons", h("button", { type: "button", onclick: () => closeKey() }, "I have saved it"))));
        close();
      }),
      h("button", { type: "button", onclick: () => close() }, "Close"))));
}
