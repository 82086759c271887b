/* One job: what was asked, how far it is, the images as they emerge, and what came of it. */

import { address, get, own } from "../api.js";
import { chart } from "../chart.js";
import { h, put, throttled } from "../dom.js";
import { listen } from "../live.js";
import { panel } from "../panel.js";
import { link } from "../route.js";
import { newer } from "../store.js";
import { counted, duration, elapsed, jobName, number, short } from "../words.js";
import { jobParts } from "./jobrow.js";
import { verdictOf } from "./audit.js";
import { casesOf } from "./reconstructed.js";

export function jobView(app, id) {
  const head = h("header.head");
  const parts = jobParts(app);
  const facts = h("dl.facts");
  const emerging = emergence(id);
  const outcome = h("div");
  let job = app.store.jobs.get(id) ?? null;
  let results = null;
  let galleries = [];

  const first = panel({
    className: "bare",
    load: () => get(`jobs/${id}`),
    draw: (_, found) => {
      first.hidden = true;
      take(found);
    },
  });
  const element = h("div.view", {}, head, first, facts, emerging.element, outcome);

  function take(next) {
    job = newer(job, next);
    if (!head.contains(parts.mark)) put(head, ...heading(job), h("div.status-line", {}, parts.mark, parts.progress, parts.acts));
    parts.update(job);
    document.title = `${jobName(job.spec)} on ${job.spec.recording} · What leaks`;
    put(facts, ...asked(job));
    emerging.running(job.state === "running");
    const text = JSON.stringify([job.state, job.error, job.result]);
    if (text === results) return;
    results = text;
    galleries.forEach((one) => one.stop());
    const came = cameOf(job);
    galleries = came.galleries;
    put(outcome, came.elements);
  }

  let streaming = null;
  function follow() {
    const live = job === null || job.state === "queued" || job.state === "running";
    if (live && !streaming) {
      streaming = listen(address(`jobs/${id}/events`), {
        job: (next) => {
          app.store.job(next);
        },
        preview: () => emerging.refresh(),
      });
    } else if (!live && streaming) {
      streaming();
      streaming = null;
    }
  }

  const seen = throttled(() => galleries.forEach((one) => one.refresh()), 1500);
  const end = app.store.on((change) => {
    if (change.all || (change.recording && change.recording.id === job?.spec.recording)) seen();
    if (change.job?.id === id) take(change.job);
    else if (change.all && app.store.jobs.has(id)) take(app.store.jobs.get(id));
    follow();
  });
  const timer = setInterval(() => job?.state === "running" && put(facts, ...asked(job)), 1000);
  if (job) take(job);
  else put(head, h("h1", {}, "Job"));
  follow();
  return {
    element,
    title: job ? `${jobName(job.spec)} on ${job.spec.recording}` : "Job",
    place: "jobs",
    preset: () =>
      job ? { recording: job.spec.recording, attack: job.spec.attack, rounds: job.spec.rounds, clients: job.spec.clients } : {},
    stop: () => {
      end();
      clearInterval(timer);
      streaming?.();
      emerging.stop();
      first.stop();
      seen.stop();
      galleries.forEach((one) => one.stop());
    },
  };
}

function heading(job) {
  return [
    h("p.eyebrow", {}, h("a", { href: "#/jobs", "data-key": "up" }, "Jobs"), h("span", {}, job.id)),
    h(
      "h1",
      {},
      jobName(job.spec),
      " on ",
      h("a", { href: link(["run", job.spec.recording]), "data-key": "run" }, job.spec.recording),
    ),
  ];
}

function asked({ spec, ...job }) {
  const fact = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));
  const set = Object.entries(spec.arguments ?? {}).map(([key, value]) => `${key}=${value}`);
  return [
    spec.attack
      ? [
          fact("Rounds", spec.rounds),
          fact("Clients", spec.clients?.length ? spec.clients.join(", ") : "all"),
          fact("Arguments", set.length ? h("code", {}, set.join(", ")) : "its defaults"),
          fact("Null beside it", spec.null === false ? "no" : "yes"),
        ]
      : fact("Budget of its attacks", duration(spec.seconds)),
    fact("Asked by", job.origin ?? "request"),
    fact("Time", job.started ? duration(elapsed(job)) : "not started"),
    job.attempts > 1 ? fact("Starts", `${job.attempts}, ${counted(job.crashes ?? 0, "crash", "crashes")}`) : null,
  ];
}

function cameOf(job) {
  const parts = [];
  const galleries = [];
  if (job.error)
    parts.push(
      h(
        "section.panel",
        {},
        h("h2", {}, job.state === "set_aside" ? "Why it is set aside" : "Why it failed"),
        h("pre.trace", { tabindex: 0 }, job.error),
      ),
    );
  if (!job.spec.attack) {
    if (job.state === "done") parts.push(verdictOf(job.id));
    if (job.result?.score_note) parts.push(h("p.soft", {}, job.result.score_note));
    return { elements: parts, galleries };
  }
  for (const one of job.result?.attacks ?? []) {
    const failed = Object.entries(one.failed ?? {});
    const gallery = one.null ? null : casesOf(job.spec, one.source, 12);
    if (gallery) galleries.push(gallery);
    parts.push(
      h(
        "section.panel",
        {},
        h("h2", {}, one.null ? "The null, without the update" : "What it reconstructed"),
        h(
          "p.soft",
          {},
          [
            counted(one.done, "case"),
            one.skipped ? `${one.skipped} were there before` : null,
            failed.length ? `${failed.length} failed` : null,
          ]
            .filter(Boolean)
            .join(", "),
          ". ",
          h("a", { href: link(["run", job.spec.recording], { attack: one.source }) }, "In the run's grid"),
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
  if (job.result?.score_note) parts.push(h("p.soft", {}, job.result.score_note));
  return { elements: parts, galleries };
}

/** The best images so far of a running job, drawn in place, and the loss since this page looks. */
function emergence(id) {
  const said = h("p.soft", { role: "status" });
  const images = h("div.emerging");
  const curve = h("div");
  const element = h("section.panel", { hidden: true }, h("h2", {}, "Emerging now"), said, images, curve);
  const figures = new Map();
  const losses = [];
  let active = false;

  async function read() {
    if (!active) return;
    let preview;
    try {
      preview = await get(`jobs/${id}/preview`);
    } catch {
      return; // the job has just ended
    }
    if (!preview?.images || !active) return;
    put(said, words(preview));
    preview.images.forEach((image, n) => place(image, n));
    for (const [n, figure] of figures) if (n >= preview.images.length) (figure.remove(), figures.delete(n));
    trace(preview);
  }

  function place(image, n) {
    if (!figures.has(n)) {
      const figure = h("figure", {}, h("img", { alt: "" }), h("figcaption"));
      figures.set(n, figure);
      images.append(figure);
    }
    const [picture, caption] = figures.get(n).children;
    const source = own(image.url ?? image.image);
    if (source && picture.src !== source) picture.src = source;
    const whose = `round ${image.round}, ${short(image.client, 9)}`;
    picture.alt = `Emerging image, round ${image.round}, ${image.client}`;
    if (caption.textContent !== whose) caption.textContent = whose;
  }

  function trace(preview) {
    if (typeof preview.loss !== "number" || typeof preview.iteration !== "number") return;
    if (losses.length && losses.at(-1)[0] >= preview.iteration) losses.length = 0; // the next chunk has begun
    losses.push([preview.iteration, preview.loss]);
    if (losses.length < 3) return;
    const log = losses.every(([, value]) => value > 0);
    const shape = {
      title: "Loss of its own",
      note: "since this page looks",
      x: { label: "iteration", whole: true },
      y: { label: "loss", log },
    };
    put(curve, chart({ ...shape, series: [{ name: "loss", points: [...losses], ink: 1 }] }));
  }

  const refresh = throttled(read, 900);
  return {
    element,
    refresh,
    running: (now) => {
      active = now;
      element.hidden = !now;
    },
    stop: () => {
      active = false;
      refresh.stop();
    },
  };
}

function words(preview) {
  const parts = [];
  if (typeof preview.iteration === "number")
    parts.push(`iteration ${number(preview.iteration)}${preview.most ? ` of ${number(preview.most)}` : ""}`);
  if (typeof preview.loss === "number") parts.push(`loss ${number(preview.loss)}`);
  return parts.join(", ");
}
