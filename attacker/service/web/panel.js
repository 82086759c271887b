/* A part of a view that reads its data by itself and says so while it waits, when it fails and when there is nothing. */

import { h, put } from "./dom.js";

/** Grey bars where words will stand, and "Loading." for those who do not see them. */
export function makeSkeleton(lines = 3) {
  const bars = Array.from({ length: lines }, () => h("span.bar"));
  return [h("span.unseen", {}, "Loading."), h("span.skeleton", { "aria-hidden": "true" }, bars)];
}

/**
 * load: () => Promise of data; draw: (body, data, before) fills the body; empty: data => words where there is nothing to show.
 * Returns the element with `refresh()`, `redraw()` and `stop()`. What is the same as before is not drawn again; of several
 * readings the last counts.
 */
export function makePanel({ load, draw, explainEmpty = () => null, className = "panel" }) {
  const body = h("div.panel-body");
  const said = h("div.state", { role: "status" }, makeSkeleton());
  const element = h(`section.${className}`, {}, said, body);
  let shown = null;
  let asked = 0;
  let data = null;

  async function refresh() {
    const turn = ++asked;
    try {
      const next = await load();
      if (turn !== asked) return;
      const text = JSON.stringify(next);
      said.hidden = true;
      said.classList.remove("failure");
      element.classList.remove("old");
      if (text === shown) return;
      shown = text;
      show(next);
    } catch (problem) {
      if (turn === asked) showProblem(problem);
    }
  }

  function show(next) {
    const nothing = explainEmpty(next);
    const before = data;
    data = next;
    if (nothing) put(body, h("p.state", {}, nothing));
    else draw(body, next, before);
  }

  function showProblem(problem) {
    said.hidden = false;
    said.classList.add("failure");
    element.classList.add("old");
    put(said, problem.message, " ", h("button.small", { type: "button", "data-key": "again", onclick: retry }, "Try again"));
  }

  function retry() {
    said.classList.remove("failure");
    put(said, makeSkeleton());
    refresh();
  }

  /** Draws once more what is known, for new filters or colours. */
  function redraw() {
    if (data !== null) show(data);
  }

  refresh();
  return Object.assign(element, { refresh, redraw, stop: () => (asked += 1) });
}
