/* Starts the page: live data, the views by address, the token where the service asks for one. */

import { address, get, onLocked } from "./api.js";
import { announce, h, put } from "./dom.js";
import { openAuditForm } from "./auditform.js";
import { openForm } from "./jobform.js";
import { listen } from "./live.js";
import { parse } from "./route.js";
import { Store } from "./store.js";
import * as theme from "./theme.js";
import { askToken, logOut, useLink } from "./token.js";
import { caseView } from "./views/case.js";
import { jobView } from "./views/job.js";
import { jobsView } from "./views/jobs.js";
import { runView } from "./views/run.js";
import { runsView } from "./views/runs.js";
import { jobName } from "./words.js";

const main = document.getElementById("main");
const store = new Store();
const app = {
  store,
  openForm: (preset) => openForm(store, preset),
  openAuditForm: (recording) => openAuditForm(store, recording),
};
let shown = null;

function choose(path) {
  const [first, id, second, source, name] = path;
  if (first === undefined) return runsView(app);
  if (first === "run" && id && second === "case" && source && name) return caseView(app, id, source, name);
  if (first === "run" && id && second === undefined) return runView(app, id);
  if (first === "jobs" && id === undefined) return jobsView(app);
  if (first === "job" && id) return jobView(app, id);
  return lost();
}

function lost() {
  const element = h("p.state", {}, "There is nothing at this address. ", h("a", { href: "#/" }, "All runs"));
  return { element, title: "Nothing here", place: "" };
}

function render() {
  const { path, query } = parse(location.hash);
  const key = path.join("/");
  if (shown?.key === key) {
    shown.view.refine?.(query);
    return;
  }
  const first = shown === null;
  shown?.view.stop?.();
  const view = choose(path);
  shown = { key, view };
  view.refine?.(query);
  put(main, view.element);
  document.title = view.title === "What leaks" ? view.title : `${view.title} · What leaks`;
  for (const a of document.querySelectorAll(".top nav a")) {
    if (a.dataset.view === view.place) a.setAttribute("aria-current", "page");
    else a.removeAttribute("aria-current");
  }
  if (first) return;
  window.scrollTo(0, 0);
  main.focus({ preventScroll: true });
  announce(view.title);
}

function showBusy() {
  const busy = [...store.jobs.values()].filter((job) => job.state === "running" || job.state === "queued").length;
  const count = document.getElementById("busy");
  count.hidden = busy === 0;
  put(count, String(busy), h("span.unseen", {}, " waiting or running"));
}

function showLink(state) {
  const words = { live: "live", waiting: "not connected, trying again", resting: "paused while hidden" };
  const link = document.getElementById("link");
  link.dataset.state = state;
  if (link.textContent !== words[state]) link.textContent = words[state];
  const banner = document.getElementById("banner");
  banner.hidden = state !== "waiting" || !store.loaded;
  if (!banner.hidden)
    banner.textContent =
      "The service does not answer. What you see is from before; it goes on by itself when the service is back.";
}

function news({ recording, job, before }) {
  if (recording && before && recording.last_round > before.last_round)
    announce(`${recording.name}: round ${recording.last_round} arrived`);
  if (recording && !before) announce(`A new run: ${recording.name}`);
  if (job && before && before.state !== job.state)
    announce(`${jobName(job.spec)} on ${job.spec.recording}: ${job.state.replace("_", " ")}`);
}

onLocked(askToken);
theme.wire(document.getElementById("theme"));
document.getElementById("new-job").addEventListener("click", () => app.openForm(shown?.view.preset?.() ?? {}));
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
window.addEventListener("hashchange", async () => {
  await useLink();
  render();
});
const leave = document.getElementById("leave");
leave.addEventListener("click", () => logOut().catch((problem) => announce(problem.message)));
get("health").then(
  ({ token }) => (leave.hidden = !token),
  () => {},
);
await useLink();
store.on(showBusy);
store.on(news);
render();
showLink("waiting");
listen(
  address("events"),
  {
    recording: (one) => store.recording(one),
    job: (one) => store.job(one),
    removed: ({ id }) => store.removed(id),
  },
  {
    opened: () => store.refresh(),
    status: showLink,
    refused: () =>
      get("recordings", { limit: 1 }).then(
        () => {},
        (problem) => {
          if (!store.loaded) {
            store.problem = problem;
            store.tell({ all: true });
          }
        },
      ),
  },
);
