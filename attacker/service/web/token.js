/* The service's token: asked for once however many requests were refused, kept by the browser as a cookie scripts cannot read. */

import { Problem, post } from "./api.js";
import { h, put } from "./dom.js";

let asking = null;

/** Resolves when the service has taken a token. */
export function askToken() {
  asking ??= ask().finally(() => (asking = null));
  return asking;
}

function ask() {
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
      "The service told it when it first started, and keeps it in a file that only its owner reads.",
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
      const problem = await tried(input.value.trim());
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

async function tried(token) {
  if (!token) return "Give the token.";
  try {
    await post("session", { token }, { locked: false });
    return null;
  } catch (problem) {
    if (problem instanceof Problem)
      return problem.status === 401 || problem.status === 403 ? "That is not this service's token." : problem.message;
    throw problem;
  }
}
