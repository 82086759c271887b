/* Grid of clients by rounds, coloured by leakage, for pointer, keyboard and screen readers. Its canvas is only as large as the
   visible part. */

import { h } from "./dom.js";
import { computeGeometry, findCell, paint } from "./gridpaint.js";
import { describeCell } from "./gridwords.js";
import { getTheme } from "./theme.js";
import { makeTooltip } from "./tooltip.js";

const THEME_PROPERTIES = ["ink", "soft", "rule", "accent", "red", "focus", "card", "mono", "sans"];

/**
 * Return the grid, with the methods `show(model)`, `select(client, round)`, `redraw()` and `focusFrame()`.
 * model: as in `paint`. onSelect: called with the cell that the user chooses.
 */
export function makeLeakageGrid({ label, onSelect }) {
  const canvas = h("canvas", { "aria-hidden": "true" });
  const spacer = h("div.grid-space", { role: "presentation" });
  const spoken = h("div", { role: "gridcell", id: "grid-cell" });
  const row = h("div.unseen", { role: "row" }, spoken);
  const frame = h(
    "div.grid-frame",
    { role: "grid", tabindex: 0, "aria-label": label, "aria-describedby": "grid-keys" },
    spacer,
    row,
  );
  const tip = makeTooltip();
  const element = h("div.grid", {}, canvas, frame, tip.element);
  const marks = { hover: null, focus: null, selected: null };
  let model = { clients: [], rounds: [], at: () => undefined, faded: () => false };
  let g = computeGeometry(0, 0, 300);
  let cursor = { row: 0, column: 0 };
  let queued = false;
  let chosen = null;

  function draw() {
    if (queued) return;
    queued = true;
    requestAnimationFrame(() => {
      queued = false;
      const size = { width: frame.clientWidth, height: frame.clientHeight };
      const scale = window.devicePixelRatio || 1;
      if (canvas.width !== Math.round(size.width * scale) || canvas.height !== Math.round(size.height * scale)) {
        canvas.width = Math.round(size.width * scale);
        canvas.height = Math.round(size.height * scale);
        canvas.style.width = `${size.width}px`;
        canvas.style.height = `${size.height}px`;
      }
      const context = canvas.getContext("2d");
      context.setTransform(scale, 0, 0, scale, 0, 0);
      paint(context, g, model, { x: frame.scrollLeft, y: frame.scrollTop }, size, marks, readThemeColours(element));
    });
  }

  function fitToWidth() {
    g = computeGeometry(model.clients.length, model.rounds.length, element.clientWidth);
    spacer.style.width = `${g.width}px`;
    spacer.style.height = `${g.height}px`;
    const bar = g.width > element.clientWidth ? 16 : 2;
    frame.style.height = `${Math.min(g.height + bar, Math.max(220, window.innerHeight * 0.62))}px`;
    draw();
  }

  function show(next) {
    const atEnd = frame.scrollLeft + frame.clientWidth >= frame.scrollWidth - 4;
    model = next;
    frame.setAttribute("aria-rowcount", model.clients.length);
    frame.setAttribute("aria-colcount", model.rounds.length);
    cursor = { row: clamp(cursor.row, model.clients.length), column: clamp(cursor.column, model.rounds.length) };
    fitToWidth();
    if (atEnd) frame.scrollLeft = frame.scrollWidth;
    if (chosen) select(chosen.client, chosen.round);
    announceCursor();
  }

  function select(client, round) {
    const at = { row: model.clients.indexOf(client), column: model.rounds.indexOf(round) };
    chosen = { client, round };
    marks.selected = at.row >= 0 && at.column >= 0 ? at : null;
    if (marks.selected) cursor = at;
    draw();
  }

  function choose(at) {
    const cell = model.at(at.row, at.column);
    if (!cell) return;
    select(cell.client, cell.round);
    onSelect(cell);
  }

  function announceCursor() {
    const client = model.clients[cursor.row];
    const round = model.rounds[cursor.column];
    if (client === undefined || round === undefined) return;
    row.setAttribute("aria-rowindex", cursor.row + 1);
    spoken.setAttribute("aria-colindex", cursor.column + 1);
    spoken.textContent = describeCell(model.at(cursor.row, cursor.column), client, round).join(", ");
    frame.setAttribute("aria-activedescendant", spoken.id);
  }

  function showTooltip(at) {
    const x = g.left + (at.column + 0.5) * g.column - frame.scrollLeft;
    const y = g.top + (at.row + 1) * g.row - frame.scrollTop;
    const lines = describeCell(model.at(at.row, at.column), model.clients[at.row], model.rounds[at.column]);
    tip.show(lines, x, y, element);
  }

  function moveCursor(event) {
    const step = findTarget(event, cursor, model, Math.floor((frame.clientHeight - g.top) / g.row));
    if (!step) return;
    event.preventDefault();
    cursor = { row: clamp(step.row, model.clients.length), column: clamp(step.column, model.rounds.length) };
    marks.focus = cursor;
    marks.hover = null;
    scrollToCursor();
    announceCursor();
    showTooltip(cursor);
    draw();
  }

  function scrollToCursor() {
    const x = cursor.column * g.column;
    const y = cursor.row * g.row;
    const [wide, high] = [frame.clientWidth - g.left, frame.clientHeight - g.top];
    frame.scrollLeft = Math.min(x, Math.max(frame.scrollLeft, x + g.column - wide));
    frame.scrollTop = Math.min(y, Math.max(frame.scrollTop, y + g.row - high));
  }

  function findCellUnder(event) {
    const box = frame.getBoundingClientRect();
    const scroll = { x: frame.scrollLeft, y: frame.scrollTop };
    return findCell(g, event.clientX - box.left, event.clientY - box.top, scroll, model.clients.length, model.rounds.length);
  }

  frame.addEventListener("scroll", draw, { passive: true });
  frame.addEventListener("pointermove", (event) => {
    marks.hover = findCellUnder(event);
    if (marks.hover && model.at(marks.hover.row, marks.hover.column)) showTooltip(marks.hover);
    else tip.hide();
    draw();
  });
  frame.addEventListener("pointerleave", () => {
    marks.hover = null;
    tip.hide();
    draw();
  });
  frame.addEventListener("click", (event) => {
    const at = findCellUnder(event);
    if (at) {
      cursor = at;
      choose(at);
      announceCursor();
    }
  });
  frame.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      choose(cursor);
    } else if (event.key === "Escape") tip.hide();
    else moveCursor(event);
  });
  frame.addEventListener("focus", () => {
    if (!frame.matches(":focus-visible")) return;
    marks.focus = cursor;
    announceCursor();
    if (model.clients.length) showTooltip(cursor);
    draw();
  });
  frame.addEventListener("blur", () => {
    marks.focus = null;
    tip.hide();
    draw();
  });
  let width = 0;
  new ResizeObserver(() => {
    if (element.clientWidth !== width) fitToWidth();
    width = element.clientWidth;
  }).observe(element);

  return Object.assign(element, { show, select, redraw: draw, focusFrame: () => frame.focus() });
}

function findTarget(event, { row, column }, model, page) {
  const far = event.ctrlKey || event.metaKey;
  switch (event.key) {
    case "ArrowLeft":
      return { row, column: column - 1 };
    case "ArrowRight":
      return { row, column: column + 1 };
    case "ArrowUp":
      return { row: row - 1, column };
    case "ArrowDown":
      return { row: row + 1, column };
    case "Home":
      return { row: far ? 0 : row, column: 0 };
    case "End":
      return { row: far ? model.clients.length - 1 : row, column: model.rounds.length - 1 };
    case "PageUp":
      return { row: row - page, column };
    case "PageDown":
      return { row: row + page, column };
    default:
      return null;
  }
}

function clamp(value, count) {
  return Math.max(0, Math.min(count - 1, value));
}

/** Return the theme's colours and fonts by name, in the form that a canvas accepts, and `theme`, the name of the theme. */
export function readThemeColours(element) {
  const style = getComputedStyle(element);
  const found = { theme: getTheme() };
  for (const name of THEME_PROPERTIES) found[name] = resolve(style.getPropertyValue(`--${name}`), found.theme);
  return found;
}

/** Return the colour for `theme` from the value of a custom property, which browsers return as light-dark(a, b). */
function resolve(value, theme) {
  const pair = /^light-dark\(([^,]+),\s*([^)]+)\)$/.exec(value.trim());
  return pair ? pair[theme === "dark" ? 2 : 1].trim() : value.trim();
}
