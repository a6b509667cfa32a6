// Components shared by all pages. Everything is built from nodes and text, never from markup in strings.

import { Problem } from "./api.js";

/** An element: h("td.number", { title: "…" }, "text", node, …). `key` identifies it among its siblings: see `update`. */
export function h(what, ...rest) {
  const [tag, ...classes] = what.split(".");
  const node = document.createElement(tag || "div");
  if (classes.length) node.className = classes.join(" ");
  const given = rest[0] && typeof rest[0] === "object" && !(rest[0] instanceof Node) && !Array.isArray(rest[0]) ? rest.shift() : {};
  for (const [name, value] of Object.entries(given)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "key" || name.startsWith("on")) node[name] = value;
    else if (name in node && name !== "list" && name !== "form") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...rest.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

const main = () => document.querySelector("#main");

export const show = (...nodes) => main().replaceChildren(...nodes);

/** Redraw the current page in place. */
export const redraw = (...nodes) => update(main(), ...nodes);

const HANDLERS = ["onclick", "onchange", "oninput", "onsubmit"];

/**
 * Replace the children of a node, reusing existing nodes so that focus, selection and scroll position are preserved.
 * A child with a key reuses the node with that key; other children reuse the next node of the same kind.
 */
export function update(node, ...children) {
  const focused = document.activeElement;
  fill(node, h("div", children));
  // A node that is moved loses the focus.
  if (focused !== document.activeElement && node.contains(focused)) focused.focus({ preventScroll: true });
}

function fill(node, made) {
  const name = (child) => `${child.nodeName} ${child.key ?? ""}`;
  const waiting = Map.groupBy([...node.childNodes], name);
  const pairs = [...made.childNodes].map((child) => [waiting.get(name(child))?.shift(), child]);
  for (const child of [...waiting.values()].flat()) child.remove();
  let next = node.firstChild;
  for (const [known, child] of pairs) {
    if (known === next && next) next = next.nextSibling;
    else node.insertBefore(known ?? child, next);
    if (known) become(known, child);
  }
}

function become(known, made) {
  if (known.nodeType === Node.TEXT_NODE) {
    if (known.data !== made.data) known.data = made.data;
    return;
  }
  for (const { name } of [...known.attributes]) {
    // A button whose action is running stays disabled and busy until it is done.
    const busy = known.ariaBusy && ["disabled", "aria-busy"].includes(name);
    if (!made.hasAttribute(name) && !busy) known.removeAttribute(name);
  }
  for (const { name, value } of made.attributes) if (known.getAttribute(name) !== value) known.setAttribute(name, value);
  for (const name of HANDLERS) known[name] = made[name];
  fill(known, made);
}

export function head(title, ...actions) {
  document.title = `${title} · Headwater`;
  return h("div.head", h("h1", title), h("span.space"), ...actions);
}

// Numbers and times

const numbers = new Intl.NumberFormat("en");
export const number = (value) => (value === null || value === undefined ? "–" : numbers.format(Math.round(value * 10) / 10));

/** A count that may be a lower bound: "12", "1,000+". */
export const atLeast = (value, more) => number(value) + (more ? "+" : "");

/** "1 event", "2 events", "10,000 events or more". */
export const count = (value, word, more = false) => `${number(value)} ${word}${value === 1 ? "" : "s"}${more ? " or more" : ""}`;

/** " (positions 3 to 9)", or nothing. */
export const range = (first, last) => (first ? ` (${first === last ? `position ${number(first)}` : `positions ${number(first)} to ${number(last)}`})` : "");

/** The events in a dry-run result: their number and positions. */
export const events = (preview) => count(preview.events, "event", preview.events_is_more) + range(preview.first, preview.last);

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

/** A sparkline of the latest values. */
export function spark(values, name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("class", "spark");
  svg.setAttribute("viewBox", "0 0 100 20");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${name}: ${values.length ? number(values.at(-1)) : "no data yet"}`);
  const top = Math.max(...values, 1e-9);
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  const points = values.map((value, i) => `${((i / Math.max(values.length - 1, 1)) * 100).toFixed(1)},${(19 - (value / top) * 18).toFixed(1)}`);
  path.setAttribute("d", points.length > 1 ? `M${points.join("L")}` : "M0,19L100,19");
  svg.append(path);
  return svg;
}

// Tables. A column: { name, of: row => node or text, kind: "number" | "tight" | "wide" … as classes }
// The key identifies a row when the table is updated.

export function table(columns, rows, { empty = "No entries.", label, key = () => undefined } = {}) {
  if (!rows.length) return h("p.empty", empty);
  const cell = (tag, column, content) => h([tag, ...(column.kind ? column.kind.split(" ") : [])].join("."), tag === "th" ? { scope: "col" } : {}, content);
  return h("div.scroll",
    h("table", { "aria-label": label },
      h("thead", h("tr", columns.map((column) => cell("th", column, column.name)))),
      h("tbody", rows.map((row) => h("tr", { key: key(row) }, columns.map((column) => cell("td", column, column.of(row) ?? "–")))))));
}

export const facts = (pairs) => h("dl", pairs.filter(Boolean).map(([name, value]) => [h("dt", name), h("dd", value ?? "–")]));

export const card = (title, ...content) => h("section.card", { key: title }, title ? h("h2", title) : null, ...content);

// Notes and dialogs

export function note(text, { isError = false } = {}) {
  const notes = document.querySelector("#notes");
  // A note that is still visible is not shown twice.
  [...notes.children].find((other) => other.textContent === text)?.remove();
  const node = h(isError ? "div.wrong" : "div", text);
  notes.append(node);
  setTimeout(() => node.remove(), isError ? 10_000 : 4_000);
}

const words = ({ message, hint }) => (hint ? `${message}${/[.!?]$/.test(message) ? "" : "."} ${hint}` : message);

/** An error message with its hint. */
export const errorText = (error) => h("p.bad", { role: "alert" }, words(error));

export function noteError(error) {
  if (!(error instanceof Problem)) console.error(error);
  if (error.status !== 401) note(words(error), { isError: true });
}

/** A button for an asynchronous action: disabled while it runs, and it shows an error note if it fails. */
export function action(text, act, { style = "second", ...given } = {}) {
  return h(["button", ...style.split(" ")].join("."), {
    type: "button",
    key: text,
    ...given,
    onclick: async ({ currentTarget: button }) => {
      const focused = document.activeElement === button;
      button.disabled = true;
      button.ariaBusy = "true";
      try {
        await act();
      } catch (error) {
        noteError(error);
      } finally {
        button.disabled = false;
        button.ariaBusy = null;
        if (focused && document.activeElement === document.body) button.focus();
      }
    },
  }, text);
}

/** Show a dialog; resolves to the value that `close` was called with, or undefined. */
export function dialog(make) {
  return new Promise((done) => {
    const node = h("dialog");
    let result;
    const close = (value) => {
      result = value;
      node.close();
    };
    node.append(make(close));
    node.addEventListener("close", () => {
      node.remove();
      done(result);
    });
    document.body.append(node);
    node.showModal();
  });
}

/** A dialog with a form. Fields: { name, label, type, value, required, options, help, rows }. If `send` throws, the error is shown in the form. */
export function form(title, fields, send, { button = "Save" } = {}) {
  return dialog((close) => {
    const problem = h("div");
    const inputs = Object.fromEntries(fields.map((field) => [field.name, input(field)]));
    const save = h("button", { type: "submit" }, button);
    const node = h("form", { method: "dialog" },
      h("h2", title),
      fields.map((field) => h("div.field",
        field.type === "checkbox"
          ? h("label.check", inputs[field.name], field.label)
          : h("label", field.label, inputs[field.name]),
        field.help ? h("span.dim", { id: `help-${field.name}` }, field.help) : null)),
      problem,
      h("div.buttons", h("button.second", { type: "button", onclick: () => close() }, "Cancel"), save));
    node.addEventListener("submit", async (event) => {
      event.preventDefault();
      save.disabled = true;
      try {
        const values = Object.fromEntries(fields.map((field) => [field.name, field.type === "checkbox" ? inputs[field.name].checked : inputs[field.name].value]));
        close((await send(values)) ?? true);
      } catch (error) {
        problem.replaceChildren(errorText(error));
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
  if (given.help) given["aria-describedby"] = `help-${name}`;
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
 * Ask for confirmation of an action that cannot be undone. `preview` is the dry run, `describe` shows its result before
 * the action. If `name` is given, the user must type it.
 */
export function confirm(title, { preview, describe, act, button, name }) {
  return dialog((close) => {
    const problem = h("div");
    const description = h("div", { "aria-live": "polite" }, h("p.dim", "Checking the effects…"));
    const typed = name ? h("input", { autocomplete: "off", "aria-label": `Type ${name} to confirm` }) : null;
    const go = h("button.risky", { type: "submit", disabled: true }, button);
    let previewed = false;
    const allow = () => {
      go.disabled = !previewed || (typed && typed.value !== name);
    };
    typed?.addEventListener("input", allow);
    const node = h("form", { method: "dialog" },
      h("h2", title),
      description,
      typed ? h("label", h("span", "Type ", h("code", name), " to confirm"), typed) : null,
      problem,
      h("div.buttons", h("button.second", { type: "button", onclick: () => close() }, "Cancel"), go));
    node.addEventListener("submit", async (event) => {
      event.preventDefault();
      if (go.disabled) return;
      go.disabled = true;
      try {
        close((await act()) ?? true);
      } catch (error) {
        problem.replaceChildren(errorText(error));
        allow();
      }
    });
    Promise.resolve(preview ? preview() : {}).then(
      (found) => {
        previewed = true;
        update(description, describe(found));
        allow();
      },
      (error) => description.replaceChildren(errorText(error)),
    );
    return node;
  });
}

// Client errors are permanent, except 408 and 429.
const isPermanent = ({ status }) => status >= 400 && status < 500 && status !== 408 && status !== 429;

/**
 * Run `act` now and every few seconds while the page is visible, until `stop`; `now` runs it at once. A permanent error
 * is shown in `target` and ends the repetition.
 */
export function every(seconds, act, target) {
  let stopped = false;
  let timer;
  const now = async () => {
    if (!document.hidden) {
      try {
        await act();
      } catch (error) {
        if (stopped) return;
        stopped = isPermanent(error);
        if (stopped) update(target, errorText(error));
        else if (error.status !== 0) noteError(error);
      }
    }
    clearTimeout(timer);
    if (!stopped) timer = setTimeout(now, seconds * 1000);
  };
  now();
  return {
    now,
    stop: () => {
      stopped = true;
      clearTimeout(timer);
    },
  };
}
