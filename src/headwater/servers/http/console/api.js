// Requests to the server: JSON over HTTP, problems as errors, SSE streams.

import { read } from "./json.js";

export class Problem extends Error {
  constructor(status, body) {
    super(body.detail || body.title || `the server responded with status ${status}`);
    this.status = status;
    this.hint = body.hint || "";
    this.body = body;
  }
}

let onSignedOut = () => {};
let onReachable = () => {};

/** Set the callbacks for a request without a valid session, and for a server that becomes unreachable or reachable. */
export function listen({ signedOut, reachable }) {
  onSignedOut = signedOut;
  onReachable = reachable;
}

/** Send a request. A string body is JSON text and is sent unchanged. */
async function send(method, path, body, { quiet = false } = {}) {
  let response;
  try {
    response = await fetch(path, {
      method,
      // Protects against CSRF: other sites cannot send this header.
      headers: { "x-headwater-console": "1", accept: "application/json", ...(body === undefined ? {} : { "content-type": "application/json" }) },
      body: body === undefined || typeof body === "string" ? body : JSON.stringify(body),
      signal: AbortSignal.timeout(30_000),
    });
  } catch (error) {
    onReachable(false);
    throw new Problem(0, { detail: "The server cannot be reached." });
  }
  onReachable(true);
  const text = await response.text();
  let found = {};
  try {
    found = text ? read(text) : {};
  } catch {
    found = { detail: text.slice(0, 300) };
  }
  if (response.ok) return found;
  if (response.status === 401 && !quiet) onSignedOut();
  throw new Problem(response.status, found);
}

export const get = (path, options) => send("GET", path, undefined, options);
export const post = (path, body = {}, options) => send("POST", path, body, options);
export const patch = (path, body) => send("PATCH", path, body);
export const put = (path, body) => send("PUT", path, body);
export const remove = (path) => send("DELETE", path);

/** Whether the account has a permission. Only for hiding what is not allowed; the server enforces permissions. */
export const may = (me, action, kind, name) =>
  me.administrator || me.permissions.some((given) =>
    given.kind === kind && [action, "all"].includes(given.action) && (given.prefix ? name.startsWith(given.name) : [name, "*"].includes(given.name)));

/** A path with each part encoded: path`/v1/topics/${name}`. */
export const path = (texts, ...values) =>
  texts.reduce((whole, text, i) => whole + text + (i < values.length ? encodeURIComponent(values[i]) : ""), "");

/** A query string of the values; empty values are left out. */
export function query(values) {
  const given = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) {
    if (value !== undefined && value !== null && value !== "") given.append(name, value);
  }
  const text = given.toString();
  return text ? `?${text}` : "";
}

/** Follow an SSE stream until the returned function is called. The browser reconnects and resumes automatically. */
export function follow(address, onEvent, onState) {
  const source = new EventSource(address);
  source.onmessage = (message) => onEvent(read(message.data));
  source.onopen = () => onState("live");
  source.onerror = () => onState(source.readyState === EventSource.CLOSED ? "ended" : "connecting");
  return () => source.close();
}
