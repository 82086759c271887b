/* One job on a line: what, how far, and what can be done about it. */

import { Problem, post } from "../api.js";
import { announce, arrange, h, kept, put } from "../dom.js";
import { link } from "../route.js";
import { ago, duration, elapsed, jobName, percent, STATES } from "../words.js";

/** A line that follows its job by `update(job)`; its buttons stay the same while the state does. */
function jobLine(app, first) {
  const { id, spec, origin } = first;
  const name = h(
    "div.job-name",
    {},
    h("a.strong-link", { href: link(["job", id]), "data-key": `job-${id}` }, jobName(spec)),
    h("span.soft", {}, " on "),
    h("a", { href: link(["run", spec.recording]), "data-key": `job-run-${id}` }, spec.recording),
    origin && origin !== "request" ? h("small", {}, `by ${origin}`) : null,
  );
  const parts = jobParts(app);
  const time = h("span.job-time.soft");
  const element = h("li.job", {}, name, parts.mark, parts.progress, time, parts.acts);
  const update = (job) => {
    parts.update(job);
    time.textContent = job.started ? duration(elapsed(job)) : `asked ${ago(job.created)}`;
  };
  update(first);
  return { element, update };
}

/** A list of such lines, kept by job. */
export function jobLines(app) {
  const list = h("ul.jobs");
  const lines = new Map();
  return {
    element: list,
    show: (jobs) => {
      for (const job of jobs) {
        if (lines.has(job.id)) lines.get(job.id).update(job);
        else lines.set(job.id, jobLine(app, job));
      }
      arrange(
        list,
        jobs.map((job) => lines.get(job.id).element),
      );
    },
  };
}

/** State, progress and buttons of one job. */
export function jobParts(app) {
  const mark = h("span");
  const progress = h("div.job-progress");
  const acts = h("div.job-acts");
  const marked = kept(mark, (place, { state }) => put(place, stateMark(state)));
  const moved = kept(progress, (place, job) => put(place, progressOf(job)));
  const offered = kept(acts, (place, job) => put(place, actions(app, job)));
  return {
    mark,
    progress,
    acts,
    update: (job) => {
      marked({ state: job.state });
      moved({ state: job.state, progress: job.progress, error: job.error, result: job.result });
      offered({ id: job.id, state: job.state, spec: job.spec });
    },
  };
}

function stateMark(state) {
  return h("span.mark", { "data-state": state }, STATES[state] ?? state);
}

/** A bar while it runs; in words what it is at, or why it ended so. */
function progressOf(job) {
  const words = job.state === "running" ? job.progress?.words : firstLine(job);
  const share = job.progress?.share ?? 0;
  return [
    job.state === "running" ? h("progress", { max: 1, value: share, "aria-label": `${percent(share)} done` }) : null,
    words ? h("small", {}, words) : null,
  ];
}

function firstLine(job) {
  if (!job.error) return job.result?.score_note ?? "";
  return job.error.trim().split("\n")[0];
}

/** Cancel and retry, as the job's state allows. */
function actions(app, job) {
  const act = (name, words) =>
    h(
      "button.small",
      {
        type: "button",
        "data-key": `${name}-${job.id}`,
        "aria-label": `${words} ${jobName(job.spec)} on ${job.spec.recording}`,
        onclick: (event) => ask(app, job, name, event.currentTarget),
      },
      words,
    );
  if (job.state === "queued" || job.state === "running") return act("cancel", "Cancel");
  if (job.state === "failed" || job.state === "cancelled" || job.state === "set_aside") return act("retry", "Retry");
  return null;
}

async function ask(app, job, name, button) {
  button.disabled = true;
  try {
    const next = await post(`jobs/${job.id}/${name}`);
    if (next?.id) app.store.job(next);
    announce(name === "cancel" ? "Asked to stop. What it has found so far stays." : "Back in the queue.");
  } catch (problem) {
    if (!(problem instanceof Problem)) throw problem;
    button.disabled = false;
    button.after(" ", h("small.wrong", { role: "alert" }, problem.message));
  }
}
