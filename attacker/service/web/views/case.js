/* One case of one attack: its loss, and each example beside its original and its null. */

import { get } from "../api.js";
import { chart } from "../chart.js";
import { h, put, throttled } from "../dom.js";
import { pair } from "../pairs.js";
import { panel } from "../panel.js";
import { link } from "../route.js";
import { base, duration, inRounds, NULL_EXPLAINED, number, specName } from "../words.js";

export function caseView(app, id, source, name) {
  const body = panel({
    className: "bare",
    load: () => read(id, source, name),
    draw: (place, found) => put(place, ...drawn(app, id, source, found)),
  });
  const changed = throttled(body.refresh, 1500);
  const end = app.store.on((change) => {
    if (change.all || change.recording?.id === id) changed();
  });
  return {
    element: h("div.view", {}, body),
    title: `Case ${name}`,
    place: "runs",
    preset: () => ({ recording: id }),
    stop: () => {
      end();
      changed.stop();
      body.stop();
    },
  };
}

async function read(id, source, name) {
  const [one, attacks] = await Promise.all([get(`recordings/${id}/cases/${source}/${name}`), get(`recordings/${id}/attacks`)]);
  const attack = attacks.items.find((each) => each.source === source) ?? null;
  const beside =
    attack && !attack.null
      ? attacks.items.find((each) => each.null && base(each.spec) === base(attack.spec) && each.seed === attack.seed)
      : null;
  return { one, attack, nothing: beside ? await nullCase(id, beside.source, one) : null };
}

/** The null's answer to the same case, or null where it has none. */
async function nullCase(id, source, one) {
  const { items } = await get(`recordings/${id}/cases`, { attack: source, client: one.client, round: one.rounds[0], limit: 50 });
  const there = items.some((each) => each.case === one.case && each.status === "done");
  return there ? get(`recordings/${id}/cases/${source}/${one.case}`) : null;
}

function drawn(app, id, source, { one, attack, nothing }) {
  const examples = one.examples ?? [];
  return [
    h(
      "header.head",
      {},
      h(
        "p.eyebrow",
        {},
        h("a", { href: link(["run", id], cell(one)), "data-key": "up" }, app.store.recordings.get(id)?.name ?? id),
        h("span", {}, inRounds(one.rounds)),
      ),
      h("h1", {}, attack ? specName(attack.spec) : source, attack?.null ? h("span.soft", {}, ", the null") : null),
      h("p.soft", {}, h("code", {}, attack ? base(attack.spec) : source), " on ", h("code", {}, one.client)),
    ),
    h("dl.facts", {}, facts(one, attack)),
    one.reason ? h("p.state.failure", {}, one.reason) : null,
    one.notes?.length
      ? h(
          "ul.plain.soft",
          {},
          one.notes.map((note) => h("li", {}, note)),
        )
      : null,
    h(
      "section.panel",
      {},
      h("h2", {}, "What the server got"),
      examples.some((example) => example.null) ? h("p.soft.explained", {}, NULL_EXPLAINED) : null,
      examples.length
        ? h(
            "div.gallery",
            {},
            examples.map((example) => pair(example, { whose: slot(one, example) })),
          )
        : h("p.state", {}, "No reconstruction."),
    ),
    one.loss?.length ? h("section.panel", {}, lossChart(one, nothing)) : null,
  ];
}

function cell(one) {
  return one.rounds.length === 1 ? { cell: `${one.rounds[0]}@${one.client}` } : {};
}

function facts(one, attack) {
  const fact = (label, value) =>
    value === null || value === undefined || value === "" ? null : h("div", {}, h("dt", {}, label), h("dd", {}, value));
  const oracles = one.oracles ?? attack?.oracles ?? [];
  return [
    fact("State", one.status),
    fact("Answered by", one.route),
    fact("Iterations", one.iterations === null || one.iterations === undefined ? null : number(one.iterations)),
    fact("Time", one.seconds === null || one.seconds === undefined ? null : duration(one.seconds)),
    fact("Examples", one.examples?.length),
    fact("Seed", attack?.seed),
    oracles.length
      ? fact(
          "Oracles",
          oracles.map((oracle) => h("b.oracle", {}, oracle)),
        )
      : null,
  ];
}

function slot(one, example) {
  const rounds = one.rounds.length > 1 && example.rounds?.length ? `${inRounds(example.rounds)}, ` : "";
  return h("span.line.soft", {}, `${rounds}batch ${example.batch}, position ${example.position}`);
}

function lossChart(one, nothing) {
  const series = [{ name: "with the update", points: one.loss, ink: 1 }];
  if (nothing?.loss?.length) series.push({ name: "the null", points: nothing.loss, null: true, ink: 6 });
  const log = one.loss.every(([, value]) => value > 0) && one.loss.length > 2;
  return chart({ title: "The attack's own loss", x: { label: "iteration", whole: true }, y: { label: "loss", log }, series });
}
