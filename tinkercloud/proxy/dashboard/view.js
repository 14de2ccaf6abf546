// What a proxy does: its charts since the page was opened, and its counts since it was started.

import { LineChart } from "./console/charts.js";
import { count, duration, facts, h, number, percent, records, replace, table } from "./console/dom.js";

const MAX_HISTORY = 900;
const OVER_S = 10; // of what is called now

// What `get` counts between two readings; a proxy that was started anew counts from 0.
function gained(before, after, get) {
  const [first, last] = [get(before.status), get(after.status)];
  return before.status.uptime_s <= after.status.uptime_s ? last - first : last;
}

const rate = (before, after, get) => gained(before, after, get) / (after.time - before.time);
const speculation = (name) => (status) => status.speculation?.[name] ?? 0;
const accepted = speculation("accepted");
const targets = (status) => speculation("verified")(status) - accepted(status) + speculation("plain")(status);
const passed = (status) => status.requests.passed_tokens;
const tokens = (status) => accepted(status) + targets(status) + passed(status);
const total = (counts) => Object.values(counts).reduce((sum, value) => sum + value, 0);
const requests = ({ requests: made }) => made.speculated + total(made.passed_on);

/** Of what was done between two readings; null: nothing was. */
function share(before, after, of, among) {
  const all = gained(before, after, among);
  return all > 0 ? gained(before, after, of) / all : null;
}

const twoPlaces = (value) => value.toFixed(2);

export class View {
  constructor() {
    this.history = []; // { time, status }, oldest first
    const options = { by: "time", fromZero: true };
    this.speed = new LineChart("Tokens per second", ["drafted and accepted", "by the target", "passed on"],
      { ...options, format: count });
    this.acceptance = new LineChart("Acceptance of drafted tokens", ["accepted"], { ...options, format: percent });
    this.rounds = new LineChart("Tokens a round", ["tokens"], { ...options, format: twoPlaces });
    this.charts = [this.speed, this.acceptance, this.rounds];
    this.state = h("div", {});
    this.counts = h("div", {});
    this.element = h("div", { class: "view" }, h("h1", {}, "Proxy"), this.state,
      h("div", { class: "charts" }, this.charts.map((chart) => chart.element)), this.counts);
  }

  show(status, time) {
    const began = this.history.at(-1)?.status.uptime_s ?? 0;
    if (status.uptime_s < began) this.history = []; // another one's numbers
    this.history.push({ time, status });
    if (this.history.length > MAX_HISTORY) this.history.shift();
    this.draw();
    replace(this.state, state(status), facts(now(this.history)));
    replace(this.counts, drafters(status), made(status), totals(status));
  }

  draw() {
    const times = this.history.map(({ time }) => time);
    const between = (value) => this.history.map((after, i) => (i ? value(this.history[i - 1], after) : null));
    this.speed.update(times, ...[accepted, targets, passed].map((get) =>
      between((before, after) => rate(before, after, get))));
    this.acceptance.update(times, between((before, after) =>
      share(before, after, accepted, speculation("drafted"))));
    this.rounds.update(times, between((before, after) =>
      share(before, after, speculation("verified"), speculation("rounds"))));
    for (const chart of [this.acceptance, this.rounds]) chart.element.hidden = !this.history.at(-1).status.speculation;
  }

  close() {
    for (const chart of this.charts) chart.close();
  }
}

function state({ target, speculation: made, passes_on: reason }) {
  const why = (text) => h("span", { class: "long" }, text);
  return facts([
    ["target", why(`${target.model} at ${target.url}`)],
    ["speculation", made
      ? h("span", { class: "long" }, mark("on", "active"), `: drafts are verified by the target (${made.verified_by})`)
      : h("span", { class: "long" }, mark("off"), `, every request is passed on: ${reason}`)],
    ["state of the target", target.up ? mark("answers", "active") : mark("does not answer", "failed")],
    ["its last answer", target.answered_s === null ? null : `${duration(target.answered_s)} ago`],
    ["why it does not answer", target.trouble && why(target.trouble)],
  ]);
}

const mark = (text, kind = "") => h("span", { class: `state ${kind}` }, text);

/** Over the last seconds. */
function now(history) {
  const last = history.at(-1);
  const first = history.find(({ time }) => time >= last.time - OVER_S);
  const speed = first === last ? null : rate(first, last, tokens);
  return [
    ["tokens per second", number(speed, count)],
    ["requests underway", number(last.status.requests.running)],
    ["requests per second", number(first === last ? null : rate(first, last, requests), count)],
    ["up for", duration(last.status.uptime_s)],
  ];
}

function drafters({ drafters: all, speculation: made }) {
  if (!made) return [];
  const rule = { race: "The first draft is verified.", consensus: "What most drafts agree on is verified." };
  return [
    h("h2", {}, "Drafters"),
    all.length > 1 ? h("p", { class: "hint" }, rule[made.several]) : null,
    records("Drafters", ["drafter", "state", "#rounds asked", "#wins", "#share of wins", "", "#failed"],
      all.map(({ name, up, asked, taken, failed }) => [
        name,
        up ? mark("up", "active") : mark("left out", "failed"),
        number(asked), number(taken), number(asked ? taken / asked : null, percent),
        h("meter", { min: 0, max: 1, value: asked ? taken / asked : 0, "aria-label": `share of wins of ${name}` }),
        number(failed),
      ])),
    facts(all.map(({ name, trouble }) =>
      [`why ${name} is left out`, trouble && h("span", { class: "long" }, trouble)])),
  ];
}

function made({ requests: { speculated, passed_on: passedOn, failed } }) {
  const reasons = Object.entries(passedOn).sort(([, one], [, other]) => other - one);
  return [
    h("h2", {}, "Requests since the start"),
    table("Requests", ["answered", "#requests"], [
      ["by speculation", number(speculated)],
      ...reasons.map(([field, num]) => [field === "all" ? "passed on" : `passed on for ${field}`, number(num)]),
      ["with an error or a refusal of the target", number(failed)],
    ]),
  ];
}

function totals({ speculation: made, requests: { passed_tokens: passedTokens } }) {
  return [
    h("h2", {}, "Tokens since the start"),
    made ? h("p", { class: "hint" },
      "Where the target is faster alone it samples without drafts, and drafts are at most compared with its sample.") : null,
    facts([
      ...(made ? [
        ["acceptance", number(made.acceptance, percent)],
        ["tokens a round", number(made.tokens_a_round, twoPlaces)],
        ["rounds", number(made.rounds)],
        ["drafted", number(made.drafted)],
        ["of these accepted", number(made.accepted)],
        ["by the target in rounds", number(made.verified - made.accepted)],
        ["by the target without a draft", number(made.plain)],
      ] : []),
      ["of answers passed on", number(passedTokens)],
    ]),
  ];
}
