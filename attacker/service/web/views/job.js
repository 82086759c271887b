/* View of one job: its request, its progress with intermediate images, and its results. */

import { get, makeUrl, resolveOwnUrl } from "../api.js";
import { makeChart } from "../chart.js";
import { h, put, throttle } from "../dom.js";
import { listen } from "../live.js";
import { makePanel } from "../panel.js";
import { makeLink } from "../route.js";
import { chooseNewer } from "../store.js";
import { computeElapsed, formatCount, formatDuration, formatJobName, formatNumber, shorten } from "../words.js";
import { makeJobParts } from "./jobrow.js";
import { makeVerdictPanel } from "./audit.js";
import { makeGallery } from "./reconstructed.js";

/** Headings of a job's error by final state. A cancelled job has one if a rule dropped it, or its worker died meanwhile. */
const ERROR_HEADINGS = { failed: "Why it failed", set_aside: "Why it was set aside", cancelled: "How it ended" };

export function makeJobView(app, id) {
  const head = h("header.head");
  const parts = makeJobParts(app);
  const facts = h("dl.facts");
  const emerging = makePreview(id);
  const outcome = h("div");
  let job = app.store.jobs.get(id) ?? null;
  let results = null;
  let galleries = [];

  const first = makePanel({
    className: "bare",
    load: () => get(`jobs/${id}`),
    draw: (_, found) => {
      first.hidden = true;
      show(found);
    },
  });
  const element = h("div.view", {}, head, first, facts, emerging.element, outcome);

  function show(next) {
    job = chooseNewer(job, next);
    if (!head.contains(parts.mark))
      put(head, ...makeHeading(job), h("div.status-line", {}, parts.mark, parts.progress, parts.acts));
    parts.update(job);
    document.title = `${formatJobName(job.spec)} on ${job.spec.recording} · What leaks`;
    put(facts, ...listFacts(job));
    emerging.setRunning(job.state === "running");
    const text = JSON.stringify([job.state, job.error, job.result]);
    if (text === results) return;
    results = text;
    galleries.forEach((one) => one.stop());
    const outcomeParts = makeOutcome(job);
    galleries = outcomeParts.galleries;
    put(outcome, outcomeParts.elements);
  }

  let streaming = null;
  function follow() {
    const live = job === null || job.state === "queued" || job.state === "running";
    if (live && !streaming) {
      streaming = listen(makeUrl(`jobs/${id}/events`), {
        job: (next) => {
          app.store.setJob(next);
        },
        preview: () => emerging.refresh(),
      });
    } else if (!live && streaming) {
      streaming();
      streaming = null;
    }
  }

  const refreshGalleries = throttle(() => galleries.forEach((one) => one.refresh()), 1500);
  const end = app.store.subscribe((change) => {
    if (change.all || (change.recording && change.recording.id === job?.spec.recording)) refreshGalleries();
    if (change.job?.id === id) show(change.job);
    else if (change.all && app.store.jobs.has(id)) show(app.store.jobs.get(id));
    follow();
  });
  const timer = setInterval(() => job?.state === "running" && put(facts, ...listFacts(job)), 1000);
  if (job) show(job);
  else put(head, h("h1", {}, "Job"));
  follow();
  return {
    element,
    title: job ? `${formatJobName(job.spec)} on ${job.spec.recording}` : "Job",
    place: "jobs",
    getPreset: () =>
      job ? { recording: job.spec.recording, attack: job.spec.attack, rounds: job.spec.rounds, clients: job.spec.clients } : {},
    stop: () => {
      end();
      clearInterval(timer);
      streaming?.();
      emerging.stop();
      first.stop();
      refreshGalleries.stop();
      galleries.forEach((one) => one.stop());
    },
  };
}

function makeHeading(job) {
  return [
    h("p.eyebrow", {}, h("a", { href: "#/jobs", "data-key": "up" }, "Jobs"), h("span", {}, job.id)),
    h(
      "h1",
      {},
      formatJobName(job.spec),
      " on ",
      h("a", { href: makeLink(["run", job.spec.recording]), "data-key": "run" }, job.spec.recording),
    ),
  ];
}

function listFacts({ spec, ...job }) {
  const makeFact = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));
  const set = Object.entries(spec.arguments ?? {}).map(([key, value]) => `${key}=${value}`);
  return [
    spec.attack
      ? [
          makeFact("Rounds", spec.rounds),
          makeFact("Clients", spec.clients?.length ? spec.clients.join(", ") : "all"),
          makeFact("Arguments", set.length ? h("code", {}, set.join(", ")) : "defaults"),
          makeFact("With its null", spec.null === false ? "no" : "yes"),
        ]
      : makeFact("Budget of its attacks", formatDuration(spec.seconds)),
    makeFact("Started by", !job.origin || job.origin === "request" ? "a user" : job.origin),
    makeFact("Time", job.started ? formatDuration(computeElapsed(job)) : "not started"),
    job.attempts > 1 ? makeFact("Attempts", `${job.attempts}, ${formatCount(job.crashes ?? 0, "crash", "crashes")}`) : null,
  ];
}

function makeOutcome(job) {
  const parts = [];
  const galleries = [];
  if (job.error)
    parts.push(
      h(
        "section.panel",
        {},
        h("h2", {}, ERROR_HEADINGS[job.state] ?? "Message"),
        h("pre.trace", { tabindex: 0 }, job.error),
      ),
    );
  if (!job.spec.attack) {
    if (job.state === "done") parts.push(makeVerdictPanel(job.id));
    return { elements: parts, galleries };
  }
  for (const one of job.result?.attacks ?? []) {
    const failed = Object.entries(one.failed ?? {});
    const gallery = one.null ? null : makeGallery(job.spec, one.source, 12);
    if (gallery) galleries.push(gallery);
    parts.push(
      h(
        "section.panel",
        {},
        h("h2", {}, one.null ? "The null: the same attack without the update" : "Reconstructions"),
        h(
          "p.soft",
          {},
          [
            `${formatCount(one.done, "case")} reconstructed by this job`,
            one.skipped ? `${one.skipped} reconstructed before` : null,
            failed.length ? `${failed.length} failed` : null,
          ]
            .filter(Boolean)
            .join(", "),
          ". ",
          h("a", { href: makeLink(["run", job.spec.recording], { attack: one.source }) }, "Show in the grid of the run"),
        ),
        one.notes?.length
          ? h(
              "ul.plain.soft",
              {},
              one.notes.map((note) => h("li", {}, note)),
            )
          : null,
        failed.length
          ? h(
              "details",
              {},
              h("summary", {}, "Failed cases"),
              h(
                "ul.plain",
                {},
                failed.map(([name, reason]) => h("li", {}, h("code", {}, name), ` ${reason}`)),
              ),
            )
          : null,
        gallery,
      ),
    );
  }
  return { elements: parts, galleries };
}

/** Return the preview of a running job: its best images so far, updated in place, and the loss since the view was opened. */
function makePreview(id) {
  const said = h("p.soft", { role: "status" });
  const images = h("div.emerging");
  const curve = h("div");
  const element = h("section.panel", { hidden: true }, h("h2", {}, "Images found so far"), said, images, curve);
  const figures = new Map();
  const losses = [];
  let active = false;

  async function read() {
    if (!active) return;
    let preview;
    try {
      preview = await get(`jobs/${id}/preview`);
    } catch {
      return; // there is no preview any more, for example because the job has ended
    }
    if (!preview?.images || !active) return;
    put(said, describePreview(preview));
    preview.images.forEach((image, n) => placeImage(image, n));
    for (const [n, figure] of figures) if (n >= preview.images.length) (figure.remove(), figures.delete(n));
    drawLoss(preview);
  }

  function placeImage(image, n) {
    if (!figures.has(n)) {
      const figure = h("figure", {}, h("img", { alt: "" }), h("figcaption"));
      figures.set(n, figure);
      images.append(figure);
    }
    const [picture, caption] = figures.get(n).children;
    const source = resolveOwnUrl(image.url ?? image.image);
    if (source && picture.src !== source) picture.src = source;
    const whose = `round ${image.round}, ${shorten(image.client, 9)}`;
    picture.alt = `Intermediate image, round ${image.round}, ${image.client}`;
    if (caption.textContent !== whose) caption.textContent = whose;
  }

  function drawLoss(preview) {
    if (typeof preview.loss !== "number" || typeof preview.iteration !== "number") return;
    if (losses.length && losses.at(-1)[0] >= preview.iteration) losses.length = 0; // another search has begun
    losses.push([preview.iteration, preview.loss]);
    if (losses.length < 3) return;
    const log = losses.every(([, value]) => value > 0);
    const shape = {
      title: "The attack's own loss",
      note: "median over the cases that are searched together, since this page was opened",
      x: { label: "iteration", whole: true },
      y: { label: "loss", log },
    };
    put(curve, makeChart({ ...shape, series: [{ name: "loss", points: [...losses], ink: 1 }] }));
  }

  const refresh = throttle(read, 900);
  return {
    element,
    refresh,
    setRunning: (now) => {
      active = now;
      element.hidden = !now;
    },
    stop: () => {
      active = false;
      refresh.stop();
    },
  };
}

function describePreview(preview) {
  const parts = [];
  if (typeof preview.iteration === "number")
    parts.push(`iteration ${formatNumber(preview.iteration)}${preview.most ? ` of ${formatNumber(preview.most)}` : ""}`);
  if (typeof preview.loss === "number") parts.push(`loss ${formatNumber(preview.loss)}`);
  return parts.join(", ");
}
