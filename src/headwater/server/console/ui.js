// The few parts that every page is made of. Everything is made of nodes and texts, never of markup in strings.

import { Problem } from "./api.js";

/** An element: h("td.number", { title: "…" }, "text", node, …). */
export function h(what, ...rest) {
  const [tag, ...classes] = what.split(".");
  const node = document.createElement(tag || "div");
  if (classes.length) node.className = classes.join(" ");
  const given = rest[0] && typeof rest[0] === "object" && !(rest[0] instanceof Node) && !Array.isArray(rest[0]) ? rest.shift() : {};
  for (const [name, value] of Object.entries(given)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node && name !== "list" && name !== "form") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...rest.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export const show = (...nodes) => document.querySelector("#main").replaceChildren(...nodes);

export function head(title, ...actions) {
  document.title = `${title} · Headwater`;
  return h("div.head", h("h1", title), h("span.space"), ...actions);
}

// Figures and times

const numbers = new Intl.NumberFormat("en");
export const number = (value) => (value === null || value === undefined ? "–" : numbers.format(Math.round(value * 10) / 10));

/** "1 event", "2 events". */
export const count = (value, word) => `${number(value)} ${word}${value === 1 ? "" : "s"}`;

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; value >= 1024 && unit < units.length - 1; unit++) value /= 1024;
  return `${value.toFixed(unit && value < 100 ? 1 : 0)} ${units[unit]}`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.001) return "0 s";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 120) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

export function when(text) {
  if (!text) return h("span.dim", "–");
  const time = new Date(text);
  const away = (Date.now() - time) / 1000;
  const shown = away >= 0 ? `${duration(away)} ago` : `in ${duration(-away)}`;
  return h("time", { dateTime: text, title: time.toLocaleString() }, shown);
}

export const exact = (text) => (text ? new Date(text).toLocaleString(undefined, { hour12: false, fractionalSecondDigits: 3, year: "numeric", month: "2-digit", day: "2-digit", hour: "2-digit", minute: "2-digit", second: "2-digit" }) : "–");

export const badge = (text, tone = "dim") => h(`span.badge.${tone}`, text);

/** A line of the last values. */
export function spark(values, name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("class", "spark");
  svg.setAttribute("viewBox", "0 0 100 20");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${name}: ${values.length ? number(values.at(-1)) : "nothing yet"}`);
  const top = Math.max(...values, 1e-9);
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  const points = values.map((value, i) => `${((i / Math.max(values.length - 1, 1)) * 100).toFixed(1)},${(19 - (value / top) * 18).toFixed(1)}`);
  path.setAttribute("d", points.length > 1 ? `M${points.join("L")}` : "M0,19L100,19");
  svg.append(path);
  return svg;
}

// Tables. A column: { name, of: row => node or text, kind: "number" | "tight" | "wide" … as classes }

export function table(columns, rows, { empty = "Nothing here yet.", label } = {}) {
  if (!rows.length) return h("p.empty", empty);
  const cell = (tag, column, content) => h([tag, ...(column.kind ? column.kind.split(" ") : [])].join("."), tag === "th" ? { scope: "col" } : {}, content);
  return h("div.scroll",
    h("table", { "aria-label": label },
      h("thead", h("tr", columns.map((column) => cell("th", column, column.name)))),
      h("tbody", rows.map((row) => h("tr", columns.map((column) => cell("td", column, column.of(row) ?? "–")))))));
}

export const facts = (pairs) => h("dl", pairs.filter(Boolean).map(([name, value]) => [h("dt", name), h("dd", value ?? "–")]));

export const card = (title, ...content) => h("section.card", title ? h("h2", title) : null, ...content);

// Notes and dialogs

export function note(text, { wrong = false } = {}) {
  const node = h(wrong ? "div.wrong" : "div", text);
  document.querySelector("#notes").append(node);
  setTimeout(() => node.remove(), wrong ? 10_000 : 4_000);
}

export function complain(error) {
  if (!(error instanceof Problem)) console.error(error);
  if (error.status !== 401) note(error.hint ? `${error.message} ${error.hint}` : error.message, { wrong: true });
}

/** A button that does something slow once at a time, and says what went wrong. */
export function action(text, act, { style = "second", ...given } = {}) {
  const button = h(["button", ...style.split(" ")].join("."), { type: "button", ...given }, text);
  button.addEventListener("click", async () => {
    button.disabled = true;
    try {
      await act();
    } catch (error) {
      complain(error);
    } finally {
      button.disabled = false;
    }
  });
  return button;
}

/** Shows a dialog; the answer is what `close` was called with, or undefined. */
export function dialog(make) {
  return new Promise((done) => {
    const node = h("dialog");
    let answer;
    const close = (value) => {
      answer = value;
      node.close();
    };
    node.append(make(close));
    node.addEventListener("close", () => {
      node.remove();
      done(answer);
    });
    document.body.append(node);
    node.showModal();
  });
}

const said = (error) => h("p.bad", { role: "alert" }, error.hint ? `${error.message} ${error.hint}` : error.message);

/** A dialog with a form. Fields: { name, label, type, value, required, options, help, rows }. `send` may refuse by throwing. */
export function form(title, fields, send, { button = "Save" } = {}) {
  return dialog((close) => {
    const wrong = h("div");
    const inputs = Object.fromEntries(fields.map((field) => [field.name, input(field)]));
    const save = h("button", { type: "submit" }, button);
    const node = h("form", { method: "dialog" },
      h("h2", title),
      fields.map((field) => field.type === "checkbox"
        ? h("label.check", inputs[field.name], field.label)
        : h("label", field.label, inputs[field.name], field.help ? h("span.dim", field.help) : null)),
      wrong,
      h("div.buttons", h("button.second", { type: "button", onclick: () => close() }, "Cancel"), save));
    node.addEventListener("submit", async (event) => {
      event.preventDefault();
      save.disabled = true;
      try {
        const values = Object.fromEntries(fields.map((field) => [field.name, field.type === "checkbox" ? inputs[field.name].checked : inputs[field.name].value]));
        close((await send(values)) ?? true);
      } catch (error) {
        wrong.replaceChildren(said(error));
      } finally {
        save.disabled = false;
      }
    });
    return node;
  });
}

export function input({ name, type = "text", value = "", required, options, rows, placeholder, ...more }) {
  const given = { name, required, placeholder, ...more };
  delete given.label;
  delete given.help;
  if (options) {
    return h("select", given, options.map((option) => {
      const [key, text] = Array.isArray(option) ? option : [option, option];
      return h("option", { value: key, selected: key === value }, text);
    }));
  }
  if (rows) return h("textarea", { ...given, rows, value });
  return type === "checkbox" ? h("input", { ...given, type, checked: Boolean(value) }) : h("input", { ...given, type, value });
}

/**
 * Ask before something that cannot be taken back. `look` is the dry run: what would be done, told before it is done.
 * `name` has to be typed where much is at stake.
 */
export function confirm(title, { look, tell, act, button, name }) {
  return dialog((close) => {
    const wrong = h("div");
    const told = h("div", { "aria-live": "polite" }, h("p.dim", "Looking what this would do…"));
    const typed = name ? h("input", { autocomplete: "off", "aria-label": `Type ${name} to go on` }) : null;
    const go = h("button.risky", { type: "submit", disabled: true }, button);
    let looked = false;
    const allow = () => {
      go.disabled = !looked || (typed && typed.value !== name);
    };
    typed?.addEventListener("input", allow);
    const node = h("form", { method: "dialog" },
      h("h2", title),
      told,
      typed ? h("label", h("span", "Type ", h("code", name), " to go on"), typed) : null,
      wrong,
      h("div.buttons", h("button.second", { type: "button", onclick: () => close() }, "Cancel"), go));
    node.addEventListener("submit", async (event) => {
      event.preventDefault();
      if (go.disabled) return;
      go.disabled = true;
      try {
        close((await act()) ?? true);
      } catch (error) {
        wrong.replaceChildren(said(error));
        allow();
      }
    });
    Promise.resolve(look ? look() : {}).then(
      (found) => {
        looked = true;
        told.replaceChildren(...[tell(found)].flat());
        allow();
      },
      (error) => told.replaceChildren(said(error)),
    );
    return node;
  });
}

/** Runs `act` now and every few seconds while the page is seen, until the answer is called. */
export function every(seconds, act) {
  let stopped = false;
  let timer;
  const round = async () => {
    if (!document.hidden) {
      try {
        await act();
      } catch (error) {
        if (error.status !== 0) complain(error);
      }
    }
    if (!stopped) timer = setTimeout(round, seconds * 1000);
  };
  round();
  return () => {
    stopped = true;
    clearTimeout(timer);
  };
}
