"use strict";
/* The simulated step: a lane for each device and link, what overlaps in rows of its own; drag to move, wheel to zoom. */
const ROUNDED = 0.0021;  /* microseconds: starts and lengths are rounded to a thousandth */
const ROW = 22, LANE_GAP = 26, LEFT = 168, MAX_ROWS = 8;

function showTimeline(view) {
  const step = Data.get("step");
  if (!step || !step.events.start.length) { view.append(make("p", { class: "hint" }, Data.get("overview").no_step || "The simulation has no events.")); return; }
  const events = step.events, end = step.step_seconds * 1e6;
  const lanes = events.lanes.map(name => ({ name, free: [], events: [] }));
  const byNumber = [...lanes];
  for (let i = 0; i < events.start.length; i++) {
    const lane = byNumber[events.lane[i]];
    let row = lane.free.findIndex(free => free <= events.start[i] + ROUNDED);
    if (row < 0) { row = lane.free.length; lane.free.push(0); }
    lane.free[row] = events.start[i] + events.seconds[i];
    lane.events.push([i, Math.min(row, MAX_ROWS - 1)]);
  }
  lanes.sort((a, b) => a.name < b.name ? -1 : 1);
  let top = 30;
  for (const lane of lanes) { lane.rows = Math.min(MAX_ROWS, lane.free.length); lane.top = top; top += lane.rows * ROW + LANE_GAP; }
  const device = name => step.devices.find(one => one.name === name);
  const canvas = make("canvas", { class: "timeline" }), tip = make("div", { class: "tip", hidden: "" });
  const exchange = events.kinds.indexOf("exchange");
  let from = 0, to = end;
  view.append(make("h2", {}, `Predicted step: ${seconds(step.step_seconds)} for ${step.batch.toLocaleString("en")} examples on ${several(step.replicas, "replica")}; ${seconds(step.exposed_seconds)} only communicate`),
    make("div", { class: "legend inline" }, make("span", {}, swatch("#4477aa"), "compute"), events.names.some(name => BACKWARD.test(name)) ? make("span", {}, swatch("#5b8f1d"), "backward of a micro-batch") : null, make("span", {}, swatch("#e8590c"), "exchange"),
      ...step.devices.map(one => make("span", {}, `${one.count > 1 ? one.count + " × " : ""}${one.name}: busy ${seconds(one.busy_seconds)}`)),
      make("button", { onclick: () => { from = 0; to = end; draw(); } }, "Whole step")),
    canvas, tip, ...step.notes.map(note => make("p", { class: "hint" }, note)),
    make("p", { class: "hint" }, "Devices that do the same share a lane. A measured timeline is not in this file."));
  function draw() {
    const width = view.clientWidth - 32, height = top, ratio = window.devicePixelRatio || 1;
    if (width < 100) return;
    canvas.width = width * ratio; canvas.height = height * ratio;
    canvas.style.width = width + "px"; canvas.style.height = height + "px";
    const pen = canvas.getContext("2d"), scale = (width - LEFT - 10) / (to - from);
    pen.scale(ratio, ratio);
    pen.font = "12px system-ui, sans-serif";
    const unit = 10 ** Math.floor(Math.log10((to - from) / 5)), tick = unit * ((to - from) / unit > 25 ? 5 : (to - from) / unit > 10 ? 2 : 1);
    for (let at = Math.ceil(from / tick) * tick; at <= to; at += tick) {
      const x = LEFT + (at - from) * scale;
      pen.fillStyle = "#e6e9ee"; pen.fillRect(x, 20, 1, height - 20);
      pen.fillStyle = "#5c6773"; pen.fillText(seconds(at / 1e6), x + 3, 14);
    }
    for (const lane of lanes) {
      pen.fillStyle = "#f3f5f8"; pen.fillRect(LEFT, lane.top, width - LEFT - 10, lane.rows * ROW);
      pen.fillStyle = "#1f2933"; pen.font = "600 12px system-ui, sans-serif";
      const use = device(lane.name);
      pen.fillText(cut((use && use.count > 1 ? use.count + " × " : "") + lane.name, LEFT - 14), 4, lane.top + 13);
      pen.font = "11px system-ui, sans-serif";
      let last = -1;
      for (const [i, row] of lane.events) {
        const x1 = LEFT + (events.start[i] - from) * scale, x2 = x1 + events.seconds[i] * scale;
        if (x2 < LEFT || x1 > width - 10 || (x2 - x1 < 0.4 && row * 1e6 + Math.floor(x1 * 2) === last)) continue;
        last = row * 1e6 + Math.floor(x1 * 2);
        const left = Math.max(LEFT, x1), right = Math.min(width - 10, x2), y = lane.top + row * ROW + 1;
        pen.fillStyle = events.kind[i] === exchange ? "#e8590c" : BACKWARD.test(events.names[events.name[i]]) ? "#5b8f1d" : PALETTE_TIMELINE[events.name[i] % PALETTE_TIMELINE.length];
        pen.fillRect(left, y, Math.max(0.6, right - left - 0.3), ROW - 2);
        if (right - left > 46) { pen.fillStyle = "#fff"; pen.fillText(cut(lastName(events.names[events.name[i]]), right - left - 8), left + 4, y + 14); }
      }
    }
  }
  function hit(x, y) {
    const width = view.clientWidth - 32, scale = (width - LEFT - 10) / (to - from), at = from + (x - LEFT) / scale;
    const lane = lanes.find(one => y >= one.top && y < one.top + one.rows * ROW);
    if (!lane || x < LEFT) return -1;
    const row = Math.floor((y - lane.top) / ROW);
    const found = lane.events.find(([i, own]) => own === row && events.start[i] - 1 / scale <= at && at <= events.start[i] + events.seconds[i] + 1 / scale);
    return found ? found[0] : -1;
  }
  let held = null;
  canvas.addEventListener("pointerdown", event => { held = { x: event.offsetX, from, to }; });
  window.addEventListener("pointerup", () => { held = null; });
  canvas.addEventListener("pointermove", event => {
    const scale = (view.clientWidth - 32 - LEFT - 10) / (to - from);
    if (held) { const by = (held.x - event.offsetX) / scale; const span = held.to - held.from; from = Math.min(Math.max(0, held.from + by), end - span); to = from + span; draw(); return; }
    const i = hit(event.offsetX, event.offsetY);
    tip.hidden = i < 0;
    if (i < 0) return;
    tip.textContent = `${events.names[events.name[i]]} · ${events.kinds[events.kind[i]]} · ${seconds(events.seconds[i] / 1e6)} from ${seconds(events.start[i] / 1e6)}`;
    tip.style.left = Math.min(event.pageX + 12, window.innerWidth - 460) + "px"; tip.style.top = event.pageY + 14 + "px";
  });
  canvas.addEventListener("wheel", event => {
    event.preventDefault();
    const width = view.clientWidth - 32, at = from + (event.offsetX - LEFT) * (to - from) / (width - LEFT - 10), factor = Math.exp(event.deltaY * 0.0015);
    from = Math.max(0, at - (at - from) * factor); to = Math.min(end, Math.max(from + 1e-3, at + (to - at) * factor));
    draw();
  }, { passive: false });
  window.addEventListener("resize", draw);
  draw();
}
const BACKWARD = /^B\d+@\d+/;
const PALETTE_TIMELINE = ["#4477aa", "#3a6591", "#5588bb", "#4a7fa5", "#5b7fb0"];
