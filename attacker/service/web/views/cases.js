/* The cases of a run that pass the filters, read page by page until there are enough of them. */

import { get } from "../api.js";
import { h, put } from "../dom.js";
import { panel } from "../panel.js";
import { link } from "../route.js";
import { counted, decibel, inRounds, number, percent, specName } from "../words.js";
import { matches, within } from "./filters.js";

const PAGE = 200;
const STEP = 25;

/** now: () => {query, sources}. */
export function caseList(id, now) {
  let most = STEP;

  async function read() {
    const { query } = now();
    const found = [];
    let after = null;
    do {
      const page = await get(`recordings/${id}/cases`, { attack: query.attack, client: query.client, limit: PAGE, after });
      found.push(
        ...page.items.filter(
          (one) => matches(one, query) && one.rounds.some((round) => within({ round }, { from: query.from, to: query.to })),
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
      "table",
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
    h("td", {}, h("code", {}, one.client)),
    h("td", {}, attack ? specName(attack.spec) : one.attack, attack?.null ? h("small", {}, "the null") : null),
    h("td", {}, one.status, one.reason ? h("small", {}, one.reason) : null),
    h("td.number", {}, percent(one.success), one.examples > 1 ? h("small", {}, counted(one.examples, "example")) : null),
    h("td.number", {}, decibel(one.psnr)),
    h("td.number", {}, number(one.loss)),
    h("td", {}, one.route ?? ""),
  );
}
