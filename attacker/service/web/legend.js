/* Legend of the grid: its colour scale and its signs. */

import { h } from "./dom.js";
import { paintCell } from "./gridpaint.js";
import { getColour } from "./scale.js";
import { getTheme } from "./theme.js";

const SIGNS = [
  ["waiting", { state: "waiting", status: "complete" }],
  ["running", { state: "running", status: "complete" }],
  ["interrupted", { state: "interrupted", status: "complete" }],
  ["failed", { state: "failed", status: "complete" }],
  ["not attacked", { state: "none", status: "complete" }],
  ["no update", { state: "none", status: "late" }],
];

/** Return the legend, with a method `redraw(inks, words)`. inks: colours of the theme. words: what the scale measures. */
export function makeGridLegend() {
  const bar = h("canvas.scale", { width: 132, height: 12, "aria-hidden": "true" });
  const name = h("span");
  const signs = SIGNS.map(([words, cell]) => ({
    words,
    cell,
    canvas: h("canvas", { width: 28, height: 28, "aria-hidden": "true" }),
  }));
  const element = h(
    "div.grid-legend",
    {},
    h("span.span", {}, name, h("span", {}, "0"), bar, h("span", {}, "100\u00a0%")),
    signs.map(({ words, canvas }) => h("span.sign", {}, canvas, words)),
  );

  function redraw(inks, words) {
    name.textContent = words;
    const context = bar.getContext("2d");
    for (let i = 0; i < bar.width; i += 1) {
      context.fillStyle = getColour(i / (bar.width - 1), getTheme());
      context.fillRect(i, 0, 1, bar.height);
    }
    for (const { cell, canvas } of signs) {
      const pen = canvas.getContext("2d");
      pen.setTransform(2, 0, 0, 2, 0, 0);
      pen.clearRect(0, 0, 14, 14);
      paintCell(pen, cell, 0, 0, 14, 14, inks);
    }
  }

  return Object.assign(element, { redraw });
}
