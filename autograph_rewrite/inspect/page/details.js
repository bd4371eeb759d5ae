"use strict";
/* What is known of the selected node or scope; what differs between two states. */
const SHOWN = 40;

function details(panel, item, view) {
  if (!item) { panel.replaceChildren(make("p", { class: "hint" }, "Click a node for its attributes, placement and origin. Double-click a scope, or click its triangle, to open it.")); return; }
  panel.replaceChildren(...(item.isLeaf ? ofNode(item.id, view) : ofScope(item, view)));
  panel.scrollTop = 0;
}

function ofNode(id, view) {
  const state = view.state, name = state.names[id];
  const edges = Reshards.of(id), copies = state.copies(id);
  const made = state.text(id, "pass"), origin = state.text(id, "origin");
  const inputs = [];
  state.eachInput(id, (producer, index) => inputs.push([producer, index]));
  const attributes = state.text(id, "attrs");
  return [
    make("h2", {}, name),
    pairs([
      ["Op", state.text(id, "op")],
      ["Results", state.text(id, "type")],
      ["Placement", state.text(id, "placement") || "not known after this pass"],
      ["Runs", { each: "once per replica and micro-batch", replica: "once per replica" }[state.text(id, "span")] || (copies > 1 ? copies + " copies" : "once")],
      ["Devices", state.text(id, "device") || "left to TensorFlow"],
      ["Predicted", [Costs.node(id, "seconds") ? seconds(Costs.node(id, "seconds")) + " of compute" : "", Costs.node(id, "bytes") ? bytes(Costs.node(id, "bytes")) + " at the peak" : ""].filter(Boolean).join(", ")],
      ["Made by", made ? "pass " + made : "the original graph"],
      ["Origin", origin && origin !== name ? link(origin, view) : ""],
    ]),
    edges.length ? make("h3", {}, "Plan: reshards of its values") : null,
    ...edges.map(edge => make("div", { class: edge.kind === "local" ? "reshard" : "reshard exchanged" },
      make("b", {}, edge.from + " → " + edge.to), " by " + edge.by + ", " + bytes(edge.bytes),
      make("div", { class: "small" }, "for " + edge.for + (edge.bucket ? ", bucket " + edge.bucket : "") + ": " + edge.reason),
      make("div", { class: "small where" }, edge.where))),
    attributes ? make("h3", {}, "Attributes") : null,
    attributes ? pairs(attributes.split("\n").map(line => { const at = line.indexOf("="); return [line.slice(0, at), line.slice(at + 1)]; })) : null,
    ...listed("Inputs", inputs.map(([producer, index]) => [producer, index ? ":" + index : ""]), view),
    ...listed("Waits for", state.controls(id).map(one => [one, ""]), view),
    ...listed("Read by", state.users(id).map(one => [one, ""]), view),
  ].filter(Boolean);
}

function ofScope(item, view) {
  const state = view.state, ops = new Map(), devices = new Map(), placements = new Map(), passes = new Map();
  let exchanged = 0;
  item.eachId(id => {
    for (const [counts, column] of [[ops, "op"], [devices, "device"], [placements, "placement"], [passes, "pass"]]) {
      const text = state.text(id, column);
      counts.set(text, (counts.get(text) || 0) + 1);
    }
    if (Reshards.isExchanged(id)) exchanged++;
  });
  const top = counts => [...counts].sort((a, b) => b[1] - a[1]).slice(0, 12).map(([text, count]) => [text || "(none)", count.toLocaleString("en")]);
  return [
    make("h2", {}, item.label),
    pairs([["Nodes", item.count.toLocaleString("en")], ["Exchanged values", exchanged ? String(exchanged) : ""], ["Predicted", Costs.known ? percent(Costs.share(item, "seconds")) + " of compute, " + percent(Costs.share(item, "bytes")) + " of memory at the peak" : ""]]),
    make("button", { onclick: () => view.toggle(item) }, view.layout.isOpen(item) ? "Fold" : "Open"),
    make("h3", {}, "Ops"), pairs(top(ops)),
    make("h3", {}, "Placements"), pairs(top(placements)),
    make("h3", {}, "Devices"), pairs(top(devices)),
    make("h3", {}, "Made by"), pairs(top(passes).map(([text, count]) => [text === "(none)" ? "the original graph" : text, count])),
  ];
}

function pairs(rows) {
  return make("dl", {}, rows.filter(([, value]) => value).map(([key, value]) => [make("dt", {}, key), make("dd", {}, value)]));
}
function listed(title, some, view) {
  if (!some.length) return [];
  return [make("h3", {}, title + " (" + some.length + ")"),
    make("ul", { class: "names" }, some.slice(0, SHOWN).map(([id, after]) => make("li", {}, link(view.state.names[id], view, id), after)),
      some.length > SHOWN ? make("li", { class: "small" }, "... and " + (some.length - SHOWN) + " more") : null)];
}
function link(name, view, id) {
  const number = id ?? view.state.names.indexOf(name);
  if (number < 0 || !view.state.has(number)) return make("span", {}, name);
  return make("a", { href: "#graph/" + encodeURIComponent(Page.steps[view.state.last].pass) + "/" + encodeURIComponent(name), onclick: event => { event.preventDefault(); view.reveal(number); } }, name);
}

/* The list of what differs, by kind and by the pass that did it. */
function changeList(panel, before, after, changes, reveal) {
  const found = [[], [], [], []];
  for (let id = 0; id < changes.length; id++) if (changes[id]) found[changes[id]].push(id);
  const section = (kind, text) => {
    const some = found[kind], state = kind === REMOVED ? before : after;
    const by = new Map();
    for (const id of some) { const key = kind === ADDED ? state.text(id, "pass") || "?" : ""; if (!by.has(key)) by.set(key, []); by.get(key).push(id); }
    return [make("h3", {}, swatch(CHANGE_COLOURS[kind]), some.length.toLocaleString("en") + " " + text),
      ...[...by].map(([pass, ids]) => make("details", { open: by.size < 3 ? "" : null },
        make("summary", {}, pass ? pass + " (" + ids.length.toLocaleString("en") + ")" : "show"),
        make("ul", { class: "names" }, ids.slice(0, SHOWN).map(id => make("li", {}, make("a", { href: "#", onclick: event => { event.preventDefault(); reveal(id, kind); } }, state.names[id]))),
          ids.length > SHOWN ? make("li", { class: "small" }, "... and " + (ids.length - SHOWN).toLocaleString("en") + " more") : null)))];
  };
  panel.replaceChildren(...section(ADDED, "added"), ...section(REMOVED, "removed"), ...section(REWIRED, "rewired"));
}
