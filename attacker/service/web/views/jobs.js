/* View of all jobs: running, waiting and ended ones. */

import { getAll } from "../api.js";
import { h, put, throttle } from "../dom.js";
import { changeQuery } from "../route.js";
import { JOB_STATES } from "../words.js";
import { makeJobList } from "./jobrow.js";

const JOBS_PER_STEP = 100;

export function makeJobsView(app) {
  const lines = makeJobList(app);
  const more = h("p.more");
  const state = h("select", { id: "jobs-state", onchange: () => changeFilter("state", state.value) });
  const run = h("select", { id: "jobs-run", onchange: () => changeFilter("run", run.value) });
  let query = {};
  let limit = JOBS_PER_STEP;

  const element = h(
    "div.view",
    {},
    h("header.head", {}, h("p.eyebrow", {}, "fedleak"), h("h1", {}, "Jobs")),
    h(
      "div.bar-of-filters",
      {},
      h("div.field", {}, h("label", { for: "jobs-state" }, "State"), state),
      h("div.field", {}, h("label", { for: "jobs-run" }, "Run"), run),
      h("button.strong", { type: "button", onclick: () => app.openAttackForm({ recording: query.run }) }, "New attack"),
    ),
    lines.element,
    more,
  );

  function changeFilter(name, value) {
    query = { ...query, [name]: value };
    changeQuery({ [name]: value });
    readOlder();
    draw();
  }

  function draw() {
    const { store } = app;
    fillSelect(state, [["", "any"], ...Object.entries(JOB_STATES)], query.state);
    const runs = [...new Set([...store.recordings.keys(), ...[...store.jobs.values()].map((job) => job.spec.recording)])].sort();
    fillSelect(run, [["", "all"], ...runs.map((id) => [id, id])], query.run);
    const jobs = store.listJobs(query.run || null).filter((job) => !query.state || job.state === query.state);
    jobs.sort((a, b) => rankActivity(b) - rankActivity(a));
    lines.show(jobs.slice(0, limit));
    put(more, jobs.length ? makeMoreButton(jobs.length) : explainEmpty(store));
  }

  function makeMoreButton(count) {
    if (count <= limit) return null;
    return h(
      "button.small",
      { type: "button", "data-key": "more", onclick: () => ((limit += JOBS_PER_STEP), draw()) },
      "Show more",
    );
  }

  function explainEmpty(store) {
    if (store.problem) return h("span.state.failure", {}, store.problem.message);
    if (!store.loaded) return "Loading.";
    return query.state || query.run
      ? "No job matches the filters."
      : "No job yet. Attacks and audits are listed here when a user or a rule starts them.";
  }

  /** Read jobs that pass the filters and are not in the store, which holds only the newest jobs. */
  async function readOlder() {
    if (!query.state && !query.run) return;
    const found = await getAll("jobs", { state: query.state, recording: query.run }, 500).catch(() => []);
    for (const job of found) if (!app.store.jobs.has(job.id)) app.store.jobs.set(job.id, job);
    draw();
  }

  const drawSoon = throttle(draw, 250);
  const timer = setInterval(drawSoon, 5000); // updates the times
  const end = app.store.subscribe(drawSoon);
  return {
    element,
    title: "Jobs",
    place: "jobs",
    refine: (next) => {
      query = next;
      readOlder();
      draw();
    },
    getPreset: () => ({ recording: query.run }),
    stop: () => {
      clearInterval(timer);
      drawSoon.stop();
      end();
    },
  };
}

function rankActivity(job) {
  return job.state === "running" ? 2 : job.state === "queued" ? 1 : 0;
}

/** Set the options of a select element, only if they differ, since the user may have it open. */
export function fillSelect(select, choices, chosen = "") {
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
