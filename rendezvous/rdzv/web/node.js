// One node, across its jobs: its state, the jobs running on it, and its history.

import { age, chip, drawFacts, fillAnew, h, keyed, mark, put, table, tone, updateAge, updateChip } from "./dom.js";
import { drawJobsOf, jobLink, resourcesOf } from "./fleet.js";
import { requestNodeEvents } from "./requests.js";
import { bytes, moment, nodeMark, nodeNotes, orNone } from "./words.js";

const PAGE = 25; // The number of events drawn before the user asks for more.
const BAD = ["WorkerFailed", "NodeLost", "NodeDeclined", "WorkersHang", "NodeQuarantined", "NodeStuck", "RoundEnded", "RoundSettled"];

export class NodeView {
  constructor(name) {
    this.name = name;
    this.chip = chip("connected");
    this.age = age(null);
    this.for = h("span", { class: "dim" }, "for ", this.age);
    this.missing = h("p", { class: "empty" }, "Waiting for the server.");
    this.why = h("p", { class: "reason" }, "No submitted job is placed on it.");
    this.items = h("ul", { class: "items" });
    this.facts = h("dl", { class: "facts" });
    this.jobs = h("div", { class: "joblist" });
    this.none = h("p", { class: "dim" }, "It is in no job.");
    this.gpus = h("tbody");
    this.gpuCard = h(
      "section",
      { class: "card", "aria-labelledby": "gpus" },
      h("h2", { id: "gpus" }, "GPUs"),
      table("GPUs by number", ["#", "Name", "Memory", "UUID"].map((name, at) => h("th", { scope: "col", class: at % 2 ? null : "n" }, name)), this.gpus),
    );
    this.bad = h("input", { id: "bad", type: "checkbox", onchange: () => this.drawPast() });
    this.again = h("button", { type: "button", onclick: () => this.read() }, "Read what is kept");
    this.said = h("p", { class: "dim", role: "status" });
    this.past = h("tbody");
    this.pastCard = h(
      "section",
      { class: "card wide", "aria-labelledby": "past" },
      h("h2", { id: "past" }, "What has happened here"),
      h("div", { class: "fields" }, h("label", { class: "check", for: "bad" }, this.bad, "only what went wrong"), this.again),
      this.said,
      table("What has happened, newest first", ["Time", "Job", "Event", "What"].map((name) => h("th", { scope: "col" }, name)), this.past),
    );
    this.more = h("button", { type: "button", class: "more", hidden: true, onclick: () => this.drawPast(this.most + PAGE) });
    this.pastCard.append(this.more);
    this.events = [];
    this.content = h("div", { class: "cards" }, h("section", { class: "card", "aria-labelledby": "jobs" }, h("h2", { id: "jobs" }, "Jobs"), this.none, this.jobs), this.gpuCard);
    this.element = h("article", { class: "node", "aria-labelledby": "title" }, h("div", { class: "head" }, h("h1", { id: "title" }, name), this.chip, this.for), this.missing, this.why, this.items, this.facts, this.content, h("div", { class: "cards" }, this.pastCard));
  }

  close() {
    this.reading?.abort();
  }

  /** Collect the events about this node from the histories of all jobs. */
  async read() {
    this.reading?.abort();
    const reading = (this.reading = new AbortController());
    put(this.said, "Reading the history of all jobs.");
    try {
      const answer = await requestNodeEvents(this.name, reading.signal);
      const told = await answer.json();
      put(this.said, answer.ok ? "" : told.message);
      if (!answer.ok) return;
      this.events = told.events.reverse();
      this.drawPast();
    } catch (error) {
      if (!reading.signal.aborted) put(this.said, `It cannot be read: ${error.message}. Read again.`);
    }
  }

  drawPast(most = PAGE) {
    this.most = most;
    const shown = this.events.filter((event) => !this.bad.checked || BAD.includes(event.name));
    put(this.said, shown.length ? "" : "Nothing is kept of it.");
    fillAnew(
      this.past,
      shown.slice(0, most).map((event) => h("tr", {}, h("td", { class: "mono" }, moment(event.unix_ms)), h("td", {}, h("a", { href: jobLink(event.rdzv_id) }, event.rdzv_id)), h("td", { class: "st dim" }, event.name), h("td", { class: "why" }, event.text))),
    );
    this.more.hidden = shown.length <= most;
    put(this.more, `Show ${Math.min(shown.length - most, PAGE)} more of ${shown.length}`);
  }

  title() {
    return `${this.name} · rdzv`;
  }

  tick() {
    const notes = this.node ? nodeNotes(this.node) : [];
    this.why.hidden = this.items.hidden = !notes.length;
    keyed(this.items, notes.entries(), ([at]) => at, () => h("li"), (element, [, note]) => put(element, note));
  }

  draw(stream) {
    const node = stream.nodes.get(this.name);
    this.missing.hidden = Boolean(node);
    this.content.hidden = this.for.hidden = this.facts.hidden = !node;
    mark(this.chip, "hidden", node ? null : "");
    put(this.missing, stream.ready ? `No node ${this.name} is known here: it is neither connected, away nor cordoned.` : "Waiting for the server.");
    if (!node || node === this.node) return;
    // Nothing is requested for an unknown node, because its name may be invalid.
    if (!this.node) this.read();
    this.node = node;
    const [state] = nodeMark(node);
    updateChip(this.chip, state);
    mark(this.element, "data-tone", tone(state));
    this.tick();
    updateAge(this.age, node.since);
    const labels = Object.entries(node.resources?.labels || {}).map(([name, value]) => `${name}=${value}`);
    drawFacts(this.facts, [
      ["Address", orNone(node.address)],
      ["Program", [node.program, node.agent_version].filter(Boolean).join(" ") || "–"],
      ["Has", resourcesOf(node)],
      ["GPUs free", node.resources?.gpus.length ? String(node.gpus_free) : ""],
      ["Labels", labels.join(", ")],
      ["Topology", node.resources?.topology],
    ]);
    drawJobsOf(this.jobs, node.jobs);
    this.none.hidden = node.jobs.length > 0;
    const gpus = node.resources?.gpus || [];
    this.gpuCard.hidden = !gpus.length;
    keyed(this.gpus, gpus.map((gpu, at) => ({ ...gpu, at })), (gpu) => gpu.uuid, (gpu) => h("tr", {}, h("td", { class: "n", "data-of": "GPU" }, gpu.at), h("td", {}, orNone(gpu.name)), h("td", { class: "n" }, bytes(gpu.memory_bytes)), h("td", { class: "mono" }, gpu.uuid)), () => {});
  }
}
