// Text as it is, cut where it is long until somebody wants all of it.

import { make, say, set } from "./dom.js";

const LONGEST_SHOWN = 1200; // characters

export class Folded {
  constructor() {
    this.text = "";
    this.isWhole = false;
    this.shown = make("pre", {});
    this.button = make("button", { type: "button", class: "quiet", onclick: () => this.unfold() });
    this.element = make("div", { class: "folded" }, this.shown, this.button);
  }

  show(text, fromEnd = false) {
    Object.assign(this, { text, fromEnd });
    const isLong = text.length > LONGEST_SHOWN;
    const cut = fromEnd ? `…${text.slice(-LONGEST_SHOWN)}` : `${text.slice(0, LONGEST_SHOWN)}…`;
    say(this.shown, isLong && !this.isWhole ? cut : text);
    set(this.button, "hidden", !isLong);
    const number = text.length.toLocaleString("en");
    say(this.button, this.isWhole ? "Show less" : `Show all ${number} characters`);
  }

  unfold() {
    this.isWhole = !this.isWhole;
    this.show(this.text, this.fromEnd);
  }
}
