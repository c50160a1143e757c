// The drawing of a run: steps with edges while there are few, a mosaic of marks when there are
// many. One stop for the Tab key; the arrow keys go from step to step.

import { serverNow } from "./clock.js";
import { draw, make, mark, say, set } from "./dom.js";
import { arrange, ranksOf } from "./layout.js";
import { stepsOf } from "./model.js";
import { kindWord, lookOfStep, shortName, span, stepSeconds, wordOfStep } from "./words.js";

const MOST_DRAWN = 60;
const MOST_RANKS = 14;
const NODE = { width: 196, height: 54 };
const GAP = { along: 52, across: 18 };
const NARROW_PX = 620; // below it the drawing goes from top to bottom
const SMALLEST_SCALE = 0.7; // smaller letters cannot be read: then the drawing scrolls by itself
const LETTERS = 20;

export class Drawing {
  constructor(box, onPick) {
    Object.assign(this, { box, onPick, run: null, nodes: new Map(), edges: [], current: null });
    box.addEventListener("keydown", (event) => this.steer(event));
    this.isNarrow = false;
    new ResizeObserver(() => {
      const isNarrow = this.box.clientWidth < NARROW_PX;
      if (isNarrow !== this.isNarrow && this.run) this.show(this.run);
    }).observe(box);
  }

  show(run) {
    this.run = run;
    this.isNarrow = this.box.clientWidth < NARROW_PX;
    this.nodes.clear();
    this.edges = [];
    this.current = null;
    const steps = stepsOf(run);
    if (!steps.length) {
      this.box.replaceChildren();
      return;
    }
    const ranks = ranksOf(asGraph(steps));
    const isSmall = steps.length <= MOST_DRAWN && Math.max(...ranks.values()) < MOST_RANKS;
    this.box.replaceChildren(isSmall ? this.drawn(steps) : this.mosaic(steps, ranks));
    this.makeCurrent(steps[0].name);
    for (const step of steps) this.update(step);
  }

  update(step) {
    const node = this.nodes.get(step.name);
    if (!node) return;
    const look = lookOfStep(step);
    set(node.element, "data-look", look);
    set(node.element, "aria-label", `${step.name}, ${wordOfStep(step)}`);
    set(node.use, "href", `#mark-${look}`);
    if (node.title) say(node.title, `${step.name}: ${wordOfStep(step)}`);
    for (const edge of this.edges) {
      if (edge.from === step.name) set(edge.path, "data-met", step.status === "SUCCEEDED");
      if (edge.to === step.name) set(edge.path, "data-busy", step.status === "RUNNING");
    }
    this.tick(step);
  }

  // Only the second line of a drawn step changes with time.
  tick(step) {
    const node = this.nodes.get(step.name);
    if (!node?.second) return;
    const parts = [kindWord(step.kind), wordOfStep(step), span(stepSeconds(step, serverNow()))];
    if (step.attempt > 1) parts.push(`try ${step.attempt}`);
    say(node.second, parts.filter(Boolean).join(" · "));
  }

  // --- many steps: one mark each, rank after rank ---

  mosaic(steps, ranks) {
    const sorted = [...steps].sort((a, b) => ranks.get(a.name) - ranks.get(b.name));
    const tiles = sorted.map((step) => {
      const picture = mark();
      const tile = make("div", { class: "tile" }, picture);
      this.nodes.set(step.name, { element: tile, use: picture.firstChild, title: null });
      this.listen(tile, step);
      return tile;
    });
    for (const [index, step] of sorted.entries()) tiles[index].title = step.name;
    return make("div", { class: "mosaic" }, ...tiles);
  }

  // --- few steps: boxes and edges ---

  drawn(steps) {
    const plan = arrange(asGraph(steps));
    const [along, across] = this.isNarrow
      ? [NODE.height + GAP.along * 0.7, NODE.width + GAP.across]
      : [NODE.width + GAP.along, NODE.height + GAP.across];
    const spot = ({ rank, place }) =>
      this.isNarrow
        ? { x: place * across, y: rank * along }
        : { x: rank * along, y: place * across };
    const [left, top, right, bottom] = this.bounds(plan, spot);
    const [width, height] = [right - left, bottom - top];
    const svg = draw("svg", {
      class: "drawing", viewBox: `${left} ${top} ${width} ${height}`, width, height,
    });
    svg.style.minWidth = `${width * SMALLEST_SCALE}px`;
    for (const { from, to, points } of plan.edges) {
      const path = draw("path", { class: "edge", d: this.route(points.map(spot)) });
      this.edges.push({ from, to, path });
      svg.append(path);
    }
    for (const step of steps) svg.append(this.node(step, spot(plan.nodes.get(step.name))));
    return svg;
  }

  // What is drawn on: boxes take all of their room, the waypoints of edges only a line.
  bounds(plan, spot) {
    const { width, height } = NODE;
    const boxes = [...plan.nodes.values()].map(spot).map(({ x, y }) => [x, y, x + width, y + height]);
    const middle = ({ x, y }) => {
      const [at, beside] = this.isNarrow ? [x + width / 2, y] : [x, y + height / 2];
      return [at, beside, at, beside];
    };
    const lines = plan.edges.flatMap(({ points }) => points.slice(1, -1).map(spot).map(middle));
    const all = [...boxes, ...lines];
    const side = (index, pick) => pick(...all.map((corners) => corners[index]));
    return [side(0, Math.min) - 2, side(1, Math.min) - 2, side(2, Math.max) + 2, side(3, Math.max) + 2];
  }

  node(step, { x, y }) {
    const name = shortName(step.name);
    const shown = name.length > LETTERS ? `${name.slice(0, LETTERS - 1)}…` : name;
    const use = draw("use", { href: "#mark-queued", x: 12, y: 10, width: 16, height: 16 });
    const second = draw("text", { class: "node-state", x: 12, y: 42 });
    const title = draw("title");
    const element = draw(
      "g",
      { class: "node", transform: `translate(${x} ${y})` },
      title,
      draw("rect", { class: "node-box", width: NODE.width, height: NODE.height, rx: 7 }),
      use,
      draw("text", { class: "node-name", x: 35, y: 22.5 }, shown),
      second,
    );
    this.nodes.set(step.name, { element, use, second, title });
    this.listen(element, step);
    return element;
  }

  // Through all points; a waypoint between ranks is passed straight, like a step without a box.
  route(spots) {
    const { width, height } = NODE;
    const enter = ({ x, y }) => (this.isNarrow ? [x + width / 2, y] : [x, y + height / 2]);
    const leave = ({ x, y }) =>
      this.isNarrow ? [x + width / 2, y + height] : [x + width, y + height / 2];
    let [x, y] = leave(spots[0]);
    let d = `M${x} ${y}`;
    for (const [index, spot] of spots.slice(1).entries()) {
      const [toX, toY] = enter(spot);
      const bend = this.isNarrow
        ? `${x} ${(y + toY) / 2} ${toX} ${(y + toY) / 2}`
        : `${(x + toX) / 2} ${y} ${(x + toX) / 2} ${toY}`;
      d += `C${bend} ${toX} ${toY}`;
      if (index < spots.length - 2) {
        [x, y] = leave(spot);
        d += `L${x} ${y}`;
      }
    }
    return d;
  }

  // --- mouse and keyboard ---

  listen(element, step) {
    set(element, "role", "button");
    set(element, "tabindex", "-1");
    const near = (isNear) => this.markNeighbours(step, isNear);
    element.addEventListener("click", () => this.onPick(step));
    element.addEventListener("pointerenter", () => near(true));
    element.addEventListener("pointerleave", () => near(false));
    element.addEventListener("focus", () => near(true));
    element.addEventListener("blur", () => near(false));
  }

  markNeighbours(step, isNear) {
    for (const { from, to, path } of this.edges) {
      if (from === step.name || to === step.name) set(path, "data-near", isNear);
    }
    if (this.edges.length) return;
    for (const other of stepsOf(this.run)) {
      const isNeighbour = other.needs.includes(step.name) || step.needs.includes(other.name);
      if (isNeighbour) set(this.nodes.get(other.name).element, "data-near", isNear);
    }
  }

  makeCurrent(name) {
    set(this.nodes.get(this.current)?.element ?? this.box, "tabindex", this.current && "-1");
    this.current = name;
    set(this.nodes.get(name).element, "tabindex", "0");
  }

  steer(event) {
    const names = [...this.nodes.keys()];
    const index = names.findIndex((name) => this.nodes.get(name).element === event.target);
    if (index < 0) return;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.onPick(this.run.byName.get(names[index]));
      return;
    }
    const goal = {
      ArrowRight: index + 1, ArrowDown: index + 1, ArrowLeft: index - 1, ArrowUp: index - 1,
      Home: 0, End: names.length - 1,
    }[event.key];
    if (goal === undefined || !names[goal]) return;
    event.preventDefault();
    this.makeCurrent(names[goal]);
    this.nodes.get(names[goal]).element.focus();
  }
}

function asGraph(steps) {
  return steps.map((step) => ({ id: step.name, needs: step.needs }));
}
