"use strict";
/* Where the time goes: name scopes as a table that folds, the dearest first, with bars; and the cost of each node. */
const Costs = (() => {
  let found = null;
  function all() {
    if (found) return found;
    const cost = Data.get("cost");
    found = { seconds: new Map(), bytes: new Map(), sums: { seconds: 0, bytes: 0 } };
    for (const key of cost ? ["seconds", "bytes"] : [])
      cost.nodes.id.forEach((id, at) => { const value = cost.nodes[key][at]; if (value) { found[key].set(id, value); found.sums[key] += value; } });
    return found;
  }
  /* What the nodes of an item cost together, and which part of everything that is. */
  const of = (item, key) => { let sum = 0; item.eachId(id => { sum += all()[key].get(id) || 0; }); return sum; };
  const share = (item, key) => all().sums[key] ? of(item, key) / all().sums[key] : 0;
  const node = (id, key) => all()[key].get(id) || 0;
  /* The node of a scope that costs most. */
  function dearest(scope) {
    const names = Data.graph().names, seconds = all().seconds;
    let best = null;
    for (const [id, value] of seconds) if (names[id].includes(scope + "/") && (best === null || value > seconds.get(best))) best = id;
    return best;
  }
  return { of, share, node, dearest, get known() { return Boolean(Data.get("cost")); } };
})();
/* The darker, the dearer: of a hundredth something is seen. */
const heat = share => `color-mix(in srgb, #d9480f ${Math.round(100 * Math.min(1, Math.sqrt(share)))}%, var(--node))`;

function showCost(view) {
  const cost = Data.get("cost"), step = Data.get("step");
  if (!cost) { view.append(make("p", { class: "hint" }, Data.get("overview").no_step || "Nothing was simulated: there is no rewrite.")); return; }
  const { scopes } = cost, count = scopes.name.length;
  const keys = ["nodes", "seconds", "exchange_seconds", "exchanged_bytes", "peak_bytes", "measured"];
  const rows = scopes.name.map((name, at) => ({ name, depth: scopes.depth[at], at, children: [], ...Object.fromEntries(keys.map(key => [key, scopes[key][at]])) }));
  const roots = [], path = [];
  for (const row of rows) { path.length = row.depth; (row.depth ? path[row.depth - 1].children : roots).push(row); path.push(row); }
  const sums = Object.fromEntries(keys.map(key => [key, roots.reduce((sum, row) => sum + (row[key] || 0), 0)]));
  const most = Math.max(1e-12, ...cost.layers.map(name => rows.find(row => row.name === name)).filter(Boolean).map(row => row.seconds + row.exchange_seconds));
  const open = new Set(rows.filter(row => cost.layers.some(layer => layer.startsWith(row.name + "/"))));
  const by = { "": null, compute: row => row.seconds, exchange: row => row.exchange_seconds, "handed over": row => row.exchanged_bytes, "memory at the peak": row => row.peak_bytes, measured: row => row.measured || 0 };
  let order = "compute";
  const body = make("tbody"), part = (value, key) => value && sums[key] ? percent(value / sums[key]) : "";
  const columns = [["compute", "seconds", seconds], ["exchange", "exchange_seconds", seconds], ["handed over", "exchanged_bytes", bytes], ["memory at the peak", "peak_bytes", bytes]];
  if (sums.measured) columns.push(["measured", "measured", seconds]);
  function line(row) {
    const label = row.depth ? row.name.slice(row.name.lastIndexOf("/") + 1) : row.name;
    const fold = () => { if (open.has(row)) open.delete(row); else open.add(row); fill(); };
    const name = make("td", { class: "scope-name", title: row.name, tabindex: "0", onclick: fold, onkeydown: event => { if (event.key === "Enter") fold(); } }, (row.children.length ? (open.has(row) ? "▾ " : "▸ ") : "  ") + label);
    name.style.paddingLeft = 10 + 16 * row.depth + "px";
    const id = Costs.dearest(row.name);
    return make("tr", {}, name,
      make("td", { class: "bar-cell" }, bar(Math.min(1, row.seconds / most)), row.exchange_seconds ? bar(Math.min(1, row.exchange_seconds / most)) : null),
      columns.map(([, key, draw]) => [make("td", { class: "number" }, row[key] ? draw(row[key]) : ""), make("td", { class: "number small" }, part(row[key], key))]),
      make("td", { class: "number" }, several(row.nodes, "node")),
      make("td", {}, id === null ? "" : make("a", { href: "#graph", onclick: event => { event.preventDefault(); Page.go(id); } }, "graph")));
  }
  function fill() {
    const shown = [];
    const sorted = some => [...some].sort((a, b) => by[order](b) - by[order](a));
    const walk = some => { for (const row of sorted(some)) { shown.push(line(row)); if (open.has(row)) walk(row.children); } };
    walk(roots);
    body.replaceChildren(...shown);
  }
  const heads = columns.map(([title]) => head(title, () => { order = title; heads.forEach(one => one.classList.toggle("sorted", one.textContent === title)); fill(); }, { class: "number" + (title === order ? " sorted" : ""), colspan: 2 }));
  view.append(make("h2", {}, `Where the time goes: ${seconds(step.step_seconds)} for ${several(step.batch, "example")}, predicted` + (sums.measured ? `; measured ${seconds(Data.get("measured").step_seconds)}` : "")),
    make("ul", { class: "levers" }, cost.levers.map(text => make("li", {}, text))),
    make("div", { class: "legend inline" }, make("span", {}, swatch("var(--fill)"), "compute"), make("span", {}, swatch("var(--exchange)"), "exchange"), make("span", {}, `${several(count, "name scope")}; gradients count with their layer, an exchange with its variable`)),
    make("div", { class: "table" }, make("div", { class: "scroll" }, make("table", { class: "cost" },
      make("thead", {}, make("tr", {}, make("th", {}, "Layer"), make("th", {}, ""), heads, make("th", { class: "number" }, "nodes"), make("th", {}, ""))), body))),
    make("p", { class: "hint" }, "Compute is that of the first device: of a CPU, for how long it would keep all cores busy." + (sums.measured ? " Measured is the time of the typical step per device." : "")));
  fill();
}
