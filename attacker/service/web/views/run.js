/* View of one run: verdict, grid with the chosen cell beside it, charts over rounds, attacks, cases, and settings. */

import { get, getAll, makeUrl } from "../api.js";
import { drawOnChange, h, put, throttle } from "../dom.js";
import { makeLeakageGrid, readThemeColours } from "../grid.js";
import { makeGridLegend } from "../legend.js";
import { makePanel, makeSkeleton } from "../panel.js";
import { changeQuery, makeLink, parseHash } from "../route.js";
import { listenToTheme } from "../theme.js";
import { describeSize, formatAge, formatCount, formatProtection } from "../words.js";
import { makeAttacksTable } from "./attacks.js";
import { makeCaseList } from "./cases.js";
import { makeLeakageChart, makeTrainingCharts } from "./curves.js";
import { makeFederationDetails } from "./federation.js";
import { isWithin, makeFilters, matches } from "./filters.js";
import { makeHeadline } from "./headline.js";
import { makeInspector } from "./inspector.js";
import { formatModelName } from "./runs.js";

export function makeRunView(app, id) {
  let query = {};
  let sources = [];
  const head = h("header.head");
  const bar = makeFilters({ onChange: (changes) => setQuery(changes) });
  const grid = makeLeakageGrid({
    label: "Leakage by client and round",
    onSelect: (cell) => setQuery({ cell: `${cell.round}@${cell.client}` }, true),
  });
  const legend = makeGridLegend();
  const beside = makeInspector(id, { onClose: closeInspector });

  const attacks = makePanel({
    className: "panel",
    load: async () => (await get(`recordings/${id}/attacks`)).items,
    draw: (body, items) => {
      sources = items;
      bar.setAttacks(items, query);
      put(
        body,
        h("h2", {}, "Attacks"),
        makeAttacksTable(items, (source) => setQuery({ attack: source })),
      );
      beside.setSources(items);
      leakage.redraw();
      cases.element.redraw();
    },
    explainEmpty: (items) => (items.length ? null : "This run has not been attacked yet."),
  });
  const cells = makePanel({
    className: "bare",
    load: () => get(`recordings/${id}/grid`, { attack: query.attack }),
    draw: (body, data) => {
      if (!grid.isConnected) put(body, grid, legend, makeKeyHelp());
      showGrid(data);
    },
    explainEmpty: (data) => (data.rounds.length ? null : "No round is recorded yet. The grid grows as rounds arrive."),
  });
  const leakage = makePanel({
    load: async () => (await get(`recordings/${id}/leakage`)).items,
    draw: (body, items) => put(body, ...makeLeakageChart(items, sources.find((one) => one.source === query.attack) ?? null)),
  });
  const training = makePanel({
    load: () => getAll(`recordings/${id}/training`),
    draw: (body, rows) => put(body, ...makeTrainingCharts(rows)),
    explainEmpty: (rows) => (rows.length ? null : "No loss or accuracy of the global model is recorded."),
  });
  const cases = makeCaseList(id, () => ({ query, sources }));
  const verdict = makeHeadline(id);

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
        h("section.panel.map", { "aria-label": "Leakage by client and round" }, cells),
        h("div.curves", {}, leakage, training),
      ),
      beside.element,
    ),
    attacks,
    cases.element,
    makeFederationDetails(app, id),
  );

  function showGrid({ clients, rounds, cells: list }) {
    const wanted = list.filter((cell) => isWithin(cell, query));
    const shown = {
      clients: clients.filter((name) => !query.client || name === query.client),
      rounds: rounds.filter((round) => isWithin({ round }, { from: query.from, to: query.to })),
    };
    const byPlace = new Map(wanted.map((cell) => [`${cell.round}@${cell.client}`, cell]));
    bar.setClients(clients, query);
    grid.show({
      ...shown,
      at: (row, column) => byPlace.get(`${shown.rounds[column]}@${shown.clients[row]}`),
      faded: (cell) => !matches(cell, query),
    });
    legend.redraw(readThemeColours(grid), describeLeak(list));
    const now = query.cell ? byPlace.get(query.cell) : null;
    if (now) beside.show(now, query.attack);
  }

  /** Change the query of the address, and redraw. chosen: whether the user chose a cell, whose panel then gets the focus. */
  function setQuery(changes, chosen = false) {
    changeQuery(changes);
    refine(parseHash(location.hash).query);
    if (chosen) beside.takeFocus();
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

  const drawHeading = drawOnChange(head, (place, { run, loaded, audited }) =>
    put(
      place,
      h("p.eyebrow", {}, h("a", { href: "#/", "data-key": "up" }, "Runs"), h("span", {}, run ? formatModelName(run) : "")),
      h(
        "div.head-line",
        {},
        h("h1", {}, run?.name ?? id),
        h(
          "div.actions",
          {},
          h(
            "a.button",
            { href: makeUrl(`recordings/${id}/report`), target: "_blank", rel: "noopener", "data-key": "report" },
            "Report",
          ),
          audited ? h("a.button", { href: makeLink(["job", audited]), "data-key": "audited" }, "Last audit") : null,
          h("button", { type: "button", "data-key": "audit", onclick: () => app.openAuditForm(id) }, "Audit it"),
          h(
            "button.strong",
            { type: "button", "data-key": "attack", onclick: () => app.openAttackForm(getPreset()) },
            "Attack it",
          ),
        ),
      ),
      h(
        "p.soft",
        {},
        run
          ? [
              h("code", {}, formatProtection(run)),
              ` · ${describeSize(run)}${run.updated ? `, last observation ${formatAge(run.updated)}` : ""}`,
            ]
          : loaded
            ? "This run is not on the list of runs. It may have been deleted."
            : makeSkeleton(1),
      ),
      run?.trouble?.length
        ? h(
            "details.trouble",
            {},
            h("summary", {}, `${formatCount(run.trouble.length, "problem")} with the files of this run`),
            h(
              "ul",
              {},
              run.trouble.map((words) => h("li", {}, words)),
            ),
          )
        : null,
    ),
  );
  const findLastAudit = () => app.store.listJobs(id).find((job) => !job.spec.attack)?.id ?? null;
  const showHeading = () => {
    const run = app.store.recordings.get(id) ?? null;
    element.classList.toggle("absent", app.store.loaded && !run);
    drawHeading({ run, loaded: app.store.loaded, audited: findLastAudit() });
  };

  function getPreset() {
    const attack = sources.find((one) => one.source === query.attack);
    const rounds =
      query.from || query.to ? `${query.from || 1}-${query.to || app.store.recordings.get(id)?.last_round || query.from}` : "all";
    return { recording: id, attack: attack?.attack, rounds, clients: query.client ? [query.client] : [] };
  }

  const attacked = [verdict, cells, leakage, cases, attacks, beside];
  const refreshAll = throttle(() => [...attacked, training].forEach((part) => part.refresh()), 1500);
  const refreshAttacks = throttle(() => attacked.forEach((part) => part.refresh()), 2000);
  const ends = [
    app.store.subscribe((change) => {
      if (change.all || change.recording?.id === id || change.removed === id) showHeading();
      if (change.all || change.recording?.id === id) refreshAll();
      else if (change.job?.spec.recording === id) {
        showHeading();
        refreshAttacks();
      }
    }),
    listenToTheme(() => cells.redraw()),
  ];
  showHeading();
  return {
    element,
    title: app.store.recordings.get(id)?.name ?? id,
    place: "runs",
    refine,
    getPreset,
    stop: () => {
      refreshAll.stop();
      refreshAttacks.stop();
      ends.forEach((end) => end());
      [verdict, cells, leakage, training, cases.element, attacks].forEach((part) => part.stop());
      beside.clear();
    },
  };
}

/** Return what the colours of the cells stand for: the share recovered of scored cells, the confidence of others. */
function describeLeak(cells) {
  const filled = cells.filter((cell) => typeof cell.leak === "number");
  const scored = filled.filter((cell) => typeof cell.success === "number");
  if (!scored.length) return "confidence of the attack";
  return scored.length < filled.length ? "recovered or, if not scored, confidence of the attack" : "recovered";
}

function makeKeyHelp() {
  return h(
    "p.keys",
    { id: "grid-keys" },
    "Arrow keys move between cells, Enter shows the results of a cell, Escape returns to the grid.",
  );
}
