// Plots of the last five minutes, as SVG.

const PLOT_S = 300;
const SVG = "http://www.w3.org/2000/svg";

function add(svg, tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  svg.append(made);
}

/** Distance of the two lines of an axis: a round multiple of `least`. */
function step(top, least) {
  const wanted = Math.max(top / 2, least), power = 10 ** Math.floor(Math.log10(wanted));
  const isRound = x => power > 10 * least || Math.abs(Math.round((x * power) / least) - (x * power) / least) < 1e-6;
  return power * [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].find(x => isRound(x) && x * power >= wanted * 0.999999);
}

const short = x => String(Number((x >= 1e6 ? x / 1e6 : x >= 10000 ? x / 1000 : x).toPrecision(6))) + (x >= 1e6 ? " M" : x >= 10000 ? " k" : "");

/** series: [{css, points: [[milliseconds since 1970, value or null]], dashed, fill}], drawn on top of
 * each other if `stacked`. unit: of the values. least: smallest step of the axis. */
export function plot(svg, series, { unit, least = 1, stacked = false, empty = "" }) {
  const width = svg.clientWidth, height = svg.clientHeight, now = Date.now();
  if (!width) return;
  const shown = stacked ? stack(series) : series;
  const tops = shown.flatMap(s => s.points.map(([at, y]) => (now - at <= 1000 * PLOT_S ? y ?? 0 : 0)));
  const size = step(Math.max(0, ...tops), least), labels = [0, size, 2 * size].map(short);
  labels[2] += ` ${unit}`;
  const left = 12 + 6.3 * Math.max(...labels.slice(0, 2).map(l => l.length), 3), right = width - 4;
  const top = 20, bottom = height - 20;
  const x = at => right - ((right - left) * (now - at)) / (1000 * PLOT_S);
  const y = value => bottom - ((bottom - top) * value) / (2 * size);
  svg.replaceChildren();
  labels.forEach((label, i) => {
    const line = y(i * size);
    add(svg, "line", { class: "grid", x1: left, x2: right, y1: line, y2: line });
    // The top label has the unit.
    if (i === 2) add(svg, "text", { x: 0, y: line - 7 }, label);
    else add(svg, "text", { x: left - 6, y: line + 4, "text-anchor": "end" }, label);
  });
  for (const minutes of width > 420 ? [5, 4, 3, 2, 1, 0] : [5, 2.5, 0]) {
    const anchor = minutes === 5 ? "start" : minutes ? "middle" : "end";
    add(svg, "text", { x: x(now - 60000 * minutes), y: height - 4, "text-anchor": anchor }, minutes ? `−${minutes} min` : "now");
  }
  const isEmpty = shown.every(s => s.points.every(([, value]) => value === null));
  if (isEmpty && empty) add(svg, "text", { class: "empty", x: (left + right) / 2, y: (top + bottom) / 2, "text-anchor": "middle" }, empty);
  for (const one of [...shown].reverse()) draw(svg, one, { x, y, bottom, left, stacked });
}

function draw(svg, { css, points, dashed, fill, floor }, { x, y, bottom, left, stacked }) {
  const parts = [[]];
  for (const [i, [at, value]] of points.entries())
    if (value === null) parts.push([]);
    else if (x(at) >= left) parts.at(-1).push([x(at).toFixed(1), y(value).toFixed(1), floor ? y(floor[i][1]).toFixed(1) : bottom]);
  for (const part of parts.filter(p => p.length)) {
    const line = "M" + part.map(([a, b]) => `${a},${b}`).join("L");
    const back = part.toReversed().map(([a, , c]) => `${a},${c}`).join("L");
    if (stacked || fill) add(svg, "path", { class: `${stacked ? "band" : "under"} ${css}`, d: `${line}L${back}Z` });
    if (!stacked) add(svg, "path", { class: `line ${css}${dashed ? " dashed" : ""}`, d: line });
  }
}

/** Stack series that have the same times. */
function stack(series) {
  let floor = series[0].points.map(([at]) => [at, 0]);
  return series.map(one => {
    const points = one.points.map(([at, value], i) => [at, value === null ? null : value + (floor[i][1] ?? 0)]);
    const made = { ...one, points, floor };
    floor = points;
    return made;
  });
}
