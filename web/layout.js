// Where the steps of a run are drawn: ranks by longest path, few crossings, edges that go round
// steps. Pure: names in, positions out, in units of one step; draw.js makes them pixels.

const SWEEPS = 6;
const ROUNDS = 10;
const WAYPOINT_ROOM = 0.55; // an edge that passes by a step needs less room than another step

// `steps`: [{ id, needs: [id] }], each behind those it depends on. Returns
// { ranks, places, nodes: Map(id -> { rank, place }), edges: [{ from, to, points }] }.
export function arrange(steps) {
  const rankOf = ranksOf(steps);
  const { items, edges } = withWaypoints(steps, rankOf);
  const columns = [];
  for (const item of items) (columns[item.rank] ??= []).push(item);
  untangle(columns);
  const places = spread(columns);
  const nodes = new Map();
  for (const item of items) if (item.id !== null) nodes.set(item.id, point(item));
  return {
    ranks: columns.length,
    places,
    nodes,
    edges: edges.map(({ from, to, path }) => ({ from, to, points: path.map(point) })),
  };
}

// How deep each step lies: 0 without dependencies, else one below the deepest of them.
export function ranksOf(steps) {
  const rankOf = new Map();
  for (const step of steps) {
    const above = step.needs.map((id) => rankOf.get(id) ?? 0);
    rankOf.set(step.id, above.length ? Math.max(...above) + 1 : 0);
  }
  return rankOf;
}

function point(item) {
  return { rank: item.rank, place: item.place };
}

// An edge that skips ranks gets a waypoint in each, so that it is laid round what lies between.
function withWaypoints(steps, rankOf) {
  const items = [];
  const byId = new Map();
  const edges = [];
  const add = (id, rank) => {
    const item = { id, rank, place: 0, before: [], after: [] };
    items.push(item);
    return item;
  };
  for (const step of steps) byId.set(step.id, add(step.id, rankOf.get(step.id)));
  for (const step of steps) {
    for (const need of step.needs.filter((id) => byId.has(id))) {
      const path = [byId.get(need)];
      for (let rank = path[0].rank + 1; rank < rankOf.get(step.id); rank += 1) {
        path.push(add(null, rank));
      }
      path.push(byId.get(step.id));
      for (let i = 1; i < path.length; i += 1) {
        path[i].before.push(path[i - 1]);
        path[i - 1].after.push(path[i]);
      }
      edges.push({ from: need, to: step.id, path });
    }
  }
  return { items, edges };
}

// Orders each rank by where its neighbours lie, forwards and backwards by turns.
function untangle(columns) {
  for (const column of columns) column.forEach((item, index) => (item.place = index));
  for (let sweep = 0; sweep < SWEEPS; sweep += 1) {
    const forwards = sweep % 2 === 0;
    for (const column of forwards ? columns : [...columns].reverse()) {
      const pull = new Map(
        column.map((item) => [item, mean(forwards ? item.before : item.after) ?? item.place]),
      );
      column.sort((a, b) => pull.get(a) - pull.get(b) || a.place - b.place);
      column.forEach((item, index) => (item.place = index));
    }
  }
}

// Moves the items towards their neighbours without changing the order; returns the places taken.
function spread(columns) {
  for (const column of columns) {
    keepApart(column, column.map(() => 0));
  }
  for (let round = 0; round < ROUNDS; round += 1) {
    const forwards = round % 2 === 0;
    for (const column of forwards ? columns : [...columns].reverse()) {
      const wished = column.map((item) => {
        const near = forwards ? item.before : item.after;
        return mean(near.length ? near : [...item.before, ...item.after]) ?? item.place;
      });
      keepApart(column, wished);
    }
  }
  const all = columns.flat();
  const first = all.length ? Math.min(...all.map((item) => item.place)) : 0;
  for (const item of all) item.place -= first;
  return all.length ? Math.max(...all.map((item) => item.place)) + 1 : 0;
}

// As near to the wishes as the distances allow: neighbours that collide share one wish.
function keepApart(column, wished) {
  const offsets = [];
  column.forEach((item, index) => {
    const apart = index && roomBetween(column[index - 1], item);
    offsets.push(index ? offsets[index - 1] + apart : 0);
  });
  const blocks = [];
  wished.forEach((wish, index) => {
    let block = { sum: wish - offsets[index], count: 1, from: index };
    while (blocks.length && at(blocks.at(-1)) >= at(block)) {
      const last = blocks.pop();
      block = { sum: last.sum + block.sum, count: last.count + block.count, from: last.from };
    }
    blocks.push(block);
  });
  for (const [number, block] of blocks.entries()) {
    const end = blocks[number + 1]?.from ?? column.length;
    for (let i = block.from; i < end; i += 1) column[i].place = at(block) + offsets[i];
  }
}

function at(block) {
  return block.sum / block.count;
}

function roomBetween(one, other) {
  return one.id === null || other.id === null ? WAYPOINT_ROOM : 1;
}

function mean(items) {
  return items.length ? items.reduce((sum, item) => sum + item.place, 0) / items.length : null;
}
