// Checkpoints: paths to copy, files to download.

import { url } from "../api.js";
import { bytes, copyable, h, number, records, time } from "../dom.js";
import { listing } from "./listing.js";

export const name = "checkpoints";
export const title = "Checkpoints";

export function open(root, { failed }) {
  return listing(root, {
    title, failed, path: "api/v1/checkpoints", size: (answer) => answer.checkpoints.length,
    draw: ({ checkpoints }) => checkpointTable(checkpoints),
  });
}

export function checkpointTable(checkpoints) {
  const columns = ["path", "type", "saved", "#size", "expires", "published", "actions"];
  return records("Checkpoints", columns, checkpoints.map((checkpoint) => [
    copyable(checkpoint.tinker_path),
    checkpoint.checkpoint_type,
    time(checkpoint.time),
    number(checkpoint.size_bytes, bytes),
    checkpoint.expires_at ? time(checkpoint.expires_at) : "never",
    checkpoint.public ? "yes" : "no",
    actions(checkpoint),
  ]), "No checkpoints yet: save_state and save_weights_for_sampler make them.");
}

function actions(checkpoint) {
  const path = checkpoint.tinker_path;
  const run = path.slice("tinker://".length).split("/")[0];
  const archive = `api/v1/training_runs/${encodeURIComponent(run)}/checkpoints/${checkpoint.checkpoint_id}/archive`;
  return h("span", { class: "actions" },
    checkpoint.checkpoint_type === "sampler"
      ? h("a", { href: `#chat?model=${encodeURIComponent(path)}`, "aria-label": `Chat with ${path}` }, "Chat") : null,
    h("a", { href: url(archive), download: true, "aria-label": `Download ${path}` }, "Download"));
}
