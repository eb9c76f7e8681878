// A run's rounds, as a timeline and as a table with the same data.

import { h, icon, keyed, mark, put, s, shape, tone } from "./dom.js";
import { clock, duration, moment, took } from "./words.js";

const WIDE = 1000;
const HIGH = 44;
const LEAST = 7; // The width of rounds that took no time, so that they are still visible.

/** Read a run's rounds from its history: when each began and ended, and why. A round that follows another has the stages
 * of that recovery: when all had stopped, when it was complete, when it made its first step, and which steps were lost. */
export function roundsOf(events, run) {
  const rounds = [];
  let last = null;
  for (const event of events) {
    const is = event.fields;
    if (!is || (event.run !== null && event.run !== run)) continue;
    if (event.name === "RoundCompleted" || event.name === "RoundAdopted") {
      const stopped = last && last.settled !== null ? [["stop", last.settled - last.ended], ["form", event.unix_ms - last.settled]] : [];
      last = { number: is.round, began: event.unix_ms, ended: null, settled: null, cause: "", reason: "", charge: "", workers: "", steps: stopped, world: is.world_size ?? null };
      rounds.push(last);
    } else if (event.name === "WorkersStarted" && last?.number === is.round) {
      last.workers = [[is.kept, "kept"], [is.hot, "hot"], [is.warm, "warm"], [is.cold, "cold"]].filter(([count]) => count).map(([count, how]) => `${count} ${how}`).join(", ");
    } else if (event.name === "FirstStepMade" && last?.number === is.round && last.steps.length === 2) {
      last.first = event.unix_ms - is.age_ms;
      last.steps.push(["first step", last.first - last.began]);
    } else if (event.name === "LostStepsRedone" && last?.number === is.round && last.first) {
      last.steps.push(["redo", event.unix_ms - is.age_ms - last.first]);
    } else if (event.name === "RoundEnded" && last) {
      Object.assign(last, { ended: event.unix_ms, cause: is.cause, reason: is.reason });
    } else if (event.name === "RoundSettled" && last) {
      Object.assign(last, { settled: event.unix_ms, cause: is.cause, reason: is.reason, charge: is.max_restarts === null ? "" : `${is.restarts} of ${is.max_restarts}` });
    } else if (event.name === "RunEnded" && last && last.ended === null) {
      Object.assign(last, { ended: event.unix_ms, cause: is.result, reason: is.reason });
    }
  }
  return rounds;
}

export class Rounds {
  constructor() {
    this.line = s("svg", { class: "line", viewBox: `0 0 ${WIDE} ${HIGH}`, preserveAspectRatio: "none", role: "img", "aria-label": "Rounds over time; the table below says the same" });
    this.labels = h("div", { class: "labels", "aria-hidden": "true" });
    this.share = h("p", { class: "dim" });
    this.rows = h("tbody");
    this.head = h("thead", {}, h("tr", {}, ["Round", "Began", "Ran for", "WORLD_SIZE", "Ended by", "Why", "Restarts spent", "Workers", "Came after"].map((name) => h("th", { scope: "col" }, name))));
    this.element = h(
      "section",
      { class: "card wide rounds", "aria-labelledby": "rounds" },
      h("h2", { id: "rounds" }, "Rounds"),
      this.share,
      h("div", { class: "timeline" }, this.line, this.labels),
      h("div", { class: "scroll" }, h("table", {}, h("caption", { class: "unseen" }, "Rounds, newest first"), this.head, this.rows)),
    );
    this.rounds = [];
  }

  draw(events, job) {
    this.job = job;
    this.rounds = roundsOf(events, job.run);
    this.element.hidden = !this.rounds.length;
    if (!this.rounds.length) return;
    keyed(
      this.rows,
      [...this.rounds].reverse(),
      (round) => round.number,
      (round) =>
        h("tr", {}, h("th", { scope: "row" }, round.number), h("td", { class: "mono", title: moment(round.began) }, clock(round.began)), h("td", { class: "n", "data-of": "ran for" }), h("td", { class: "n", "data-of": "WORLD_SIZE" }, round.world || ""), h("td", { class: "st" }, h("span", { class: "chip" }, icon("running"), h("span"))), h("td", { class: "why" }), h("td", { "data-of": "restarts spent" }), h("td", { "data-of": "workers" }), h("td", { "data-of": "came after", title: "Of the round before: until all had stopped; of this one: until it was complete, until its first step, until lost steps were made again" })),
      (row, round) => {
        row.round = round;
        const state = round.ended === null ? "running" : round.cause;
        const told = row.children[4].firstChild;
        mark(told, "data-tone", tone(state));
        told.firstChild.firstChild.setAttribute("d", shape(state));
        put(told.lastChild, state);
        put(row.children[5], this.why(round));
        put(row.children[6], round.charge);
        put(row.children[7], round.workers);
        put(row.children[8], round.steps.map(([what, ms]) => `${what} ${took(ms)}`).join(", "));
      },
    );
    this.drawLine();
    this.tick();
  }

  /** Return why a round ended, without what the job's reason or its last failure says already. */
  why(round) {
    const told = (item) => item.cause.endsWith(round.reason) || `${item.who}: ${item.cause}` === round.reason;
    if (this.job.reason.items.some(told)) return "";
    const failed = this.rounds.findLast((one) => one.cause === "worker failure");
    const message = this.job.last_failure?.root_cause.message;
    return round === failed && message ? round.reason.replace(`: ${message}`, "") : round.reason;
  }

  /** Estimate the server's clock, assuming that its latest message was sent when it arrived. */
  now() {
    const live = this.rounds[this.rounds.length - 1];
    return live && live.ended === null ? Math.max(Date.now(), live.began) : Math.max(...this.rounds.map((round) => round.ended || 0), this.ends());
  }

  ends() {
    return ["succeeded", "failed", "stopped"].includes(this.job.state) ? 0 : Date.now();
  }

  drawLine() {
    const now = this.now();
    const parts = [];
    let before = null;
    for (const round of this.rounds) {
      if (before !== null) parts.push({ gap: true, ms: Math.max(round.began - before.ended, 0), cause: before.cause, round: before });
      parts.push({ gap: false, ms: Math.max((round.ended ?? now) - round.began, 0), round });
      before = round;
    }
    if (before.ended !== null && now > before.ended) parts.push({ gap: true, ms: now - before.ended, cause: before.cause, round: before });
    const whole = parts.reduce((sum, part) => sum + part.ms, 0) || 1;
    const room = Math.max(WIDE - LEAST * parts.length, 0);
    const scale = parts.length * LEAST > WIDE ? WIDE / (parts.length * LEAST) : 1;
    let x = 0;
    for (const part of parts) {
      part.x = x;
      part.wide = (LEAST + (room * part.ms) / whole) * scale;
      x += part.wide;
    }
    this.parts = parts;
    const name = (part) => `${part.gap ? "after" : "round"} ${part.round.number}`;
    keyed(
      this.line,
      parts,
      name,
      (part) => s("g", { class: part.gap ? "gap" : "ran" }, s("title"), s("rect", { y: part.gap ? HIGH / 2 - 3 : 6, height: part.gap ? 6 : HIGH - 12, rx: part.gap ? 0 : 3 })),
      (element, part) => {
        const rect = element.lastChild;
        mark(rect, "x", part.x.toFixed(1));
        mark(rect, "width", Math.max(part.wide - 1, 1).toFixed(1));
        mark(element, "data-tone", part.gap ? tone(part.cause) : part.round.ended === null ? "good" : "idle");
        put(element.firstChild, part.gap ? `${part.round.cause}: ${part.round.reason}; ${took(part.ms)} until the next round` : `round ${part.round.number}: ${duration(part.ms)}`);
      },
    );
    keyed(
      this.labels,
      parts.filter((part) => part.gap || part.wide > 40),
      name,
      (part) => h("span", { class: part.gap ? "why-mark" : "round-mark" }, part.gap ? icon(part.cause) : String(part.round.number)),
      (element, part) => {
        element.style.left = `${((part.x + part.wide / 2) / WIDE) * 100}%`;
        mark(element, "data-tone", part.gap ? tone(part.cause) : part.round.ended === null ? "good" : "idle");
        if (part.gap) element.firstChild.firstChild.setAttribute("d", shape(part.cause));
      },
    );
  }

  tick() {
    if (!this.rounds.length) return;
    const now = this.now();
    let ran = 0;
    for (const round of this.rounds) ran += (round.ended ?? now) - round.began;
    const whole = now - this.rounds[0].began;
    put(this.share, whole > 0 ? `A round was live for ${((100 * ran) / whole).toFixed(ran === whole ? 0 : 1)} % of the ${duration(whole)} since round ${this.rounds[0].number} began.` : "");
    for (const row of this.rows.children) put(row.children[2], duration((row.round.ended ?? now) - row.round.began));
    const last = this.rounds[this.rounds.length - 1];
    if (last.ended === null || this.ends()) this.drawLine();
  }
}
