// Which view is shown, what the link to the server is like, and the theme.

import { useToken } from "./ask.js";
import { put, tell, tick } from "./dom.js";
import { FleetView } from "./fleet.js";
import { JobView } from "./job.js";
import { NodeView } from "./node.js";
import { ReportView } from "./report.js";
import { Stream } from "./stream.js";
import { duration } from "./words.js";

const $ = (id) => document.getElementById(id);
const main = $("main");

let stream = null;
let view = null;
let drawing = false;
const fresh = new Set();

const VIEWS = {
  jobs: () => new FleetView("jobs", say),
  nodes: () => new FleetView("nodes", say),
  report: () => new ReportView(),
  job: (name) => new JobView(name, say),
  node: (name) => new NodeView(name),
};

/** Read where the page is: #/, #/nodes, #/report, #/job/NAME, #/node/NAME. */
function route() {
  const [, kind, name] = location.hash.split("/");
  try {
    if (kind === "job" && name) return { kind, name: decodeURIComponent(name) };
    if (kind === "node" && name) return { kind, name: decodeURIComponent(name) };
  } catch {
    // Half an escape: there is no such name.
  }
  return { kind: kind === "nodes" || kind === "report" ? kind : "jobs", name: null };
}

function show(first) {
  const { kind, name } = route();
  const job = kind === "job" ? name : null;
  if (!stream || stream.job !== job) {
    stream?.close();
    stream = new Stream(job, note);
  }
  view?.close?.();
  view = VIEWS[kind](name);
  main.replaceChildren(view.element);
  for (const link of document.querySelectorAll("nav a"))
    if (link.dataset.view === kind) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  if (!first) {
    main.focus({ preventScroll: true });
    scrollTo(0, 0);
  }
  note("all");
}

/** Something has come: draw once, with the next frame, all that has come by then. */
function note(what) {
  fresh.add(what);
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    const whats = new Set(fresh);
    fresh.clear();
    drawLink();
    view.draw(stream, whats);
    document.title = view.title(stream);
  });
}

// ------------------------------------------------------------------ the link

const LINKS = { opening: "connecting", live: "live", lost: "reconnecting", paused: "paused" };
const linkText = () => (stream.link === "lost" && stream.unknown ? "waiting" : LINKS[stream.link]);

function drawLink() {
  const link = $("link");
  if (link.dataset.link !== stream.link) link.dataset.link = stream.link;
  put($("link-text"), linkText());
  const banner = $("banner");
  // Where the view itself says that there is no such job, nothing is stale.
  const stale = stream.link === "lost" && (stream.ready || (stream.error && !stream.unknown));
  document.body.classList.toggle("stale", Boolean(stale));
  banner.hidden = !stale;
  $("login").hidden = !(stale && stream.locked);
  if (!stale) return;
  if (stream.locked) {
    tell(banner, `${stream.error.message}.`);
    return;
  }
  const why = stream.error?.message || "the connection is lost";
  const since = stream.ready && !stream.unknown ? ` What is shown is ${duration(Date.now() - stream.heard)} old.` : "";
  const leader = stream.error?.leader ? " Ask that one." : "";
  tell(banner, stream.unknown ? `${why}.` : `Not live: ${why}.${leader}${since} Connecting again.`);
}

$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  const field = $("token");
  const good = useToken(field.value);
  field.setCustomValidity(good ? "" : "This is no token.");
  field.reportValidity();
  if (!good) return;
  field.value = "";
  stream.open();
});
$("token").addEventListener("input", () => $("token").setCustomValidity(""));

// ------------------------------------------------------------------ for those who listen

let saying = [];

/** Have a screen reader say what has changed; what comes at once is said at once. */
function say(text) {
  saying.push(text);
  if (saying.length > 1) return;
  setTimeout(() => {
    const more = saying.length > 3 ? ` And ${saying.length - 3} more changes.` : "";
    put($("said"), saying.slice(0, 3).join(". ") + more);
    saying = [];
  }, 1000);
}

// ------------------------------------------------------------------ the theme

const THEMES = ["auto", "light", "dark"];

function theme(wanted) {
  const next = THEMES.includes(wanted) ? wanted : "auto";
  if (next === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  put($("theme"), `Theme: ${next}`);
  return next;
}

function remembered() {
  try {
    return localStorage.getItem("theme");
  } catch {
    return null;
  }
}

let chosen = theme(remembered());
$("theme").addEventListener("click", () => {
  chosen = theme(THEMES[(THEMES.indexOf(chosen) + 1) % THEMES.length]);
  try {
    localStorage.setItem("theme", chosen);
  } catch {
    // It lasts as long as the page, then.
  }
});

document.querySelector(".skip").addEventListener("click", (event) => {
  // The address says which view it is, and is not to change.
  event.preventDefault();
  main.focus();
});

/** Warn where everyone who reaches the server may do everything; of this page, that is to be said. */
async function warn() {
  const { servers } = await (await fetch("/api/v1/servers")).json();
  const exposed = servers.find((server) => server.insecure);
  $("insecure").hidden = !exposed;
  if (exposed) put($("insecure"), `Insecure: ${exposed.insecure}; everyone who reaches ${exposed.address} may run and end jobs.`);
}

addEventListener("hashchange", () => show(false));
setInterval(() => {
  if (document.hidden) return;
  for (const element of document.querySelectorAll("time.age")) tick(element);
  if (stream.link === "lost") drawLink();
  view.tick?.(stream);
}, 1000);
show(true);
// Without an answer the link says so.
warn().catch(() => {});
