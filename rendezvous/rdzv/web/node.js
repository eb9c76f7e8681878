// One node, across its jobs.

import { age, chip, h, keyed, mark, put, tone, updateAge, updateChip } from "./dom.js";
import { drawJobsOf, nodeNote, resourcesOf } from "./fleet.js";
import { bytes, orNone } from "./words.js";

export class NodeView {
  constructor(name) {
    this.name = name;
    this.chip = chip("connected");
    this.age = age(null);
    this.for = h("span", { class: "dim" }, "for ", this.age);
    this.missing = h("p", { class: "empty" }, "Waiting for the server.");
    this.facts = h("dl", { class: "facts" });
    this.jobs = h("div", { class: "joblist" });
    this.none = h("p", { class: "dim" }, "It is in no job.");
    this.gpus = h("tbody");
    this.gpuCard = h(
      "section",
      { class: "card", "aria-labelledby": "gpus" },
      h("h2", { id: "gpus" }, "GPUs"),
      h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["#", "Name", "Memory", "UUID"].map((name) => h("th", { scope: "col" }, name)))), this.gpus)),
    );
    this.content = h("div", { class: "cards" }, h("section", { class: "card", "aria-labelledby": "jobs" }, h("h2", { id: "jobs" }, "Jobs"), this.none, this.jobs), this.gpuCard);
    this.element = h("article", { class: "node", "aria-labelledby": "title" }, h("div", { class: "head" }, h("h1", { id: "title" }, name), this.chip, this.for), this.missing, this.facts, this.content);
  }

  title() {
    return `${this.name} · rdzv`;
  }

  draw(stream) {
    const node = stream.nodes.get(this.name);
    this.missing.hidden = Boolean(node);
    this.content.hidden = this.for.hidden = this.facts.hidden = !node;
    mark(this.chip, "hidden", node ? null : "");
    put(this.missing, stream.ready ? `No node ${this.name} is known here: it is neither connected, away nor cordoned.` : "Waiting for the server.");
    if (!node || node === this.node) return;
    this.node = node;
    updateChip(this.chip, node.state);
    mark(this.element, "data-tone", tone(node.state));
    updateAge(this.age, node.since);
    const labels = Object.entries(node.resources?.labels || {}).map(([name, value]) => `${name}=${value}`);
    const facts = [
      ["Address", orNone(node.address)],
      ["Program", [node.program, node.agent_version].filter(Boolean).join(" ") || "–"],
      ["Has", resourcesOf(node)],
      ...(node.gpus_free === null ? [] : [["GPUs free", String(node.gpus_free)]]),
      ...(labels.length ? [["Labels", labels.join(", ")]] : []),
      ...(node.resources?.topology ? [["Topology", node.resources.topology]] : []),
      ...(nodeNote(node) ? [["Not placed on", nodeNote(node)]] : []),
    ];
    keyed(this.facts, facts, ([name]) => name, ([name]) => h("div", {}, h("dt", {}, name), h("dd")), (element, [, value]) => put(element.lastChild, value));
    drawJobsOf(this.jobs, node.jobs);
    this.none.hidden = node.jobs.length > 0;
    const gpus = node.resources?.gpus || [];
    this.gpuCard.hidden = !gpus.length;
    keyed(this.gpus, gpus.map((gpu, at) => ({ ...gpu, at })), (gpu) => gpu.uuid, (gpu) => h("tr", {}, h("td", { class: "n" }, gpu.at), h("td", {}, orNone(gpu.name)), h("td", { class: "n" }, bytes(gpu.memory_bytes)), h("td", { class: "mono" }, gpu.uuid)), () => {});
  }
}
