// Finished samples as text, each token coloured by its log-probability.

import { get } from "../api.js";
import { facts, h, number, replace, significant, time } from "../dom.js";
import { refreshed } from "./listing.js";

export const name = "samples";
export const title = "Samples";

const NUM_SHOWN = 20;
// The colour of a token by the least log-probability that has it; style.css has the colours.
const BOUNDS = [-0.1, -0.5, -1, -2, -4];

export function open(root, { failed }) {
  const live = h("input", { type: "checkbox", id: "live", checked: true });
  const body = h("div", {});
  let shown = [];
  replace(root,
    h("h1", {}, title),
    h("div", { class: "bar" },
      h("span", {}, live, h("label", { for: "live" }, "show new ones as they come")),
      legend()),
    body);
  return refreshed(
    async () => {
      if (live.checked || !shown.length) shown = (await get(`console/samples?limit=${NUM_SHOWN}`)).samples;
      return shown;
    },
    (samples) => replace(body, samples.length ? samples.map(article) : h("p", { class: "empty" },
      "No samples yet, or none of a model with a tokenizer. Results are kept for a day.")),
    failed);
}

function legend() {
  const names = [...BOUNDS.map((bound) => `≥ ${bound}`), `< ${BOUNDS.at(-1)}`];
  return h("p", { class: "legend" }, "log-probability: ",
    names.map((text, i) => h("span", { class: `token p${i}` }, text)));
}

function article(sample) {
  return h("article", { class: "sample" },
    h("h2", {}, weights(sample)),
    facts([
      ["finished", time(sample.finished_at)],
      ["base model", sample.base_model],
      ["temperature", number(sample.temperature)],
      ["seed", sample.seed === null ? null : String(sample.seed)],
      ["prompt", `${sample.num_prompt_tokens} tokens`],
    ]),
    h("details", {}, h("summary", {}, "Prompt"), h("pre", { class: "text" }, sample.prompt)),
    sample.sequences.map(sequence),
    sample.num_sequences > sample.sequences.length
      ? h("p", { class: "hint" }, `${sample.num_sequences - sample.sequences.length} more are not shown`) : null);
}

function weights({ weights: name, base_model: base }) {
  if (!name) return base;
  const run = name.replace(/^tinker:\/\//, "").split("/")[0];
  return h("a", { href: `#runs/${run}` }, name);
}

function sequence({ tokens, num_tokens: numTokens, stop_reason: stop }, i) {
  const known = tokens.map(([, logprob]) => logprob).filter((logprob) => logprob !== null);
  const mean = known.length ? known.reduce((sum, logprob) => sum + logprob, 0) / known.length : null;
  const kept = tokens.length < numTokens ? `, the first ${tokens.length} shown` : "";
  return h("section", { "aria-label": `Answer ${i + 1}` },
    h("p", { class: "hint" }, `${numTokens} tokens${kept}, ended by ${stop}, mean log-probability `,
      number(mean, significant)),
    h("p", { class: "text tokens" }, tokens.map(token)));
}

function token([text, logprob]) {
  const rank = BOUNDS.findIndex((bound) => logprob >= bound);
  const kind = logprob === null ? "" : `p${rank < 0 ? BOUNDS.length : rank}`;
  const hint = logprob === null ? null : `log-probability ${significant(logprob)}`;
  return h("span", { class: `token ${kind}`, title: hint }, text);
}
