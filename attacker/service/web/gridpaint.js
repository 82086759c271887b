/* Painting of the visible part of the grid of clients by rounds on a canvas. */

import { getColour } from "./scale.js";
import { shorten } from "./words.js";

/** Return the grid's sizes in CSS pixels: margins `left` and `top`, sizes of a `row` and a `column`, and the whole. */
export function computeGeometry(clients, rounds, width) {
  const left = width < 480 ? 84 : 118;
  const top = 26;
  const row = clients <= 12 ? 30 : clients <= 40 ? 18 : 13;
  const column = Math.max(9, Math.min(64, Math.floor((width - left - 2) / Math.max(1, rounds))));
  return { left, top, row, column, width: left + rounds * column, height: top + clients * row };
}

/** Return the row and column of the cell at the point (x, y) of the frame; null if there is none. */
export function findCell(g, x, y, scroll, clients, rounds) {
  if (x < g.left || y < g.top) return null;
  const column = Math.floor((x - g.left + scroll.x) / g.column);
  const row = Math.floor((y - g.top + scroll.y) / g.row);
  return column < rounds && row < clients ? { row, column } : null;
}

/**
 * Paint the visible cells, the marks and the labels.
 * g: from `computeGeometry`. model: {clients, rounds, at(row, column) => cell or undefined, faded(cell) => boolean}.
 * scroll: {x, y} of the frame. size: {width, height} of the canvas. marks: {hover, focus, selected}, each {row, column} or null.
 * ink: colours and fonts of the theme by name, from `readThemeColours`.
 */
export function paint(context, g, model, scroll, size, marks, ink) {
  context.clearRect(0, 0, size.width, size.height);
  const columns = findVisible(scroll.x, size.width - g.left, g.column, model.rounds.length);
  const rows = findVisible(scroll.y, size.height - g.top, g.row, model.clients.length);
  const place = (row, column) => [g.left + column * g.column - scroll.x, g.top + row * g.row - scroll.y];
  context.save();
  context.beginPath();
  context.rect(g.left, g.top, size.width, size.height);
  context.clip();
  for (let row = rows.from; row < rows.to; row += 1) {
    for (let column = columns.from; column < columns.to; column += 1) {
      const cell = model.at(row, column);
      if (!cell) continue;
      context.globalAlpha = model.faded(cell) ? 0.14 : 1;
      const [x, y] = place(row, column);
      paintCell(context, cell, x + 1, y + 1, g.column - 2, g.row - 2, ink);
    }
  }
  context.globalAlpha = 1;
  paintRing(context, marks.hover, place, g, ink.soft, 1);
  paintRing(context, marks.selected, place, g, ink.ink, 2, ink.card);
  paintRing(context, marks.focus, place, g, ink.focus, 3, ink.card);
  context.restore();
  paintLabels(context, g, model, scroll, columns, rows, marks, ink);
}

function findVisible(offset, room, step, count) {
  return { from: Math.max(0, Math.floor(offset / step)), to: Math.min(count, Math.ceil((offset + room) / step)) };
}

/**
 * Paint one cell of the grid or of the legend.
 * A cell with a known leak is filled with the leak's colour, others are framed. Signs show unfinished cases and, in cells without
 * a leak, failed cases and missing updates.
 */
export function paintCell(context, cell, x, y, w, h, ink) {
  if (typeof cell.leak === "number") {
    context.fillStyle = getColour(cell.leak, ink.theme);
    context.fillRect(x, y, w, h);
    paintUnfinished(context, cell.state, x, y, w, h, ink);
    return;
  }
  context.strokeStyle = ink.rule;
  context.lineWidth = 1;
  context.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1);
  if (cell.state === "failed") paintCross(context, x, y, w, h, ink.red);
  else if (paintUnfinished(context, cell.state, x, y, w, h, ink)) return;
  else if (cell.state === "done") {
    context.fillStyle = ink.rule;
    context.fillRect(x, y, w, h);
  } else if (cell.status !== "complete" && cell.status !== "masked") paintDash(context, x, y, w, h, ink.soft);
}

/** Paint the sign of a state that is not final, and return true; false for other states. */
function paintUnfinished(context, state, x, y, w, h, ink) {
  if (state === "running" || state === "waiting") paintDot(context, x, y, w, h, ink, state === "running");
  else if (state === "interrupted") paintPause(context, x, y, w, h, ink.accent);
  else return false;
  return true;
}

function paintPause(context, x, y, w, h, colour) {
  const r = Math.max(2, Math.min(w, h) / 4);
  context.fillStyle = colour;
  context.fillRect(x + w / 2 - r, y + h / 2 - r, r * 0.7, 2 * r);
  context.fillRect(x + w / 2 + r * 0.3, y + h / 2 - r, r * 0.7, 2 * r);
}

function paintDot(context, x, y, w, h, ink, filled) {
  context.beginPath();
  context.arc(x + w / 2, y + h / 2, Math.max(2, Math.min(w, h) / 4.5), 0, 7);
  context.fillStyle = ink.accent;
  context.strokeStyle = ink.accent;
  context.lineWidth = 1.25;
  if (filled) context.fill();
  else context.stroke();
}

function paintCross(context, x, y, w, h, colour) {
  const r = Math.min(w, h) / 4;
  context.strokeStyle = colour;
  context.lineWidth = 1.5;
  context.beginPath();
  context.moveTo(x + w / 2 - r, y + h / 2 - r);
  context.lineTo(x + w / 2 + r, y + h / 2 + r);
  context.moveTo(x + w / 2 + r, y + h / 2 - r);
  context.lineTo(x + w / 2 - r, y + h / 2 + r);
  context.stroke();
}

function paintDash(context, x, y, w, h, colour) {
  context.fillStyle = colour;
  context.fillRect(x + w / 2 - Math.min(4, w / 4), y + h / 2 - 0.5, Math.min(8, w / 2), 1);
}

/** Paint a frame around a cell; if it is wide, also one in the colour `within`, for contrast with every colour of the cell. */
function paintRing(context, mark, place, g, colour, width, within) {
  if (!mark) return;
  const [x, y] = place(mark.row, mark.column);
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.strokeRect(x + 0.5, y + 0.5, g.column - 1, g.row - 1);
  if (width < 2) return;
  context.strokeStyle = within;
  context.lineWidth = 1;
  context.strokeRect(x + 1 + width / 2, y + 1 + width / 2, g.column - 2 - width, g.row - 2 - width);
}

function paintLabels(context, g, model, scroll, columns, rows, marks, ink) {
  const at = marks.hover ?? marks.focus ?? marks.selected;
  context.textBaseline = "middle";
  context.font = `11.5px ${ink.mono}`;
  context.textAlign = "left";
  context.save();
  context.beginPath();
  context.rect(0, g.top, g.left - 4, 1e5);
  context.clip();
  const most = Math.floor((g.left - 10) / 7);
  for (let row = rows.from; row < rows.to; row += 1) {
    context.fillStyle = at?.row === row ? ink.ink : ink.soft;
    context.fillText(shorten(model.clients[row], most), 0, g.top + (row + 0.5) * g.row - scroll.y + 0.5);
  }
  context.restore();
  context.textAlign = "center";
  context.font = `11.5px ${ink.sans}`;
  const step = [1, 2, 5, 10, 20, 50, 100, 200, 500].find((s) => s * g.column >= 26) ?? 1000;
  for (let column = columns.from; column < columns.to; column += 1) {
    const round = model.rounds[column];
    const here = at?.column === column;
    if (!here && ((round % step !== 0 && column !== 0) || (at && Math.abs(at.column - column) * g.column < 26))) continue;
    const x = g.left + (column + 0.5) * g.column - scroll.x;
    if (x < g.left) continue;
    context.fillStyle = here ? ink.ink : ink.soft;
    context.fillText(String(round), x, g.top - 12);
  }
}
