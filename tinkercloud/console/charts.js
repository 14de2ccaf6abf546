// Line charts by uPlot, in the page's colours, as wide as their place.

import uPlot from "./uplot/uPlot.esm.js";
import { bytes, h, significant } from "./dom.js";

const HEIGHT = 180;
const COLORS = ["--line-1", "--line-2", "--line-3", "--line-4", "--line-5"];
const dark = matchMedia("(prefers-color-scheme: dark)");

const newest = (column) => column.findLast((value) => value !== null && value !== undefined);

/** names: of the series. by: what x counts, or "time". `update` takes the x values and one array of y values
 * for each series. */
export class LineChart {
  constructor(title, names, { by = "step", format = significant, fromZero = false } = {}) {
    this.title = title;
    this.names = names;
    this.by = by;
    this.format = format;
    this.fromZero = fromZero;
    this.columns = [[], ...names.map(() => [])];
    this.plot = null;
    this.place = h("div", { class: "plot", role: "img" });
    this.element = h("figure", { class: "chart" }, h("figcaption", {}, title), this.place);
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.place);
    this.redraw = () => { this.drop(); this.resize(); };
    dark.addEventListener("change", this.redraw);
  }

  update(xs, ...ys) {
    this.columns = [xs, ...ys];
    this.plot?.setData(this.columns);
    this.place.setAttribute("aria-label", `${this.title}: ${this.summary()}`);
  }

  /** For screen readers: the newest value of each series. */
  summary() {
    const [xs, ...ys] = this.columns;
    if (!xs.length) return "no values yet";
    const values = ys.map((column, i) => {
      const last = newest(column);
      const name = this.names.length > 1 ? `${this.names[i]} ` : "";
      return name + (last === undefined ? "none" : this.format(last));
    });
    const where = this.by === "time" ? "" : ` at ${this.by} ${xs.at(-1)}`;
    return values.join(", ") + where;
  }

  resize() {
    const width = this.place.clientWidth;
    if (!width) return;
    if (this.plot) this.plot.setSize({ width, height: HEIGHT });
    else this.plot = new uPlot(this.options(width), this.columns, this.place);
  }

  options(width) {
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    const axis = {
      stroke: color("--muted"),
      grid: { stroke: color("--grid"), width: 1 },
      ticks: { stroke: color("--grid"), width: 1, size: 4 },
      font: "12px system-ui, sans-serif",
    };
    const legend = (text) => (plot, value, i, place) => {
      const shown = (place ?? null) === null ? newest(plot.data[i]) : value; // null: nobody points at one
      return shown === null || shown === undefined ? "–" : text(shown);
    };
    const isTime = this.by === "time";
    const whole = { space: 50, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000] };
    const clock = (moment) => new Date(1000 * moment).toLocaleTimeString("en-GB");
    const times = { space: 90, values: (_, ticks) => ticks.map(clock) };
    const powers = { incrs: Array.from({ length: 50 }, (_, i) => 2 ** i) };
    return {
      width,
      height: HEIGHT,
      legend: { live: true, isolate: false },
      cursor: { y: false },
      scales: {
        x: { time: isTime },
        y: { range: (_, low, high) => this.range(low, high) },
      },
      axes: [
        { ...axis, ...(isTime ? times : whole), size: 32 },
        {
          ...axis,
          ...(this.format === bytes ? powers : {}),
          size: 66,
          values: (_, ticks) => ticks.map(this.format),
        },
      ],
      series: [
        { label: this.by, value: legend(isTime ? clock : String) },
        ...this.names.map((name, i) => ({
          label: name,
          stroke: color(COLORS[i % COLORS.length]),
          width: 1.5,
          value: legend(this.format),
          spanGaps: true,
          points: { show: (plot) => plot.data[0].length < 30, size: 4 },
        })),
      ],
    };
  }

  /** Of the y axis. A flat line lies in the middle, at 0 on the ground. */
  range(low, high) {
    if (low === null) return [0, 1];
    if (this.fromZero || (low === 0 && high === 0)) return [0, high > 0 ? 1.1 * high : 1];
    const margin = low === high ? 0.5 * Math.abs(low) : 0.08 * (high - low);
    return [low - margin, high + margin];
  }

  drop() {
    this.plot?.destroy();
    this.plot = null;
  }

  close() {
    this.observer.disconnect();
    dark.removeEventListener("change", this.redraw);
    this.drop();
  }
}
