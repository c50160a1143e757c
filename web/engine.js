// The line at the top: is the API there, are there workers, how much waits.

import { get } from "./api.js";
import { find, say, set } from "./dom.js";

const EVERY_MS = 4000;

export function watchEngine() {
  const [box, word, figures] = ["engine", "engine-word", "engine-figures"].map(find);

  function show(state, said, numbers) {
    set(box, "data-state", state);
    say(word, said);
    say(figures, numbers);
  }

  async function look() {
    if (document.visibilityState === "hidden") return;
    try {
      const stats = await get("/stats");
      show(...judged(stats));
    } catch (refused) {
      if (refused.status === 401) show("alone", "needs a key", "");
      else show("away", "away", refused.message);
    }
  }

  setInterval(look, EVERY_MS);
  document.addEventListener("visibilitychange", look);
  addEventListener("online", look);
  addEventListener("offline", look);
  look();
}

// The state, its word and the figures beside it.
export function judged({ workers, depth, delayed, running, paused_routes: paused }) {
  const waiting = depth + delayed;
  const closed = Object.entries(paused).map(([route, why]) => `route ${route} paused: ${why}`);
  const isTold = workers !== null; // a tenant is not
  const figures = [
    ...(isTold ? [workers.length === 1 ? "1 worker" : `${workers.length} workers`] : []),
    `${running} executing`,
    `${waiting} queued`,
    ...(workers?.length === 0 ? [] : closed),
  ].join(" · ");
  if (isTold && !workers.length) return ["alone", "no worker", `${figures} – start one: python scheduler.py`];
  return running || depth ? ["live", "live", figures] : ["idle", "idle", figures];
}
