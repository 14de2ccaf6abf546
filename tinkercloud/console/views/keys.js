// How keys are made: where the SDK's link to its vendor's page of keys lands.

import { h, replace } from "../dom.js";

export const name = "keys";
export const title = "API keys";

const COMMANDS = "tinkercloud keys add USER\ntinkercloud keys list\ntinkercloud keys revoke KEY_ID";

export function open(root) {
  replace(root, h("h1", {}, title),
    h("p", {}, "Whoever runs the server makes and revokes keys, on its machine:"),
    h("pre", {}, COMMANDS));
}
