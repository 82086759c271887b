/* Parts of a view that load their own data. They show when they are loading, when that failed, and when there is nothing. */

import { h, put } from "./dom.js";

/** Return grey bars in place of text that is being loaded, with "Loading." for screen readers. */
export function makeSkeleton(lines = 3) {
  const bars = Array.from({ length: lines }, () => h("span.bar"));
  return [h("span.unseen", {}, "Loading."), h("span.skeleton", { "aria-hidden": "true" }, bars)];
}

/**
 * Return a section that loads its data and draws them, with the methods `refresh()`, `redraw()` and `stop()`.
 * load: () => promise of the data. draw: (body, data, before) => fills the body; before: the data drawn before, or null.
 * explainEmpty: data => text in place of the body if there is nothing to draw, else null.
 * `refresh` loads again, and draws if the data have changed. If it is called before an earlier load has ended, the earlier
 * result is ignored.
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

  /** Draw the known data again, after a change of filters or colours. */
  function redraw() {
    if (data !== null) show(data);
  }

  refresh();
  return Object.assign(element, { refresh, redraw, stop: () => (asked += 1) });
}
