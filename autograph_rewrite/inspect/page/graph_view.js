"use strict";
/* One drawn graph: scopes fold, colours say device, placement, pass or change; pan by dragging, zoom by the wheel. */
const SVG = "http://www.w3.org/2000/svg";
const PALETTE = ["#4477aa", "#66a61e", "#cc6677", "#aa8833", "#7a5bb5", "#2a9d9d", "#b5467c", "#5c6b7a", "#d1793a", "#3b7a57"];
const CHANGE_COLOURS = ["var(--tag)", "#2e9d4d", "#d03b3b", "#d9920a"];
const PLAIN = "var(--node)";
/* What no model has asked for: hidden until somebody wants it. */
const BOOKKEEPING = /^(save(_\d+)?|autograph_(batch|keys)[^/]*|init(_\d+)?|report_uninitialized_variables[^/]*)(\/|$)/;

function svg(tag, attributes = {}, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}
function cut(label, width) {
  if (measure(label) <= width) return label;
  let keep = Math.max(3, Math.floor(label.length * width / measure(label)) - 1);
  const tail = Math.ceil(keep * 0.4);
  return label.slice(0, keep - tail) + "…" + label.slice(-tail);
}

/* The colour of a text: the same in both panes and behind every pass. */
const Colours = (() => {
  const known = new Map();
  function of(kind, text) {
    if (!text) return PLAIN;
    if (kind === "placement") {
      if (text.startsWith("replicated")) return "#c3ccd8";
      if (text.startsWith("split")) return "#4477aa";
      if (text.startsWith("partial")) return "#e08a1e";
      return "#8a6fb8";
    }
    const key = kind + "\n" + text;
    if (!known.has(key)) known.set(key, PALETTE[[...known.keys()].filter(one => one.startsWith(kind + "\n")).length % PALETTE.length]);
    return known.get(key);
  }
  return { of };
})();

class GraphView {
  constructor(pane, { open, onselect, ontoggle, onmove }) {
    this.open = open;
    this.onselect = onselect;
    this.ontoggle = ontoggle || (() => {});
    this.onmove = onmove || (() => {});
    this.shapes = true;
    this.bookkeeping = false;
    this.colour = "device";
    this.selected = null;
    this.svg = svg("svg", { class: "drawing", tabindex: "0", role: "application", "aria-label": "Graph: arrows choose a node, Enter opens a scope, Escape closes it, + - 0 zoom" });
    this.world = svg("g");
    this.svg.append(arrowheads(), this.world);
    this.legend = make("span", { class: "legend-items" });
    this.title = make("div", { class: "pane-title" });
    pane.append(this.title, this.svg, make("div", { class: "legend" }, this.legend, make("div", { class: "zoom" },
      make("button", { title: "Fit ( 0 )", onclick: () => this.fit() }, "⤢"),
      make("button", { title: "Zoom in ( + )", onclick: () => this.zoom(1.25) }, "+"),
      make("button", { title: "Zoom out ( - )", onclick: () => this.zoom(0.8) }, "−"),
      make("button", { title: "Save what is drawn as an image", onclick: () => this.save() }, "SVG"))));
    this.at = { x: 0, y: 0, scale: 1 };
    this.listen();
  }
  show(state, { constants = false, changes = null, keep = true } = {}) {
    const same = this.state === state && this.constants === constants && this.tree.bookkeeping === this.bookkeeping;
    this.changes = changes;
    if (!same) {
      this.state = state;
      this.constants = constants;
      this.tree = new Tree(state, { constants, bookkeeping: this.bookkeeping });
      this.layout = new Layout(this.tree, this.open);
      this.mixes = new Map();
    }
    this.draw();
    if (!keep || !this.drawn) { this.drawn = true; this.fit(); }
  }
  toggle(item, everywhere = true) {
    if (item.isLeaf || item === this.tree.root) return;
    if (this.open.has(item.key)) this.open.delete(item.key); else this.open.add(item.key);
    const before = this.boxes.get(item);
    this.layout.forget(item);
    this.draw();
    const after = this.boxes.get(item);  /* what was clicked stays under the pointer */
    if (before && after) { this.at.x += (before.x - after.x) * this.at.scale; this.at.y += (before.y - after.y) * this.at.scale; this.move(); }
    if (everywhere) this.ontoggle(item);
  }
  refold() { this.layout.kept.clear(); this.draw(); }
  reveal(id) {
    if (!this.tree.scopeOf.has(id) && this.state.has(id)) { this.bookkeeping = true; this.show(this.state, { constants: this.constants, changes: this.changes }); }
    const path = this.tree.pathTo(id);
    if (!path.length) return;
    for (const item of path) if (!item.isLeaf) this.open.add(item.key);
    this.layout.kept.clear();
    this.select(path[path.length - 1], false);
    this.draw();
    this.center(path[path.length - 1]);
  }
  center(item) {
    const box = this.boxes.get(item);
    if (!box) return;
    const { width, height } = this.svg.getBoundingClientRect();
    const scale = Math.max(this.at.scale, 0.8);
    this.at = { scale, x: width / 2 - (box.x + box.width / 2) * scale, y: height / 2 - (box.y + Math.min(box.height, height) / 2) * scale };
    this.move();
  }
  select(item, redraw = true) { this.selected = item; this.onselect(item, this); if (redraw) this.draw(); }

  draw() {
    this.boxes = new Map();
    const back = svg("g"), front = svg("g");
    const inner = this.layout.of(this.tree.root);
    this.extent = inner;
    this.contents(this.tree.root, inner, 0, 0, back, 0);
    this.around(front);
    this.world.replaceChildren(back, front);
    this.drawLegend();
  }
  contents(scope, inner, x, y, group, depth) {
    const left = x + SIZE.pad, top = y + SIZE.pad + (scope === this.tree.root ? 0 : SIZE.head);
    for (const line of inner.lines) group.append(this.line(line, left, top));
    inner.items.forEach((item, index) => {
      const place = inner.places[index], box = { ...place, x: left + place.x, y: top + place.y };
      this.boxes.set(item, box);
      group.append(this.box(item, box, depth));
      if (this.layout.isOpen(item)) this.contents(item, this.layout.of(item), box.x, box.y, group, depth + 1);
    });
  }
  line(line, left, top) {
    const points = line.points.map(p => [left + p.x, top + p.y]);
    let path = "M" + points[0];
    for (let i = 1; i < points.length - 1; i++) {
      const [x, y] = points[i], [nx, ny] = points[i + 1];
      path += `Q${x},${y} ${i === points.length - 2 ? [nx, ny] : [(x + nx) / 2, (y + ny) / 2]}`;
    }
    if (points.length === 2) path += "L" + points[1];
    const drawn = svg("g"), element = svg("path", { d: path, class: line.exchanged ? "line exchanged" : "line", "stroke-width": Math.min(1 + Math.log2(line.count) / 2, 4), "marker-end": line.exchanged ? "url(#head-exchanged)" : "url(#head)" });
    const names = line.sample.map(id => this.state.names[id]).join("\n");
    element.append(svg("title", {}, several(line.count, "value") + (line.exchanged ? ", " + line.exchanged + " exchanged between replicas" : "") + "\n" + names));
    drawn.append(element);
    const middle = points[Math.floor((points.length - 1) / 2)], next = points[Math.floor((points.length - 1) / 2) + 1] || middle;
    const told = this.shapes && !line.leaf ? this.shapeOf(line.sample[0]) : "";
    if (told) drawn.append(svg("text", { class: "shape-of-line", x: (middle[0] + next[0]) / 2, y: (middle[1] + next[1]) / 2 + 3 }, told + (line.count > 1 ? " +" + (line.count - 1) : "")));
    return drawn;
  }
  /* The shape of a node's first result; where a pass has left none, that of the original, whose batch is open. */
  shapeOf(id) {
    const found = [this.state, Page.state(0)].filter(state => state.has(id)).map(state => /\[[^\]]*\]/.exec(state.text(id, "type"))).find(Boolean);
    return found ? found[0] : "";
  }
  box(item, box, depth) {
    const open = this.layout.isOpen(item), leaf = item.isLeaf;
    const group = svg("g", { class: "item" + (open ? " open" : leaf ? " leaf" : " scope") + (item === this.selected || (this.selected && item.key === this.selected.key) ? " selected" : ""), transform: `translate(${box.x},${box.y})` });
    const copies = leaf ? this.state.copies(item.id) : 1;
    if (copies > 1 && !open) for (const shift of [5, 2.5])
      group.append(svg("rect", { class: "copy", x: shift, y: shift, width: box.width, height: box.height, rx: leaf ? 13 : 5 }));
    const mix = this.mix(item);
    const main = mix.length === 1 ? mix[0].colour : PLAIN;
    group.append(svg("rect", { class: "face", width: box.width, height: box.height, rx: leaf ? 13 : 5, style: `fill: ${open ? (depth % 2 ? "var(--open-odd)" : "var(--open)") : mix[0] && mix[0].heat ? main : tint(main)}; stroke: ${main.startsWith("var(") || (mix[0] && mix[0].heat) ? "var(--node-line)" : main}` }));
    if (!leaf && mix.length > 1) {  /* how much of the scope has which colour */
      let x = 1;
      const room = box.width - 2, sum = mix.reduce((total, one) => total + one.count, 0);
      for (const one of mix) { const width = room * one.count / sum; group.append(svg("rect", { x, y: open ? 0.5 : box.height - 5, width, height: 4, style: "fill: " + one.colour })); x += width; }
    }
    const badge = leaf ? (copies > 1 ? "×" + copies : "") : item.count.toLocaleString("en");
    const space = box.width - 18 - (badge ? measure(badge) + 6 : 0);
    const mark = leaf ? "" : open ? "▾ " : "▸ ";
    group.append(svg("text", { class: "name", x: 9, y: 17 }, mark + cut(item.label, leaf ? space : (space - 12) / 1.1)));
    if (badge) group.append(svg("text", { class: "badge", x: box.width - 8, y: 17, "text-anchor": "end" }, badge));
    if (leaf && this.shapes) { const told = this.shapeOf(item.id); if (told) group.append(svg("text", { class: "shape", x: 12, y: box.height + 10 }, cut(told, Math.max(60, box.width)))); }
    if (!open && this.exchanges(item)) group.append(svg("circle", { class: "exchange", cx: box.width - 3, cy: 3, r: 4.5 }));
    group.append(svg("title", {}, leaf ? this.state.names[item.id] + "\n" + this.state.text(item.id, "op") + "\n" + this.state.text(item.id, "type") : item.label + "\n" + several(item.count, "node") + (mix[0] && mix[0].heat ? "\n" + mix[0].text : "")));
    group.addEventListener("click", event => { event.stopPropagation(); if (this.dragged) return; this.select(item); });
    group.addEventListener("dblclick", event => { event.stopPropagation(); this.toggle(item); });
    if (!leaf) {
      const knob = svg("rect", { class: "knob", width: 22, height: 24 });
      knob.addEventListener("click", event => { event.stopPropagation(); if (!this.dragged) this.toggle(item); });
      knob.append(svg("title", {}, open ? "Fold" : "Open"));
      group.append(knob);
    }
    return group;
  }
  /* Lines from and to what is selected, wherever the others are drawn. */
  around(group) {
    const item = this.selected && this.boxes.has(this.selected) ? this.selected : null;
    if (!item || !item.isLeaf) return;
    const own = this.boxes.get(item);
    const others = [];
    this.state.eachInput(item.id, producer => others.push([producer, true]));
    for (const user of this.state.users(item.id).slice(0, 60)) others.push([user, false]);
    const seen = new Set();
    for (const [id, isInput] of others.slice(0, 100)) {
      const other = this.visible(id), box = other && this.boxes.get(other);
      if (!box || other === item || seen.has(other.key + isInput)) continue;
      seen.add(other.key + isInput);
      const [a, b] = isInput ? [box, own] : [own, box];
      const x1 = a.x + a.width / 2, y1 = a.y + Math.min(a.height, a === own || !this.layout.isOpen(other) ? a.height : SIZE.head), x2 = b.x + b.width / 2, y2 = b.y;
      const bend = Math.max(30, Math.abs(y2 - y1) / 2);
      group.append(svg("path", { class: isInput ? "link in" : "link out", d: `M${x1},${y1}C${x1},${y1 + bend} ${x2},${y2 - bend} ${x2},${y2}`, "marker-end": isInput ? "url(#head-in)" : "url(#head-out)" }));
    }
  }
  /* The item that stands for a node as things are folded now. */
  visible(id) {
    let found = null;
    for (const item of this.tree.pathTo(id)) { found = item; if (!this.layout.isOpen(item)) break; }
    return found;
  }
  /* Whether replicas exchange a value of an item. */
  exchanges(item) {
    if (item._exchanges === undefined) { item._exchanges = false; item.eachId(id => { if (Reshards.isExchanged(id)) item._exchanges = true; }); }
    return item._exchanges;
  }
  /* Which colours an item has, the most frequent first. */
  mix(item) {
    const key = this.colour + (this.changes ? "\nchange" : "");
    let kept = this.mixes.get(item);
    if (kept && kept.key === key) return kept.mix;
    if (HEAT[this.colour]) {
      const share = Costs.share(item, HEAT[this.colour]);
      const mix = [{ text: percent(share) + " of " + this.colour, count: item.count, colour: heat(share), heat: true }];
      this.mixes.set(item, { key, mix });
      return mix;
    }
    const counts = new Map();
    item.eachId(id => { const text = this.said(id); counts.set(text, (counts.get(text) || 0) + 1); });
    let mix = [...counts].map(([text, count]) => ({ text, count, colour: this.colourOf(text) })).sort((a, b) => b.count - a.count);
    if (mix.length > 1 && this.colour !== "change") { const said = mix.filter(one => one.text); if (said.length) mix = said; }
    if (this.colour === "change") { const some = mix.filter(one => one.text !== CHANGES[SAME]); if (some.length && item.isLeaf) mix = some; }
    this.mixes.set(item, { key, mix });
    return mix;
  }
  said(id) {
    if (this.colour === "change") return CHANGES[this.changes ? this.changes[id] : SAME];
    return this.state.text(id, this.colour);
  }
  colourOf(text) { return this.colour === "change" ? CHANGE_COLOURS[CHANGES.indexOf(text)] : Colours.of(this.colour, text); }
  drawLegend() {
    const mix = HEAT[this.colour] ? [0.01, 0.1, 0.5, 1].map(share => ({ text: percent(share) + " of the step's " + this.colour, colour: heat(share), count: "" })) : this.mix(this.tree.root).slice(0, 12);
    this.legend.replaceChildren(...mix.map(one => make("span", {}, swatch(one.colour), shortList(one.text || "(none)") + "  " + one.count.toLocaleString("en"))),
      make("span", {}, make("i", { class: "swatch line-swatch" }), make("i", { class: "swatch dot-swatch" }), "exchanged between replicas"));
  }

  move(told = true) { this.world.setAttribute("transform", `translate(${this.at.x},${this.at.y}) scale(${this.at.scale})`); if (told) this.onmove(this.at); }
  /* What is drawn, as a file of its own. */
  image() {
    const copy = this.svg.cloneNode(true), world = copy.querySelector("g"), { width, height } = this.extent;
    world.removeAttribute("transform");
    for (const [key, value] of Object.entries({ xmlns: SVG, width: Math.ceil(width), height: Math.ceil(height), viewBox: `0 0 ${Math.ceil(width)} ${Math.ceil(height)}` })) copy.setAttribute(key, value);
    const rules = [...document.styleSheets].flatMap(sheet => [...sheet.cssRules]).map(rule => rule.cssText).filter(text => /^:root|prefers-color|\.(item|line|link|exchange|shape)/.test(text));
    copy.prepend(svg("style", {}, rules.join("\n") + "\nsvg { background: var(--drawing); }"));
    return new XMLSerializer().serializeToString(copy);
  }
  save() {
    const address = URL.createObjectURL(new Blob([this.image()], { type: "image/svg+xml" }));
    make("a", { href: address, download: document.title.split(" ")[0] + ".svg" }).click();
    URL.revokeObjectURL(address);
  }
  fit(most = 1.1) {
    const { width, height } = this.svg.getBoundingClientRect();
    if (!width) return;
    const whole = Math.min((width - 20) / this.extent.width, (height - 16) / this.extent.height);
    const scale = Math.min(most, Math.max(whole, 0.4));  /* names stay legible */
    this.at = { scale, x: Math.max(10, (width - this.extent.width * scale) / 2), y: 8 };
    this.move();
  }
  zoom(factor, x, y) {
    const { width, height } = this.svg.getBoundingClientRect();
    x = x ?? width / 2; y = y ?? height / 2;
    const scale = Math.min(4, Math.max(0.02, this.at.scale * factor));
    this.at = { scale, x: x - (x - this.at.x) * scale / this.at.scale, y: y - (y - this.at.y) * scale / this.at.scale };
    this.move();
  }
  key(event) {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    const zoom = { "+": 1.25, "=": 1.25, "-": 0.8 }[event.key];
    if (step) this.choose(...step);
    else if (zoom) this.zoom(zoom);
    else if (event.key === "0") this.fit();
    else if (event.key === "Enter" && this.selected) { this.toggle(this.selected); }
    else if (event.key === "Escape" && this.selected) { const above = this.selected.parent; if (above && above !== this.tree.root) { this.select(above); this.toggle(above); } else this.select(null); }
    else return;
    event.preventDefault();
  }
  /* Select the nearest item to the left, right, top or bottom of the selected one. */
  choose(x, y) {
    const middle = box => [box.x + box.width / 2, box.y + SIZE.height / 2];
    const own = this.selected && this.boxes.get(this.selected), from = own ? middle(own) : [this.extent.width / 2, 0];
    let best = null, least = Infinity;
    for (const [item, box] of this.boxes) {
      if (item === this.selected) continue;
      const [dx, dy] = [middle(box)[0] - from[0], middle(box)[1] - from[1]], along = dx * x + dy * y, across = Math.abs(dx * y) + Math.abs(dy * x);
      if (own && along <= 1) continue;
      if (along + 2 * across < least) { least = along + 2 * across; best = item; }
    }
    if (best) { this.select(best); this.center(best); }
  }
  listen() {
    this.svg.addEventListener("keydown", event => this.key(event));
    let from = null;
    this.svg.addEventListener("pointerdown", event => { from = { x: event.clientX - this.at.x, y: event.clientY - this.at.y, sx: event.clientX, sy: event.clientY }; this.dragged = false; });
    window.addEventListener("pointermove", event => {
      if (!from) return;
      if (Math.abs(event.clientX - from.sx) + Math.abs(event.clientY - from.sy) > 4) this.dragged = true;
      if (!this.dragged) return;
      this.at.x = event.clientX - from.x; this.at.y = event.clientY - from.y; this.move();
    });
    window.addEventListener("pointerup", () => { from = null; });
    this.svg.addEventListener("click", () => { if (!this.dragged && this.selected) { this.select(null); } });
    this.svg.addEventListener("wheel", event => {
      event.preventDefault();
      const box = this.svg.getBoundingClientRect();
      this.zoom(Math.exp(-event.deltaY * 0.0015), event.clientX - box.left, event.clientY - box.top);
    }, { passive: false });
  }
}

/* CPU:0, CPU:1, ..., CPU:7 in short. */
function shortList(text) { const some = text.split(", "); return some.length > 3 ? `${some[0]} … ${some[some.length - 1]} (${some.length})` : text; }
function swatch(colour) { const element = make("i", { class: "swatch" }); element.style.background = colour; return element; }
const tint = colour => colour.startsWith("var(") ? colour : `color-mix(in srgb, ${colour} 24%, var(--face))`;
const HEAT = { time: "seconds", memory: "bytes" };
function arrowheads() {
  const defs = svg("defs");
  for (const [id, colour] of [["head", "var(--wire)"], ["head-exchanged", "var(--exchange)"], ["head-in", "#1c7ed6"], ["head-out", "#7048e8"]]) {
    const marker = svg("marker", { id, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 8, markerHeight: 8, orient: "auto", markerUnits: "userSpaceOnUse" });
    marker.append(svg("path", { d: "M0,0L8,4L0,8z", style: "fill: " + colour }));
    defs.append(marker);
  }
  return defs;
}
