/* What of a run is looked at: attack, client, rounds, state, success. Kept in the address. */

import { h } from "../dom.js";
import { options } from "./jobs.js";
import { base, specName } from "../words.js";

const STATES = [
  ["", "any"],
  ["done", "attacked"],
  ["running", "running"],
  ["waiting", "waiting"],
  ["interrupted", "interrupted"],
  ["failed", "failed"],
  ["none", "not attacked"],
];
const SUCCESS = [
  ["", "any"],
  ["some", "recovered"],
  ["none", "not recovered"],
  ["unscored", "not scored"],
];

/** onChange: called with the changes of the query. The fields follow the address by `set(query)`. */
export function filters({ onChange }) {
  const input = (name, element) => {
    element.id = `filter-${name}`;
    element.addEventListener("change", () => onChange({ [name]: element.value }));
    return element;
  };
  const attack = input("attack", h("select"));
  const client = input("client", h("select"));
  const from = input("from", h("input", { type: "number", min: 1, inputmode: "numeric", placeholder: "first" }));
  const to = input("to", h("input", { type: "number", min: 1, inputmode: "numeric", placeholder: "last" }));
  const state = input("state", h("select"));
  const success = input("success", h("select"));
  const clear = h(
    "button.small",
    {
      type: "button",
      hidden: true,
      onclick: () => onChange({ attack: "", client: "", from: "", to: "", state: "", success: "" }),
    },
    "Clear",
  );
  const field = (name, words, element) => h("div.field", {}, h("label", { for: `filter-${name}` }, words), element);
  const element = h(
    "form.filters",
    { "aria-label": "Filters", onsubmit: (event) => event.preventDefault() },
    field("attack", "Attack", attack),
    field("client", "Client", client),
    h("div.range", { role: "group", "aria-label": "Rounds" }, field("from", "From round", from), field("to", "to round", to)),
    field("state", "State", state),
    field("success", "Success", success),
    clear,
  );

  function set(query) {
    from.value = query.from ?? "";
    to.value = query.to ?? "";
    options(state, STATES, query.state);
    options(success, SUCCESS, query.success);
    for (const [name, select] of [
      ["attack", attack],
      ["client", client],
    ])
      if ((query[name] ?? "") !== select.value) select.value = query[name] ?? "";
    clear.hidden = !["attack", "client", "from", "to", "state", "success"].some((name) => query[name]);
  }

  return {
    element,
    set,
    attacks: (items, query) =>
      options(attack, [["", "the worst of all"], ...items.map((one) => [one.source, attackWords(one, items)])], query.attack),
    clients: (names, query) => options(client, [["", "all"], ...names.map((name) => [name, name])], query.client),
  };
}

/** An attack's name, with its specification where several share the name. */
function attackWords(one, items) {
  const alike = items.filter((other) => other.null === one.null && specName(other.spec) === specName(one.spec));
  const spec = base(one.spec);
  const name =
    alike.length > 1
      ? `${spec}${alike.some((other) => other !== one && other.spec === one.spec) ? ` ${one.source.split("-").at(-1)}` : ""}`
      : specName(one.spec);
  return one.null ? `${name}, the null` : name;
}

/** Whether something of a round and a client lies within the rounds and the client that are looked at. */
export function within({ round, client }, { from, to, client: wanted }) {
  return (
    (!from || round >= Number(from)) && (!to || round <= Number(to)) && (!wanted || client === undefined || client === wanted)
  );
}

/** Whether a cell or a case has the state and the success that are looked for. */
export function matches(one, { state, success }) {
  if (state && (one.state ?? one.status) !== state) return false;
  if (!success) return true;
  if (typeof one.success !== "number") return success === "unscored";
  return success === (one.success > 0 ? "some" : "none");
}
