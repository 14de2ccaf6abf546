// The key, which this page's memory alone keeps, and the proxy's /status every two seconds.

import { h, replace } from "./console/dom.js";
import { View } from "./view.js";

const STATUS = new URL("../../status", import.meta.url); // keeps a prefix that a server before it adds
const EVERY_MS = 2000;
const content = document.getElementById("content");
const trouble = document.getElementById("trouble");

let key = "";
let view = null;

function showTrouble(text) {
  trouble.textContent = text;
  trouble.hidden = !text;
}

async function look() {
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  let answer;
  try {
    answer = await fetch(STATUS, { headers, credentials: "omit" });
  } catch {
    showTrouble("The proxy does not answer.");
    setTimeout(look, EVERY_MS);
    return;
  }
  if (answer.status === 401) {
    askForKey(key ? "The proxy does not know this key." : "");
    return;
  }
  try {
    if (!answer.ok) throw new Error(`The proxy answers with status ${answer.status}.`);
    const status = await answer.json();
    if (!view) {
      view = new View();
      replace(content, view.element);
    }
    view.show(status, Date.now() / 1000);
    showTrouble("");
  } catch (error) {
    showTrouble(error.message);
  }
  setTimeout(look, EVERY_MS);
}

function askForKey(text) {
  view?.close();
  view = null;
  showTrouble(text);
  // No name of a user and no autocomplete: password managers would offer to keep the key.
  const field = h("input", {
    id: "key", type: "password", required: true, autocomplete: "off", spellcheck: "false",
    "aria-describedby": "key-help",
  });
  const submit = (event) => {
    event.preventDefault();
    key = field.value.trim();
    look();
  };
  replace(content, h("form", { class: "sign-in", submit },
    h("h1", {}, "Sign in"),
    h("label", { for: "key" }, "Key"),
    field,
    h("p", { id: "key-help", class: "hint" },
      "The one in the file that --key-file names. It is kept until this page is closed or loaded anew."),
    h("button", { type: "submit", class: "primary" }, "Sign in")));
  field.focus();
}

look();
