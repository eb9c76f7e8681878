// The progress of a job's workers: the furthest step over the course of the run, and how far each RANK is behind.

import { age, fillAnew, h, mark, put, s, updateAge } from "./dom.js";
import { clock, counted, moment, rankList } from "./words.js";

const WIDE = 1000;
const HIGH = 120;
const STEADY = 60000; // In ms: after this, and after several steps, the rate of a silent worker is not shown.
const DEEP = 40; // The height of the bars for steps behind.

/** Return a run's steps from its history, as `[time, step]`, with null where a round ended. */
export function stepsOf(events, run) {
  const points = [];
  for (const event of events) {
    const is = event.fields;
    if (!is || event.run !== run) continue;
    const at = event.unix_ms - (is.age_ms || 0);
    if (event.name === "FirstStepMade" || event.name === "LostStepsRedone") points.push([at, is.step]);
    else if (event.name === "LastStepMade") points.push([at, is.step], null);
  }
  return points;
}

export class Progress {
  constructor() {
    this.steps = h("p", { class: "big" });
    this.detail = h("p", { class: "dim" });
    this.said = age(null);
    this.line = s("svg", { class: "steps", viewBox: `0 0 ${WIDE} ${HIGH}`, preserveAspectRatio: "none", role: "img" }, s("path"));
    this.ends = h("p", { class: "dim band-ends", "aria-hidden": "true" });
    this.lag = s("svg", { class: "lag", viewBox: `0 0 ${WIDE} ${DEEP}`, preserveAspectRatio: "none", role: "img" });
    this.scale = h("p", { class: "dim band-ends", "aria-hidden": "true" });
    this.element = h("section", { class: "card progress", "aria-labelledby": "progress", hidden: true }, h("h2", { id: "progress" }, "Progress"), this.steps, this.detail, this.line, this.ends, this.lag, this.scale, h("p", { class: "dim" }, "last reported ", this.said, " ago"));
  }

  draw(events, job) {
    const said = job.progress;
    this.element.hidden = !said.length;
    if (!said.length) return;
    // Nodes last reported at different times; the server has compared them as of a single time.
    const most = Math.max(...said.map((one) => one.step));
    const behind = Math.max(...said.map((one) => one.behind));
    const slowest = said.filter((one) => one.behind === behind).map((one) => one.rank);
    this.job = job;
    this.of = `step ${(most - behind).toLocaleString("en")}${behind ? `–${most.toLocaleString("en")}` : ""}`;
    this.tick();
    put(this.detail, behind ? `slowest: RANK ${rankList(slowest, 4)}, ${counted(behind, "step")} behind` : `all ${counted(said.length, "worker")} in step`);
    updateAge(this.said, job.at - Math.min(...said.map((one) => one.age_ms)));
    this.drawLine(events, job, most);
    this.drawLag(said, behind);
  }

  /** Show the slowest rate, except of workers that have been silent for several steps. */
  tick() {
    if (this.element.hidden || !this.job) return;
    const more = Date.now() - this.job.at;
    const silent = (one) => one.age_ms + more > STEADY && (one.rate * (one.age_ms + more)) / 1000 > 3;
    const rates = this.job.progress.filter((one) => one.rate !== null && !silent(one)).map((one) => one.rate);
    const rate = rates.length ? Math.min(...rates) : null;
    put(this.steps, `${this.of}${rate === null ? "" : `, ${rate.toFixed(rate < 10 ? 2 : 1)} steps/s`}`);
  }

  /** Draw from step 0 at the bottom to the furthest step ever at the top. */
  drawLine(events, job, most) {
    const points = [...stepsOf(events, job.run), [job.at, most]];
    const made = points.filter(Boolean);
    const [from, until] = [made[0][0], made[made.length - 1][0]];
    this.line.toggleAttribute("hidden", made.length < 2 || until <= from);
    this.ends.hidden = this.line.hasAttribute("hidden");
    if (this.ends.hidden) return;
    const top = Math.max(...made.map(([, step]) => step), 1);
    let path = "";
    let next = "M";
    for (const point of points) {
      if (!point) {
        next = "M";
        continue;
      }
      const x = (WIDE * Math.max(point[0] - from, 0)) / (until - from);
      path += `${next}${x.toFixed(1)} ${(HIGH - ((HIGH - 2) * point[1]) / top).toFixed(1)}`;
      next = "L";
    }
    mark(this.line.firstChild, "d", path);
    mark(this.line, "aria-label", `Step over time: the bottom is step 0, the top step ${top}`);
    fillAnew(this.ends, h("span", { title: moment(from) }, clock(from)), h("span", {}, `steps 0 to ${top.toLocaleString("en")}`), h("span", {}, clock(until)));
  }

  /** Draw a bar for each RANK to show how far it is behind; the leading RANK has no bar. */
  drawLag(said, behind) {
    this.lag.toggleAttribute("hidden", !behind);
    this.scale.hidden = !behind;
    if (!behind) return;
    const wide = WIDE / said.length;
    fillAnew(
      this.lag,
      said.map((one, at) => {
        const high = (DEEP * one.behind) / behind;
        return s("rect", { x: (at * wide).toFixed(2), width: (wide * 0.9).toFixed(2), y: (DEEP - high).toFixed(2), height: high.toFixed(2) }, s("title", {}, `RANK ${one.rank}: step ${one.step.toLocaleString("en")}, ${counted(one.behind, "step")} behind`));
      }),
    );
    mark(this.lag, "aria-label", `Steps behind by RANK, at most ${behind}`);
    fillAnew(this.scale, h("span", {}, `RANK ${said[0].rank}`), h("span", {}, `behind: from 0 to ${counted(behind, "step")}`), h("span", {}, `RANK ${said[said.length - 1].rank}`));
  }
}
