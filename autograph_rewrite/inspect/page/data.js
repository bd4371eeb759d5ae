"use strict";
/* The data of the page: each part is parsed when somebody asks for it first. */
const Data = (() => {
  const parsed = new Map();
  function get(name) {
    if (!parsed.has(name)) {
      const tag = document.getElementById("data-" + name);
      parsed.set(name, tag ? JSON.parse(tag.textContent) : null);
      if (tag) tag.textContent = "";
    }
    return parsed.get(name);
  }
  /* One step, with the places where each node's inputs and controls begin. */
  function step(index) {
    const found = get("step-" + index);
    if (!found.input_starts) {
      found.input_starts = starts(found.input_counts, 2);
      found.control_starts = starts(found.control_counts, 1);
    }
    return found;
  }
  function starts(counts, width) {
    const result = new Int32Array(counts.length + 1);
    for (let i = 0; i < counts.length; i++) result[i + 1] = result[i] + width * counts[i];
    return result;
  }
  return { get, step, graph: () => get("graph") };
})();

/* The graph behind one pass: of each node, which step wrote its row last, and where. */
class State {
  constructor(last) {
    this.last = last;
    this.names = Data.graph().names;
    this.strings = Data.graph().strings;
    const count = this.names.length;
    this.step = new Int16Array(count).fill(-1);
    this.row = new Int32Array(count);
    for (let index = 0; index <= last; index++) {
      const found = Data.step(index);
      const ids = found.id;
      for (let i = 0; i < ids.length; i++) { this.step[ids[i]] = index; this.row[ids[i]] = i; }
      for (const id of found.drop) this.step[id] = -1;
    }
  }
  has(id) { return id < this.step.length && this.step[id] >= 0; }
  get ids() {
    if (!this._ids) { this._ids = []; for (let id = 0; id < this.step.length; id++) if (this.step[id] >= 0) this._ids.push(id); }
    return this._ids;
  }
  number(id, column) { return Data.step(this.step[id])[column][this.row[id]]; }
  text(id, column) { return this.strings[this.number(id, column)]; }
  copies(id) { return this.number(id, "copies"); }
  /* Producers and output numbers in turn. */
  inputs(id) {
    const found = Data.step(this.step[id]), at = this.row[id];
    return found.inputs.slice(found.input_starts[at], found.input_starts[at + 1]);
  }
  controls(id) {
    const found = Data.step(this.step[id]), at = this.row[id];
    return found.controls.slice(found.control_starts[at], found.control_starts[at + 1]);
  }
  eachInput(id, visit) {
    const found = Data.step(this.step[id]), at = this.row[id];
    for (let i = found.input_starts[at]; i < found.input_starts[at + 1]; i += 2) visit(found.inputs[i], found.inputs[i + 1]);
  }
  eachControl(id, visit) {
    const found = Data.step(this.step[id]), at = this.row[id];
    for (let i = found.control_starts[at]; i < found.control_starts[at + 1]; i++) visit(found.controls[i]);
  }
  /* The readers of a node's values. */
  users(id) {
    if (!this._users) {
      this._users = new Map();
      for (const reader of this.ids) this.eachInput(reader, producer => {
        const list = this._users.get(producer);
        if (!list) this._users.set(producer, [reader]); else if (list[list.length - 1] !== reader) list.push(reader);
      });
    }
    return this._users.get(id) || [];
  }
}

/* What happened to each node from one state to another. */
const SAME = 0, ADDED = 1, REMOVED = 2, REWIRED = 3;
const CHANGES = ["unchanged", "added", "removed", "rewired"];
function changesBetween(before, after) {
  const result = new Uint8Array(before.names.length);
  for (let id = 0; id < result.length; id++) {
    const was = before.has(id), is = after.has(id);
    if (was && !is) result[id] = REMOVED;
    else if (!was && is) result[id] = ADDED;
    else if (was && is && !sameInputs(before, after, id)) result[id] = REWIRED;
  }
  return result;
}
function sameInputs(before, after, id) {
  if (before.step[id] === after.step[id] && before.row[id] === after.row[id]) return true;
  const a = before.inputs(id), b = after.inputs(id), c = before.controls(id), d = after.controls(id);
  return a.length === b.length && c.length === d.length && a.every((x, i) => x === b[i]) && c.every((x, i) => x === d[i]);
}

/* The reshards of each node's values, by the number of the node. */
const Reshards = (() => {
  let found = null;
  function of(id) {
    if (!found) {
      found = new Map();
      const numbers = new Map(Data.graph().names.map((name, number) => [name, number]));
      for (const edge of [...(Data.get("reshards") || []), ...(Data.get("model_edges") || [])]) {
        const number = numbers.get(edge.value.replace(/:\d+$/, ""));
        if (number === undefined) continue;
        if (!found.has(number)) found.set(number, []);
        found.get(number).push(edge);
      }
    }
    return found.get(id) || [];
  }
  /* Whether replicas exchange a value of the node. */
  const isExchanged = id => of(id).some(edge => edge.kind !== "local");
  return { of, isExchanged };
})();

/* Small helpers: everything that stands in a page is set as text. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== null && value !== false) element.setAttribute(key, value);
  }
  for (const child of children.flat(Infinity)) if (child !== null && child !== undefined) element.append(child);
  return element;
}
function bytes(count) {
  if (count === null || count === undefined) return "?";
  for (const [unit, name] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]])
    if (count >= unit) return digits(count / unit) + " " + name;
  return several(Math.round(count), "byte");
}
/* Three digits that count, without an exponent: the rules are those of diagnostics/amounts.py. */
const digits = value => value >= 99.95 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
const percent = share => share < 0.001 ? "< 0.1 %" : (100 * share).toPrecision(3) === "100" && share < 1 ? "> 99.9 %" : String(Number((100 * share).toPrecision(3))) + " %";
function seconds(value) {
  if (!value) return "0 s";
  if (value >= 1) return digits(value) + " s";
  if (value >= 1e-3) return digits(value * 1e3) + " ms";
  return digits(value * 1e6) + " µs";
}
const several = (count, what) => count.toLocaleString("en") + " " + what + (count === 1 ? "" : "s");
