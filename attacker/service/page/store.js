/* What the page knows of runs and jobs: read once, kept up to date by the service's events. */

import { all } from "./api.js";

export class Store {
  constructor() {
    this.recordings = new Map();
    this.jobs = new Map();
    this.trouble = []; // what lies below the root and cannot be served
    this.loaded = false;
    this.problem = null;
    this.listeners = new Set();
  }

  /** Calls `listener(change)` after every change {recording | job | removed | all}; returns what ends that. */
  on(listener) {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  async refresh() {
    try {
      const [recordings, jobs] = await Promise.all([
        all("recordings", {}, 2000, (page) => (this.trouble = page.trouble ?? [])),
        all("jobs", {}, 500),
      ]);
      this.recordings = new Map(recordings.map((one) => [one.id, one]));
      this.jobs = new Map(jobs.map((one) => [one.id, one]));
      this.loaded = true;
      this.problem = null;
    } catch (problem) {
      this.problem = problem;
    }
    this.tell({ all: true });
  }

  recording(one) {
    const before = this.recordings.get(one.id) ?? null;
    this.recordings.set(one.id, one);
    this.tell({ recording: one, before });
  }

  job(one) {
    const before = this.jobs.get(one.id) ?? null;
    this.jobs.set(one.id, one);
    this.tell({ job: one, before });
  }

  removed(id) {
    this.recordings.delete(id);
    this.tell({ removed: id });
  }

  /** Jobs newest first, of one recording where it is named. */
  newest(recording = null) {
    const jobs = [...this.jobs.values()].filter((job) => recording === null || job.spec.recording === recording);
    return jobs.sort((a, b) => Date.parse(b.created) - Date.parse(a.created) || (a.id < b.id ? 1 : -1));
  }

  tell(change) {
    for (const listener of [...this.listeners]) listener(change);
  }
}
