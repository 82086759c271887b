/* View of all runs, the last recorded first, each with a small grid, and of running and waiting jobs. */

import { get } from "../api.js";
import { arrange, drawOnChange, h, put, throttle } from "../dom.js";
import { makeSkeleton } from "../panel.js";
import { makeLink } from "../route.js";
import { getColour } from "../scale.js";
import { getTheme, listenToTheme } from "../theme.js";
import {
  describeProtection,
  describeSize,
  formatAge,
  formatAttackName,
  formatCount,
  formatPercent,
  formatProtection,
  haveSameSettings,
  NULL_EXPLAINED,
} from "../words.js";
import { makeJobList } from "./jobrow.js";

const MAX_THUMBNAILS = 24;

export function makeRunsView(app) {
  const cards = h("div.cards");
  const lines = makeJobList(app);
  const trouble = h("div");
  const busy = h(
    "section",
    { "aria-label": "Running and waiting jobs", hidden: true },
    h("h2", {}, "Running and waiting jobs"),
    lines.element,
  );
  const filter = h("input", {
    type: "search",
    id: "find-run",
    placeholder: "name, model or defense",
    autocomplete: "off",
    oninput: () => draw(),
  });
  const element = h(
    "div.view",
    {},
    h("header.head", {}, h("p.eyebrow", {}, "fedleak"), h("h1", {}, "What leaks")),
    h("p.lede", {}, "What an honest-but-curious server can reconstruct from the updates that it receives."),
    h("p.soft.explained", {}, NULL_EXPLAINED),
    busy,
    h(
      "div.bar-of-filters",
      {},
      h("h2", {}, "Runs"),
      h("div.field.search", {}, h("label.unseen", { for: "find-run" }, "Filter runs"), filter),
    ),
    cards,
    trouble,
  );
  const thumbnails = new Map(); // by id of the run
  const cardById = new Map();
  const drawTrouble = drawOnChange(trouble, (place, data) => put(place, makeTrouble(data.trouble)));

  function draw() {
    const { store } = app;
    const wanted = filter.value.trim().toLowerCase();
    const describe = (one) => `${one.id} ${one.name} ${formatModelName(one)} ${describeProtection(one) ?? ""}`;
    const runs = [...store.recordings.values()]
      .filter((one) => describe(one).toLowerCase().includes(wanted))
      .sort((a, b) => Date.parse(b.updated ?? 0) - Date.parse(a.updated ?? 0) || a.id.localeCompare(b.id));
    arrange(cards, runs.length ? runs.map((one, i) => getCard(one, i < MAX_THUMBNAILS)) : [explainEmpty(store, wanted)]);
    const jobs = store.listJobs().filter((job) => job.state === "running" || job.state === "queued");
    drawTrouble({ trouble: store.trouble });
    busy.hidden = jobs.length === 0;
    lines.show(jobs.slice(0, 5));
  }

  /** Return the card of a run: the same element until its content changes. pictured: whether it has a thumbnail. */
  function getCard(run, pictured) {
    const text = JSON.stringify([run, pictured, formatAge(run.updated)]);
    if (cardById.get(run.id)?.text !== text) cardById.set(run.id, { text, element: makeCard(thumbnails, run, pictured) });
    return cardById.get(run.id).element;
  }

  const drawSoon = throttle(draw, 250);
  const ends = [
    app.store.subscribe((change) => {
      const id = change.recording?.id ?? change.job?.spec.recording;
      if (id) thumbnails.get(id)?.readSoon();
      drawSoon();
    }),
    listenToTheme(() => thumbnails.forEach((one) => one.paint())),
  ];
  draw();
  return {
    element,
    title: "What leaks",
    place: "runs",
    stop: () => {
      drawSoon.stop();
      ends.forEach((end) => end());
      thumbnails.forEach((one) => one.stop());
    },
  };
}

/** Return the list of messages about folders below the root that cannot be served; null if there are none. */
function makeTrouble(words) {
  if (!words.length) return null;
  const list = words.map((line) => h("li", {}, line));
  return h("details.trouble", {}, h("summary", {}, `${formatCount(words.length, "folder")} not shown`), h("ul", {}, list));
}

function explainEmpty(store, wanted) {
  if (store.problem && !store.loaded) return h("p.state.failure", {}, store.problem.message);
  if (!store.loaded) return h("div.state", { role: "status" }, makeSkeleton(4));
  if (wanted) return h("p.state", {}, "No run matches the filter.");
  const root = store.root ?? "ROOT";
  return h(
    "div.state",
    {},
    h(
      "p",
      {},
      "No run yet. This service watches ",
      h("code", {}, root),
      ". A run that is recorded there shows up here by itself:",
    ),
    h("pre", {}, h("code", {}, `fedsim run EXPERIMENT.toml --out ${quote(root)}/NAME`)),
  );
}

/** Return a path, quoted for a shell if necessary. */
function quote(path) {
  return /^[A-Za-z0-9_@%+=:,./-]+$/.test(path) ? path : `'${path.replaceAll("'", "'\\''")}'`;
}

export function formatModelName(recording) {
  return typeof recording.model === "string" ? recording.model : (recording.model?.name ?? "");
}

function makeCard(thumbnails, run, pictured) {
  const small = pictured ? getThumbnail(thumbnails, run.id) : null;
  return h(
    "article.card",
    {},
    h(
      "p.eyebrow",
      {},
      h("code", {}, formatProtection(run)),
      h("span", {}, run.updated ? formatAge(run.updated) : ""),
    ),
    h("h3", {}, h("a.cover", { href: makeLink(["run", run.id]), "data-key": `run-${run.id}` }, run.name)),
    h(
      "p.soft",
      {},
      [formatModelName(run), describeSize(run), formatCount(run.observations, "observation")].filter(Boolean).join(", "),
    ),
    small?.element,
    run.trouble?.length ? h("p.trouble", {}, run.trouble[0]) : null,
  );
}

/** Return the run's small grid with a text on its strongest attack. It is kept in `thumbnails`, and `readSoon()` updates it. */
function getThumbnail(thumbnails, id) {
  const found = thumbnails.get(id);
  if (found) return found;
  const canvas = h("canvas.small-grid", { width: 1, height: 1, role: "img", "aria-label": "Leakage by client and round" });
  const words = h("p.worst", {}, makeSkeleton(1));
  let grid = null;

  function paint() {
    if (!grid?.clients.length || !grid.rounds.length) return;
    const size = Math.max(2, Math.min(16, Math.floor(300 / grid.rounds.length), Math.floor(120 / grid.clients.length)));
    canvas.width = grid.rounds.length * size;
    canvas.height = grid.clients.length * size;
    const context = canvas.getContext("2d");
    const style = getComputedStyle(canvas);
    for (const cell of grid.cells) {
      context.fillStyle = typeof cell.leak === "number" ? getColour(cell.leak, getTheme()) : style.color;
      context.globalAlpha = typeof cell.leak === "number" ? 1 : 0.18;
      const gap = size > 3 ? 1 : 0;
      context.fillRect(grid.rounds.indexOf(cell.round) * size, grid.clients.indexOf(cell.client) * size, size - gap, size - gap);
    }
  }

  async function read() {
    try {
      const [cells, attacks] = await Promise.all([get(`recordings/${id}/grid`), get(`recordings/${id}/attacks`)]);
      grid = cells;
      paint();
      put(words, describeStrongest(attacks.items));
    } catch {
      put(words, "The results could not be loaded.");
    }
  }

  const readSoon = throttle(read, 2000);
  readSoon();
  const made = { element: h("div.thumb", {}, canvas, words), paint, readSoon, stop: readSoon.stop };
  thumbnails.set(id, made);
  return made;
}

/** Return a text on the attack that recovered the largest share of examples, or on why there is none. */
function describeStrongest(attacks) {
  const real = attacks.filter((one) => !one.null);
  const scored = real.filter((one) => typeof one.success === "number").sort((a, b) => b.success - a.success);
  if (!real.length) return "not attacked yet";
  if (!scored.length) {
    const finished = real.some((one) => one.done + one.failed > 0);
    return `${formatCount(real.length, "attack")}, ${finished ? "not scored" : "nothing finished yet"}`;
  }
  const [top] = scored;
  const left = top.waiting + top.interrupted;
  const beside = attacks.find((one) => one.null && haveSameSettings(one, top) && typeof one.success === "number");
  return [
    h("b", {}, `${formatPercent(top.success)} of ${formatCount(top.examples, "example")} recovered`),
    ` by ${formatAttackName(top.attack ?? top.spec.split("(")[0])}${beside ? `, its null ${formatPercent(beside.success)}` : ""}`,
    left ? `; ${formatCount(left, "case")} not finished` : "",
    top.outcome && top.outcome !== "recovered" ? `; ${top.outcome}` : "",
  ];
}
