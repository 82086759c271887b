/* Login with the service's token, which is in the link that the service prints, or else is asked for. The service returns a
   session cookie that scripts cannot read; the page stores the token nowhere. */

import { post, Problem, remove } from "./api.js";
import { h, put } from "./dom.js";

const TOKEN_LINK_START = "#token=";
let asking = null;

/** Open a session with the token in the address, if it has one, and remove the token from the address. */
export async function openSessionFromLink() {
  if (!location.hash.startsWith(TOKEN_LINK_START)) return;
  const token = decodeURIComponent(location.hash.slice(TOKEN_LINK_START.length));
  history.replaceState(null, "", `${location.pathname}${location.search}#/`);
  await tryToken(token).catch(() => null); // after a wrong token, the first refused request opens the dialog
}

/** End the session on the service, and reload the page, which then asks for the token. */
export async function logOut() {
  await remove("session");
  location.reload();
}

/** Ask for the token, and wait until the service has accepted one. All refused requests share one dialog. */
export function askToken() {
  asking ??= showTokenDialog().finally(() => (asking = null));
  return asking;
}

function showTokenDialog() {
  const input = h("input", {
    id: "token",
    type: "password",
    autocomplete: "current-password",
    required: true,
    spellcheck: "false",
    "aria-describedby": "token-help token-wrong",
  });
  const wrong = h("p.wrong", { id: "token-wrong", role: "alert" });
  const button = h("button.strong", { type: "submit" }, "Open");
  const form = h(
    "form",
    { novalidate: true },
    h("h2", { id: "token-title" }, "This service asks for its token"),
    h(
      "p.soft",
      { id: "token-help" },
      "When it starts, the service prints a link that contains the token, and the path of a file that contains it, too.",
    ),
    h("div.field", {}, h("label", { for: "token" }, "Token"), input, wrong),
    h("div.actions", {}, button),
  );
  const dialog = h("dialog.narrow", { "aria-labelledby": "token-title" }, form);
  dialog.addEventListener("cancel", (event) => event.preventDefault());
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => {
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      button.disabled = true;
      const problem = await tryToken(input.value.trim());
      button.disabled = false;
      if (problem) {
        put(wrong, problem);
        input.setAttribute("aria-invalid", "true");
        input.select();
        input.focus();
        return;
      }
      dialog.close();
      dialog.remove();
      resolve();
    });
  });
}

/** Open a session with `token`. Return null, or the message to show if this fails. */
async function tryToken(token) {
  if (!token) return "Enter the token.";
  try {
    await post("session", { token }, { locked: false });
    return null;
  } catch (problem) {
    if (problem instanceof Problem)
      return problem.status === 401
        ? "This is not this service's token. Copy it from the link that the service printed when it started."
        : problem.message;
    throw problem;
  }
}
