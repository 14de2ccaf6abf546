// Tokens per second, memory, and what crashes cost: since the page was opened.

import { url } from "../api.js";
import { LineChart } from "../charts.js";
import { bytes, count, duration, facts, h, number, percent, replace, significant, table } from "../dom.js";
import { labelsOf, metric, rate } from "../live.js";

export const name = "server";
export const title = "Server";

const TOKENS = "tinkercloud_tokens_total";
const TOKEN_KINDS = { training: "trained", prefill: "prefilled", sample: "sampled" };
const MEMORY = {
  process_resident_memory_bytes: "API process",
  tinkercloud_engine_memory_bytes: "engine",
  tinkercloud_device_memory_bytes: "accelerator",
};

export function open(root, { live, who }) {
  const options = { by: "time", fromZero: true };
  const tokens = new LineChart("Tokens per second", Object.values(TOKEN_KINDS), { ...options, format: count });
  const memory = new LineChart("Memory", Object.values(MEMORY), { ...options, format: bytes });
  const now = h("div", {});
  replace(root, h("h1", {}, title),
    h("div", { class: "charts" }, tokens.element, memory.element), now);
  const stop = live.watch((snapshot) => {
    const times = live.history.map(({ time }) => time);
    tokens.update(times, ...Object.keys(TOKEN_KINDS).map((kind) => live.history.map((after, i) =>
      (i ? rate(live.history[i - 1], after, TOKENS, { kind }) : null))));
    memory.update(times, ...Object.keys(MEMORY).map((key) =>
      live.history.map((reading) => metric(reading, key))));
    replace(now, sections(snapshot, who));
  });
  return () => {
    stop();
    tokens.close();
    memory.close();
  };
}

function sections(snapshot, who) {
  if (!snapshot.whole_server) {
    return h("p", { class: "hint" },
      "These are your own numbers; those of the whole server are for administrators and for the users that metrics_users names.");
  }
  const pools = labelsOf(snapshot, "tinkercloud_phase_ms", "pool");
  return [
    h("h2", {}, "Memory and engine"), facts(engine(snapshot)),
    h("h2", {}, "Recoveries and replay"), facts(recovery(snapshot)), proof(who),
    ...(pools.length ? [h("h2", {}, "Phases of GPUs"), phases(snapshot, pools)] : []),
  ];
}

function proof({ docs }) {
  const page = "docs-site/docs/contributing.html#the-simulation";
  const text = "How it is tested that nothing acknowledged is lost: the simulation";
  return docs ? h("p", {}, h("a", { href: url(page) }, text)) : null;
}

const value = (snapshot, name, format) => {
  const reading = metric(snapshot, `tinkercloud_${name}`);
  return reading === null ? null : number(reading, format);
};

function engine(snapshot) {
  const held = metric(snapshot, "tinkercloud_kv_blocks_held");
  const blocks = metric(snapshot, "tinkercloud_kv_blocks");
  return [
    ...Object.entries(MEMORY).map(([key, text]) =>
      [`memory, ${text}`, metric(snapshot, key) === null ? null : number(metric(snapshot, key), bytes)]),
    ["engine, highest while sampling", value(snapshot, "sampling_memory_bytes", bytes)],
    ["engine, highest while training", value(snapshot, "training_memory_bytes", bytes)],
    ["keys and values in use", blocks ? number(held / blocks, percent) : null],
    ["sequences decoded", value(snapshot, "sampling_running")],
    ["samples waiting", value(snapshot, "sampling_waiting")],
    ["training operations in the engine", value(snapshot, "training_waiting")],
    ["models in memory", value(snapshot, "models") ?? value(snapshot, "num_models")],
    ["published versions", value(snapshot, "versions")],
    ["of these on disk", value(snapshot, "versions_on_disk")],
    ["idle models put away", value(snapshot, "models_put_away_total")],
  ];
}

function recovery(snapshot) {
  return [
    ["replay debt (computing that a crash now would cost)", value(snapshot, "replay_debt_seconds", duration)],
    ["models brought back", value(snapshot, "recoveries_total")],
    ["engine restarts", value(snapshot, "engine_restarts")],
    ["largest deviation of a replay, nats", value(snapshot, "replay_deviation_nats", significant)],
    ["snapshots taken", value(snapshot, "snapshots")],
    ["written by snapshots", value(snapshot, "snapshot_bytes", bytes)],
    ["largest |ratio - 1| on-policy", value(snapshot, "on_policy_ratio_deviation_max", significant)],
    ["mean |trainer - sampler| on-policy, nats", value(snapshot, "on_policy_logprob_deviation_mean", significant)],
  ];
}

/** Of a cluster, whose GPUs hold what training needs, or what sampling does. */
function phases(snapshot, pools) {
  return table("Phases of GPUs", ["pool", "#moving, ms", "#moves", "#operations waiting"],
    pools.map((pool) => [pool, ...["phase_ms", "phase_moves", "phase_waiting"].map((key) =>
      number(metric(snapshot, `tinkercloud_${key}`, { pool })))]));
}
