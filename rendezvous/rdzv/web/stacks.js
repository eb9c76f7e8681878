// Hung workers, and the stacks of all of a round's workers, loaded on request.

import { chip, fillAnew, fold, h, keyed, put } from "./dom.js";
import { requestStacks, takeStacks } from "./requests.js";
import { clock, counted, rankList } from "./words.js";

const GROUPS = 16; // The maximum number of places in the code to show; rdzvctl stacks --raw has all of them.
const FRAMES = 40;

/** Return a run's hangs from its history: which workers are hung now, and which round has stacks. */
export function hangsOf(events, run) {
  let hung = null;
  let hanging = new Map();
  let taken = null;
  for (const event of events) {
    if (event.run !== run) continue;
    if (event.name === "WorkersHang") {
      hanging.set(event.fields?.node_id, event.text);
      hung = { over: false };
    } else if (event.name === "StacksTaken") {
      if (event.fields) taken = { round: event.fields.round, summary: event.fields.summary, at: event.unix_ms };
    } else if (["HangOver", "RoundEnded", "RunEnded"].includes(event.name) && hung) {
      hung = { over: true, wentOn: event.name === "HangOver" };
      hanging = new Map();
    }
  }
  return { hung, hanging: [...hanging], taken };
}

export class Stacks {
  constructor(name) {
    this.name = name;
    this.chip = chip("went on");
    this.list = h("ul", { class: "others hanging" }); // Stands at the top of the page.
    this.taken = h("span", { class: "dim taken" });
    this.button = h("button", { type: "button", onclick: () => this.read() });
    this.take = h("button", { type: "button", onclick: () => this.takeNow() }, "Take stacks and collectives now");
    this.said = h("p", { class: "dim", role: "status" });
    this.groups = h("div", { class: "groups" });
    this.element = fold("stacks", "Stacks", [this.chip, this.taken], h("p", { class: "fields" }, this.button, this.take), this.said, this.groups);
    this.element.hidden = true;
  }

  close() {
    this.reading?.abort();
  }

  /** Return the workers that are hung now, with a line for each of their nodes. */
  draw(events, job) {
    const { hung, hanging, taken } = hangsOf(events, job.run);
    this.take.hidden = job.backend !== "rdzv" || job.state !== "running";
    this.element.hidden = !hung && !taken && this.take.hidden && !this.shown;
    this.chip.hidden = !hung?.wentOn;
    keyed(this.list, hanging, ([node]) => node, () => h("li", {}, chip("hangs"), h("span", { class: "why" })), (element, [, text]) => put(element.lastChild, text));
    this.list.hidden = !hanging.length;
    this.taken.hidden = this.button.hidden = !taken;
    if (taken) {
      put(this.taken, `At ${clock(taken.at)}: ${taken.summary}`);
      put(this.button, `Show the stacks of round ${taken.round}`);
      // The stacks that are open were captured earlier.
      if (this.shown && this.shown !== "now" && this.shown !== `${taken.round} ${taken.at}`) this.read(taken);
    }
    this.last = taken;
    return hanging.map(([, text]) => text);
  }

  async read(taken = this.last) {
    if (await this.load((signal) => requestStacks(this.name, taken.round, signal), "Reading.")) this.shown = `${taken.round} ${taken.at}`;
  }

  async takeNow() {
    this.take.disabled = true;
    if (await this.load((signal) => takeStacks(this.name, signal), "Asking every worker: it is stopped for some milliseconds.")) this.shown = "now";
    this.take.disabled = false;
  }

  async load(request, meanwhile) {
    this.reading?.abort();
    const reading = (this.reading = new AbortController());
    put(this.said, meanwhile);
    try {
      const answer = await request(reading.signal);
      const report = await answer.json();
      put(this.said, answer.ok ? `Of round ${report.round}.` : report.message);
      if (answer.ok) this.show(report);
      return answer.ok;
    } catch (error) {
      if (!reading.signal.aborted) put(this.said, `It cannot be read: ${error.message}. Ask again.`);
      return false;
    }
  }

  show(report) {
    const one = new Map(report.stacks.map((stack) => [stack.rank, stack]));
    const groups = report.groups.slice(0, GROUPS);
    const left = report.groups.slice(GROUPS);
    const workers = left.reduce((sum, group) => sum + group.ranks.length, 0);
    fillAnew(
      this.groups,
      report.cause ? h("p", { class: "cause" }, h("strong", {}, report.cause.sentence), h("ul", { class: "others" }, report.cause.details.map((detail) => h("li", {}, detail)))) : null,
      groups.map((group) => {
        const stack = one.get(group.ranks.find((rank) => one.has(rank)));
        return h("details", { open: groups.length <= 4 }, h("summary", {}, `RANK ${rankList(group.ranks)} ${group.where}`), stack ? stackOf(stack) : null);
      }),
      left.length ? h("p", { class: "dim" }, `${counted(workers, "worker")} at ${left.length} other places: rdzvctl stacks --raw shows them`) : null,
      report.silent.map((node) => h("p", {}, `${node.node_id}: ${node.reason}`)),
    );
  }
}

function stackOf(stack) {
  const main = stack.threads.find((thread) => thread.main) || stack.threads[0];
  const frames = main ? main.frames : [];
  const lines = frames.slice(0, FRAMES).map((frame) => `${frame.name} (${frame.file}${frame.line === null ? "" : `:${frame.line}`})`);
  if (frames.length > FRAMES) lines.push(`... ${frames.length - FRAMES} frames more`);
  if (!frames.length) lines.push("(no Python frames)");
  lines.push(...stack.kernel.map((place) => `in the kernel: ${place}`), ...(stack.note ? [stack.note] : []));
  lines.push(...stack.collectives.map(recordOf), ...(stack.no_record ? [`no record of its collectives: ${stack.no_record}`] : []));
  const who = `RANK ${stack.rank} on ${stack.node_id}, LOCAL_RANK ${stack.local_rank}, pid ${stack.pid}${stack.state ? `, state ${stack.state}` : ""}`;
  return h("div", {}, h("p", { class: "dim" }, who), h("pre", { class: "trace", tabindex: "0", "aria-label": `Stack of RANK ${stack.rank}` }, lines.join("\n")));
}

function recordOf(record) {
  const last = record.latest.at(-1);
  const name = `group ${record.group} ${record.description}`.trim();
  return last ? `${name}: last ${last.operation} #${last.sequence} ${last.sizes} (${last.done ? "done" : "waits"})` : `${name}: it has entered no collective`;
}
