/* The attacks on a run, each with its null beside it. */

import { h } from "../dom.js";
import { base, counted, decibel, known, percent, specName } from "../words.js";

/** choose: called with the source of the attack whose grid is wanted. */
export function attacksTable(items, choose) {
  const heads = ["Attack", "Cases finished", "Recovered", "Its null", "Verdict", "PSNR", "Failed", ""];
  const rows = items.filter((one) => !one.null || !items.some((other) => !other.null && beside(other, one)));
  return h(
    "div.scroll",
    { tabindex: 0, role: "region", "aria-label": "Attacks" },
    h(
      "table",
      {},
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          heads.map((title, i) =>
            h(i > 0 && i < 7 && i !== 4 ? "th.number" : "th", { scope: "col" }, title || h("span.unseen", {}, "Grid")),
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
  if (!one.outcome) return h("td", {}, "–");
  const rest = one.verdict.startsWith(one.outcome) ? one.verdict.slice(one.outcome.length).replace(/^: /, "") : one.verdict;
  return h("td.verdict", {}, h("b", {}, one.outcome), rest ? h("small", {}, rest) : null);
}

function ofHowMany(one) {
  if (known(one.success)) return `of ${counted(one.examples, "example")}`;
  return one.done + one.failed ? "not scored" : "nothing finished yet";
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
    h("td.number", {}, String(one.done + one.failed), h("small", {}, `of ${one.cases}`), h("small", {}, unfinished(one))),
    h("td.number", {}, h("b", {}, percent(one.success)), h("small", {}, ofHowMany(one))),
    h("td.number", {}, nothing ? percent(nothing.success) : "–"),
    verdict(one),
    h("td.number", {}, decibel(one.psnr)),
    h("td.number", {}, String(one.failed)),
    h(
      "td",
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
