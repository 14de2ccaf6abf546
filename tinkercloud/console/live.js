// The server as it is, every two seconds, and its recent past as long as the page is open.

import { events } from "./api.js";

const MAX_HISTORY = 900;

export class Live {
  constructor(lost) {
    this.history = []; // snapshots, oldest first
    this.listeners = new Set();
    this.stop = events("console/events", { server: (snapshot) => this.add(snapshot) }, lost);
  }

  get last() {
    return this.history.at(-1) ?? null;
  }

  add(snapshot) {
    this.history.push(snapshot);
    if (this.history.length > MAX_HISTORY) this.history.shift();
    for (const listener of this.listeners) listener(snapshot);
  }

  /** Calls `listener` with the newest snapshot, if there is one, and with those to come. */
  watch(listener) {
    this.listeners.add(listener);
    if (this.last) listener(this.last);
    return () => this.listeners.delete(listener);
  }
}

/** The sum of a metric's series whose labels are these; null: there is none. */
export function metric(snapshot, name, where = {}) {
  const values = snapshot.metrics
    .filter(([own, labels]) => own === name
      && Object.entries(where).every(([label, text]) => labels[label] === text))
    .map(([, , value]) => value);
  return values.length ? values.reduce((sum, value) => sum + value, 0) : null;
}

/** The values that a label has in a metric's series. */
export function labelsOf(snapshot, name, label) {
  const values = snapshot.metrics.filter(([own]) => own === name).map(([, labels]) => labels[label]);
  return [...new Set(values)].sort();
}

/** Increase per second between two snapshots; of a counter that began anew, since then. null: they
 * are the same, as where the page was just opened. */
export function rate(before, after, name, where = {}) {
  const [first, last] = [metric(before, name, where) ?? 0, metric(after, name, where) ?? 0];
  if (after.time <= before.time) return null;
  return (last >= first ? last - first : last) / (after.time - before.time);
}
