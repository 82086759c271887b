/* Tooltips of the grid and of charts. Screen readers get the same text from the element that has the focus. */

import { h, put } from "./dom.js";

export function makeTooltip() {
  const element = h("div.tip", { role: "presentation", hidden: true });

  /** Show `lines` below the point (x, y) of `frame`, moved sideways to stay inside it. */
  function show(lines, x, y, frame) {
    put(
      element,
      lines.map((line, i) => h(i ? "span" : "strong", {}, line)),
    );
    element.hidden = false;
    const room = frame.clientWidth - element.offsetWidth - 4;
    element.style.left = `${Math.max(0, Math.min(room, x - element.offsetWidth / 2))}px`;
    element.style.top = `${y + 8}px`;
  }

  return { element, show, hide: () => (element.hidden = true) };
}
