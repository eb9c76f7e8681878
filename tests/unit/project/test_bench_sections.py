"""How bench/sections.py makes sections of RESULTS.md, and plots, from measurements."""

import doctest
import xml.etree.ElementTree as ET
from typing import Any

import bench_path  # noqa: F401
import dashboard
import draw
import pytest
import sections
from measure import Spread
from recovery_job import PHASES

CONDITIONS = {
    "case": "conditions",
    "date": "2026-01-01",
    "command": "x.py",
    "cpus": 2,
    "load": 1.5,
    "python": "3.11",
    "torch": "2.13",
    "grpc": "1.85",
    "kernel": "6",
    "filesystem": "ext4",
}


def spread(*samples: float) -> dict[str, Any]:
    return dict(Spread.of(samples).as_json())


def recovered(contender: str, *reduced: float, lost: int = 0) -> dict[str, Any]:
    medians = {p: spread(*reduced) if reduced else None for p in PHASES if p != "noticed"}
    return {
        "bench": "recovery",
        "case": "tree",
        "nodes": 3,
        "nproc": 1,
        "contender": contender,
        "runs": len(reduced) + lost,
        "recovered": len(reduced),
        "deadline_s": 30.0,
        "phases_s": {"noticed": None, **medians},
        "to_torchrun": 0.5 if reduced else None,
        "to_best": None,
        "failed": ["does not train within 30 s"] * lost,
    }


def scaled(nodes: int, **seconds: float) -> dict[str, Any]:
    traffic = {"up": 2.0, "down": 3.0, "up_bytes": 150.0, "down_bytes": 200.0}
    return {
        "bench": "scale",
        "case": "rdzvd",
        "nodes": nodes,
        "seconds": {act: spread(s) for act, s in seconds.items()},
        "traffic": {"gather": traffic, "form": traffic},
        "steady_cpu": 0.02,
        "bytes_per_node": 65_000,
        "disturbed": 0,
        "failed": [],
    }


def peer(nodes: int, form: float | None) -> dict[str, Any]:
    return {
        "bench": "scale",
        "case": "c10d",
        "nodes": nodes,
        "seconds": {} if form is None else {"gather": spread(1.0), "form": spread(form)},
        "failed": [] if form is not None else ["no answer within 90 s"],
    }


@pytest.mark.slow
@pytest.mark.parametrize("module", [draw, sections])
def test_the_examples_hold(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]


def test_a_spread_has_its_p90() -> None:
    assert Spread.of(range(1, 21)).p90 == 18
    assert Spread.of([1.0, 5.0]).p90 == 5.0


# ------------------------------------------------------------------ sections


def test_what_did_not_recover_is_in_the_section() -> None:
    section = sections.recovery_section([CONDITIONS, recovered("torchrun", lost=2)])
    assert "| 0 of 2 |" in section
    assert "none within 30 s" in section
    assert "**2026-01-01**, `x.py`: 2 CPUs, load 1.5" in section


def test_a_busy_machine_is_told_of() -> None:
    assert "busy" in sections.conditions({**CONDITIONS, "load": 1.5})
    assert "busy" not in sections.conditions({**CONDITIONS, "load": 0.5})


def test_medians_spread_and_ratio_are_in_the_section() -> None:
    section = sections.recovery_section([recovered("rdzvrun", 2.0, 4.0, 3.0)])
    assert "| 3 of 3 | 3 | - | 3 | 3 |" in section
    head, rule, row = (line for line in section.splitlines() if line.startswith("|"))
    assert head.count("|") == rule.count("|") == row.count("|")
    assert "| 2 / 4 / 4 | x0.5 | - |" in section


def test_a_peer_that_was_not_complete_is_told() -> None:
    section = sections.scale_section(
        [scaled(16, gather=0.1, form=0.01), peer(16, 1.0), peer(64, None)]
    )
    assert "| 16 | 1 | 1 | 0 | x0.01 |" in section
    assert "| 64 | - | - | 1 | - |" in section


def test_traffic_is_that_of_both_acts_before_the_first_round() -> None:
    section = sections.scale_section([scaled(1000, gather=0.1, form=0.01)])
    assert "| 4.0 up, 6.0 down | 300.0 up, 400.0 down |" in section
    assert "| 1,000 |" in section


def test_a_failed_size_says_why() -> None:
    row = {**scaled(16, gather=0.1), "traffic": {}, "failed": ["waited 300 s"], "disturbed": 3}
    section = sections.scale_section([row])
    assert "failed: waited 300 s" in section
    assert "16 (3 disturbed)" in section


def test_only_what_is_between_the_marks_is_renewed() -> None:
    text = "before\n<!-- scale begins -->\nold\n<!-- scale ends -->\nafter\n"
    assert sections.renewed(text, "scale", "new") == text.replace("old", "new")


@pytest.mark.parametrize("text", ["", "<!-- a begins -->", "<!-- a ends --><!-- a begins -->"])
def test_a_document_without_marks_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="needs the marks"):
        sections.renewed(text, "a", "new")


# ------------------------------------------------------------------ plots


def texts(svg: str) -> list[str]:
    """Return the texts of a drawing, which must be well formed."""
    return [each.text or "" for each in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_bars_show_each_contender_and_what_did_not_recover() -> None:
    rows = [CONDITIONS, recovered("rdzvrun", 2.0), recovered("torchrun", lost=1)]
    svg = sections.recovery_plot(rows)
    assert "tree, 3 x 1: rdzvrun" in texts(svg)
    assert "1 of 1 not within 30 s" in texts(svg)
    assert svg.count("stroke-dasharray") == 1


def test_lines_show_both_and_where_the_peer_was_not_complete() -> None:
    rows = [scaled(16, form=0.01), scaled(1000, form=0.4), peer(16, 1.0), peer(256, None)]
    words = texts(sections.scale_plot([CONDITIONS, *rows]))
    assert {"rdzvd: form", "c10d: form", "×"} <= set(words)
    assert "rdzvd: server back" not in words


def test_panels_share_an_axis_and_name_what_they_show() -> None:
    seated = draw.Steps("seated", ((0.0, 3.0), (10.0, 0.0), (12.0, 2.0), (20.0, 2.0)))
    least = draw.Steps("min", ((0.0, 2.0), (20.0, 2.0)), bound=True)
    pile = draw.Pile(12.0, (("stop", 1.5), ("form", 0.25)))
    drawn = (draw.Panel("Nodes", (seated, least)), draw.Panel("Recovery", piles=(pile,)))
    svg = draw.panels("all", "seconds", 20.0, drawn, [(10.0, "it <dies>")])
    words = texts(svg)
    assert {"Nodes", "Recovery", "seated", "min", "stop", "form", "it <dies>", "seconds"} <= {
        *words
    }
    assert words.count("20") == 1, "one axis for all"
    assert words.count("3") == 1 and "2.5" not in words, "what is counted has no halves"
    with pytest.raises(ValueError, match="Nodes: there is nothing to draw"):
        draw.panels("all", "seconds", 20.0, [draw.Panel("Nodes")])


def test_a_recovery_is_read_from_what_sum_and_count_grew_by() -> None:
    sums = {
        "stop": [(0.0, 0.0), (1.0, 2.5), (2.0, 4.0)],
        "form": [(0.0, 0.0), (1.0, 0.0), (2.0, 0.5)],
    }
    counts = {
        "stop": [(0.0, 0.0), (1.0, 1.0), (2.0, 2.0)],
        "form": [(0.0, 0.0), (1.0, 0.0), (2.0, 1.0)],
    }
    assert dashboard.recoveries(sums, counts) == [
        draw.Pile(2.0, (("stop", 2.5), ("form", 0.5))),
        draw.Pile(2.0, (("stop", 1.5),)),
    ]
    assert dashboard.ends({"lost": counts["form"], "failure": counts["stop"]}) == [
        draw.Pile(1.0, (("failure", 1.0),)),
        draw.Pile(2.0, (("failure", 1.0), ("lost", 1.0))),
    ]


def test_names_are_escaped() -> None:
    assert "a < b" in texts(draw.bars("a < b", "s", ("p",), [draw.Bar("n", (1.0,))]))


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        draw.lines("empty", "x", "y", [draw.Line("a", ())])
    with pytest.raises(ValueError, match="nothing to draw"):
        draw.bars("empty", "x", (), [])
