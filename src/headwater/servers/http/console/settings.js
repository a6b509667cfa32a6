// Settings of topics, queues and webhooks: their forms and how they are shown. Titles, limits, defaults and help come from
// the OpenAPI document, where a property that is a setting has x-headwater-setting.

import { duration, number } from "./ui.js";

let schemas;

/** The settings in a schema of the API, such as QueueCreate. */
export async function settings(name) {
  // Not with api.js, which keeps properties such as "headers" as text.
  schemas ??= fetch("/openapi.json").then((response) => response.json()).then((found) => found.components.schemas);
  let properties;
  try {
    ({ properties } = (await schemas)[name]);
  } catch (error) {
    schemas = undefined;
    throw error;
  }
  return Object.entries(properties)
    .filter(([, schema]) => schema["x-headwater-setting"])
    .map(([key, schema]) => ({ name: key, ...schema, ...(schema.anyOf?.[0] ?? {}), ...schema["x-headwater-setting"], removable: Boolean(schema.anyOf) }));
}

/** Fields for the settings: with the values of `current`, or empty with the defaults as placeholders. */
export const settingFields = (found, current = {}) => found.map((setting) => {
  const { name, title: label, type } = setting;
  const help = setting.description.replace(" null: ", " Empty: ");
  const value = current[name] ?? setting.default;
  if (type === "boolean") return { name, label, help, type: "checkbox", value };
  if (setting.enum) return { name, label, help, options: setting.enum, value };
  if (type === "object") return { name, label, help: `${help} A JSON object.`, rows: 2, value: current[name] ?? "" };
  return {
    name, label, help, type: "number",
    // 0 removes a limit, as an empty field does.
    min: setting.removable ? undefined : setting.minimum,
    max: setting.maximum,
    step: type === "integer" ? 1 : "any",
    value: current[name] ?? "",
    placeholder: setting.default ?? setting.none ?? "",
  };
});

/** The settings that were given in a form and differ from those of `current`, as JSON. null removes a limit. */
export function changedSettings(found, given, current) {
  const changes = {};
  for (const setting of found) {
    const before = current ? current[setting.name] ?? null : setting.default ?? null;
    const value = valueOf(setting, given[setting.name]);
    if (setting.type === "object" ? given[setting.name] !== (before ?? "") && value !== null : value !== before) {
      // A field of something new that is left empty is its default.
      if (current || value !== null) changes[setting.name] = value;
    }
  }
  return changes;
}

function valueOf({ type }, given) {
  if (type === "boolean") return given;
  if (given === "") return null;
  if (type === "object") return JSON.parse(given);
  return type === "string" ? given : Number(given);
}

/** The settings of something as pairs for `facts`. */
export const settingFacts = (found, current) => found.map((setting) => {
  const value = current[setting.name];
  const title = setting.title.replace(/ in (seconds|bytes)$/, "");
  if (value === null || value === undefined) return [title, setting.none || "–"];
  if (setting.type === "boolean") return [title, value ? "yes" : "no"];
  if (setting.unit === "seconds") return [title, duration(value)];
  if (setting.type === "object" || setting.type === "string") return [title, String(value)];
  return [title, setting.unit ? `${number(value)} ${setting.unit}` : number(value)];
});
