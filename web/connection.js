// The live events of one run, over a WebSocket, or over server-sent events where that cannot be
// had (some proxies). It comes back by itself, behind the cursor it had, until the run is over.
//
// A connection that died without a word is noticed by its silence: the server says something every
// 15 seconds. (What it says between events is hidden from an EventSource; one that is quiet is
// made anew now and then, which costs nothing.)

const FIRST_DELAY_MS = 400;
const LONGEST_DELAY_MS = 15_000;
const LONGEST_SILENCE_MS = 40_000;
const LONGEST_OPENING_MS = 10_000;
const FAILURES_BEFORE_FALLBACK = 2;
const SSE_EVENTS = ["snapshot", "transition", "node", "token", "end", "keep-alive"];

let webSocketsWork = true; // until two were refused by somebody while the API was there

export class Connection {
  // `address`: the path of the events; `admitted(address)` resolves to it with what opens it, or
  // rejects when that cannot be had. `cursor()`: where to resume, or null. `probe()`: resolves to
  // { found: "there" | "over" | "missing" | "away", … }. `onEvent(name, data)`. `onState(state,
  // probed)`: "connecting", "live", "lost", "over" or "missing"; `probed`, if a probe told so.
  constructor({
    address, admitted, cursor, probe, onEvent, onState, silenceMs = LONGEST_SILENCE_MS,
  }) {
    Object.assign(this, { address, admitted, cursor, probe, onEvent, onState, silenceMs });
    this.state = null;
    this.failures = 0; // in a row, since something was heard
    this.refusals = 0; // of a WebSocket, before it was open
    this.link = null; // what is open or opening
    this.timers = { retry: null, watch: null };
    this.wake = () => document.visibilityState === "visible" && this.retryNow();
  }

  start() {
    addEventListener("online", this.wake);
    document.addEventListener("visibilitychange", this.wake);
    this.timers.watch = setInterval(() => this.watch(), this.silenceMs / 8);
    this.open();
  }

  stop() {
    removeEventListener("online", this.wake);
    document.removeEventListener("visibilitychange", this.wake);
    clearInterval(this.timers.watch);
    clearTimeout(this.timers.retry);
    this.hangUp();
    this.stopped = true;
  }

  // Do not wait for the rest of the delay.
  retryNow() {
    if (this.state === "lost" && !this.link && !this.stopped) this.open();
  }

  tell(state, probed = null) {
    if (this.stopped || this.state === state) return;
    this.state = state;
    this.onState(state, probed);
  }

  open() {
    clearTimeout(this.timers.retry);
    this.hangUp();
    if (this.state !== "lost") this.tell("connecting");
    const link = { openedAt: performance.now(), isOpen: false, hasSpoken: false };
    this.link = link;
    this.heardAt = link.openedAt;
    const hears = {
      opened: () => this.link === link && this.opened(link),
      message: (name, data) => this.link === link && this.heard(name, data),
      failed: () => this.link === link && this.failed(link),
    };
    link.isSocket = webSocketsWork;
    link.close = () => {};
    this.connect(link, hears);
  }

  async connect(link, hears) {
    let path;
    try {
      path = await this.admitted(this.address);
    } catch {
      hears.failed();
      return;
    }
    if (this.link !== link) return;
    const cursor = this.cursor();
    if (cursor) path += `${path.includes("?") ? "&" : "?"}after=${encodeURIComponent(cursor)}`;
    link.close = link.isSocket ? openSocket(path, hears) : openEventSource(path, hears);
  }

  hangUp() {
    const link = this.link;
    this.link = null; // before it is closed: what it still says is not for us
    link?.close();
  }

  opened(link) {
    link.isOpen = true;
    this.heardAt = performance.now();
    this.tell("live");
  }

  heard(name, data) {
    this.heardAt = performance.now();
    this.link.hasSpoken = true;
    this.failures = 0;
    this.refusals = 0;
    this.onEvent(name, data);
    if (name === "end") this.end("over");
  }

  end(state, probed) {
    this.tell(state, probed);
    this.stop();
  }

  // The link broke, or never came about. Why, a browser does not tell: so ask the API. A run that
  // is over has no more to tell to one who resumes; then nothing was heard on a link, or no link
  // came about.
  async failed(link) {
    this.hangUp();
    this.tell("lost");
    this.failures += 1;
    if (link.isSocket && !link.isOpen) this.refusals += 1;
    const probed = await this.probe();
    if (this.stopped || this.link) return;
    const isOver = probed.found === "over" && !link.hasSpoken && (link.isOpen || !link.isSocket);
    if (isOver || probed.found === "missing") {
      this.end(probed.found, probed);
      return;
    }
    if (probed.found === "away") this.refusals = 0;
    if (this.refusals >= FAILURES_BEFORE_FALLBACK) webSocketsWork = false;
    const delay = Math.min(LONGEST_DELAY_MS, FIRST_DELAY_MS * 2 ** Math.min(10, this.failures - 1));
    this.timers.retry = setTimeout(() => this.open(), delay * (0.5 + Math.random() / 2));
  }

  watch() {
    if (!this.link) return;
    const { isOpen, isSocket, openedAt } = this.link;
    const now = performance.now();
    if (!isOpen && now - openedAt > LONGEST_OPENING_MS) this.failed(this.link);
    else if (isOpen && now - this.heardAt > this.silenceMs) {
      if (isSocket) this.failed(this.link);
      else this.open();
    }
  }
}

// --- the two ways ----------------------------------------------------------------------------

function openSocket(path, { opened, message, failed }) {
  const url = new URL(path, location.href);
  url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
  const socket = new WebSocket(url);
  socket.onopen = opened;
  socket.onclose = failed; // an error is followed by it
  socket.onmessage = ({ data }) => {
    const frame = JSON.parse(data);
    message(frame.event, frame.data);
  };
  return () => socket.close();
}

function openEventSource(path, { opened, message, failed }) {
  const source = new EventSource(path);
  source.onopen = opened;
  source.onerror = failed; // its own way of coming back knows no growing delay
  for (const name of SSE_EVENTS) {
    source.addEventListener(name, ({ data }) => message(name, JSON.parse(data)));
  }
  return () => source.close();
}
