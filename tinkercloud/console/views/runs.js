// Training runs; of one run its curves as it trains, and its checkpoints.

import { events, get } from "../api.js";
import { LineChart } from "../charts.js";
import { copyable, facts, h, number, replace, significant, table, time } from "../dom.js";
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
  ["trained_tokens:sum", "Trained tokens"],
]);

export function open(root, { item, failed, who }) {
  return item ? one(root, item, failed) : all(root, failed, who);
}

function all(root, failed, who) {
  const scope = who.role === "admin" ? "?access_scope=accessible" : "";
  return listing(root, {
    title, failed, path: `api/v1/training_runs${scope}`,
    size: (answer) => answer.training_runs.length,
    draw: ({ training_runs: runs }) => table("Training runs",
      ["run", "base model", "owner", "#LoRA rank", "last request", "last checkpoint"],
      runs.map((run) => [
        h("a", { href: `#runs/${run.training_run_id}` }, run.training_run_id),
        run.base_model,
        run.model_owner,
        run.is_lora ? number(run.lora_rank) : "full",
        time(run.last_request_time),
        (run.last_checkpoint ?? run.last_sampler_checkpoint)?.checkpoint_id ?? "–",
      ]),
      "No runs yet: create_lora_training_client makes one."),
  });
}

function one(root, id, failed) {
  const head = h("div", {});
  const saved = h("div", {});
  const curves = new Curves(id);
  replace(root, h("h1", {}, "Run"), head, curves.element, h("h2", {}, "Checkpoints"), saved);
  const stops = [
    refreshed(() => get(`api/v1/training_runs/${encodeURIComponent(id)}`), (run) => replace(head, runFacts(run)), failed),
    refreshed(() => get(`api/v1/training_runs/${encodeURIComponent(id)}/checkpoints`),
      (answer) => replace(saved, checkpointTable(answer.checkpoints)), failed),
    events(`console/runs/${encodeURIComponent(id)}/events`, { points: (points) => curves.add(points) },
      () => failed(new Error("The curves are not followed any more: load the page again."))),
    () => curves.close(),
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

class Curves {
  constructor(id) {
    this.id = id;
    this.points = [];
    this.charts = new Map();
    this.note = h("p", { class: "empty" }, "No step of the optimizer yet.");
    this.grid = h("div", { class: "charts" });
    this.latest = h("div", {});
    this.element = h("section", { "aria-label": "Curves" }, this.note, this.grid, this.latest);
  }

  /** After a lost connection the stream begins where it began: what is there is not added again. */
  add(points) {
    const last = this.points.at(-1)?.step ?? 0;
    this.points.push(...points.filter((point) => point.step > last));
    if (!this.points.length) return;
    this.note.hidden = true;
    const xs = this.points.map((point) => point.step);
    for (const key of this.names()) {
      if (!this.charts.has(key)) this.addChart(key);
      this.charts.get(key).update(xs, this.points.map((point) => point.metrics[key] ?? null));
    }
    replace(this.latest, this.lastStep());
  }

  names() {
    const all = new Set(this.points.flatMap((point) => Object.keys(point.metrics)));
    const known = [...NAMES.keys()].filter((key) => all.has(key));
    return [...known, ...[...all].filter((key) => !NAMES.has(key)).sort()];
  }

  addChart(key) {
    const chart = new LineChart(NAMES.get(key) ?? key, [key]);
    this.charts.set(key, chart);
    replace(this.grid, this.names().filter((name) => this.charts.has(name))
      .map((name) => this.charts.get(name).element));
  }

  lastStep() {
    const { step, finished_at, metrics } = this.points.at(-1);
    return [
      h("h2", {}, "Step ", number(step), ", ", time(finished_at)),
      table("Metrics of the newest step", ["metric", "#value"],
        this.names().filter((key) => key in metrics)
          .map((key) => [key, number(metrics[key], significant)])),
    ];
  }

  close() {
    for (const chart of this.charts.values()) chart.close();
  }
}
