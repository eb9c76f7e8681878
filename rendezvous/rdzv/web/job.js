// One job: its state and the reason for it, its nodes and workers, its rounds, and its logs.

import { age, chip, drawFacts, fillAnew, fold, h, icon, keyed, mark, put, shape, table, tell, tone, updateAge, updateChip } from "./dom.js";
import { nodeLink } from "./fleet.js";
import { Ledger } from "./ledger.js";
import { LogView } from "./logs.js";
import { Progress } from "./progress.js";
import { Rounds } from "./rounds.js";
import { Stacks } from "./stacks.js";
import { bounds, clock, counted, itemLine, moment, orNone, ranks, reasonLine, slowness } from "./words.js";

const spent = (count, most) => (most === null ? String(count) : `${count} of ${most}`);

/** How a round's or node's workers entered the round, as far as known. */
function origins(of) {
  const fresh = of.warm === null && of.kept ? (of.world_size ?? of.local_world_size) - of.kept : null;
  const counts = [[of.kept, "kept"], [of.hot, "hot"], [of.warm, "warm"], [of.cold, "cold"], [fresh, "new"]];
  return counts.filter(([count]) => count).map(([count, how]) => `${count} ${how}`).join(", ");
}

/** The snapshots in memory, by the three questions of docs/snapshots.md. */
function snapshots(job) {
  const { step, parts, age_ms, lost_steps, node_loss: loss } = job.snapshot;
  const held = job.nodes.filter((node) => node.snapshots).length;
  const whole = `step ${step}, whole in memory since ${moment(job.at - age_ms)}${parts > 1 ? `, in ${parts} parts` : ""}`;
  const costs = [];
  if (lost_steps !== null) costs.push(`${counted(lost_steps, "step")} if all workers fail`);
  if (loss && loss.lost_steps === lost_steps && costs.length) costs[0] += ", also if a node is lost";
  else if (loss && loss.lost_steps !== null) costs.push(`at most ${counted(loss.lost_steps, "step")} if all workers fail and a node is lost`);
  return [
    ["Newest step", held ? `${whole}, on ${counted(held, "node")}` : whole],
    ...(costs.length ? [["Cost now", costs.join("; ")]] : []),
    ...(loss ? [["Survives", survives(step, loss)]] : []),
  ];
}

function survives(newest, loss) {
  const text = [loss.step === null ? "perhaps no step, if one node is lost" : `step ${loss.step}, if any one node is lost`];
  const names = loss.sole_holders.map((one) => `${one.node_id} (${one.reason})`).join(", ");
  const more = loss.sole_holder_count - loss.sole_holders.length;
  if (names) text.push(`step ${newest} is whole only with ${names}${more ? ` and ${counted(more, "other node")}` : ""}`);
  return text.join("; ");
}

/** Return a link to a job's dashboard if rdzvd is configured with Grafana's address. */
function grafanaLink(name) {
  const url = document.querySelector('meta[name="rdzv-grafana"]')?.content;
  if (!url) return null;
  const href = `${url.replace(/\/+$/, "")}/d/rdzv-job?var-rdzv_id=${encodeURIComponent(name)}`;
  return h("a", { class: "grafana", href, rel: "noreferrer" }, "Grafana");
}

const DAY = 86_400_000; // In ms: what is longer ago is shown with its date.
const COMPACT = 64; // With more nodes than this, a tile shows only its rank.

export class JobView {
  constructor(name, say) {
    this.name = name;
    this.say = say;
    this.state = null;
    this.nodeStates = null;
    this.build();
  }

  build() {
    this.chip = chip("joining");
    this.age = age(null);
    this.clock = h("span");
    this.since = h("span", { class: "dim" }, "for ", this.age, ", since ", this.clock);
    this.reason = h("p", { class: "reason" });
    this.items = h("ul", { class: "items" });
    this.facts = h("dl", { class: "facts" });
    this.missing = h("p", { class: "empty" }, "Waiting for the server.");
    this.grid = h("div", { class: "grid", role: "group", "aria-label": "Nodes by GROUP_RANK; arrow keys move", onkeydown: (event) => this.move(event) });
    this.others = h("ul", { class: "others" });
    this.spares = h("ul", { class: "others" });
    this.legend = h("span", { class: "legend" });
    this.runs = h("span", { class: "dim" });
    this.rounds = new Rounds(this.name);
    this.ledger = new Ledger(this.name, () => this.rounds.readPicture());
    this.failure = h("section", { class: "card failure", "aria-labelledby": "failure", hidden: true });
    this.progress = new Progress();
    this.more = h("dl", { class: "facts" });
    this.submission = h("div");
    this.stacks = new Stacks(this.name);
    this.hanging = null;
    this.logs = new LogView(this.name);
    this.history = h("tbody");
    this.historyCount = h("span", { class: "dim" });
    const heads = ["Time", "Event", "What"].map((head) => h("th", { scope: "col" }, head));
    this.content = h(
      "div",
      { class: "cards", hidden: true },
      this.failure,
      this.progress.element,
      this.ledger.cost,
      this.rounds.card,
      fold("nodes", "Nodes", this.legend, this.spares, this.grid),
      this.stacks.element,
      this.logs.element,
      this.ledger.element,
      this.rounds.element,
      fold("run", "Run", this.runs, this.more, this.submission),
      fold("history", "History", this.historyCount, table("What has happened, newest first", heads, this.history)),
    );
    this.element = h(
      "article",
      { class: "job", "aria-labelledby": "title" },
      h("div", { class: "head" }, h("h1", { id: "title" }, this.name), this.chip, this.since, grafanaLink(this.name)),
      this.reason,
      this.items,
      this.stacks.list,
      this.others,
      this.facts,
      this.missing,
      this.content,
    );
  }

  close() {
    this.logs.close();
    this.ledger.close();
    this.stacks.close();
  }

  title(stream) {
    const job = stream.status;
    return job ? `${this.name}: ${job.state} · rdzv` : `${this.name} · rdzv`;
  }

  draw(stream, whats) {
    const job = stream.status;
    const there = Boolean(job);
    this.missing.hidden = there;
    this.content.hidden = !there;
    mark(this.chip, "hidden", there ? null : "");
    this.since.hidden = !there;
    if (!job) {
      tell(this.missing, stream.unknown ? `${stream.error.message}.` : "Waiting for the server.");
      return;
    }
    if (job !== this.job) {
      this.job = job;
      this.announce(job);
      updateChip(this.chip, job.state);
      updateAge(this.age, job.since);
      put(this.clock, job.state_age_ms < DAY ? clock(job.since) : moment(job.since));
      mark(this.element, "data-tone", tone(job.state));
      this.drawFacts(job);
      this.drawNodes(job);
      this.drawItems(job);
      this.progress.draw(stream.events, job);
      this.logs.note(job);
      this.drawFailure(job);
      this.drawSubmission(job);
    }
    this.tick();
    if (whats.has("events") || whats.has("ready") || whats.has("all")) {
      this.rounds.draw(stream.events, job);
      this.ledger.draw(stream.events, job);
      this.announceHangs(this.stacks.draw(stream.events, job));
      this.drawHistory(stream.events);
    }
  }

  tick() {
    const job = this.job;
    if (!job) return;
    const more = Date.now() - job.at;
    tell(this.reason, reasonLine(job.reason.headline, job.reason, more) || "The server gives no reason.");
    for (const element of this.items.children) put(element, itemLine(element.item, more));
    for (const element of [...this.others.children, ...this.spares.children]) put(element.lastChild, element.items.map((item) => reasonLine(item.cause, item, more)).join("; "));
    this.progress.tick();
    this.rounds.tick();
    this.ledger.tick();
  }

  announce(job) {
    if (this.state !== null && this.state !== job.state) this.say(`Job ${this.name} is ${job.state}: ${job.reason.headline.replace(`${job.state}: `, "")}`);
    this.state = job.state;
    const states = new Map(job.nodes.map((node) => [node.node_id, node.state]));
    if (this.nodeStates) {
      const changed = [...states].filter(([name, state]) => ["lost", "away", "left"].includes(state) && this.nodeStates.get(name) !== state);
      for (const [name, state] of changed.slice(0, 4)) this.say(`Node ${name} is ${state}`);
    }
    this.nodeStates = states;
  }

  announceHangs(lines) {
    const told = lines.join("; ");
    if (this.hanging !== null && told && told !== this.hanging) this.say(`Job ${this.name} hangs: ${told}`);
    this.hanging = told;
  }

  drawFacts(job) {
    const here = job.nodes.filter((node) => ["seated", "stopping", "succeeded", "away"].includes(node.state) && node.group_rank !== null).length;
    drawFacts(this.facts, [
      ["Nodes", `${here} of ${bounds(job)}`],
      ["Restarts", job.max_restarts === null ? "counted by the nodes" : spent(job.restarts, job.max_restarts)],
      ["Workers", origins(job) && origins(job) + (job.source === null ? "" : `, from step ${job.resume_step} of RANK ${job.source}`)],
      ["Lost or left", job.budgets?.preemptions ? spent(job.budgets.preemptions, job.budgets.max_preemptions) : ""],
      ["Store hosts failed", job.budgets?.store_failures ? spent(job.budgets.store_failures, job.budgets.max_store_failures) : ""],
      ...(job.snapshot ? snapshots(job) : []),
      ["Straggling", job.stragglers.map((one) => `RANK ${one.rank} (${slowness(one)})`).join("; ")],
      ["Back-end", job.backend === "rdzv" ? "" : `${job.backend}, only watched`],
    ]);
    put(this.runs, `${orNone(job.run_number)}, round ${orNone(job.round, "none yet")}, WORLD_SIZE ${orNone(job.world_size)}`);
    drawFacts(this.more, [
      ["Began", moment(job.at - job.run_age_ms)],
      ["Identifier", orNone(job.run)],
      ["MASTER", job.master_addr ? `${job.master_addr}:${job.master_port}` : "–"],
    ]);
  }

  drawNodes(job) {
    const seated = job.nodes.filter((node) => node.group_rank !== null);
    // Nodes that are stopping together do so for the job's own reason, and a spare is no trouble.
    const spares = job.nodes.filter((node) => node.state === "spare");
    const others = job.nodes.filter((node) => node.state !== "spare" && (node.group_rank === null || node.state === "away" || node.state === "lost"));
    this.grid.classList.toggle("compact", seated.length > COMPACT);
    keyed(
      this.grid,
      seated,
      (node) => node.group_rank,
      () => h("a", { class: "tile", tabindex: "-1" }, icon("seated"), h("b"), h("span", { class: "id" }), h("small")),
      (element, node) => {
        const from = origins(node);
        const told = `${node.node_id} ${node.state} ${node.rank_first} ${node.local_world_size} ${from}`;
        if (element.told === told) return;
        element.told = told;
        mark(element, "href", nodeLink(node.node_id));
        mark(element, "data-tone", tone(node.state));
        mark(element, "data-state", node.state);
        element.firstChild.firstChild.setAttribute("d", shape(node.state));
        put(element.children[1], node.group_rank);
        put(element.children[2], node.node_id);
        const of = ranks(node.rank_first, node.local_world_size);
        put(element.children[3], [...(of ? [`RANK ${of}`] : []), ...(node.kept || node.warm ? [from] : [])].join(" · "));
        const label = `GROUP_RANK ${node.group_rank}, ${node.node_id}, ${node.state}${of ? `, RANK ${of}` : ""}${from ? `, workers: ${from}` : ""}`;
        mark(element, "title", label);
      },
    );
    if (!this.grid.querySelector('[tabindex="0"]')) this.grid.firstElementChild?.setAttribute("tabindex", "0");
    this.grid.hidden = !seated.length;
    const tally = new Map();
    for (const node of job.nodes) tally.set(node.state, (tally.get(node.state) || 0) + 1);
    keyed(this.legend, [...tally], ([state]) => state, ([state]) => h("span", { class: "chip", "data-tone": tone(state) }, icon(state), h("span")), (element, [state, count]) => put(element.lastChild, `${count} ${state}`));
    for (const [list, some] of [[this.others, others], [this.spares, spares]]) this.drawList(list, some, job);
  }

  /** List nodes, each with why it is in its state. */
  drawList(list, nodes, job) {
    keyed(
      list,
      nodes,
      (node) => node.node_id,
      (node) => h("li", {}, chip(node.state), h("a", { href: nodeLink(node.node_id) }, node.node_id), h("span", { class: "dim" }, age(node.at)), h("span", { class: "why" })),
      (element, node) => {
        element.name = node.node_id;
        element.items = job.reason.items.filter((item) => item.who === node.node_id);
        updateChip(element.firstChild, node.state);
        updateAge(element.children[2].firstChild, job.at - node.state_age_ms);
      },
    );
    list.hidden = !nodes.length;
  }

  /** Show the items of the reason, except those that stand beside their nodes. */
  drawItems(job) {
    const shown = new Set([...this.others.children, ...this.spares.children].map((element) => element.name));
    const items = job.reason.items.filter((item) => !shown.has(item.who));
    keyed(this.items, items, (item) => `${item.who} ${item.state} ${item.cause}`, () => h("li"), (element, item) => (element.item = item));
    this.items.hidden = !items.length;
  }

  /** Make all tiles a single Tab stop, with arrow keys to move between them. */
  move(event) {
    const tiles = [...this.grid.children];
    const at = tiles.indexOf(document.activeElement);
    if (at < 0) return;
    const top = tiles[0].offsetTop;
    const wide = tiles.findIndex((tile) => tile.offsetTop !== top);
    const row = wide < 0 ? tiles.length : wide;
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: row, ArrowUp: -row, Home: -at, End: tiles.length - 1 - at }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    const next = tiles[Math.min(Math.max(at + by, 0), tiles.length - 1)];
    tiles[at].setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
  }

  drawFailure(job) {
    const failure = job.last_failure;
    this.failure.hidden = !failure;
    const told = failure && JSON.stringify([failure.root_cause, failure.others]);
    if (!failure) return;
    if (this.failed === told) return updateAge(this.failedAge, job.at - (failure.age_ms || 0));
    this.failed = told;
    const root = failure.root_cause;
    this.failedAge = age(job.at - (failure.age_ms || 0));
    const how = root.signal !== null ? `signal ${root.signal}` : root.exit_code !== null ? `exit code ${root.exit_code}` : "";
    fillAnew(
      this.failure,
      h("h2", { id: "failure" }, "Last failure ", h("small", {}, this.failedAge, " ago")),
      h("p", { class: "cause" }, icon("failed"), h("b", {}, `RANK ${root.rank}`), " on ", h("a", { href: nodeLink(root.node_id) }, root.node_id), ` (LOCAL_RANK ${root.local_rank}${root.pid ? `, pid ${root.pid}` : ""}${how ? `, ${how}` : ""})`),
      root.message && JSON.stringify(job.reason).includes(JSON.stringify(root.message).slice(1, -1)) ? null : h("p", { class: "message" }, root.message || "it left no message"),
      root.traceback ? null : h("p", { class: "dim" }, "No traceback: put torch's @record on main."),
      root.traceback ? h("details", {}, h("summary", {}, "Traceback"), h("pre", { class: "trace", tabindex: "0", "aria-label": "Traceback" }, root.traceback)) : null,
      failure.others.length
        ? h("details", {}, h("summary", {}, `${counted(failure.others.length, "worker")} failed beside it`), h("ul", {}, failure.others.map((one) => h("li", {}, `RANK ${one.rank} on ${one.node_id}: ${one.message || ""}`))))
        : null,
      this.logs.element.hidden ? null : h("p", {}, h("button", { type: "button", onclick: () => this.logs.show(root.rank, this.rounds.failed()?.number) }, "Read its log")),
    );
  }

  drawSubmission(job) {
    const has = job.submission;
    this.submission.hidden = !has;
    if (!has) return;
    const told = JSON.stringify({ ...has, age_ms: 0 });
    if (this.submitted === told) return;
    this.submitted = told;
    const labels = Object.entries(has.labels).map(([name, value]) => `${name}=${value}`);
    const facts = [
      ["By", orNone(has.submitted_by)],
      ["At", moment(job.at - has.age_ms)],
      ["Priority", String(has.priority)],
      ["GPUs a node", orNone(has.gpus_per_node, "")],
      ["Labels", labels.join(", ") || "none"],
      ["Folder", orNone(has.chdir, "the node's own")],
      ["Placed on", has.placed.join(", ") || "no node yet"],
      ["Before it", has.jobs_before === null ? "" : counted(has.jobs_before, "job")],
    ];
    fillAnew(
      this.submission,
      h("h3", {}, "Submitted"),
      h("pre", { class: "args", tabindex: "0", "aria-label": "Arguments" }, has.args.join(" ")),
      drawFacts(h("dl", { class: "facts" }), facts),
      has.declined.length ? h("ul", { class: "others" }, has.declined.map((one) => h("li", {}, `${one.node_id} declined: ${one.reason}`))) : null,
    );
  }

  drawHistory(events) {
    put(this.historyCount, `${counted(events.length, "event")}${events.length ? `, the last at ${clock(events[events.length - 1].unix_ms)}` : ""}`);
    const rows = events.map((event, at) => ({ ...event, id: `${event.unix_ms} ${event.name} ${event.text} ${at - events.length}` })).reverse();
    const seen = new Map();
    for (const row of rows) {
      // The row is keyed by its text, so that it stays the same when others are added.
      const told = `${row.unix_ms} ${row.name} ${row.text}`;
      seen.set(told, (seen.get(told) || 0) + 1);
      row.id = `${told} ${seen.get(told)}`;
    }
    keyed(this.history, rows, (row) => row.id, (row) => h("tr", {}, h("td", { class: "mono", title: moment(row.unix_ms) }, clock(row.unix_ms)), h("td", { class: "dim" }, row.name), h("td", { class: "why" }, row.text)), () => {});
  }
}

