/* Entry point of the page: shows the view that the address names, and keeps its data up to date by the service's events. */

import { get, makeUrl, setTokenPrompt } from "./api.js";
import { announce, h, put } from "./dom.js";
import { openAuditForm } from "./auditform.js";
import { openAttackForm } from "./jobform.js";
import { listen } from "./live.js";
import { parseHash } from "./route.js";
import { Store } from "./store.js";
import * as theme from "./theme.js";
import { askToken, logOut, openSessionFromLink } from "./token.js";
import { makeCaseView } from "./views/case.js";
import { makeJobView } from "./views/job.js";
import { makeJobsView } from "./views/jobs.js";
import { makeRunView } from "./views/run.js";
import { makeRunsView } from "./views/runs.js";
import { formatJobName } from "./words.js";

const main = document.getElementById("main");
const store = new Store();
const app = {
  store,
  openAttackForm: (preset) => openAttackForm(store, preset),
  openAuditForm: (recording) => openAuditForm(store, recording),
};
let shown = null;

function makeView(path) {
  const [first, id, second, source, name] = path;
  if (first === undefined) return makeRunsView(app);
  if (first === "run" && id && second === "case" && source && name) return makeCaseView(app, id, source, name);
  if (first === "run" && id && second === undefined) return makeRunView(app, id);
  if (first === "jobs" && id === undefined) return makeJobsView(app);
  if (first === "job" && id) return makeJobView(app, id);
  return makeLostView();
}

function makeLostView() {
  const element = h("p.state", {}, "There is nothing at this address. ", h("a", { href: "#/" }, "All runs"));
  return { element, title: "Nothing here", place: "" };
}

function render() {
  const { path, query } = parseHash(location.hash);
  const key = path.join("/");
  if (shown?.key === key) {
    shown.view.refine?.(query);
    return;
  }
  const first = shown === null;
  shown?.view.stop?.();
  const view = makeView(path);
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

function showJobCount() {
  const busy = [...store.jobs.values()].filter((job) => job.state === "running" || job.state === "queued").length;
  const count = document.getElementById("busy");
  count.hidden = busy === 0;
  put(count, String(busy), h("span.unseen", {}, " waiting or running"));
}

function showConnection(state) {
  const words = { live: "live", waiting: "not connected, trying again", resting: "paused while hidden" };
  const link = document.getElementById("link");
  link.dataset.state = state;
  if (link.textContent !== words[state]) link.textContent = words[state];
  const banner = document.getElementById("banner");
  banner.hidden = state !== "waiting" || !store.loaded;
  if (!banner.hidden)
    banner.textContent =
      "The connection to the service is lost. The page shows the last known state, and updates itself once it is back.";
}

function announceChange({ recording, job, before }) {
  if (recording && before && recording.last_round > before.last_round)
    announce(`${recording.name}: round ${recording.last_round} arrived`);
  if (recording && !before && store.loaded) announce(`A new run: ${recording.name}`);
  if (job && before && before.state !== job.state)
    announce(`${formatJobName(job.spec)} on ${job.spec.recording}: ${job.state.replace("_", " ")}`);
}

setTokenPrompt(askToken);
theme.wireButton(document.getElementById("theme"));
document.getElementById("new-job").addEventListener("click", () => app.openAttackForm(shown?.view.getPreset?.() ?? {}));
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
window.addEventListener("hashchange", async () => {
  await openSessionFromLink();
  render();
});
const leave = document.getElementById("leave");
leave.addEventListener("click", () => logOut().catch((problem) => announce(problem.message)));
get("health").then(
  ({ token }) => (leave.hidden = !token),
  () => {},
);
await openSessionFromLink();
store.subscribe(showJobCount);
store.subscribe(announceChange);
render();
showConnection("waiting");
listen(
  makeUrl("events"),
  {
    recording: (one) => store.setRecording(one),
    job: (one) => store.setJob(one),
    removed: ({ id }) => store.removeRecording(id),
  },
  {
    opened: () => store.refresh(),
    status: showConnection,
    refused: () =>
      get("recordings", { limit: 1 }).then(
        () => {},
        (problem) => {
          if (!store.loaded) {
            store.problem = problem;
            store.notify({ all: true });
          }
        },
      ),
  },
);
