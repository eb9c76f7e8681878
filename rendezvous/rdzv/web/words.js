// Numbers and times in words, as in rdzvctl.

/** Format how long something has lasted: "0 s", "12 s", "9 min 48 s", "2 h 1 min", "3 d 4 h". */
export function duration(ms) {
  if (!(ms > 0)) return "0 s";
  const seconds = Math.floor(ms / 1000);
  if (seconds < 60) return `${seconds} s`;
  const [minutes, hours, days] = [Math.floor(seconds / 60), Math.floor(seconds / 3600), Math.floor(seconds / 86400)];
  if (minutes < 60) return `${minutes} min ${seconds % 60} s`;
  if (hours < 24) return `${hours} h ${minutes % 60} min`;
  return `${days} d ${hours % 24} h`;
}

/** Format how long something took: "0.5 s", "12 s". */
export const took = (ms) => (ms < 10_000 ? `${(ms / 1000).toFixed(1)} s` : duration(1000 * Math.round(ms / 1000)));

/** Return a reason's headline, or the why of one of its items, as it reads after `more` ms. */
export function reasonLine(text, { then, left_ms }, more) {
  if (!then) return text;
  return left_ms === null ? `${text}; ${then}` : `${text}; ${then} ${duration(left_ms - more)}`;
}

/** Return an item of a reason with its subject: `n3 (away): its stream ended; its seat is kept for 12 s`. */
export function itemLine(item, more) {
  const subject = item.who && item.state ? `${item.who} (${item.state})` : item.who + item.state;
  const why = reasonLine(item.cause, item, more);
  return subject ? `${subject}: ${why}` : why;
}

/** Return a node's state or, if nothing is placed on it, the reason in one word; and for how long it has been so. */
export function nodeMark(node) {
  if (node.state !== "connected") return [node.state, node.state_age_ms];
  if (node.unhealthy) return ["unhealthy", node.unhealthy_age_ms];
  if (node.quarantine) return ["quarantined", node.quarantine_age_ms];
  if (node.drain) return [node.drain, node.drain_age_ms];
  return node.cordoned ? ["cordoned", node.cordon_age_ms] : [node.state, node.state_age_ms];
}

/** Return why nothing is placed on a node, one line for each reason, as it reads now. */
export function nodeNotes(node) {
  const left = (ms) => (ms ? `, ${duration(ms - (Date.now() - node.at))} left` : "");
  const why = (reason) => reason || "no reason was given";
  const notes = [];
  if (node.unhealthy) notes.push(`unhealthy: ${node.unhealthy}`);
  if (node.quarantine) notes.push(`quarantined: ${node.quarantine}${left(node.quarantine_left_ms)}`);
  if (node.drain) notes.push(`${node.drain}: ${why(node.drain_reason)}${left(node.drain_left_ms)}`);
  if (node.cordoned && (!node.drain || node.cordoned_besides)) notes.push(`cordoned: ${why(node.cordon_reason)}`);
  return notes;
}

/** Format node or GPU hours as "0.25", "12.5" or "1,200", or a dash if unknown. */
export function hours(ms) {
  if (ms === null) return "–";
  const found = ms / 3_600_000;
  return Math.abs(found) < 100 ? found.toPrecision(3) : Math.round(found).toLocaleString("en");
}

/** Describe how slow a straggler is. */
export function slowness(one) {
  return one.late_ms === null ? `${one.step_s.toPrecision(3)} s a step, the median ${one.median_s.toPrecision(3)} s` : `the others wait for it at least ${Math.round(100 * one.wait_share)}% of the time`;
}

export const counted = (count, what) => `${count.toLocaleString("en")} ${what}${count === 1 ? "" : "s"}`;
export const orNone = (value, none = "–") => (value === null || value === undefined || value === "" ? none : String(value));
export const clock = (ms) => new Date(ms).toLocaleTimeString([], { hour12: false });
export const moment = (ms) => new Date(ms).toLocaleString([], { hour12: false });

export function bounds(job) {
  if (job.min_nodes === null || job.max_nodes === null) return "–";
  return job.min_nodes === job.max_nodes ? String(job.max_nodes) : `${job.min_nodes}:${job.max_nodes}`;
}

export function ranks(first, count) {
  if (first === null || !count) return "";
  return count > 1 ? `${first}–${first + count - 1}` : String(first);
}

/** Format RANKs in short form, "0,2-4,8", with only the first ranges if there are very many. */
export function rankList(all, most = 16) {
  const runs = [];
  for (const rank of all) {
    const last = runs[runs.length - 1];
    if (last && rank === last[1] + 1) last[1] = rank;
    else runs.push([rank, rank]);
  }
  const told = runs.slice(0, most).map(([first, last]) => (first === last ? String(first) : `${first}-${last}`));
  const more = runs.slice(most).reduce((sum, [first, last]) => sum + last - first + 1, 0);
  return told.join(",") + (more ? ` and ${more} more` : "");
}

export function bytes(count) {
  if (!count) return "–";
  const gib = count / 2 ** 30;
  return gib >= 1 ? `${gib.toFixed(gib < 10 ? 1 : 0)} GiB` : `${Math.round(count / 2 ** 20)} MiB`;
}
