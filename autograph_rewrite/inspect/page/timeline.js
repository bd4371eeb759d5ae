"use strict";
/* The simulated step and the measured one: a lane for each device and link; drag to move, wheel to zoom. */
const ROUNDED = 0.0021;  /* microseconds: starts and lengths are rounded to a thousandth */
const ROW = 22, LANE_GAP = 26, LEFT = 196, MAX_ROWS = 8;

function showTimeline(view) {
  const step = Data.get("step"), measured = Data.get("measured");
  const predicted = step && step.events.start.length ? step : null;
  if (!predicted && !measured) { view.append(make("p", { class: "hint" }, Data.get("overview").no_step || "The simulation has no events.")); return; }
  const lanes = [...(predicted ? lanesOf(predicted.events, measured ? "predicted: " : "") : []), ...(measured ? lanesOf(measured.events, "") : [])];
  const end = Math.max(predicted ? predicted.step_seconds * 1e6 : 0, ...lanes.flatMap(lane => lane.events.map(event => event.start + event.length)));
  let top = 30;
  for (const lane of lanes) { lane.top = top; top += lane.rows * ROW + LANE_GAP; }
  const device = lane => predicted && lane.isPredicted ? step.devices.find(one => one.name === lane.name) : null;
  const canvas = make("canvas", { class: "timeline" }), tip = make("div", { class: "tip", hidden: "" });
  const has = test => lanes.some(lane => lane.events.some(test));
  let from = 0, to = end;
  view.append(make("div", {},
    predicted ? make("h2", {}, `Predicted step: ${seconds(step.step_seconds)} for ${step.batch.toLocaleString("en")} examples on ${several(step.replicas, "replica")}; ${seconds(step.exposed_seconds)} only communicate`) : null,
    measured ? make("h2", {}, measuredTitle(measured)) : null,
    make("div", { class: "legend inline" }, make("span", {}, swatch("#4477aa"), "compute"), has(event => event.kind === "backward") ? make("span", {}, swatch("#5b8f1d"), "backward of a micro-batch") : null, make("span", {}, swatch("#e8590c"), "exchange"), has(event => event.kind === "other") ? make("span", {}, swatch("#9aa5b1"), "not in the graph") : null,
      ...(predicted ? step.devices : []).map(one => make("span", {}, `${one.count > 1 ? one.count + " × " : ""}${one.name}: busy ${seconds(one.busy_seconds)}`)),
      make("button", { onclick: () => { from = 0; to = end; draw(); } }, "Whole step")),
    canvas, tip, ...(measured ? measuredTables(measured) : []), ...(predicted ? step.notes : []).map(note => make("p", { class: "hint" }, note)), ...(measured ? measured.notes : []).map(note => make("p", { class: "hint" }, note)),
    make("p", { class: "hint" }, "Predicted devices that do the same share a lane." + (measured ? "" : " A measured timeline is not in this file: autograph-rewrite profile makes one, report --measured shows it."))));
  function draw() {
    const width = view.clientWidth - 32, height = top, ratio = window.devicePixelRatio || 1;
    if (width < 100) return;
    canvas.width = width * ratio; canvas.height = height * ratio;
    canvas.style.width = width + "px"; canvas.style.height = height + "px";
    const pen = canvas.getContext("2d"), scale = (width - LEFT - 10) / (to - from);
    const [ink, soft, line, ground] = ["--ink", "--soft", "--line", "--thin"].map(name => getComputedStyle(document.documentElement).getPropertyValue(name));
    pen.scale(ratio, ratio);
    pen.font = "12px system-ui, sans-serif";
    const unit = 10 ** Math.floor(Math.log10((to - from) / 5)), tick = unit * ((to - from) / unit > 25 ? 5 : (to - from) / unit > 10 ? 2 : 1);
    for (let at = Math.ceil(from / tick) * tick; at <= to; at += tick) {
      const x = LEFT + (at - from) * scale;
      pen.fillStyle = line; pen.fillRect(x, 20, 1, height - 20);
      pen.fillStyle = soft; pen.fillText(seconds(at / 1e6), x + 3, 14);
    }
    for (const lane of lanes) {
      pen.fillStyle = ground; pen.fillRect(LEFT, lane.top, width - LEFT - 10, lane.rows * ROW);
      pen.fillStyle = ink; pen.font = "600 12px system-ui, sans-serif";
      const use = device(lane);
      pen.fillText(cut((use && use.count > 1 ? use.count + " × " : "") + lane.title, LEFT - 14), 4, lane.top + 13);
      pen.font = "11px system-ui, sans-serif";
      let last = -1;
      for (const event of lane.events) {
        const x1 = LEFT + (event.start - from) * scale, x2 = x1 + event.length * scale;
        if (x2 < LEFT || x1 > width - 10 || (x2 - x1 < 0.4 && event.row * 1e6 + Math.floor(x1 * 2) === last)) continue;
        last = event.row * 1e6 + Math.floor(x1 * 2);
        const left = Math.max(LEFT, x1), right = Math.min(width - 10, x2), y = lane.top + event.row * ROW + 1;
        pen.fillStyle = KIND_COLOURS[event.kind] || PALETTE_TIMELINE[event.number % PALETTE_TIMELINE.length];
        pen.fillRect(left, y, Math.max(0.6, right - left - 0.3), ROW - 2);
        if (right - left > 46) { pen.fillStyle = "#fff"; pen.fillText(cut(event.kind === "exchange" ? event.name : lastName(event.name), right - left - 8), left + 4, y + 14); }
      }
    }
  }
  function hit(x, y) {
    const width = view.clientWidth - 32, scale = (width - LEFT - 10) / (to - from), at = from + (x - LEFT) / scale;
    const lane = lanes.find(one => y >= one.top && y < one.top + one.rows * ROW);
    if (!lane || x < LEFT) return null;
    const row = Math.floor((y - lane.top) / ROW);
    return lane.events.find(event => event.row === row && event.start - 1 / scale <= at && at <= event.start + event.length + 1 / scale) || null;
  }
  let held = null;
  canvas.addEventListener("pointerdown", event => { held = { x: event.offsetX, from, to }; });
  window.addEventListener("pointerup", () => { held = null; });
  canvas.addEventListener("pointermove", event => {
    const scale = (view.clientWidth - 32 - LEFT - 10) / (to - from);
    if (held) { const by = (held.x - event.offsetX) / scale; const span = held.to - held.from; from = Math.min(Math.max(0, held.from + by), end - span); to = from + span; draw(); return; }
    const one = hit(event.offsetX, event.offsetY);
    tip.hidden = !one;
    if (!one) return;
    tip.textContent = `${one.name} · ${one.kind} · ${seconds(one.length / 1e6)} from ${seconds(one.start / 1e6)}`;
    tip.style.left = Math.min(event.pageX + 12, window.innerWidth - 460) + "px"; tip.style.top = event.pageY + 14 + "px";
  });
  canvas.addEventListener("wheel", event => {
    event.preventDefault();
    const width = view.clientWidth - 32, at = from + (event.offsetX - LEFT) * (to - from) / (width - LEFT - 10), factor = Math.exp(event.deltaY * 0.0015);
    from = Math.max(0, at - (at - from) * factor); to = Math.min(end, Math.max(from + 1e-3, at + (to - at) * factor));
    draw();
  }, { passive: false });
  window.addEventListener("resize", draw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
}
/* Lanes by name, what overlaps in rows of its own. */
function lanesOf(events, prefix) {
  const lanes = events.lanes.map(name => ({ name, title: prefix + name, isPredicted: events === (Data.get("step") || {}).events, free: [], events: [] }));
  for (let i = 0; i < events.start.length; i++) {
    const lane = lanes[events.lane[i]], name = events.names[events.name[i]], kind = events.kinds[events.kind[i]];
    let row = lane.free.findIndex(free => free <= events.start[i] + ROUNDED);
    if (row < 0) { row = lane.free.length; lane.free.push(0); }
    lane.free[row] = events.start[i] + events.seconds[i];
    lane.events.push({ name, number: events.name[i], kind: kind === "compute" && BACKWARD.test(name) ? "backward" : kind, start: events.start[i], length: events.seconds[i], row: Math.min(row, MAX_ROWS - 1) });
  }
  for (const lane of lanes) lane.rows = Math.min(MAX_ROWS, lane.free.length);
  return lanes.filter(lane => lane.rows).sort((a, b) => a.name < b.name ? -1 : 1);
}
function measuredTitle(found) {
  const share = found.attributed;
  return `Measured step: ${seconds(found.step_seconds)}, the typical one of ${several(found.steps, "step")} on ${several(found.ranks, "rank")}` + (found.examples ? `; ${Math.round(found.examples_per_second).toLocaleString("en")} examples/s` : "") + (found.flops_per_second ? `, ${digits(found.flops_per_second / 1e9)} GFLOP/s` : "") + `; ${(share.share * 100).toFixed(1)} % is that of original nodes or named communication`;
}
function measuredTables(found) {
  const times = ["compute", "communication", "idle"];
  const figure = (title, of) => ({ title, number: true, of: row => of(row) === null ? "" : seconds(of(row)), key: of });
  return [make("h2", {}, "Measured beside predicted"),
    table([{ title: "Rank", number: true, of: row => row.rank }, { title: "Device", of: row => row.device },
      ...times.flatMap(key => [figure(key, row => row[key]), figure(key + ", predicted", row => row.predicted ? row.predicted[key] : null)])], found.devices, { filter: false }),
    make("h2", {}, "Original nodes"),
    table([{ title: "Node", of: row => row.node, wide: true }, { title: "Kernel", of: row => row.op }, { title: "Made by", of: row => row.pass }, { title: "Runs", number: true, of: row => row.runs, key: row => row.runs }, figure("Time", row => row.seconds)], found.nodes),
    make("h2", {}, "Exchanges"),
    table([{ title: "Exchange", of: row => row.exchange, wide: true }, { title: "Members", number: true, of: row => row.members }, figure("Time of a member", row => row.seconds), figure("Longest", row => row.longest)], found.exchanges)];
}
const KIND_COLOURS = { exchange: "#e8590c", backward: "#5b8f1d", other: "#9aa5b1" };
const BACKWARD = /^B\d+@\d+/;
const PALETTE_TIMELINE = ["#4477aa", "#3a6591", "#5588bb", "#4a7fa5", "#5b7fb0"];
