"use strict";
/* The name scopes of a state as a tree that folds; what has too many children is grouped until it has few.

   layer_0/MatMul, layer_0/Add, loss      layer_0 (2)   loss
   add, add_1, ..., add_20                add_* (21)                        a series, where there are many
   node_0 ... node_99999                  node_0 ... node_2499 (2,500) ...  pieces, in the order of the graph  */
const MAX_ITEMS = 40;

class Item {
  constructor(key, label, parent) { this.key = key; this.label = label; this.parent = parent; this.ids = null; }
  get isLeaf() { return false; }
}
class Leaf extends Item {
  constructor(id, label, parent) { super("#" + id, label, parent); this.id = id; }
  get isLeaf() { return true; }
  get count() { return 1; }
  eachId(visit) { visit(this.id); }
}
class Scope extends Item {
  constructor(key, label, parent) { super(key, label, parent); this.children = new Map(); this.leaves = []; this.count = 0; this._items = null; }
  eachId(visit) { for (const leaf of this.leaves) visit(leaf); for (const child of this.children.values()) child.eachId(visit); }
  /* What is drawn in the scope when it is open. */
  items(tree) {
    if (!this._items) {
      const scopes = [...this.children.values()].map(child => { const one = child.only(); one.parent = this; return one; });
      const leaves = this.leaves.filter(id => tree.shows(id)).map(id => new Leaf(id, lastName(tree.state.names[id]), this));
      for (const leaf of leaves) tree.leafOf.set(leaf.id, leaf);
      this._items = grouped(this, [...scopes, ...leaves], tree);
    }
    return this._items;
  }
  /* A scope that holds nothing but one other scope is drawn as that one. */
  only() {
    let scope = this, label = this.label;
    while (!scope.leaves.length && scope.children.size === 1) { scope = scope.children.values().next().value; label += "/" + scope.label; }
    scope.label = label;
    return scope;
  }
}
class Group extends Item {
  constructor(key, label, parent, members) {
    super(key, label, parent);
    this.members = members;
    this.count = 0;
    for (const member of members) { member.parent = this; this.count += member.count; }
  }
  eachId(visit) { for (const member of this.members) member.eachId(visit); }
  items(tree) { if (!this._items) this._items = grouped(this, this.members, tree, true); return this._items; }
}

const DEEPEST = 60;
/* The scopes of a name, as far as they are drawn inside each other. */
function scopeName(name) {
  let end = -1;
  for (let depth = 0; depth < DEEPEST; depth++) { const next = name.indexOf("/", end + 1); if (next < 0) break; end = next; }
  return end < 0 ? "" : name.slice(0, end);
}
const lastName = name => name.slice(name.lastIndexOf("/") + 1) || name;
const base = label => label.replace(/_?\d+$/, "");

function grouped(parent, items, tree, again = false) {
  if (items.length <= MAX_ITEMS) return items;
  let result = items;
  if (!again) {
    const series = new Map();
    for (const item of items) {
      const kind = (item.isLeaf ? tree.state.text(item.id, "op") : "") + "\n" + base(item.label);
      if (!series.has(kind)) series.set(kind, []);
      series.get(kind).push(item);
    }
    result = [...series].map(([kind, some]) => some.length < 4 ? some
      : [new Group(parent.key + "\n*" + kind, base(some[0].label) + "_*", parent, some)]).flat();
  }
  if (result.length <= MAX_ITEMS) return result;
  if (!again && result.length > 1) {  /* leaves that stand alone are told apart by their op */
    const ops = new Map();
    for (const item of result) if (item.isLeaf) { const op = tree.state.text(item.id, "op"); if (!ops.has(op)) ops.set(op, []); ops.get(op).push(item); }
    const many = [...ops].filter(([, some]) => some.length >= 4);
    if (many.length) {
      const taken = new Set(many.flatMap(([, some]) => some));
      result = [...result.filter(item => !taken.has(item)), ...many.map(([op, some]) => new Group(parent.key + "\n=" + op, op, parent, some))];
    }
  }
  if (result.length <= MAX_ITEMS) return result;
  const size = Math.max(Math.ceil(result.length / MAX_ITEMS), Math.min(MAX_ITEMS, Math.ceil(Math.sqrt(result.length))));
  const pieces = [];
  for (let i = 0; i < result.length; i += size) {
    const some = result.slice(i, i + size);
    pieces.push(some.length === 1 ? some[0]
      : new Group(parent.key + "\n" + i, some[0].label + " … " + some[some.length - 1].label, parent, some));
  }
  return pieces;
}

class Tree {
  constructor(state, { constants = false, bookkeeping = false } = {}) {
    this.state = state;
    this.constants = constants;
    this.bookkeeping = bookkeeping;
    this.leafOf = new Map();
    this.root = new Scope("", "", null);
    this.scopeOf = new Map();
    const scopes = new Map([["", this.root]]);
    const byName = new Map();
    const find = path => {
      let scope = scopes.get(path);
      if (scope) return scope;
      const cut = path.lastIndexOf("/");
      const parent = find(cut < 0 ? "" : path.slice(0, cut));
      scope = new Scope(path, path.slice(cut + 1), parent);
      scopes.set(path, scope);
      parent.children.set(scope.label, scope);
      return scope;
    };
    for (const id of state.ids) {
      if (!bookkeeping && BOOKKEEPING.test(state.names[id].replace(/^replica_\*\//, ""))) continue;
      const scope = find(scopeName(state.names[id]));
      scope.leaves.push(id);
      this.scopeOf.set(id, scope);
      for (let one = scope; one; one = one.parent) one.count++;
    }
    for (const scope of scopes.values()) {  /* the node `loss` stands in the scope `loss` */
      if (!scope.leaves.length || !scope.children.size) continue;
      scope.leaves = scope.leaves.filter(id => {
        const own = scope.children.get(lastName(state.names[id]));
        if (own) { own.leaves.unshift(id); own.count++; this.scopeOf.set(id, own); }
        return !own;
      });
    }
  }
  shows(id) { return this.constants || this.state.text(id, "op") !== "Const"; }
  /* From the outermost scope to the node: the items that have to be open to see it, and it. */
  pathTo(id) {
    if (!this.scopeOf.has(id)) return [];
    for (const scope of this.chain(id))
      if (scope === this.root || scope.leaves.length || scope.children.size !== 1) scope.items(this);
    const leaf = this.leafOf.get(id);
    const path = [];
    for (let item = leaf || this.scopeOf.get(id).only(); item && item !== this.root; item = item.parent) path.unshift(item);
    return path;
  }
  /* The scopes of a node by its name, outermost first; their items are made on the way, which sets their parents. */
  chain(id) {
    const found = [this.root];
    const name = this.state.names[id];
    let scope = this.root, at = 0;
    for (;;) {
      const cut = name.indexOf("/", at);
      const part = cut < 0 ? name.slice(at) : name.slice(at, cut);
      const next = scope.children.get(part);
      if (!next) break;
      found.push(next);
      scope = next;
      if (cut < 0) break;
      at = cut + 1;
    }
    return found;
  }
}
