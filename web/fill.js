// What a person is asked about: the input of a step, with the results it refers to filled in, by the
// rules of the server. Each text is filled by itself: a result is data, and never becomes a field.

const TEMPLATE =
  /\{\{\s*(?:"(\{\{)"|((?:(?:llm_call|tool_call|agent_call|approval)\.)?[A-Za-z0-9_-]{1,64})\.output((?:\.[A-Za-z0-9_-]+)*))\s*\}\}/g;

// A copy of a JSON value; what a template leads to is missing or not known yet: it stays as it is.
export function filled(run, value) {
  if (typeof value === "string") return filledText(run, value);
  if (Array.isArray(value)) return value.map((item) => filled(run, item));
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, filled(run, item)]));
}

function filledText(run, text) {
  const found = [...text.matchAll(TEMPLATE)];
  if (found.length === 1 && found[0][0] === text && !found[0][1]) {
    const output = outputOf(run, found[0]);
    return output === undefined ? text : output;
  }
  return text.replace(TEMPLATE, (...match) => {
    if (match[1]) return match[1];
    const output = outputOf(run, match);
    if (output === undefined) return match[0];
    return typeof output === "string" ? output : JSON.stringify(output);
  });
}

function outputOf(run, [, , name, path]) {
  const step = run.byName.get(name);
  if (!step?.resultKnown) return undefined;
  const parts = path ? path.slice(1).split(".") : [];
  return parts.reduce(part, wholeOutput(step));
}

function wholeOutput({ kind, result }) {
  if (kind !== "prompt") return result;
  return "json" in (result ?? {}) ? result.json : result?.text;
}

function part(value, key) {
  if (Array.isArray(value)) return /^-?\d+$/.test(key) ? value.at(Number(key)) : undefined;
  const isObject = value !== null && typeof value === "object";
  return isObject && Object.hasOwn(value, key) ? value[key] : undefined;
}
