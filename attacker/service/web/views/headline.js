/* The headline of a run: the verdict in a sentence, what was attacked and what failed, and the examples that leaked most. */

import { get } from "../api.js";
import { h, put } from "../dom.js";
import { pair } from "../pairs.js";
import { panel } from "../panel.js";
import { counted, decibel, known, NULL_EXPLAINED, specName } from "../words.js";
import { whose } from "./reconstructed.js";

export function headline(id) {
  return panel({
    className: "panel.headline",
    load: () => get(`recordings/${id}/headline`),
    draw: (body, told) =>
      put(
        body,
        h("h2.unseen", {}, "Verdict"),
        h("p.sentence", {}, told.sentence),
        told.cases ? h("p.soft", {}, coverage(told)) : null,
        told.attacks ? h("p.soft.explained", {}, NULL_EXPLAINED) : null,
        told.worst.length ? pictures(id, told) : null,
      ),
  });
}

/** "2 attacks on 6 of 6 updates: 12 of 12 cases finished, none failed." */
function coverage({ attacks, attacked, updates, cases, finished, failed, absent }) {
  const replies = absent ? `; ${counted(absent, "reply", "replies")} of clients held no update` : "";
  return `${counted(attacks, "attack")} on ${attacked} of ${counted(updates, "update")}: ${finished} of ${counted(cases, "case")} finished, ${failed || "none"} failed${replies}.`;
}

function pictures(id, { attack, spec, examples, psnr, null_psnr, worst }) {
  const count = counted(worst.length, "example");
  const scored = attack !== null;
  const means = known(psnr) ? ` Mean PSNR of all: ${decibel(psnr)}${known(null_psnr) ? `, its null ${decibel(null_psnr)}` : ""}.` : "";
  return [
    h(
      "p.soft",
      {},
      scored
        ? `The ${count} that ${specName(spec)} came nearest to, of ${examples}.${means}`
        : `The first ${count} of the cases that the attack is surest of; nothing is compared with an original.`,
    ),
    h(
      "div.gallery",
      {},
      worst.map((one) => pair(one.example, { whose: whose(id, one.attack, one) })),
    ),
  ];
}
