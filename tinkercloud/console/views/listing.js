// Pages of a listing, read again every few seconds while they are shown.

import { get } from "../api.js";
import { h, replace } from "../dom.js";

const REFRESH_MS = 4000;
export const PAGE = 25;

/** Calls `load` now and every few seconds, and `draw` where it gave something new. */
export function refreshed(load, draw, failed) {
  let shown = null;
  let stopped = false;
  let timer = 0;
  async function refresh() {
    try {
      const loaded = document.hidden && shown !== null ? null : await load();
      const text = JSON.stringify(loaded);
      if (!stopped && loaded !== null && text !== shown) {
        shown = text;
        draw(loaded);
      }
    } catch (error) {
      if (stopped) return;
      failed(error);
      if (error.status === 401 || error.status === 404) return;
    }
    if (!stopped) timer = setTimeout(refresh, REFRESH_MS);
  }
  refresh();
  return () => {
    stopped = true;
    clearTimeout(timer);
  };
}

/** A listing with limit and offset. draw: the elements of an answer. */
export function listing(root, { title, path, size, draw, failed }) {
  const body = h("div", {});
  const place = h("p", { class: "hint", "aria-live": "polite" });
  const newer = h("button", { type: "button", click: () => turn(-PAGE) }, "Newer");
  const older = h("button", { type: "button", click: () => turn(PAGE) }, "Older");
  let offset = 0;
  let stop = () => {};
  replace(root, h("h1", {}, title), body, h("div", { class: "pages" }, newer, older, place));
  function turn(by) {
    stop();
    offset = Math.max(0, offset + by);
    const joint = path.includes("?") ? "&" : "?";
    stop = refreshed(() => get(`${path}${joint}limit=${PAGE}&offset=${offset}`), show, failed);
  }
  function show(answer) {
    const num = size(answer);
    newer.disabled = offset === 0;
    older.disabled = num < PAGE;
    const total = answer.cursor?.total_count;
    place.textContent = num ? `${offset + 1} to ${offset + num}${total ? ` of ${total}` : ""}` : "";
    replace(body, draw(answer));
  }
  turn(0);
  return () => stop();
}
