"use strict";
/* The views that are no graph: overview, tables that sort and filter, timeline, memory. */
const ROWS = 400;

function table(columns, rows, { filter = true, note = "" } = {}) {
  columns = columns.filter(column => rows.some(row => !["", null, undefined].includes(column.of(row))));
  let sorted = null, up = false, text = "";
  const body = make("tbody"), count = make("span", { class: "small" });
  const heads = columns.map((column, index) => head(column.title, () => { up = sorted === index ? !up : !column.number; sorted = index; fill(); }, { class: column.number ? "number" : "" }));
  function fill() {
    let shown = rows;
    if (text) shown = shown.filter(row => columns.some(column => String(column.of(row) ?? "").toLowerCase().includes(text)));
    if (sorted !== null) {
      const key = columns[sorted].key || columns[sorted].of;
      shown = [...shown].sort((a, b) => { const x = key(a) ?? -Infinity, y = key(b) ?? -Infinity; return (x < y ? -1 : x > y ? 1 : 0) * (up ? 1 : -1); });
    }
    heads.forEach((one, index) => { one.classList.toggle("sorted", index === sorted); one.setAttribute("aria-sort", index !== sorted ? "none" : up ? "ascending" : "descending"); });
    body.replaceChildren(...shown.slice(0, ROWS).map(row => make("tr", {}, columns.map(column => {
      const value = column.draw ? column.draw(row) : column.of(row);
      return make("td", { class: (column.number ? "number" : "") + (column.wide ? " wide" : ""), title: column.wide ? String(column.of(row) ?? "") : null }, value ?? "");
    }))));
    count.textContent = shown.length > ROWS ? ` ${ROWS} of ${shown.length.toLocaleString("en")} rows: filter to see others` : ` ${several(shown.length, "row")}`;
  }
  fill();
  return make("div", { class: "table" },
    make("div", { class: "table-bar" }, filter ? make("input", { type: "search", placeholder: "Filter", oninput: event => { text = event.target.value.toLowerCase(); fill(); } }) : null, count, note ? make("span", { class: "small" }, note) : null),
    make("div", { class: "scroll" }, make("table", {}, make("thead", {}, make("tr", {}, heads)), body)));
}

/* A heading that sorts, by the pointer or by Enter. */
function head(title, sort, attributes) {
  return make("th", { ...attributes, tabindex: "0", onclick: sort, onkeydown: event => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sort(); } } }, title);
}
/* Whether the rewrite computes what one device does, as `verify` has found; or that nobody has looked. */
function verdict() {
  const found = Data.get("verified"), box = (kind, title, ...rest) => make("div", { class: "verdict " + kind }, make("b", {}, title), rest);
  if (!Data.get("overview").rewrite) return null;
  if (!found) return box("", "Not verified.", "autograph-rewrite report --verify trains some steps of both graphs, and writes here whether they agree.");
  const row = one => make("tr", {}, make("td", { class: "number" }, typeof one.error === "number" ? one.error.toExponential(1) : one.error), make("td", {}, one.kind), make("td", {}, one.name), make("td", {}, one.ok ? (one.noise ? "rounding" : "") : "differs at " + one.where));
  const open = found.notes.filter(text => text.startsWith("not covered")), others = found.notes.filter(text => !text.startsWith("not covered"));
  return box(found.ok ? "good" : "bad", found.ok ? "Verified:" : "Not the same:", found.text.split("\n")[0],
    make("details", {}, make("summary", {}, "Errors by variable, the certificate, what was not looked at"),
      make("table", { class: "passes" }, found.rows.slice(0, 200).map(row)),
      make("p", {}, open.length ? "The certificate followed every pass, and could not check:" : "The certificate followed every pass: each leaves a graph that computes what the original does."),
      make("ul", {}, open.map(text => make("li", {}, text.replace("not covered by the certificate: ", "")))),
      make("p", {}, "Outside of it: loading, kernels of accelerators, and other feeds than those of these steps."),
      make("ul", {}, others.map(text => make("li", {}, text)))));
}

function card(value, label, small, kind) { return make("div", { class: "card " + (kind || "") }, make("b", {}, value), make("span", {}, label), small ? make("small", {}, small) : null); }

function showOverview(view) {
  const { graph, rewrite, notes } = Data.get("overview"), step = Data.get("step");
  const cards = [card(graph.nodes.toLocaleString("en"), "nodes in the original graph", several(graph.variables, "variable") + (graph.slots ? ", " + several(graph.slots, "slot") : ""))];
  if (rewrite) {
    const share = rewrite.coverage.share;
    cards.unshift(card(rewrite.replicas + (rewrite.micro > 1 ? " × " + rewrite.micro : ""), rewrite.micro > 1 ? "replicas × micro-batches" : "replicas", rewrite.mode + " variables"),
      card((share === 1 ? "100" : Math.min(99.99, share * 100).toFixed(2)) + " %", "of the step's FLOPs divided", digits(rewrite.coverage.flops / 1e9) + " GFLOP", share < 0.9 ? "warn" : "good"));
    if (step) cards.push(card(seconds(step.step_seconds), "predicted step", step.batch.toLocaleString("en") + " examples, " + seconds(step.exposed_seconds) + " only communicate"), card(bytes(step.peak_bytes), "peak memory of a device", "variables " + bytes(Math.max(...step.devices.map(one => one.variable_bytes)))));
    cards.push(card(bytes(rewrite.exchanged_bytes), "handed over by each member", several(rewrite.exchanges, "value") + " in " + several(Data.get("exchanges").length, "exchange") + ", " + several(rewrite.batch, "example")));
    cards.push(card(rewrite.nodes_after.toLocaleString("en"), "nodes that run, all copies counted", rewrite.seconds ? "rewritten in " + seconds(rewrite.seconds) : ""));
  }
  const told = [];
  for (const text of graph.warnings) told.push(["warning", text]);
  if (rewrite) {
    for (const note of rewrite.inexact) told.push(["not exact", `${note.op} '${note.node}': ${note.text}`]);
    for (const one of rewrite.coverage.whole) told.push(["whole", `${one.op} '${one.node}': ${one.reason}`]);
    for (const note of rewrite.notes) told.push(["note", `${note.op} '${note.node}': ${note.text}`]);
    for (const note of rewrite.plan_notes) told.push(["plan", note]);
  }
  for (const text of notes) told.push(["note", text]);
  const cost = Data.get("cost");
  view.append(...[verdict(), make("div", { class: "cards" }, cards), cost && cost.levers.length ? make("h2", {}, "Where the time goes") : null, cost ? make("ul", { class: "levers" }, cost.levers.map(text => make("li", {}, text))) : null].filter(Boolean),
    make("div", { class: "columns" },
      make("div", {}, make("h2", {}, "Warnings and notes"),
        told.length ? make("ul", { class: "told" }, told.slice(0, 200).map(([kind, text]) => make("li", {}, make("span", { class: "tag " + kind.replace(" ", "-") }, kind), text))) : make("p", { class: "hint" }, "Nothing to note: what depends on the batch is divided, and everything is exact."),
        rewrite ? [make("h2", {}, "In sentences"), make("pre", {}, rewrite.text)] : [make("h2", {}, "Inputs and outputs"), make("pre", {}, [...graph.inputs.map(one => "input  " + one), ...graph.outputs.map(one => "output " + one)].join("\n"))]),
      make("div", {}, rewrite && rewrite.ranking.length ? [make("h2", {}, "Plans that were compared"), rankingTable(rewrite.ranking)] : null, rewrite ? [make("h2", {}, "Passes"), passTable(rewrite)] : null, make("h2", {}, "Most frequent ops"), bars(graph.ops))));
}
function rankingTable(rows) {
  return table([
    { title: "Rank", of: row => row.rank, number: true },
    { title: "Plan", of: row => row.plan, wide: true },
    { title: "Step", of: row => row.milliseconds, draw: row => seconds(row.milliseconds / 1e3), number: true },
    { title: "Memory", of: row => row.mebibytes, draw: row => bytes(row.mebibytes * 2 ** 20), number: true },
    { title: "Moved", of: row => row.moved, draw: row => bytes(row.moved * 2 ** 20), number: true },
    { title: "Verdict", of: row => row.verdict },
  ], rows, { filter: false });
}
function passTable(rewrite) {
  const most = Math.max(...rewrite.passes.map(one => one.seconds));
  return make("table", { class: "passes" }, rewrite.passes.map(one => make("tr", {}, make("td", {}, one.pass), make("td", { class: "bar-cell" }, bar(one.seconds / most)), make("td", { class: "number" }, seconds(one.seconds)), make("td", { class: "number" }, (one.added ? "+" + one.added : "") + (one.removed ? " −" + one.removed : "")))));
}
function bar(share, colour) { const element = make("i", { class: "bar-fill" }); element.style.width = Math.max(1, share * 100) + "%"; if (colour) element.style.background = colour; return element; }
function bars(rows) {
  const most = Math.max(1, ...rows.map(([, count]) => count));
  return make("table", { class: "passes" }, rows.map(([name, count]) => make("tr", {}, make("td", {}, name), make("td", { class: "bar-cell" }, bar(count / most)), make("td", { class: "number" }, count.toLocaleString("en")))));
}

function showVariables(view) {
  const rows = Data.get("variables");
  const sum = key => rows.reduce((total, row) => total + (row[key] || 0), 0);
  view.append(make("h2", {}, `${several(rows.length, "variable")}, ${bytes(sum("bytes"))}, and ${bytes(sum("slot_bytes"))} of slots beside them`),
    table([
      { title: "Variable", of: row => row.name, wide: true },
      { title: "Type", of: row => row.type },
      { title: "Shape", of: row => row.shape },
      { title: "Bytes", of: row => row.bytes, draw: row => bytes(row.bytes), number: true },
      { title: "Trained", of: row => row.trained === null ? "?" : row.trained ? "yes" : "no" },
      { title: "Lives", of: row => row.residence },
      { title: "Shards", of: row => row.shards.join(" + ") },
      { title: "Devices", of: row => row.devices.join(", "), draw: row => shortened(row.devices), wide: true },
      { title: "Slots", of: row => row.slots.map(slot => slot.name).join(", "), draw: row => row.slots.map(slot => lastName(slot.name)).join(", ") },
      { title: "Slot bytes", of: row => row.slot_bytes, draw: row => row.slot_bytes ? bytes(row.slot_bytes) : "", number: true },
    ], rows));
}
function shortened(devices) { return devices.length > 3 ? `${devices[0]} … ${devices[devices.length - 1]} (${devices.length})` : devices.join(", "); }

function showCommunication(view) {
  const rows = Data.get("exchanges"), { batch } = Data.get("overview");
  if (!rows.length) { view.append(make("p", { class: "hint" }, "No replicas exchange anything in this graph.")); return; }
  const total = rows.reduce((sum, row) => sum + (row.bytes || 0), 0), most = Math.max(1, ...rows.map(row => row.bytes || 0));
  view.append(make("h2", {}, `${several(rows.length, "exchange")}: ${bytes(total)} handed over by each member in a step${batch ? " of " + batch.toLocaleString("en") + " examples" : ""}`),
    table([
      { title: "Order", of: row => row.order, number: true },
      { title: "Op", of: row => row.op },
      { title: "Value", of: row => row.value, wide: true },
      { title: "Type", of: row => row.type },
      { title: "Bytes", of: row => row.bytes, draw: row => make("span", {}, bytes(row.bytes), make("i", { class: "under" }, bar((row.bytes || 0) / most))), number: true },
      { title: "For", of: row => row.for, wide: true },
      { title: "Bucket", of: row => row.bucket || "", number: true },
      { title: "Compressor", of: row => row.compressor === "none" ? "" : row.compressor },
      { title: "Members", of: row => row.members, number: true },
      { title: "Devices", of: row => row.devices.join(", "), draw: row => shortened(row.devices), wide: true },
      { title: "Link", of: row => row.link },
      { title: "Reason", of: row => row.reason, wide: true },
    ], rows));
}

function showMemory(view) {
  const step = Data.get("step");
  if (!step) { view.append(make("p", { class: "hint" }, Data.get("overview").no_step || "Nothing was simulated.")); return; }
  const most = Math.max(...step.devices.map(one => one.peak_bytes));
  view.append(make("h2", {}, `Memory of each device in a step of ${step.batch.toLocaleString("en")} examples (predicted)`),
    ...step.devices.map((device, index) => {
      let rest = device.peak_bytes;
      const part = count => { const taken = Math.min(count, rest); rest -= taken; return taken; };  /* each has its own peak; together they are that of the device */
      const parts = [["variables and slots", part(device.variable_bytes), "#4477aa"], ["activations", part(device.activation_bytes), "#e08a1e"], ["sums of gradients", part(device.gradient_bytes), "#8a6fb8"], [device.activation_bytes ? "others" : "activations, gradients and temporaries", rest, "#66a61e"]].filter(([, count]) => count > 0);
      const row = make("div", { class: "memory-bar" }, parts.map(([text, count, colour]) => { const one = make("i", { title: text + ": " + bytes(count) }); one.style.width = 100 * count / most + "%"; one.style.background = colour; return one; }));
      return make("div", { class: "memory-row" }, make("b", {}, (device.count > 1 ? device.count + " × " : "") + device.name), row,
        make("div", { class: "small" }, bytes(device.peak_bytes) + " at its peak: ", parts.map(([text, count, colour]) => make("span", {}, swatch(colour), text + " " + bytes(count) + "  "))),
        memoryLine(step.memory[index], device, most, step.step_seconds * 1e6));
    }),
    make("p", { class: "hint" }, "A tensor lives from when the op that makes it could start until its last reader ends. Move the pointer over a line to read it."));
}
/* Memory over time: an area in steps, and what it is where the pointer is. */
function memoryLine(points, device, most, end) {
  if (!points.length) return null;
  const width = 1000, height = 130, last = Math.max(end, points[points.length - 1][0]);
  const x = at => width * at / last, y = count => height - (height - 6) * count / most;
  let path = `M0,${height}`, area = 0;
  for (const [at, count] of points) { path += `L${x(at)},${y(area)}L${x(at)},${y(count)}`; area = count; }
  path += `L${width},${y(area)}L${width},${height}Z`;
  const drawing = svg("svg", { class: "memory-line", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none" });
  const cursor = svg("path", { class: "cursor", d: "" }), top = points.reduce((best, point) => point[1] > best[1] ? point : best);
  const said = make("div", { class: "small said" }, `highest at ${seconds(top[0] / 1e6)}: ${bytes(top[1])}`);
  drawing.append(svg("path", { class: "area", d: path }), svg("path", { class: "variables", d: `M0,${y(device.variable_bytes)}H${width}` }), cursor);
  drawing.addEventListener("pointermove", event => {
    const box = drawing.getBoundingClientRect(), at = last * (event.clientX - box.left) / box.width;
    let now = points[0];
    for (const point of points) { if (point[0] > at) break; now = point; }
    cursor.setAttribute("d", `M${x(at)},0V${height}`);
    said.textContent = `${seconds(at / 1e6)}: ${bytes(now[1])}`;
  });
  return make("div", {}, drawing, make("div", { class: "memory-axis small" }, make("span", {}, "0 s"), said, make("span", {}, seconds(last / 1e6))));
}
