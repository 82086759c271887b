/* What the chosen cell of the grid holds: each attack's answer to that client's update of that round. */

import { get } from "../api.js";
import { h, put } from "../dom.js";
import { stateOf } from "../gridwords.js";
import { pair } from "../pairs.js";
import { panel } from "../panel.js";
import { link } from "../route.js";
import { counted, duration, percent, specName } from "../words.js";

const SHOWN = 4;

/** onClose: called by its button and by Escape. */
export function inspector(id, { onClose }) {
  const element = h("aside.panel.inspector", { "aria-label": "The chosen cell", tabindex: -1 });
  let sources = [];
  let shown = null;
  let part = null;

  function clear() {
    shown = null;
    part?.stop();
    part = null;
    put(element, h("p.state", {}, "Choose a cell to see what the server got out of that update."));
  }

  /** Draws the cell; of the same cell, reads again what its attacks have come to. */
  function show(cell, attack) {
    const key = `${cell.round}@${cell.client}@${attack ?? ""}`;
    if (shown === key) {
      put(element.querySelector(".cell-state"), stateOf(cell));
      part.refresh();
      return;
    }
    shown = key;
    part?.stop();
    part = panel({
      className: "bare",
      load: () => read(id, cell, attack),
      draw: (body, found) =>
        put(
          body,
          found.map((one) => answer(id, one, sources)),
        ),
      empty: (found) => (found.length ? null : nothing(cell)),
    });
    put(
      element,
      h(
        "div.dialog-head",
        {},
        h("h2", {}, `Round ${cell.round}`),
        h("button.quiet", { type: "button", "data-key": "close", onclick: onClose }, "Close"),
      ),
      h("p", {}, h("code", {}, cell.client), h("span.soft", {}, " · ", h("span.cell-state", {}, stateOf(cell)))),
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
    sources: (items) => {
      sources = items;
      part?.redraw();
    },
    /** Puts the focus here, and on a phone the view too. */
    arrive: () => element.focus({ preventScroll: window.matchMedia("(min-width: 900px)").matches }),
  };
}

async function read(id, cell, attack) {
  const { items } = await get(`recordings/${id}/cases`, { client: cell.client, round: cell.round, attack, limit: 12 });
  return Promise.all(
    items
      .filter((one) => ["done", "failed", "interrupted"].includes(one.status) && (attack || !one.null))
      .map((one) => get(`recordings/${id}/cases/${one.attack}/${one.case}`)),
  );
}

function nothing(cell) {
  if (cell.state === "waiting") return "An attack on it waits for its turn.";
  if (cell.state === "running") return "It is being attacked now.";
  if (cell.status === "masked") return "It is masked: the server can read only the sum of all clients of this round.";
  if (cell.status !== "complete") return "The server received no update to attack.";
  return "No attack has been run on this update.";
}

function answer(id, one, sources) {
  const attack = sources.find((each) => each.source === one.attack);
  const isNull = one.null ?? attack?.null;
  const examples = one.examples ?? [];
  const where = link(["run", id, "case", one.attack, one.case]);
  return h(
    "section.answer",
    {},
    h(
      "h3",
      {},
      h("a", { href: where, "data-key": where }, specName(one.spec ?? attack?.spec ?? one.attack)),
      isNull ? h("span.soft", {}, ", the null") : null,
    ),
    h("p.soft", {}, summary(one)),
    one.reason ? h("p.failure", {}, one.reason) : null,
    h(
      "div.gallery",
      {},
      examples.slice(0, SHOWN).map((example) => pair(example)),
    ),
    examples.length > SHOWN ? h("p", {}, h("a", { href: where }, `All ${counted(examples.length, "example")}`)) : null,
  );
}

function summary(one) {
  const parts = [];
  if (typeof one.success === "number") parts.push(`${percent(one.success)} recovered`);
  if (one.route) parts.push(`by ${one.route}`);
  if (typeof one.seconds === "number") parts.push(duration(one.seconds));
  if (one.rounds.length > 1) parts.push(`with ${counted(one.rounds.length, "round")} together`);
  return parts.join(", ");
}
