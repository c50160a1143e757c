// The list of runs there have been, newest first; each is a link that opens it.

import { get } from "./api.js";
import { badge, find, make, say, set, showBadge } from "./dom.js";
import { dayTime, lookOfStatus, wordOfRun } from "./words.js";

const EVERY_MS = 8000;
const PAGE = 15;

export class EarlierRuns {
  // `onSeen(run)` is told of every run of the list, each time it is read.
  constructor(onSeen) {
    Object.assign(this, { onSeen, rows: new Map(), current: null, cursor: null, pages: 1 });
    [this.list, this.more, this.said] = ["runs", "more-runs", "runs-said"].map(find);
    this.more.addEventListener("click", () => {
      this.pages += 1;
      this.read();
    });
    document.addEventListener("visibilitychange", () => this.read());
    setInterval(() => this.read(), EVERY_MS);
    this.read();
  }

  markCurrent(id) {
    this.current = id;
    for (const [number, row] of this.rows) {
      set(row.link, "aria-current", number === id ? "true" : null);
    }
  }

  async read() {
    if (document.visibilityState === "hidden" || this.isReading) return;
    this.isReading = true;
    try {
      const runs = [];
      let cursor = null;
      for (let page = 0; page < this.pages; page += 1) {
        const next = cursor ? `&cursor=${encodeURIComponent(cursor)}` : "";
        const found = await get(`/runs?limit=${PAGE}${next}`);
        runs.push(...found.runs);
        cursor = found.next_cursor;
        if (!cursor) break;
      }
      this.show(runs, cursor);
    } catch (refused) {
      const why = refused.status === 401 ? "They show once there is a key." : refused.message;
      say(this.said, this.rows.size ? "" : why);
    } finally {
      this.isReading = false;
    }
  }

  show(runs, cursor) {
    say(this.said, runs.length ? "" : "None yet. The first one you submit will stand here.");
    set(this.more, "hidden", !cursor);
    const seen = new Set(runs.map((run) => run.run_id));
    for (const [id, row] of this.rows) {
      if (seen.has(id)) continue;
      row.element.remove();
      this.rows.delete(id);
    }
    runs.forEach((run, place) => {
      const row = this.rows.get(run.run_id) ?? this.add(run);
      if (this.list.children[place] !== row.element) {
        this.list.insertBefore(row.element, this.list.children[place] ?? null);
      }
      this.update(row, run);
      this.onSeen(run);
    });
    this.markCurrent(this.current);
  }

  add(run) {
    const row = {
      badge: badge(),
      steps: make("span", {}),
      link: make("a", { href: `?run=${run.run_id}` }, run.goal),
    };
    row.element = make(
      "li", { class: "earlier" },
      row.link,
      make("p", {}, row.badge, make("span", {}, `run ${run.run_id}`), row.steps, make("span", {}, dayTime(run.created_at))),
    );
    this.rows.set(run.run_id, row);
    return row;
  }

  update(row, run) {
    const numbers = run.steps_by_status;
    const all = Object.values(numbers).reduce((sum, number) => sum + number, 0);
    const look = run.status === "RUNNING" ? "executing" : lookOfStatus(run.status);
    showBadge(row.badge, look, wordOfRun(run));
    say(row.steps, `${numbers.SUCCEEDED ?? 0}/${all}`);
  }
}
