// The audit trail: every transition of the run in order, the newest last.

import { badge, make, say, set, showBadge, time } from "./dom.js";
import { clockTime, detailWords, transitionWords } from "./words.js";

const SHOWN_AT_FIRST = 200; // the newest; the others behind a button

export class Trail {
  constructor({ body, more, count }) {
    Object.assign(this, { body, more, count, run: null, rows: new Map(), isWhole: false });
    more.addEventListener("click", () => {
      this.isWhole = true;
      this.update();
    });
  }

  show(run) {
    this.run = run;
    this.rows.clear();
    this.isWhole = false;
    this.body.replaceChildren();
    this.update();
  }

  // Puts each entry that has no row yet where it belongs, and drops rows that are not shown.
  update() {
    const { log } = this.run;
    const shown = this.isWhole ? log : log.slice(-SHOWN_AT_FIRST);
    const hidden = log.length - shown.length;
    let next = this.body.firstElementChild;
    for (const entry of shown) {
      while (next && Number(next.dataset.id) < entry.id) next = this.drop(next);
      if (this.rows.has(entry.id)) {
        next = next.nextElementSibling;
        continue;
      }
      const row = this.row(entry);
      this.rows.set(entry.id, row);
      this.body.insertBefore(row, next);
    }
    set(this.more, "hidden", !hidden);
    say(this.more, `Show ${hidden.toLocaleString("en")} earlier`);
    say(this.count, log.length ? String(log.length) : "");
  }

  drop(row) {
    const next = row.nextElementSibling;
    this.rows.delete(Number(row.dataset.id));
    row.remove();
    return next;
  }

  // The roles say what a phone's layout would otherwise take from a table.
  row(entry) {
    const isRun = entry.task_id === this.run.id;
    const { from, to, look } = transitionWords(entry, isRun);
    const arrived = badge();
    showBadge(arrived, look, to);
    const cell = (name, ...content) => make("td", { role: "cell", class: name }, ...content);
    return make(
      "tr",
      { role: "row", "data-id": entry.id, "data-look": look },
      cell("trail-time", time(entry.at, clockTime(entry.at))),
      cell("trail-step", isRun ? "the run" : entry.step),
      cell("trail-change", from ? `${from} → ` : "", arrived),
      cell("trail-reason", entry.reason),
      cell("trail-try", entry.attempt ? `try ${entry.attempt}` : ""),
      cell("trail-worker", entry.worker ?? ""),
      cell("trail-detail", detailWords(entry.detail)),
    );
  }
}
