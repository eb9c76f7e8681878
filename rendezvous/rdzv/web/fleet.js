// The fleet: all jobs or all nodes, one per line.

import { age, chip, h, icon, keyed, mark, put, table, tone, updateAge, updateChip } from "./dom.js";
import { bounds, bytes, counted, itemLine, nodeMark, nodeNotes, orNone, reasonLine } from "./words.js";

const PAGE = 200; // The number of rows drawn before the user scrolls down.
const MOST_ITEMS = 2; // The number of things behind a job's reason that its row names.
const MOST_JOBS = 6; // The number of a node's jobs in its row.

const JOB_STATES = ["failed", "hangs", "queued", "joining", "stopping", "running", "stopped", "succeeded"];
const NODE_STATES = ["away", "unhealthy", "quarantined", "draining", "drained", "cordoned", "connected", "gone"];
export const jobLink = (name) => `#/job/${encodeURIComponent(name)}`;
export const nodeLink = (name) => `#/node/${encodeURIComponent(name)}`;

const text = (a, b) => (a < b ? -1 : a > b ? 1 : 0);

/** Return a job's state, or "hangs" if it is running without making progress. */
const jobState = (job) => (job.hangs ? "hangs" : job.state);
const jobReason = (job) => (job.hangs ? `hangs: ${job.hangs}` : reasonLine(job.reason.headline, job.reason, Date.now() - job.at));
const jobItems = (job) => job.reason.items.slice(0, MOST_ITEMS).map((item) => itemLine(item, Date.now() - job.at)).join("\n");

const nodeState = (node) => nodeMark(node)[0];

/** The columns of a table of jobs or nodes: titles, sort keys, and functions that create and update cells. */
const JOBS = {
  title: "Jobs",
  one: "job",
  states: JOB_STATES,
  key: (job) => job.rdzv_id,
  state: jobState,
  words: (job) => `${job.rdzv_id} ${jobState(job)} ${job.state} ${job.reason.headline}`,
  columns: [
    { name: "State", sort: (a, b) => JOB_STATES.indexOf(jobState(a)) - JOB_STATES.indexOf(jobState(b)) },
    { name: "Job", sort: (a, b) => text(a.rdzv_id, b.rdzv_id) },
    { name: "Nodes", number: true, sort: (a, b) => b.nodes - a.nodes },
    { name: "Round", number: true, sort: (a, b) => (b.round ?? -1) - (a.round ?? -1) },
    { name: "Workers", number: true, sort: (a, b) => (b.world_size ?? 0) - (a.world_size ?? 0) },
    { name: "Restarts", number: true, sort: (a, b) => (b.restarts ?? -1) - (a.restarts ?? -1) },
    { name: "For", number: true, sort: (a, b) => b.since - a.since },
    { name: "Reason" },
  ],
  create(job) {
    const cells = {
      state: chip(jobState(job)),
      name: h("a", { href: jobLink(job.rdzv_id) }, job.rdzv_id),
      nodes: h("span"),
      fill: h("i"),
      round: h("td", { class: "n", "data-of": "round" }),
      world: h("td", { class: "n", "data-of": "workers" }),
      restarts: h("td", { class: "n", "data-of": "restarts" }),
      age: age(job.since),
      reason: h("span"),
      items: h("small", { class: "dim" }),
    };
    const row = h(
      "tr",
      {},
      h("td", { class: "st" }, cells.state),
      h("th", { scope: "row", class: "id" }, cells.name),
      h("td", { class: "n", "data-of": "nodes" }, cells.nodes, h("span", { class: "meter", "aria-hidden": "true" }, cells.fill)),
      cells.round,
      cells.world,
      cells.restarts,
      h("td", { class: "n", "data-of": "for" }, cells.age),
      h("td", { class: "why" }, cells.reason, cells.items),
    );
    row.cells_ = cells;
    return row;
  },
  update(row, job) {
    if (row.job === job) return;
    row.job = job;
    const cells = row.cells_;
    mark(row, "data-tone", tone(jobState(job)));
    updateChip(cells.state, jobState(job));
    put(cells.nodes, `${job.nodes} of ${bounds(job)}`);
    cells.fill.style.width = `${Math.min(100, (100 * job.nodes) / (job.max_nodes || 1))}%`;
    put(cells.round, orNone(job.round));
    put(cells.world, orNone(job.world_size));
    const budget = job.max_restarts === null ? "–" : `${job.restarts} of ${job.max_restarts}`;
    put(cells.restarts, budget);
    mark(cells.restarts, "data-tone", job.restarts > 0 ? "warn" : null);
    updateAge(cells.age, job.hangs ? null : job.since); // Since when it hangs is not known here.
    JOBS.tick(row);
  },
  tick({ cells_: cells, job }) {
    put(cells.reason, jobReason(job));
    put(cells.items, jobItems(job));
  },
};

const NODES = {
  title: "Nodes",
  one: "node",
  states: NODE_STATES,
  key: (node) => node.node_id,
  state: nodeState,
  words: (node) =>
    `${node.node_id} ${nodeState(node)} ${node.address || ""} ${node.jobs.map((job) => job.rdzv_id).join(" ")}`,
  columns: [
    { name: "State", sort: (a, b) => NODE_STATES.indexOf(nodeState(a)) - NODE_STATES.indexOf(nodeState(b)) },
    { name: "Node", sort: (a, b) => text(a.node_id, b.node_id) },
    { name: "Jobs", sort: (a, b) => b.jobs.length - a.jobs.length },
    { name: "GPUs free", number: true, gpus: true, sort: (a, b) => (b.gpus_free ?? -1) - (a.gpus_free ?? -1) },
    { name: "For", number: true, sort: (a, b) => b.since - a.since },
    { name: "Address", sort: (a, b) => text(a.address || "", b.address || "") },
    { name: "Program" },
    { name: "Note" },
  ],
  create(node) {
    const cells = {
      state: chip(nodeState(node)),
      jobs: h("div", { class: "joblist" }),
      more: h("small", { class: "dim" }),
      gpus: h("td", { class: "n gpus", "data-of": "GPUs free" }),
      age: age(node.since),
      address: h("td", { class: "mono" }),
      program: h("td"),
      note: h("td", { class: "why" }),
    };
    const row = h(
      "tr",
      {},
      h("td", { class: "st" }, cells.state),
      h("th", { scope: "row", class: "id" }, h("a", { href: nodeLink(node.node_id) }, node.node_id)),
      h("td", { class: "jobs" }, cells.jobs, cells.more),
      cells.gpus,
      h("td", { class: "n", "data-of": "for" }, cells.age),
      cells.address,
      cells.program,
      cells.note,
    );
    row.cells_ = cells;
    return row;
  },
  update(row, node) {
    if (row.node === node) return;
    row.node = node;
    const cells = row.cells_;
    mark(row, "data-tone", tone(nodeState(node)));
    updateChip(cells.state, nodeState(node));
    drawJobsOf(cells.jobs, node.jobs.slice(0, MOST_JOBS));
    put(cells.more, node.jobs.length > MOST_JOBS ? `and ${node.jobs.length - MOST_JOBS} more` : "");
    put(cells.gpus, node.resources?.gpus.length ? `${node.gpus_free} of ${node.resources.gpus.length}` : "");
    updateAge(cells.age, node.since);
    put(cells.address, orNone(node.address));
    put(cells.program, [node.program, node.agent_version].filter(Boolean).join(" ") || "–");
    NODES.tick(row);
  },
  tick: ({ cells_: cells, node }) => put(cells.note, nodeNotes(node).join("; ")),
};

export function drawJobsOf(parent, jobs) {
  keyed(
    parent,
    jobs,
    (job) => job.rdzv_id,
    (job) => h("a", { class: "job", href: jobLink(job.rdzv_id) }, icon(job.state), h("span"), h("small")),
    (element, job) => {
      mark(element, "data-tone", tone(job.state));
      const fresh = icon(job.state);
      if (element.state !== job.state) element.firstChild.replaceWith(fresh);
      element.state = job.state;
      put(element.children[1], job.rdzv_id);
      put(element.children[2], job.gpus ? `${job.state}, ${counted(job.gpus, "GPU")}` : job.state);
    },
  );
}

export function resourcesOf(node) {
  const has = node.resources;
  if (!has) return "takes no submitted jobs";
  const parts = [has.cpus && counted(has.cpus, "CPU"), has.memory_bytes && bytes(has.memory_bytes)];
  parts.push(has.gpus.length && counted(has.gpus.length, "GPU"), has.capacity && `takes ${counted(has.capacity, "job")} at once`);
  return parts.filter(Boolean).join(", ");
}

export class FleetView {
  constructor(kind, say) {
    this.kind = kind;
    this.table = kind === "nodes" ? NODES : JOBS;
    this.say = say;
    this.wanted = new Set(); // The states to show; if empty, all of them.
    this.sorted = { column: this.table.columns[0], falls: false };
    this.most = PAGE;
    this.states = null;
    this.build();
  }

  build() {
    const kind = this.table;
    this.search = h("input", {
      type: "search",
      id: "search",
      placeholder: `Filter ${kind.title.toLowerCase()}`,
      "aria-label": `Filter ${kind.title.toLowerCase()} by name, state or reason`,
      autocomplete: "off",
      spellcheck: "false",
      oninput: () => this.redraw(),
    });
    this.tallies = h("div", { class: "tallies", role: "group", "aria-label": "Show only these states" });
    this.heads = kind.columns.map((column) => {
      const button = column.sort
        ? h("button", { type: "button", onclick: () => this.sort(column) }, column.name)
        : column.name;
      return h("th", { scope: "col", class: column.gpus ? "n gpus" : column.number ? "n" : null }, button);
    });
    this.body = h("tbody");
    this.count = h("p", { class: "count", role: "status" });
    this.more = h("button", { type: "button", class: "more", onclick: () => this.showMore() });
    this.empty = h("p", { class: "empty", hidden: true });
    this.element = h(
      "section",
      { "aria-labelledby": "title", class: `fleet ${this.kind}` },
      h("div", { class: "head" }, h("h1", { id: "title" }, kind.title), this.tallies, this.search),
      this.empty,
      table(`${kind.title}, one a row; a column's title sorts`, this.heads, this.body),
      h("div", { class: "below" }, this.count, this.more),
    );
    this.seen = new IntersectionObserver((found) => found.some((one) => one.isIntersecting) && this.showMore(), {
      rootMargin: "600px",
    });
    this.seen.observe(this.more);
  }

  close() {
    this.seen.disconnect();
  }

  title(stream) {
    const rows = stream[this.kind === "nodes" ? "nodes" : "jobs"];
    const failed = [...rows.values()].filter((row) => this.table.state(row) === "failed").length;
    return `${failed ? `(${failed}) ` : ""}${this.table.title} · rdzv`;
  }

  sort(column) {
    const falls = this.sorted.column === column && !this.sorted.falls;
    this.sorted = { column, falls };
    this.redraw();
  }

  showMore() {
    if (this.most >= this.shown) return;
    this.most += PAGE;
    this.redraw();
  }

  draw(stream) {
    this.rows = stream[this.kind === "nodes" ? "nodes" : "jobs"];
    this.ready = stream.ready;
    this.announce();
    this.redraw();
  }

  /** Announce to screen readers which jobs have changed state. */
  announce() {
    const states = new Map();
    for (const [name, row] of this.rows) states.set(name, this.table.state(row));
    if (this.states && this.ready)
      for (const [name, state] of states) {
        const before = this.states.get(name);
        if (before !== state) this.say(`${this.table.one} ${name} ${state === "hangs" ? state : `is ${state}`}`);
      }
    this.states = this.ready ? states : null;
  }

  redraw() {
    if (!this.rows) return;
    const table = this.table;
    const all = [...this.rows.values()];
    this.drawTallies(all);
    this.element.classList.toggle("no-gpus", !all.some((row) => row.resources?.gpus.length));
    const search = this.search.value.trim().toLowerCase();
    const rows = all.filter(
      (row) =>
        (!this.wanted.size || this.wanted.has(table.state(row))) &&
        (!search || table.words(row).toLowerCase().includes(search)),
    );
    const { column, falls } = this.sorted;
    const way = falls ? -1 : 1;
    rows.sort((a, b) => way * column.sort(a, b) || text(table.key(a), table.key(b)));
    this.heads.forEach((head, at) => {
      const mine = table.columns[at] === column;
      mark(head, "aria-sort", mine ? (falls ? "descending" : "ascending") : null);
    });
    this.shown = rows.length;
    keyed(this.body, rows.slice(0, this.most), table.key, table.create, table.update);
    const part = rows.length === all.length ? "" : ` of ${counted(all.length, table.one)}`;
    put(this.count, all.length ? `${rows.length.toLocaleString("en")}${part || ` ${table.one}${rows.length === 1 ? "" : "s"}`}` : "");
    const left = rows.length - this.most;
    this.more.hidden = left <= 0;
    put(this.more, `Show ${Math.min(left, PAGE)} more`);
    const none = !all.length ? (this.ready ? `No ${table.one} is known here yet.` : "Waiting for the server.") : "";
    this.empty.hidden = Boolean(rows.length);
    put(this.empty, none || (rows.length ? "" : `No ${table.one} matches.`));
  }

  drawTallies(all) {
    const tally = new Map();
    for (const row of all) tally.set(this.table.state(row), (tally.get(this.table.state(row)) || 0) + 1);
    const states = this.table.states.filter((state) => tally.has(state) || this.wanted.has(state));
    keyed(
      this.tallies,
      states,
      (state) => state,
      (state) =>
        h(
          "button",
          { type: "button", class: "tally", "data-tone": tone(state), onclick: () => this.toggle(state) },
          icon(state),
          h("b"),
          h("span", {}, state),
        ),
      (element, state) => {
        put(element.children[1], (tally.get(state) || 0).toLocaleString("en"));
        mark(element, "aria-pressed", this.wanted.has(state) ? "true" : "false");
      },
    );
  }

  toggle(state) {
    if (!this.wanted.delete(state)) this.wanted.add(state);
    this.redraw();
  }

  tick() {
    for (const row of this.body.children) this.table.tick(row);
  }
}
