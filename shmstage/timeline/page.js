// Draws from the JSON beside it, with the parts above.

const data = JSON.parse(document.getElementById("data").textContent);
const runs = data.runs;
const named = (run) => (run.name === run.mode ? run.name : `${run.name} (${run.mode})`);
const byId = (id) => document.getElementById(id);

// --- idle per step -------------------------------------------------------------------------------------------

// [first step, last step, idle median, idle maximum, step median, step maximum]
const idlePoints = (run) => run.series.steps.filter((point) => point[2] !== null);

function drawIdle(width) {
  const holder = byId("idle-chart");
  const points = runs.map(idlePoints);
  const all = points.flat();
  if (!all.length) {
    holder.replaceChildren(element("p", { class: "about" }, "No boundary between two steps was measured yet."));
    return;
  }
  const [unit, scale] = timeUnit(Math.max(...all.map((point) => point[3])));
  const many = points.some((own) => own.length > 60) || runs.length > 1;
  const range = stepRange(all);
  const room = (range[1] - range[0]) / 60;
  const label = runs.map((run, k) => `${run.name}: median boundary idle ${seconds(run.median)}, largest ` +
    seconds(Math.max(...points[k].map((point) => point[3])))).join("; ");
  const chart = frame({
    width, height: 240, x: many ? [range[0] - room, range[1] + room] : [range[0] - 0.6, range[1] + 0.6], y: Math.max(...all.map((p) => p[3])) * scale * 1.05,
    xTitle: "step", yTitle: `boundary idle (${unit})`, xWhole: true, label: `Boundary idle per step. ${label}`,
  });
  points.forEach((own, number) => (many ? idleLine : idleBars)(chart, own, number, scale));
  if (runs.length === 1 && runs[0].median !== null) {
    const y = chart.atY(runs[0].median * scale);
    chart.svg.append(shape("line", { class: "median-line", x1: chart.left, x2: chart.right, y1: y, y2: y }),
      shape("text", { class: "name halo", x: chart.right, y: y - 5, "text-anchor": "end" }, `median ${seconds(runs[0].median)}`));
  }
  holder.replaceChildren(chart.svg);
}

function idleBars(chart, points, number, scale) {
  const wide = Math.min(44, (chart.atX(1) - chart.atX(0)) * 0.7);
  for (const [step, , value] of points) {
    const y = chart.atY(value * scale);
    const about = shape("title", {}, `boundary ${step - 1} → ${step}: ${seconds(value)}`);
    const picked = step === chosen ? " picked" : "";
    chart.svg.append(shape("rect", { class: `bar${picked}`, x: chart.atX(step) - wide / 2, width: wide, y, height: Math.max(0.5, chart.bottom - y) }));
    const area = shape("rect", { class: "pick-area", x: chart.atX(step - 0.5), width: chart.atX(1) - chart.atX(0), y: chart.top, height: chart.bottom - chart.top }, about);
    area.addEventListener("click", () => choose(step));
    chart.svg.append(area);
  }
}

function idleLine(chart, points, number, scale) {
  const cls = runs.length > 1 ? `run-${number}` : "lone";
  const at = (point, k) => [chart.atX((point[0] + point[1]) / 2), chart.atY(point[k] * scale)];
  if (points.some((point) => point[3] !== point[2])) {
    const outline = [...points.map((p) => at(p, 3)), ...points.map((p) => at(p, 2)).reverse()];
    chart.svg.append(shape("path", { class: `reach ${cls}`, d: path(outline) + "Z" }));
  }
  chart.svg.append(shape("path", { class: `curve ${cls}`, "stroke-dasharray": DASHES[number], d: path(points.map((p) => at(p, 2))) }));
  if (points.length > 60) return;
  for (const point of points) {
    const [x, y] = at(point, 2);
    const dot = marker(number, x, y, { class: cls });
    dot.append(shape("title", {}, `${runs[number].name}, boundary before step ${stepName(point[0], point[1])}: ${seconds(point[2])}`));
    chart.svg.append(dot);
  }
}

function idleTable() {
  const rows = runs.flatMap((run) => idlePoints(run).map((point) =>
    [runs.length > 1 ? `${run.name}, ${stepName(point[0], point[1])}` : stepName(point[0], point[1]), ...point.slice(2).map(seconds)]));
  return table(["step", "idle before it, median", "largest", "step time, median", "longest"], rows, "Boundary idle per step");
}

// --- one boundary, to scale ----------------------------------------------------------------------------------

const steps = [...new Set(runs.flatMap((run) => Object.keys(run.boundaries).map(Number)))].sort((a, b) => a - b);
const idleOf = (step) => Math.max(...runs.map((run) => run.boundaries[step]?.idle ?? 0));
// at first the one whose idle is the most usual
const usual = (runs.find((run) => run.median !== null)?.median ?? 0) * 1e9;
let chosen = steps.length ? steps.reduce((a, b) => (Math.abs(idleOf(b) - usual) < Math.abs(idleOf(a) - usual) ? b : a)) : null;
let view = "window";

function choose(step) {
  if (!steps.includes(step)) return;
  chosen = step;
  drawBoundary(lastWidth);
  drawIdle(lastWidth);
  byId("said").textContent = runs.map((run) => aboutBoundary(run)).join("; ");
}

function aboutBoundary(run) {
  const own = run.boundaries[chosen];
  if (!own) return `${run.name}: this boundary is not kept`;
  const parts = causes(own).map(([leg, value]) => `${leg} ${nanoseconds(value)}`);
  return `${run.name}, boundary ${chosen - 1} to ${chosen}: idle ${nanoseconds(own.idle)}${parts.length ? ": " + parts.join(", ") : ""}`;
}

function causes(own) {
  return data.legs.map((leg, k) => [leg, own.legs[k], own.whole[k]]).filter((one) => one[1] > 0).sort((a, b) => b[1] - a[1]);
}

function drawBoundary(width) {
  const panels = byId("panels");
  // not `disabled`: whoever walks by keyboard must not lose the button under the fingers
  const off = { previous: chosen === null || chosen === steps[0], next: chosen === null || chosen === steps[steps.length - 1], worst: chosen === null };
  for (const [id, isOff] of Object.entries(off)) byId(id).setAttribute("aria-disabled", String(isOff));
  if (chosen === null) {
    panels.replaceChildren(element("p", { class: "about" }, "No boundary of which every instant is known."));
    return;
  }
  byId("pick").value = String(chosen);
  const present = runs.map((run) => run.boundaries[chosen]).filter(Boolean);
  const range = [Math.min(...present.map((own) => own[view][0])), Math.max(...present.map((own) => own[view][1]))];
  const inRange = (span) => span[1] > range[0] && span[0] < range[1];
  const shown = data.lanes.filter(([lane]) => present.some((own) => (own.lanes[lane] ?? []).flat().some(inRange)));
  panels.replaceChildren(...runs.map((run, number) => panel(run, number, range, shown, width)));
  lanesLegend(present);
  spansTable();
}

const KINDS = [["before", "step that ends"], ["after", "step that begins"], ["update", "update"], ["scored", "log-probs, evaluation"],
  ["patch", "late fields"], ["bookkeeping", "bookkeeping"], ["snapshot", "snapshots"], ["call", "calls"], ["wait", "waits"]];

function lanesLegend(present) {
  const used = new Set(present.flatMap((own) => Object.values(own.lanes).flat(2).map((span) => span[2])));
  const legend = KINDS.filter(([kind]) => used.has(kind)).map(([kind, text]) => swatched(`k-${kind}`, text));
  if (present.some((own) => own.idle)) legend.push(swatched("k-idle", "idle: the devices wait"));
  byId("lanes-legend").replaceChildren(...legend);
}

function panel(run, number, range, shown, width) {
  const own = run.boundaries[chosen];
  const name = runs.length > 1 ? [element("span", { class: `swatch run-${number}` }), `${named(run)} · `] : [];
  if (!own) {
    return element("div", { class: "panel" }, element("h3", {}, ...name, `${chosen - 1} → ${chosen}`),
      element("p", { class: "about" }, "This boundary is not kept for this run."));
  }
  const idle = element("span", { class: own.idle ? "idle-word" : "no-idle" }, own.idle ? `idle ${nanoseconds(own.idle)}` : "no idle");
  const chips = causes(own).map(([leg, value]) => swatched(`leg-${leg}`, `${leg} ${nanoseconds(value)}`, "li"));
  return element("div", { class: "panel", "data-idle": own.idle }, element("h3", {}, ...name, `step ${chosen - 1} → ${chosen}: `, idle),
    element("ul", { class: "chips", "aria-label": "Legs of the idle" }, ...chips), lanes(run, own, range, shown, width));
}

const ROW = 18, GAP = 7;

function lanes(run, own, range, shown, width) {
  const narrow = width < 620;
  const left = narrow ? 0 : 104, right = 4, top = 22;
  const heads = narrow ? 15 : 0;
  const offsets = [];
  let y = top;
  for (const [lane] of shown) {
    offsets.push(y + heads);
    y += heads + Math.max(1, own.lanes[lane]?.length ?? 1) * ROW + GAP;
  }
  const bottom = y;
  const atX = (t) => left + (width - left - right) * (t - range[0]) / (range[1] - range[0]);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${bottom + 38}`, height: bottom + 38, role: "img", "aria-label": aboutBoundary(run) });
  timeAxis(svg, range, atX, left, width - right, top, bottom);
  const gaps = idleGaps(own).map(([begin, end]) => [Math.max(begin, range[0]), Math.min(end, range[1])]).filter(([b, e]) => b < e);
  for (const [begin, end] of gaps) {
    svg.append(shape("rect", { class: "idle-band", x: atX(begin), width: Math.max(1, atX(end) - atX(begin)), y: top, height: bottom - top }));
  }
  shown.forEach(([lane, name], k) => {
    svg.append(shape("text", { class: "name", x: 0, y: narrow ? offsets[k] - 4 : offsets[k] + 13 }, name));
    (own.lanes[lane] ?? []).forEach((row, r) => row.forEach((span) => drawSpan(svg, span, offsets[k] + r * ROW, range, atX)));
    if (lane === "device") {
      for (const [begin, end] of gaps) {
        svg.append(shape("rect", { class: "idle-box", x: atX(begin), width: Math.max(1.5, atX(end) - atX(begin)), y: offsets[k], height: ROW - 1 }));
      }
    }
  });
  idleLabel(svg, gaps, own, atX, left, width - right);
  return svg;
}

// [begin, end) of the idle, its causes put together
function idleGaps(own) {
  const merged = [];
  for (const [begin, end] of (own.lanes.idle ?? []).flat().sort((a, b) => a[0] - b[0])) {
    const last = merged[merged.length - 1];
    if (last && begin <= last[1]) last[1] = Math.max(last[1], end);
    else merged.push([begin, end]);
  }
  return merged;
}

function idleLabel(svg, gaps, own, atX, left, right) {
  if (!gaps.length) return;
  for (const [begin, end] of gaps) {
    svg.append(shape("path", { class: "idle-edge", fill: "none", d: `M${atX(begin)} 21V17H${Math.max(atX(begin) + 1, atX(end))}V21` }));
  }
  const longest = gaps.reduce((a, b) => (b[1] - b[0] > a[1] - a[0] ? b : a));
  const text = gaps.length > 1 ? `idle ${nanoseconds(own.idle)} in ${gaps.length} parts` : `idle ${nanoseconds(own.idle)}`;
  const half = text.length * 3.7;
  const x = Math.min(Math.max((atX(longest[0]) + atX(longest[1])) / 2, left + half), right - half);
  svg.append(shape("text", { class: "idle-label", x, y: 12, "text-anchor": "middle" }, text));
}

function timeAxis(svg, range, atX, left, right, top, bottom) {
  const [unit, scale] = timeUnit(Math.max(Math.abs(range[0]), Math.abs(range[1])) / 1e9);
  for (const value of ticks(range[0] / 1e9 * scale, range[1] / 1e9 * scale, (right - left) / (right < 620 ? 60 : 90))) {
    const x = atX(value / scale * 1e9);
    svg.append(shape("line", { class: value === 0 ? "zero-line" : "grid-line", x1: x, x2: x, y1: top, y2: bottom }),
      shape("text", { x, y: bottom + 15, "text-anchor": x < left + 14 ? "start" : x > right - 14 ? "end" : "middle" }, String(value)));
  }
  svg.append(shape("line", { class: "axis-line", x1: left, x2: right, y1: bottom, y2: bottom }),
    shape("text", { x: right, y: bottom + 32, "text-anchor": "end" }, `${unit} since the end of the last micro-batch`));
}

function drawSpan(svg, [begin, end, kind, label], y, range, atX) {
  if (end <= range[0] || begin >= range[1]) return;
  const from = Math.max(begin, range[0]), to = Math.min(end, range[1]);
  const x = atX(from), wide = Math.max(1, atX(to) - x);
  const cls = kind.startsWith("leg-") ? kind : `k-${kind}`;
  const about = shape("title", {}, `${label}: ${nanoseconds(end - begin)}, from ${nanoseconds(begin)} to ${nanoseconds(end)}`);
  svg.append(shape("rect", { class: `${wide > 4 ? "span " : ""}${cls}`, x, width: wide, y, height: ROW - 1, rx: wide > 5 ? 2.5 : 0 }, about));
  if (wide > label.length * 6.1 + 8) svg.append(shape("text", { class: `on-span ${cls}`, x: x + 5, y: y + 12.5 }, label));
}

function spansOf() {
  const names = Object.fromEntries(data.lanes);
  const rows = runs.flatMap((run) => Object.entries(run.boundaries[chosen]?.lanes ?? {}).flatMap(([lane, own]) =>
    own.flat().map(([begin, end, , label]) => [...(runs.length > 1 ? [run.name] : []), names[lane], label,
      nanoseconds(begin), nanoseconds(end - begin)])));
  return table([...(runs.length > 1 ? ["run"] : []), "lane", "what", "begins", "lasts"], rows, "Spans of this boundary");
}

// Charts of several runs stand two in a row where there is room: `.charts` in the style sheet.
const columnWidth = (width) => (runs.length > 1 && width >= 760 ? Math.floor((width - 32) / 2) : width);

// --- where the idle went -------------------------------------------------------------------------------------

function drawLegs(width) {
  width = columnWidth(width);
  const all = runs.flatMap((run) => run.series.legs);
  if (!all.length) return;
  const sum = (point) => point.slice(2).reduce((a, b) => a + b, 0);
  const largest = Math.max(...all.map(sum));
  const [unit, scale] = timeUnit(largest);
  const range = stepRange(all);
  byId("legs-charts").replaceChildren(...runs.flatMap((run, number) => {
    if (!run.series.legs.length) return [];
    const chart = frame({
      width, height: runs.length > 1 ? 170 : 220, x: [range[0] - 0.6, range[1] + 0.6], y: largest * scale * 1.05,
      xTitle: "step", yTitle: `idle by cause (${unit})`, xWhole: true, label: `Idle of each boundary by cause, ${run.name}. In the table below in figures.`,
    });
    run.series.legs.forEach((point) => legBar(chart, point, scale));
    const title = runs.length > 1 ? [element("p", { class: "small-title" }, element("span", { class: `swatch run-${number}` }), run.name)] : [];
    return [element("figure", { class: "chart" }, ...title, chart.svg)];
  }));
}

function legBar(chart, [first, last, ...legs], scale) {
  const wide = Math.max(1, Math.min(44, (chart.atX(last + 1) - chart.atX(first)) * 0.7));
  const x = chart.atX((first + last) / 2) - wide / 2;
  let reached = 0;
  legs.forEach((value, k) => {
    if (!value) return;
    const top = chart.atY((reached + value) * scale), height = chart.atY(reached * scale) - top;
    chart.svg.append(shape("rect", { class: `${wide > 4 ? "span " : ""}leg-${data.legs[k]}`, x, width: wide, y: top, height },
      shape("title", {}, `step ${stepName(first, last)}: ${data.legs[k]} ${seconds(value)}`)));
    reached += value;
  });
}

// --- memory --------------------------------------------------------------------------------------------------

function drawMemory(width) {
  width = columnWidth(width);
  const known = runs.filter((run) => Object.keys(run.memory.curves).length);
  const curves = known.flatMap((run) => Object.values(run.memory.curves));
  const largest = Math.max(1, ...curves.flat().map((sample) => sample[1]));
  const [unit, scale] = byteUnit(largest);
  byId("memory-charts").replaceChildren(...known.flatMap((run) => {
    const names = Object.keys(run.memory.curves);
    const chart = frame({
      width, height: 210, x: [0, Math.max(...known.map((other) => other.memory.seconds))], y: largest * scale * 1.08,
      xTitle: "seconds since the first event", yTitle: unit,
      label: `Memory over time, ${run.name}: ` + names.map((name) => `${name} at most ${peak(run, name, unit, scale)}`).join(", "),
    });
    names.forEach((name, k) => {
      const points = run.memory.curves[name].map(([t, value]) => [chart.atX(t), chart.atY(value * scale)]);
      chart.svg.append(shape("path", { class: `curve mem-${k % 6}`, "stroke-dasharray": DASHES[k % 8], d: path(points) }));
      if (points.length < 40) points.forEach(([x, y]) => chart.svg.append(marker(k, x, y, { class: `mem-${k % 6}` })));
    });
    const legend = names.map((name, k) => lineKey(k, `mem-${k % 6}`, `${name}, at most ${peak(run, name, unit, scale)}`));
    const title = runs.length > 1 ? [element("p", { class: "small-title" }, run.name)] : [];
    return [element("figure", { class: "chart" }, ...title, element("div", { class: "legend" }, ...legend), chart.svg)];
  }));
}

const peak = (run, name, unit, scale) =>
  `${Number((Math.max(...run.memory.curves[name].map((sample) => sample[1])) * scale).toPrecision(3))} ${unit}`;

// --- the page ------------------------------------------------------------------------------------------------

let lastWidth = 0;

function draw() {
  const width = Math.floor(document.querySelector("main").clientWidth);
  if (!width) return; // not laid out yet; the observer comes back
  lastWidth = width;
  drawIdle(lastWidth);
  drawBoundary(lastWidth);
  drawLegs(lastWidth);
  drawMemory(lastWidth);
}

function legends() {
  if (runs.length > 1) byId("idle-legend").append(...runs.map((run, k) => lineKey(k, `run-${k}`, named(run))));
  const used = data.legs.filter((leg, k) => runs.some((run) => run.series.legs.some((point) => point[2 + k] > 0)));
  byId("legs-legend").append(...used.map((leg) => swatched(`leg-${leg}`, leg)));
}

function controls() {
  byId("pick").append(...steps.map((step) => element("option", { value: step }, `step ${step - 1} → ${step} · ${nanoseconds(idleOf(step))}`)));
  byId("pick").addEventListener("change", (event) => choose(Number(event.target.value)));
  const move = (by) => choose(steps[steps.indexOf(chosen) + by]);
  byId("previous").addEventListener("click", () => move(-1));
  byId("next").addEventListener("click", () => move(1));
  byId("worst").addEventListener("click", () => steps.length && choose(steps.reduce((a, b) => (idleOf(b) > idleOf(a) ? b : a))));
  for (const name of ["window", "range"]) {
    byId(`view-${name}`).addEventListener("click", () => {
      view = name;
      for (const other of ["window", "range"]) byId(`view-${other}`).setAttribute("aria-pressed", String(other === name));
      drawBoundary(lastWidth);
    });
  }
  document.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey || event.target.closest("select, .scroll")) return;
    event.preventDefault();
    move(by);
  });
}

function themes() {
  const names = ["auto", "light", "dark"];
  const said = { auto: "Auto", light: "Light", dark: "Dark" };
  let current = 0;
  byId("theme").addEventListener("click", () => {
    current = (current + 1) % names.length;
    const name = names[current];
    if (name === "auto") document.documentElement.removeAttribute("data-theme");
    else document.documentElement.setAttribute("data-theme", name);
    byId("theme").textContent = said[name];
    byId("theme").setAttribute("aria-label", `Colours: ${name === "auto" ? "as the system" : name}. Change`);
  });
}

const spansTable = tableOnDemand("spans-table", spansOf);
tableOnDemand("idle-table", idleTable);
legends();
controls();
themes();
draw();
new ResizeObserver(() => {
  if (Math.floor(document.querySelector("main").clientWidth) !== lastWidth) draw();
}).observe(document.querySelector("main"));
