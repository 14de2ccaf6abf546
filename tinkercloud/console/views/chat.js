// One question to a checkpoint and to its base, side by side.

import { chat, get } from "../api.js";
import { h, replace } from "../dom.js";

export const name = "chat";
export const title = "Chat";

const MAX_TOKENS = 4096;

export function open(root, { query, failed, who }) {
  if (who.role === "read-only") {
    replace(root, h("h1", {}, title), h("p", { class: "empty" }, "This key is read-only: it does not sample."));
    return null;
  }
  const box = new ChatBox(query.get("model") ?? "", failed);
  replace(root, h("h1", {}, title), box.element);
  box.load().catch(failed);
  return () => box.stop();
}

class ChatBox {
  constructor(asked, failed) {
    this.asked = asked;
    this.failed = failed;
    this.controller = null;
    this.sides = [new Side("Checkpoint"), new Side("Base")];
    this.question = h("textarea", {
      id: "question", rows: 3, required: true,
      keydown: (event) => {
        if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.form.requestSubmit();
      },
    });
    this.temperature = field("temperature", { min: 0, max: 2, step: "any", value: 0.7 });
    this.length = field("length", { min: 1, max: MAX_TOKENS, step: 1, value: 256 });
    this.seed = field("seed", { min: 0, step: 1, placeholder: "none" });
    this.ask = h("button", { type: "submit", class: "primary" }, "Ask");
    this.again = h("button", { type: "button", click: () => this.clear() }, "New conversation");
    this.form = h("form", { submit: (event) => this.submit(event) },
      h("label", { for: "question" }, "Message (Ctrl+Enter asks)"), this.question,
      h("div", { class: "bar" },
        labelled("temperature", "Temperature", this.temperature),
        labelled("length", "Tokens at most", this.length),
        labelled("seed", "Seed", this.seed),
        this.ask, this.again));
    this.element = h("div", { class: "chat-box" },
      h("div", { class: "sides" }, this.sides.map((side) => side.element)), this.form);
    this.sides[0].select.addEventListener("change", () => this.chooseBase());
  }

  async load() {
    const { data } = await get("oai/api/v1/models");
    const isCheckpoint = ({ id }) => id.startsWith("tinker://");
    this.bases = data.filter((model) => !isCheckpoint(model)).map(({ id }) => id);
    const paths = data.filter(isCheckpoint).map(({ id }) => id);
    if (this.asked && !paths.includes(this.asked) && !this.bases.includes(this.asked)) paths.unshift(this.asked);
    this.sides[0].offer([...paths, ...this.bases], this.asked);
    this.sides[1].offer(this.bases, "");
    await this.chooseBase();
  }

  /** The base that the checkpoint was trained from. */
  async chooseBase() {
    const path = this.sides[0].select.value;
    if (!path.startsWith("tinker://")) return;
    const run = path.slice("tinker://".length).split("/")[0];
    try {
      const { base_model: base } = await get(`api/v1/training_runs/${encodeURIComponent(run)}`);
      if (this.bases.includes(base)) this.sides[1].select.value = base;
    } catch (error) {
      if (error.status !== 404) this.failed(error); // a copy's run may be elsewhere
    }
  }

  async submit(event) {
    event.preventDefault();
    const content = this.question.value.trim();
    if (!content) return;
    this.question.value = "";
    this.controller = new AbortController();
    this.ask.disabled = true;
    const options = {
      temperature: Number(this.temperature.value),
      max_tokens: Number(this.length.value),
      ...(this.seed.value === "" ? {} : { seed: Number(this.seed.value) }),
    };
    await Promise.all(this.sides.map((side) => side.answer(content, options, this.controller.signal, this.failed)));
    this.ask.disabled = false;
    this.question.focus();
  }

  clear() {
    this.stop();
    for (const side of this.sides) side.clear();
    this.question.focus();
  }

  stop() {
    this.controller?.abort();
  }
}

class Side {
  constructor(title) {
    const id = `model-${title.toLowerCase()}`;
    this.messages = [];
    this.select = h("select", { id });
    this.log = h("div", { class: "log", role: "log", "aria-label": title, tabindex: "0" });
    this.element = h("section", { class: "side", "aria-label": title },
      h("label", { for: id }, title), this.select, this.log);
  }

  offer(names, chosen) {
    replace(this.select, names.map((text) => h("option", { value: text }, short(text))));
    if (names.includes(chosen)) this.select.value = chosen;
  }

  /** A failure is shown in its place and is no part of the conversation. */
  async answer(content, options, signal, failed) {
    const messages = [...this.messages, { role: "user", content }];
    this.add("user", content);
    const text = this.add("assistant", "");
    try {
      let whole = "";
      for await (const delta of chat({ model: this.select.value, messages, ...options }, signal)) {
        const piece = (delta.reasoning_content ?? "") + (delta.content ?? "");
        whole += delta.content ?? "";
        text.append(piece);
        this.log.scrollTop = this.log.scrollHeight;
      }
      this.messages = [...messages, { role: "assistant", content: whole }];
    } catch (error) {
      if (error.status === 401) failed(error);
      text.classList.add("failure");
      text.append(error.name === "AbortError" ? " (stopped)" : ` ${error.message}`);
    }
  }

  add(role, content) {
    const text = h("p", { class: "text" }, content);
    this.log.append(h("div", { class: `message ${role}` }, h("p", { class: "hint" }, role), text));
    this.log.scrollTop = this.log.scrollHeight;
    return text;
  }

  clear() {
    this.messages = [];
    replace(this.log);
  }
}

/** What tells checkpoints apart comes first: a narrow list cuts their paths. */
function short(model) {
  const [, run, name] = model.match(/^tinker:\/\/([^/]+)\/(.+)$/) ?? [];
  return name ? `${name} of ${run}` : model;
}

const field = (id, attributes) => h("input", { id, type: "number", ...attributes });
const labelled = (id, text, input) => h("span", { class: "labelled" }, h("label", { for: id }, text), input);
