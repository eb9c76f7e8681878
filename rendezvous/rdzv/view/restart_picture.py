"""The last restarts of a run as a picture: nodes down, time across, and each in words, too.

It is an SVG without scripts and styles, which is as wide as there is room and can be read at the
width of a phone. All text in it is escaped, because names and messages come from outside.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import accumulate, pairwise
from statistics import median

from rdzv.core.events import WorkerStart
from rdzv.core.words import counted, duration, ranks_text
from rdzv.view.answers import Event, JobStatus
from rdzv.view.history import Place
from rdzv.view.life import Round, Run, name_present, runs_of
from rdzv.view.sentences import failure, one_line, started

LAST = 4
"""The number of restarts that are drawn."""
ROWS = 12
"""The number of nodes that are drawn, those first that failed, were replaced or were late."""
LATE_MS = 1_000
"""A node is late if it stops last, after more than this, and after twice the median."""

_LEFT = 31.0
"""The width of the names, in percent."""
_LABEL = 15
"""The length of a row's label in characters."""
_ROW, _HEAD = 22, 24
_LEAST = (0.2, 0.06, 0.25)
"""The least shares of a panel for its three parts: stopping, forming, starting."""

STOPPING, KEPT, NEW, BAD = "#c9702a", "#2f9e5b", "#7a6be0", "#d1495b"
"""Colors that can be seen on white and on black; each has a shape of its own, too."""

_Restart = tuple[Round, Round | None]
"""A round that ended, and the next one if there is one yet."""


def restarts(run: Run) -> list[_Restart]:
    """Return the last restarts of a run, oldest first."""
    ended: list[_Restart] = [pair for pair in pairwise(run.rounds) if pair[0].ended_ms is not None]
    if run.round is not None and run.round.ended_ms is not None and run.ended_ms is None:
        ended.append((run.round, None))
    return ended[-LAST:]


def of_run(past: Iterable[Event], uid: str, status: JobStatus, now_ms: int) -> str:
    """Draw the last restarts of the run with this uid."""
    found = next((run for run in runs_of(past) if run.run == uid), Run(uid, now_ms))
    name_present(found, status)
    return picture(found, now_ms)


def picture(run: Run, now_ms: int) -> str:
    """Draw the last restarts, or say that there are none."""
    found = restarts(run)
    words = [_in_words(before, after, now_ms) for before, after in found]
    title = f"The last {counted(len(found), 'restart')}: nodes down, time across"
    rows = _rows(found)
    high = _HEAD + _ROW * (len(rows) + 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="100%" height="{high + 48}" '
        f'font-size="12" fill="currentColor"><title>{title}</title>'
        f"<desc>{escape(' '.join(words) or 'None.')}</desc>"
    ]
    if not found:
        return "".join([*parts, _text(0, 16, "No restart in this run."), "</svg>"])
    places = _places(found)
    parts.append(_text(0, 14, "RANK, node", opacity="0.75"))
    for number, node in enumerate(rows):
        parts.append(_label(node, places.get(node), _HEAD + _ROW * number + 15))
    more = len(_nodes(found) - {*rows}) + max(r.more for pair in found for r in pair if r)
    if more:
        parts.append(_text(0, high - 7, f"{counted(more, 'more node')}", opacity="0.75"))
    wide = (100 - _LEFT) / len(found)
    for number, (before, after) in enumerate(found):
        panel = _Panel(before, after, now_ms, _LEFT + wide * number, wide - 2)
        parts += [panel.frame(high), f"<title>{escape(words[number])}</title>"]
        for at, node in enumerate(rows):
            parts += panel.row(node, places.get(node), _HEAD + _ROW * at)
        parts.append("</g>")
    return "".join([*parts, *_key(high + 14), "</svg>"])


def late_node(before: Round) -> str | None:
    """Return the node that kept the others waiting when the round ended, if one did."""
    until_ms = before.live_until_ms
    stops = {n: ms for n, ms in before.stopped_ms.items() if n not in before.gone}
    if until_ms is None or len(stops) < 2:
        return None
    last = max(stops, key=lambda node: stops[node])
    others = median(ms - until_ms for node, ms in stops.items() if node != last)
    took_ms = stops[last] - until_ms
    return last if took_ms >= max(LATE_MS, 2 * others) else None


def ways(node: str, place: Place | None, before: Round, after: Round) -> list[str]:
    """Return how each of a node's workers got into a round; empty where that is not known."""
    done, starts = after.completed, after.starts
    count = 1 if place is None else place.local_world_size
    if done is None:
        return [""] * count
    how = {one.rank: one.how for one in starts.new} if starts else {}
    new = how.keys() | {rank for part in done.not_kept for rank in part.ranks}
    ranks = range(place.rank_first, place.rank_first + count) if place else range(0)
    if node not in before.nodes and not before.more:
        new |= {*ranks}
    told = not done.kept or len(new) >= done.world_size - done.kept
    kinds = [kind for kind in WorkerStart if starts and getattr(starts, kind)]
    rest = "" if not told else WorkerStart.KEPT if done.kept else "new"
    if not done.kept and len(kinds) == 1:
        rest = kinds[0]
    return [how.get(rank, "new" if rank in new and done.kept else rest) for rank in ranks] or [rest]


class _Panel:
    """One restart: its part of the picture, and where each moment is in it."""

    def __init__(
        self, before: Round, after: Round | None, now_ms: int, left: float, wide: float
    ) -> None:
        self._before, self._after = before, after
        self._left, self._wide = left, wide
        self._times = _times(before, after, now_ms)
        spans = [until - since for since, until in pairwise(self._times)]
        widths = [
            max(ms, least * max(sum(spans), 1)) for ms, least in zip(spans, _LEAST, strict=True)
        ]
        self._edges = [left + wide * part / sum(widths) for part in accumulate(widths, initial=0)]
        self._late = late_node(before)

    def _x(self, at_ms: int) -> float:
        for number, (since, until) in enumerate(pairwise(self._times)):
            if since < until and at_ms <= until:
                part = self._edges[number + 1] - self._edges[number]
                return self._edges[number] + part * max(at_ms - since, 0) / (until - since)
        return self._edges[-1]

    def frame(self, high: int) -> str:
        """Open the group, with what the panel is about above and how long it took below."""
        head = "now" if self._after is None else f"round {self._after.number}"
        took = duration(self._times[-1] - self._times[0])
        return (
            "<g>"
            + _text(self._left, 14, head, **{"font-weight": "600"})
            + _text(self._left, high - 7, took, opacity="0.75")
            + _rect(self._left, _HEAD, self._wide, high - _HEAD - _ROW, opacity="0.06")
        )

    def row(self, node: str, place: Place | None, y: int) -> Iterator[str]:
        before, after, begin_ms = self._before, self._after, self._times[0]
        failed = [one for one in before.failed if one.node_id == node]
        gone = before.gone.get(node)
        if node in before.nodes and not gone:
            until_ms = before.stopped_ms.get(node, self._times[1])
            x, end = self._x(begin_ms), self._x(until_ms)
            yield _rect(x, y + 9, max(end - x, 0.4), 4, fill=STOPPING)
            if node == self._late:
                said = f"{node} stopped last, after {duration(until_ms - begin_ms)}"
                yield _text(max(end - 6, x), y + 8, "late", said, fill=STOPPING, **_SMALL)
        if failed or gone:
            said = "; ".join(map(failure, failed)) or f"{node} {gone}"
            yield _text(self._left, y + 17, "✕", said, fill=BAD, **_LARGE)
        if after is None or node not in after.nodes:
            return
        x, end = self._edges[2:]
        if node not in before.nodes and not before.more:
            yield _text(x - 3, y + 16, "◆", f"{node} is new in round {after.number}", fill=NEW)
        hows = ways(node, place, before, after)
        tall = 16 / len(hows)
        for number, how in enumerate(hows):
            rank = "" if place is None else f"RANK {place.rank_first + number} on "
            said = f"{rank}{node}: {how or 'kept or new'}"
            at = (x, y + 3 + tall * number, end - x, max(tall - 1, 1))
            if how == WorkerStart.KEPT:
                yield _rect(*at, said, fill=KEPT)
            else:
                dashes = {} if how else {"stroke-dasharray": "3 3"}
                yield _rect(*at, said, fill="none", stroke=NEW, **{"stroke-width": "1.5"}, **dashes)


def _times(before: Round, after: Round | None, now_ms: int) -> tuple[int, int, int, int]:
    """Return when a round ended, all had stopped, the next one was complete, and it trained."""
    ended_ms = before.live_until_ms or before.at_ms
    at_ms = now_ms if after is None else after.at_ms
    settled_ms = before.settled_ms or at_ms
    first_ms = at_ms if after is None else after.first_ms or at_ms
    times = [ended_ms, settled_ms, at_ms, first_ms]
    # The clock may have been set back meanwhile.
    return tuple(max(times[: n + 1]) for n in range(4))  # type: ignore[return-value]


def _in_words(before: Round, after: Round | None, now_ms: int) -> str:
    ended_ms, settled_ms, at_ms, first_ms = _times(before, after, now_ms)
    said = [f"Round {before.number} ended ({before.charge or before.cause})"]
    said += [failure(one) for one in before.failed]
    said += [f"{node} {how}" for node, how in before.gone.items()]
    if (last := late_node(before)) is not None:
        said.append(f"{last} stopped last, after {duration(before.stopped_ms[last] - ended_ms)}")
    said += [f"RANK {one.rank} on {one.node_id} was slow before" for one in before.slow]
    if after is None:
        return one_line(f"{'; '.join(said)}; no round is complete since.")
    new = [node for node in after.nodes if node not in before.nodes and not before.more]
    said += [f"{node} is new" for node in new]
    if after.starts is not None:
        said.append(f"workers of round {after.number}: {started(after.starts)}")
    stages = f"stopped after {duration(settled_ms - ended_ms)}"
    stages += f", complete {duration(at_ms - settled_ms)} later"
    if after.first_ms is not None:
        stages += f", first step {duration(first_ms - at_ms)} after that"
    return one_line(f"{'; '.join(said)}; {stages}.")


# ------------------------------------------------------------------------------------ rows


def _nodes(found: Iterable[_Restart]) -> set[str]:
    return {node for pair in found for r in pair if r for node in r.nodes}


def _places(found: Iterable[_Restart]) -> Mapping[str, Place]:
    rounds = [r for pair in found for r in pair if r and r.completed]
    return {p.node_id: p for r in rounds if r.completed for p in r.completed.participants}


def _rows(found: Sequence[_Restart]) -> list[str]:
    """Return the nodes to draw, by RANK; if there are too many, those with something to say."""
    named, places = _nodes(found), _places(found)
    loud: dict[str, None] = {}
    for before, after in reversed(found):
        loud.update(dict.fromkeys(one.node_id for one in before.failed))
        loud.update(dict.fromkeys(before.gone))
        loud.update(dict.fromkeys([last] if (last := late_node(before)) else []))
        if after is not None:
            loud.update(dict.fromkeys(n for n in after.nodes if n not in before.nodes))
            loud.update(
                dict.fromkeys(one.node_id for one in after.starts.new) if after.starts else {}
            )

    def by_rank(node: str) -> tuple[int, str]:
        return (places[node].rank_first if node in places else 1 << 31, node)

    quiet = sorted(named - loud.keys(), key=by_rank)
    return sorted([*(node for node in loud if node in named), *quiet][:ROWS], key=by_rank)


def _label(node: str, place: Place | None, y: int) -> str:
    ranks, room = "", _LABEL
    if place is not None:
        ranks = ranks_text(range(place.rank_first, place.rank_first + place.local_world_size))
        room = max(_LABEL - len(ranks) - 1, 4)
    short = node if len(node) <= room else f"…{node[1 - room :]}"
    said = f"{node}, RANK {ranks}" if ranks else node
    return _text(0, y, f"{ranks} {short}".strip(), said)


def _key(y: int) -> Iterator[str]:
    """Yield what the shapes mean, in two lines of three."""
    items = (
        ("✕", BAD, "failed or lost"),
        ("━", STOPPING, "stopping"),
        ("■", KEPT, "kept"),
        ("□", NEW, "new process"),
        ("◆", NEW, "new node"),
    )
    for number, (shape, colour, text) in enumerate(items):
        x, line = number % 3 * 34.0, y + 18 * (number // 3)
        yield f'<g aria-hidden="true">{_text(x, line, shape, fill=colour)}'
        yield f'<text x="{x}%" dx="16" y="{line}" opacity="0.75">{text}</text></g>'


# ------------------------------------------------------------------------------------ shapes

_SMALL = {"font-size": "10"}
_LARGE = {"font-size": "17", "font-weight": "700"}


def _text(x: float, y: float, text: str, title: str = "", **more: str) -> str:
    return _shape("text", {"x": f"{x:.2f}%", "y": f"{y:g}", **more}, escape(one_line(text)), title)


def _rect(x: float, y: float, wide: float, high: float, title: str = "", /, **more: str) -> str:
    at = {"x": f"{x:.2f}%", "y": f"{y:g}", "width": f"{wide:.2f}%", "height": f"{high:g}"}
    return _shape("rect", {**at, **more}, "", title)


def _shape(tag: str, attributes: Mapping[str, str], text: str, title: str) -> str:
    told = "".join(f' {name}="{value}"' for name, value in attributes.items())
    tip = f"<title>{escape(one_line(title))}</title>" if title else ""
    return f"<{tag}{told}>{tip}{text}</{tag}>"
