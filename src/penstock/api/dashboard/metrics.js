// Parsing and history of /metrics.

/** Snapshots, one per second: a few more than QUANTILE_S needs. */
const HISTORY = 65;
const KEPT_S = 300;
export const RATE_S = 5, QUANTILE_S = 60;

/** Exposition text as a map from metric name to [{labels, value}]; buckets are summed over tenants. */
export function parse(text) {
  const metrics = new Map(), buckets = new Map();
  for (const line of text.split("\n")) {
    const found = /^([a-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)$/i.exec(line);
    if (!found) continue;
    const labels = {};
    for (const [, name, value] of (found[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g))
      labels[name] = value.replace(/\\(.)/g, (_, c) => (c === "n" ? "\n" : c));
    const name = found[1].replace("penstock:", ""), value = Number(found[3].replace("Inf", "Infinity"));
    if (!metrics.has(name)) metrics.set(name, []);
    const bucket = buckets.get(`${name} ${labels.le}`);
    if (bucket !== undefined) { bucket.value += value; continue; }
    const made = labels.le === undefined ? { labels, value } : { labels: { le: labels.le }, value };
    if (labels.le !== undefined) buckets.set(`${name} ${labels.le}`, made);
    metrics.get(name).push(made);
  }
  return metrics;
}

/** Snapshots of the last minute, in order. */
export class Figures {
  #history = [];

  push(metrics) {
    this.#history.push({ at: performance.now(), metrics });
    if (this.#history.length > HISTORY) this.#history.shift();
  }

  get #last() { return this.#history.at(-1); }

  /** The series of a metric now. */
  series(name) { return this.#last.metrics.get(name) ?? []; }

  /** Values of a label. */
  values(name, label) { return [...new Set(this.series(name).map(s => s.labels[label]))].sort(); }

  /** Sum of a metric over the series whose labels include `match`. */
  total(name, match = {}, snapshot = this.#last) {
    return (snapshot.metrics.get(name) ?? [])
      .filter(s => Object.entries(match).every(([k, v]) => s.labels[k] === v))
      .reduce((sum, s) => sum + s.value, 0);
  }

  /** How much a counter grew; a restarted engine counts from zero. */
  growth(name, match, seconds) {
    return Math.max(0, this.total(name, match) - this.total(name, match, this.#first(seconds)));
  }

  rate(name, match = {}, seconds = RATE_S) {
    const passed = this.#last.at - this.#first(seconds).at;
    return passed > 0 ? (1000 * this.growth(name, match, seconds)) / passed : 0;
  }

  /** A quantile of a histogram over the last minute, interpolated inside its bucket. */
  quantile(name, q) {
    const number = le => Number(le.replace("+Inf", "Infinity"));
    const bounds = this.values(name + "_bucket", "le").sort((a, b) => number(a) - number(b));
    const counts = bounds.map(le => this.growth(name + "_bucket", { le }, QUANTILE_S));
    const wanted = q * counts.at(-1);
    if (!(wanted > 0)) return null;
    const i = counts.findIndex(c => c >= wanted);
    const low = i ? number(bounds[i - 1]) : 0, below = i ? counts[i - 1] : 0;
    const high = bounds[i] === "+Inf" ? low : number(bounds[i]);
    return low + ((high - low) * (wanted - below)) / (counts[i] - below);
  }

  #first(seconds) { return this.#history.find(s => this.#last.at - s.at <= seconds * 1000 + 200); }
}

/** Points of the plots, kept over reloads: [{at, ...}], at in milliseconds since 1970. */
export class Points {
  #key = null;
  #points = [];

  get all() { return this.#points; }

  /** Add a point of a server, drop old ones, and store the rest in the browser. */
  add(server, point) {
    const key = `penstock plots ${location.host} ${server}`;
    if (this.#key !== key) {
      this.#key = key;
      try { this.#points = JSON.parse(localStorage.getItem(key)) ?? []; } catch { this.#points = []; }
    }
    const at = Date.now();
    this.#points = [...this.#points, { at, ...point }].filter(p => p.at <= at && at - p.at <= 1000 * KEPT_S);
    try { localStorage.setItem(key, JSON.stringify(this.#points)); } catch { /* a private window keeps nothing */ }
  }

  /** [at, value] of every point; null where the page was closed. `value` takes a point and the one
   * before it. */
  series(value) {
    const made = [];
    for (const [i, point] of this.#points.entries()) {
      const before = this.#points[i - 1];
      const isGap = before !== undefined && point.at - before.at > 5000;
      if (isGap) made.push([point.at, null]);
      made.push([point.at, value(point, isGap ? undefined : before)]);
    }
    return made;
  }
}
