// How the console asks the server: JSON over HTTP, problems as errors, live events as a stream.

import { read } from "./json.js";

export class Problem extends Error {
  constructor(status, body) {
    super(body.detail || body.title || `the server answered ${status}`);
    this.status = status;
    this.hint = body.hint || "";
    this.body = body;
  }
}

let whenShutOut = () => {};
let whenReachable = () => {};

/** What to do when nobody is signed in, and when the server is gone or back. */
export function listen({ shutOut, reachable }) {
  whenShutOut = shutOut;
  whenReachable = reachable;
}

/** A body that is a text is JSON already, and sent as it is. */
async function ask(method, path, body, { quiet = false } = {}) {
  let answer;
  try {
    answer = await fetch(path, {
      method,
      // Shows the server that it is this page that asks, and no other site with our cookie.
      headers: { "x-headwater-console": "1", accept: "application/json", ...(body === undefined ? {} : { "content-type": "application/json" }) },
      body: body === undefined || typeof body === "string" ? body : JSON.stringify(body),
      signal: AbortSignal.timeout(30_000),
    });
  } catch (error) {
    whenReachable(false);
    throw new Problem(0, { detail: "The server cannot be reached." });
  }
  whenReachable(true);
  const text = await answer.text();
  let found = {};
  try {
    found = text ? read(text) : {};
  } catch {
    found = { detail: text.slice(0, 300) };
  }
  if (answer.ok) return found;
  if (answer.status === 401 && !quiet) whenShutOut();
  throw new Problem(answer.status, found);
}

export const get = (path, options) => ask("GET", path, undefined, options);
export const post = (path, body = {}, options) => ask("POST", path, body, options);
export const patch = (path, body) => ask("PATCH", path, body);
export const put = (path, body) => ask("PUT", path, body);
export const remove = (path) => ask("DELETE", path);

/** Whether somebody may do this. The server decides; this keeps what it would refuse from being offered. */
export const may = (me, action, kind, name) =>
  me.administrator || me.permissions.some((given) =>
    given.kind === kind && [action, "all"].includes(given.action) && (given.prefix ? name.startsWith(given.name) : [name, "*"].includes(given.name)));

/** A path with each part encoded: path`/v1/topics/${name}`. */
export const path = (texts, ...values) =>
  texts.reduce((whole, text, i) => whole + text + (i < values.length ? encodeURIComponent(values[i]) : ""), "");

/** A query string of what is given; empty values are left out. */
export function query(values) {
  const given = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) {
    if (value !== undefined && value !== null && value !== "") given.append(name, value);
  }
  const text = given.toString();
  return text ? `?${text}` : "";
}

/** Live events of an address, until the answer is called. The browser resumes by itself where it was. */
export function follow(address, onEvent, onState) {
  const source = new EventSource(address);
  source.onmessage = (message) => onEvent(read(message.data));
  source.onopen = () => onState("live");
  source.onerror = () => onState(source.readyState === EventSource.CLOSED ? "ended" : "connecting");
  return () => source.close();
}
