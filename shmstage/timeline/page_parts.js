"use strict";
// Elements, units, axes and tables: what every chart of the page is made of. Text from files only ever becomes
// textContent or an attribute, never markup.

function element(name, attributes = {}, ...children) {
  return grown(document.createElement(name), attributes, children);
}

function shape(name, attributes = {}, ...children) {
  return grown(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function grown(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children.filter((child) => child !== null));
  return node;
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 ms";
  for (const [unit, scale] of [["s", 1], ["ms", 1e3], ["µs", 1e6]]) {
    const scaled = value * scale;
    if (Math.abs(scaled) >= 1 || unit === "µs") {
      const digits = Math.abs(scaled) < 100 ? String(Number(scaled.toPrecision(3))) : Math.round(scaled).toLocaleString("en");
      return `${digits} ${unit}`;
    }
  }
}

const nanoseconds = (value) => seconds(value / 1e9);

function timeUnit(largest) {
  return largest >= 1 ? ["s", 1] : largest >= 1e-3 ? ["ms", 1e3] : ["µs", 1e6];
}

function byteUnit(largest) {
  for (const [unit, scale] of [["GiB", 2 ** -30], ["MiB", 2 ** -20], ["KiB", 2 ** -10]]) {
    if (largest * scale >= 1) return [unit, scale];
  }
  return ["bytes", 1];
}

// 1, 2 or 5 times a power of ten, so that there are about `wanted` of them
function tickStep(span, wanted) {
  const rough = span / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * ([1, 2, 5].find((factor) => factor * power >= rough) ?? 10);
}

function ticks(low, high, wanted) {
  if (!(high > low)) return [low];
  const step = tickStep(high - low, wanted);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(Number((k * step).toPrecision(12)));
  return found;
}

function swatched(kind, text, name = "span") {
  return element(name, {}, element("span", { class: `swatch ${kind}` }), text);
}

function table(head, rows, label) {
  const header = element("thead", {}, element("tr", {}, ...head.map((text) => element("th", { scope: "col" }, text))));
  const body = element("tbody", {}, ...rows.map(([first, ...rest]) => element("tr", {},
    element("th", { scope: "row" }, String(first)), ...rest.map((text) => element("td", {}, String(text))))));
  return element("div", { class: "scroll", role: "region", tabindex: 0, "aria-label": label },
    element("table", {}, header, body));
}

// A table that is only built once somebody opens it.
function tableOnDemand(id, build) {
  const details = byId(id);
  const fill = () => {
    while (details.children.length > 1) details.lastChild.remove();
    if (details.open) details.append(build());
  };
  details.addEventListener("toggle", fill);
  return fill;
}

const stepName = (from, to) => (from === to ? String(from) : `${from}–${to}`);

// --- a chart's frame -----------------------------------------------------------------------------------------

// Axes with units; returns the drawing and where values are on it.
function frame({ width, height, x, y, xTitle, yTitle, xWhole, label }) {
  const left = 54, right = 8, top = 24, bottom = 40;
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label });
  const atX = (value) => left + (width - left - right) * (x[1] > x[0] ? (value - x[0]) / (x[1] - x[0]) : 0.5);
  const atY = (value) => height - bottom - (height - bottom - top) * (value / (y || 1));
  for (const value of ticks(0, y, 5)) {
    svg.append(shape("line", { class: value ? "grid-line" : "axis-line", x1: left, x2: width - right, y1: atY(value), y2: atY(value) }),
      shape("text", { x: left - 8, y: atY(value) + 4, "text-anchor": "end" }, String(value)));
  }
  for (const value of ticks(x[0], x[1], Math.min(10, width / 80))) {
    if (xWhole && !Number.isInteger(value)) continue;
    svg.append(shape("text", { x: atX(value), y: height - bottom + 17, "text-anchor": "middle" }, value.toLocaleString("en")));
  }
  svg.append(shape("text", { x: 0, y: 12 }, yTitle),
    shape("text", { x: width - right, y: height - 5, "text-anchor": "end" }, xTitle));
  return { svg, atX, atY, left, right: width - right, top, bottom: height - bottom };
}

const DASHES = ["", "7 3", "2 3", "9 3 2 3", "12 4", "4 2", "1 4", "6 2 1 2"];

function marker(kind, x, y, attributes) {
  const r = 3.6;
  if (kind % 4 === 0) return shape("circle", { cx: x, cy: y, r, ...attributes });
  if (kind % 4 === 1) return shape("rect", { x: x - r, y: y - r, width: 2 * r, height: 2 * r, ...attributes });
  if (kind % 4 === 2) return shape("path", { d: `M${x} ${y - r * 1.3}L${x + r * 1.2} ${y + r}H${x - r * 1.2}Z`, ...attributes });
  return shape("path", { d: `M${x} ${y - r * 1.4}L${x + r * 1.4} ${y}L${x} ${y + r * 1.4}L${x - r * 1.4} ${y}Z`, ...attributes });
}

// What a line of a chart looks like, for its legend: the colour is not the only difference.
function lineKey(kind, cls, text) {
  const line = shape("path", { class: `curve ${cls}`, "stroke-dasharray": DASHES[kind % DASHES.length], d: "M1 7H33" });
  const svg = shape("svg", { class: "key", viewBox: "0 0 34 14", height: 14, "aria-hidden": "true" }, line, marker(kind, 17, 7, { class: cls }));
  return element("span", {}, svg, text);
}

function path(points) {
  return points.map(([x, y], k) => `${k ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
}

function stepRange(values) {
  return [Math.min(...values.map((v) => v[0])), Math.max(...values.map((v) => v[1]))];
}
