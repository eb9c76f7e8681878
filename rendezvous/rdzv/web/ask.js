// Requests to the server, with the user's token if one is needed.

const KEY = "rdzv-token";
const TOKEN = /^[\w.~+/=-]{1,1024}$/;

let token = remembered();

/** The token lasts as long as the tab; no other site can make the browser send it. */
function remembered() {
  try {
    return sessionStorage.getItem(KEY) || "";
  } catch {
    return "";
  }
}

/** Send this token from now on; return false if it is not a token. */
export function useToken(text) {
  const given = text.trim();
  if (!TOKEN.test(given)) return false;
  token = given;
  try {
    sessionStorage.setItem(KEY, token);
  } catch {
    // Then it lasts as long as the page.
  }
  return true;
}

export const ask = (path, options = {}) =>
  fetch(path, { ...options, headers: token ? { Authorization: `Bearer ${token}` } : {} });

/** Like an EventSource, which cannot send a token; its owner reopens it. */
export class Source {
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
      const answer = await ask(path, { signal: this.closed.signal });
      if (answer.ok) await this.takeAll(answer.body.pipeThrough(new TextDecoderStream()).getReader());
    } catch {
      // Another request finds out why it ended.
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
