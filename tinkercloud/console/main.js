// Signing in, the choice of the view by the part of the address after "#", and trouble.

import { get, request } from "./api.js";
import { h, replace } from "./dom.js";
import { Live } from "./live.js";
import * as captures from "./views/captures.js";
import * as chat from "./views/chat.js";
import * as checkpoints from "./views/checkpoints.js";
import * as keys from "./views/keys.js";
import * as queue from "./views/queue.js";
import * as runs from "./views/runs.js";
import * as samples from "./views/samples.js";
import * as server from "./views/server.js";
import * as sessions from "./views/sessions.js";
import * as speculation from "./views/speculation.js";

const MENU = { runs, sessions, samples, checkpoints, chat, captures, queue, server, speculation };
const VIEWS = { ...MENU, keys };
const content = document.getElementById("content");
const trouble = document.getElementById("trouble");

let page = null; // of whoever is signed in: { live, who }
let close = () => {};
let engineTrouble = "";

function showTrouble(text) {
  trouble.textContent = text;
  trouble.hidden = !text;
}

/** What a view did not expect. */
function failed(error) {
  if (error.status === 401) askForKey();
  else if (error.name !== "AbortError") showTrouble(error.message);
}

function openView() {
  close();
  close = () => {};
  showTrouble("");
  const [path, query = ""] = location.hash.slice(1).split("?");
  const [name, ...rest] = decodeURIComponent(path).split("/");
  const view = VIEWS[name] ?? runs;
  for (const link of document.querySelectorAll("#views a")) {
    if (link.getAttribute("href") === `#${view.name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${view.title} - tinkercloud`;
  const root = h("div", { class: `view ${view.name}` });
  replace(content, root);
  const context = { ...page, failed, item: rest.join("/"), query: new URLSearchParams(query) };
  close = view.open(root, context) ?? close;
}

async function signIn(event) {
  event.preventDefault();
  const key = new FormData(event.target).get("key").trim();
  try {
    await request("console/session", { method: "POST", headers: { "X-API-Key": key } });
    await start();
  } catch (error) {
    showTrouble(error.status === 401 ? "The server does not know this key." : error.message);
  }
}

function askForKey() {
  close();
  close = () => {};
  page?.live.stop();
  page = null;
  document.title = "Sign in - tinkercloud";
  replace(document.getElementById("views"));
  replace(document.getElementById("account"));
  // No name of a user and no autocomplete: password managers would offer to keep an API key.
  const field = h("input", {
    id: "key", name: "key", type: "password", required: true, autocomplete: "off",
    spellcheck: "false", "aria-describedby": "key-help",
  });
  replace(content, h("form", { class: "sign-in", submit: signIn },
    h("h1", {}, "Sign in"),
    h("label", { for: "key" }, "API key"),
    field,
    h("p", { id: "key-help", class: "hint" },
      "The key that your scripts use (TINKER_API_KEY). The browser keeps a cookie that is good for an hour, for reading and the chat."),
    h("button", { type: "submit", class: "primary" }, "Sign in")));
  field.focus();
}

async function signOut() {
  await request("console/session", { method: "DELETE" });
  askForKey();
}

async function start() {
  const who = await get("console/session");
  showTrouble("");
  page?.live.stop();
  page = { who, live: new Live(() => get("console/session").then(restart, failed)) };
  replace(document.getElementById("views"),
    Object.values(MENU).map((view) => h("a", { href: `#${view.name}` }, view.title)));
  replace(document.getElementById("account"), who.auth
    ? [h("span", { class: "who" }, who.user), h("button", { type: "button", click: signOut }, "Sign out")]
    : h("span", { class: "who" }, "no keys are asked for"));
  page.live.watch(showEngineTrouble);
  openView();
}

/** Once, so that it does not hide what else is wrong. */
function showEngineTrouble({ trouble: text = "" }) {
  if ((text ?? "") === engineTrouble) return;
  engineTrouble = text ?? "";
  showTrouble(engineTrouble);
}

function restart() {
  setTimeout(() => start().catch(failed), 2000);
}

document.getElementById("skip").addEventListener("click", () => content.focus());
addEventListener("hashchange", () => page && openView());
start().catch(failed);
