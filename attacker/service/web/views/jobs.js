/* The queue: what runs, what waits, what came of the rest. */

import { all } from "../api.js";
import { h, put, throttled } from "../dom.js";
import { refine as setAddress } from "../route.js";
import { STATES } from "../words.js";
import { jobLines } from "./jobrow.js";

const SHOWN = 100;

export function jobsView(app) {
  const lines = jobLines(app);
  const more = h("p.more");
  const state = h("select", { id: "jobs-state", onchange: () => changed("state", state.value) });
  const run = h("select", { id: "jobs-run", onchange: () => changed("run", run.value) });
  let query = {};
  let limit = SHOWN;

  const element = h(
    "div.view",
    {},
    h("header.head", {}, h("p.eyebrow", {}, "fedleak"), h("h1", {}, "Jobs")),
    h(
      "div.bar-of-filters",
      {},
      h("div.field", {}, h("label", { for: "jobs-state" }, "State"), state),
      h("div.field", {}, h("label", { for: "jobs-run" }, "Run"), run),
      h("button.strong", { type: "button", onclick: () => app.openForm({ recording: query.run }) }, "New attack"),
    ),
    lines.element,
    more,
  );

  function changed(name, value) {
    query = { ...query, [name]: value };
    setAddress({ [name]: value });
    older();
    draw();
  }

  function draw() {
    const { store } = app;
    options(state, [["", "any"], ...Object.entries(STATES)], query.state);
    const runs = [...new Set([...store.recordings.keys(), ...[...store.jobs.values()].map((job) => job.spec.recording)])].sort();
    options(run, [["", "all"], ...runs.map((id) => [id, id])], query.run);
    const jobs = store.newest(query.run || null).filter((job) => !query.state || job.state === query.state);
    jobs.sort((a, b) => active(b) - active(a));
    lines.show(jobs.slice(0, limit));
    put(more, jobs.length ? beyond(jobs.length) : empty(store));
  }

  function beyond(count) {
    if (count <= limit) return null;
    return h(
      "button.small",
      { type: "button", "data-key": "more", onclick: () => ((limit += SHOWN), draw()) },
      `${count - limit} more`,
    );
  }

  function empty(store) {
    if (store.problem) return h("span.state.failure", {}, store.problem.message);
    if (!store.loaded) return "Loading.";
    return query.state || query.run
      ? "No job is like that."
      : "No job yet. Attacks that are started here or by a rule are listed here.";
  }

  /** The store keeps the newest jobs: of a filter, older ones are asked for. */
  async function older() {
    if (!query.state && !query.run) return;
    const found = await all("jobs", { state: query.state, recording: query.run }, 500).catch(() => []);
    for (const job of found) if (!app.store.jobs.has(job.id)) app.store.jobs.set(job.id, job);
    draw();
  }

  const often = throttled(draw, 250);
  const timer = setInterval(often, 5000); // the times run on
  const end = app.store.on(often);
  return {
    element,
    title: "Jobs",
    place: "jobs",
    refine: (next) => {
      query = next;
      older();
      draw();
    },
    preset: () => ({ recording: query.run }),
    stop: () => {
      clearInterval(timer);
      often.stop();
      end();
    },
  };
}

function active(job) {
  return job.state === "running" ? 2 : job.state === "queued" ? 1 : 0;
}

/** Fills a select, leaving it alone where nothing changed: it may be open. */
export function options(select, choices, chosen = "") {
  const text = JSON.stringify(choices);
  if (select.dataset.choices !== text) {
    select.dataset.choices = text;
    put(
      select,
      choices.map(([value, words]) => h("option", { value }, words)),
    );
  }
  const value = chosen ?? "";
  select.value = choices.some(([known]) => known === value) ? value : "";
}
