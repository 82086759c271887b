/* Gallery of examples from the first cases of an attack. */

import { get } from "../api.js";
import { h, put } from "../dom.js";
import { makePair } from "../pairs.js";
import { makePanel } from "../panel.js";
import { makeLink } from "../route.js";
import { formatRounds } from "../words.js";

/**
 * Return a gallery of at most `most` examples from the first `most` cases of one attack, each with a link to its case.
 * The first argument is the spec of a job. Its rounds and clients select cases only if they name a single round or client.
 */
export function makeGallery({ recording: id, rounds, clients }, source, most) {
  const round = /^[0-9]+$/.test(rounds) ? rounds : null;
  const client = clients?.length === 1 ? clients[0] : null;
  return makePanel({
    className: "bare",
    load: async () => {
      const { items } = await get(`recordings/${id}/cases`, { attack: source, round, client, limit: most });
      const details = await Promise.all(items.map((one) => get(`recordings/${id}/cases/${one.attack ?? source}/${one.case}`)));
      return details.flatMap((one) => (one.examples ?? []).map((example) => ({ one, example }))).slice(0, most);
    },
    explainEmpty: (examples) => (examples.length ? null : `None of the first ${most} cases has a reconstruction.`),
    draw: (body, examples) =>
      put(
        body,
        h(
          "div.gallery",
          {},
          examples.map(({ one, example }) => makePair(example, { whose: makeCaseLink(id, one.attack ?? source, one) })),
        ),
      ),
  });
}

/** Return the rounds of a case as a link to it, and its client, such as "round 3, a1b2". */
export function makeCaseLink(id, source, one) {
  return h(
    "span.line",
    {},
    h("a", { href: makeLink(["run", id, "case", source, one.case]) }, formatRounds(one.rounds)),
    ", ",
    h("code", {}, one.client),
  );
}
