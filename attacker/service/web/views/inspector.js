/* Panel on the chosen cell of the grid: reconstructions from the update of one client in one round. */

import { get } from "../api.js";
import { h, put } from "../dom.js";
import { describeState } from "../gridwords.js";
import { makePair } from "../pairs.js";
import { makePanel } from "../panel.js";
import { makeLink } from "../route.js";
import { formatCount, formatDuration, formatPercent, formatSpecName } from "../words.js";

const MAX_EXAMPLES = 4;

/** Return the panel. id: of the recording. onClose: called by the Close button and by Escape. */
export function makeInspector(id, { onClose }) {
  const element = h("aside.panel.inspector", { "aria-label": "The chosen cell", tabindex: -1 });
  let sources = [];
  let shown = null;
  let part = null;

  function clear() {
    shown = null;
    part?.stop();
    part = null;
    put(element, h("p.state", {}, "Choose a cell to see what attacks reconstructed from that update."));
  }

  /** Show a cell; if it is shown already, only update its results. attack: source of the only attack to show; none for all. */
  function show(cell, attack) {
    const key = `${cell.round}@${cell.client}@${attack ?? ""}`;
    if (shown === key) {
      put(element.querySelector(".cell-state"), describeState(cell));
      part.refresh();
      return;
    }
    shown = key;
    part?.stop();
    part = makePanel({
      className: "bare",
      load: () => readCases(id, cell, attack),
      draw: (body, found) =>
        put(
          body,
          found.map((one) => makeAnswer(id, one, sources)),
        ),
      explainEmpty: (found) => (found.length ? null : explainEmpty(cell)),
    });
    put(
      element,
      h(
        "div.dialog-head",
        {},
        h("h2", {}, `Round ${cell.round}`),
        h("button.quiet", { type: "button", "data-key": "close", onclick: onClose }, "Close"),
      ),
      h("p", {}, h("code", {}, cell.client), h("span.soft", {}, " · ", h("span.cell-state", {}, describeState(cell)))),
      part,
    );
  }

  element.addEventListener("keydown", (event) => {
    if (event.key === "Escape") onClose();
  });
  clear();
  return {
    element,
    show,
    clear,
    refresh: () => part?.refresh(),
    setSources: (items) => {
      sources = items;
      part?.redraw();
    },
    /** Move the focus to the panel; in one column, also scroll to it. */
    takeFocus: () => element.focus({ preventScroll: window.matchMedia("(min-width: 900px)").matches }),
  };
}

async function readCases(id, cell, attack) {
  const { items } = await get(`recordings/${id}/cases`, { client: cell.client, round: cell.round, attack, limit: 12 });
  return Promise.all(
    items
      .filter((one) => ["done", "failed", "interrupted"].includes(one.status) && (attack || !one.null))
      .map((one) => get(`recordings/${id}/cases/${one.attack}/${one.case}`)),
  );
}

function explainEmpty(cell) {
  if (cell.state === "waiting") return "An attack on this update was started, and has no result for it yet.";
  if (cell.state === "running") return "An attack on this update is running.";
  if (cell.status === "masked")
    return "This update is masked by secure aggregation: the server can read only the sum of the round's updates.";
  if (cell.status !== "complete") return "The server received no update to attack.";
  return "No attack has been run on this update.";
}

function makeAnswer(id, one, sources) {
  const attack = sources.find((each) => each.source === one.attack);
  const isNull = one.null ?? attack?.null;
  const examples = one.examples ?? [];
  const where = makeLink(["run", id, "case", one.attack, one.case]);
  return h(
    "section.answer",
    {},
    h(
      "h3",
      {},
      h("a", { href: where, "data-key": where }, formatSpecName(one.spec ?? attack?.spec ?? one.attack)),
      isNull ? h("span.soft", {}, ", the null") : null,
    ),
    h("p.soft", {}, summarise(one)),
    one.reason ? h("p.failure", {}, one.reason) : null,
    h(
      "div.gallery",
      {},
      examples.slice(0, MAX_EXAMPLES).map((example) => makePair(example)),
    ),
    examples.length > MAX_EXAMPLES ? h("p", {}, h("a", { href: where }, `All ${formatCount(examples.length, "example")}`)) : null,
  );
}

function summarise(one) {
  const parts = [];
  if (typeof one.success === "number") parts.push(`${formatPercent(one.success)} recovered`);
  if (one.route) parts.push(`by ${one.route}`);
  if (typeof one.seconds === "number") parts.push(formatDuration(one.seconds));
  if (one.rounds.length > 1) parts.push(`from ${formatCount(one.rounds.length, "round")} together`);
  return parts.join(", ");
}
