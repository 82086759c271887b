/* Table of the attacks on a run, each with its null. */

import { h } from "../dom.js";
import { formatCount, formatDecibels, formatPercent, formatSpecName, haveSameSettings, isKnown, removeNullSuffix } from "../words.js";

/** Return the table. items: results of attacks and nulls. choose: called with the source of an attack to show in the grid. */
export function makeAttacksTable(items, choose) {
  const heads = ["Attack", "Cases finished", "Recovered", "Labels read", "PSNR", "Verdict", ""];
  const rows = items.filter((one) => !one.null || !items.some((other) => !other.null && haveSameSettings(other, one)));
  return h(
    "div.scroll",
    { tabindex: 0, role: "region", "aria-label": "Attacks" },
    h(
      "table.stacked",
      {},
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          heads.map((title, i) =>
            h(i > 0 && i < 5 ? "th.number" : "th", { scope: "col" }, title || h("span.unseen", {}, "Grid")),
          ),
        ),
      ),
      h(
        "tbody",
        {},
        rows.map((one) =>
          makeRow(
            one,
            items.find((other) => other.null && haveSameSettings(one, other)),
            choose,
          ),
        ),
      ),
    ),
  );
}

/** Return the unfinished cases as text, such as "2 waiting, 1 interrupted"; "" if all are finished. */
function describeUnfinished(one) {
  return [
    [one.waiting, "waiting"],
    [one.interrupted, "interrupted"],
  ]
    .filter(([count]) => count > 0)
    .map(([count, words]) => `${count} ${words}`)
    .join(", ");
}

/** Return the cell with the outcome in a few words, and below it the reasons. */
function makeVerdictCell(one) {
  if (!one.outcome) return h("td.whole", { "data-label": "Verdict" }, "–");
  const rest = one.verdict.startsWith(one.outcome) ? one.verdict.slice(one.outcome.length).replace(/^: /, "") : one.verdict;
  return h("td.verdict.whole", { "data-label": "Verdict" }, h("b", {}, one.outcome), rest ? h("small", {}, rest) : null);
}

function describeDenominator(one) {
  if (isKnown(one.success)) return `of ${formatCount(one.examples, "example")}`;
  return one.done + one.failed ? "not scored" : "nothing finished yet";
}

/** Return a line with the null's value of the score `key`; null if the attack has none. nothing: results of the null, if any. */
function makeNullLine(one, nothing, key, format) {
  if (one.null || !isKnown(one[key])) return null;
  return h("small", {}, nothing ? `its null ${format(nothing[key])}` : "no null was run");
}

function makeRow(one, nothing, choose) {
  return h(
    "tr",
    {},
    h(
      "th",
      { scope: "row" },
      formatSpecName(one.spec),
      one.null ? ", the null" : "",
      h("code.spec", {}, removeNullSuffix(one.spec)),
      one.knows_defense === false ? h("small", {}, "does not model defenses") : null,
      one.withheld?.map((name) => h("small", {}, `without ${name}`)),
      one.oracles?.map((oracle) => h("b.oracle", {}, `oracle: ${oracle}`)),
    ),
    h(
      "td.number",
      { "data-label": "Cases finished" },
      String(one.done + one.failed),
      h("small", {}, `of ${one.cases}, ${one.failed || "none"} failed`),
      h("small", {}, describeUnfinished(one)),
    ),
    h(
      "td.number",
      { "data-label": "Recovered" },
      h("b", {}, formatPercent(one.success)),
      h("small", {}, describeDenominator(one)),
      makeNullLine(one, nothing, "success", formatPercent),
    ),
    h(
      "td.number",
      { "data-label": "Labels read" },
      formatPercent(one.labels),
      makeNullLine(one, nothing, "labels", formatPercent),
    ),
    h("td.number", { "data-label": "PSNR" }, formatDecibels(one.psnr), makeNullLine(one, nothing, "psnr", formatDecibels)),
    makeVerdictCell(one),
    h(
      "td.whole",
      {},
      h(
        "button.small",
        {
          type: "button",
          "data-key": `grid-${one.source}`,
          "aria-label": `Show ${one.spec} in the grid`,
          onclick: () => choose(one.source),
        },
        "Grid",
      ),
    ),
  );
}
