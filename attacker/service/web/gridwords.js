/* What a cell of the grid says on hover, on focus and to a screen reader. */

import { counted, decibel, known, number, percent } from "./words.js";

const STATE = {
  none: "not attacked",
  waiting: "attack waiting",
  running: "attack running",
  done: "attacked",
  failed: "attack failed",
  interrupted: "attack interrupted",
};

/** The name of a cell's state. */
export function stateOf(cell) {
  if (cell.status === "masked" && cell.state === "none") return "masked";
  return cell.status !== "complete" && cell.state === "none"
    ? `no update: ${cell.status}`
    : STATE[cell.state];
}

/** Lines: who and when, then the numbers there are. */
export function cellWords(cell, client, round) {
  const lines = [`round ${round}, ${client}`];
  if (!cell) return [...lines, "did not take part"];
  if (known(cell.success)) lines.push(`recovered ${percent(cell.success)}${known(cell.null_success) ? `, its null ${percent(cell.null_success)}` : ""}`);
  if (known(cell.psnr)) lines.push(`${decibel(cell.psnr)}${known(cell.null_psnr) ? `, its null ${decibel(cell.null_psnr)}` : ""}`);
  if (known(cell.confidence)) lines.push(`confidence ${number(cell.confidence)}`);
  const cases = cell.cases?.length ?? 0;
  lines.push(`${stateOf(cell)}${cases > 1 ? `, ${counted(cases, "case")}` : ""}`);
  return lines;
}
