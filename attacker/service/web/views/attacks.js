/* The attacks on a run, each with its null beside it. */

import { h } from "../dom.js";
import { base, counted, decibel, known, percent, specName } from "../words.js";

/** choose: called with the source of the attack whose grid is wanted. */
export function attacksTable(items, choose) {
  const heads = ["Attack", "Cases finished", "Recovered", "Labels read", "PSNR", "Verdict", ""];
  const rows = items.filter((one) => !one.null || !items.some((other) => !other.null && beside(other, one)));
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
          row(
            one,
            items.find((other) => other.null && beside(one, other)),
            choose,
          ),
        ),
      ),
    ),
  );
}

/** "2 waiting, 1 interrupted", or nothing where all cases are finished. */
function unfinished(one) {
  return [
    [one.waiting, "waiting"],
    [one.interrupted, "interrupted"],
  ]
    .filter(([count]) => count > 0)
    .map(([count, words]) => `${count} ${words}`)
    .join(", ");
}

/** The outcome, with what it rests on below. */
function verdict(one) {
  if (!one.outcome) return h("td.whole", { "data-label": "Verdict" }, "–");
  const rest = one.verdict.startsWith(one.outcome) ? one.verdict.slice(one.outcome.length).replace(/^: /, "") : one.verdict;
  return h("td.verdict.whole", { "data-label": "Verdict" }, h("b", {}, one.outcome), rest ? h("small", {}, rest) : null);
}

function ofHowMany(one) {
  if (known(one.success)) return `of ${counted(one.examples, "example")}`;
  return one.done + one.failed ? "not scored" : "nothing finished yet";
}

/** What the null comes to in the same score. */
function guessed(one, nothing, key, format) {
  if (one.null || !known(one[key])) return null;
  return h("small", {}, known(nothing?.[key]) ? `its null ${format(nothing[key])}` : "no null was run");
}

function beside(one, other) {
  return base(one.spec) === base(other.spec) && one.seed === other.seed && one.knows_defense === other.knows_defense;
}

function row(one, nothing, choose) {
  return h(
    "tr",
    {},
    h(
      "th",
      { scope: "row" },
      specName(one.spec),
      one.null ? ", the null" : "",
      h("code.spec", {}, base(one.spec)),
      one.knows_defense === false ? h("small", {}, "ignores the defense") : null,
      one.oracles?.map((oracle) => h("b.oracle", {}, `oracle: ${oracle}`)),
    ),
    h(
      "td.number",
      { "data-label": "Cases finished" },
      String(one.done + one.failed),
      h("small", {}, `of ${one.cases}, ${one.failed || "none"} failed`),
      h("small", {}, unfinished(one)),
    ),
    h(
      "td.number",
      { "data-label": "Recovered" },
      h("b", {}, percent(one.success)),
      h("small", {}, ofHowMany(one)),
      guessed(one, nothing, "success", percent),
    ),
    h("td.number", { "data-label": "Labels read" }, percent(one.labels), guessed(one, nothing, "labels", percent)),
    h("td.number", { "data-label": "PSNR" }, decibel(one.psnr), guessed(one, nothing, "psnr", decibel)),
    verdict(one),
    h(
      "td.whole",
      {},
      h(
        "button.small",
        {
          type: "button",
          "data-key": `grid-${one.source}`,
          "aria-label": `Show the grid of ${one.spec}`,
          onclick: () => choose(one.source),
        },
        "Grid",
      ),
    ),
  );
}
