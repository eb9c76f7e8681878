// How all jobs spent their time, with the causes, nodes and jobs that cost most. Loaded when opened, or on request.

import { fillAnew, h, put, table } from "./dom.js";
import { jobLink, nodeLink } from "./fleet.js";
import { requestReport } from "./requests.js";
import { hours, took } from "./words.js";

const SINCE = { 24: "1 day", 168: "7 days", 720: "30 days" };
const MOST = 20; // The maximum number of rows in a table; rdzvctl report has all of them.

const share = (goodput, whole) => (goodput === null ? "–" : `${whole || !goodput ? "" : "at most "}${(100 * goodput).toFixed(1)} %`);

function card(title, heads, rows) {
  const left = rows.length - MOST;
  return h(
    "section",
    { class: heads.length > 5 ? "card wide" : "card", "aria-label": title },
    h("h2", {}, title),
    rows.length
      ? table(
          `${title}: the table`,
          heads.map((head, at) => h("th", { scope: "col", class: at ? "n" : null }, head)),
          h("tbody", {}, rows.slice(0, MOST).map(([name, ...rest]) => h("tr", {}, h("th", { scope: "row" }, name), rest.map((one, at) => h("td", { class: "n", "data-of": heads[at + 1] }, one))))),
          heads.length > 4,
        )
      : h("p", { class: "dim" }, "None."),
    left > 0 ? h("p", { class: "dim" }, `and ${left} more`) : null,
  );
}

const lossRow = (name, one, gpus) => [name, one.times, took(one.ms), hours(one.node_ms), ...(gpus ? [hours(one.gpu_ms)] : [])];

export class ReportView {
  constructor() {
    this.since = h("select", { id: "since", onchange: () => this.read() }, Object.entries(SINCE).map(([value, text]) => h("option", { value, selected: text === "7 days" }, text)));
    this.share = h("p", { class: "reason" });
    this.said = h("p", { class: "dim", role: "status" });
    this.cards = h("div", { class: "cards" });
    this.element = h(
      "section",
      { class: "report", "aria-labelledby": "title" },
      h("div", { class: "head" }, h("h1", { id: "title" }, "What was lost"), h("label", { for: "since" }, "in the last ", this.since), h("button", { type: "button", onclick: () => this.read() }, "Read again")),
      this.share,
      this.said,
      this.cards,
    );
    this.read();
  }

  close() {
    this.reading?.abort();
  }

  title() {
    return "What was lost · rdzv";
  }

  draw() {}

  async read() {
    this.reading?.abort();
    const reading = (this.reading = new AbortController());
    put(this.said, "Reading the history of all jobs.");
    try {
      const answer = await requestReport(this.since.value, reading.signal);
      const report = await answer.json();
      put(this.said, answer.ok ? `As of ${new Date(report.until_unix_ms).toLocaleTimeString([], { hour12: false })}.` : report.message);
      if (answer.ok) this.show(report);
    } catch (error) {
      if (!reading.signal.aborted) put(this.said, `It cannot be read: ${error.message}. Read again.`);
    }
  }

  show(report) {
    const whole = report.jobs.every((job) => job.steps_reported);
    put(this.share, report.jobs.length ? `Goodput ${share(report.goodput, whole)} of ${hours(report.node_ms)} node-hours.` : "No job had a run in this time.");
    const spent = Object.values(report.phases).reduce((sum, ms) => sum + ms, 0);
    const gpus = report.jobs.some((job) => job.lost_gpu_ms);
    const heads = ["Times", "Time", "Node-hours", ...(gpus ? ["GPU-hours"] : [])];
    const net = (one) => `${hours(one.net_ms)}${one.spread_ms ? ` ± ${hours(one.spread_ms)}` : ""}`;
    fillAnew(
      this.cards,
      card("Which causes cost most", ["Cause", ...heads], report.causes.map((one) => lossRow(one.cause || "the start", one, gpus))),
      card("Which nodes cost most", ["Node", ...heads], report.nodes.map((one) => lossRow(h("a", { href: nodeLink(one.node_id) }, one.node_id), one, gpus))),
      card("Where the time went", ["Phase", "Time", "Share"], Object.entries(report.phases).filter(([, ms]) => ms).map(([phase, ms]) => [h("span", {}, h("i", { class: "swatch", "data-phase": phase }), phase), took(ms), `${((100 * ms) / spent).toFixed(1)} %`])),
      card("Jobs", ["Job", "Runs", "Time", "Goodput", "Lost node-hours", ...(gpus ? ["Lost GPU-hours"] : [])], report.jobs.map((job) => [h("a", { href: jobLink(job.rdzv_id) }, job.rdzv_id), job.runs, took(job.wall_ms), share(job.goodput, job.steps_reported), hours(job.lost_node_ms), ...(gpus ? [hours(job.lost_gpu_ms)] : [])])),
      card("What changes would have saved, in node-hours", ["Change", "Job", "Now", "Saves", "Costs", "Net", "Verdict"], report.advice.map((one) => [one.change, one.rdzv_id, one.now, hours(one.saves_ms), hours(one.costs_ms), net(one), one.verdict])),
    );
  }
}
