// How a run spent its time: a band over time, and a table with the same data.

import { fillAnew, fold, h, keyed, mark, put, s, table } from "./dom.js";
import { requestLedger } from "./requests.js";
import { clock, counted, hours, moment, orNone, took } from "./words.js";

const WIDE = 1000;
const HIGH = 30;
const LEAST = 0.25; // Narrower intervals are merged with the next ones, in the longest one's color.
const REST = 2000; // The minimum number of milliseconds between requests, however many events arrive.

/** Group intervals so that each group is visible. */
export function together(intervals, least) {
  const groups = [];
  for (const one of intervals) {
    const last = groups[groups.length - 1];
    if (last && last.until - last.from < least) {
      last.until = one.until_unix_ms;
      if (one.until_unix_ms - one.from_unix_ms > last.most.until_unix_ms - last.most.from_unix_ms) last.most = one;
    } else groups.push({ from: one.from_unix_ms, until: one.until_unix_ms, most: one });
  }
  return groups;
}

const times = (count) => (count === 1 ? "once" : `${count} times`);

function about(one) {
  const owed = one.cause ? `: ${one.cause}${one.node_id ? ` on ${one.node_id}` : ""}` : "";
  return `${one.phase}, ${took(one.until_unix_ms - one.from_unix_ms)} from ${clock(one.from_unix_ms)}${one.round === null ? "" : `, round ${one.round}`}${owed}`;
}

export class Ledger {
  /** `alongside` reads what else follows from the history, whenever the ledger is read. */
  constructor(name, alongside) {
    this.name = name;
    this.alongside = alongside;
    this.share = h("p", { class: "big" });
    this.trained = h("p", { class: "dim" });
    this.note = h("p", { class: "dim" });
    this.runs = h("select", { "aria-label": "Run", onchange: () => this.choose() });
    this.band = s("svg", { class: "band", viewBox: `0 0 ${WIDE} ${HIGH}`, preserveAspectRatio: "none", role: "img", "aria-label": "Phases over time; the table below says the same" });
    this.ends = h("p", { class: "dim band-ends", "aria-hidden": "true" });
    this.rows = h("tbody");
    this.costs = h("ul", { class: "others" });
    this.comebacks = h("p", { class: "dim" });
    this.cost = h("section", { class: "card cost", "aria-labelledby": "cost", hidden: true }, h("h2", { id: "cost" }, "Cost so far"), this.share, this.trained, this.costs);
    const heads = ["Phase", "Time", "Share"].map((head, at) => h("th", { scope: "col", class: at ? "n" : null }, head));
    this.element = fold("ledger", "Where the time went", null, this.runs, this.note, this.band, this.ends, table("Time by phase", heads, this.rows, false), this.comebacks, h("p", { class: "dim" }, h("a", { href: "#/report" }, "What changes would have saved"), ", in all jobs."));
    this.element.hidden = true;
    this.number = null; // The last run, until another is selected.
    this.seen = "";
  }

  close() {
    this.closed = true;
    clearTimeout(this.timer);
  }

  /** Request it again if anything has happened. */
  draw(events, job) {
    const last = events[events.length - 1];
    const seen = `${job.run} ${events.length} ${last?.unix_ms} ${last?.name}`;
    // A job in torch's own store has no history, and therefore no ledger.
    if (seen === this.seen || !last) return;
    this.seen = seen;
    this.read();
  }

  choose() {
    const chosen = Number(this.runs.value);
    this.number = this.runs.selectedIndex === this.runs.options.length - 1 ? null : chosen;
    this.read();
  }

  async read() {
    if (this.busy) {
      this.again = true;
      return;
    }
    this.busy = true;
    this.again = false;
    try {
      const answer = await requestLedger(this.name, this.number);
      const told = await answer.json();
      if (!this.closed) {
        this.cost.hidden = this.element.hidden = !answer.ok;
        if (answer.ok) this.show(told);
      }
      await this.alongside();
    } catch {
      // The line above shows that the server is away; it is asked again once it is back.
      this.seen = "";
    }
    this.timer = setTimeout(() => {
      this.busy = false;
      if (this.again && !this.closed) this.read();
    }, REST);
  }

  show({ ledger, run_numbers: numbers }) {
    this.ledger = ledger;
    this.at = Date.now();
    keyed(this.runs, numbers, (number) => number, (number) => h("option", { value: number }, `run ${number}`), () => {});
    this.runs.value = String(ledger.run_number ?? "");
    this.runs.hidden = numbers.length < 2;
    const notes = [];
    if (!ledger.steps_reported && ledger.phases.training) notes.push("No progress is reported: training counts from the first collective or, where none is recorded, from the start of the workers, so the share of training is an upper bound.");
    if (ledger.run_number === null) notes.push("The beginning of this run is no longer in the history, so it is not counted.");
    put(this.note, notes.join(" "));
    const costs = ledger.costs.slice(0, 3);
    fillAnew(
      this.costs,
      costs.map((cost) => h("li", {}, h("b", {}, `${cost.cause || "the start"}${cost.node_id ? ` on ${cost.node_id}` : ""}`), h("span", { class: "dim" }, `${cost.cause ? `${times(cost.times)}, ` : ""}${took(cost.ms)}, ${hours(cost.node_ms)} node-hours`))),
    );
    this.costs.hidden = !costs.length;
    const back = ledger.comebacks.map((one) => `${took(one.ms / one.times)} with workers ${one.way} (${times(one.times)})`);
    put(this.comebacks, back.length ? `Until it trained again: ${back.join(", ")}.` : "");
    this.tick();
  }

  /** Extend a run that is still open in its current phase, until the next event. */
  tick() {
    const ledger = this.ledger;
    if (!ledger) return;
    const more = ledger.result || !ledger.intervals.length ? 0 : Math.max(Date.now() - this.at, 0);
    const intervals = [...ledger.intervals];
    const phases = { ...ledger.phases };
    if (more) {
      const last = intervals.pop();
      intervals.push({ ...last, until_unix_ms: last.until_unix_ms + more });
      phases[last.phase] += more;
    }
    const whole = ledger.wall_ms + more;
    const percent = (ms) => (whole ? `${((100 * ms) / whole).toFixed(1)} %` : "–");
    const most = !ledger.steps_reported && phases.training ? "at most " : "";
    put(this.share, `Goodput ${most}${percent(phases.training)}`);
    const lost = ledger.costs.reduce((sum, cost) => sum + cost.node_ms, 0);
    put(this.trained, `${took(phases.training)} of ${took(whole)} were training; ${hours(lost)} node-hours were not.${ledger.steps_redone ? ` ${counted(ledger.steps_redone, "step")} redone.` : ""}`);
    const scale = whole ? WIDE / whole : 0;
    keyed(
      this.band,
      together(intervals, scale ? LEAST / scale : 0),
      (group) => group.from,
      () => s("rect", { y: 0, height: HIGH }, s("title")),
      (rect, group) => {
        mark(rect, "x", ((group.from - ledger.from_unix_ms) * scale).toFixed(2));
        mark(rect, "width", Math.max((group.until - group.from) * scale, LEAST).toFixed(2));
        mark(rect, "data-phase", group.most.phase);
        put(rect.firstChild, about(group.most));
      },
    );
    fillAnew(this.ends, h("span", {}, moment(ledger.from_unix_ms)), h("span", {}, orNone(ledger.result, "now")));
    keyed(
      this.rows,
      Object.entries(phases).filter(([, ms]) => ms > 0),
      ([phase]) => phase,
      ([phase]) => h("tr", {}, h("th", { scope: "row" }, h("i", { class: "swatch", "data-phase": phase }), phase), h("td", { class: "n" }), h("td", { class: "n" })),
      (row, [, ms]) => {
        put(row.children[1], took(ms));
        put(row.children[2], percent(ms));
      },
    );
  }
}
