/* Filters of the view of a run: attack, client, rounds, state and success. They are part of the address. */

import { h } from "../dom.js";
import { fillSelect } from "./jobs.js";
import { formatSpecName, removeNullSuffix } from "../words.js";

const STATE_OPTIONS = [
  ["", "any"],
  ["done", "attacked"],
  ["running", "running"],
  ["waiting", "waiting"],
  ["interrupted", "interrupted"],
  ["failed", "failed"],
  ["none", "not attacked"],
];
const SUCCESS_OPTIONS = [
  ["", "any"],
  ["some", "some recovered"],
  ["none", "none recovered"],
  ["unscored", "not scored"],
];

/** Return the filters. onChange: called with the changed part of the address's query. `set(query)` updates the inputs. */
export function makeFilters({ onChange }) {
  const wireInput = (name, element) => {
    element.id = `filter-${name}`;
    element.addEventListener("change", () => onChange({ [name]: element.value }));
    return element;
  };
  const attack = wireInput("attack", h("select"));
  const client = wireInput("client", h("select"));
  const from = wireInput("from", h("input", { type: "number", min: 1, inputmode: "numeric", placeholder: "first" }));
  const to = wireInput("to", h("input", { type: "number", min: 1, inputmode: "numeric", placeholder: "last" }));
  const state = wireInput("state", h("select"));
  const success = wireInput("success", h("select"));
  const clear = h(
    "button.small",
    {
      type: "button",
      hidden: true,
      onclick: () => onChange({ attack: "", client: "", from: "", to: "", state: "", success: "" }),
    },
    "Clear",
  );
  const makeField = (name, words, element) => h("div.field", {}, h("label", { for: `filter-${name}` }, words), element);
  const element = h(
    "form.filters",
    { "aria-label": "Filters", onsubmit: (event) => event.preventDefault() },
    makeField("attack", "Attack", attack),
    makeField("client", "Client", client),
    h(
      "div.range",
      { role: "group", "aria-label": "Rounds" },
      makeField("from", "From round", from),
      makeField("to", "to round", to),
    ),
    makeField("state", "State", state),
    makeField("success", "Success", success),
    clear,
  );

  function set(query) {
    from.value = query.from ?? "";
    to.value = query.to ?? "";
    fillSelect(state, STATE_OPTIONS, query.state);
    fillSelect(success, SUCCESS_OPTIONS, query.success);
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
    setAttacks: (items, query) => {
      const choices = items.map((one) => [one.source, describeAttack(one, items)]);
      fillSelect(attack, [["", "all, the strongest in each cell"], ...choices], query.attack);
    },
    setClients: (names, query) => fillSelect(client, [["", "all"], ...names.map((name) => [name, name])], query.client),
  };
}

/** Return an attack's name, or its specification, with the end of its folder's name if necessary to tell it from others. */
function describeAttack(one, items) {
  const alike = items.filter((other) => other.null === one.null && formatSpecName(other.spec) === formatSpecName(one.spec));
  const spec = removeNullSuffix(one.spec);
  const name =
    alike.length > 1
      ? `${spec}${alike.some((other) => other !== one && other.spec === one.spec) ? ` ${one.source.split("-").at(-1)}` : ""}`
      : formatSpecName(one.spec);
  return one.null ? `${name}, the null` : name;
}

/** Return whether a round and, if it is given, a client pass the filters on them. */
export function isWithin({ round, client }, { from, to, client: wanted }) {
  return (
    (!from || round >= Number(from)) && (!to || round <= Number(to)) && (!wanted || client === undefined || client === wanted)
  );
}

/** Return whether a cell or a case passes the filters on state and success. */
export function matches(one, { state, success }) {
  if (state && (one.state ?? one.status) !== state) return false;
  if (!success) return true;
  if (typeof one.success !== "number") return success === "unscored";
  return success === (one.success > 0 ? "some" : "none");
}
