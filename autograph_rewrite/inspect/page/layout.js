"use strict";
/* Where everything stands: each open scope is laid out by dagre when it is opened, and kept.

   An item that most others read (a learning rate, a step counter) stands at the side, without lines; so does what
   nothing in its scope reads. */
const SIZE = { height: 26, gap: 16, rank: 22, pad: 14, head: 24, widest: 190 };
const measure = (() => {
  const context = document.createElement("canvas").getContext("2d");
  context.font = "12px system-ui, sans-serif";
  return text => context.measureText(text).width;
})();

/* The width of an item's name: those of scopes are bold, behind a triangle. */
const room = item => item.isLeaf ? measure(item.label) : measure(item.label) * 1.1 + 14;

class Layout {
  constructor(tree, open) { this.tree = tree; this.open = open; this.kept = new Map(); }
  isOpen(item) { return !item.isLeaf && (item === this.tree.root || this.open.has(item.key)); }
  forget(item) { for (let one = item; one; one = one.parent) this.kept.delete(one); this.kept.delete(this.tree.root); }
  size(item) {
    if (this.isOpen(item)) { const inner = this.of(item); return { width: inner.width, height: inner.height }; }
    const badge = item.isLeaf ? (this.tree.state.copies(item.id) > 1 ? 26 : 0) : 16 + measure(item.count.toLocaleString("en"));
    return { width: Math.min(SIZE.widest, Math.max(52, room(item) + 20 + badge)), height: SIZE.height };
  }
  /* The places of a scope's items, relative to its corner, and its lines. */
  of(scope) {
    if (this.kept.has(scope)) return this.kept.get(scope);
    const items = scope.items(this.tree), lines = linesWithin(items, this.tree.state);
    const degree = new Int32Array(items.length);
    for (const line of lines) { degree[line.from]++; degree[line.to]++; }
    const most = Math.max(10, items.length * 0.5);
    const aside = index => degree[index] === 0 || degree[index] > most;
    const graph = new dagre.graphlib.Graph();
    graph.setGraph({ nodesep: SIZE.gap, ranksep: SIZE.rank, edgesep: 8, ranker: items.length > 30 ? "longest-path" : "network-simplex" });
    graph.setDefaultEdgeLabel(() => ({}));
    const sizes = items.map(item => this.size(item));
    items.forEach((_, index) => { if (!aside(index)) graph.setNode(String(index), { ...sizes[index] }); });
    const drawn = lines.filter(line => !aside(line.from) && !aside(line.to));
    for (const line of drawn) graph.setEdge(String(line.from), String(line.to), { line, weight: Math.min(line.count, 8) });
    if (graph.nodeCount()) dagre.layout(graph);
    const places = new Array(items.length);
    let right = 0, bottom = 0;
    for (const key of graph.nodes()) {
      const node = graph.node(key);
      places[+key] = { x: node.x - node.width / 2, y: node.y - node.height / 2, ...sizes[+key] };
      right = Math.max(right, node.x + node.width / 2);
      bottom = Math.max(bottom, node.y + node.height / 2);
    }
    ({ right, bottom } = beside(items.map((_, index) => index).filter(aside), places, sizes, right, bottom));
    const title = measure(scope.label) + 70;
    const result = {
      items, places, lines: [],
      width: Math.max(right, title) + 2 * SIZE.pad,
      height: bottom + SIZE.head + 2 * SIZE.pad,
    };
    for (const key of graph.edges()) {
      const edge = graph.edge(key);
      for (const point of edge.points) right = Math.max(right, point.x);
      result.lines.push({ ...edge.line, points: edge.points });
    }
    result.width = Math.max(result.width, right + 2 * SIZE.pad);
    this.kept.set(scope, result);
    return result;
  }
}

/* Put what has no lines in columns beside the others, or in rows where there is nothing else. */
function beside(some, places, sizes, right, bottom) {
  if (!some.length) return { right, bottom };
  some.sort((a, b) => sizes[a].height - sizes[b].height);
  const wide = right === 0, limit = wide ? 900 : Math.max(bottom, 240);
  let x = wide ? 0 : right + 40, y = 0, column = 0;
  for (const index of some) {
    const { width, height } = sizes[index];
    if (wide) {
      if (x && x + width > limit) { x = 0; y += column + SIZE.gap; column = 0; }
      places[index] = { x, y, width, height };
      x += width + SIZE.gap;
      column = Math.max(column, height);
    } else {
      if (y && y + height > limit) { y = 0; x += column + SIZE.gap; column = 0; }
      places[index] = { x, y, width, height };
      y += height + 10;
      column = Math.max(column, width);
    }
    right = Math.max(right, places[index].x + width);
    bottom = Math.max(bottom, places[index].y + height);
  }
  return { right, bottom };
}

/* The lines between items: how many values flow from one to the other, and whether replicas exchange one of them. */
function linesWithin(items, state) {
  const slots = linesWithin.slots && linesWithin.slots.length === state.names.length ? linesWithin.slots : new Int32Array(state.names.length);
  linesWithin.slots = slots;
  items.forEach((item, index) => item.eachId(id => { slots[id] = index + 1; }));
  const found = new Map();
  items.forEach((item, to) => item.eachId(id => state.eachInput(id, producer => {
    const from = slots[producer] - 1;
    if (from < 0 || from === to) return;
    const key = from * items.length + to;
    let line = found.get(key);
    if (!line) { line = { from, to, leaf: items[from].isLeaf, count: 0, exchanged: 0, sample: [] }; found.set(key, line); }
    line.count++;
    if (line.sample.length < 5) line.sample.push(producer);
    if (Reshards.isExchanged(producer)) line.exchanged++;
  })));
  items.forEach(item => item.eachId(id => { slots[id] = 0; }));
  return [...found.values()];
}
