// What drafts do: how many are accepted at each depth, what they gain, how old drafters are.

import { duration, facts, h, number, percent, replace, significant, table } from "../dom.js";

export const name = "speculation";
export const title = "Speculation";

export function open(root, { live }) {
  const body = h("div", {});
  replace(root, h("h1", {}, title), body);
  return live.watch((snapshot) => replace(body, sections(snapshot)));
}

function sections({ whole_server: whole, speculation = {} }) {
  const bases = Object.entries(speculation ?? {});
  if (!whole) {
    return h("p", { class: "empty" },
      "The whole server's numbers are for administrators and for the users that metrics_users names.");
  }
  if (!bases.length) return h("p", { class: "empty" }, "Nothing was drafted yet.");
  return bases.map(([base, state]) => h("section", { "aria-label": base },
    h("h2", {}, base),
    facts([
      ["tokens per forward pass and sequence", number(state.tokens_per_sequence_forward, significant)],
      ["tokens", number(state.tokens)],
      ["forward passes", number(state.forwards)],
      ["time drafting", number(state.ms.draft / 1000, duration)],
      ["time verifying", number(state.ms.verify / 1000, duration)],
      ["rounds", counts(state.rounds)],
      ["rounds without drafts", counts(state.off)],
    ]),
    Object.entries(state.drafters).map(([drafter, record]) => drafterSection(drafter, record)),
    h("h3", {}, "Speed-up"),
    table(`Speed-up on ${base}`,
      ["sequences together", "#tokens per s with drafts", "#without", "#speed-up"],
      Object.entries(state.goodput).map(([load, goodput]) => [
        load.replace(/^(\d+)-\1$/, "$1"), number(goodput.speculative_per_s), number(goodput.plain_per_s),
        number(goodput.speedup, (ratio) => `${ratio.toFixed(2)} ×`),
      ]), "Rounds with and without drafts have not been compared yet."),
    hasGaps(state.goodput) ? h("p", { class: "hint" }, "–: no round of this kind at this load yet.") : null));
}

const hasGaps = (goodput) => Object.values(goodput).some(({ speedup }) => speedup === null || speedup === undefined);

function counts(numbers) {
  return Object.entries(numbers).filter(([, num]) => num).map(([kind, num]) => `${kind} ${num}`).join(", ");
}

function drafterSection(drafter, record) {
  const age = record.version_lag === 1 ? "1 step" : `${record.version_lag} steps`;
  return [
    h("h3", {}, `Drafter ${drafter}`),
    facts([
      ["acceptance, recent", number(record.acceptance, percent)],
      ["draft age", h("span", {}, number(record.version_lag, () => age), " behind the policy")],
      ["calibration alarm", record.alarmed ? "raised" : "no"],
    ]),
    table(`Acceptance by depth of ${drafter}`, ["#depth", "#verified", "#accepted", "#share", "of the verified"],
      record.depths.filter(({ verified }) => verified).map(({ verified, accepted }, depth) => [
        number(depth + 1), number(verified), number(accepted), number(accepted / verified, percent),
        h("meter", { min: 0, max: 1, value: accepted / verified, "aria-label": `accepted at depth ${depth + 1}` }),
      ]), "No draft was verified yet."),
  ];
}
