// Figures and plots of the server.

import { $, count, key, meter, percent, seconds, table } from "./dom.js";
import { Figures, Points, QUANTILE_S } from "./metrics.js";
import { plot } from "./plot.js";
import { showRequests } from "./requests.js";

/** Parts of a step of the target, in their order. */
const PHASES = [
  { name: "plan", css: "s3" },
  { name: "draft", css: "s1" },
  { name: "receive", css: "s5" },
  { name: "verify", css: "s0" },
  { name: "host", css: "s4" },
];
const AWAY = "unknown: the engine is away";
const LOADS = [{ name: "running", css: "s0", fill: true }, { name: "waiting", css: "s1", dashed: true }];
/** Gauges of policies, by the label that tells them apart. */
const GAUGES = [
  ["GoodSpeed: acceptance (α̂)", "acceptance_estimate", "tenant"],
  ["GoodSpeed: tokens of a round (X)", "goodput_estimate", "tenant"],
  ["Spin: tokens/s of a round", "drafter_goodput_estimate", "drafter"],
  ["Nested WAIT: requests by segment", "segment_requests", "segment"],
  ["Nested WAIT: thresholds", "segment_threshold", "segment"],
  ["Nested WAIT: ends, tokens", "segment_end", "segment"],
];
const MEMORY = [
  { name: "in use", field: "used", css: "s0", fill: true },
  { name: "fluid, mean", field: "mean", css: "s2", dashed: true },
  { name: "fluid, bound", field: "bound", css: "s1", dashed: true },
  { name: "capacity", field: "capacity", css: "s4" },
];

export class Overview {
  #figures = new Figures();
  #points = new Points();

  constructor() {
    key("requests-key", LOADS);
    key("kv-key", MEMORY);
  }

  /** metrics: parsed, or null if this key may not see them. known: from /dashboard/requests. */
  show(metrics, known) {
    for (const part of document.querySelectorAll(".figures")) part.hidden = metrics === null;
    $("no-figures").hidden = metrics !== null;
    showRequests(known);
    if (metrics === null) return;
    this.#figures.push(metrics);
    this.#points.add(known.model, this.#point());
    this.#tiles();
    this.#drafters();
    this.#tenants();
    this.#prices();
    this.#gauges();
    this.#totals();
    this.draw();
  }

  /** The plots, where they are shown. */
  draw() {
    const grown = field => (p, b) => (b && p[field] >= b[field] ? p[field] - b[field] : null);
    const tokens = this.#points.series((p, b) => {
      const more = grown("tokens")(p, b);
      return more === null ? null : (1000 * more) / (p.at - b.at);
    });
    plot($("tokens-plot"), [{ css: "s0", points: tokens, fill: true }], { unit: "tokens/s" });
    const plain = one => ({ ...one, points: this.#points.series(p => p[one.field ?? one.name] ?? null) });
    plot($("requests-plot"), LOADS.map(plain), { unit: "requests", empty: AWAY });
    plot($("kv-plot"), MEMORY.map(plain), { unit: "tokens", empty: AWAY });
    const perStep = ({ name }) => (p, b) => {
      const steps = grown("steps")(p, b);
      return steps > 0 && p[name] >= b[name] ? (1000 * (p[name] - b[name])) / steps : null;
    };
    const phases = PHASES.map(one => ({ ...one, points: this.#points.series(perStep(one)) }));
    plot($("step-plot"), phases, { unit: "ms", least: 0.001, stacked: true, empty: "no step in the last five minutes" });
  }

  #point() {
    const f = this.#figures, isUp = f.series("kv_cache_usage_perc").length > 0;
    const phase = name => f.total("target_step_seconds_total", { phase: name });
    const parts = { plan: phase("plan"), draft: phase("draft"), receive: phase("receive"), verify: phase("verify") };
    const inside = Object.values(parts).reduce((sum, x) => sum + x, 0);
    const capacity = isUp ? f.total("kv_cache_capacity_tokens") : null;
    const fluid = kind => (f.series("kv_cache_fluid_tokens").length ? f.total("kv_cache_fluid_tokens", { kind }) : null);
    return {
      tokens: f.total("generation_tokens_total"),
      running: isUp ? f.total("num_requests_running") : null,
      waiting: isUp ? f.total("num_requests_waiting") : null,
      used: isUp ? Math.round(capacity * f.total("kv_cache_usage_perc")) : null,
      capacity, mean: fluid("mean"), bound: fluid("bound"),
      steps: f.total("target_steps_total"),
      ...parts,
      // Time of drafters that run beside the target is not part of the step.
      host: Math.max(0, f.total("engine_busy_seconds_total") - inside),
    };
  }

  #tiles() {
    const f = this.#figures, now = this.#points.all.at(-1);
    $("tokens").textContent = count(f.rate("generation_tokens_total"));
    $("running").textContent = now.running === null ? "–" : count(now.running);
    $("waiting").textContent = now.waiting === null ? "–" : count(now.waiting);
    for (const [id, name] of [["ttft", "time_to_first_token_seconds"], ["itl", "inter_token_latency_seconds"]]) {
      $(id).textContent = seconds(f.quantile(name, 0.5));
      $(id + "-p95").textContent = "median of the last minute; 95% within " + seconds(f.quantile(name, 0.95));
    }
    $("busy").textContent = percent(Math.min(1, f.rate("engine_busy_seconds_total")));
    const steps = f.rate("engine_steps_total"), target = f.rate("target_steps_total");
    $("steps").textContent = steps ? `${count(steps)} steps/s` : "idle";
    $("finished").textContent = f.rate("request_success_total").toFixed(1) + " /s";
    const failed = ["abort", "error"].map(r => f.growth("request_success_total", { finished_reason: r }, QUANTILE_S));
    $("refusals").textContent = `last minute: ${count(failed[0])} aborted, ${count(failed[1])} failed`;
    $("kv").textContent = now.used === null ? "–" : percent(f.total("kv_cache_usage_perc"));
    $("kv-of").textContent = now.used === null ? "" : `of ${count(now.capacity)} tokens` + this.#fluidNote(now);
    const parts = PHASES.slice(0, 4).map(p => f.rate("target_step_seconds_total", { phase: p.name }));
    const inside = parts.reduce((sum, x) => sum + x, 0);
    parts.push(Math.max(0, f.rate("engine_busy_seconds_total") - inside));
    const perStep = x => (1000 * x / target).toFixed(2) + " ms";
    $("step").textContent = target ? perStep(parts.reduce((sum, x) => sum + x, 0)) : "–";
    key("step-key", PHASES.map((p, i) => (target ? { ...p, name: `${p.name} ${perStep(parts[i])}` } : p)));
  }

  #fluidNote({ capacity, bound }) {
    if (bound === null) return "";
    return bound > capacity ? "; this traffic may need more" : "; enough for this traffic";
  }

  #drafters() {
    const f = this.#figures, names = "spec_decode_num_drafts_total";
    const memory = name => f.series("drafter_kv_cache_usage_perc").find(s => s.labels.drafter === name)?.value;
    const price = name => f.series("draft_token_seconds").find(s => s.labels.drafter === name)?.value ?? null;
    const rows = f.values(names, "drafter").map(drafter => {
      const [drafts, proposed, accepted] = ["drafts", "draft_tokens", "accepted_tokens"]
        .map(n => f.growth(`spec_decode_num_${n}_total`, { drafter }, QUANTILE_S));
      const share = proposed ? accepted / proposed : 0, kv = memory(drafter);
      return [{ content: drafter, title: drafter }, f.rate(names, { drafter }).toFixed(1),
        count(f.total("drafter_switches_total", { drafter })),
        drafts ? (1 + accepted / drafts).toFixed(2) : "–", kv === undefined ? "–" : percent(kv), seconds(price(drafter)),
        proposed ? percent(share) : "–", meter(share)];
    });
    table("drafters", ["", "drafts/s", "switches to it", "mean acceptance length", "KV in use", "a token more", "accepted", ""], rows, "no drafts yet");
  }

  #tenants() {
    const f = this.#figures, tokens = "generation_tokens_total";
    const names = [...new Set([...f.values("tenant_weight", "tenant"), ...f.values(tokens, "tenant")])].sort();
    const rows = names.map(tenant => ({
      tenant, made: f.growth(tokens, { tenant }, QUANTILE_S), weight: f.total("tenant_weight", { tenant }) || 1,
    }));
    const made = rows.reduce((sum, r) => sum + r.made, 0);
    const weights = rows.reduce((sum, r) => sum + (r.made ? r.weight : 0), 0);
    table("tenants", ["", "weight", "tokens/s", "prompt tokens/s", "token value", "tokens", "by weight", ""], rows.map(r => {
      const share = made ? r.made / made : 0, due = r.made ? r.weight / weights : 0;
      return [{ content: r.tenant, title: r.tenant }, String(r.weight), f.rate(tokens, { tenant: r.tenant }).toFixed(1),
        f.rate("prompt_tokens_total", { tenant: r.tenant }).toFixed(1),
        f.series("tenant_token_value").find(s => s.labels.tenant === r.tenant)?.value.toFixed(2) ?? "–",
        r.made ? percent(share) : "idle", r.made ? percent(due) : "–", r.made ? meter(share, due) : ""];
    }), "no requests yet");
  }

  #prices() {
    const known = (name, show) => (this.#figures.series(name).length ? show(this.#figures.total(name)) : "–");
    const row = [known("price_of_second", x => x.toPrecision(4) * 1 + " tokens"), known("plain_step_seconds", seconds),
      known("kv_reserved_tokens", x => count(x) + " tokens")];
    table("prices", ["a second is worth", "step without drafts", "KV kept free to grow"],
      row.every(cell => cell === "–") ? [] : [row], "no policy has prices, or nothing was planned yet");
  }

  #gauges() {
    const rows = GAUGES.map(([title, name, label]) => [title, this.#figures.series(name)
      .map(s => `${s.labels[label]}: ${s.value.toPrecision(3) * 1}`).join(", ")]).filter(row => row[1]);
    $("policy").hidden = !rows.length;
    table("gauges", ["", "by tenant, drafter or segment"], rows);
  }

  #totals() {
    const f = this.#figures;
    const hits = f.total("prefix_cache_hits_total") / Math.max(1, f.total("prefix_cache_queries_total"));
    const ended = reason => count(f.total("request_success_total", { finished_reason: reason }));
    table("totals",
      ["tokens generated", "prompt tokens", "of them cached", "ended by stop", "by length", "aborted", "failed", "preemptions", "engine restarts"],
      [[count(f.total("generation_tokens_total")), count(f.total("prompt_tokens_total")), percent(hits),
        ...["stop", "length", "abort", "error"].map(ended),
        count(f.total("num_preemptions_total")), count(f.total("engine_restarts_total"))]]);
  }
}
