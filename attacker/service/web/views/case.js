/* View of one case of an attack: its examples, each beside original and null, and the loss over the iterations. */

import { get } from "../api.js";
import { makeChart } from "../chart.js";
import { h, put, throttle } from "../dom.js";
import { makePair } from "../pairs.js";
import { makePanel } from "../panel.js";
import { makeLink } from "../route.js";
import {
  formatCaseState,
  formatDuration,
  formatNumber,
  formatRounds,
  formatSpecName,
  haveSameSettings,
  isKnown,
  NULL_EXPLAINED,
  removeNullSuffix,
} from "../words.js";

export function makeCaseView(app, id, source, name) {
  const body = makePanel({
    className: "bare",
    load: () => readCase(id, source, name),
    draw: (place, found) => put(place, ...makeSections(app, id, source, found)),
  });
  const changed = throttle(body.refresh, 1500);
  const end = app.store.subscribe((change) => {
    if (change.all || change.recording?.id === id) changed();
  });
  return {
    element: h("div.view", {}, body),
    title: `Case ${name}`,
    place: "runs",
    getPreset: () => ({ recording: id }),
    stop: () => {
      end();
      changed.stop();
      body.stop();
    },
  };
}

async function readCase(id, source, name) {
  const [one, attacks] = await Promise.all([get(`recordings/${id}/cases/${source}/${name}`), get(`recordings/${id}/attacks`)]);
  const attack = attacks.items.find((each) => each.source === source) ?? null;
  const isItsNull = (each) => each.null && haveSameSettings(each, attack);
  const beside = attack && !attack.null ? attacks.items.find(isItsNull) : null;
  return { one, attack, nothing: beside ? await readNullCase(id, beside.source, one) : null };
}

/** Return the same case of the attack's null `source`; null if it is not done. */
async function readNullCase(id, source, one) {
  const { items } = await get(`recordings/${id}/cases`, { attack: source, client: one.client, round: one.rounds[0], limit: 50 });
  const there = items.some((each) => each.case === one.case && each.status === "done");
  return there ? get(`recordings/${id}/cases/${source}/${one.case}`) : null;
}

function makeSections(app, id, source, { one, attack, nothing }) {
  const examples = one.examples ?? [];
  return [
    h(
      "header.head",
      {},
      h(
        "p.eyebrow",
        {},
        h("a", { href: makeLink(["run", id], makeCellQuery(one)), "data-key": "up" }, app.store.recordings.get(id)?.name ?? id),
        h("span", {}, formatRounds(one.rounds)),
      ),
      h("h1", {}, attack ? formatSpecName(attack.spec) : source, attack?.null ? h("span.soft", {}, ", the null") : null),
      h("p.soft", {}, h("code", {}, attack ? removeNullSuffix(attack.spec) : source), " on ", h("code", {}, one.client)),
    ),
    h("dl.facts", {}, listFacts(one, attack)),
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
      h("h2", {}, "Reconstructions"),
      examples.some((example) => example.null) ? h("p.soft.explained", {}, NULL_EXPLAINED) : null,
      examples.length
        ? h(
            "div.gallery",
            {},
            examples.map((example) => makePair(example, { whose: makeSlotLine(one, example) })),
          )
        : h("p.state", {}, "No reconstruction."),
    ),
    one.loss?.length ? h("section.panel", {}, makeLossChart(one, nothing)) : null,
  ];
}

function makeCellQuery(one) {
  return one.rounds.length === 1 ? { cell: `${one.rounds[0]}@${one.client}` } : {};
}

function listFacts(one, attack) {
  const makeFact = (label, value) =>
    value === null || value === undefined || value === "" ? null : h("div", {}, h("dt", {}, label), h("dd", {}, value));
  const oracles = one.oracles ?? attack?.oracles ?? [];
  return [
    makeFact("State", formatCaseState(one.status)),
    makeFact("Method", one.route),
    makeFact("Iterations", one.iterations === null || one.iterations === undefined ? null : formatNumber(one.iterations)),
    makeFact("Time", one.seconds === null || one.seconds === undefined ? null : formatDuration(one.seconds)),
    makeFact("Examples", one.examples?.length),
    makeFact("Seed", attack?.seed),
    oracles.length
      ? makeFact(
          "Oracles",
          oracles.map((oracle) => h("b.oracle", {}, oracle)),
        )
      : null,
    makeFact("Withheld", attack?.withheld?.join(", ")),
  ];
}

function makeSlotLine(one, example) {
  const rounds = one.rounds.length > 1 && example.rounds?.length ? `${formatRounds(example.rounds)}, ` : "";
  const place = isKnown(example.batch) ? `batch ${example.batch}, position ${example.position}` : "batch not known";
  return h("span.line.soft", {}, rounds + place);
}

function makeLossChart(one, nothing) {
  const series = [{ name: "with the update", points: one.loss, ink: 1 }];
  if (nothing?.loss?.length) series.push({ name: "the null", points: nothing.loss, null: true, ink: 6 });
  const log = one.loss.every(([, value]) => value > 0) && one.loss.length > 2;
  return makeChart({ title: "The attack's own loss", x: { label: "iteration", whole: true }, y: { label: "loss", log }, series });
}
