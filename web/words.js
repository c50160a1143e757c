// How states, times and transitions are said: pure functions from the model to words and marks.

import { unmetNeeds } from "./model.js";

// Each look has a word, a mark (web/index.html draws it) and tones (web/style.css).
export const LOOKS = {
  blocked: "blocked",
  queued: "queued",
  executing: "executing",
  retrying: "retrying",
  paused: "model away",
  waiting: "needs approval",
  done: "done",
  failed: "failed",
  cancelled: "cancelled",
};

const LOOK_OF_STATUS = {
  BLOCKED: "blocked",
  PENDING: "queued",
  RUNNING: "executing",
  AWAITING_APPROVAL: "waiting",
  SUCCEEDED: "done",
  FAILED: "failed",
  CANCELLED: "cancelled",
};

export function lookOfStatus(status) {
  return LOOK_OF_STATUS[status] ?? "queued";
}

export function lookOfStep(step) {
  if (step.status === "PENDING") {
    if (step.reason === "outage" || step.waitingFor?.startsWith("backend")) return "paused";
    if (step.reason === "retry" || step.waitingFor === "backoff") return "retrying";
  }
  return lookOfStatus(step.status);
}

export function wordOfStep(step) {
  if (step.status === "FAILED" && step.reason === "rejected") return "rejected";
  return LOOKS[lookOfStep(step)];
}

export function wordOfRun(run) {
  if (run.status === "RUNNING") return run.cancelRequested ? "stopping" : "running";
  return LOOKS[lookOfStatus(run.status)];
}

export function kindWord(kind) {
  return { prompt: "model", tool: "tool", approval: "approval", agent: "agent" }[kind] ?? kind;
}

// A name without its prefix, where there is little room.
export function shortName(name) {
  return name.slice(name.indexOf(".") + 1);
}

// --- times -----------------------------------------------------------------------------------

export function span(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 0.0995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  if (seconds < 59.5) return `${Math.round(seconds)} s`;
  const whole = Math.round(seconds);
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60)];
  if (hours) return `${hours} h ${String(minutes).padStart(2, "0")} min`;
  return `${minutes} min ${String(whole % 60).padStart(2, "0")} s`;
}

export function secondsBetween(from, until) {
  return Math.max(0, (until - Date.parse(from)) / 1000);
}

// How long the attempt has taken, or takes already.
export function stepSeconds(step, now) {
  if (step.status === "RUNNING") return step.startedAt ? secondsBetween(step.startedAt, now) : null;
  return step.seconds;
}

export function runSeconds(run, now) {
  if (!run.createdAt) return null;
  return secondsBetween(run.createdAt, run.finishedAt ? Date.parse(run.finishedAt) : now);
}

const CLOCK = new Intl.DateTimeFormat(undefined, {
  hour: "2-digit", minute: "2-digit", second: "2-digit", fractionalSecondDigits: 3, hourCycle: "h23",
});
const DAY = new Intl.DateTimeFormat(undefined, {
  day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", hourCycle: "h23",
});

export function clockTime(at) {
  return CLOCK.format(new Date(at));
}

export function dayTime(at) {
  return DAY.format(new Date(at));
}

// --- sentences -------------------------------------------------------------------------------

// One line under a step's name: what it waits for, what it writes, what came of it.
export function noteOfStep(run, step, now) {
  const look = lookOfStep(step);
  if (look === "blocked") return `waits for ${listed(unmetNeeds(run, step))}`;
  if (look === "retrying") return `${nextTry(step, now)}${because(step)}`;
  if (look === "paused") return `the model server is away; nothing is lost${because(step)}`;
  if (look === "executing") return progressOf(step);
  if (look === "done" && step.isLarge && !step.resultKnown) return "a long result: open to read it";
  if (look === "done") return step.resultKnown ? oneLine(outcomeOf(step)) : "";
  if (look === "failed") return step.error ? oneLine(step.error.message) : "";
  if (look === "cancelled" && step.reason === "dependency_failed") {
    return "a step it depends on did not succeed";
  }
  if (step.reason === "reaped") return "its worker was lost; the next free one takes it";
  if (step.reason === "released") return "its worker handed it back; the next free one takes it";
  if (look === "queued" && step.reason === "approved") return "approved; the next free worker goes on";
  if (look === "queued" && step.reason === "rejected") return "sent back; the next free worker goes on";
  if (step.status === "PENDING") return "the next free worker takes it";
  return "";
}

// What is being written; of a job also by which of its nodes, or how far it has come.
function progressOf({ live, progress }) {
  if (live) return `${live.node ? `${live.node}: ` : ""}${lastLine(live.text)}`;
  if (!progress) return "";
  return `${progress.node} ${progress.phase === "finished" ? "is done" : "is at work"}`;
}

// A result in one line; of a job that was judged, the verdict first.
function outcomeOf(step) {
  const { verdict, stopped, code } = step.result ?? {};
  if (step.kind !== "agent" || typeof verdict !== "string") return resultText(step);
  const why = stopped ? ` (stopped by ${stopped})` : "";
  return `${verdict}${why}${typeof code === "string" ? `: ${code}` : ""}`;
}

function nextTry(step, now) {
  const left = step.dueAt ? (Date.parse(step.dueAt) - now) / 1000 : 0;
  return left > 0 ? `tries again in ${Math.ceil(left)} s` : "tries again at once";
}

function because(step) {
  return step.error ? ` – ${oneLine(step.error.message)}` : "";
}

export function listed(names, most = 4) {
  const shown = names.slice(0, most);
  const more = names.length - shown.length;
  return shown.join(", ") + (more ? ` and ${more} more` : "");
}

export function oneLine(text, longest = 240) {
  const line = text.replace(/\s+/g, " ").trim();
  return line.length > longest ? `${line.slice(0, longest)}…` : line;
}

function lastLine(text, longest = 120) {
  const line = text.replace(/\s+/g, " ").trimStart();
  return line.length > longest ? `…${line.slice(-longest)}` : line;
}

// What a step has brought, as a person wants to read it: a model's text as text, the rest as JSON.
export function resultText(step) {
  const { kind, result } = step;
  if (kind === "prompt" && result && typeof result.text === "string" && !("json" in result)) {
    return result.text;
  }
  if (kind === "approval" && result && typeof result.approved === "boolean") {
    const word = result.approved ? "approved" : "rejected";
    return result.feedback ? `${word}: ${result.feedback}` : word;
  }
  if (kind === "agent" && result && typeof result === "object" && !Array.isArray(result)) {
    return partsText(result);
  }
  const shown = kind === "prompt" && result && "json" in result ? result.json : result;
  return typeof shown === "string" ? shown : asJson(shown);
}

// The parts of a job's result, one below the other; texts as they are.
function partsText(result) {
  const parts = Object.entries(result).filter(([, value]) => value !== null && value !== "");
  return parts
    .map(([name, value]) => [name, typeof value === "string" ? value : asJson(value)])
    .map(([name, text]) => (text.includes("\n") ? `${name}:\n${text}` : `${name}: ${text}`))
    .join("\n\n");
}

export function asJson(value) {
  return JSON.stringify(value, null, 2) ?? "null";
}

// From where (null: it was created), and to which look and word.
export function transitionWords(entry, isRun) {
  const say = (status) => (isRun && status === "RUNNING" ? "running" : LOOKS[lookOfStatus(status)]);
  const step = { status: entry.to, reason: entry.reason };
  const look = lookOfStep(step);
  const word = isRun ? say(entry.to) : wordOfStep(step);
  return { from: entry.from === null ? null : say(entry.from), to: word, look };
}

const DETAILS = {
  delay_seconds: (seconds) => `next try after ${span(seconds)}`,
  error: (error) => error,
  by: (who) => `by ${who}`,
  feedback: (text) => `“${text}”`,
  artefact: (hash) => `about ${hash.slice(0, 8)}`,
};

export function detailWords(detail) {
  const known = Object.keys(DETAILS).filter((key) => detail?.[key] != null);
  const said = known.map((key) => DETAILS[key](detail[key]));
  const others = Object.entries(detail ?? {}).filter(([key]) => !(key in DETAILS));
  return [...said, ...others.map(([key, value]) => `${key}: ${JSON.stringify(value)}`)].join(" · ");
}
