/* The first examples that an attack reconstructed, from several of its cases. */

import { get } from "../api.js";
import { h, put } from "../dom.js";
import { pair } from "../pairs.js";
import { panel } from "../panel.js";
import { link } from "../route.js";
import { inRounds } from "../words.js";

/** A gallery of at most `most` examples of one attack, each leading to its case. spec: of the job that asked for it. */
export function casesOf({ recording: id, rounds, clients }, source, most) {
  const round = /^[0-9]+$/.test(rounds) ? rounds : null;
  const client = clients?.length === 1 ? clients[0] : null;
  return panel({
    className: "bare",
    load: async () => {
      const { items } = await get(`recordings/${id}/cases`, { attack: source, round, client, limit: most });
      const details = await Promise.all(items.map((one) => get(`recordings/${id}/cases/${one.attack ?? source}/${one.case}`)));
      return details.flatMap((one) => (one.examples ?? []).map((example) => ({ one, example }))).slice(0, most);
    },
    empty: (examples) => (examples.length ? null : "It reconstructed nothing."),
    draw: (body, examples) =>
      put(
        body,
        h(
          "div.gallery",
          {},
          examples.map(({ one, example }) => pair(example, { whose: whose(id, one.attack ?? source, one) })),
        ),
      ),
  });
}

/** "round 3, a1b2": a link to the case. */
export function whose(id, source, one) {
  return h(
    "span.line",
    {},
    h("a", { href: link(["run", id, "case", source, one.case]) }, inRounds(one.rounds)),
    ", ",
    h("code", {}, one.client),
  );
}
