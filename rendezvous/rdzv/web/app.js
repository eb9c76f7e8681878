// Selects the view, and shows the connection state and the theme.

import { put, tell, tick } from "./dom.js";
import { FleetView } from "./fleet.js";
import { JobView } from "./job.js";
import { NodeView } from "./node.js";
import { ReportView } from "./report.js";
import { requestServers, useToken } from "./requests.js";
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

/** Parse the page's location: #/, #/nodes, #/report, #/job/NAME or #/node/NAME. */
function route() {
  const [, kind, name] = location.hash.split("/");
  try {
    if (kind === "job" && name) return { kind, name: decodeURIComponent(name) };
    if (kind === "node" && name) return { kind, name: decodeURIComponent(name) };
  } catch {
    // The escape sequence is incomplete, so there is no such name.
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

/** Draw all updates that arrive before the next frame together. */
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

// ------------------------------------------------------------------ the connection

const LINKS = { opening: "connecting", live: "live", lost: "reconnecting", paused: "paused" };
const linkText = () => (stream.link === "lost" && stream.unknown ? "waiting" : LINKS[stream.link]);

function drawLink() {
  const link = $("link");
  if (link.dataset.link !== stream.link) link.dataset.link = stream.link;
  put($("link-text"), linkText());
  const banner = $("banner");
  // If the view already shows that there is no such job, nothing is stale.
  const stale = stream.link === "lost" && (stream.ready || (stream.error && !stream.unknown));
  document.body.classList.toggle("stale", Boolean(stale));
  banner.hidden = !stale;
  $("login").hidden = !(stale && stream.locked);
  linkOther(stale ? stream.error : null);
  if (!stale) return;
  if (stream.locked) {
    tell($("trouble"), `${stream.error.message}.`);
    return;
  }
  if (stream.error?.leader) {
    tell($("trouble"), `Not live: ${stream.error.message}.`);
    return;
  }
  const why = stream.error?.message || "the connection is lost";
  const since = stream.ready && !stream.unknown ? ` What is shown is ${duration(Date.now() - stream.heard)} old.` : "";
  tell($("trouble"), stream.unknown ? `${why}.` : `Not live: ${why}.${since} Connecting again.`);
}

let leader = { address: null, page: null };
let others = []; // The pages of the other servers, for when this one is gone.

/** Find the page of the server that leads, if this one does not. */
async function findLeader(address) {
  if (address === leader.address) return;
  const found = (leader = { address, page: null });
  if (address === null) return;
  try {
    const { servers } = await (await requestServers()).json();
    const page = servers.find((server) => server.leads)?.page;
    // Behind a tunnel, all servers may seem to be this one.
    if (page && new URL(page).origin !== location.origin) found.page = page;
    if (found === leader) drawLink();
  } catch {
    if (found === leader) leader = { address: null, page: null }; // Ask again at the next attempt to connect.
  }
}

/** Link the same view on the server that leads or, if this one does not answer, on another one. */
function linkOther(error) {
  findLeader(error?.leader || null);
  const page = leader.page || (error && !error.code && others[0]) || null;
  const link = $("leader");
  link.hidden = page === null;
  if (page === null) return;
  link.href = `${page}/${location.hash}`;
  put(link, leader.page ? "Open the page of the server that leads" : "Open the page of another server");
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

// ------------------------------------------------------------------ screen readers

let saying = [];

/** Announce changes to a screen reader, combining those that occur together. */
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
    // In that case it lasts as long as the page.
  }
});

document.querySelector(".skip").addEventListener("click", (event) => {
  // The address identifies the view, and must not change.
  event.preventDefault();
  main.focus();
});

/** Learn of the other servers, and warn if anyone who can reach this one can do anything. */
async function warn() {
  const { servers } = await (await requestServers()).json();
  others = servers.map((server) => server.page).filter((page) => page && new URL(page).origin !== location.origin);
  const exposed = servers.find((server) => server.insecure);
  $("insecure").hidden = !exposed;
  if (exposed) put($("insecure"), `Insecure: ${exposed.insecure}; anyone who can reach ${exposed.address} can run and end jobs.`);
}

addEventListener("hashchange", () => show(false));
setInterval(() => {
  if (document.hidden) return;
  for (const element of document.querySelectorAll("time.age")) tick(element);
  if (stream.link === "lost") drawLink();
  view.tick?.(stream);
}, 1000);
show(true);
// The connection state shows that there was no response.
warn().catch(() => {});
