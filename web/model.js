// What the page knows of one run: a snapshot, then transition after transition. Plain data and
// functions on it, no DOM and no network, so that any history can be played to it.

const FINAL = new Set(["SUCCEEDED", "FAILED", "CANCELLED"]);
const FAILURES = new Set(["retry", "max_retry", "permanent", "deadline", "recursion_limit"]);
const HANDED_BACK = new Set(["released", "outage", "parked"]);
const LONGEST_LIVE_TEXT = 20_000;

export function isFinal(status) {
  return FINAL.has(status);
}

export function newRun(id) {
  return {
    id,
    goal: "",
    status: null, // null: nothing is known yet
    createdAt: null,
    finishedAt: null,
    cancelRequested: false,
    steps: new Map(), // by task_id, in the order of the API: each behind those it depends on
    byName: new Map(),
    log: [], // the audit trail, ascending by id
    logged: new Set(), // the ids in it
    cursor: null, // the place in the stream behind which to resume
  };
}

// --- the state of things --------------------------------------------------------------------

// The first word of a stream that does not resume. What was told before may be of another time (a
// database that was restored, with ids that are given out again), so it says nothing any more: the
// audit trail is to be read anew.
export function applySnapshot(run, data) {
  run.cursor = null;
  run.log = [];
  run.logged = new Set();
  for (const step of run.steps.values()) step.told = 0;
  applyState(run, data);
}

// Takes over how things stand. What only the page knows (streamed text, what the log told of a
// retry) stays, as long as the step is still in the same attempt.
export function applyState(run, data) {
  run.goal = data.goal;
  run.status = data.status;
  run.createdAt = data.created_at;
  run.finishedAt = data.finished_at;
  run.cancelRequested = data.cancel_requested;
  for (const given of data.steps) {
    const step = run.steps.get(given.task_id) ?? newStep(given);
    takeStep(step, given);
    run.steps.set(step.id, step);
    run.byName.set(step.name, step);
  }
}

function newStep(given) {
  return {
    id: given.task_id,
    name: given.name,
    kind: given.kind,
    needs: given.dependsOn,
    input: given.input,
    told: 0, // the id of the newest transition that is part of this state
    reason: null,
    dueAt: null, // while it waits for its next try
    live: null, // { attempt, node, text } while a model writes
    progress: null, // { node, phase } of a job's node that has begun or ended
    approval: null, // { artefact, asks } while a job waits for a person
    wanted: false, // it has brought or asks something that has not been fetched yet
  };
}

function takeStep(step, given) {
  Object.assign(step, {
    status: given.status,
    attempt: given.attempt,
    retries: given.retry_count,
    deliveries: given.delivery_count,
    worker: given.worker,
    waitingFor: given.waiting_for,
    startedAt: given.started_at,
    finishedAt: given.finished_at,
    seconds: given.duration_seconds,
    error: given.error,
    result: given.result,
    resultKnown: (given.status === "SUCCEEDED" || given.result !== null) && !given.result_left_out,
    approval: given.result_left_out ? null : (given.approval ?? null),
    wanted: given.result_left_out,
    isLarge: given.result_left_out, // only for those who ask for it
    reason: given.error ? given.error.type : null,
    dueAt: null,
  });
  if (step.status !== "RUNNING" || step.live?.attempt !== step.attempt) step.live = null;
  if (step.status !== "RUNNING" || step.progress?.attempt !== step.attempt) step.progress = null;
}

// One transition of the stream. Returns the step that changed, the run itself, or null when it is
// an old story.
export function applyTransition(run, entry) {
  run.cursor = entry.cursor ?? run.cursor;
  addHistory(run, [entry]);
  if (entry.task_id === run.id) return applyToRun(run, entry);
  const step = run.steps.get(entry.task_id);
  if (!step || entry.id <= step.told) return null;
  step.told = entry.id;
  applyToStep(step, entry);
  return step;
}

function applyToRun(run, entry) {
  run.status = entry.to;
  run.finishedAt = isFinal(entry.to) ? entry.at : null;
  if (entry.reason === "requeued") run.cancelRequested = false;
  return run;
}

function applyToStep(step, entry) {
  const began = step.startedAt;
  step.status = entry.to;
  step.reason = entry.reason;
  step.attempt = entry.attempt;
  step.live = null;
  step.progress = null;
  step.approval = null;
  step.waitingFor = null;
  step.dueAt = null;
  step.error = errorOf(entry);
  step.finishedAt = isFinal(entry.to) ? entry.at : null;
  if (entry.worker) step.worker = entry.worker;
  if (FAILURES.has(entry.reason)) step.retries += 1;
  if (HANDED_BACK.has(entry.reason)) step.deliveries -= 1;
  if (entry.reason === "claimed") {
    step.deliveries += 1;
    step.startedAt = entry.at;
    step.seconds = null;
  } else if (entry.from === "RUNNING" && began) {
    step.seconds = Math.max(0, (Date.parse(entry.at) - Date.parse(began)) / 1000);
  }
  if (entry.reason === "requeued") step.retries = step.deliveries = 0;
  if (entry.to === "PENDING") step.dueAt = dueAfter(entry);
  step.resultKnown = false;
  step.isLarge = false;
  step.result = null;
  step.wanted =
    entry.to === "SUCCEEDED" || entry.reason === "parked" ||
    (entry.reason === "rejected" && entry.to === "FAILED");
}

function errorOf(entry) {
  const message = entry.detail?.error;
  return message ? { type: entry.reason, message } : null;
}

function dueAfter(entry) {
  const delay = entry.detail?.delay_seconds;
  return delay > 0 ? new Date(Date.parse(entry.at) + delay * 1000).toISOString() : null;
}

// --- what comes beside the transitions -------------------------------------------------------

// A piece of an answer that is being written. Pieces of an older attempt are thrown away.
export function applyToken(run, piece) {
  const step = run.steps.get(piece.task_id);
  if (!step || step.status !== "RUNNING" || piece.attempt !== step.attempt) return null;
  const { attempt, node = null } = piece;
  if (step.live?.attempt !== attempt || step.live.node !== node) step.live = { attempt, node, text: "" };
  step.live.text = (step.live.text + piece.text).slice(-LONGEST_LIVE_TEXT);
  return step;
}

// A node of an agent job has begun or ended. What it writes from then on is another text.
export function applyNode(run, { task_id: id, attempt, node, phase }) {
  const step = run.steps.get(id);
  if (!step || step.status !== "RUNNING" || attempt !== step.attempt) return null;
  step.progress = { attempt, node, phase };
  step.live = null;
  return step;
}

// The step's row of GET /tasks/{id}, asked for because no transition carries a result or a question. It may be
// older or newer than what the stream has told, and then says nothing here.
export function applyTask(run, task) {
  const step = run.steps.get(task.id);
  if (!step || step.status !== task.status || step.attempt !== task.attempt) return null;
  step.wanted = false;
  step.result = task.result;
  step.resultKnown = task.status === "SUCCEEDED" || task.result !== null;
  step.approval = task.state?.approval ?? null;
  step.seconds = task.duration_seconds ?? step.seconds;
  return step;
}

// Adds entries to the audit trail, each once and in their order; returns those that were new.
// They may come from the stream or from GET /runs/{id}/audit, in any order.
export function addHistory(run, entries) {
  const fresh = entries.filter((entry) => !run.logged.has(entry.id));
  for (const entry of fresh) {
    run.logged.add(entry.id);
    let place = run.log.length;
    while (place > 0 && run.log[place - 1].id > entry.id) place -= 1;
    run.log.splice(place, 0, entry);
  }
  return fresh;
}

// A snapshot does not say why a step waits and for how long; its last entry of the trail does.
export function recallReasons(run) {
  const last = new Map(run.log.map((entry) => [entry.task_id, entry]));
  for (const step of run.steps.values()) {
    const entry = last.get(step.id);
    if (!entry || entry.to !== step.status || entry.attempt !== step.attempt) continue;
    step.reason = entry.reason;
    if (step.status === "PENDING") step.dueAt = dueAfter(entry);
  }
}

// --- questions -------------------------------------------------------------------------------

export function stepsOf(run) {
  return [...run.steps.values()];
}

export function dependentsOf(run, step) {
  return stepsOf(run).filter((other) => other.needs.includes(step.name));
}

// Which dependencies a blocked step still waits for.
export function unmetNeeds(run, step) {
  return step.needs.filter((name) => run.byName.get(name)?.status !== "SUCCEEDED");
}
