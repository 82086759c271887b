/* Labelled inputs of forms, and the service's error messages beside the input that they are about. */

import { h, makeId, put } from "./dom.js";

const MAX_KNOWN_NAMES = 12;

/** Return `input` with its label, its help, and an empty line for an error message. name: field of the request. */
export function makeField(name, input, { label = name.charAt(0).toUpperCase() + name.slice(1), help = "" } = {}) {
  const id = makeId("field");
  input.id = id;
  const described = [input.getAttribute("aria-describedby"), help && `${id}-help`, `${id}-wrong`].filter(Boolean);
  input.setAttribute("aria-describedby", described.join(" "));
  return h(
    "div.field",
    { "data-field": name },
    h("label", { for: id }, label),
    input,
    help ? h("small", { id: `${id}-help` }, help) : null,
    h("small.wrong", { id: `${id}-wrong` }),
  );
}

/** Return an input for one argument of an attack: a checkbox if its default `value` is a boolean, else a line of text. */
export function makeArgumentField(name, value) {
  if (typeof value === "boolean") {
    const box = h("input", { type: "checkbox", checked: value });
    const element = h(
      "div.field",
      { "data-field": `arguments.${name}` },
      h("label.check", {}, box, h("code", {}, name)),
      h("small.wrong"),
    );
    return { name, element, isChanged: () => box.checked !== value, getValue: () => box.checked };
  }
  const text = value === null ? "" : String(value);
  const numeric = typeof value === "number";
  const input = h("input", {
    value: text,
    inputmode: numeric ? "decimal" : null,
    autocomplete: "off",
    spellcheck: "false",
    placeholder: value === null ? "none" : null,
  });
  const element = makeField(`arguments.${name}`, input, { label: h("code", {}, name) });
  return { name, element, isChanged: () => input.value.trim() !== text, getValue: () => parseValue(input.value.trim(), value) };
}

/** Return the value of a text input: text if the default is text, else null, a number, or text that is no number. */
function parseValue(text, value) {
  if (text === "" && value === null) return null;
  if (typeof value === "string") return text;
  return text !== "" && Number.isFinite(Number(text)) ? Number(text) : text;
}

/** Make `form` submit a job by `request()`, then close the dialog and open the page of the job. Errors are shown in the form. */
export function wireJobForm({ form, dialog, problem, send, store, request }) {
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    clearMessages(form);
    put(problem);
    send.disabled = true;
    try {
      const job = await request();
      store.setJob(job);
      dialog.close();
      location.hash = `#/job/${encodeURIComponent(job.id)}`;
    } catch (wrong) {
      showProblem(form, problem, wrong);
    } finally {
      send.disabled = false;
    }
  });
}

function clearMessages(form) {
  for (const one of form.querySelectorAll("[aria-invalid]")) one.removeAttribute("aria-invalid");
  for (const one of form.querySelectorAll(".field .wrong")) put(one);
}

function describeProblem({ message, known }) {
  if (!known?.length) return message;
  const rest = known.length - MAX_KNOWN_NAMES;
  const names = known.slice(0, MAX_KNOWN_NAMES).join(", ");
  return `${message} (known names: ${names}${rest > 0 ? `, and ${rest} more` : ""})`;
}

/** Show a problem at the field that it names, opened and focused; in `place` if it names none of the form. */
function showProblem(form, place, problem) {
  const words = describeProblem(problem);
  const target = problem.field ? findField(form, problem.field) : null;
  if (!target) {
    put(place, words);
    return;
  }
  for (let up = target.parentElement; up; up = up.parentElement) if (up.tagName === "DETAILS") up.open = true;
  put(target.querySelector(".wrong"), words);
  const input = target.querySelector("input, select");
  input.setAttribute("aria-invalid", "true");
  input.focus();
}

/** Return the field of `form` for a field of the request, or of its parent, such as arguments.steps for spec.arguments.steps. */
function findField(form, name) {
  const parts = name.split(".").filter((part) => part !== "spec" && part !== "body");
  for (let length = parts.length; length > 0; length -= 1) {
    const element = form.querySelector(`[data-field="${CSS.escape(parts.slice(0, length).join("."))}"]`);
    if (element) return element;
  }
  return null;
}
