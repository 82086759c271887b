/* Verdict of an audit: its grade, its findings, and a link to the whole verdict. */

import { get, resolveOwnUrl } from "../api.js";
import { h, put } from "../dom.js";
import { makePanel } from "../panel.js";
import { formatCount } from "../words.js";

/** Return a panel with the verdict of the audit job `id`, which must be done. */
export function makeVerdictPanel(id) {
  return makePanel({
    load: () => get(`jobs/${id}/audit`),
    draw: (body, told) =>
      put(
        body,
        h("h2", {}, told.grade === "none found" ? "No leak found" : `Verdict: ${told.grade}`),
        h("p.soft", {}, describeBasis(told)),
        told.findings.length ? h("div.view", {}, told.findings.map(makeFinding)) : null,
        h(
          "div.actions",
          {},
          h(
            "a.button",
            { href: resolveOwnUrl(told.page), target: "_blank", rel: "noopener", "data-key": "verdict" },
            "The whole verdict",
          ),
        ),
      ),
  });
}

/** Return a text on what the verdict rests on: the number of checks, and whether reconstructions were scored. */
function describeBasis({ scored, passed, not_checked }) {
  const truth = scored
    ? ""
    : " The service was given no true examples: findings rest on checks and on the confidence of attacks.";
  const others = `${formatCount(not_checked, "other check or attack", "other checks and attacks")} gave no result`;
  return `${formatCount(passed, "check")} passed, and ${others}.${truth}`;
}

function makeFinding({ grade, title, evidence, advice }) {
  return h("article", {}, h("b", {}, `${grade}: ${title}`), h("p.soft", {}, evidence), h("p", {}, markCode(advice)));
}

/** Return the parts of a text, those between backticks as code. */
function markCode(text) {
  return text.split("`").map((part, i) => (i % 2 ? h("code", {}, part) : part));
}
