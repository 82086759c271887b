/* What of a run is looked at: attack, client, rounds, state, success. Kept in the address. */

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
  ["some", "recovered"],
  ["none", "not recovered"],
  ["unscored", "not scored"],
];

/** onChange: called with the changes of the query. The fields follow the address by `set(query)`. */
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
      fillSelect(attack, [["", "the worst of all"], ...choices], query.attack);
    },
    setClients: (names, query) => fillSelect(client, [["", "all"], ...names.map((name) => [name, name])], query.client),
  };
}

/** An attack's name, with its specification where several share the name. */
function describeAttack(one, items) {
  const alike = items.filter((other) => other.null === one.null && formatSpecName(other.spec) === formatSpecName(one.spec));
  const spec = removeNullSuffix(one.spec);
  const name =
    alike.length > 1
      ? `${spec}${alike.some((other) => other !== one && other.spec === one.spec) ? ` ${one.source.split("-").at(-1)}` : ""}`
      : formatSpecName(one.spec);
  return one.null ? `${name}, the null` : name;
}

/** Whether something of a round and a client lies within the rounds and the client that are looked at. */
export function isWithin({ round, client }, { from, to, client: wanted }) {
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
