// The server's time as far as the page can tell: durations are counted from times of the database,
// and this machine's clock may be minutes off.

let ahead = null; // milliseconds that the server's clock is at least ahead of ours

// The server's clock stood at `at`, or later, when this was heard.
export function heardOfTime(at) {
  const difference = Date.parse(at) - Date.now();
  if (!Number.isNaN(difference)) ahead = Math.max(ahead ?? -Infinity, difference);
}

export function serverNow() {
  return Date.now() + (ahead ?? 0);
}
