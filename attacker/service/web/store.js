/* What the page knows of runs and jobs: read once, kept up to date by the service's events. */

import { getAll } from "./api.js";

/** Of two states of a job, the one that came later. */
export function chooseNewer(one, other) {
  return one && one.version > other.version ? one : other;
}

export class Store {
  constructor() {
    this.recordings = new Map();
    this.jobs = new Map();
    this.trouble = []; // what lies below the root and cannot be served
    this.root = null; // the folder that is watched, told while it holds no run
    this.loaded = false;
    this.problem = null;
    this.listeners = new Set();
    this.meanwhile = null;
  }

  /** Calls `listener(change)` after every change {recording | job | removed | all}; returns what ends that. */
  subscribe(listener) {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  /** Reads everything; what events tell meanwhile is newer than the answer that is on its way. */
  async refresh() {
    const meanwhile = { recordings: new Map(), jobs: new Map() };
    this.meanwhile = meanwhile;
    try {
      const [recordings, jobs] = await Promise.all([
        getAll("recordings", {}, 2000, (page) => {
          this.trouble = page.trouble ?? [];
          this.root = page.root ?? this.root;
        }),
        getAll("jobs", {}, 500),
      ]);
      if (this.meanwhile !== meanwhile) return; // it was asked for once more
      this.recordings = new Map([...recordings.map((one) => [one.id, one]), ...meanwhile.recordings]);
      for (const [id, one] of meanwhile.recordings) if (one === null) this.recordings.delete(id);
      const before = this.jobs;
      this.jobs = new Map([...meanwhile.jobs, ...jobs.map((one) => [one.id, chooseNewer(before.get(one.id), one)])]);
      this.loaded = true;
      this.problem = null;
    } catch (problem) {
      this.problem = problem;
    }
    if (this.meanwhile === meanwhile) this.meanwhile = null;
    this.notify({ all: true });
  }

  setRecording(one) {
    const before = this.recordings.get(one.id) ?? null;
    this.meanwhile?.recordings.set(one.id, one);
    this.recordings.set(one.id, one);
    this.notify({ recording: one, before });
  }

  /** An answer may be overtaken by an event that is newer. */
  setJob(one) {
    const before = this.jobs.get(one.id) ?? null;
    if (chooseNewer(before, one) !== one) return;
    this.meanwhile?.jobs.set(one.id, one);
    this.jobs.set(one.id, one);
    this.notify({ job: one, before });
  }

  removeRecording(id) {
    this.meanwhile?.recordings.set(id, null);
    this.recordings.delete(id);
    this.notify({ removed: id });
  }

  /** Jobs newest first, of one recording where it is named. */
  listJobs(recording = null) {
    const jobs = [...this.jobs.values()].filter((job) => recording === null || job.spec.recording === recording);
    return jobs.sort((a, b) => Date.parse(b.created) - Date.parse(a.created) || (a.id < b.id ? 1 : -1));
  }

  notify(change) {
    for (const listener of [...this.listeners]) listener(change);
  }
}
