/* Texts on a cell of the grid, for its tooltip and for screen readers. */

import { formatCount, formatDecibels, formatNumber, formatPercent, isKnown } from "./words.js";

const STATE_TEXTS = {
  none: "not attacked",
  waiting: "an attack is waiting",
  running: "an attack is running",
  done: "attacked",
  failed: "an attack failed",
  interrupted: "an attack was interrupted",
};

/** Return the state of a cell as text. */
export function describeState(cell) {
  if (cell.status === "masked" && cell.state === "none") return "masked by secure aggregation";
  return cell.status !== "complete" && cell.state === "none" ? `no update: ${cell.status}` : STATE_TEXTS[cell.state];
}

/** Return lines of text on a cell: round and client, then the numbers that are known. cell: undefined if there is none. */
export function describeCell(cell, client, round) {
  const lines = [`round ${round}, ${client}`];
  if (!cell) return [...lines, "nothing recorded"];
  if (isKnown(cell.success))
    lines.push(`recovered ${formatPercent(cell.success)}${describeNull(cell.null_success, formatPercent)}`);
  if (isKnown(cell.psnr)) lines.push(`${formatDecibels(cell.psnr)}${describeNull(cell.null_psnr, formatDecibels)}`);
  if (isKnown(cell.confidence)) lines.push(`confidence ${formatNumber(cell.confidence)}`);
  const cases = cell.cases?.length ?? 0;
  lines.push(`${describeState(cell)}${cases > 1 ? `, ${formatCount(cases, "case")}` : ""}`);
  return lines;
}

function describeNull(value, format) {
  return isKnown(value) ? `, its null ${format(value)}` : "";
}
