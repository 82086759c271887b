/* One run: its grid with what a cell holds beside it, leakage over rounds, training, attacks, cases, and what was recorded. */

import { address, all, get } from "../api.js";
import { h, kept, put, throttled } from "../dom.js";
import { inks, leakageGrid } from "../grid.js";
import { gridLegend } from "../legend.js";
import { panel, skeleton } from "../panel.js";
import { link, parse, refine as setAddress } from "../route.js";
import { onTheme } from "../theme.js";
import { ago, counted, protection, size } from "../words.js";
import { attacksTable } from "./attacks.js";
import { caseList } from "./cases.js";
import { leakageChart, trainingCharts } from "./curves.js";
import { federation } from "./federation.js";
import { filters, matches, within } from "./filters.js";
import { headline } from "./headline.js";
import { inspector } from "./inspector.js";
import { modelName } from "./runs.js";

export function runView(app, id) {
  let query = {};
  let sources = [];
  const head = h("header.head");
  const bar = filters({ onChange: (changes) => setQuery(changes) });
  const grid = leakageGrid({
    label: "Leakage of clients by rounds",
    onSelect: (cell) => setQuery({ cell: `${cell.round}@${cell.client}` }, true),
  });
  const legend = gridLegend();
  const beside = inspector(id, { onClose: closeInspector });

  const attacks = panel({
    className: "panel",
    load: async () => (await get(`recordings/${id}/attacks`)).items,
    draw: (body, items) => {
      sources = items;
      bar.attacks(items, query);
      put(
        body,
        h("h2", {}, "Attacks"),
        attacksTable(items, (source) => setQuery({ attack: source })),
      );
      beside.sources(items);
      leakage.redraw();
      cases.element.redraw();
    },
    empty: (items) => (items.length ? null : "No attack has been run on it yet."),
  });
  const cells = panel({
    className: "bare",
    load: () => get(`recordings/${id}/grid`, { attack: query.attack }),
    draw: (body, data) => {
      if (!grid.isConnected) put(body, grid, legend, keys());
      showGrid(data);
    },
    empty: (data) => (data.rounds.length ? null : "No round yet. The grid grows as updates arrive."),
  });
  const leakage = panel({
    load: async () => (await get(`recordings/${id}/leakage`)).items,
    draw: (body, items) => put(body, ...leakageChart(items, sources.find((one) => one.source === query.attack) ?? null)),
  });
  const training = panel({
    load: () => all(`recordings/${id}/training`),
    draw: (body, rows) => put(body, ...trainingCharts(rows)),
    empty: (rows) => (rows.length ? null : "The server recorded no loss or accuracy of its training."),
  });
  const cases = caseList(id, () => ({ query, sources }));
  const verdict = headline(id);

  const element = h(
    "div.view",
    {},
    head,
    verdict,
    bar.element,
    h(
      "div.board",
      {},
      h(
        "div.view",
        {},
        h("section.panel.map", { "aria-label": "Leakage of clients by rounds" }, cells),
        h("div.curves", {}, leakage, training),
      ),
      beside.element,
    ),
    attacks,
    cases.element,
    federation(app, id),
  );

  function showGrid({ clients, rounds, cells: list }) {
    const wanted = list.filter((cell) => within(cell, query));
    const shown = {
      clients: clients.filter((name) => !query.client || name === query.client),
      rounds: rounds.filter((round) => within({ round }, { from: query.from, to: query.to })),
    };
    const byPlace = new Map(wanted.map((cell) => [`${cell.round}@${cell.client}`, cell]));
    bar.clients(clients, query);
    grid.show({
      ...shown,
      at: (row, column) => byPlace.get(`${shown.rounds[column]}@${shown.clients[row]}`),
      faded: (cell) => !matches(cell, query),
    });
    legend.redraw(
      inks(grid),
      list.some((cell) => cell.success !== null && cell.success !== undefined) ? "recovered" : "confidence of the attack",
    );
    const now = query.cell ? byPlace.get(query.cell) : null;
    if (now) beside.show(now, query.attack);
  }

  /** chosen: whether somebody picked a cell, and wants to read on there. */
  function setQuery(changes, chosen = false) {
    setAddress(changes);
    refine(parse(location.hash).query);
    if (chosen) beside.arrive();
  }

  function refine(next) {
    const before = query;
    query = next;
    bar.set(query);
    if (before.attack !== query.attack) cells.refresh();
    else cells.redraw();
    if (["attack", "client", "from", "to", "state", "success"].some((key) => before[key] !== query[key])) cases.refresh();
    leakage.redraw();
    const [round, ...client] = (query.cell ?? "").split("@");
    if (query.cell) grid.select(client.join("@"), Number(round));
    else beside.clear();
  }

  function closeInspector() {
    setQuery({ cell: "" });
    grid.select("", -1);
    grid.focusFrame();
  }

  const heading = kept(head, (place, { run, loaded, audited }) =>
    put(
      place,
      h("p.eyebrow", {}, h("a", { href: "#/", "data-key": "up" }, "Runs"), h("span", {}, run ? modelName(run) : "")),
      h(
        "div.head-line",
        {},
        h("h1", {}, run?.name ?? id),
        h(
          "div.actions",
          {},
          h(
            "a.button",
            { href: address(`recordings/${id}/report`), target: "_blank", rel: "noopener", "data-key": "report" },
            "Report",
          ),
          audited ? h("a.button", { href: link(["job", audited]), "data-key": "audited" }, "Last audit") : null,
          h("button", { type: "button", "data-key": "audit", onclick: () => app.openAuditForm(id) }, "Audit it"),
          h("button.strong", { type: "button", "data-key": "attack", onclick: () => app.openForm(preset()) }, "Attack it"),
        ),
      ),
      h(
        "p.soft",
        {},
        run
          ? [
              h("code", {}, protection(run) ?? "no defense"),
              ` · ${size(run)}${run.updated ? `, last update ${ago(run.updated)}` : ""}`,
            ]
          : loaded
            ? "This run is not among the runs now."
            : skeleton(1),
      ),
      run?.trouble?.length
        ? h(
            "details.trouble",
            {},
            h("summary", {}, counted(run.trouble.length, "trouble")),
            h(
              "ul",
              {},
              run.trouble.map((words) => h("li", {}, words)),
            ),
          )
        : null,
    ),
  );
  const lastAudit = () => app.store.newest(id).find((job) => !job.spec.attack)?.id ?? null;
  const named = () => heading({ run: app.store.recordings.get(id) ?? null, loaded: app.store.loaded, audited: lastAudit() });

  function preset() {
    const attack = sources.find((one) => one.source === query.attack);
    const rounds =
      query.from || query.to ? `${query.from || 1}-${query.to || app.store.recordings.get(id)?.last_round || query.from}` : "all";
    return { recording: id, attack: attack?.attack, rounds, clients: query.client ? [query.client] : [] };
  }

  const arrived = throttled(() => [verdict, cells, leakage, training, cases, attacks, beside].forEach((part) => part.refresh()), 1500);
  const worked = throttled(() => [verdict, cells, leakage, cases, attacks, beside].forEach((part) => part.refresh()), 2000);
  const ends = [
    app.store.on((change) => {
      if (change.all || change.recording?.id === id || change.removed === id) named();
      if (change.all || change.recording?.id === id) arrived();
      else if (change.job?.spec.recording === id) {
        named();
        worked();
      }
    }),
    onTheme(() => cells.redraw()),
  ];
  named();
  return {
    element,
    title: app.store.recordings.get(id)?.name ?? id,
    place: "runs",
    refine,
    preset,
    stop: () => {
      arrived.stop();
      worked.stop();
      ends.forEach((end) => end());
      [verdict, cells, leakage, training, cases.element, attacks].forEach((part) => part.stop());
      beside.clear();
    },
  };
}

function keys() {
  return h("p.keys", { id: "grid-keys" }, "Arrow keys walk through the grid, Enter shows what a cell holds, Escape comes back.");
}
