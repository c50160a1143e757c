// What a person can do with a step: approve or reject it, or have it run again.

import { make, say, set } from "./dom.js";
import { filled } from "./fill.js";
import { Folded } from "./folded.js";
import { asJson } from "./words.js";

export class Offers {
  // `onDone()` is called once something was done, for the pressed button goes away with its form.
  constructor(run, step, acts, onDone) {
    Object.assign(this, { run, step, acts, onDone, offered: "nothing", about: [] });
    this.element = make("div", { class: "step-actions", hidden: true });
  }

  // The form stays the same element while the step waits, so that nobody's words are lost.
  update() {
    const { status, kind } = this.step;
    let offer = "nothing";
    if (status === "AWAITING_APPROVAL") offer = this.asked();
    if (status === "FAILED") offer = kind === "approval" ? "ask again" : "run again";
    if (this.offered !== offer) {
      this.offered = offer;
      this.about = [];
      if (offer === "nothing") this.element.replaceChildren();
      else this.element.replaceChildren(status === "FAILED" ? this.again(offer) : this.approval());
      set(this.element, "hidden", offer === "nothing");
    }
    for (const { value, shown } of this.about) {
      const now = kind === "agent" ? value : filled(this.run, value);
      shown.show(typeof now === "string" ? now : asJson(now));
    }
  }

  // What a job asks is fetched, and may be another thing the next time; a decision is about one.
  asked() {
    const { kind, approval, wanted } = this.step;
    if (kind !== "agent") return "approve";
    if (wanted) this.acts.fetchResult(this.step);
    return approval ? `approve ${approval.artefact}` : "nothing";
  }

  approval() {
    const artefact = this.step.approval?.artefact;
    const feedback = make("textarea", { id: `feedback-${this.step.id}`, rows: 2 });
    const answer = (approved) => () => {
      const words = feedback.value.trim();
      this.act(() => this.acts.approve(this.step, approved, words || null, artefact));
    };
    return make(
      "form",
      { class: "approval", onsubmit: (event) => event.preventDefault() },
      this.question(),
      make("label", { for: feedback.id }, "Your feedback, if there is any"),
      feedback,
      make(
        "div", { class: "buttons" },
        this.press("Approve", answer(true), "primary"),
        this.press("Reject", answer(false), "danger"),
      ),
      this.problem(),
    );
  }

  // What it is about: what the job asks, or the input of the step, with the results it refers to.
  question() {
    const { approval, input } = this.step;
    const list = make("dl", { class: approval ? "question artefact" : "question" });
    for (const [name, value] of Object.entries(approval ? named(approval.asks) : (input ?? {}))) {
      const shown = new Folded();
      this.about.push({ value, shown });
      list.append(make("dt", {}, name), make("dd", {}, shown.element));
    }
    for (const name of this.step.needs) {
      const step = this.run.byName.get(name);
      if (step?.wanted) this.acts.fetchResult(step);
    }
    return list;
  }

  again(offer) {
    const requeue = () => this.act(() => this.acts.requeue(this.step));
    const words = offer === "run again" ? "Run it again" : "Ask again";
    return make("div", { class: "buttons" }, this.press(words, requeue), this.problem());
  }

  press(words, onclick, look = "") {
    const name = make("span", { class: "unseen" }, ` ${this.step.name}`);
    return make("button", { type: "button", class: look, onclick }, words, name);
  }

  problem() {
    this.refused = make("p", { class: "problem", role: "alert" });
    return this.refused;
  }

  // Does it once, however often it is pressed, and says what went wrong.
  async act(work) {
    const buttons = [...this.element.querySelectorAll(".buttons button")];
    for (const button of buttons) button.disabled = true;
    say(this.refused, "");
    try {
      await work();
      this.onDone();
    } catch (refused) {
      say(this.refused, refused.message);
    } finally {
      for (const button of buttons) button.disabled = false;
    }
  }
}

// What a job asks by names: any graph's own question is any JSON.
function named(asks) {
  return asks !== null && typeof asks === "object" && !Array.isArray(asks) ? asks : { question: asks };
}
