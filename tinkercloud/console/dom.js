// Elements and formats. Text is always a text node: nothing here parses HTML.

/** An element. Attributes that are functions are listeners; null and false leave an attribute out. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) {
      element.setAttribute(name, value);
    }
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null));
  return element;
}

/** Puts other children in; what had the focus keeps it where it is there again by id or link. */
export function replace(parent, ...children) {
  const focused = parent.contains(document.activeElement) ? document.activeElement : null;
  const key = focused && (focused.id ? `#${CSS.escape(focused.id)}`
    : focused.getAttribute("href") ? `a[href="${CSS.escape(focused.getAttribute("href"))}"]` : null);
  parent.replaceChildren(...children.flat(Infinity).filter((child) => child !== null));
  if (key) parent.querySelector(key)?.focus({ preventScroll: true });
}

/** A number as people read it, with the exact one for machines. */
export function number(value, format = count) {
  if (value === null || value === undefined) return document.createTextNode("–");
  return h("data", { value: String(value) }, format(value));
}

export const count = (value) => value.toLocaleString("en", { maximumFractionDigits: 1 });

export function significant(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e6) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

export function percent(share) {
  return `${(100 * share).toFixed(1)} %`;
}

export function bytes(value) {
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (value >= size) return `${(value / size).toFixed(value >= 100 * size ? 0 : 1)} ${unit}`;
  }
  return `${value} B`;
}

export function duration(seconds) {
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 120) return `${seconds.toFixed(1)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} days`;
}

/** A moment: an ISO text, or seconds since the epoch. */
export function time(moment) {
  if (moment === null || moment === undefined) return document.createTextNode("–");
  const date = new Date(typeof moment === "number" ? 1000 * moment : moment);
  const sameDay = date.toDateString() === new Date().toDateString();
  const text = sameDay ? date.toLocaleTimeString() : date.toLocaleString();
  return h("time", { datetime: date.toISOString(), title: date.toLocaleString() }, text);
}

/** Behind a separator a long name breaks before it breaks anywhere else. */
function breakable(text) {
  const parts = text.split(/(?<=[/_:])(?=[A-Za-z0-9])|(?<=[a-z])(?=[A-Z])/);
  return parts.flatMap((part, i) => (i ? [h("wbr"), part] : [part]));
}

const shown = (content) => (typeof content === "string" ? breakable(content) : content ?? "–");

/** A table that scrolls sideways within its place. columns: texts; "#..." are numbers. */
export function table(caption, columns, rows, empty = "none") {
  if (!rows.length) return h("p", { class: "empty" }, empty);
  const kinds = columns.map((column) => (column.startsWith("#") ? "number" : null));
  const names = columns.map((column) => column.replace(/^#/, ""));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", {},
      h("caption", { class: "unseen" }, caption),
      h("thead", {}, h("tr", {}, names.map((name, i) =>
        h("th", { scope: "col", class: kinds[i] }, name)))),
      h("tbody", {}, rows.map((cells) => h("tr", {}, cells.map((cell, i) =>
        h("td", { class: kinds[i], "data-label": names[i] }, shown(cell))))))));
}

/** A table whose rows are cards on a phone: for columns that are too many or too long for its width. */
export function records(caption, columns, rows, empty) {
  const element = table(caption, columns, rows, empty);
  element.classList.add("records");
  return element;
}

/** Names and values. */
export function facts(pairs) {
  return h("dl", {}, pairs.filter(([, value]) => value !== null && value !== undefined && value !== "")
    .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, shown(value)))));
}

export function copyable(text) {
  const button = h("button", { type: "button", class: "copy", "aria-label": `Copy ${text}`, click: copy }, "Copy");
  async function copy() {
    await copyText(text);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  }
  const kind = text.length > 50 ? "copyable long" : "copyable";
  return h("span", { class: kind }, h("code", {}, breakable(text)), button);
}

async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  // Plain HTTP from another machine: browsers have no clipboard there but this one.
  const area = h("textarea", { class: "unseen" });
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
