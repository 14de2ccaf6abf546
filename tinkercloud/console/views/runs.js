// Training runs; of one run its curves as it trains, and its checkpoints.

import { events, get } from "../api.js";
import { LineChart } from "../charts.js";
import { copyable, facts, h, number, records, replace, significant, table, time } from "../dom.js";
import { checkpointTable } from "./checkpoints.js";
import { listing, refreshed } from "./listing.js";

export const name = "runs";
export const title = "Runs";

// Metrics by the names that docs/losses.md has, in the order of their charts; others follow.
const NAMES = new Map([
  ["loss:sum", "Loss (sum)"],
  ["ppo_kl:mean", "KL of sampler and policy"],
  ["pg_clipfrac:mean", "Clip fraction"],
  ["entropy_estimate:mean", "Entropy (estimate)"],
  ["ratio:mean", "Ratio, mean"],
  ["ratio:max", "Ratio, largest"],
  ["unclipped_grad_l2:mean", "Gradient norm"],
  ["clipped_grad_l2:mean", "Gradient norm, clipped"],
  ["trained_tokens:sum", "Trained tokens"],
  ["on_policy_ratio_deviation:max", "|ratio - 1| on-policy, largest"],
  ["on_policy_tokens:sum", "On-policy tokens"],
]);
const MAX_CHARTS = 12; // where a run has more metrics, those that lead are seen at once
const isReward = (key) => /reward/i.test(key);
const leads = (key) => NAMES.has(key) || /reward|loss|kl\b|entropy|accuracy|correct/i.test(key);

export function open(root, { item, failed, who }) {
  return item ? one(root, item, failed) : all(root, failed, who);
}

function all(root, failed, who) {
  const scope = who.role === "admin" ? "?access_scope=accessible" : "";
  return listing(root, {
    title, failed, path: `api/v1/training_runs${scope}`,
    size: (answer) => answer.training_runs.length,
    draw: ({ training_runs: runs }) => records("Training runs",
      ["run", "base model", "owner", "#LoRA rank", "last request", "last checkpoint"],
      runs.map((run) => [
        h("a", { href: `#runs/${run.training_run_id}` }, run.training_run_id),
        run.base_model,
        run.model_owner,
        run.is_lora ? number(run.lora_rank) : "full",
        time(run.last_request_time),
        newest(run.last_checkpoint, run.last_sampler_checkpoint)?.checkpoint_id ?? "–",
      ]),
      "No runs yet: create_lora_training_client makes one."),
  });
}

/** Of two checkpoints, either of which may be missing. */
function newest(training, sampler) {
  if (!training || !sampler) return training ?? sampler;
  return new Date(training.time) < new Date(sampler.time) ? sampler : training;
}

function one(root, id, failed) {
  const head = h("div", {});
  const saved = h("div", {});
  const reported = new Curves("Reported by the script", "Reported of the newest step");
  const computed = new Curves("Computed by the server", "Metrics of the newest step",
    "No step of the optimizer yet.");
  replace(root, h("h1", {}, "Run"), head, reported.element, computed.element, h("h2", {}, "Checkpoints"), saved);
  const stops = [
    refreshed(() => get(`api/v1/training_runs/${encodeURIComponent(id)}`), (run) => replace(head, runFacts(run)), failed),
    refreshed(() => get(`api/v1/training_runs/${encodeURIComponent(id)}/checkpoints`),
      (answer) => replace(saved, checkpointTable(answer.checkpoints)), failed),
    events(`console/runs/${encodeURIComponent(id)}/events`,
      { points: (points) => computed.add(points), reported: (points) => reported.add(points) },
      () => failed(new Error("The curves are not followed any more: load the page again."))),
    () => reported.close(),
    () => computed.close(),
  ];
  return () => stops.forEach((stop) => stop());
}

function runFacts(run) {
  const session = run.training_run_id.split(":")[0];
  return facts([
    ["id", copyable(run.training_run_id)],
    ["session", h("a", { href: `#sessions/${session}` }, session)],
    ["base model", run.base_model],
    ["owner", run.model_owner],
    ["LoRA rank", run.is_lora ? number(run.lora_rank) : "full weights"],
    ["last request", time(run.last_request_time)],
    ["metadata", Object.keys(run.user_metadata ?? {}).length ? JSON.stringify(run.user_metadata) : null],
  ]);
}

/** Charts of metrics by step, and a table of the newest step. note: shown as long as there is no
 * point; without one nothing is. */
class Curves {
  constructor(title, caption, note = null) {
    this.caption = caption;
    this.points = new Map();
    this.charts = new Map();
    this.note = h("p", { class: "empty" }, note);
    this.grid = h("div", { class: "charts" });
    this.others = h("div", { class: "charts" });
    this.summary = h("summary", {});
    this.more = h("details", { hidden: true }, this.summary, this.others);
    this.latest = h("div", {});
    this.element = h("section", { "aria-label": title, hidden: note === null },
      h("h2", {}, title), this.note, this.grid, this.more, this.latest);
  }

  /** What is there already, which comes again after a lost connection, is replaced. */
  add(points) {
    for (const point of points) this.points.set(point.step, point);
    if (!this.points.size) return;
    this.element.hidden = false;
    this.note.hidden = true;
    const sorted = [...this.points.values()].sort((a, b) => a.step - b.step);
    const xs = sorted.map((point) => point.step);
    const names = metricNames(sorted);
    this.place(names);
    for (const key of names) {
      this.charts.get(key).update(xs, sorted.map((point) => point.metrics[key] ?? null));
    }
    replace(this.latest, lastStep(sorted.at(-1), names, this.caption));
  }

  /** A chart for each name, where it belongs. */
  place(names) {
    if (names.every((key) => this.charts.has(key))) return;
    for (const key of names) {
      if (!this.charts.has(key)) this.charts.set(key, new LineChart(NAMES.get(key) ?? key, [key]));
    }
    const elements = (keys) => keys.map((key) => this.charts.get(key).element);
    const others = names.length <= MAX_CHARTS ? [] : names.filter((key) => !leads(key));
    replace(this.grid, elements(names.filter((key) => !others.includes(key))));
    replace(this.others, elements(others));
    this.more.hidden = !others.length;
    replace(this.summary, `${others.length} more metrics`);
  }

  close() {
    for (const chart of this.charts.values()) chart.close();
  }
}

/** Rewards first, then those of NAMES, then others. */
function metricNames(points) {
  const all = [...new Set(points.flatMap((point) => Object.keys(point.metrics)))]
    .sort(new Intl.Collator("en", { numeric: true }).compare);
  const known = [...NAMES.keys()];
  const rank = (key) => (isReward(key) ? -1 : known.includes(key) ? known.indexOf(key) : known.length);
  return all.sort((a, b) => rank(a) - rank(b)); // a stable sort: others stay in their order
}

function lastStep({ step, finished_at: finishedAt, metrics }, names, caption) {
  return [
    h("h3", {}, "Step ", number(step), ...(finishedAt === undefined ? [] : [", ", time(finishedAt)])),
    h("div", { class: "metrics" }, table(caption, ["metric", "#value"],
      names.filter((key) => key in metrics).map((key) => [key, number(metrics[key], significant)]))),
  ];
}
