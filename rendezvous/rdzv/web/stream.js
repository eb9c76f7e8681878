// Keeps the data that the server pushes. Everything else (logs, ledger, a node's history, reports) is requested once (`requests.js`).

import { openStream, requestJob, requestNodes } from "./requests.js";
import { nodeMark } from "./words.js";

const SILENT_MS = 12000; // The server sends a message at least every 5 s.
const HIDDEN_MS = 60000;
const FIRST_MS = 500;
const MOST_MS = 10000;

/** A stream from the server, reopened whenever it ends and closed while the page is hidden. */
export class Stream {
  /** Follow `job`, or the fleet if it is null, and call `changed` with each update. */
  constructor(job, changed) {
    this.job = job;
    this.changed = changed;
    this.jobs = new Map();
    this.nodes = new Map();
    this.status = null;
    this.events = [];
    this.ready = false;
    this.link = "opening";
    this.error = null;
    this.heard = Date.now();
    this.wait = FIRST_MS;
    this.open();
    this.watch = setInterval(() => this.check(), 1000);
    this.visible = () => this.seen();
    document.addEventListener("visibilitychange", this.visible);
  }

  close() {
    this.closed = true;
    clearInterval(this.watch);
    clearTimeout(this.again);
    document.removeEventListener("visibilitychange", this.visible);
    this.source?.close();
    this.changed = () => {};
  }

  open() {
    clearTimeout(this.again);
    this.source?.close();
    const source = (this.source = openStream(this.job));
    this.opened = Date.now();
    let fresh = null;
    const on = (name, take) =>
      source.addEventListener(name, (event) => {
        if (source !== this.source) return;
        this.heard = Date.now();
        take(JSON.parse(event.data));
      });
    const target = () => fresh || this;
    on("begin", () => (fresh = { jobs: new Map(), nodes: new Map() }));
    on("jobs", ({ jobs }) => {
      for (const job of jobs) target().jobs.set(job.rdzv_id, this.stamped(job, this.jobs.get(job.rdzv_id)));
      if (!fresh) this.tell("jobs");
    });
    on("nodes", ({ nodes }) => {
      for (const node of nodes) target().nodes.set(node.node_id, this.stamped(node));
      if (!fresh) this.tell("nodes");
    });
    on("gone", ({ jobs, nodes }) => {
      for (const name of jobs) target().jobs.delete(name);
      for (const name of nodes) target().nodes.delete(name);
      if (!fresh) this.tell("gone");
    });
    on("job", (job) => {
      this.status = this.stamped(job);
      if (!fresh) this.tell("job");
    });
    on("events", ({ events }) => {
      this.events = events;
      if (!fresh) this.tell("events");
    });
    on("ready", () => {
      if (this.job === null) Object.assign(this, fresh);
      fresh = null;
      this.ready = true;
      this.error = null;
      this.wait = FIRST_MS;
      this.turn("live");
      this.tell("ready");
    });
    on("beat", () => this.turn("live"));
    on("end", (error) => {
      this.error = error;
      this.retry();
    });
    source.onerror = () => {
      if (source === this.source) this.explain();
    };
  }

  /** Record when a row arrived, because its ages grow from then on. */
  stamped(row) {
    row.at = Date.now();
    const age = row.node_id === undefined ? row.state_age_ms : nodeMark(row)[1];
    row.since = age === null ? null : row.at - age; // Since when a node is gone is not known.
    return row;
  }

  /** Whether the server refuses the caller's token, or requires one. */
  get locked() {
    return this.error?.code === "UnauthenticatedError" || this.error?.code === "DeniedError";
  }

  /** Whether the server has reported that there is no such job. */
  get unknown() {
    return Boolean(this.error?.code?.startsWith("Unknown") || this.error?.code === "InvalidRequestError");
  }

  tell(what) {
    this.changed(what);
  }

  turn(link) {
    if (this.link === link) return;
    this.link = link;
    this.tell("link");
  }

  retry() {
    this.source?.close();
    this.source = null;
    this.turn("lost");
    clearTimeout(this.again);
    const wait = this.wait * (0.5 + Math.random() / 2);
    this.wait = Math.min(this.wait * 2, MOST_MS);
    this.again = setTimeout(() => this.open(), wait);
    this.tell("link");
  }

  /** Find out why a stream failed by repeating its request without a stream. */
  async explain() {
    this.retry();
    try {
      const answer = await (this.job === null ? requestNodes() : requestJob(this.job));
      if (this.closed) return;
      if (answer.ok) {
        // The job did not exist before, but does now.
        if (this.unknown) this.open();
        return;
      }
      this.error = await answer.json();
      // The stream is reopened once there is a token.
      if (this.locked) clearTimeout(this.again);
      if (this.unknown) {
        // Check only occasionally whether the job exists by now.
        clearTimeout(this.again);
        this.again = setTimeout(() => document.hidden || this.explain(), MOST_MS);
      }
    } catch {
      this.error = { code: "", message: "the server does not answer" };
    }
    this.tell("link");
  }

  check() {
    if (document.hidden && this.hiddenAt && Date.now() - this.hiddenAt > HIDDEN_MS && this.source) {
      this.source.close();
      this.source = null;
      clearTimeout(this.again);
      this.turn("paused");
    } else if (this.source && Date.now() - Math.max(this.heard, this.opened) > SILENT_MS) {
      this.error = { code: "", message: "the server is silent" };
      this.retry();
    }
  }

  seen() {
    this.hiddenAt = document.hidden ? Date.now() : 0;
    if (!document.hidden && !this.source && !this.locked) {
      this.wait = FIRST_MS;
      this.open();
    }
  }
}
