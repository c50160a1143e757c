// The list of steps: a line each, and what is to be known of it behind a button.

import { serverNow } from "./clock.js";
import { StepDetails } from "./details.js";
import { badge, make, say, set, showBadge } from "./dom.js";
import { stepsOf } from "./model.js";
import { Offers } from "./offers.js";
import { LOOKS, kindWord, lookOfStep, noteOfStep, span, stepSeconds, wordOfStep } from "./words.js";

const MANY = 150; // rows; from here on those out of sight are not laid out

export class StepList {
  // `acts`: { approve(step, approved, feedback, artefact), requeue(step), fetchResult(step) }
  constructor({ list, filters, acts }) {
    Object.assign(this, { list, filters, acts, run: null, rows: new Map(), only: null });
  }

  show(run) {
    this.run = run;
    this.only = null;
    this.rows = new Map(stepsOf(run).map((step) => [step.id, new StepRow(run, step, this.acts)]));
    this.list.replaceChildren(...[...this.rows.values()].map((row) => row.element));
    set(this.list, "data-many", this.rows.size > MANY);
    this.chips = new Map();
    this.filters.replaceChildren();
    for (const step of stepsOf(run)) this.update(step);
    this.count();
  }

  update(step) {
    const row = this.rows.get(step.id);
    if (!row) return;
    row.update();
    this.sift(row);
  }

  tick(step) {
    this.rows.get(step.id)?.tick();
  }

  // The numbers by state; each is a button that shows only those.
  count() {
    const numbers = new Map();
    for (const step of stepsOf(this.run)) {
      const look = lookOfStep(step);
      numbers.set(look, (numbers.get(look) ?? 0) + 1);
    }
    for (const look of Object.keys(LOOKS)) {
      const number = numbers.get(look) ?? 0;
      if (!this.chips.has(look) && number) this.addChip(look);
      const chip = this.chips.get(look);
      if (!chip) continue;
      set(chip, "hidden", !number && this.only !== look);
      set(chip, "aria-pressed", String(this.only === look));
      showBadge(chip.firstElementChild, look, `${number} ${LOOKS[look]}`);
    }
  }

  addChip(look) {
    const chip = make(
      "button",
      { type: "button", class: "chip", onclick: () => this.filter(this.only === look ? null : look) },
      badge(),
    );
    this.chips.set(look, chip);
    const order = Object.keys(LOOKS).filter((key) => this.chips.has(key));
    this.filters.append(...order.map((key) => this.chips.get(key)));
  }

  filter(look) {
    this.only = look;
    for (const row of this.rows.values()) this.sift(row);
    this.count();
  }

  sift(row) {
    set(row.element, "hidden", this.only !== null && lookOfStep(row.step) !== this.only);
  }

  // Opens a step and goes there.
  reveal(step) {
    const row = this.rows.get(step.id);
    if (!row) return;
    if (row.element.hidden) this.filter(null);
    row.open(true);
    row.button.focus({ preventScroll: true });
    row.element.scrollIntoView({ block: "nearest" });
  }
}

class StepRow {
  constructor(run, step, acts) {
    Object.assign(this, { run, step, acts, details: null, isOpen: false });
    const id = `step-${step.id}`;
    this.button = make(
      "button",
      {
        type: "button", class: "step-open", "aria-expanded": "false", "aria-controls": id,
        onclick: () => this.open(!this.isOpen),
      },
      step.name,
    );
    this.badge = badge();
    this.tries = make("span", { class: "step-tries" });
    this.seconds = make("span", { class: "step-seconds" });
    this.worker = make("span", { class: "step-worker" });
    this.note = make("p", { class: "step-note" });
    this.panel = make("div", { class: "step-more", id, hidden: true });
    this.offers = new Offers(run, step, acts, () => this.button.focus({ preventScroll: true }));
    this.element = make(
      "li",
      { class: "step" },
      make(
        "div", { class: "step-line" },
        make("h3", {}, this.button), this.badge, this.tries, this.seconds, this.worker,
      ),
      this.note,
      this.offers.element,
      this.panel,
    );
  }

  open(isOpen) {
    this.isOpen = isOpen;
    set(this.button, "aria-expanded", String(isOpen));
    set(this.panel, "hidden", !isOpen);
    this.tick();
    if (!isOpen) return;
    if (this.step.wanted) this.acts.fetchResult(this.step);
    this.details ??= new StepDetails(this.panel, this.run, this.step);
    this.details.update();
  }

  update() {
    const { step } = this;
    const look = lookOfStep(step);
    set(this.element, "data-look", look);
    showBadge(this.badge, look, wordOfStep(step));
    set(this.button, "aria-label", `${step.name}, ${kindWord(step.kind)} step, ${wordOfStep(step)}`);
    say(this.tries, step.attempt > 0 && step.kind !== "approval" ? `try ${step.attempt}` : "");
    say(this.worker, step.attempt > 0 ? (step.worker ?? "") : "");
    this.offers.update();
    if (this.isOpen) {
      if (step.wanted) this.acts.fetchResult(step);
      this.details.update();
    }
    this.tick();
  }

  tick() {
    const now = serverNow();
    say(this.seconds, span(stepSeconds(this.step, now)));
    const note = noteOfStep(this.run, this.step, now);
    say(this.note, note);
    const isToldBelow = this.isOpen && ["SUCCEEDED", "FAILED"].includes(this.step.status);
    set(this.note, "hidden", !note || isToldBelow);
  }
}
