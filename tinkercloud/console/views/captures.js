// Capture sessions of agents: what they sampled as trajectories, with rewards.

import { get } from "../api.js";
import { LineChart } from "../charts.js";
import { bytes, copyable, facts, h, number, records, replace, significant, table, time } from "../dom.js";
import { listing, refreshed } from "./listing.js";

export const name = "captures";
export const title = "Captures";

const NUM_TRAJECTORIES = 100;

export function open(root, { item, failed }) {
  return item ? one(root, item, failed) : all(root, failed);
}

function all(root, failed) {
  return listing(root, {
    title, failed, path: "api/v1/captures", size: (answer) => answer.captures.length,
    draw: ({ captures }) => records("Captures",
      ["capture", "samples from", "created", "#turns", "#size", "closed"],
      captures.map((capture) => [
        h("a", { href: `#captures/${capture.capture_id}` }, capture.capture_id),
        capture.model ?? capture.follow,
        time(capture.created_at),
        number(capture.num_turns),
        number(capture.num_bytes, bytes),
        capture.closed ? "yes" : "no",
      ]), "No captures yet: an agent's conversations are kept in one."),
  });
}

function one(root, id, failed) {
  const path = `api/v1/captures/${encodeURIComponent(id)}`;
  const chart = new LineChart("Reward by trajectory", ["reward"], { by: "trajectory" });
  const head = h("div", {});
  const body = h("div", {});
  const charts = h("div", { class: "charts" }, chart.element);
  replace(root, h("h1", {}, "Capture"), head, charts, body);
  const stop = refreshed(
    async () => ({
      capture: await get(path),
      ...(await get(`${path}/trajectories?limit=${NUM_TRAJECTORIES}`)),
    }),
    ({ capture, trajectories }) => {
      replace(head, captureFacts(capture));
      const rewards = trajectories.map(({ reward }) => reward);
      charts.hidden = rewards.every((reward) => reward === null);
      chart.update(rewards.map((_, i) => i + 1), rewards);
      replace(body, trajectoryTable(trajectories), trajectories.map(conversation));
    }, failed);
  return () => {
    stop();
    chart.close();
  };
}

function captureFacts(capture) {
  return facts([
    ["id", copyable(capture.capture_id)],
    ["samples from", capture.model ?? capture.follow],
    ["created", time(capture.created_at)],
    ["expires", time(capture.expires_at)],
    ["turns", number(capture.num_turns)],
    ["OpenAI's API", copyable(capture.openai_base_url)],
    ["Anthropic's API", copyable(capture.anthropic_base_url)],
  ]);
}

function trajectoryTable(trajectories) {
  return [
    h("h2", {}, "Trajectories"),
    table("Trajectories", ["#number", "group", "episode", "#turns", "#sampled tokens", "#reward"],
      trajectories.map((trajectory, i) => [
        number(i + 1),
        trajectory.group ?? "–",
        trajectory.episode ?? "–",
        number(trajectory.turns.length),
        number(trajectory.turns.reduce((sum, turn) => sum + turn.num_sampled_tokens, 0)),
        number(trajectory.reward, significant),
      ]), "Nothing was sampled yet."),
  ];
}

function conversation(trajectory, i) {
  return h("details", {},
    h("summary", {}, `Messages of trajectory ${i + 1}`),
    trajectory.messages.map((message) => h("div", { class: "message" },
      h("p", { class: "hint" }, message.role),
      h("p", { class: "text" }, textOf(message)))));
}

/** Texts, and everything else as JSON. */
function textOf({ content, tool_calls: calls }) {
  const text = typeof content === "string" ? content : content ? JSON.stringify(content, null, 1) : "";
  return calls?.length ? `${text}\n${JSON.stringify(calls, null, 1)}` : text;
}
