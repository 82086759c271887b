/* Runs and jobs as the page knows them: read at each connection, then updated by the service's events. */

import { getAll } from "./api.js";

/** Return the later one of two states of a job, `other` if they are equal. one: may be null. */
export function chooseNewer(one, other) {
  return one && one.version > other.version ? one : other;
}

export class Store {
  constructor() {
    this.recordings = new Map();
    this.jobs = new Map();
    this.trouble = []; // messages about folders below the root that cannot be served
    this.root = null; // path of the watched folder, which the service sends only while it has found no run
    this.loaded = false;
    this.problem = null;
    this.listeners = new Set();
    this.meanwhile = null; // while `refresh` runs: states from events that have arrived since its start
    this.latest = null; // promise of the last call of `refresh`
  }

  /**
   * Call `listener(change)` after every change, until the returned function is called.
   * change: {recording, before}, {job, before}, {removed: id}, or {all: true} if anything may have changed.
   */
  subscribe(listener) {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  /**
   * Read all runs and jobs. States from events that arrive during the request are newer than its response, and are kept.
   * A later call replaces this one, whose promise then is fulfilled with that of the later call.
   */
  refresh() {
    this.latest = this.read();
    return this.latest;
  }

  async read() {
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
      if (this.meanwhile !== meanwhile) return this.latest;
      this.recordings = new Map([...recordings.map((one) => [one.id, one]), ...meanwhile.recordings]);
      for (const [id, one] of meanwhile.recordings) if (one === null) this.recordings.delete(id);
      const before = this.jobs;
      this.jobs = new Map([...meanwhile.jobs, ...jobs.map((one) => [one.id, chooseNewer(before.get(one.id), one)])]);
      this.loaded = true;
      this.problem = null;
    } catch (problem) {
      if (this.meanwhile !== meanwhile) return this.latest;
      this.problem = problem;
    }
    this.meanwhile = null;
    this.notify({ all: true });
  }

  setRecording(one) {
    const before = this.recordings.get(one.id) ?? null;
    this.meanwhile?.recordings.set(one.id, one);
    this.recordings.set(one.id, one);
    this.notify({ recording: one, before });
  }

  /** Store a state of a job, unless a later one is known: the response to a request can arrive after a newer event. */
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

  /** Return the jobs, the last submitted first. recording: only jobs on the recording with this id; null for all. */
  listJobs(recording = null) {
    const jobs = [...this.jobs.values()].filter((job) => recording === null || job.spec.recording === recording);
    return jobs.sort((a, b) => Date.parse(b.created) - Date.parse(a.created) || (a.id < b.id ? 1 : -1));
  }

  notify(change) {
    for (const listener of [...this.listeners]) listener(change);
  }
}
