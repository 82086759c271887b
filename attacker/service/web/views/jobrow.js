/* Lines on jobs in lists, with state, progress and buttons. */

import { post, Problem } from "../api.js";
import { announce, arrange, drawOnChange, h, put } from "../dom.js";
import { makeLink } from "../route.js";
import { computeElapsed, formatAge, formatDuration, formatJobName, formatPercent, JOB_STATES } from "../words.js";

const ACTION_WORDS = { cancel: "Cancel", retry: "Retry" };

/** Return the line of a job, with a method `update(job)` that keeps its button while the state allows the same action. */
function makeJobLine(app, first) {
  const { id, spec, origin } = first;
  const name = h(
    "div.job-name",
    {},
    h("a.strong-link", { href: makeLink(["job", id]), "data-key": `job-${id}` }, formatJobName(spec)),
    h("span.soft", {}, " on "),
    h("a", { href: makeLink(["run", spec.recording]), "data-key": `job-run-${id}` }, spec.recording),
    origin && origin !== "request" ? h("small", {}, `by ${origin}`) : null,
  );
  const parts = makeJobParts(app);
  const time = h("span.job-time.soft");
  const element = h("li.job", {}, name, parts.mark, parts.progress, time, parts.acts);
  const update = (job) => {
    parts.update(job);
    time.textContent = job.started ? formatDuration(computeElapsed(job)) : `submitted ${formatAge(job.created)}`;
  };
  update(first);
  return { element, update };
}

/** Return a list of jobs, with a method `show(jobs)` that keeps the line of each job. */
export function makeJobList(app) {
  const list = h("ul.jobs");
  const lines = new Map();
  return {
    element: list,
    show: (jobs) => {
      for (const job of jobs) {
        if (lines.has(job.id)) lines.get(job.id).update(job);
        else lines.set(job.id, makeJobLine(app, job));
      }
      arrange(
        list,
        jobs.map((job) => lines.get(job.id).element),
      );
    },
  };
}

/**
 * Return elements with the state, the progress and the button of a job, and a method `update(job)`.
 * A button stays in place while the state allows its action: one that is replaced between press and release misses the click.
 */
export function makeJobParts(app) {
  const mark = h("span");
  const progress = h("div.job-progress");
  const acts = h("div.job-acts");
  const drawMark = drawOnChange(mark, (place, { state }) => put(place, makeStateMark(state)));
  const drawProgress = drawOnChange(progress, (place, job) => put(place, makeProgress(job)));
  const drawAction = drawOnChange(acts, (place, { action, ...job }) => {
    put(place, action ? makeActionButton(app, job, action) : null);
  });
  let state = null;
  return {
    mark,
    progress,
    acts,
    update: (job) => {
      drawMark({ state: job.state });
      drawProgress({ state: job.state, progress: job.progress, error: job.error, result: job.result });
      drawAction({ id: job.id, spec: job.spec, action: chooseAction(job.state) });
      if (state !== job.state) for (const button of acts.querySelectorAll("button")) button.disabled = false;
      state = job.state;
    },
  };
}

function makeStateMark(state) {
  return h("span.mark", { "data-state": state }, JOB_STATES[state] ?? state);
}

/** Return the progress of a job: a bar and the present step while it runs, else the error or a note on the result. */
function makeProgress(job) {
  const words = job.state === "running" ? job.progress?.words : getFirstLine(job);
  const share = job.progress?.share ?? 0;
  return [
    job.state === "running" ? h("progress", { max: 1, value: share, "aria-label": `${formatPercent(share)} done` }) : null,
    words ? h("small", {}, words) : null,
  ];
}

function getFirstLine(job) {
  if (!job.error) return job.result?.score_note ?? "";
  return job.error.trim().split("\n")[0];
}

/** Return the name of the action that a job's state allows, a key of ACTION_WORDS; null if there is none. */
function chooseAction(state) {
  if (state === "queued" || state === "running") return "cancel";
  return state === "failed" || state === "cancelled" || state === "set_aside" ? "retry" : null;
}

function makeActionButton(app, job, name) {
  return h(
    "button.small",
    {
      type: "button",
      "data-key": `${name}-${job.id}`,
      "aria-label": `${ACTION_WORDS[name]} ${formatJobName(job.spec)} on ${job.spec.recording}`,
      onclick: (event) => requestAction(app, job, name, event.currentTarget),
    },
    ACTION_WORDS[name],
  );
}

async function requestAction(app, job, name, button) {
  button.disabled = true;
  try {
    const next = await post(`jobs/${job.id}/${name}`);
    if (next?.id) app.store.setJob(next);
    announce(
      name === "cancel"
        ? "Cancellation requested. Cases that are finished keep their results."
        : "The job is in the queue again.",
    );
  } catch (problem) {
    if (!(problem instanceof Problem)) throw problem;
    button.disabled = false;
    button.after(" ", h("small.wrong", { role: "alert" }, problem.message));
  }
}
