// A run's rounds: a picture of the last restarts, which the server draws, and a table of all.

import { fold, h, icon, keyed, mark, put, shape, table, tone } from "./dom.js";
import { requestRestarts } from "./requests.js";
import { clock, duration, moment, took } from "./words.js";

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
  constructor(name) {
    this.name = name;
    this.picture = h("div", { class: "restarts" });
    this.share = h("p", { class: "dim" });
    this.rows = h("tbody");
    const heads = ["Round", "Began", "Ran for", "WORLD_SIZE", "Ended by", "Why", "Restarts spent", "Workers", "Came after"].map((head) => h("th", { scope: "col" }, head));
    this.card = h("section", { class: "card wide", "aria-labelledby": "restarts", hidden: true }, h("h2", { id: "restarts" }, "The last restarts"), this.picture);
    this.element = fold("rounds", "Rounds", this.share, table("Rounds, newest first", heads, this.rows));
    this.element.classList.add("rounds");
    this.rounds = [];
  }

  async readPicture() {
    if (this.card.hidden) return;
    const picture = await requestRestarts(this.name);
    if (picture) this.picture.replaceChildren(picture);
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
    this.card.hidden = this.rounds.length < 2 && this.rounds[0].ended === null;
    this.tick();
  }

  /** Return why a round ended, without what the job's reason or its last failure says already. */
  why(round) {
    const told = (item) => item.cause.endsWith(round.reason) || `${item.who}: ${item.cause}` === round.reason;
    if (this.job.reason.items.some(told)) return "";
    const message = this.job.last_failure?.root_cause.message;
    return round === this.failed() && message ? round.reason.replace(`: ${message}`, "") : round.reason;
  }

  /** Return the last round that a failed worker has ended. */
  failed() {
    return this.rounds.findLast((one) => one.cause === "worker failure");
  }

  /** Estimate the server's clock, assuming that its latest message was sent when it arrived. */
  now() {
    const live = this.rounds[this.rounds.length - 1];
    return live && live.ended === null ? Math.max(Date.now(), live.began) : Math.max(...this.rounds.map((round) => round.ended || 0), this.ends());
  }

  ends() {
    return ["succeeded", "failed", "stopped"].includes(this.job.state) ? 0 : Date.now();
  }

  tick() {
    if (!this.rounds.length) return;
    const now = this.now();
    let ran = 0;
    for (const round of this.rounds) ran += (round.ended ?? now) - round.began;
    const whole = now - this.rounds[0].began;
    put(this.share, whole > 0 ? `A round was live for ${((100 * ran) / whole).toFixed(ran === whole ? 0 : 1)} % of the ${duration(whole)} since round ${this.rounds[0].number} began.` : "");
    for (const row of this.rows.children) put(row.children[2], duration((row.round.ended ?? now) - row.round.began));
  }
}
