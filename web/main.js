// Puts the page together: which run is open, what comes of its events, what the buttons do.

import { admitted, call, get, getPages } from "./api.js";
import { openKeyForm } from "./ask.js";
import { heardOfTime } from "./clock.js";
import { Connection } from "./connection.js";
import { find } from "./dom.js";
import { Drawing } from "./draw.js";
import { EarlierRuns } from "./earlier.js";
import { watchEngine } from "./engine.js";
import { RunHead } from "./head.js";
import * as model from "./model.js";
import { StepList } from "./steps.js";
import { openForm } from "./submit.js";
import { Trail } from "./trail.js";

const TICK_MS = 200;
const SAME_END_MS = 100;
const MOST_FETCHED_AT_ONCE = 60; // steps; the results of larger runs are fetched when one looks

let run = null; // the model of the run that is open
let connection = null;
const changed = new Set(); // steps whose rows are out of date
let isPlanned = false;

const acts = { approve, requeue, fetchResult };
const drawing = new Drawing(find("drawing"), (step) => steps.reveal(step));
const steps = new StepList({ list: find("steps"), filters: find("filters"), acts });
const trail = new Trail({ body: find("trail"), more: find("trail-more"), count: find("trail-count") });
const head = new RunHead({ cancel, retryNow: () => connection?.retryNow() });
const earlier = new EarlierRuns(noticeRevival);

// --- which run -------------------------------------------------------------------------------

function openAddressed() {
  const wanted = new URLSearchParams(location.search).get("run");
  const id = /^\d{1,18}$/.test(wanted ?? "") ? Number(wanted) : null;
  if (!run || id !== run.id) open(id, wanted);
}

function open(id, wanted) {
  connection?.stop();
  connection = null;
  changed.clear();
  run = id === null ? null : model.newRun(id);
  earlier.markCurrent(id);
  if (!run) {
    head.showNothing(wanted);
    return;
  }
  head.showLoading(run);
  follow();
}

function goTo(id) {
  if (id !== run?.id) history.pushState(null, "", `?run=${id}`);
  openAddressed();
  const main = find("run");
  main.focus({ preventScroll: true });
  const { top } = main.getBoundingClientRect();
  if (top < 0 || top > innerHeight / 2) main.scrollIntoView(); // it is out of sight
}

// --- its events ------------------------------------------------------------------------------

function follow() {
  const mine = run;
  connection?.stop();
  connection = new Connection({
    address: `/runs/${mine.id}/events`,
    admitted,
    cursor: () => mine.cursor,
    probe: () => probe(mine.id),
    onEvent: (name, data) => run === mine && take(name, data),
    onState: (state, probed) => run === mine && noticeState(state, probed),
  });
  connection.start();
}

async function probe(id) {
  try {
    const data = await get(`/runs/${id}`);
    return { found: model.isFinal(data.status) ? "over" : "there", data };
  } catch (refused) {
    return { found: refused.status === 404 ? "missing" : "away" };
  }
}

function noticeState(state, probed) {
  if (state === "over" && probed?.data) takeState(probed.data, model.applyState);
  if (state === "missing") head.showMissing(run);
  else head.showConnection(state);
  if (state === "live") for (const step of model.stepsOf(run)) note(step);
  if (state === "over") earlier.read();
}

function take(name, data) {
  if (name === "snapshot") takeState(data, model.applySnapshot);
  else if (name === "transition") takeTransition(data);
  else if (name === "token") note(model.applyToken(run, data));
  else if (name === "node") note(model.applyNode(run, data));
}

function takeState(data, apply) {
  const isFirst = !run.status;
  apply(run, data);
  if (isFirst) {
    head.showRun(run);
    drawing.show(run);
    steps.show(run);
    trail.show(run);
  }
  for (const step of model.stepsOf(run)) note(step);
  readHistory(run);
}

function takeTransition(entry) {
  heardOfTime(entry.at);
  const touched = model.applyTransition(run, entry);
  if (touched && touched !== run) {
    note(touched);
    for (const step of model.dependentsOf(run, touched)) note(step);
    head.announce(touched);
  }
  plan();
}

// The stream begins with how things stand; what was before is in the audit trail.
async function readHistory(mine) {
  try {
    await getPages(`/runs/${mine.id}/audit`, ({ audit }) => {
      if (run !== mine) return false;
      model.addHistory(mine, audit);
      return true;
    });
    if (run !== mine) return;
    model.recallReasons(mine);
    for (const step of model.stepsOf(mine)) note(step);
  } catch {
    if (run === mine) setTimeout(() => run === mine && readHistory(mine), 2000);
  }
}

// The API's list says that a run which was over goes on, or has ended once more: somebody else has
// requeued a step. (Both times are of the database, but not of the same instant.)
function noticeRevival({ run_id: id, status, finished_at: finishedAt }) {
  if (run?.id !== id || !connection?.stopped || !model.isFinal(run.status)) return;
  const later = Date.parse(finishedAt) - Date.parse(run.finishedAt);
  if (!model.isFinal(status) || later > SAME_END_MS) follow();
}

// --- drawing, at most once per frame ---------------------------------------------------------

function note(step) {
  if (!step) return;
  changed.add(step);
  fetchIfFew(step);
  plan();
}

function plan() {
  if (isPlanned) return;
  isPlanned = true;
  requestAnimationFrame(() => {
    isPlanned = false;
    if (!run?.status) return;
    for (const step of changed) {
      drawing.update(step);
      steps.update(step);
    }
    changed.clear();
    steps.count();
    trail.update();
    head.update(run);
  });
}

setInterval(() => {
  if (!run?.status || model.isFinal(run.status) || document.visibilityState === "hidden") return;
  for (const step of model.stepsOf(run)) {
    if (step.status !== "RUNNING" && !step.dueAt) continue;
    drawing.tick(step);
    steps.tick(step);
  }
  head.tick(run);
}, TICK_MS);

// --- what the buttons do ---------------------------------------------------------------------

function fetchIfFew(step) {
  if (step.wanted && !step.isLarge && run.steps.size <= MOST_FETCHED_AT_ONCE) fetchResult(step);
}

async function fetchResult(step) {
  if (step.isFetching) return;
  step.isFetching = true;
  const mine = run;
  try {
    const task = await get(`/tasks/${step.id}`);
    if (run !== mine || !model.applyTask(mine, task)) return;
    note(step);
    for (const other of model.dependentsOf(mine, step)) note(other);
  } catch {
    // It stays wanted: the next look, or the next connection, asks again.
  } finally {
    step.isFetching = false;
  }
}

// `artefact`: what the decision is about, where that can change; JSON leaves out what is undefined.
async function approve(step, approved, feedback, artefact) {
  const body = JSON.stringify({ approved, feedback, artefact });
  await call("POST", `/tasks/${step.id}/approve`, { body });
}

async function requeue(step) {
  await call("POST", `/tasks/${step.id}/requeue`);
  if (connection?.stopped) follow();
}

async function cancel() {
  const mine = run;
  const { status } = await call("DELETE", `/runs/${mine.id}`);
  mine.cancelRequested = status === "RUNNING";
  plan();
}

// --- begin -----------------------------------------------------------------------------------

openKeyForm();
watchEngine();
openForm((submitted) => {
  goTo(submitted.run_id);
  earlier.read();
});
addEventListener("popstate", openAddressed);
// A click on a run of the list changes the address without loading the page anew.
find("runs").addEventListener("click", (event) => {
  const link = event.target.closest("a");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  goTo(Number(new URLSearchParams(link.search).get("run")));
});
openAddressed();
