// Calls of the API. A refusal or an absence becomes an Error with words for people.

import { heardOfTime } from "./clock.js";
import { storedKey, tellRefused } from "./key.js";

const LONGEST_WAIT_MS = 20_000;

export class Refused extends Error {
  constructor(status, message, detail) {
    super(message);
    this.status = status; // 0: no answer came
    this.detail = Array.isArray(detail) ? detail : [];
  }

  get isAway() {
    return this.status === 0 || this.status >= 500;
  }
}

// `body` is JSON already. `apiKey`: one to be tried, instead of the tab's own.
export async function call(method, path, { body, key, apiKey } = {}) {
  const headers = {};
  const shown = apiKey ?? storedKey();
  if (shown) headers["X-API-Key"] = shown;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  if (key) headers["Idempotency-Key"] = key;
  let answer;
  let text;
  try {
    answer = await fetch(path, {
      method, headers, body, cache: "no-store", signal: AbortSignal.timeout(LONGEST_WAIT_MS),
    });
    text = await answer.text();
  } catch {
    throw new Refused(0, "The API does not answer.");
  }
  const date = answer.headers.get("Date");
  if (date) heardOfTime(date);
  const said = parsed(text);
  if (!answer.ok) {
    if (answer.status === 401 && !apiKey) tellRefused(said?.error);
    throw new Refused(answer.status, said?.error ?? `The API answered ${answer.status}.`, said?.detail);
  }
  return said;
}

export function get(path) {
  return call("GET", path);
}

// The path of live events, with a ticket where the tab has a key: streams can send no header.
export async function admitted(path) {
  if (!storedKey()) return path;
  try {
    const { ticket } = await call("POST", "/tickets", { body: JSON.stringify({ path }) });
    return `${path}?ticket=${ticket}`;
  } catch (refused) {
    if (refused.status === 409) return path; // no key is needed here
    throw refused;
  }
}

// All pages of a list, one after the other; `each` gets the answers as they come, and may stop
// the reading by returning false.
export async function getPages(path, each) {
  let cursor = null;
  do {
    const next = cursor ? `&cursor=${encodeURIComponent(cursor)}` : "";
    const page = await get(`${path}?limit=200${next}`);
    if (each(page) === false) return;
    cursor = page.next_cursor;
  } while (cursor);
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

// A key that no other submission has; randomUUID exists only where the page came by https.
export function newKey() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return `page-${Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}
