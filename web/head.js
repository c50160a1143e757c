// The head of the open run: goal, state, progress, the connection, and how to cancel.

import { serverNow } from "./clock.js";
import { badge, find, make, say, set, showBadge } from "./dom.js";
import { onRefused } from "./key.js";
import { isFinal, stepsOf } from "./model.js";
import { LOOKS, dayTime, lookOfStatus, runSeconds, span, wordOfRun, wordOfStep } from "./words.js";

const CONNECTION_WORDS = {
  connecting: "Connecting to the live events…",
  live: "Live: every transition shows as it happens",
  lost: "Connection lost. Trying again; nothing is missed",
  over: "This run is over",
};
const NO_KEY = "Waiting for a key that the API accepts";
const TOLD_ALOUD = new Set(["FAILED", "AWAITING_APPROVAL", "CANCELLED"]);

export class RunHead {
  constructor({ cancel, retryNow }) {
    Object.assign(this, { cancel });
    this.badge = badge();
    find("run-badge").append(this.badge);
    find("retry-now").addEventListener("click", retryNow);
    find("cancel").addEventListener("click", () => this.ask(true));
    find("cancel-no").addEventListener("click", () => this.ask(false));
    find("cancel-yes").addEventListener("click", () => this.cancelNow());
    const legend = Object.entries(LOOKS).map(([look, word]) => {
      const shown = badge();
      showBadge(shown, look, word);
      return make("li", {}, shown);
    });
    find("legend").append(...legend);
    onRefused(() => {
      this.isRefused = true; // until the page begins anew with another key
      if (this.connection === "lost") this.showConnection("lost");
    });
  }

  // --- what the main part shows ---

  show(part) {
    for (const id of ["nothing", "loading", "missing", "opened"]) set(find(id), "hidden", id !== part);
  }

  showNothing(wanted) {
    document.title = "Agent Orchestrator";
    this.show(wanted ? "missing" : "nothing");
    say(find("missing-said"), `“${wanted}” is no number of a run.`);
  }

  showLoading(run) {
    document.title = `Run ${run.id} – Agent Orchestrator`;
    say(find("loading-said"), `Opening run ${run.id}…`);
    this.show("loading");
    this.ask(false);
    say(find("announced"), "");
  }

  showMissing(run) {
    this.show("missing");
    say(find("missing-said"), `There is no run ${run.id} here.`);
  }

  showRun(run) {
    this.show("opened");
    say(find("run-goal"), run.goal);
    say(find("run-id"), String(run.id));
    const started = find("run-started");
    set(started, "datetime", run.createdAt);
    say(started, dayTime(run.createdAt));
    this.lastStatus = run.status;
    this.update(run);
  }

  showConnection(state) {
    this.connection = state;
    const isLost = state === "lost";
    const why = this.isRefused ? NO_KEY : "The API does not answer. Trying again…";
    set(find("connection"), "data-state", state);
    say(find("connection-said"), isLost && this.isRefused ? NO_KEY : CONNECTION_WORDS[state]);
    say(find("loading-lost"), isLost ? why : "");
    set(find("retry-now"), "hidden", state !== "lost");
  }

  update(run) {
    const look = run.status === "RUNNING" ? "executing" : lookOfStatus(run.status);
    showBadge(this.badge, look, wordOfRun(run));
    const steps = stepsOf(run);
    const done = steps.filter((step) => step.status === "SUCCEEDED").length;
    say(find("run-progress"), `${done} of ${steps.length} steps done`);
    const bar = find("run-bar");
    bar.max = steps.length;
    bar.value = done;
    const canCancel = !isFinal(run.status) && !run.cancelRequested;
    if (!canCancel && this.isAsking) this.ask(false);
    set(find("cancel"), "hidden", !canCancel || this.isAsking);
    if (run.status !== this.lastStatus) say(find("announced"), `The run is ${wordOfRun(run)}.`);
    this.lastStatus = run.status;
    this.tick(run);
  }

  tick(run) {
    say(find("run-seconds"), span(runSeconds(run, serverNow())));
  }

  // For those who cannot see it: what asks for a person, or went wrong for good.
  announce(step) {
    if (TOLD_ALOUD.has(step.status)) say(find("announced"), `${step.name}: ${wordOfStep(step)}.`);
  }

  // --- cancel, in two presses ---

  ask(isAsking) {
    const was = this.isAsking;
    this.isAsking = isAsking;
    set(find("cancel-sure"), "hidden", !isAsking);
    set(find("cancel"), "hidden", isAsking);
    say(find("cancel-problem"), "");
    if (isAsking) find("cancel-yes").focus();
    else if (was) find("run").focus({ preventScroll: true });
  }

  async cancelNow() {
    try {
      await this.cancel();
      this.ask(false);
    } catch (refused) {
      say(find("cancel-problem"), refused.message);
    }
  }
}
