// Sessions: what a client did in one go; of one session its runs and samplers.

import { get } from "../api.js";
import { copyable, facts, h, replace, table, time } from "../dom.js";
import { listing, refreshed } from "./listing.js";

export const name = "sessions";
export const title = "Sessions";

export function open(root, { item, failed }) {
  return item ? one(root, item, failed) : all(root, failed);
}

function all(root, failed) {
  return listing(root, {
    title, failed, path: "api/v1/sessions", size: (answer) => answer.sessions.length,
    draw: ({ sessions, states }) => table("Sessions", ["session", "state"],
      sessions.map((id) => [h("a", { href: `#sessions/${id}` }, id), state(states[id])]),
      "No sessions yet. A client that connects makes one."),
  });
}

const state = (text) => h("span", { class: `state ${text}` }, text);

function one(root, id, failed) {
  return refreshed(() => get(`api/v1/sessions/${encodeURIComponent(id)}`), (session) => {
    const runs = session.training_run_ids.map((run) => [h("a", { href: `#runs/${run}` }, run)]);
    replace(root,
      h("h1", {}, "Session"),
      facts([
        ["id", copyable(id)],
        ["state", state(session.state)],
        ["name", session.display_name],
        ["project", session.project_id],
        ["ended", session.status?.time ? time(session.status.time) : null],
        ["detail", session.status?.detail],
        ["metadata", session.user_metadata ? JSON.stringify(session.user_metadata) : null],
      ]),
      h("h2", {}, "Runs"),
      table("Runs of the session", ["run"], runs),
      h("h2", {}, "Samplers"),
      table("Samplers of the session", ["sampler"], session.sampler_ids.map((sampler) => [sampler])));
  }, failed);
}
