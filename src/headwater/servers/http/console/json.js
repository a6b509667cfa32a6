// JSON as it was published. JSON.parse rounds large numbers, drops trailing zeros and reorders keys.

// Fields of responses that contain users' JSON: kept as text.
const USER_JSON = new Set(["data", "headers", "metadata", "params", "definition"]);

/** The end of the string that begins at this quotation mark. */
function afterText(json, at) {
  for (let quote = json.indexOf('"', at + 1); quote >= 0; quote = json.indexOf('"', quote + 1)) {
    let slashes = 0;
    while (json[quote - 1 - slashes] === "\\") slashes++;
    if (slashes % 2 === 0) return quote + 1;
  }
  return json.length;
}

/** The end of the value that begins here. */
function afterValue(json, at) {
  let depth = 0;
  for (let i = at; i < json.length; i++) {
    const sign = json[i];
    if (sign === '"') i = afterText(json, i) - 1;
    else if (sign === "{" || sign === "[") depth++;
    else if (depth === 0 && (sign === "," || sign === "}" || sign === "]")) return i;
    else if (sign === "}" || sign === "]") depth--;
  }
  return json.length;
}

/** Parse a response of the server. Users' JSON in it stays text, except null. */
export function read(json) {
  const parts = [];
  let taken = 0;
  for (let i = json.indexOf('"'); i >= 0; i = json.indexOf('"', i)) {
    const end = afterText(json, i);
    const name = json.slice(i + 1, end - 1);
    i = end;
    if (!USER_JSON.has(name)) continue;
    const [colon] = /^\s*:\s*/.exec(json.slice(end, end + 20)) ?? [];
    if (colon === undefined) continue;
    const begin = end + colon.length;
    i = afterValue(json, begin);
    const source = json.slice(begin, i).trim();
    if (source === "null") continue;
    parts.push(json.slice(taken, begin), JSON.stringify(source));
    taken = i;
  }
  return JSON.parse(parts.join("") + json.slice(taken));
}

export function isJson(json) {
  try {
    JSON.parse(json);
    return true;
  } catch {
    return false;
  }
}

export const isObject = (json) => isJson(json) && json.trimStart().startsWith("{");

/** Whether it is missing or an empty object. */
export const isEmpty = (json) => !json || /^\{\s*\}$/.test(json);

/** The same JSON with line breaks and indentation; no token is changed. */
export function pretty(json) {
  const parts = [];
  let line = "\n";
  for (let i = 0; i < json.length; i++) {
    const sign = json[i];
    if (sign === '"') {
      const end = afterText(json, i);
      parts.push(json.slice(i, end));
      i = end - 1;
    } else if (sign === "{" || sign === "[") {
      const [nothing] = /^[{[]\s*[}\]]/.exec(json.slice(i, i + 100)) ?? [];
      if (nothing) {
        parts.push(sign, nothing.at(-1));
        i += nothing.length - 1;
      } else {
        line += "  ";
        parts.push(sign, line);
      }
    } else if (sign === "}" || sign === "]") {
      line = line.slice(0, -2) || "\n";
      parts.push(line, sign);
    } else if (sign === ",") parts.push(",", line);
    else if (sign === ":") parts.push(": ");
    else if (!" \t\n\r".includes(sign)) parts.push(sign);
  }
  return parts.join("");
}
