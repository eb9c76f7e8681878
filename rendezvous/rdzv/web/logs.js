// The output of a job's workers: the end of it, or new output as it arrives.

import { fold, h, put } from "./dom.js";
import { requestLogs } from "./requests.js";

const MOST = 400000; // The number of characters kept from a followed log.

export class LogView {
  constructor(name) {
    this.name = name;
    this.rank = h("input", { id: "log-rank", inputmode: "numeric", pattern: "[0-9]*", value: "0", placeholder: "all", size: "6" });
    this.round = h("input", { id: "log-round", inputmode: "numeric", pattern: "[0-9]*", placeholder: "last", size: "6" });
    this.tail = h("select", { id: "log-tail" }, ["50", "200", "1000", "5000"].map((count) => h("option", { value: count, selected: count === "200" }, count)));
    this.search = h("input", { id: "log-search", type: "search", placeholder: "any text", autocomplete: "off", spellcheck: "false" });
    this.follow = h("input", { id: "log-follow", type: "checkbox" });
    this.said = h("p", { class: "dim", role: "status" });
    this.text = h("pre", { class: "log", tabindex: "0", role: "log", "aria-live": "off", "aria-label": "What the workers have written" });
    const field = (label, input) => h("label", { for: input.id }, label, input);
    this.form = h(
      "form",
      { class: "fields", onsubmit: (event) => this.read(event) },
      field("RANK", this.rank),
      field("round", this.round),
      field("lines", this.tail),
      field("with", this.search),
      h("label", { class: "check", for: "log-follow" }, this.follow, "follow"),
      (this.button = h("button", { type: "submit" }, "Read")),
    );
    this.follow.addEventListener("change", () => this.read());
    this.element = fold("logs", "Logs", null, this.form, this.said, this.text);
    this.element.classList.add("logs");
    this.text.hidden = true;
    // Nodes are queried only when the user opens the logs.
    this.seen = new IntersectionObserver((found) => {
      if (!found.some((one) => one.isIntersecting)) return;
      this.seen.disconnect();
      this.read();
    });
    put(this.said, "An empty RANK reads all of them. Workers launched with --redirects=3 or --tee=3 have logs.");
  }

  close() {
    this.seen.disconnect();
    this.reading?.abort();
  }

  /** Hide the logs of a watched job, which has none here, and of a job without a round, which has none yet. */
  note(job) {
    this.element.hidden = job.backend !== "rdzv" || job.round === null;
    if (!this.element.hidden && !this.reading) this.seen.observe(this.form);
  }

  /** Open the log of one RANK in a round. */
  show(rank, round) {
    this.rank.value = rank;
    this.round.value = round ?? "";
    this.element.firstChild.open = true;
    this.element.scrollIntoView();
    this.seen.disconnect();
    this.read();
  }

  async read(event) {
    event?.preventDefault();
    this.reading?.abort();
    const reading = (this.reading = new AbortController());
    const query = new URLSearchParams({ tail: this.tail.value });
    for (const [name, input] of [["rank", this.rank], ["round", this.round]]) if (input.value.trim()) query.set(name, input.value.trim());
    if (this.search.value) query.set("contains", this.search.value);
    if (this.follow.checked) query.set("follow", "true");
    put(this.said, "Reading.");
    try {
      const answer = await requestLogs(this.name, query, reading.signal);
      if (!answer.ok) {
        put(this.said, (await answer.json()).message);
        return;
      }
      this.text.hidden = false;
      put(this.text, "");
      const words = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      put(this.said, this.follow.checked ? "Following." : "");
      for (;;) {
        const { value, done } = await words.read();
        if (done || reading.signal.aborted) break;
        this.append(value);
      }
      if (reading.signal.aborted) return;
      const at = new Date().toLocaleTimeString([], { hour12: false });
      put(this.said, this.text.textContent ? `As of ${at}.` : this.search.value ? `None of the last ${this.tail.value} lines of a file has it.` : "Nothing was written.");
    } catch (error) {
      if (!reading.signal.aborted) put(this.said, `It cannot be read: ${error.message}. Read again.`);
    }
  }

  append(text) {
    const element = this.text;
    const below = element.scrollHeight - element.scrollTop - element.clientHeight < 40;
    if (element.lastChild) element.lastChild.appendData(text);
    else element.append(text);
    const node = element.lastChild;
    if (node.length > MOST) node.deleteData(0, node.data.indexOf("\n", node.length - MOST) + 1);
    if (below) element.scrollTop = element.scrollHeight;
  }
}
