/* Headline of a run: the verdict as a sentence, how much was attacked, and the examples that were reconstructed best. */

import { get } from "../api.js";
import { h, put } from "../dom.js";
import { makePair } from "../pairs.js";
import { makePanel } from "../panel.js";
import { formatCount, formatDecibels, formatSpecName, isKnown, NULL_EXPLAINED } from "../words.js";
import { makeCaseLink } from "./reconstructed.js";

export function makeHeadline(id) {
  return makePanel({
    className: "panel.headline",
    load: () => get(`recordings/${id}/headline`),
    draw: (body, told) =>
      put(
        body,
        h("h2.unseen", {}, "Verdict"),
        h("p.sentence", {}, told.sentence),
        told.cases ? h("p.soft", {}, describeCoverage(told)) : null,
        told.attacks ? h("p.soft.explained", {}, NULL_EXPLAINED) : null,
        told.worst.length ? makePictures(id, told) : null,
      ),
  });
}

/** Return how much was attacked, such as "2 attacks on 6 of 6 updates: 12 of 12 cases finished, none failed." */
function describeCoverage({ attacks, attacked, updates, cases, finished, failed, absent }) {
  const missing = absent ? `; ${formatCount(absent, "requested update")} failed or ${absent === 1 ? "was" : "were"} late` : "";
  const extent = `${formatCount(attacks, "attack")} on ${attacked} of ${formatCount(updates, "update")}`;
  return `${extent}: ${finished} of ${formatCount(cases, "case")} finished, ${failed || "none"} failed${missing}.`;
}

function makePictures(id, { attack, spec, examples, psnr, null_psnr, worst }) {
  const count = formatCount(worst.length, "example");
  const scored = attack !== null;
  const nullMean = isKnown(null_psnr) ? `, its null ${formatDecibels(null_psnr)}` : "";
  const means = isKnown(psnr) ? ` Mean PSNR of all: ${formatDecibels(psnr)}${nullMean}.` : "";
  return [
    h(
      "p.soft",
      {},
      scored
        ? `The ${count} that ${formatSpecName(spec)} reconstructed best, of ${examples}.${means}`
        : `${count}, one from each of the cases with the highest confidence, not compared with originals.`,
    ),
    h(
      "div.gallery",
      {},
      worst.map((one) => makePair(one.example, { whose: makeCaseLink(id, one.attack, one) })),
    ),
  ];
}
