/* Dialog that submits an attack as a job. Attacks and their arguments are listed by the service, which also checks the input. */

import { get, post } from "./api.js";
import { h, put } from "./dom.js";
import { makeArgumentField, makeField, wireJobForm } from "./fields.js";
import { formatAttackName } from "./words.js";

const NUMBER_FIELDS = {
  seed: [0, "Random seed of the attack."],
  priority: [0, "From -10 to 10. The waiting job with the highest priority starts first."],
};
/** Attack that is chosen when the dialog opens: the one of the quickstart, since the first by name needs several rounds. */
const FIRST_ATTACK = "cpl";
/** Texts on the conditions of attacks, by their names in the API. */
const NEEDS = {
  continuous_inputs: "real-valued inputs",
  image_criterion: "images",
  image_prior: "images",
  imprint_layer: "an imprint layer, which a malicious server puts into the model",
  input_layer: "a linear layer with a bias that reads the examples directly",
  linear_head: "a linear last layer",
  num_examples: "a known number of examples per update",
  one_observation: "one update at a time",
  own_images: "images of the same class, which no server has",
  same_client: "rounds of one client at a time",
  secure_sum: "secure sums",
  single_example: "a single example per update",
};

/** Open the dialog. preset: first values of its fields {recording, attack, rounds, clients}, each optional. */
export async function openAttackForm(store, preset = {}) {
  const dialog = h("dialog", { "aria-labelledby": "form-title" });
  const close = () => dialog.close();
  const head = h(
    "div.dialog-head",
    {},
    h("h2", { id: "form-title" }, "New attack"),
    h("button.quiet", { type: "button", onclick: close }, "Close"),
  );
  const body = h("div", {}, h("p.state", { role: "status" }, "Loading."));
  dialog.append(head, body);
  document.body.append(dialog);
  dialog.addEventListener("close", () => dialog.remove());
  dialog.showModal();
  try {
    const attacks = await get("attacks");
    if (!store.loaded) await store.refresh();
    if (!store.loaded) throw store.problem;
    put(body, buildForm(store, listItems(attacks), preset, dialog));
    body.querySelector("select, input")?.focus();
  } catch (problem) {
    put(body, h("p.state.failure", { role: "alert" }, problem.message));
  }
}

function listItems(answer) {
  return Array.isArray(answer) ? answer : answer.items;
}

function buildForm(store, attacks, preset, dialog) {
  const runs = [...store.recordings.values()].sort((a, b) => a.id.localeCompare(b.id));
  if (!runs.length)
    return h(
      "p.state",
      {},
      "There is no run to attack yet. Record one in the folder that the service watches, then open this form again.",
    );
  const run = makeSelect(
    "recording",
    runs.map((one) => [one.id, one.name === one.id ? one.name : `${one.name} (${one.id})`]),
    preset.recording,
  );
  const attack = makeSelect(
    "attack",
    attacks.map((one) => [one.name, formatAttackName(one.name)]),
    preset.attack ?? FIRST_ATTACK,
  );
  const about = h("p.soft", { id: "about-attack", "aria-live": "polite" });
  attack.setAttribute("aria-describedby", "about-attack");
  const knobs = h("div.knobs");
  const rounds = h("input", { name: "rounds", value: preset.rounds || "all", autocomplete: "off", spellcheck: "false" });
  const clients = h("input", {
    name: "clients",
    value: (preset.clients ?? []).join(", "),
    autocomplete: "off",
    spellcheck: "false",
    placeholder: "all",
  });
  const isNull = h("input", { type: "checkbox", name: "null", checked: true });
  const numbers = Object.entries(NUMBER_FIELDS).map(([name, [value, help]]) =>
    makeField(name, h("input", { name, value, inputmode: "numeric" }), { help }),
  );
  const problem = h("p.wrong", { role: "alert" });
  const send = h("button.strong", { type: "submit" }, "Start");
  let knobsOf = [];

  const showAttack = () => {
    const chosen = attacks.find((one) => one.name === attack.value);
    put(
      about,
      chosen?.summary,
      chosen?.needs?.length ? h("span.needs", {}, ` Needs: ${describeNeeds(chosen.needs)}.`) : null,
    );
    knobsOf = Object.entries(chosen?.arguments ?? {}).map(([name, value]) => makeArgumentField(name, value));
    put(knobs, knobsOf.length ? knobsOf.map((knob) => knob.element) : h("p.soft", {}, "It has none that can be set here."));
  };
  attack.addEventListener("change", showAttack);
  showAttack();

  const form = h(
    "form",
    { novalidate: true },
    makeField("recording", run, { label: "Run" }),
    makeField("attack", attack, { label: "Attack" }),
    about,
    h(
      "div.two",
      {},
      makeField("rounds", rounds, { help: "For example all, 1-20 or 1-3,7." }),
      makeField("clients", clients, { help: "Names, separated by commas; leave empty for all." }),
    ),
    h("details", {}, h("summary", {}, "Arguments of the attack"), knobs),
    h("details", {}, h("summary", {}, "Seed and priority"), h("div.two", {}, numbers)),
    h("label.check", {}, isNull, "Also run the null: the same attack without the update"),
    problem,
    h("div.actions", {}, h("button.quiet", { type: "button", onclick: () => dialog.close() }, "Cancel"), send),
  );
  const request = () =>
    post("jobs", { ...readValues({ run, attack, rounds, clients, isNull, form }), arguments: readArguments(knobsOf) });
  wireJobForm({ form, dialog, problem, send, store, request });
  return form;
}

function describeNeeds(needs) {
  return [...new Set(needs.map((need) => NEEDS[need] ?? need.replaceAll("_", " ")))].join(", ");
}

function makeSelect(name, options, chosen) {
  const element = h(
    "select",
    { name },
    options.map(([value, words]) => h("option", { value }, words)),
  );
  if (chosen && options.some(([value]) => value === chosen)) element.value = chosen;
  return element;
}

function readValues({ run, attack, rounds, clients, isNull, form }) {
  const names = clients.value.split(",").map((name) => name.trim());
  const parseWhole = (name) => {
    const text = form.elements[name].value.trim();
    return /^-?\d+$/.test(text) ? Number(text) : text;
  };
  return {
    recording: run.value,
    attack: attack.value,
    rounds: rounds.value.trim() || "all",
    clients: names.filter(Boolean),
    null: isNull.checked,
    seed: parseWhole("seed"),
    priority: parseWhole("priority"),
  };
}

/** Return the arguments that the user changed, by name. The others are not sent, so that the attack's defaults apply. */
function readArguments(knobs) {
  return Object.fromEntries(knobs.filter((knob) => knob.isChanged()).map((knob) => [knob.name, knob.getValue()]));
}
