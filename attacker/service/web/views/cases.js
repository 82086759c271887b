/* Table of the cases of a run that pass the filters, loaded page by page until enough are found. */

import { get } from "../api.js";
import { h, put } from "../dom.js";
import { makePanel } from "../panel.js";
import { makeLink } from "../route.js";
import {
  formatCaseState,
  formatCount,
  formatDecibels,
  formatNumber,
  formatPercent,
  formatRounds,
  formatSpecName,
  isKnown,
} from "../words.js";
import { isWithin, matches } from "./filters.js";

const PAGE_SIZE = 200;
const ROWS_PER_STEP = 25;

/** Return the table as {element, refresh()}. id: of the recording. now: () => present filters and attacks {query, sources}. */
export function makeCaseList(id, now) {
  let most = ROWS_PER_STEP;

  /** Read the cases to show. Cases of nulls are shown only if the filter selects a null; otherwise rows compare with them. */
  async function read() {
    const { query } = now();
    const isWanted = (one) =>
      (query.attack || !one.null) &&
      matches(one, query) &&
      one.rounds.some((round) => isWithin({ round }, { from: query.from, to: query.to }));
    const found = [];
    let after = null;
    do {
      const page = await get(`recordings/${id}/cases`, { attack: query.attack, client: query.client, limit: PAGE_SIZE, after });
      found.push(...page.items.filter(isWanted));
      after = page.next;
    } while (found.length <= most && after !== null && after !== undefined);
    return { found: found.slice(0, most), more: found.length > most };
  }

  const element = makePanel({
    load: read,
    draw: (body, { found, more }) =>
      put(
        body,
        h("h2", {}, "Cases"),
        makeTable(id, found, now().sources),
        more
          ? h(
              "p.more",
              {},
              h(
                "button.small",
                { type: "button", "data-key": "more", onclick: () => ((most += ROWS_PER_STEP), element.refresh()) },
                "More",
              ),
            )
          : null,
      ),
    explainEmpty: ({ found }) => (found.length ? null : "No case matches the filters."),
  });
  return { element, refresh: () => element.refresh() };
}

function makeTable(id, cases, sources) {
  const heads = ["Rounds", "Client", "Attack", "State", "Recovered", "PSNR", "Final loss", "Method"];
  return h(
    "div.scroll",
    { tabindex: 0, role: "region", "aria-label": "Cases" },
    h(
      "table.stacked",
      {},
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          heads.map((title, i) => h(i > 3 && i < 7 ? "th.number" : "th", { scope: "col" }, title)),
        ),
      ),
      h(
        "tbody",
        {},
        cases.map((one) =>
          makeRow(
            id,
            one,
            sources.find((each) => each.source === one.attack),
          ),
        ),
      ),
    ),
  );
}

function makeRow(id, one, attack) {
  const name = formatRounds(one.rounds);
  const where = makeLink(["run", id, "case", one.attack, one.case]);
  const there = ["done", "failed", "interrupted"].includes(one.status);
  return h(
    "tr",
    {},
    h("th", { scope: "row" }, there ? h("a", { href: where, "data-key": where }, name) : name),
    h("td", { "data-label": "Client" }, h("code", {}, one.client)),
    h(
      "td",
      { "data-label": "Attack" },
      attack ? formatSpecName(attack.spec) : one.attack,
      attack?.null ? h("small", {}, "the null") : null,
    ),
    h("td", { "data-label": "State" }, formatCaseState(one.status), one.reason ? h("small", {}, one.reason) : null),
    h(
      "td.number",
      { "data-label": "Recovered" },
      formatPercent(one.success),
      isKnown(one.null_success) ? h("small", {}, `null ${formatPercent(one.null_success)}`) : null,
      one.examples > 1 ? h("small", {}, formatCount(one.examples, "example")) : null,
    ),
    h(
      "td.number",
      { "data-label": "PSNR" },
      formatDecibels(one.psnr),
      isKnown(one.null_psnr) ? h("small", {}, `null ${formatDecibels(one.null_psnr)}`) : null,
    ),
    h("td.number", { "data-label": "Final loss" }, formatNumber(one.loss)),
    h("td", { "data-label": "Method" }, one.route ?? ""),
  );
}
