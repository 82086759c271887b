/* All runs, newest first, each with its grid in small, and what is being attacked now. */

import { get } from "../api.js";
import { arrange, h, kept, put, throttled } from "../dom.js";
import { skeleton } from "../panel.js";
import { link } from "../route.js";
import { colour } from "../scale.js";
import { current, onTheme } from "../theme.js";
import { ago, attackName, base, counted, NULL_EXPLAINED, percent, protection, size } from "../words.js";
import { jobLines } from "./jobrow.js";

const PICTURED = 24;

export function runsView(app) {
  const cards = h("div.cards");
  const lines = jobLines(app);
  const trouble = h("div");
  const busy = h("section", { "aria-label": "Being attacked", hidden: true }, h("h2", {}, "Being attacked"), lines.element);
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
  const known = new Map(); // thumbnails by run
  const made = new Map(); // cards by run
  const told = kept(trouble, (place, data) => put(place, notServed(data.trouble)));

  function draw() {
    const { store } = app;
    const wanted = filter.value.trim().toLowerCase();
    const runs = [...store.recordings.values()]
      .filter((one) => `${one.id} ${one.name} ${modelName(one)} ${protection(one) ?? ""}`.toLowerCase().includes(wanted))
      .sort((a, b) => Date.parse(b.updated ?? 0) - Date.parse(a.updated ?? 0) || a.id.localeCompare(b.id));
    arrange(cards, runs.length ? runs.map((one, i) => cardOf(one, i < PICTURED)) : [nothing(store, wanted)]);
    const jobs = store.newest().filter((job) => job.state === "running" || job.state === "queued");
    told({ trouble: store.trouble });
    busy.hidden = jobs.length === 0;
    lines.show(jobs.slice(0, 5));
  }

  /** A card stays the same element until what it says changes. */
  function cardOf(run, pictured) {
    const text = JSON.stringify([run, pictured, ago(run.updated)]);
    if (made.get(run.id)?.text !== text) made.set(run.id, { text, element: card(known, run, pictured) });
    return made.get(run.id).element;
  }

  const often = throttled(draw, 250);
  const ends = [
    app.store.on((change) => {
      const id = change.recording?.id ?? change.job?.spec.recording;
      if (id) known.get(id)?.stale();
      often();
    }),
    onTheme(() => known.forEach((one) => one.paint())),
  ];
  draw();
  return {
    element,
    title: "What leaks",
    place: "runs",
    stop: () => {
      often.stop();
      ends.forEach((end) => end());
      known.forEach((one) => one.stop());
    },
  };
}

/** What lies below the service's folder and is no run that can be shown. */
function notServed(words) {
  if (!words.length) return null;
  const list = words.map((line) => h("li", {}, line));
  return h("details.trouble", {}, h("summary", {}, `${counted(words.length, "folder")} not shown`), h("ul", {}, list));
}

function nothing(store, wanted) {
  if (store.problem && !store.loaded) return h("p.state.failure", {}, store.problem.message);
  if (!store.loaded) return h("div.state", { role: "status" }, skeleton(4));
  if (wanted) return h("p.state", {}, "No run is called so.");
  const root = store.root ?? "ROOT";
  return h(
    "div.state",
    {},
    h("p", {}, "No run yet. This service watches ", h("code", {}, root), ". A run that is recorded there shows up here by itself:"),
    h("pre", {}, h("code", {}, `fedsim run EXPERIMENT.toml --out ${quoted(root)}/NAME`)),
  );
}

/** A path as a shell takes it. */
function quoted(path) {
  return /^[A-Za-z0-9_@%+=:,./-]+$/.test(path) ? path : `'${path.replaceAll("'", "'\\''")}'`;
}

export function modelName(recording) {
  return typeof recording.model === "string" ? recording.model : (recording.model?.name ?? "");
}

function card(known, run, pictured) {
  const small = pictured ? thumbnail(known, run.id) : null;
  return h(
    "article.card",
    {},
    h("p.eyebrow", {}, h("code", {}, protection(run) ?? "no defense"), h("span", {}, run.updated ? ago(run.updated) : "")),
    h("h3", {}, h("a.cover", { href: link(["run", run.id]), "data-key": `run-${run.id}` }, run.name)),
    h(
      "p.soft",
      {},
      `${modelName(run)}, ${size(run)}, ${counted(run.observations, "update")}`,
    ),
    small?.element,
    run.trouble?.length ? h("p.trouble", {}, run.trouble[0]) : null,
  );
}

/** The run's grid in small and its worst attack in words; kept between drawings, read again when the run changes. */
function thumbnail(known, id) {
  const found = known.get(id);
  if (found) return found;
  const canvas = h("canvas.small-grid", { width: 1, height: 1, role: "img", "aria-label": "leakage, clients by rounds" });
  const words = h("p.worst", {}, skeleton(1));
  let grid = null;

  function paint() {
    if (!grid?.clients.length || !grid.rounds.length) return;
    const size = Math.max(2, Math.min(16, Math.floor(300 / grid.rounds.length), Math.floor(120 / grid.clients.length)));
    canvas.width = grid.rounds.length * size;
    canvas.height = grid.clients.length * size;
    const context = canvas.getContext("2d");
    const style = getComputedStyle(canvas);
    for (const cell of grid.cells) {
      context.fillStyle = typeof cell.leak === "number" ? colour(cell.leak, current()) : style.color;
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
      put(words, worst(attacks.items));
    } catch {
      put(words, "not readable now");
    }
  }

  const stale = throttled(read, 2000);
  stale();
  const made = { element: h("div.thumb", {}, canvas, words), paint, stale, stop: stale.stop };
  known.set(id, made);
  return made;
}

function worst(attacks) {
  const real = attacks.filter((one) => !one.null);
  const scored = real.filter((one) => typeof one.success === "number").sort((a, b) => b.success - a.success);
  if (!real.length) return "not attacked yet";
  if (!scored.length) {
    const finished = real.some((one) => one.done + one.failed > 0);
    return `${counted(real.length, "attack")}, ${finished ? "not scored" : "nothing finished yet"}`;
  }
  const [top] = scored;
  const left = top.waiting + top.interrupted;
  const beside = attacks.find((one) => one.null && base(one.spec) === base(top.spec) && typeof one.success === "number");
  return [
    h("b", {}, `${percent(top.success)} of ${counted(top.examples, "example")} recovered`),
    ` by ${attackName(top.attack ?? top.spec.split("(")[0])}${beside ? `, its null ${percent(beside.success)}` : ""}`,
    left ? `; ${counted(left, "case")} not finished` : "",
    top.outcome && top.outcome !== "recovered" ? `; ${top.outcome}` : "",
  ];
}
