// Accounts of the doors that listen: what they may do, and their keys.

import { get, patch, path, post, remove } from "../api.js";
import { action, badge, card, confirm, dialog, exact, form, h, head, note, redraw, show, table } from "../ui.js";

const ACTIONS = ["read", "write", "create", "delete", "alter", "describe", "all"];
const KINDS = ["topic", "group", "transaction", "log"];

export async function accounts(search, put = show) {
  const found = await get("/v1/accounts");
  const again = () => accounts(search, redraw);
  const of = (p) => p.name + (p.prefix ? "*" : "");
  put(
    head("Accounts", action("New account", async () => {
      const done = await form("New account", [
        { name: "name", label: "Name", required: true, autocomplete: "off" },
        { name: "password", label: "Password", type: "password", required: true, autocomplete: "new-password" },
        { name: "administrator", label: "May do everything", type: "checkbox" },
      ], (given) => post("/v1/accounts", given), { button: "Create" });
      if (done) await again();
    }, { style: "primary" })),
    card(null, table([
      { name: "Account", of: (a) => a.name },
      { name: "May", of: (a) => {
        const given = found.permissions.filter((p) => p.account === a.name);
        if (a.administrator) return badge("everything", "warn");
        return given.length ? h("div.buttons", given.map((p) => h("button.second.small", { type: "button", title: "Take back", onclick: () => takeBack(a.name, p, again) }, `${p.action} ${p.kind} ${of(p)} ✕`))) : h("span.dim", "nothing");
      } },
      { name: "", of: (a) => h("div.buttons",
        action("Allow", async () => {
          const done = await form(`Allow ${a.name}`, [
            { name: "action", label: "To", options: ACTIONS, value: "read" },
            { name: "kind", label: "Of", options: KINDS, value: "topic" },
            { name: "name", label: "Name", value: "*", required: true, help: "a* is all that begin with a, * is all." },
          ], (given) => post(path`/v1/accounts/${a.name}/permissions`, permission(given)), { button: "Allow" });
          if (done) await again();
        }, { style: "second small" }),
        action("Keys", () => keys(a.name), { style: "second small" }),
        action("Password", async () => {
          const done = await form(`New password of ${a.name}`, [{ name: "password", label: "Password", type: "password", required: true, autocomplete: "new-password" }], (given) => patch(path`/v1/accounts/${a.name}`, given));
          if (done) note("The password is changed; sessions of the account have ended.");
        }, { style: "second small" }),
        action("Delete", async () => {
          const done = await confirm(`Delete account ${a.name}?`, {
            name: a.name,
            button: "Delete account",
            tell: () => h("p", "Its permissions, keys and sessions go with it."),
            act: () => remove(path`/v1/accounts/${a.name}`),
          });
          if (done) await again();
        }, { style: "second small" })) },
    ], found.accounts, { label: "Accounts", key: (a) => a.name, empty: "No account yet. Without accounts, only this machine may be served." })),
    everybody(found.permissions.filter((p) => p.account === "*"), again),
  );
}

const permission = ({ action: act, kind, name }) => (name.endsWith("*") && name !== "*" ? { action: act, kind, name: name.slice(0, -1), prefix: true } : { action: act, kind, name, prefix: false });

function everybody(given, again) {
  if (!given.length) return "";
  return card("Everybody may", h("div.buttons", given.map((p) => h("button.second.small", { type: "button", onclick: () => takeBack("*", p, again) }, `${p.action} ${p.kind} ${p.name}${p.prefix ? "*" : ""} ✕`))));
}

async function takeBack(account, p, again) {
  const done = await confirm("Take this right back?", {
    button: "Take back",
    tell: () => h("p", `${account === "*" ? "Everybody" : account} may then no longer ${p.action} ${p.kind} ${p.name}${p.prefix ? "*" : ""}.`),
    act: () => remove(path`/v1/accounts/${account}/permissions` + `?${new URLSearchParams({ action: p.action, kind: p.kind, name: p.name, prefix: p.prefix })}`),
  });
  if (done) await again();
}

async function keys(account) {
  const found = (await get(path`/v1/accounts/${account}/keys`)).keys;
  await dialog((close) => h("div",
    h("h2", `Keys of ${account}`),
    table([
      { name: "Key", of: (k) => h("span.code", k.hash.slice(0, 12)) },
      { name: "Label", of: (k) => k.label || "–" },
      { name: "Ends", of: (k) => (k.expires_at ? exact(k.expires_at) : "never") },
      { name: "", of: (k) => action("Revoke", async () => {
        const done = await confirm("Revoke this key?", { button: "Revoke", tell: () => h("p", "Programs that use it are shut out within seconds."), act: () => remove(path`/v1/accounts/${account}/keys/${k.hash.slice(0, 16)}`) });
        if (done) close();
      }, { style: "second small" }) },
    ], found, { label: "Keys", empty: "No key yet." }),
    h("div.buttons",
      action("New key", async () => {
        const made = await form(`New key for ${account}`, [{ name: "label", label: "Label" }], (given) => post(path`/v1/accounts/${account}/keys`, given), { button: "Create" });
        if (!made) return;
        await dialog((seen) => h("div", h("h2", "The key"), h("p", "It is shown only now."), h("pre", made.key), h("div.buttons", h("button", { type: "button", onclick: () => seen() }, "I have kept it"))));
        close();
      }),
      h("button", { type: "button", onclick: () => close() }, "Close"))));
}
