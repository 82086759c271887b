/* The cases of a run that pass the filters, read page by page until there are enough of them. */

import { get } from "../api.js";
import { h, put } from "../dom.js";
import { panel } from "../panel.js";
import { link } from "../route.js";
import { counted, decibel, inRounds, known, number, percent, specName } from "../words.js";
import { matches, within } from "./filters.js";

const PAGE = 200;
const STEP = 25;

/** now: () => {query, sources}. */
export function caseList(id, now) {
  let most = STEP;

  /** Nulls stand beside their attacks, and in rows of their own only where they are asked for. */
  async function read() {
    const { query } = now();
    const found = [];
    let after = null;
    do {
      const page = await get(`recordings/${id}/cases`, { attack: query.attack, client: query.client, limit: PAGE, after });
      found.push(
        ...page.items.filter(
          (one) => (query.attack || !one.null) && matches(one, query) && one.rounds.some((round) => within({ round }, { from: query.from, to: query.to })),
        ),
      );
      after = page.next;
    } while (found.length <= most && after !== null && after !== undefined);
    return { found: found.slice(0, most), more: found.length > most };
  }

  const element = panel({
    load: read,
    draw: (body, { found, more }) =>
      put(
        body,
        h("h2", {}, "Cases"),
        table(id, found, now().sources),
        more
          ? h(
              "p.more",
              {},
              h(
                "button.small",
                { type: "button", "data-key": "more", onclick: () => ((most += STEP), element.refresh()) },
                "More",
              ),
            )
          : null,
      ),
    empty: ({ found }) => (found.length ? null : "No case passes the filters."),
  });
  return { element, refresh: () => element.refresh() };
}

function table(id, cases, sources) {
  const heads = ["Rounds", "Client", "Attack", "State", "Recovered", "PSNR", "Own loss", "Answered by"];
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
          row(
            id,
            one,
            sources.find((each) => each.source === one.attack),
          ),
        ),
      ),
    ),
  );
}

function row(id, one, attack) {
  const name = inRounds(one.rounds);
  const where = link(["run", id, "case", one.attack, one.case]);
  const there = ["done", "failed", "interrupted"].includes(one.status);
  return h(
    "tr",
    {},
    h("th", { scope: "row" }, there ? h("a", { href: where, "data-key": where }, name) : name),
    h("td", { "data-label": "Client" }, h("code", {}, one.client)),
    h("td", { "data-label": "Attack" }, attack ? specName(attack.spec) : one.attack, attack?.null ? h("small", {}, "the null") : null),
    h("td", { "data-label": "State" }, one.status, one.reason ? h("small", {}, one.reason) : null),
    h(
      "td.number",
      { "data-label": "Recovered" },
      percent(one.success),
      known(one.null_success) ? h("small", {}, `null ${percent(one.null_success)}`) : null,
      one.examples > 1 ? h("small", {}, counted(one.examples, "example")) : null,
    ),
    h(
      "td.number",
      { "data-label": "PSNR" },
      decibel(one.psnr),
      known(one.null_psnr) ? h("small", {}, `null ${decibel(one.null_psnr)}`) : null,
    ),
    h("td.number", { "data-label": "Own loss" }, number(one.loss)),
    h("td", { "data-label": "Answered by" }, one.route ?? ""),
  );
}
