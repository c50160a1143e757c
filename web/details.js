// What is behind a step's button: what it waited for, what went in, what came out, what happened.

import { make, say, set, time } from "./dom.js";
import { Folded } from "./folded.js";
import { storedKey } from "./key.js";
import { dependentsOf } from "./model.js";
import { asJson, clockTime, detailWords, listed, resultText, transitionWords } from "./words.js";

export class StepDetails {
  constructor(panel, run, step) {
    Object.assign(this, { run, step });
    this.live = new Folded();
    this.result = new Folded();
    this.error = make("p", { class: "error-text" });
    this.counts = make("dd", {});
    this.story = make("ol", { class: "story" });
    this.told = 0;
    this.parts = {
      live: part("Being written", this.live.element),
      error: part("Error", this.error),
      result: part("Result", this.result.element),
    };
    const input = new Folded();
    input.show(asJson(step.input));
    panel.replaceChildren(
      make(
        "dl", { class: "facts" },
        ...fact("Waits for", listed(step.needs, 20) || "nothing"),
        ...fact("Needed by", listed(dependentsOf(run, step).map((other) => other.name), 20) || "nothing"),
        make("dt", {}, "Counted"), this.counts,
        make("dt", {}, "Task"),
        make("dd", {}, taskLink(step.id)),
      ),
      this.parts.error,
      this.parts.live,
      this.parts.result,
      part("Input", input.element),
      part("What happened to it", this.story),
    );
  }

  update() {
    const { step } = this;
    say(this.counts, `${plural(step.retries, "failure")}, ${plural(step.deliveries, "hand-out")}`);
    set(this.parts.live, "hidden", !step.live);
    if (step.live) this.live.show(step.live.text, true);
    set(this.parts.error, "hidden", !step.error);
    say(this.error, step.error ? `${step.error.type}: ${step.error.message}` : "");
    set(this.parts.result, "hidden", !step.resultKnown);
    if (step.resultKnown) this.result.show(resultText(step));
    this.tell();
  }

  // The trail only grows, but older entries may come after newer ones: then it is written anew.
  tell() {
    const entries = this.run.log.filter((entry) => entry.task_id === this.step.id);
    if (entries.length === this.told) return;
    this.told = entries.length;
    this.story.replaceChildren(...entries.map((entry) => make("li", {}, ...sentence(entry))));
  }
}

// An address that a browser opens by itself brings no key.
function taskLink(id) {
  const path = `/tasks/${id}`;
  return storedKey() ? path : make("a", { href: path }, path);
}

function sentence(entry) {
  const { from, to } = transitionWords(entry, false);
  const who = entry.worker && entry.reason === "claimed" ? ` by ${entry.worker}` : "";
  const detail = detailWords(entry.detail);
  return [
    time(entry.at, clockTime(entry.at)),
    make("span", {}, ` ${from ? `${from} → ` : ""}${to}, ${entry.reason}${who}${detail ? ` – ${detail}` : ""}`),
  ];
}

function part(title, content) {
  return make("section", { class: "part" }, make("h4", {}, title), content);
}

function fact(term, words) {
  return [make("dt", {}, term), make("dd", {}, words)];
}

function plural(number, word) {
  return `${number} ${word}${number === 1 ? "" : "s"}`;
}
