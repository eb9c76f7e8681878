// All of the page's requests, one function each. The user's token is sent with them if one is needed.

const KEY = "rdzv-token";
const TOKEN = /^[\w.~+/=-]{1,1024}$/;

let token = remembered();

/** The token lasts as long as the tab, and no other site can make the browser send it. */
function remembered() {
  try {
    return sessionStorage.getItem(KEY) || "";
  } catch {
    return "";
  }
}

/** Use this token from now on; return false if it is not a token. */
export function useToken(text) {
  const given = text.trim();
  if (!TOKEN.test(given)) return false;
  token = given;
  try {
    sessionStorage.setItem(KEY, token);
  } catch {
    // In that case it lasts as long as the page.
  }
  return true;
}

const request = (path, options = {}) =>
  fetch(`/api/v1${path}`, { ...options, headers: token ? { Authorization: `Bearer ${token}` } : {} });

const jobPath = (name) => `/jobs/${encodeURIComponent(name)}`;

export const requestServers = () => request("/servers");

export const requestNodes = () => request("/nodes");

export const requestNodeEvents = (name, signal) => request(`/nodes/${encodeURIComponent(name)}/events`, { signal });

export const requestJob = (name) => request(jobPath(name));

/** Request the ledger for a job's run, or for its latest run if `run` is null. */
export const requestLedger = (name, run) => request(`${jobPath(name)}/ledger${run === null ? "" : `?run=${run}`}`);

/** Request the picture of a job's last restarts, an SVG. Only XMLHttpRequest parses one where text may not become HTML. */
export const requestRestarts = (name) =>
  new Promise((take, refuse) => {
    const asked = new XMLHttpRequest();
    asked.open("GET", `/api/v1${jobPath(name)}/restarts`);
    if (token) asked.setRequestHeader("Authorization", `Bearer ${token}`);
    asked.responseType = "document";
    asked.onload = () => take(asked.status === 200 ? document.importNode(asked.responseXML.documentElement, true) : null);
    asked.onerror = refuse;
    asked.send();
  });

/** Request a job's logs; `query` contains the API parameters. */
export const requestLogs = (name, query, signal) => request(`${jobPath(name)}/logs?${query}`, { signal });

/** Request the stacks captured in a round. */
export const requestStacks = (name, round, signal) => request(`${jobPath(name)}/stacks?round=${round}`, { signal });

/** Capture the stacks of all of a job's workers now. */
export const takeStacks = (name, signal) => request(`${jobPath(name)}/stacks`, { method: "POST", signal });

/** Request a report on how all jobs spent the last `hours`. */
export const requestReport = (hours, signal) => request(`/report?hours=${hours}`, { signal });

/** Open the stream for one job, or for the fleet if `name` is null. */
export const openStream = (name) => new Source(name === null ? "/stream" : `/stream?job=${encodeURIComponent(name)}`);

/** A replacement for EventSource, which cannot send a token. The owner must reopen it. */
class Source {
  constructor(path) {
    this.takes = new Map();
    this.onerror = () => {};
    this.closed = new AbortController();
    this.read(path);
  }

  addEventListener(name, take) {
    this.takes.set(name, take);
  }

  close() {
    this.closed.abort();
  }

  async read(path) {
    try {
      const answer = await request(path, { signal: this.closed.signal });
      if (answer.ok) await this.takeAll(answer.body.pipeThrough(new TextDecoderStream()).getReader());
    } catch {
      // A separate request finds out why it ended.
    }
    if (!this.closed.signal.aborted) this.onerror();
  }

  async takeAll(words) {
    let waiting = "";
    for (;;) {
      const { value, done } = await words.read();
      if (done) return;
      const events = (waiting + value).split("\n\n");
      waiting = events.pop();
      for (const event of events) this.take(event);
    }
  }

  take(event) {
    let name = "message";
    const data = [];
    for (const line of event.split("\n")) {
      if (line.startsWith("event: ")) name = line.slice(7);
      else if (line.startsWith("data: ")) data.push(line.slice(6));
    }
    try {
      if (data.length && !this.closed.signal.aborted) this.takes.get(name)?.({ data: data.join("\n") });
    } catch (error) {
      reportError(error);
    }
  }
}
