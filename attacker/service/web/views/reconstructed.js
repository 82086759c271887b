/* The first examples that an attack reconstructed, from several of its cases. */

import { get } from "../api.js";
import { h, put } from "../dom.js";
import { makePair } from "../pairs.js";
import { makePanel } from "../panel.js";
import { makeLink } from "../route.js";
import { formatRounds } from "../words.js";

/** A gallery of at most `most` examples of one attack, each leading to its case. spec: of the job that asked for it. */
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
    explainEmpty: (examples) => (examples.length ? null : "It reconstructed nothing."),
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

/** "round 3, a1b2": a link to the case. */
export function makeCaseLink(id, source, one) {
  return h(
    "span.line",
    {},
    h("a", { href: makeLink(["run", id, "case", source, one.case]) }, formatRounds(one.rounds)),
    ", ",
    h("code", {}, one.client),
  );
}
