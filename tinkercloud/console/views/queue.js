// What is acknowledged and has not ended, by user and model; rates by kind of operation.

import { duration, h, number, records, replace, table } from "../dom.js";
import { labelsOf, rate } from "../live.js";

export const name = "queue";
export const title = "Queue";

const ENDED = "tinkercloud_operations_total";
const WINDOW = 5; // snapshots that a rate is over

export function open(root, { live }) {
  const waiting = h("div", {});
  const rates = h("div", {});
  const users = h("div", {});
  replace(root,
    h("h1", {}, title), waiting,
    h("h2", {}, "Operations"), rates,
    h("h2", {}, "Users"), users);
  return live.watch((snapshot) => {
    const before = live.history.at(-1 - WINDOW) ?? live.history[0];
    replace(waiting, queueTable(snapshot));
    replace(rates, operationTable(before, snapshot));
    replace(users, userTable(before, snapshot));
  });
}

function queueTable({ queues }) {
  return records("Queue", ["user", "model or sampler", "operation", "#waiting", "#running", "#longest wait"],
    queues.map((queue) => [
      queue.user, owner(queue.owner), queue.kind,
      number(queue.waiting), number(queue.running), number(queue.oldest_s, duration),
    ]), "Nothing waits and nothing runs.");
}

/** A run is a link. */
function owner(id) {
  return id.includes(":train:") ? h("a", { href: `#runs/${id}` }, id) : id;
}

function operationTable(before, after) {
  const kinds = labelsOf(after, ENDED, "kind");
  return table("Operations by kind", ["operation", "#per s", "#failed by the server, per s"],
    kinds.map((kind) => [
      kind,
      number(rate(before, after, ENDED, { kind })),
      number(rate(before, after, ENDED, { kind, outcome: "failed_server" })),
    ]), "None has ended since the server's start.");
}

function userTable(before, after) {
  const tokens = "tinkercloud_tokens_total";
  return table("Operations and tokens by user",
    ["user", "#operations per s", "#tokens trained per s", "#prefilled per s", "#sampled per s"],
    labelsOf(after, ENDED, "user").map((user) => [
      user,
      number(rate(before, after, ENDED, { user })),
      ...["training", "prefill", "sample"].map((kind) =>
        number(rate(before, after, tokens, { user, kind }))),
    ]), "Nobody yet.");
}
