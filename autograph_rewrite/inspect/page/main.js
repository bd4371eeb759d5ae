"use strict";
/* Opens views when they are asked for; the search, the slider over the passes, and the address: #view, #graph/PASS, #graph/PASS/NODE. */
const VIEWS = [["overview", "Overview"], ["cost", "Cost"], ["graph", "Graph"], ["compare", "Before / after"], ["variables", "Variables"], ["communication", "Communication"], ["timeline", "Timeline"], ["memory", "Memory"]];
const Page = (() => {
  const opened = new Set(), states = new Map();
  const steps = Data.graph().steps;
  let routing = false, graph = null, before = null, after = null, listChanges = () => {}, current = steps.length - 1, constants = false, left = 0, right = steps.length - 1;

  function state(index) { if (!states.has(index)) states.set(index, new State(index)); return states.get(index); }
  const byId = id => document.getElementById(id);

  function show(name) {
    for (const [view] of VIEWS) byId(view).classList.toggle("shown", view === name);
    for (const tab of byId("tabs").children) tab.setAttribute("aria-selected", tab.dataset.view === name);
    if (!opened.has(name)) { opened.add(name); OPEN[name](byId(name)); }
    if (name === "compare" && before) { fitBoth(); }
    address(name);
  }
  /* Keep where the reader is, so that a link leads there and the back button leads here. */
  function address(view) {
    const parts = [view];
    if (view === "graph" && graph) {
      const { selected } = graph;
      if (current !== steps.length - 1 || selected) parts.push(steps[current].pass);
      if (selected && selected.isLeaf) parts.push(graph.state.names[selected.id]);
    }
    const wanted = "#" + parts.map(encodeURIComponent).join("/");
    if (location.hash !== wanted && !routing) history.pushState(null, "", wanted);
  }
  function route() {
    const [view, name, node] = location.hash.slice(1).split("/").map(decodeURIComponent);
    routing = true;
    try {
      show(VIEWS.some(([one]) => one === view) ? view : "overview");
      if (view === "graph") {
        const index = steps.findIndex(step => step.pass === name);
        if (name !== undefined && index >= 0 && index !== current) go.pass(index);
        const id = node === undefined ? -1 : Data.graph().names.indexOf(node);
        if (id >= 0 && graph.state.has(id)) graph.reveal(id); else if (node === undefined && graph.selected) graph.select(null);
      }
    } finally { routing = false; }
  }
  const OPEN = { overview: showOverview, cost: showCost, graph: openGraph, compare: openCompare, variables: showVariables, communication: showCommunication, timeline: showTimeline, memory: showMemory };

  function colours(views, names) {
    return make("label", {}, "Colour ", make("select", { onchange: event => { for (const view of views()) { view.colour = event.target.value; view.draw(); } } },
      names.map(([value, text]) => make("option", { value }, text))));
  }
  const said = index => { const step = steps[index]; return `${several(step.nodes, "node")}, copies counted once` + (index ? `: +${step.added.toLocaleString("en")} −${step.removed.toLocaleString("en")}, ${step.rewired.toLocaleString("en")} rewired` : ""); };

  function openGraph() {
    graph = new GraphView(byId("pane-graph"), { open: new Set(), onselect: (item, view) => { details(byId("details"), item, view); if (graph) address("graph"); } });
    const label = make("b", { id: "pass-name" }), note = make("span", { class: "small", id: "pass-note" });
    const slider = make("input", { type: "range", id: "slider", min: 0, max: steps.length - 1, value: current, "aria-label": "Pass", oninput: event => pass(+event.target.value) });
    function pass(index) {
      current = index;
      slider.value = index;
      const selected = graph.selected && graph.selected.isLeaf ? graph.selected.id : null;
      label.textContent = index ? "after " + steps[index].pass : steps[index].pass;
      note.textContent = said(index);
      graph.selected = null;
      graph.show(state(index), { constants, changes: index ? changesBetween(state(index - 1), state(index)) : null });
      if (selected !== null && graph.state.has(selected)) graph.select(graph.visible(selected) || null); else details(byId("details"), null, graph);
    }
    byId("graph-bar").append(
      steps.length > 1 ? make("span", { class: "passes-control" }, make("button", { title: "Previous pass", onclick: () => pass(Math.max(0, current - 1)) }, "◀"), slider, make("button", { title: "Next pass", onclick: () => pass(Math.min(steps.length - 1, current + 1)) }, "▶")) : null,
      label, note, make("span", { class: "space" }),
      colours(() => [graph], [["device", "device"], ["placement", "placement"], ["pass", "pass that made it"], ["span", "how often it runs"], ["change", "change by this pass"], ...(Costs.known ? [["time", "predicted time"], ["memory", "memory at the peak"]] : [])]),
      make("label", {}, make("input", { type: "checkbox", onchange: event => { constants = event.target.checked; graph.show(state(current), { constants, changes: graph.changes }); } }), " constants"),
      make("label", { title: "save, init and what counts the batch" }, make("input", { type: "checkbox", id: "bookkeeping", onchange: event => { graph.bookkeeping = event.target.checked; graph.show(state(current), { constants, changes: graph.changes }); } }), " bookkeeping"),
      make("label", {}, make("input", { type: "checkbox", checked: "", onchange: event => { graph.shapes = event.target.checked; graph.draw(); } }), " shapes"),
      make("button", { onclick: () => { graph.open.clear(); graph.refold(); graph.fit(); } }, "Fold all"));
    go.pass = pass;
    pass(current);
    graph.fit();
  }

  function openCompare() {
    const open = new Set();
    const mirror = other => item => { other().layout.kept.clear(); other().draw(); };
    const onselect = (item, view) => {
      if (!item) { listChanges(); return; }
      details(byId("changes"), item, view);
      byId("changes").prepend(make("button", { onclick: () => view.select(null) }, "Back to what differs"));
    };
    const follow = other => at => { if (other()) { other().at = { ...at }; other().move(false); } };  /* both panes show the same place */
    before = new GraphView(byId("pane-before"), { open, onselect, ontoggle: mirror(() => after), onmove: follow(() => after) });
    after = new GraphView(byId("pane-after"), { open, onselect, ontoggle: mirror(() => before), onmove: follow(() => before) });
    before.colour = after.colour = "change";
    const choose = (value, change) => make("select", { onchange: event => { change(+event.target.value); compare(); } }, steps.map((step, index) => make("option", { value: index, selected: index === value ? "" : null }, (index ? "after " : "") + step.pass)));
    byId("compare-bar").append(make("label", {}, "Before ", choose(left, index => { left = index; })), make("label", {}, "After ", choose(right, index => { right = index; })), make("span", { class: "small", id: "compare-note" }), make("span", { class: "space" }), make("button", { onclick: () => { open.clear(); before.refold(); after.refold(); fitBoth(); } }, "Fold all"));
    compare();
  }
  function fitBoth() {  /* one scale for both, so that what is the same looks the same */
    before.fit(); after.fit();
    const least = Math.min(before.at.scale, after.at.scale);
    for (const view of [before, after]) view.fit(least);
  }
  function compare() {
    const a = state(left), b = state(right), changes = changesBetween(a, b);
    before.selected = after.selected = null;
    before.show(a, { changes }); after.show(b, { changes });
    fitBoth();
    before.title.textContent = `${left ? "after " : ""}${steps[left].pass}: ${steps[left].nodes.toLocaleString("en")} nodes`;
    after.title.textContent = `after ${steps[right].pass}: ${steps[right].nodes.toLocaleString("en")} nodes`;
    const count = kind => changes.reduce((sum, one) => sum + (one === kind), 0).toLocaleString("en");
    byId("compare-note").textContent = `${count(ADDED)} added, ${count(REMOVED)} removed, ${count(REWIRED)} rewired; copies of one node are one node`;
    listChanges = () => changeList(byId("changes"), a, b, changes, (id, kind) => { if (kind !== ADDED) before.reveal(id); if (kind !== REMOVED) after.reveal(id); (kind === ADDED ? before : after).refold(); });
    listChanges();
  }

  function search(text) {
    const list = byId("found"), wanted = text.toLowerCase();
    if (!wanted) { list.hidden = true; return []; }
    const now = state(current), found = [];
    for (const id of now.ids) { if (now.names[id].toLowerCase().includes(wanted)) found.push(id); if (found.length === 60) break; }
    list.hidden = false;
    list.replaceChildren(...found.map(id => make("li", { onclick: () => go(id) }, make("b", {}, now.text(id, "op")), " " + now.names[id])),
      found.length ? (found.length === 60 ? make("li", { class: "small" }, "... and more") : "") : make("li", { class: "small" }, "No node of this state has this in its name."));
    return found;
  }
  function go(id) { byId("found").hidden = true; show("graph"); graph.reveal(id); }

  function start() {
    byId("title").textContent = document.title.replace(/ - autograph-rewrite$/, "");
    byId("tabs").append(...VIEWS.map(([view, text]) => make("button", { role: "tab", "data-view": view, onclick: () => show(view) }, text)));
    const input = byId("search-text");
    input.addEventListener("input", () => search(input.value));
    input.addEventListener("keydown", event => { if (event.key === "Enter") { const found = search(input.value); if (found.length) go(found[0]); } if (event.key === "Escape") { byId("found").hidden = true; input.blur(); } });
    document.addEventListener("keydown", event => { if (event.key === "/" && !["INPUT", "SELECT"].includes(event.target.tagName)) { event.preventDefault(); input.focus(); } });
    document.addEventListener("click", event => { if (!byId("search").contains(event.target)) byId("found").hidden = true; });
    window.addEventListener("popstate", route);
    window.addEventListener("hashchange", route);
    route();
  }
  return { start, show, search, go, get graph() { return graph; }, get before() { return before; }, get after() { return after; }, pass: index => go.pass(index), state, steps };
})();
Page.start();
