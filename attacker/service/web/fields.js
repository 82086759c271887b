/* Labelled inputs, and the service's complaints shown at the one they are about. */

import { h, makeId, put } from "./dom.js";

/** A label, an input, help below it and room for what is wrong. */
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

/** The input of one argument of an attack, by the type of its default. */
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

/** A number where the default is no text; what is no number then goes as text, for the service to refuse. */
function parseValue(text, value) {
  if (text === "" && value === null) return null;
  if (typeof value === "string") return text;
  return text !== "" && Number.isFinite(Number(text)) ? Number(text) : text;
}

/** Submits the job of a dialog's form: `request` returns it, the page goes to it, and a problem is shown in the form. */
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

/** Takes back what was said before. */
function clearMessages(form) {
  for (const one of form.querySelectorAll("[aria-invalid]")) one.removeAttribute("aria-invalid");
  for (const one of form.querySelectorAll(".field .wrong")) put(one);
}

/** Puts a problem at the field it names, opens what hides it and goes there; else below the form. */
function showProblem(form, place, problem) {
  const words = problem.known?.length ? `${problem.message} Known: ${problem.known.slice(0, 12).join(", ")}.` : problem.message;
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

function findField(form, name) {
  const parts = name.split(".").filter((part) => part !== "spec" && part !== "body");
  for (let length = parts.length; length > 0; length -= 1) {
    const element = form.querySelector(`[data-field="${CSS.escape(parts.slice(0, length).join("."))}"]`);
    if (element) return element;
  }
  return null;
}
