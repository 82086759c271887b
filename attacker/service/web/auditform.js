/* Dialog that submits an audit as a job, with the time budget of its attacks. */

import { post } from "./api.js";
import { h } from "./dom.js";
import { makeField, wireJobForm } from "./fields.js";

/** Budgets to choose from, in seconds. */
const BUDGETS = [
  [60, "1 minute"],
  [120, "2 minutes"],
  [600, "10 minutes"],
  [3600, "1 hour"],
  [8 * 3600, "8 hours"],
];
const DEFAULT_SECONDS = 600;

/** Open the dialog. recording: id of the recording to audit. */
export function openAuditForm(store, recording) {
  const dialog = h("dialog", { "aria-labelledby": "audit-title" });
  const close = () => dialog.close();
  const seconds = h(
    "select",
    { name: "seconds" },
    BUDGETS.map(([value, words]) => h("option", { value }, words)),
  );
  seconds.value = String(DEFAULT_SECONDS);
  const problem = h("p.wrong", { role: "alert" });
  const send = h("button.strong", { type: "submit" }, "Start");
  const form = h(
    "form",
    { novalidate: true },
    h(
      "p.soft",
      {},
      "An audit checks the recording, attacks some of its updates, and grades what leaks. " +
        "It repeats each attack without the updates (its null), for comparison.",
    ),
    makeField("seconds", seconds, {
      label: "Budget",
      help:
        "Time of attacks and nulls, which are stopped when it is used up; one attack runs in any case. " +
        "Checks and error bounds take further time.",
    }),
    problem,
    h("div.actions", {}, h("button.quiet", { type: "button", onclick: close }, "Cancel"), send),
  );
  const request = () => post(`recordings/${recording}/audit`, { seconds: Number(seconds.value) });
  wireJobForm({ form, dialog, problem, send, store, request });
  dialog.append(
    h(
      "div.dialog-head",
      {},
      h("h2", { id: "audit-title" }, "Audit"),
      h("button.quiet", { type: "button", onclick: close }, "Close"),
    ),
    form,
  );
  document.body.append(dialog);
  dialog.addEventListener("close", () => dialog.remove());
  dialog.showModal();
  seconds.focus();
}
